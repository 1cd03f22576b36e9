"""Sends items to a reward service and retries until every item has its scores.

items --batches--> POST /score --+--> scores, or an error that concerns the item    -> done
                                 +--> no response, a broken one, a worker that died -> queued again
                                 +--> 429 or 503                                    -> queued again after Retry-After
                                 +--> any other refusal (unknown reward, token)     -> RewardError
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import uuid4

import msgspec

from unirl.config.http import MAX_PAUSE_S, RequestFailed, ServerBusy
from unirl.reward.client.connection import Connection, TooLarge
from unirl.reward.client.wire import RETRYABLE, ItemError, Score, ScoreItem, TextAnswer
from unirl.types.progress import progress

BREAK_AFTER: Final = 5
"""After this many failures in a row one thread asks /health until it answers, and the other threads wait."""

ScoresOrError = dict[str, float] | ItemError
"""The finite scores of one item by one reward, by part, or the reason why there are none."""


@dataclass(eq=False)
class ItemResult:
    """The result of one item, as far as it is known."""

    index: int
    request_id: str = field(default_factory=lambda: uuid4().hex)
    open: list[str] | None = None
    """The rewards without a result; None before the first attempt."""
    scores: dict[str, ScoresOrError] = field(default_factory=dict)
    """By reward."""
    answers: dict[str, TextAnswer] = field(default_factory=dict)
    """The answer that the item's text gives, by reward, for rewards that report it."""
    attempts: int = 0


class Items(Protocol):
    """A list of items, or an object that builds an item each time it is accessed, always the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> ScoreItem: ...


def score_items(connection: Connection, items: Items) -> list[ItemResult]:
    """Returns the result of every item, in their order.

    Raises:
        RewardError: 6001 the service cannot be reached, 6002 it refuses a request as a whole.
    """
    return RetryQueue(connection, items).run() if len(items) else []


class RetryQueue:
    """A queue of items and the threads that send them in batches until every item has a result."""

    def __init__(self, connection: Connection, items: Items) -> None:
        self._connection, self._items, self._config = connection, items, connection.config
        self._queue: deque[ItemResult] = deque()
        self._batch_size = self._config.batch_size
        self._in_flight = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._probing = threading.Lock()
        self._start = self._last_success = time.monotonic()
        self._attempts = self._failures_in_a_row = 0

    def run(self) -> list[ItemResult]:
        """Returns the result of every item. Raises RewardError."""
        results = [ItemResult(index) for index in range(len(self._items))]
        self._queue.extend(results)
        count = min(self._config.concurrency, math.ceil(len(results) / self._config.batch_size))
        # Daemon threads: an interrupted run does not wait for responses.
        threads = [
            threading.Thread(target=copy_context().run, args=(self._work,), name="reward", daemon=True)
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._error or not (self._queue or self._in_flight))
        finally:
            self._stopped.set()
            with self._changed:
                self._changed.notify_all()
        if self._error is not None:
            raise self._error
        return results

    def _work(self) -> None:
        try:
            while batch := self._take():
                self._attempt(batch)
        except BaseException as error:  # `run` raises it in the thread that waits there
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _take(self) -> list[ItemResult]:
        """Returns the next batch, or an empty list when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self._in_flight or self._stopped.is_set())
            if self._stopped.is_set():
                return []
            batch = [self._queue.popleft() for _ in range(min(self._batch_size, len(self._queue)))]
            self._in_flight += len(batch)
            return batch

    def _attempt(self, batch: list[ItemResult]) -> None:
        self._wait_while_broken()
        try:
            response = self._connection.post([self._message(item) for item in batch])
        except TooLarge:
            if len(batch) == 1:
                raise
            self._batch_size = min(self._batch_size, len(batch) // 2)
            self._requeue(batch)
        except ServerBusy as error:
            self._check_outage(error)
            self._requeue(batch)
            self._stopped.wait(error.retry_after_s * random.uniform(1.0, 1.5))
        except RequestFailed as error:
            self._count_failure(error)
            for item in batch:
                count_attempt(item, ItemError("unavailable", str(error)), self._config.max_retries)
            self._requeue(batch)
            self._back_off()
        else:
            progress("batch of the reward service")
            with self._changed:
                self._last_success, self._failures_in_a_row = time.monotonic(), 0
                self._attempts += 1
            for item, results, errors in zip(batch, response.results, response.errors, strict=True):
                store_results(item, results, errors, self._config.max_retries)
            for item, answers in zip(batch, response.answers or (), strict=False):  # no answers, or one for each
                item.answers |= answers
            self._requeue(batch)

    def _message(self, item: ItemResult) -> ScoreItem:
        """Returns the item to send: with the same id in all attempts, and with the rewards that have no result yet."""
        message = self._items[item.index]
        if item.open is None:
            item.open = list(message.required_rewards)
        request_id = message.request_id or item.request_id
        return msgspec.structs.replace(message, request_id=request_id, required_rewards=item.open)

    def _requeue(self, batch: list[ItemResult]) -> None:
        """Moves unfinished items to the end of the queue, so that their next batch consists of other items."""
        with self._changed:
            self._in_flight -= len(batch)
            self._queue.extend(item for item in batch if item.open)
            self._changed.notify_all()

    def _count_failure(self, error: Exception) -> None:
        """Raises RewardError (6001) after a failure when no item was scored for `outage_s` seconds."""
        with self._changed:
            self._failures_in_a_row += 1
            self._attempts += 1
        self._check_outage(error)

    def _back_off(self) -> None:
        delay = self._config.retry_delay * 2.0 ** min(self._failures_in_a_row - 1, 16)
        self._stopped.wait(min(delay, MAX_PAUSE_S) * random.uniform(0.5, 1.0))

    def _wait_while_broken(self) -> None:
        """Holds every batch back, after several failures in a row, until /health answers."""
        while self._failures_in_a_row >= BREAK_AFTER and not self._stopped.is_set():
            with self._probing:
                if self._failures_in_a_row < BREAK_AFTER:
                    return
                try:
                    self._connection.ask_health()
                    self._failures_in_a_row = 0
                except (RequestFailed, ServerBusy) as error:
                    self._count_failure(error)
                    self._back_off()

    def _check_outage(self, last: Exception) -> None:
        """Raises RewardError (6001) when no item was scored for `outage_s` seconds."""
        if time.monotonic() - self._last_success > self._config.outage_s:
            raise self._connection.unreachable(self._attempts, time.monotonic() - self._start, last) from last


def store_results(
    item: ItemResult, results: Mapping[str, Mapping[str, Score]], errors: Mapping[str, str], max_retries: int
) -> None:
    """Stores the scores and errors of an item. A reward whose error may disappear with another attempt stays open."""
    retryable: ItemError | None = None
    assert item.open is not None
    for name in list(item.open):
        scores = read_scores(name, results, errors)
        if isinstance(scores, ItemError) and (scores.kind in RETRYABLE or name not in errors):
            retryable = scores
        else:
            item.scores[name] = scores
            item.open.remove(name)
    if retryable is not None:
        count_attempt(item, retryable, max_retries)


def read_scores(name: str, results: Mapping[str, Mapping[str, Score]], errors: Mapping[str, str]) -> ScoresOrError:
    """Returns the scores of one item by one reward. A score that is not a finite number is an error."""
    if name in errors:
        return ItemError.read(errors[name])
    if name not in results:
        return ItemError("unavailable", f"the response has neither a score nor an error of {name!r}")
    if not results[name]:
        return ItemError("unavailable", f"{name!r} returned no score")
    for part, score in results[name].items():
        if not isinstance(score, float) or not math.isfinite(score):
            return ItemError("not_finite", f"{name}.{part} is {score}, which is not a finite number")
    return {part: float(score) for part, score in results[name].items() if score is not None}


def count_attempt(item: ItemResult, error: ItemError, max_retries: int) -> None:
    """Counts a failed attempt. After the last one, the error is the result of all open rewards."""
    item.attempts += 1
    if item.attempts > max_retries:
        for name in item.open or ():
            item.scores[name] = ItemError(error.kind, f"{error.message} ({item.attempts} attempts)")
        item.open = []
