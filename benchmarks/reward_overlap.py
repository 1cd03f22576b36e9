"""A reward as slow as the rollout, scored after it and while it runs: seconds per step against the slower of the two.

    python benchmarks/reward_overlap.py [--runtime ray] [--parts 16] [--pairs 5] [--json out.json]

The reward waits as one that asks a service does (it sleeps), so it takes no core from the engine. Its time per picture
is set to what the engine needs for one, measured first. Everything else is the loop's own: requests, roles, queue. With
Ray, what is overlapped sits in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from harness import paired, report

from unirl.config.load import load
from unirl.distributed.group.ray_cluster import connect
from unirl.plan.preflight import preflight
from unirl.reward.local.image_statistics import BrightnessRewardScorer
from unirl.trainer.assemble import build_trainer
from unirl.trainer.loop import Trainer

PROMPTS, SAMPLES = 32, 4


class Slow(BrightnessRewardScorer):
    """Waits `seconds` for every picture."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds

    def score(self, request):
        time.sleep(self.seconds * len(request))
        return super().score(request)


def trainer_of(folder: Path, runtime: str, seconds: float, *overrides: str) -> AbstractContextManager[Trainer]:
    """A toy trainer whose samples are never trained on."""
    recipe = load(
        "diffusion/sd3_trainside",
        [
            *("scale=toy", f"batch_size={PROMPTS}", f"sampling.samples_per_prompt={SAMPLES}", f"runtime={runtime}"),
            *("sampling.num_inference_steps=10", f"run.dir={folder}", "tracking.sample_steps=0"),
            *("evaluation.eval_steps=0", "plugins=[reward_overlap]"),
            *(f"reward.backend={{_target_: reward_overlap.Slow, seconds: {seconds}}}", *overrides),
        ],
    )
    preflight(recipe)
    return build_trainer(recipe)


def request_of(trainer: Trainer):
    """The rows of the first step."""
    trainer.pool.begin(0)
    return trainer.requests.training(trainer.data.take(PROMPTS), 0, trainer.publish(0))


def generate_seconds(folder: Path, runtime: str) -> float:
    """How long the engine needs for a step, the median of five."""
    with trainer_of(folder, runtime, 0.0) as trainer:
        req = request_of(trainer)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            trainer.roles.rollout.generate(req)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


def main(runtime: str, parts: int, pairs: int, path: str | None) -> None:
    """Calibrate, measure both ways in pairs, report."""
    if runtime == "ray":
        connect(num_cpus=4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = generate_seconds(folder / "alone", runtime)
        slow = (runtime, alone / (PROMPTS * SAMPLES))
        with (
            trainer_of(folder / "turns", *slow) as turns,
            trainer_of(folder / "overlap", *slow, f"reward_parts={parts}", "+placement.reward=cpu") as overlap,
        ):
            requests = {trainer: request_of(trainer) for trainer in (turns, overlap)}

            def generate() -> None:
                turns.roles.rollout.generate(requests[turns])

            def step(trainer: Trainer) -> None:
                trainer.overlap.generate(requests[trainer])
                trainer.overlap.scores()

            shapes = {
                "runtime": runtime,
                "samples": PROMPTS * SAMPLES,
                "parts": parts,
                "generate_s": round(alone, 4),
            }
            found = [
                paired("in turns / the slower one", shapes, lambda: step(turns), generate, pairs),
                paired("overlapped / the slower one", shapes, lambda: step(overlap), generate, pairs),
            ]
    report(found, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", choices=("local", "ray"), default="local")
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    main(args.runtime, args.parts, args.pairs, args.json)
