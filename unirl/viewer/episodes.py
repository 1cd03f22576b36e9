"""The stored episodes of a run whose policy acts in an environment: by step, by task, and each one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from statistics import fmean

from unirl.tracking.sample_index import IndexedSample, Kind
from unirl.tracking.samples import SampleRow
from unirl.viewer.library import RunLibrary
from unirl.viewer.samples import tile

MAX_STEPS = 20
"""Newest steps, and newest evaluations, whose episodes are read."""
MAX_TILES = 60
"""Newest episodes that are shown."""
SUCCESS, LENGTH, COUNT = "success", "steps", "episodes"
"""Facts of a row: whether it had success, if its environment reports that, its steps, and its number of episodes."""


def episodes(library: RunLibrary, id: str) -> dict[str, object]:
    """The newest stored episodes with their means by step and by task. Empty for a run without episodes."""
    run = library.open(id)
    with run.reading(tables=False) as record:
        steps: list[tuple[Kind, int]] = [("eval", step) for step in record.evaluated[-MAX_STEPS:]]
        steps += [("samples", step) for step in record.sampled[-MAX_STEPS:]]
        found = [
            IndexedSample(kind, step, n, row)
            for kind, step in sorted(steps, key=lambda place: (-place[1], place[0]))
            for n, row in enumerate(run.index.step(record, kind, step).rows)
            if _is_episode(row)
        ]
        return {
            "steps": _means(found, lambda each: (each.kind, each.step)),
            "tasks": _means(_newest(found), lambda each: (each.kind, _task(each.facts))),
            "rows": [tile(record, each) for each in islice(found, MAX_TILES)],
            "total": len(found),
            "problems": record.problems,
        }


def _is_episode(row: SampleRow) -> bool:
    return all(isinstance(row.facts.get(name), (int, float)) for name in (COUNT, LENGTH))


def _task(row: SampleRow) -> str:
    """The instruction, or the name of the first state."""
    return row.prompt or row.group_id.partition("@")[0]


def _newest(found: Sequence[IndexedSample]) -> list[IndexedSample]:
    """The episodes of the newest step of each task, so that no mean is over several policies."""
    steps: dict[tuple[Kind, str], int] = {}
    for each in found:
        place = each.kind, _task(each.facts)
        steps[place] = max(each.step, steps.get(place, each.step))
    return [each for each in found if each.step == steps[each.kind, _task(each.facts)]]


def _means(
    found: Sequence[IndexedSample], key: Callable[[IndexedSample], tuple[Kind, int | str]]
) -> list[dict[str, object]]:
    """A row for each key, in the order of its first episode: newest step, number of episodes, means of the others.

    The success is None if no environment reported it.
    """
    groups: dict[tuple[Kind, int | str], list[SampleRow]] = {}
    steps: dict[tuple[Kind, int | str], int] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each.facts)
        steps.setdefault(key(each), each.step)
    told = {key: [float(row.facts[SUCCESS]) for row in rows if SUCCESS in row.facts] for key, rows in groups.items()}
    return [
        {
            "kind": kind,
            "name": name,
            "step": steps[kind, name],
            "count": len(rows),
            "reward": fmean(row.reward for row in rows),
            "length": fmean(float(row.facts[LENGTH]) for row in rows),
            "success": fmean(told[kind, name]) if told[kind, name] else None,
        }
        for (kind, name), rows in groups.items()
    ]
