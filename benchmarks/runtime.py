"""Compares the Ray runtime with the local one at equal work, and two workers with one.

    python benchmarks/runtime.py [--pairs 10] [--prompts 8] [--micro 8] [--json out.json]

A step generates, scores, computes advantages and trains in a toy recipe, with one thread per process. `call` is an
empty remote call (the version of the weights). `scaling` is the time of a step on two workers divided by the time on
one, so 0.5 is perfect.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch
from harness import Ratio, paired, report

from unirl.config.load import load
from unirl.distributed.group.ray_cluster import connect
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer
from unirl.trainer.loop import Trainer

RECIPE = "diffusion/sd3_trainside"
CALLS = 50


def trainer_of(folder: Path, prompts: int, micro: int, *overrides: str) -> AbstractContextManager[Trainer]:
    """Returns a trainer that never evaluates and saves no checkpoints or samples."""
    recipe = load(
        RECIPE,
        [
            "scale=toy",
            f"batch_size={prompts}",
            "num_rollouts=1000",
            f"stack.micro_batch_size={micro}",
            "tracking.sample_steps=0",
            "evaluation.eval_steps=0",
            "save_interval=0",
            f"run.dir={folder}",
            *overrides,
        ],
    )
    preflight(recipe)
    return build_trainer(recipe)


def step_of(trainer: Trainer) -> Callable[[], None]:
    """Returns a function that runs one step of the loop."""

    def step() -> None:
        trainer.learn(trainer.state.step, trainer.produce(trainer.state.step))
        trainer.state.step += 1

    return step


def calls_of(trainer: Trainer) -> Callable[[], None]:
    """Runs empty remote calls, one after the other."""

    def calls() -> None:
        for _ in range(CALLS):
            trainer.policy.roles.backend.version()

    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument(
        "--micro", type=int, default=8, help="rows per micro-batch; each micro-batch runs its own collectives"
    )
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    connect(num_cpus=3)  # both pools use the same Ray cluster
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def opened(name: str, *overrides: str) -> Trainer:
            return stack.enter_context(trainer_of(scratch / name, options.prompts, options.micro, *overrides))

        local = opened("local")
        one = opened("one", "runtime=ray", "num_devices=1")
        two = opened("two", "runtime=ray", "num_devices=2")
        rows = options.prompts * local.config.sampling.values["samples_per_prompt"]
        before = two.pool.traffic
        step_of(two)()
        shapes = {"rows": rows, "micro_batch_size": options.micro, "threads_per_process": 1}
        traffic = {"driver_bytes_per_step_2_workers": two.pool.traffic - before}
        results: list[Ratio] = [
            paired("step: ray 1 / local", shapes, step_of(one), step_of(local), options.pairs),
            paired("step: ray 2 / ray 1 (scaling)", shapes | traffic, step_of(two), step_of(one), options.pairs),
            paired(f"{CALLS} empty calls: ray / local", {}, calls_of(one), calls_of(local), options.pairs),
        ]
    report(results, options.json)


if __name__ == "__main__":
    main()
