"""Values of the elements of a few samples, collected while the samples are trained, to be shown to people.

    log_ratio   log-prob in the update that trained the sample, before its optimizer step, minus the recorded one, nats
    advantage   of each element, for samples whose elements do not all have the advantage of the sample

The values are those of the forward passes that training makes anyway. They stay on the device until `by_sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unirl.algorithms.base import Observe, Part
from unirl.types.device import to_device
from unirl.types.results import Series
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import PackedSegment

ADVANTAGE = "advantage"

Watch = Callable[[int, RolloutTrack], Observe | None]
"""The observer of micro-batch number i, which has these rows. None: it has no rows of interest."""


@dataclass
class _Rows:
    rows: RolloutTrack
    parts: list[Part] = field(default_factory=list)
    values: dict[str, list[Tensor]] = field(default_factory=dict)

    def observe(self, part: Part, values: dict[str, Tensor]) -> None:
        self.parts.append(part)
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)


class ElementValues:
    """Collects the values of the samples `ids`."""

    def __init__(self, ids: Collection[str]) -> None:
        self._ids = frozenset(ids)
        self._watched: list[_Rows] = []

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._ids

    def watch(self, number: int, micro: RolloutTrack) -> Observe | None:
        """The observer of a micro-batch. None if it has none of the samples."""
        if self._ids.isdisjoint(micro.sample_ids):
            return None
        self._watched.append(_Rows(micro.replace(decoded=None)))
        return self._watched[-1].observe

    def watch_places(self, rows: RolloutTrack[PackedSegment], places: Sequence[Tensor]) -> Watch | None:
        """Observers of micro-batches of single elements of `rows`. None if these have none of the samples.

        Args:
            places: the elements of each micro-batch, as positions in the packed fields, on the CPU.
        """
        if self._ids.isdisjoint(rows.sample_ids):
            return None
        if not self._watched:
            self._watched.append(_Rows(rows.replace(decoded=None), [(0,)]))
        packed = self._watched[0].values

        def watch(number: int, micro: RolloutTrack) -> Observe:
            def observe(part: Part, values: dict[str, Tensor]) -> None:
                for name, value in values.items():
                    if name not in packed:
                        packed[name] = [torch.full_like(rows.segment.logp, torch.nan, device=value.device)]
                    chosen = places[number]
                    packed[name][0][to_device(chosen, value.device)] = value[: len(chosen)].to(rows.segment.logp.dtype)

            return observe

        return watch

    def by_sample(self) -> dict[str, Series]:
        """The values along each sample that was trained, by id. A device is waited for only if there are any."""
        found: dict[str, Series] = {}
        for each in self._watched:
            for name, values in each.values.items():
                rows = each.rows.segment.along_rows(each.parts, values)
                own = None if each.rows.advantages is None else each.rows.advantages.tolist()
                for i, sample_id in enumerate(each.rows.sample_ids):
                    is_own = name == ADVANTAGE and own is not None and all(value == own[i] for value in rows[i])
                    if sample_id in self and not is_own:
                        # Copies that fill up micro-batches come after the sample itself.
                        found.setdefault(sample_id, {}).setdefault(name, rows[i])
        return found
