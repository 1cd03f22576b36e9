"""Times steps whose phases wait for a known time, in turns and with `asynchronous.max_staleness`.

    python benchmarks/asynchronous.py [--seconds 2] [--steps 8] [--runtime ray] [--json benchmarks/asynchronous.json]

The engine, the reward and the loss of a toy recipe work and then sleep until their time is over, so three places need
no three cores. In the third case, generation takes 0.4 and 1.6 times its mean in turns. The loop, its queues, the
transfers of weights and rows and the files of the run are those of any run. A ratio is the mean time of a step, without
the first and the last ones, over the time of the longest phase; `predicted_s` is the time of a step by the simulator of
`unirl plan --auto`. It takes 3 minutes on two cores. RAY_worker_niceness=0 keeps Ray's workers from giving way to other
work on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.plan.simulate import LoopSchedule, PhaseSeconds, predict
from unirl.reward.local.image_statistics import BrightnessRewardScorer
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.trainer.assemble import build_trainer

PROMPTS, SAMPLES, PARTS = 16, 2, 8
RECIPE = "diffusion/sd3_replica_lora_separate"


@contextmanager
def lasting(key: str, rows: float) -> Iterator[None]:
    """Sleep after the block until it has lasted for its rows' share of the phase."""
    end = time.perf_counter() + float(os.environ[key]) * rows / (PROMPTS * SAMPLES)
    yield
    time.sleep(max(end - time.perf_counter(), 0.0))


class SleepingEngine(ReplicaRolloutEngine):
    """Samples for a set time."""

    def sample(self, req):
        with lasting("GENERATE_S", len(req) * (1 + float(os.environ.get("VARY", "0")) * (-1) ** req.step)):
            return super().sample(req)


class SleepingScorer(BrightnessRewardScorer):
    """Scores for a set time."""

    def score(self, request):
        with lasting("SCORE_S", len(request)):
            return super().score(request)


@dataclass(frozen=True, kw_only=True)
class SleepingLoss(DiffusionGRPO):
    """Trains for a set time: each part of the rows takes its share of it."""

    def compute_loss_and_backward(self, stage, rows, backward, now, first_update=False, observe=None):
        with lasting("TRAIN_S", len(rows)):
            return super().compute_loss_and_backward(stage, rows, backward, now, first_update, observe)


def step_seconds(folder: Path, runtime: str, steps: int, *overrides: str) -> list[float]:
    """The time of each step of a run, from the end of the one before to its own end, in seconds."""
    recipe = load(
        RECIPE,
        [
            *("scale=toy", f"run.dir={folder}", f"runtime={runtime}", f"num_rollouts={steps}", f"batch_size={PROMPTS}"),
            *(f"sampling.samples_per_prompt={SAMPLES}", "stack.num_updates_per_batch=1", "stack.micro_batch_size=8"),
            *("rollout._target_=asynchronous.SleepingEngine", "algorithm._target_=asynchronous.SleepingLoss"),
            *(
                "reward.backend={_target_: asynchronous.SleepingScorer}",
                "plugins=[asynchronous]",
            ),
            *("algorithm.old_logp_source=rollout", "placement.reward=cpu"),
            *("evaluation.eval_steps=0", "tracking.sample_steps=0", "save_interval=0", *overrides),
        ],
    )
    preflight(recipe)
    with build_trainer(recipe) as trainer:
        trainer.train()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["time/step"] for row in rows]


@dataclass(frozen=True)
class Settings:
    """The settings of a run that decide when samples are generated and scored."""

    max_staleness: int
    reward_parts: int = PARTS
    order: Literal["fixed", "free"] = "fixed"
    elastic: bool = False

    @property
    def words(self) -> list[str]:
        """The overrides of the recipe."""
        words = [f"asynchronous.max_staleness={self.max_staleness}", f"reward_parts={self.reward_parts}"]
        return [*words, f"asynchronous.order={self.order}", f"asynchronous.elastic={str(self.elastic).lower()}"]


AHEAD = [Settings(steps) for steps in (0, 1, 2)]
FREE = [Settings(steps, order="free") for steps in (1, 2)]
CASES: dict[str, tuple[tuple[float, float, float], float, list[Settings]]] = {
    "generate, score and train equally long": ((1.0, 1.0, 1.0), 0.0, [Settings(0, reward_parts=1), *AHEAD]),
    "generate twice as long as train, score short": ((1.0, 0.1, 0.5), 0.0, [Settings(0, reward_parts=1), *AHEAD]),
    "generate 0.4 and 1.6 times as long as train in turns, score short": ((1.0, 0.1, 1.0), 0.6, [*AHEAD[1:], *FREE]),
    "generate 3 times as long as train, score short": (
        (1.0, 1 / 30, 1 / 3),
        0.0,
        [Settings(1), Settings(1, elastic=True)],
    ),
}


def predicted_seconds(times: list[float], vary: float, settings: Settings) -> float:
    """The time of a step by the simulator, from the seconds that the roles sleep."""
    generate, score, train = times
    schedule = LoopSchedule(
        seconds=PhaseSeconds(generate=generate, score=score, train=train),
        max_staleness=settings.max_staleness,
        reward_parts=settings.reward_parts,
        order=settings.order,
        lengths=(1 + vary, 1 - vary),
        join=generate if settings.elastic else None,
    )
    return predict(schedule).step_seconds


def main(seconds: float, steps: int, runtime: str, cases: list[str], path: str | None) -> None:
    """Measures the cases in turns, with the reward beside the engine, ahead, and in free order."""
    about = {"runtime": runtime, "machine": platform.machine(), "cores": os.cpu_count()}
    known = json.loads(Path(path).read_text())["results"] if path is not None and Path(path).exists() else []
    results = [row for row in known if row["case"] not in cases]
    with tempfile.TemporaryDirectory() as name:
        for case in cases:
            shares, vary, runs = CASES[case]
            times = [seconds * share for share in shares]
            for key, value in zip(("GENERATE_S", "SCORE_S", "TRAIN_S"), times, strict=True):
                os.environ[key] = str(value)
            os.environ["VARY"] = str(vary)
            for settings in runs:
                measured = step_seconds(Path(name) / f"{len(results)}", runtime, steps, *settings.words)
                ahead = settings.max_staleness
                inner = measured[ahead + 1 : len(measured) - ahead]
                mean = statistics.fmean(inner)
                row = {
                    "case": case,
                    "generate_s, score_s, train_s": times,
                    **vars(settings),
                    "step_s": round(mean, 3),
                    "predicted_s": round(predicted_seconds(times, vary, settings), 3),
                    "over_the_longest_phase": round(mean / max(times), 3),
                    "steps": len(inner),
                }
                print(json.dumps(row), flush=True)
                results.append(row)
                if path is not None:
                    Path(path).write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of the longest phase")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--runtime", choices=("local", "ray"), default="ray")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    main(args.seconds, args.steps, args.runtime, args.cases, args.json)
