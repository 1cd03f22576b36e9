"""The check of a loss: the contract that the train stack relies on.

stage = toy_stage()
check_algorithm(MyLoss(), stage, toy_track(stage))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic

import torch
from torch import Tensor

from unirl.algorithms.base import START, SegmentT, StageAlgorithm, StageT
from unirl.tracking.metrics import is_metric
from unirl.types.protocols import Anchor, TrainingProgress
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack

TOLERANCE = 1e-5
"""Relative difference allowed between sums of the same float32 numbers in another order."""


def check_algorithm(algorithm: StageAlgorithm[StageT, SegmentT], stage: StageT, track: RolloutTrack[SegmentT]) -> None:
    """Raises AssertionError with the rule that is broken. `track` is a rollout of `stage` with at least four rows.

    All anchors, also those of snapshots, are computed with the current weights of the stage.
    """
    check = AlgorithmCheck(algorithm, stage, track)
    check.parts_come_from_shared_fields()
    check.anchors_are_declared()
    check.rows = prepared_track(algorithm, stage, track)
    check.anchor_pass_equals_the_forward()
    check.rows = moved_away(check.rows)
    check.totals_add_up()
    check.now = check.progress()
    check.loss_is_a_sum_over_rows()
    check.weights_are_linear()
    check.order_of_rows_does_not_matter()
    check.outputs_are_detached()
    check.metrics_are_named_and_finite()


def prepared_track(
    algorithm: StageAlgorithm[StageT, SegmentT], stage: StageT, track: RolloutTrack[SegmentT]
) -> RolloutTrack[SegmentT]:
    """The track with all anchors. Every snapshot has the current weights of the stage."""
    for snapshot in sorted({anchor.snapshot for anchor in algorithm.anchors().values()}):
        with torch.no_grad():
            segment, _ = algorithm.prepare_segment(stage, track, snapshot)
        track = track.replace(segment=segment)
    return track


def moved_away(track: RolloutTrack[SegmentT]) -> RolloutTrack[SegmentT]:
    """The track with slightly different anchors. With equal anchors, many losses are 0."""
    generator = torch.Generator().manual_seed(0)
    anchors = {
        name: anchor + 1e-2 * torch.randn(anchor.shape, generator=generator).to(anchor)
        for name, anchor in track.segment.anchors.items()
    }
    return track.replace(segment=track.segment.replace(anchors=anchors))


@dataclass
class AlgorithmCheck(Generic[StageT, SegmentT]):
    """The rules of the contract, for one algorithm, one stage and a few rows."""

    algorithm: StageAlgorithm[StageT, SegmentT]
    stage: StageT
    rows: RolloutTrack[SegmentT]
    now: TrainingProgress = START

    def expect(self, holds: bool, rule: str) -> None:
        assert holds, f"{type(self.algorithm).__name__}: {rule}"

    def chunks(self) -> list[RolloutTrack[SegmentT]]:
        """The smallest chunks of rows that the algorithm accepts."""
        return self.rows.chunk(self.algorithm.needs.rows_together)

    def progress(self) -> TrainingProgress:
        """Progress at the start of a run, for a step with exactly these rows."""
        if not self.algorithm.needs.totals:
            return START
        return replace(START, totals=tuple(self.algorithm.totals(self.rows, START).tolist()))

    def total(self, rows: RolloutTrack[SegmentT]) -> Tensor:
        """[] the sum of the losses of all parts, with its graph."""
        parts = self.algorithm.parts(rows.segment)
        return torch.stack([self.algorithm.loss(self.stage, rows, part, self.now).loss for part in parts]).sum()

    @cached_property
    def scale(self) -> float:
        """The sum of the absolute losses of the rows, to which round-off errors are relative."""
        return sum(abs(self.total(chunk).item()) for chunk in self.chunks())

    def expect_close(self, a: Tensor, b: Tensor, rule: str) -> None:
        self.expect(bool((a.detach() - b.detach()).abs() <= TOLERANCE * max(self.scale, 1e-12)), rule)

    def parts_come_from_shared_fields(self) -> None:
        parts = self.algorithm.parts(self.rows.segment)
        self.expect(len(parts) > 0 and all(parts), "parts() must return at least one part, and no empty part")
        few = self.chunks()[0]
        self.expect(self.algorithm.parts(few.segment) == parts, "parts() must not depend on the rows")
        entries = [entry for part in parts for entry in part]
        self.expect(len(set(entries)) == len(entries), "an entry must be in one part only")

    def anchors_are_declared(self) -> None:
        anchors = self.algorithm.anchors().values()
        self.expect(all(isinstance(anchor, Anchor) for anchor in anchors), "anchors() must contain Anchor values")
        missing = sorted({anchor.snapshot for anchor in anchors} - {"live", *self.algorithm.needs.snapshots})
        self.expect(not missing, f"needs.snapshots must contain the snapshots of anchors(); {missing} are missing")

    def anchor_pass_equals_the_forward(self) -> None:
        now = self.progress()
        for part in self.algorithm.parts(self.rows.segment):
            outputs = self.algorithm.loss(self.stage, self.rows, part, now).outputs
            for name, anchor in self.algorithm.anchors().items():
                value = self.algorithm.anchor(self.rows, name, part)
                same = value is not None and torch.equal(value, outputs[anchor.quantity])
                self.expect(same, f"anchor {name!r} of measure() must have the bits of loss()")

    def totals_add_up(self) -> None:
        if self.algorithm.needs.totals:
            per_chunk = [self.algorithm.totals(chunk, START) for chunk in self.chunks()]
            whole = self.algorithm.totals(self.rows, START)
            self.expect(torch.allclose(torch.stack(per_chunk).sum(0), whole), "totals() must be sums over rows")

    def loss_is_a_sum_over_rows(self) -> None:
        apart = torch.stack([self.total(chunk).detach() for chunk in self.chunks()]).sum()
        self.expect_close(self.total(self.rows), apart, "loss() must be a SUM over rows")
        count = sum(self.algorithm.count(chunk) for chunk in self.chunks())
        self.expect(abs(count - self.algorithm.count(self.rows)) < 1e-6, "count() must be a sum over rows")

    def weights_are_linear(self) -> None:
        size = self.algorithm.needs.rows_together
        counted = self.rows.slice(size, len(self.rows))
        weight = self.rows.weight.clone()
        weight[:size] = 0.0
        masked = self.rows.replace(weight=weight)
        self.expect_close(self.total(counted), self.total(masked), "a row of weight 0 must not change the loss")
        counts = self.algorithm.count(masked) - self.algorithm.count(counted)
        self.expect(abs(counts) < 1e-6, "a row of weight 0 must not be counted")
        half_of_double = self.total(self.rows.replace(weight=2 * self.rows.weight)) / 2
        self.expect_close(half_of_double, self.total(self.rows), "the loss must be linear in the weights")

    def order_of_rows_does_not_matter(self) -> None:
        size = self.algorithm.needs.rows_together
        starts = range(len(self.rows) - size, -1, -size)
        turned = self.rows.select([start + i for start in starts for i in range(size)])
        self.expect_close(self.total(turned), self.total(self.rows), "the loss must not depend on the order of rows")

    def outputs_are_detached(self) -> None:
        part = self.algorithm.parts(self.rows.segment)[0]
        result = self.algorithm.loss(self.stage, self.rows, part, self.now)
        self.expect(result.loss.requires_grad and result.loss.dim() == 0, "loss must be a scalar with a gradient")
        per_chunk = [self.algorithm.loss(self.stage, chunk, part, self.now).outputs for chunk in self.chunks()]
        for name, output in result.outputs.items():
            self.expect(not output.requires_grad, f"output {name!r} must be detached")
            entries = sum(len(outputs[name]) for outputs in per_chunk)
            self.expect(len(output) == entries, f"output {name!r} must have the entries of its rows and no others")

    def metrics_are_named_and_finite(self) -> None:
        part = self.algorithm.parts(self.rows.segment)[0]
        metrics = self.algorithm.loss(self.stage, self.rows, part, self.now).metrics
        unknown = [name for name in metrics if not is_metric(name)]
        self.expect(not unknown, f"metrics must be in the table docs/metrics.md, or be named custom/...: {unknown}")
        tracked = [name for name, m in metrics.items() if isinstance(m.total, Tensor) and m.total.requires_grad]
        self.expect(not tracked, f"metrics must not require gradients: {tracked}")
        bad = [name for name, value in values(metrics).items() if value != value or abs(value) == float("inf")]
        self.expect(not bad, f"metrics must be finite: {bad}")
