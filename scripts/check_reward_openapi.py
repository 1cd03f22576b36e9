"""Sends generated requests to a reward service, and compares its answers with its OpenAPI document, by schemathesis.

    python scripts/check_reward_openapi.py --examples 300                                              2 minutes

It runs every check of schemathesis but one (see LEFT_OUT) on every route, with valid and with invalid requests. The
exit status is that of schemathesis: 1 if an answer is not as the document says.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from reward_service.running import RunningService  # noqa: E402

from benchmarks.reward_throughput import SERVICE  # noqa: E402

LEFT_OUT = ("unsupported_method",)
"""Not checked: TRACE and other methods that the HTTP library answers."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=100, help="generated requests per route and phase")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with RunningService(SERVICE) as service:
        command = ["schemathesis", "run", f"{service.url}/openapi.json", "--seed", str(options.seed)]
        command += ["--max-examples", str(options.examples), "--exclude-checks", ",".join(LEFT_OUT)]
        return subprocess.run([str(Path(sys.executable).with_name(command[0])), *command[1:]]).returncode


if __name__ == "__main__":
    sys.exit(main())
