"""Times saves of a checkpoint: how long a step waits for them, with and without `checkpoint.asynchronous`.

    python benchmarks/checkpoint.py [--pairs 5] [--million 42] [--folder DIR] [--json out.json]

A pair saves the state of one network (all weights trained, AdamW, 12 bytes per parameter) twice, by `RunState.save`:
once as without `checkpoint.asynchronous`, once in the background. `blocked` is the time until `save` returns, and
`published` the time until the checkpoint is published. The first save in the background allocates its buffers and is
listed alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from workload import WORKLOADS, BareBundle

from unirl.tracking.run_directory import RunDirectory, RunIdentity
from unirl.tracking.tracker import Tracker
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.checkpoint import CheckpointStore, ResumePoint
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.manifest import read_manifest
from unirl.trainer.run_state import RunState

WIDTH = 1024
"""Rows and columns of the square matrices that are saved."""


class Saved:
    """A policy with a trained network."""

    version, track = 1, ""

    def __init__(self, backend: FSDPBackend) -> None:
        self.backend = backend


def state_of(folder: Path, backend: FSDPBackend, in_background: bool) -> RunState:
    """Returns the state of a run into `folder`."""
    run = RunDirectory(folder, RunIdentity(project="benchmarks", recipe="checkpoint"))
    return RunState(
        policies={"": Saved(backend)},
        tracker=Tracker(run),
        stateful={},
        recipe={},
        environment={},
        checkpoints=CheckpointStore(run.checkpoints, keep=2),
        resume=ResumePoint(None),
        resume_command="",
        write_config=lambda: None,
        saves_in_background=in_background,
    )


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def save(state: RunState) -> None:
    state.step += 1
    state.save()


def measure(folder: Path, million: int, pairs: int) -> dict[str, object]:
    """Saves in turns, and returns the times of all saves."""
    backend = backend_of(million)
    plain, background = (state_of(folder / str(mode), backend, mode) for mode in (False, True))
    save(plain)
    first = seconds(lambda: save(background))
    background.finish_saving()
    rows = []
    for _ in range(pairs):
        row = {
            "synchronous_s": seconds(lambda: save(plain)),
        }
        start = time.perf_counter()
        row["blocked_s"] = seconds(lambda: save(background))
        background.finish_saving()
        row["published_s"] = time.perf_counter() - start
        rows.append({name: round(value, 4) for name, value in row.items()})
        print(rows[-1], flush=True)
    newest = background.checkpoints.checkpoints()[0]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {
        "checkpoint_mb": round(read_manifest(newest.path).size / 1e6, 1),
        "first_blocked_s": round(first, 4),
        "median": medians,
        "blocked_of_synchronous": round(medians["blocked_s"] / medians["synchronous_s"], 4),
        "median_of_ratios": round(statistics.median(row["blocked_s"] / row["synchronous_s"] for row in rows), 4),
        "pairs": rows,
    }


def backend_of(million: int) -> FSDPBackend:
    """Returns a backend with so many million trained parameters, after one update."""
    bundle = BareBundle(WORKLOADS["toy"])
    network = bundle.trainable()
    network.ballast = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(million))
    backend = FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-4))
    loss = torch.stack([parameter.square().sum() for parameter in backend.trainable.values()]).sum()
    backend.backward(loss, last=True)
    backend.step(1.0, loss)
    return backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--million", type=int, default=42, help="trained parameters, about (default 42: 500 MB)")
    parser.add_argument("--folder", type=Path, help="where to save (default: the temporary directory)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(Path(folder), options.million, options.pairs)
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__}
    result = {"million": options.million, "load": os.getloadavg()[0], "machine": machine} | result
    print(json.dumps({name: value for name, value in result.items() if name != "pairs"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
