"""Compares our rollout and our train step with the bare network calls that they cannot avoid.

    python benchmarks/loop_overhead.py [--scale toy|30m] [--pairs 10] [--json out.json]

Rollout: `DiffusionStage.sample` of one chunk against T forwards of the same network on the same shapes.
Train: `TrainStack.train_track` against forward + backward of the same micro-batches and steps, the anchor forwards of
later updates, the gradient clip and the optimizer step.
"""

from __future__ import annotations

import argparse

import torch
from harness import Ratio, paired, report
from workload import WORKLOADS, Bench, Passes, bare_step

from unirl.algorithms.diffusion_grpo import DiffusionGRPO


def rollout(bench: Bench, pairs: int) -> Ratio:
    """Measures the sampling of one chunk of rows in all steps."""
    count = bench.work.rows
    conditions, ids = bench.conditions(count), bench.ids(count)
    text = conditions["text"]
    x, t = torch.randn(count, *bench.shape), torch.full((count,), 500.0)

    @torch.no_grad()
    def ours() -> None:
        x_t = bench.noise.normal(ids, "x", bench.shape)
        bench.stage.sample(conditions, x_t, bench.params, bench.noise, ids)

    @torch.no_grad()
    def bare() -> None:
        for _ in range(bench.work.steps):
            bench.net(x, text.embeds, text.pooled, t, return_dict=False)

    return paired("rollout", bench.shapes(count, len(bench.params.sde_indices or ())), ours, bare, pairs)


def train(bench: Bench, num_updates: int, pairs: int) -> Ratio:
    """Measures all updates of one step of the loop."""
    count, num_steps = bench.work.rows * num_updates, len(bench.params.sde_indices or ())
    track, stack = bench.track(count), bench.stack(DiffusionGRPO(), num_updates)
    bare = bare_step(bench, track, num_updates, num_steps, Passes(later_forwards=1))
    shapes = bench.shapes(count, num_steps)
    return paired(f"train, {num_updates} updates", shapes, lambda: stack.train_track(track), bare, pairs)


def main(scale: str, pairs: int, path: str | None) -> None:
    """Measures rollout and training, and reports the results."""
    results: list[Ratio] = []
    for num_updates in (1, 2):
        bench = Bench(WORKLOADS[scale])
        if num_updates == 1:
            results.append(rollout(bench, pairs))
        results.append(train(bench, num_updates, pairs))
    report(results, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=sorted(WORKLOADS), default="30m")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    main(args.scale, args.pairs, args.json)
