"""Compares time and memory of a train step of each loss with the bare network passes that it needs.

    python benchmarks/losses.py [--scale toy|30m] [--pairs 10] [--cases nft awm] [--clock wall|cpu] [--json out.json]

Losses: `TrainStack.train_track` is compared with `bare_step` of the passes in `CASES`.
Reward back-propagation: the same comparison for T denoising steps, of which K carry a gradient. The activations of
these K steps are computed twice.
Replay: several denoising steps in one forward are compared with one step per forward, without the optimizer step. glibc
returns freed tensors above 32 MiB to the system, and 40 rows at once have such tensors. The page faults cost 20 % more
time, unless MALLOC_MMAP_THRESHOLD_=4294967296 and MALLOC_TRIM_THRESHOLD_=8589934592 are set in the environment.
Memory is the peak of all tensors in addition to weights, optimizer and snapshots, gradients included. For losses on the
gradient of the reward, the memory that they keep for the backward pass is measured as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from harness import CLOCKS, Ratio, measuring, memory, paired, show, write
from torch import Tensor
from workload import WORKLOADS, Bench, Passes, Workload, bare_step

from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.diffusion_awm import DiffusionAWM
from unirl.algorithms.diffusion_dpo import DiffusionDPO
from unirl.algorithms.diffusion_dppo import DiffusionDPPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.diffusion_ppo import DiffusionPPO
from unirl.algorithms.diffusion_rwr import DiffusionRWR
from unirl.algorithms.drtune import DRTune, ReFL, RewardBackprop
from unirl.models.denoising.differentiable import DifferentiableStage
from unirl.sde.kernels import EulerODE
from unirl.sde.steps import EquallySpacedSteps, LastSteps
from unirl.train.configs import EmaLoraConfig

STEPS = 4
"""Number of denoising steps T of the losses on recorded steps and on clean samples."""
MB = 1e6


@dataclass
class Cost(Ratio):
    """Time in seconds, and memory in megabytes."""

    ours_peak_mb: float = 0.0
    bare_peak_mb: float = 0.0
    kept_mb: float | None = None
    """Memory that one loss keeps for its backward pass; None = not measured."""

    def line(self) -> str:
        """Returns a line about the memory."""
        kept = "" if self.kept_mb is None else f", kept {self.kept_mb:.3f}"
        return f"    MB: peak {self.ours_peak_mb:.2f}, bare {self.bare_peak_mb:.2f}{kept}"


@dataclass(frozen=True)
class Setting:
    """Settings that all measurements share."""

    work: Workload
    pairs: int
    clock: str

    def cost(self, name: str, shapes: dict, ours: Callable[[], object], bare: Callable[[], object]) -> Cost:
        """Times both ways as pairs, and then measures the memory of each once."""
        ratio = paired(name, shapes | {"clock": self.clock}, ours, bare, self.pairs, CLOCKS[self.clock])
        return Cost(**vars(ratio), ours_peak_mb=memory(ours).peak / MB, bare_peak_mb=memory(bare).peak / MB)


@dataclass(frozen=True)
class Case:
    """A loss and the network passes that it needs."""

    name: str
    algorithm: StageAlgorithm[Any]
    passes: Passes
    num_updates: int = 1


CASES = [
    Case("Flow-GRPO", DiffusionGRPO(), Passes()),
    Case("Flow-GRPO, 2 updates", DiffusionGRPO(), Passes(later_forwards=1), num_updates=2),
    Case("Flow-GRPO, reference KL", DiffusionGRPO(kl_coef=0.04), Passes(forwards=1)),
    Case("Flow-DPPO, 2 updates", DiffusionDPPO(), Passes(later_forwards=1), num_updates=2),
    Case("DiffusionPPO", DiffusionPPO(), Passes(value=True)),
    Case("DiffusionNFT", DiffusionNFT(velocity_coef=0.0), Passes(forwards=1, follower=True)),
    Case("DiffusionNFT, reference", DiffusionNFT(), Passes(forwards=2, follower=True)),
    Case("AWM", DiffusionAWM(velocity_coef=0.0), Passes()),
    Case("AWM, reference and slow copy", DiffusionAWM(ema_coef=1.0), Passes(forwards=2, follower=True)),
    Case("Diffusion-DPO", DiffusionDPO(), Passes(forwards=1)),
    Case("RWR", DiffusionRWR(), Passes()),
]


def loss(case: Case, setting: Setting) -> Cost:
    """Measures all updates of one step of the loop."""
    work = replace(setting.work, steps=STEPS)
    bench = Bench(work, ema_lora_cfg=EmaLoraConfig() if case.passes.follower else None)
    stack, track = bench.stack(case.algorithm, case.num_updates), bench.track(work.rows * case.num_updates)
    trained = len(case.algorithm.parts(track.segment))
    bare = bare_step(bench, track, case.num_updates, trained, case.passes)
    return setting.cost(case.name, bench.shapes(len(track), trained), lambda: stack.train_track(track), bare)


def brightness(images: Tensor, prompts: object) -> Tensor:
    """Returns a reward [B] that takes almost no time."""
    return images.mean((1, 2, 3))


def backprop(name: str, algorithm: RewardBackprop, num_steps: int, setting: Setting) -> Cost:
    """Measures one step of a loss on the gradient of the reward, with half of the rows to save time."""
    half = setting.work.rows // 2
    bench = Bench(replace(setting.work, steps=num_steps, rows=half, micro=half), kernel=EulerODE())
    stage = DifferentiableStage(bench.stage, torch.sigmoid, brightness)
    stack, track = bench.stack(algorithm, 1, stage), bench.track(half)
    trained = len(algorithm.gradient_path(track.segment).gradient.steps)
    # T forwards sample. The forward before each backward recomputes the activations of a checkpoint.
    passes = Passes(forwards=num_steps // trained)
    assert num_steps % trained == 0
    bare = bare_step(bench, track, 1, trained, passes)
    cost = setting.cost(name, bench.shapes(half, trained), lambda: stack.train_track(track), bare)
    cost.kept_mb = memory(lambda: algorithm.loss(stage, track, (0,))).kept / MB
    return cost


def replay(name: str, micro: int, setting: Setting) -> Cost:
    """Compares one forward and backward of all recorded steps of a micro-batch with one for each step."""
    bench = Bench(replace(setting.work, rows=micro, micro=micro))
    track, num_steps = bench.track(micro), setting.work.steps - 1

    def run(steps_per_forward: int) -> None:
        algorithm = DiffusionGRPO(steps_per_forward=steps_per_forward)
        algorithm.compute_loss_and_backward(bench.stage, track, lambda loss, last: loss.backward())

    shapes = bench.shapes(micro, num_steps) | {"batch_multiple": bench.bundle.facts.batch_multiple}
    return setting.cost(name, shapes, lambda: run(num_steps), lambda: run(1))


def runs() -> Iterator[tuple[str, Callable[[Setting], Cost]]]:
    """Yields the name and the function of each measurement."""
    for case in CASES:
        yield case.name, partial(loss, case)
    refl = ReFL(gradient_steps=LastSteps(num_steps=2), early_stop=0.0)
    drtune = DRTune(gradient_steps=EquallySpacedSteps(num_steps=2), early_stop=0.0)
    for label, algorithm in (("ReFL", refl), ("DRTune", drtune)):
        for num_steps in (10, 20, 40):
            name = f"{label}, T = {num_steps}, K = 2"
            yield name, partial(backprop, name, algorithm, num_steps)
    for micro in (1, 2, 4, 8):
        name = f"replay at once, micro-batch {micro}"
        yield name, partial(replay, name, micro)


def main(setting: Setting, cases: list[str], path: str | None) -> None:
    """Measures and reports the cases whose names contain one of the words in `cases`; no words = all cases."""
    results: list[Ratio] = []
    for name, measure in runs():
        if not cases or any(word.lower() in name.lower() for word in cases):
            cost = measure(setting)
            show(cost)
            print(cost.line(), flush=True)
            results.append(cost)
            if path:
                write(results, path)  # the results so far


if __name__ == "__main__":
    parser = measuring(__doc__.splitlines()[0], pairs=10)
    parser.add_argument("--scale", choices=sorted(WORKLOADS), default="30m")
    args = parser.parse_args()
    main(Setting(WORKLOADS[args.scale], args.pairs, args.clock), args.cases, args.json)
