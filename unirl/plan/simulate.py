"""The time of a step in the long run, from the seconds of its phases: an event-driven simulation of the loop.

It follows unirl/trainer/generation.py. In step s the loop waits until the engine is idle and sends it the weights W_s.
The engine then generates step s + k in parts, and each part is scored as soon as it is generated. The loop waits for
the samples and the scores of step s and trains on them. Devices do one thing at a time, in the order in which it was
asked for. No process is started and nothing is measured here.

In free order (unirl/trainer/free_generation.py) the loop takes the engine between two parts instead, and up to
`steps_ahead` steps are under way, so steps of different lengths even out.

In an elastic run (unirl/trainer/part_sampling.py) the training devices take parts while the loop waits for samples. The
weights are sent to their engine, too, after that of the engine. Bringing an engine to its devices takes no time here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Place = Literal["train", "rollout", "reward"]
"""The devices of a role."""
STEPS = 6
"""Steps that are simulated before those that are counted, in which the queues fill; and the fewest that are counted."""


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds:
    """Seconds of each phase of a step, on the devices that it has."""

    generate: float
    score: float
    train: float
    sync: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LoopSchedule:
    """The loop to simulate."""

    seconds: PhaseSeconds
    max_staleness: int = 0
    reward_parts: int = 1
    reward_place: Place = "reward"
    """The devices that score: their own, or those of another role."""
    order: Literal["fixed", "free"] = "fixed"
    steps_ahead: int | None = None
    """Steps that wait to be trained or are generated, in free order. None = max_staleness."""
    lengths: Sequence[float] = (1.0,)
    """The time of generation in steps 0, 1, ... over its mean, again and again."""
    join: float | None = None
    """Seconds in which the training devices alone would generate a step, if they join the engine. None: they do not."""

    @property
    def num_ahead(self) -> int:
        """Steps that are begun before the weights learn from an earlier one."""
        return self.steps_ahead or self.max_staleness

    @property
    def num_counted(self) -> int:
        """The steps that are counted: each length as often as any other."""
        return math.ceil(STEPS / len(self.lengths)) * len(self.lengths)


@dataclass(frozen=True)
class Prediction:
    """A step in the long run."""

    step_seconds: float
    busy: dict[Place, float]
    """The share of the step in which the devices of each role work."""

    @property
    def bottleneck(self) -> Place:
        """The devices that work the largest share of a step."""
        return max(self.busy, key=lambda place: self.busy[place])


@dataclass(eq=False)
class WorkEnd:
    """Something that a task can wait for."""

    is_done: bool = False
    waiting: list[Task] = field(default_factory=list)


Task = Generator[WorkEnd, None, None]
"""A thread of the loop. It yields each event that it waits for."""


@dataclass
class PlaceQueue:
    """The devices of a place: one queue, first come, first served."""

    queue: deque[tuple[float, WorkEnd]] = field(default_factory=deque)
    is_busy: bool = False
    spans: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each piece of work."""


class Simulation:
    """A clock, the devices of every place, and the tasks that wait for them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.places: dict[Place, PlaceQueue] = {"train": PlaceQueue(), "rollout": PlaceQueue(), "reward": PlaceQueue()}
        self._ends: list[tuple[float, int, Place, WorkEnd]] = []
        self._order = itertools.count()

    def start(self, task: Task) -> WorkEnd:
        """Run a task up to its first wait. Returns the event of its end."""
        end = WorkEnd()
        self._advance(self._with_end(task, end))
        return end

    def work(self, place: Place, seconds: float, is_next: bool = False) -> WorkEnd:
        """Ask the devices of a place for so many seconds of work. Returns the event of its end.

        Args:
            is_next: before what waits there already.
        """
        event = WorkEnd()
        queue = self.places[place].queue
        (queue.appendleft if is_next else queue.append)((seconds, event))
        self._serve(place)
        return event

    def run(self) -> None:
        """Go on until nothing is left to do."""
        while self._ends:
            self.now, _, place, event = heapq.heappop(self._ends)
            self.places[place].is_busy = False
            self.finish(event)
            self._serve(place)

    def finish(self, event: WorkEnd) -> None:
        """Something ended now: those who wait for it go on."""
        event.is_done = True
        for task in event.waiting:
            self._advance(task)

    def _serve(self, place: Place) -> None:
        devices = self.places[place]
        if devices.queue and not devices.is_busy:
            seconds, event = devices.queue.popleft()
            devices.is_busy = True
            devices.spans.append((self.now, self.now + seconds))
            heapq.heappush(self._ends, (self.now + seconds, next(self._order), place, event))

    def _with_end(self, task: Task, end: WorkEnd) -> Task:
        yield from task
        self.finish(end)

    def _advance(self, task: Task) -> None:
        for event in task:
            if not event.is_done:
                event.waiting.append(task)
                return


@dataclass
class Lending:
    """Whether the training devices may sample parts, and the part that they sample."""

    simulation: Simulation
    is_open: bool = False
    opened: WorkEnd = field(default_factory=WorkEnd)
    part: WorkEnd = field(default_factory=lambda: WorkEnd(is_done=True))

    def while_waiting(self, event: WorkEnd) -> Task:
        """Lend the devices until the event. A part that they still sample then goes before training in their queue."""
        if event.is_done:
            return
        self.is_open = True
        self.simulation.finish(self.opened)
        yield event
        self.is_open, self.opened = False, WorkEnd()


def predict(schedule: LoopSchedule) -> Prediction:
    """The mean time of a step of a long run, and how busy the devices are."""
    simulation = Simulation()
    ends: list[float] = []
    simulation.start(_loop(simulation, schedule, ends))
    simulation.run()
    begin, end = ends[STEPS - 1], ends[-1]
    busy = {place: _overlap(devices.spans, begin, end) for place, devices in simulation.places.items()}
    return Prediction((end - begin) / schedule.num_counted, busy)


def _overlap(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """The share of the time from `begin` to `end` that the spans cover."""
    return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in spans) / max(end - begin, 1e-12)


def _loop(simulation: Simulation, schedule: LoopSchedule, ends: list[float]) -> Task:
    """The loop of unirl/trainer/loop.py, of a run that goes on after the steps that are counted."""
    generated: list[WorkEnd] = []
    scores: list[list[WorkEnd]] = []
    lending = Lending(simulation)
    for step in range(STEPS + schedule.num_counted):
        if generated and schedule.order == "fixed":
            yield from lending.while_waiting(generated[-1])
        yield simulation.work("rollout", schedule.seconds.sync, is_next=schedule.order == "free")
        if schedule.join is not None:
            yield simulation.work("train", schedule.seconds.sync)
        while len(generated) <= step + schedule.num_ahead:
            previous = generated[-1] if generated else None
            scores.append([])
            length = schedule.lengths[len(generated) % len(schedule.lengths)]
            task = _generation(simulation, schedule, length, previous, scores[-1], lending)
            generated.append(simulation.start(task))
        yield from lending.while_waiting(generated[step])
        yield from scores[step]
        yield simulation.work("train", schedule.seconds.train)
        ends.append(simulation.now)


def _generation(
    simulation: Simulation,
    schedule: LoopSchedule,
    length: float,
    previous: WorkEnd | None,
    scores: list[WorkEnd],
    lending: Lending,
) -> Task:
    """The thread that generates one step after the one before it. The scores follow.

    Args:
        length: the time of generation in this step over its mean.
    """
    if previous is not None:
        yield previous
    share = length / schedule.reward_parts
    waiting = deque([schedule.seconds.score / schedule.reward_parts] * schedule.reward_parts)
    if schedule.join is not None:
        simulation.start(_joining(simulation, schedule, schedule.join * share, waiting, scores, lending))
    while waiting:
        score = waiting.popleft()
        yield simulation.work("rollout", schedule.seconds.generate * share)
        scores.append(simulation.work(schedule.reward_place, score))
    yield lending.part


def _joining(
    simulation: Simulation,
    schedule: LoopSchedule,
    seconds: float,
    waiting: deque[float],
    scores: list[WorkEnd],
    lending: Lending,
) -> Task:
    """The thread in which the training devices sample parts of a step while they are lent.

    Args:
        seconds: the time of a part.
        waiting: the seconds of scoring of each part that nobody samples yet.
    """
    while waiting:
        if not lending.is_open:
            yield lending.opened
            continue
        score = waiting.popleft()
        lending.part = simulation.work("train", seconds)
        yield lending.part
        scores.append(simulation.work(schedule.reward_place, score))
