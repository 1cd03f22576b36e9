"""The proof that weights arrived: what was sent against what each rank of the engine reads back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unirl.config.errors import SyncError
from unirl.distributed.weight_sync.base import Arrival, CanaryResult, Layout, ParamMapping, SendReport, TransferConfig
from unirl.distributed.weight_sync.fingerprint import Fingerprint

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of the canary's relative difference, by dtype, where equal bits cannot be expected."""


def check_arrivals(layout: Layout, sent: SendReport, arrivals: Sequence[Arrival]) -> None:
    """Raises SyncError, naming the tensor, unless every rank holds what was sent."""
    missing = [name for name in layout.tensors if name not in sent.fingerprints]
    if missing:
        raise SyncError(f"{missing[0]!r} was announced and never sent ({len(missing)} tensors)")
    for arrival in arrivals:
        _check_version(sent, arrival)
        for name, expected in sent.fingerprints.items():
            _check_tensor(name, expected, arrival)


def _check_version(sent: SendReport, arrival: Arrival) -> None:
    if (arrival.version, arrival.weights) == (sent.version, sent.weights):
        return
    held = "nothing" if arrival.version is None else f"version {arrival.version} ({arrival.weights})"
    first = next(iter(sent.fingerprints))
    raise SyncError(
        f"version {sent.version} ({sent.weights}) was sent, and {held} arrived at engine rank {arrival.rank}: "
        f"{first!r} and {len(sent.fingerprints) - 1} more tensors are stale"
    )


def _check_tensor(name: str, expected: Fingerprint, arrival: Arrival) -> None:
    place = f"at engine rank {arrival.rank} (version {arrival.version}, {arrival.weights})"
    if name not in arrival.received:
        raise SyncError(
            f"{name!r} was sent as {expected} and did not arrive {place}: it was dropped on the way, and the engine "
            "still computes with the values from before"
        )
    found = arrival.fingerprints.get(name)
    if found != expected:
        raise SyncError(
            f"{name!r} did not arrive as it was sent {place}: sent {expected}, the engine holds {found}. "
            f"{_likely_cause(expected, found)}"
        )


def _likely_cause(expected: Fingerprint, found: Fingerprint | None) -> str:
    if found is None:
        return "The engine does not read this tensor back"
    if found.shape != expected.shape:
        return "The engine changed the parameter's shape after it was bound"
    if found.dtype != expected.dtype:
        return "The engine changed the parameter's dtype after it was bound"
    return (
        "Shape and dtype are right and the bytes are not: bits flipped or part of a bucket was lost on the way, values "
        "were transposed or rounded, it was bound to another tensor's name, or the engine wrote to it afterwards"
    )


def check_canary(
    layout: Layout, mapping: ParamMapping, config: TransferConfig, results: Sequence[CanaryResult]
) -> float:
    """The largest absolute difference of the ranks. Raises SyncError when a forward is not the trainer's."""
    exact = _same_bits_expected(layout, mapping, config)
    limit = 0.0 if exact else _tolerance(layout, mapping, config)
    rule = "the bits should be equal, as device, dtypes and payload are" if exact else f"{limit:g} relative is allowed"
    for rank, result in enumerate(results):
        passed = result.equal if exact else result.relative <= limit  # False for NaN
        if not passed:
            raise SyncError(
                f"every tensor arrived, and yet the forward of engine rank {rank} is not the trainer's: on the canary "
                f"input they differ by {result.absdiff:.3g} ({result.relative:.3g} relative); {rule}. Likely causes: "
                "the engine loaded another base checkpoint, an adapter is inactive or a second one acts, or the engine "
                "computes in another way"
            )
    return max(result.absdiff for result in results)


def _same_bits_expected(layout: Layout, mapping: ParamMapping, config: TransferConfig) -> bool:
    unrounded = all(info.dtype == config.wire(name) == config.stored[name] for name, info in layout.tensors.items())
    return layout.payload != "merged" and unrounded and layout.numerics == mapping.numerics


def _tolerance(layout: Layout, mapping: ParamMapping, config: TransferConfig) -> float:
    """That of the coarsest dtype in which anything is computed, sent or stored."""
    dtypes = {layout.numerics.compute, mapping.numerics.compute, *config.stored.values()}
    return max(TOLERANCE[dtype] for dtype in dtypes | {config.wire(name) for name in layout.tensors})
