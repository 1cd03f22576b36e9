"""A reward as slow as the rollout, scored after it and while it runs: seconds per step against the slower of the two.

    python benchmarks/reward_overlap.py [--parts 16] [--pairs 5] [--json out.json]

The reward waits as one that asks a service does (it sleeps), so it takes no core from the engine. Its time per picture
is set to what the engine needs for one, measured first. Everything else is the loop's own: requests, roles, queue.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from harness import paired, report

from unirl.config.load import load
from unirl.config.preflight import preflight
from unirl.reward.local.image_statistics import BrightnessRewardScorer
from unirl.trainer.build import build_trainer

PROMPTS, SAMPLES = 32, 4


class Slow(BrightnessRewardScorer):
    """Waits `seconds` for every picture."""

    seconds = 0.0

    def score(self, request):
        time.sleep(self.seconds * len(request))
        return super().score(request)


def trainer_of(folder: Path, *overrides: str):
    """A toy trainer whose samples are never trained on."""
    recipe = load(
        "diffusion/sd3_trainside",
        [
            *("scale=toy", f"batch_size={PROMPTS}", f"sampling.samples_per_prompt={SAMPLES}"),
            *("sampling.num_inference_steps=10", f"run.dir={folder}", "tracking.sample_steps=0"),
            *("evaluation.eval_steps=0", "plugins=[reward_overlap]"),
            *("reward.backend={_target_: reward_overlap.Slow}", *overrides),
        ],
    )
    preflight(recipe)
    return build_trainer(recipe)


def main(parts: int, pairs: int, path: str | None) -> None:
    """Calibrate, measure both ways in pairs, report."""
    import reward_overlap  # the class that the recipe names, not this script's

    with tempfile.TemporaryDirectory() as folder:
        turns = trainer_of(Path(folder) / "turns")
        overlap = trainer_of(Path(folder) / "overlap", f"reward_parts={parts}", "+placement.reward=cpu")
        req = turns.make_request(turns.parts.data.draw(PROMPTS), 0)
        for trainer in (turns, overlap):
            trainer.parts.pool.begin(0)

        def generate() -> None:
            turns.roles.rollout.generate(req)

        def step(trainer) -> None:
            trainer.overlap.draw(req)
            trainer.overlap.collect()

        generate()
        alone = []
        for _ in range(5):
            start = time.perf_counter()
            generate()
            alone.append(time.perf_counter() - start)
        reward_overlap.Slow.seconds = statistics.median(alone) / len(req)
        shapes = {"samples": len(req), "parts": parts, "generate_s": round(statistics.median(alone), 4)}
        with turns.tracker, overlap.tracker:
            found = [
                paired("in turns / the slower one", shapes, lambda: step(turns), generate, pairs),
                paired("overlapped / the slower one", shapes, lambda: step(overlap), generate, pairs),
            ]
        for trainer in (turns, overlap):
            trainer.close()
    report(found, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    main(args.parts, args.pairs, args.json)
