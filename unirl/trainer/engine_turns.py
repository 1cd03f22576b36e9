"""Who has the engine: the thread that samples, or the loop, which sends weights and evaluates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from unirl.distributed.weight_sync.base import SyncReport
from unirl.trainer.channel import ChannelClosed
from unirl.types.rollout_req import RolloutReq

Published = Mapping[str, SyncReport]
"""The weights that samples come from, by track."""


class EngineTurns(Protocol):
    """Shares the engine between the thread that samples and the loop."""

    def sampling(self, part: RolloutReq) -> AbstractContextManager[RolloutReq]:
        """The block samples `part`. Yields it with the weights that the engine has."""

    def send_again(self, req: RolloutReq) -> None:
        """Send the weights of a request again to an engine that lost them. The caller is the thread that samples."""

    def learning(self) -> AbstractContextManager[None]:
        """In the block the weights change, so they are not sent."""


@dataclass(frozen=True)
class StepEngine:
    """The loop sends weights between two steps of generation, when nobody samples. A request has one source."""

    push: Callable[[RolloutReq], None]
    """Sends the weights of a request, which are snapshots or do not change now."""

    def sampling(self, part: RolloutReq) -> AbstractContextManager[RolloutReq]:
        return nullcontext(part)

    def send_again(self, req: RolloutReq) -> None:
        self.push(req)

    def learning(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class FreeEngine:
    """The loop sends weights between two parts of a request, so the parts of a step may come from several weights."""

    publish: Callable[[], Published]
    """Sends the live weights."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    learns: threading.Lock = field(default_factory=threading.Lock)
    """Held while the weights change."""
    published: Published | None = None
    """The weights that the engine got last."""
    is_reserved: bool = True
    """The loop has the engine, or waits for it."""
    is_busy: bool = False
    """A thread samples, or sends weights again."""
    is_stopped: bool = False

    @contextmanager
    def sampling(self, part: RolloutReq) -> Iterator[RolloutReq]:
        """Waits until the engine has weights, and nobody else has the engine.

        Raises:
            ChannelClosed: the run ends.
        """
        with self._has_engine():
            assert self.published is not None, "the loop gives the engine back with weights"
            yield part.sampled_from(self.published)

    def send_again(self, req: RolloutReq) -> None:
        with self._has_engine(), self.learns:
            self.published = self.publish()

    @contextmanager
    def learning(self) -> Iterator[None]:
        with self.learns:
            yield

    def reserve(self) -> None:
        """Keep the engine for the loop, as soon as the part that is sampled now is done."""
        with self.changed:
            self.is_reserved = True
            self.changed.wait_for(lambda: not self.is_busy)

    def give(self, published: Published) -> None:
        """Let the engine sample from these weights, which it has got."""
        with self.changed:
            self.published = published
            self.is_reserved = False
            self.changed.notify_all()

    def stop(self) -> None:
        """Let nobody sample again."""
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()

    @contextmanager
    def _has_engine(self) -> Iterator[None]:
        with self.changed:
            self.changed.wait_for(lambda: self.is_stopped or not (self.is_reserved or self.is_busy))
            if self.is_stopped:
                raise ChannelClosed("the run ends, so the engine samples nothing more")
            self.is_busy = True
        try:
            yield
        finally:
            with self.changed:
                self.is_busy = False
                self.changed.notify_all()
