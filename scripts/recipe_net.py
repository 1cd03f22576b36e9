"""Records what every recipe does at toy scale, and compares a changed checkout with that record, bit for bit.

    python scripts/recipe_net.py record /tmp/before.json                      # every recipe: about 10 minutes
    python scripts/recipe_net.py compare /tmp/before.json                     # after a change: lists every difference
    python scripts/recipe_net.py compare /tmp/before.json 'diffusion/sd3_*'   # only some recipes
    python scripts/recipe_net.py compare /tmp/before.json --after /tmp/after.json        # two records, without a run

A record holds, for two steps of each recipe: the metrics without times and memory, and the SHA-256 of the trained
weights, optimizer state, samples, evaluation scores and exported files. Layout recipes also run on Ray workers.
Records of two machines, or of two versions of torch, are not comparable. `record` keeps what the file has already, so
that it can be made piece by piece.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS = 2
VOLATILE = ("time/", "mem/", "throughput/", "queue/")
"""Prefixes of metrics that differ from run to run, because they measure the machine."""
HASHED = (
    "eval/step-*/scores.json",
    "checkpoints/checkpoint-[0-9]*/policy/*.safetensors",
    "eval/step-*/*.webp",
    "samples/step-*/*.webp",
    "export/checkpoint-*/**/*",
)
PRELOADED = ("torch", "diffusers", "transformers", "peft", "unirl.cli.main", "unirl.cli.train")
RAY = ("runtime=ray",)

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A recipe with its overrides in addition to the toy scale."""

    recipe: str
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.recipe, *self.overrides))


def cases(patterns: Sequence[str]) -> list[Case]:
    """Every recipe in the driver's process; layout recipes, and one recipe per domain on two ranks, also on Ray."""
    files = sorted(path for path in (ROOT / "examples").glob("*/*.yaml") if not path.name.endswith(".card.yaml"))
    recipes = [f"{path.parent.name}/{path.stem}" for path in files]
    layouts = [Case(name, RAY) for name in recipes if "_replica_" in name]
    ranks = [Case(name, ("num_devices=2",)) for name in ("diffusion/sd3_trainside", "llm/quickstart", "vlm/quickstart")]
    everything = [*map(Case, recipes), *layouts, *ranks]
    return [case for case in everything if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]


def run_case(case: Case, folder: str) -> None:
    """Trains and exports in this process. The output goes to a file in `folder`."""
    from unirl.cli.main import main

    run = f"{folder}/run"
    settings = ("scale=toy", f"num_rollouts={STEPS}", "tracking.sample_steps=1", "tracking.mirrors=[]")
    with (
        open(f"{folder}/output.txt", "w") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        status = main(["train", case.recipe, *settings, *case.overrides, f"run.dir={run}"])
        Path(folder, "status").write_text(str(status))
        if status == 0:
            Path(folder, "export_status").write_text(str(main(["export", run])))


def record_of(folder: Path) -> Record:
    """The metrics and hashes of a finished run, without those that differ from run to run."""
    status = Path(folder, "status")
    if not status.exists() or status.read_text() != "0":
        return {"failed": (folder / "output.txt").read_text()[-2000:]}
    run = folder / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "export_status": (folder / "export_status").read_text(),
        "metrics": [without_volatile(row) for row in rows],
        "files": {
            str(path.relative_to(run)): content_hash(path)
            for pattern in HASHED
            for path in sorted(run.glob(pattern))
            if path.is_file()
        },
    }


def without_volatile(row: Mapping[str, float]) -> dict[str, str]:
    """The metrics of a step as exact decimal texts, so that NaN equals NaN."""
    return {key: repr(value) for key, value in row.items() if not key.startswith(VOLATILE)}


def content_hash(path: Path) -> str:
    """SHA-256 of a file. Tensors of a safetensors file are sorted by name, because their order in it may vary."""
    if path.suffix != ".safetensors":
        # The scores of a sample name the images of its prompt by their full paths.
        return hashlib.sha256(path.read_bytes().replace(str(ROOT).encode(), b"ROOT")).hexdigest()
    from safetensors import deserialize

    digest = hashlib.sha256()
    for name, tensor in sorted(deserialize(path.read_bytes()), key=lambda item: item[0]):
        digest.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode() + bytes(tensor["data"]))
    return digest.hexdigest()


def run_all(selected: Sequence[Case], forks: Any, records: dict[str, Record], file: Path | None) -> dict[str, Record]:
    """The records of the selected cases, in addition to those that are known. `file` gets all after each run."""
    for case in selected:
        if case.name in records and "failed" not in records[case.name]:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            child = forks.Process(target=run_case, args=(case, scratch))
            child.start()
            child.join()
            records[case.name] = record_of(Path(scratch))
        if file is not None:
            file.write_text(json.dumps(records, indent=1, sort_keys=True))
        print(f"{case.name}: {'failed' if 'failed' in records[case.name] else 'recorded'}", file=sys.stderr, flush=True)
    return records


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Returns one line for each value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        return [line for key in keys for line in differences(before.get(key), after.get(key), f"{path} / {key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for index, (old, new) in pairs for line in differences(old, new, f"{path}[{index}]")]
    return [] if before == after else [f"{path.removeprefix(' / ')}: {before} -> {after}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("patterns", nargs="*", default=["*"], help="recipes, as shell patterns; default: all")
    parser.add_argument("--after", type=Path, help="with compare: the record to compare with, instead of runs")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # peft writes a set of names in hash order
    # A forked child has the libraries loaded already, which saves seconds per recipe on a small machine.
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(list(PRELOADED))
    selected = cases([pattern + "*" for pattern in options.patterns])
    names = {case.name for case in selected}
    if options.action == "record":
        known = json.loads(options.file.read_text()) if options.file.exists() else {}
        records = run_all(selected, forks, known, options.file)
        return int(any("failed" in record for record in records.values()))
    if options.after is None:
        after = run_all(selected, forks, {}, None)
    else:
        after = {name: each for name, each in json.loads(options.after.read_text()).items() if name in names}
    before = {name: each for name, each in json.loads(options.file.read_text()).items() if name in after}
    lines = differences(before, after)
    print("\n".join(lines) or f"{len(after)} runs: every bit is equal")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
