"""Has items scored by a service, and loses none: what fails on the way is queued again until it has its scores.

items --chunks--> POST /score --+--> scores, or an error of the item itself    -> done
                                +--> no answer, a broken one, a lost worker    -> back to the queue
                                +--> 429, 503                                  -> back to it, after Retry-After
                                +--> any other refusal (unknown reward, token) -> RewardError
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import uuid4

import msgspec

from unirl.reward.client.connection import MAX_PAUSE_S, Connection, RequestFailed, ServerBusy, TooLarge
from unirl.reward.client.wire import RETRYABLE, ItemError, Score, ScoreItem, TextAnswer

BREAK_AFTER: Final = 5
"""Failures in a row after which only /health is asked, by one thread, until it answers."""

ScoresOrError = dict[str, float] | ItemError
"""Of one item by one reward: part -> finite score, or why there is none."""


@dataclass(frozen=True)
class ItemResult:
    """What came back about one item."""

    scores: dict[str, ScoresOrError]
    """By reward."""
    said: dict[str, TextAnswer]
    """What it answers, by the rewards that say so."""


class Items(Protocol):
    """A list of items, or something that makes them one by one, the same whenever asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> ScoreItem: ...


def score_items(connection: Connection, items: Items) -> list[ItemResult]:
    """The outcome of every item, in their order.

    Raises:
        RewardError: 6001 the service cannot be reached, 6002 it refuses a request as a whole.
    """
    return RetryQueue(connection, items).run() if len(items) else []


@dataclass(eq=False)
class ItemProgress:
    """One item on its way to its scores."""

    place: int
    request_id: str = field(default_factory=lambda: uuid4().hex)
    open: list[str] | None = None
    """The rewards that have not answered; None before the first attempt."""
    found: dict[str, ScoresOrError] = field(default_factory=dict)
    said: dict[str, TextAnswer] = field(default_factory=dict)
    tries: int = 0
    last: str = ""


class RetryQueue:
    """One call of `score_items`: threads that take chunks from a queue until nothing is open."""

    def __init__(self, connection: Connection, items: Items) -> None:
        self._connection, self._items, self._config = connection, items, connection.config
        self._pending: deque[ItemProgress] = deque()
        self._batch_size = self._config.batch_size
        self._flying = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._probing = threading.Lock()
        self._jitter = random.Random()
        self._begun = self._last_success = time.monotonic()
        self._attempts = self._in_a_row = 0

    def run(self) -> list[ItemResult]:
        """Every item's outcome. Raises RewardError."""
        all_items = [ItemProgress(place) for place in range(len(self._items))]
        self._pending.extend(all_items)
        count = min(self._config.concurrency, math.ceil(len(all_items) / self._config.batch_size))
        # Daemons: a run that is interrupted does not wait for answers.
        threads = [threading.Thread(target=self._work, name="reward", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._error or not (self._pending or self._flying))
        finally:
            self._stopped.set()
            with self._changed:
                self._changed.notify_all()
        if self._error is not None:
            raise self._error
        return [ItemResult(pending.found, pending.said) for pending in all_items]

    def _work(self) -> None:
        try:
            while chunk := self._take():
                self._attempt(chunk)
        except BaseException as error:  # it belongs to the thread that waits in `run`
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _take(self) -> list[ItemProgress]:
        """The next chunk; empty when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or not self._flying or self._stopped.is_set())
            if self._stopped.is_set():
                return []
            chunk = [self._pending.popleft() for _ in range(min(self._batch_size, len(self._pending)))]
            self._flying += len(chunk)
            return chunk

    def _attempt(self, chunk: list[ItemProgress]) -> None:
        self._wait_while_broken()
        try:
            response = self._connection.post([self._item(pending) for pending in chunk])
        except TooLarge:
            if len(chunk) == 1:
                raise
            self._batch_size = min(self._batch_size, len(chunk) // 2)
            self._land(chunk)
        except ServerBusy as busy:
            self._check_patience(busy)
            self._land(chunk)
            self._pause(busy.retry_after_s * self._jitter.uniform(1.0, 1.5))
        except RequestFailed as fault:
            self._failed()
            self._check_patience(fault)
            for pending in chunk:
                count_attempt(pending, ItemError("unavailable", str(fault)), self._config.max_retries)
            self._land(chunk)
            self._pause(self._backoff())
        else:
            self._succeeded()
            for pending, results, errors in zip(chunk, response.results, response.errors, strict=True):
                receive(pending, results, errors, self._config.max_retries)
            for pending, said in zip(chunk, response.answers or (), strict=False):  # no answers, or one for each
                pending.said |= said
            self._land(chunk)

    def _item(self, pending: ItemProgress) -> ScoreItem:
        """The item as it is sent now: with one id for all attempts, and for the rewards that are open."""
        item = self._items[pending.place]
        if pending.open is None:
            pending.open = list(item.required_rewards)
        request_id = item.request_id or pending.request_id
        return msgspec.structs.replace(item, request_id=request_id, required_rewards=pending.open)

    def _land(self, chunk: list[ItemProgress]) -> None:
        """What is still open goes to the end of the queue, so that it travels in other company next time."""
        with self._changed:
            self._flying -= len(chunk)
            self._pending.extend(pending for pending in chunk if pending.open)
            self._changed.notify_all()

    def _succeeded(self) -> None:
        with self._changed:
            self._last_success, self._in_a_row = time.monotonic(), 0
            self._attempts += 1

    def _failed(self) -> None:
        with self._changed:
            self._in_a_row += 1
            self._attempts += 1

    def _backoff(self) -> float:
        pause = self._config.retry_delay * 2.0 ** min(self._in_a_row - 1, 16)
        return min(pause, MAX_PAUSE_S) * self._jitter.uniform(0.5, 1.0)

    def _pause(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    def _wait_while_broken(self) -> None:
        """After some failures in a row, hold every chunk back until the service answers one small question."""
        while self._in_a_row >= BREAK_AFTER and not self._stopped.is_set():
            with self._probing:
                if self._in_a_row < BREAK_AFTER:
                    return
                try:
                    self._connection.ask_health()
                    self._in_a_row = 0
                except (RequestFailed, ServerBusy) as fault:
                    self._failed()
                    self._check_patience(fault)
                    self._pause(self._backoff())

    def _check_patience(self, last: Exception) -> None:
        """Raises RewardError (6001) when nothing was scored for too long."""
        if time.monotonic() - self._last_success > self._config.outage_s:
            raise self._connection.lost(self._attempts, time.monotonic() - self._begun, last) from last


def receive(
    pending: ItemProgress, results: Mapping[str, Mapping[str, Score]], errors: Mapping[str, str], max_retries: int
) -> None:
    """Take what was answered about an item; what another attempt may mend stays open."""
    problem: ItemError | None = None
    assert pending.open is not None
    for name in list(pending.open):
        scores = read_scores(name, results, errors)
        if isinstance(scores, ItemError) and (scores.kind in RETRYABLE or name not in errors):
            problem = scores
        else:
            pending.found[name] = scores
            pending.open.remove(name)
    if problem is not None:
        count_attempt(pending, problem, max_retries)


def read_scores(name: str, results: Mapping[str, Mapping[str, Score]], errors: Mapping[str, str]) -> ScoresOrError:
    """What one reward answered about one item: a score that is no finite number is an error."""
    if name in errors:
        return ItemError.read(errors[name])
    if name not in results:
        return ItemError("unavailable", f"the answer has neither a score nor an error of {name!r}")
    if not results[name]:
        return ItemError("unavailable", f"{name!r} answered without any score")
    for part, score in results[name].items():
        if not isinstance(score, float) or not math.isfinite(score):
            return ItemError("not_finite", f"{name}.{part} is {score}, which is no finite number")
    return {part: float(score) for part, score in results[name].items() if score is not None}


def count_attempt(pending: ItemProgress, problem: ItemError, max_retries: int) -> None:
    """One more attempt was in vain; after the last one, the problem is the outcome."""
    pending.tries += 1
    if pending.tries > max_retries:
        for name in pending.open or ():
            pending.found[name] = ItemError(problem.kind, f"{problem.message} ({pending.tries} attempts)")
        pending.open = []
