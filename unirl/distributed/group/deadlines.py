"""How long a call may leave its workers silent, learned from how long the same call took before in the same run."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

FACTOR = 10.0
LEAST_S = 60.0
ENOUGH = 3
"""Calls after which the median counts: the first ones import, compile and load."""
REMEMBERED = 32


@dataclass
class LearnedDeadlines:
    """The durations of calls, each named with the phase in which the driver makes it."""

    durations: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=REMEMBERED)))

    def note(self, what: str, seconds: float) -> None:
        """Remember a call that returned."""
        self.durations[what].append(seconds)

    def limit_s(self, what: str) -> float:
        """Seconds after which a worker of the call that does not even answer counts as frozen.

        It is ten times the median of the calls before, at least 60 s. Infinite before three of them returned.
        """
        known = self.durations.get(what, ())
        return math.inf if len(known) < ENOUGH else max(FACTOR * median(known), LEAST_S)
