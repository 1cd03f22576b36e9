"""Does a loss keep the contract that the train stack relies on?

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
"""Relative; between sums of the same float32 numbers in another order."""

Algorithm = StageAlgorithm[Any]


def check_algorithm(algorithm: Algorithm, stage: Any, track: RolloutTrack) -> None:
    """Raises AssertionError naming the broken rule. `track` is a rollout of `stage` with at least four rows.

    Non-live anchors are filled by the stage's own weights, as a snapshot of them would give.
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
    _columns_are_detached(algorithm, stage, prepared, now)
    _metrics_are_named_and_finite(algorithm, stage, prepared, now)


def prepared_track(algorithm: Algorithm, stage: Any, track: RolloutTrack) -> RolloutTrack:
    """The track with all its anchors, every snapshot being the stage's own weights."""
    for snapshot in sorted({anchor.snapshot for anchor in algorithm.anchors().values()}):
        with torch.no_grad():
            segment, _ = algorithm.prepare_segment(stage, track, snapshot)
        track = track.replace(segment=segment)
    return track


def moved_away(track: RolloutTrack) -> RolloutTrack:
    """The track with anchors of policies that are a little different: where all agree, many a loss is 0."""
    generator = torch.Generator().manual_seed(0)

    def moved(column: Tensor) -> Tensor:
        noise = torch.randn(column.shape, generator=generator).to(column)
        return column + 1e-2 * noise

    anchors = {name: moved(column) for name, column in track.segment.anchors.items()}
    return track.replace(segment=track.segment.replace(anchors=anchors))


def step_of(algorithm: Algorithm, prepared: RolloutTrack) -> TrainingProgress:
    """The start of a run, in a step of exactly these rows."""
    return replace(START, totals=tuple(algorithm.totals(prepared, START).tolist())) if algorithm.needs.totals else START


def total_loss(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress = START) -> Tensor:
    """[] the sum over all parts, with its graph."""
    return torch.stack([algorithm.loss(stage, rows, part, now).loss for part in algorithm.parts(rows.segment)]).sum()


def _expect(algorithm: Algorithm, holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(f"{type(algorithm).__name__}: {rule}")


def _close(a: Tensor, b: Tensor, scale: float) -> bool:
    return bool((a.detach() - b.detach()).abs() <= TOLERANCE * max(scale, 1e-12))


def _size(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress) -> float:
    """The sum of the rows' absolute losses: what round-off is relative to."""
    return sum(abs(total_loss(algorithm, stage, row, now).item()) for row in rows.chunk(algorithm.needs.rows_together))


def _parts_come_from_shared_fields(algorithm: Algorithm, track: RolloutTrack) -> None:
    parts = algorithm.parts(track.segment)
    few = track.slice(0, algorithm.needs.rows_together)
    _expect(algorithm, len(parts) > 0 and all(parts), "parts() must not be empty, nor any part of it")
    _expect(algorithm, algorithm.parts(few.segment) == parts, "parts() must not depend on the rows")
    entries = [entry for part in parts for entry in part]
    _expect(algorithm, len(set(entries)) == len(entries), "an entry may stand in one part only")


def _anchors_are_declared(algorithm: Algorithm) -> None:
    anchors = algorithm.anchors()
    _expect(algorithm, all(isinstance(a, Anchor) for a in anchors.values()), "anchors() must hold Anchor values")
    missing = {anchor.snapshot for anchor in anchors.values()} - {"live"} - set(algorithm.needs.snapshots)
    _expect(algorithm, not missing, f"needs.snapshots must name the anchors' snapshots; {sorted(missing)} are missing")


def _anchor_pass_equals_the_forward(algorithm: Algorithm, stage: Any, prepared: RolloutTrack) -> None:
    now = step_of(algorithm, prepared)
    for part in algorithm.parts(prepared.segment):
        columns = algorithm.loss(stage, prepared, part, now).outputs
        for name, anchor in algorithm.anchors().items():
            column = algorithm.anchor(prepared, name, part)
            same = column is not None and torch.equal(column, columns[anchor.quantity])
            _expect(algorithm, same, f"measure() must give anchor {name!r} the bits of loss()'s own forward")


def _totals_add_up(algorithm: Algorithm, rows: RolloutTrack) -> None:
    if algorithm.needs.totals:
        pieces = [algorithm.totals(piece, START) for piece in rows.chunk(algorithm.needs.rows_together)]
        whole = algorithm.totals(rows, START)
        _expect(algorithm, torch.allclose(torch.stack(pieces).sum(0), whole), "totals() must be sums over rows")


def _sum_over_rows(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress) -> None:
    size = algorithm.needs.rows_together
    pieces = rows.chunk(size)
    apart = torch.stack([total_loss(algorithm, stage, piece, now).detach() for piece in pieces]).sum()
    together = total_loss(algorithm, stage, rows, now)
    _expect(algorithm, _close(together, apart, _size(algorithm, stage, rows, now)), "loss() must be a SUM over rows")
    count = sum(algorithm.count(piece) for piece in pieces)
    _expect(algorithm, abs(count - algorithm.count(rows)) < 1e-6, "count() must be a sum over rows")


def _weights_are_linear(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress) -> None:
    size = algorithm.needs.rows_together
    kept = rows.slice(size, len(rows))
    weight = rows.weight.clone()
    weight[:size] = 0.0
    dropped = rows.replace(weight=weight)
    scale = _size(algorithm, stage, rows, now)
    alone, among = total_loss(algorithm, stage, kept, now), total_loss(algorithm, stage, dropped, now)
    _expect(algorithm, _close(alone, among, scale), "a row of weight 0 must not change the loss")
    counts = algorithm.count(dropped) - algorithm.count(kept)
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


def _columns_are_detached(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress) -> None:
    part = algorithm.parts(rows.segment)[0]
    result = algorithm.loss(stage, rows, part, now)
    _expect(algorithm, result.loss.requires_grad and result.loss.dim() == 0, "loss must be a scalar with a gradient")
    pieces = [algorithm.loss(stage, piece, part, now).outputs for piece in rows.chunk(algorithm.needs.rows_together)]
    for name, column in result.outputs.items():
        _expect(algorithm, not column.requires_grad, f"column {name!r} must be detached")
        entries = sum(len(piece[name]) for piece in pieces)
        _expect(algorithm, len(column) == entries, f"column {name!r} must hold the entries of its rows and no other")


def _metrics_are_named_and_finite(algorithm: Algorithm, stage: Any, rows: RolloutTrack, now: TrainingProgress) -> None:
    metrics = algorithm.loss(stage, rows, algorithm.parts(rows.segment)[0], now).metrics
    strange = [name for name in metrics if not name.startswith(("train/", "rollout/"))]
    _expect(algorithm, not strange, f"metrics are named train/... or rollout/..., not {strange}")
    tracked = [name for name, m in metrics.items() if isinstance(m.total, Tensor) and m.total.requires_grad]
    _expect(algorithm, not tracked, f"metrics must not hold a graph: {tracked}")
    found = values(metrics)
    bad = [name for name, value in found.items() if value != value or abs(value) == float("inf")]
    _expect(algorithm, not bad, f"metrics must be finite: {bad}")
