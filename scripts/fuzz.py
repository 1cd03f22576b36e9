"""Runs the properties of generated and damaged input for longer than the tests do, with other examples each time.

    python scripts/fuzz.py --examples 2000 --seed 1 --out benchmarks/fuzz.json                     10 minutes

The properties are tests: request bodies of the reward service, recipe files, manifests of checkpoints. The first one
that fails ends the script with its smallest example. `damaged_media.py` does this for images, videos and data files.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import machine  # noqa: E402

TESTS = (
    "unirl-reward-service/tests/test_wire_fuzz.py",
    "tests/config/test_recipe_fuzz.py",
    "tests/train/test_manifest_fuzz.py",
)


def properties() -> dict[str, Callable[[], None]]:
    """Returns the properties by name."""
    found: dict[str, Callable[[], None]] = {}
    for path in map(Path, TESTS):
        spec = importlib.util.spec_from_file_location(path.stem, ROOT / path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= {name: each for name, each in vars(module).items() if name.startswith("test_")}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=2000, help="examples of each property")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="the JSON file for the figures")
    options = parser.parse_args(arguments)
    os.environ |= {"FUZZ_EXAMPLES": str(options.examples), "FUZZ_SEED": str(options.seed)}
    rows = []
    for name, each in properties().items():
        begun = time.monotonic()
        each()
        rows.append({"property": name, "examples": options.examples, "seconds": round(time.monotonic() - begun, 1)})
        print(rows[-1], flush=True)
    if options.out:
        content = {"seed": options.seed, "failures": 0, "machine": machine(), "properties": rows}
        Path(options.out).write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
