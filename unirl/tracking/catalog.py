"""The runs below a folder, with the state, the steps and the reward of each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from unirl.tracking.console import duration
from unirl.tracking.record import RunRecord
from unirl.tracking.run_files import numbers

DEPTH = 4
"""Levels of folders that are searched for runs."""
TOTAL_STEPS = re.compile(rb"^num_rollouts: (\d{1,15})$", re.MULTILINE)


@dataclass(frozen=True)
class RunOverview:
    """What the table says about one run."""

    path: str
    status: str
    code: int | None
    """Exit status of a run that ended."""
    recipe: str
    scale: str
    """`toy` = random weights."""
    steps: int
    total_steps: int | None
    first_reward: float | None
    last_reward: float | None
    """Mean reward of the samples of the first and the last step."""
    created: str
    age_s: float
    """Seconds since the run was created."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Status, steps, reward and age as text."""
        status = self.status + (f" ({self.code})" if self.status == "failed" else "")
        steps = f"{self.steps}/{'?' if self.total_steps is None else self.total_steps}"
        rewards = [f"{value:.3f}" for value in (self.first_reward, self.last_reward) if value is not None]
        return status, steps, " -> ".join(rewards), duration(self.age_s)

    @property
    def is_readable(self) -> bool:
        """Returns True if the record of the run could be read."""
        return self.status != "unknown"


def run_roots(folder: Path) -> Iterator[Path]:
    """The folders of runs in and below `folder`. What commands made of a run lies inside it, and is not listed."""
    for place, folders, files in os.walk(folder):
        folders.sort()
        is_run = "run.json" in files or "metrics.jsonl" in files  # a damaged run may have lost the former
        if is_run:
            yield Path(place)
        if is_run or len(Path(place).relative_to(folder).parts) >= DEPTH:
            folders.clear()


def overview_of(run: RunRecord) -> RunOverview:
    """The facts about a run. Those that cannot be read are empty, and the status is `unknown` without a record."""
    facts, status = run.facts, run.status
    first, last = map(numbers, run.files.ends("metrics.jsonl"))
    created = "" if facts is None else facts.created
    return RunOverview(
        path=str(run.root),
        status=status.state,
        code=status.code,
        recipe="" if facts is None else facts.recipe,
        scale="" if facts is None else facts.scale,
        steps=int(last.get("step", 0)),
        total_steps=total_steps(run),
        first_reward=_reward(first),
        last_reward=_reward(last),
        created=created,
        age_s=_age(created),
    )


def total_steps(run: RunRecord) -> int | None:
    """The number of steps that a run is to take, without parsing all of its settings."""
    name = "config/resolved.yaml"
    found = TOTAL_STEPS.search(run.files.data(name) or b"") if run.files.exists(name) else None
    return int(found[1]) if found else None


def _age(created: str) -> float:
    """Seconds since a run was created. 0 for a date that cannot be read."""
    with suppress(ValueError, TypeError):  # TypeError: it names no time zone
        return (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()
    return 0.0


def _reward(row: Mapping[str, float]) -> float | None:
    """The mean reward of a step. None if the row has none."""
    return row.get("rollout/reward_mean")
