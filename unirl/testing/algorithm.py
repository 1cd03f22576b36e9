"""The check of a loss: the contract that the train stack relies on.

stage = toy_stage()
check_algorithm(MyLoss(), stage, toy_track(stage))
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unirl.algorithms.base import START, StageAlgorithm
from unirl.types.protocols import Anchor, TrainingProgress
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack

TOLERANCE = 1e-5
"""Relative difference allowed between sums of the same float32 numbers in another order."""

Algorithm = StageAlgorithm[Any]


def check_algorithm(algorithm: Algorithm, stage: Any, track: RolloutTrack) -> None:
    """Raises AssertionError with the rule that is broken. `track` is a rollout of `stage` with at least four rows.

    All anchors, also those of snapshots, are computed with the current weights of the stage.
    """
    _parts_come_from_shared_fields(algorithm, track)
    _anchors_are_declared(algorithm)
    prepared = prepared_track(algorithm, stage, track)
    _anchor_pass_equals_the_forward(algorithm, stage, prepared)
    prepared = moved_away(prepared)
    _totals_add_up(algorithm, prepared)
    now = step_of(algorithm, prepared)
    _sum_over_rows(algorithm, stage, prepared, now)
    _weights_are_linear(algorithm, stage, prepared, now)
    _order_of_rows(algorithm, stage, prepared, now)
    _outputs_are_detached(algorithm, stage, prepared, now)
    _metrics_are_named_and_finite(algorithm, stage, prepared, now)


def prepared_track(algorithm: Algorithm, stage: Any, track: RolloutTrack) -> RolloutTrack:
    """The track with all anchors. Every snapshot has the current weights of the stage."""
    for snapshot in sorted({anchor.snapshot for anchor in algorithm.anchors().values()}):
        with torch.no_grad():
            segment, _ = algorithm.prepare_segment(stage, track, snapshot)
        track = track.replace(segment=segment)
    return track


def moved_away(track: RolloutTrack) -> RolloutTrack:
    """The track with slightly different anchors. With equal anchors, many losses are 0."""
    generator = torch.Generator().manual_seed(0)

    def moved(anchor: Tensor) -> Tensor:
        noise = torch.randn(anchor.shape, generator=generator).to(anchor)
        return anchor + 1e-2 * noise

    anchors = {name: moved(anchor) for name, anchor in track.segment.anchors.items()}
    return track.replace(segment=track.segment.replace(anchors=anchors))


def step_of(algorithm: Algorithm, prepared: RolloutTrack) -> TrainingProgress:
    """Progress at the start of a run, for a step with exactly these rows."""
    return replace(START, totals=tuple(algorithm.totals(prepared, START).tolist())) if algorithm.needs.totals else START


def total_loss(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress = START) -> Tensor:
    """[] the sum of the losses of all parts, with its graph."""
    return torch.stack([algorithm.loss(stage, rows, part, now).loss for part in algorithm.parts(rows.segment)]).sum()


def _expect(algorithm: Algorithm, holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(f"{type(algorithm).__name__}: {rule}")


def _close(a: Tensor, b: Tensor, scale: float) -> bool:
    return bool((a.detach() - b.detach()).abs() <= TOLERANCE * max(scale, 1e-12))


def _size(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress) -> float:
    """The sum of the absolute losses of the rows, to which round-off errors are relative."""
    return sum(abs(total_loss(algorithm, stage, row, now).item()) for row in rows.chunk(algorithm.needs.rows_together))


def _parts_come_from_shared_fields(algorithm: Algorithm, track: RolloutTrack) -> None:
    parts = algorithm.parts(track.segment)
    few = track.slice(0, algorithm.needs.rows_together)
    _expect(algorithm, len(parts) > 0 and all(parts), "parts() must return at least one part, and no empty part")
    _expect(algorithm, algorithm.parts(few.segment) == parts, "parts() must not depend on the rows")
    entries = [entry for part in parts for entry in part]
    _expect(algorithm, len(set(entries)) == len(entries), "an entry must be in one part only")


def _anchors_are_declared(algorithm: Algorithm) -> None:
    anchors = algorithm.anchors()
    _expect(algorithm, all(isinstance(a, Anchor) for a in anchors.values()), "anchors() must contain Anchor values")
    missing = {anchor.snapshot for anchor in anchors.values()} - {"live"} - set(algorithm.needs.snapshots)
    _expect(
        algorithm,
        not missing,
        f"needs.snapshots must contain the snapshots of anchors(); {sorted(missing)} are missing",
    )


def _anchor_pass_equals_the_forward(algorithm: Algorithm, stage: Any, prepared: RolloutTrack) -> None:
    now = step_of(algorithm, prepared)
    for part in algorithm.parts(prepared.segment):
        outputs = algorithm.loss(stage, prepared, part, now).outputs
        for name, anchor in algorithm.anchors().items():
            value = algorithm.anchor(prepared, name, part)
            same = value is not None and torch.equal(value, outputs[anchor.quantity])
            _expect(algorithm, same, f"anchor {name!r} of measure() must have the bits of loss()")


def _totals_add_up(algorithm: Algorithm, rows: RolloutTrack) -> None:
    if algorithm.needs.totals:
        chunks = rows.chunk(algorithm.needs.rows_together)
        per_chunk = [algorithm.totals(chunk, START) for chunk in chunks]
        whole = algorithm.totals(rows, START)
        _expect(algorithm, torch.allclose(torch.stack(per_chunk).sum(0), whole), "totals() must be sums over rows")


def _sum_over_rows(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress) -> None:
    size = algorithm.needs.rows_together
    chunks = rows.chunk(size)
    apart = torch.stack([total_loss(algorithm, stage, chunk, now).detach() for chunk in chunks]).sum()
    together = total_loss(algorithm, stage, rows, now)
    _expect(algorithm, _close(together, apart, _size(algorithm, stage, rows, now)), "loss() must be a SUM over rows")
    count = sum(algorithm.count(chunk) for chunk in chunks)
    _expect(algorithm, abs(count - algorithm.count(rows)) < 1e-6, "count() must be a sum over rows")


def _weights_are_linear(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress) -> None:
    size = algorithm.needs.rows_together
    counted = rows.slice(size, len(rows))
    weight = rows.weight.clone()
    weight[:size] = 0.0
    masked = rows.replace(weight=weight)
    scale = _size(algorithm, stage, rows, now)
    alone, among = total_loss(algorithm, stage, counted, now), total_loss(algorithm, stage, masked, now)
    _expect(algorithm, _close(alone, among, scale), "a row of weight 0 must not change the loss")
    counts = algorithm.count(masked) - algorithm.count(counted)
    _expect(algorithm, abs(counts) < 1e-6, "a row of weight 0 must not be counted")
    double = total_loss(algorithm, stage, rows.replace(weight=2 * rows.weight), now)
    _expect(
        algorithm,
        _close(double, 2 * total_loss(algorithm, stage, rows, now), 2 * scale),
        "the loss must be linear in the weights",
    )


def _order_of_rows(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress) -> None:
    size = algorithm.needs.rows_together
    starts = range(len(rows) - size, -1, -size)
    turned = rows.select([start + i for start in starts for i in range(size)])
    scale = _size(algorithm, stage, rows, now)
    same = _close(total_loss(algorithm, stage, turned, now), total_loss(algorithm, stage, rows, now), scale)
    _expect(algorithm, same, "the loss must not depend on the order of rows")


def _outputs_are_detached(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress) -> None:
    part = algorithm.parts(rows.segment)[0]
    result = algorithm.loss(stage, rows, part, now)
    _expect(algorithm, result.loss.requires_grad and result.loss.dim() == 0, "loss must be a scalar with a gradient")
    chunks = rows.chunk(algorithm.needs.rows_together)
    per_chunk = [algorithm.loss(stage, chunk, part, now).outputs for chunk in chunks]
    for name, output in result.outputs.items():
        _expect(algorithm, not output.requires_grad, f"output {name!r} must be detached")
        entries = sum(len(outputs[name]) for outputs in per_chunk)
        _expect(algorithm, len(output) == entries, f"output {name!r} must have the entries of its rows and no others")


def _metrics_are_named_and_finite(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress) -> None:
    metrics = algorithm.loss(stage, rows, algorithm.parts(rows.segment)[0], now).metrics
    misnamed = [name for name in metrics if not name.startswith(("train/", "rollout/"))]
    _expect(algorithm, not misnamed, f"metrics must be named train/... or rollout/..., not {misnamed}")
    tracked = [name for name, m in metrics.items() if isinstance(m.total, Tensor) and m.total.requires_grad]
    _expect(algorithm, not tracked, f"metrics must not require gradients: {tracked}")
    bad = [name for name, value in values(metrics).items() if value != value or abs(value) == float("inf")]
    _expect(algorithm, not bad, f"metrics must be finite: {bad}")
