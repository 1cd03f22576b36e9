"""Measures commands that must be fast: `unirl --help` within 0.3 s, `unirl check` of any recipe within 1.5 s.

python -m benchmarks.cli_start [repeats]
"""

import json
import statistics
import subprocess
import sys
import time

from unirl.config.recipe_files import list_recipes

TARGETS_S = {"--help": 0.3, "check": 1.5}


def median_s(words: list[str], repeats: int) -> float:
    """Returns the median wall time of `unirl <words>` in seconds, with the start of the interpreter."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "unirl.cli", *words], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    commands = [["--help"], *(["check", recipe.name] for recipe in list_recipes())]
    rows = [{"command": " ".join(c), "median_s": median_s(c, repeats), "target_s": TARGETS_S[c[0]]} for c in commands]
    print(json.dumps(rows, indent=1))
    return int(any(row["median_s"] > row["target_s"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
