"""Measures a step with a reward as slow as the rollout, scored after the rollout or while it runs.

    python benchmarks/reward_overlap.py [--runtime ray] [--parts 16] [--pairs 5] [--json out.json]

The time of a step is compared with the time of the slower part. The reward sleeps, as a client of a service waits, so
that it uses no CPU core. Its time per image equals the measured time of the engine per image. Requests, roles and queue
are those of the loop. With Ray, the overlapped reward has its own process.
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
    """Waits `seconds` for every image."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds

    def score(self, request):
        time.sleep(self.seconds * len(request))
        return super().score(request)


def trainer_of(folder: Path, runtime: str, seconds: float, *overrides: str) -> AbstractContextManager[Trainer]:
    """Returns a toy trainer, which this benchmark uses without training."""
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
    """Returns the request of the first step."""
    trainer.pool.step = 0
    return trainer.requests.training(trainer.data.take(PROMPTS), 0, trainer.publish(0))


def generate_seconds(folder: Path, runtime: str) -> float:
    """Returns the median time of five generations of a step, in seconds."""
    with trainer_of(folder, runtime, 0.0) as trainer:
        req = request_of(trainer)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            trainer.rollout.generate(req)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


def main(runtime: str, parts: int, pairs: int, path: str | None) -> None:
    """Calibrates the reward, measures both ways in pairs, and reports the times."""
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
                turns.rollout.generate(requests[turns])

            def step(trainer: Trainer) -> None:
                trainer.sampler.scoring.generate(requests[trainer]).scores()

            shapes = {
                "runtime": runtime,
                "samples": PROMPTS * SAMPLES,
                "parts": parts,
                "generate_s": round(alone, 4),
            }
            results = [
                paired("in turns / the slower one", shapes, lambda: step(turns), generate, pairs),
                paired("overlapped / the slower one", shapes, lambda: step(overlap), generate, pairs),
            ]
    report(results, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", choices=("local", "ray"), default="local")
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    main(args.runtime, args.parts, args.pairs, args.json)
