"""One train step of each loss over the bare network passes that its mathematics needs: seconds and memory.

    python benchmarks/losses.py [--scale toy|30m] [--pairs 10] [--cases nft awm] [--clock wall|cpu] [--json out.json]

Losses: `TrainStack.train_track` against `bare_step` of the passes that the table names.
Reward back-propagation: the same, T denoising steps of which K carry a gradient; their activations are computed twice.
Replay: several denoising steps in one forward against one by one, without the optimizer step. glibc returns freed
tensors above 32 MiB to the system, and 40 rows at once have such ones: a fifth on top for page faults, which
MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 in the environment takes away.
Memory is that of tensors above what a step starts from (weights, optimizer, snapshots): the peak, gradients included;
and what a loss on the reward's gradient keeps for its backward pass.
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
from unirl.algorithms.drtune import DRTune
from unirl.algorithms.refl import ReFL
from unirl.algorithms.shared.reward_backprop import RewardBackprop
from unirl.models.denoising.differentiable import DifferentiableStage
from unirl.sde.kernels import EulerODE
from unirl.sde.steps import EquallySpacedSteps, LastSteps
from unirl.train.configs import EmaLoraConfig

STEPS = 4
"""T of the losses on recorded steps and on clean samples."""
MB = 1e6


@dataclass
class Cost(Ratio):
    """Seconds and megabytes."""

    ours_peak_mb: float = 0.0
    bare_peak_mb: float = 0.0
    kept_mb: float | None = None
    """Of one loss for its backward pass; None = not measured."""

    def line(self) -> str:
        """The memory, for people."""
        kept = "" if self.kept_mb is None else f", kept {self.kept_mb:.3f}"
        return f"    MB: peak {self.ours_peak_mb:.2f}, bare {self.bare_peak_mb:.2f}{kept}"


@dataclass(frozen=True)
class Setting:
    """What is common to a run of this script."""

    work: Workload
    pairs: int
    clock: str

    def cost(self, name: str, shapes: dict, ours: Callable[[], object], bare: Callable[[], object]) -> Cost:
        """Both ways timed as pairs, then their memory, once."""
        ratio = paired(name, shapes | {"clock": self.clock}, ours, bare, self.pairs, CLOCKS[self.clock])
        return Cost(**vars(ratio), ours_peak_mb=memory(ours).peak / MB, bare_peak_mb=memory(bare).peak / MB)


@dataclass(frozen=True)
class Case:
    """A loss and what it must ask of the network."""

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
    """All updates of one step of the loop."""
    work = replace(setting.work, steps=STEPS)
    bench = Bench(work, ema_lora_cfg=EmaLoraConfig() if case.passes.follower else None)
    stack, track = bench.stack(case.algorithm, case.num_updates), bench.track(work.rows * case.num_updates)
    trained = len(case.algorithm.parts(track.segment))
    bare = bare_step(bench, track, case.num_updates, trained, case.passes)
    return setting.cost(case.name, bench.shapes(len(track), trained), lambda: stack.train_track(track), bare)


def brightness(images: Tensor, prompts: object) -> Tensor:
    """[B] a reward that costs nothing."""
    return images.mean((1, 2, 3))


def backprop(name: str, algorithm: RewardBackprop, num_steps: int, setting: Setting) -> Cost:
    """One step of a loss on the reward's gradient; half the rows, since there are many denoising steps."""
    half = setting.work.rows // 2
    bench = Bench(replace(setting.work, steps=num_steps, rows=half, micro=half), kernel=EulerODE())
    stage = DifferentiableStage(bench.stage, torch.sigmoid, brightness)
    stack, track = bench.stack(algorithm, 1, stage), bench.track(half)
    trained = len(algorithm.route(track.segment).gradient.steps)
    # T forwards draw the samples; the forwards before each backward are those of the checkpoints.
    passes = Passes(forwards=num_steps // trained)
    assert num_steps % trained == 0
    bare = bare_step(bench, track, 1, trained, passes)
    cost = setting.cost(name, bench.shapes(half, trained), lambda: stack.train_track(track), bare)
    cost.kept_mb = memory(lambda: algorithm.loss(stage, track, (0,))).kept / MB
    return cost


def replay(name: str, micro: int, setting: Setting) -> Cost:
    """One micro-batch at all its recorded steps: one forward and backward of all, over one of each."""
    bench = Bench(replace(setting.work, rows=micro, micro=micro))
    track, num_steps = bench.track(micro), setting.work.steps - 1

    def run(steps_per_forward: int) -> None:
        algorithm = DiffusionGRPO(steps_per_forward=steps_per_forward)
        algorithm.compute_loss_and_backward(bench.stage, track, lambda loss, last: loss.backward())

    shapes = bench.shapes(micro, num_steps) | {"batch_multiple": bench.bundle.facts.batch_multiple}
    return setting.cost(name, shapes, lambda: run(num_steps), lambda: run(1))


def runs() -> Iterator[tuple[str, Callable[[Setting], Cost]]]:
    """Names and measurements of everything."""
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
    """Measure and report the cases whose names hold one of the words in `cases`; none = all of them."""
    results: list[Ratio] = []
    for name, measure in runs():
        if not cases or any(word.lower() in name.lower() for word in cases):
            cost = measure(setting)
            show(cost)
            print(cost.line(), flush=True)
            results.append(cost)
            if path:
                write(results, path)  # so far


if __name__ == "__main__":
    parser = measuring(__doc__.splitlines()[0], pairs=10)
    parser.add_argument("--scale", choices=sorted(WORKLOADS), default="30m")
    args = parser.parse_args()
    main(Setting(WORKLOADS[args.scale], args.pairs, args.clock), args.cases, args.json)
