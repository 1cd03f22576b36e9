"""Compares an engine with the real package of its server, and writes the result to benchmarks/engine_packages.json.

    python scripts/check_engine_package.py --engine sglang_llm --python sglang-env/bin/python
    python scripts/check_engine_package.py --engine sglang_llm --python sglang-env/bin/python --serve settings.yaml

The first form takes half a minute, and starts no server. It records the requests of the engine against a fake server,
and the Python of the environment reads each of them with the classes of the package. The second form also starts the
real server with a tiny model, once for each kind of weights that can be sent: it compares log-probs with the trainer's,
before and after updates and after a kill, and keeps the answers. `settings.yaml` has further settings of `rollout`.
What differs between engines is in the modules of CHECKS, and what they share in engine_client.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.engine_client import Exchange, Json, described

RECORD = Path(__file__).parents[1] / "benchmarks" / "engine_packages.json"
CHECKS = {
    "openai": "check_openai_package",
    "sglang": "check_diffusion_package",
    "sglang_llm": "check_llm_package",
    "sglang_llm_images": "check_image_package",
    "vllm_omni": "check_omni_package",
}
"""Engine to the script with its checks. Each has `requests_of_the_engine`, `arguments`, `inside` and `live`."""


def distinct(exchanges: Sequence[Exchange]) -> dict[str, list[Json]]:
    """The bodies of posted requests by path, without random names and with tensors described. Equal ones once."""
    bodies: dict[str, list[Json]] = {}
    for each in exchanges:
        if each.method == "POST":
            known = bodies.setdefault(each.name.removeprefix("POST ").removesuffix(" of given tokens"), [])
            masked = described(each.body)
            if masked not in known and len(known) < 3:
                known.append(masked)
    return bodies


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=CHECKS, default="sglang_llm")
    parser.add_argument("--python", help="the Python of the environment with the package")
    parser.add_argument("--serve", type=Path, help="also start the real server, with these settings of `rollout`")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    checks = importlib.import_module(f"scripts.{CHECKS[options.engine]}")
    if options.inside:
        print(json.dumps(checks.inside(json.loads(options.inside.read_text()))))
        return
    import yaml

    exchanges = [each for each in checks.requests_of_the_engine() if each.method == "POST"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requests.json"
        requests = [{"path": each.path, "body": each.body} for each in exchanges]
        file.write_text(json.dumps({"requests": requests, "arguments": checks.arguments()}))
        words = [options.python, __file__, "--engine", options.engine, "--inside", str(file)]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        answer = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    if answer.returncode:
        raise SystemExit(f"the package refuses a request:\n{answer.stderr[-3000:]}")
    records = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    record = records.get(options.engine, {}) | json.loads(answer.stdout.splitlines()[-1])
    record |= {"date": str(date.today()), "requests": distinct(exchanges)}
    if options.serve:
        record["live"] = {"date": str(date.today())} | checks.live(
            options.python, yaml.safe_load(options.serve.read_text())
        )
    RECORD.write_text(json.dumps(records | {options.engine: record}, indent=1) + "\n")
    print(f"{RECORD}: {record['requests_read']} with {record['packages']}")


if __name__ == "__main__":
    main()
