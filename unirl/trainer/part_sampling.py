"""Divides the parts of a request between the engine and the training devices that join it.

Who samples a part changes no bit of it: noise and tokens follow from the weights, the prompts and the keys of a row.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from unirl.distributed.group.base import Pool
from unirl.rollout.engine.base import DedicatedEngine, RolloutEngine
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp

SampledPart = tuple[RolloutReq, RolloutResp]
"""A part with the weights that its samples come from, and its samples."""
JOIN_TIMER = "join"
"""The timer of sampling on the training devices."""
JOINING_THREAD = "sampling of parts"
"""The name of the thread that asks the training devices for parts."""


@dataclass
class JoiningEngine:
    """A second engine, on the training devices. It samples parts while the loop waits for samples.

    It sleeps in main memory otherwise, so that training has the memory of its devices.
    """

    engine: DedicatedEngine
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_lent: bool = False
    """The loop waits, so the training devices are free."""
    is_busy: bool = False
    """The engine samples a part."""
    is_awake: bool = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lends the training devices in the block. A part that is sampled at its end is finished first."""
        with self.changed:
            self.is_lent = True
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self.is_lent = False
                self.changed.wait_for(lambda: not self.is_busy)
            if self.is_awake:
                self.engine.sleep()
                self.is_awake = False

    def begin(self) -> None:
        """Bring the engine to its devices before a part. The caller has set `is_busy`."""
        if not self.is_awake:
            self.engine.wake_up()
            self.is_awake = True

    def end(self) -> None:
        """The engine is done with a part."""
        with self.changed:
            self.is_busy = False
            self.changed.notify_all()


Sample = Callable[[RolloutReq, RolloutEngine, str], SampledPart]
"""Samples a part on an engine. The third argument is the timer of the work."""
Done = Callable[[int, SampledPart], None]
"""Takes a part that is sampled, with its number. Calls come one after another, in any order of parts."""


@dataclass(frozen=True, kw_only=True)
class PartSampling:
    """Divides the parts of a request among those who can sample them."""

    pool: Pool
    rollout: RolloutEngine
    joining: JoiningEngine | None = None

    def __call__(self, parts: Sequence[RolloutReq], sample: Sample, done: Done) -> None:
        """Sample all parts, the first ones first. Raises the first error, after all others have ended."""
        queue = PartQueue(parts, sample, done, self.joining)
        joins = None if self.joining is None else self._thread(queue, self.joining.engine)
        queue.work(self.rollout, "generate")
        if joins is not None:
            joins.join()
        if queue.error is not None:
            raise queue.error

    def lent(self) -> AbstractContextManager[None]:
        """The loop waits in the block, so that the training devices may join."""
        return nullcontext() if self.joining is None else self.joining.lent()

    def _thread(self, queue: PartQueue, engine: RolloutEngine) -> threading.Thread:
        step = self.pool.step

        def work() -> None:
            self.pool.step = step
            queue.work(engine, JOIN_TIMER)

        thread = threading.Thread(target=work, name=JOINING_THREAD, daemon=True)
        thread.start()
        return thread


class PartQueue:
    """The parts of one request that nobody samples yet."""

    def __init__(
        self, parts: Sequence[RolloutReq], sample: Sample, done: Done, joining: JoiningEngine | None = None
    ) -> None:
        self.waiting = deque(enumerate(parts))
        self.sample, self.done, self.joining = sample, done, joining
        self.changed = threading.Condition() if joining is None else joining.changed
        self.error: BaseException | None = None
        """The first error. No part is begun after it."""

    def work(self, engine: RolloutEngine, timer: str) -> None:
        """Sample parts on an engine until none waits."""
        joins = self.joining is not None and engine is self.joining.engine
        try:
            while (taken := self._take(joins)) is not None:
                sampled = self._sampled(taken[1], engine, timer, joins)
                with self.changed:
                    self.done(taken[0], sampled)
        except BaseException as error:  # raised again by the thread that asked for the parts
            with self.changed:
                self.error = self.error or error
                self.waiting.clear()
                self.changed.notify_all()

    def _take(self, joins: bool) -> tuple[int, RolloutReq] | None:
        """The next part, with its number. The joining engine waits until it is lent."""
        with self.changed:
            if joins:
                assert self.joining is not None
                joining = self.joining
                self.changed.wait_for(lambda: joining.is_lent or not self.waiting)
                joining.is_busy = bool(self.waiting)
            taken = self.waiting.popleft() if self.waiting else None
            if not self.waiting:
                self.changed.notify_all()
            return taken

    def _sampled(self, part: RolloutReq, engine: RolloutEngine, timer: str, joins: bool) -> SampledPart:
        if not joins:
            return self.sample(part, engine, timer)
        assert self.joining is not None
        try:
            self.joining.begin()
            return self.sample(part, engine, timer)
        finally:
            self.joining.end()
