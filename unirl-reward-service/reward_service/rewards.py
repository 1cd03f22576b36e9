"""The queue of one reward, and the worker processes that take batches from it."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from reward_service.child import Child
from reward_service.config import MIB, RewardConfig, ServiceConfig
from reward_service.fairness import FairQueue
from reward_service.frames import (
    BatchOutcomes,
    ItemOutcome,
    LoadScorer,
    PeerGone,
    ScoreBatch,
    ScorerLoaded,
    ScorerNotLoaded,
    ScorerRow,
)
from reward_service.metrics import Metrics
from unirl.config.errors import (
    DataError,
    DependencyError,
    ResourceError,
    RewardError,
    StallError,
    UniRLError,
    UsageError,
)
from unirl.reward.client.wire import ItemError

log = logging.getLogger("reward_service")

MAX_RETRY_AFTER_S = 30
ENVIRONMENTS = "unirl-reward-service/envs/README.md has the two commands"
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 60.0
"""Seconds between attempts to restart a worker; the pause doubles from the first value to the last."""
STOPS = ItemError("unavailable", "the service stops")
MAX_BATCH_BYTES = 32 * MIB
"""Largest size of the media that are sent to a worker at once, in addition to the memory of their requests."""
SHOWN_IDS = 8
"""Largest number of items that a message of the log names."""
MAX_TRIES = 2
"""An item whose worker dies is scored once more, alone. If the worker dies again, this item is the cause."""


@dataclass(eq=False)
class Job:
    """One item to be scored by one reward."""

    row: ScorerRow
    outcome: asyncio.Future[ItemOutcome]
    client: str = ""
    """The address of the client. Clients are served in turn."""
    queued_at: float = field(default_factory=time.monotonic)
    tries: int = 0

    @property
    def size(self) -> int:
        """Number of bytes of its raw media."""
        media = (self.row.image, self.row.video, *self.row.sources)
        return sum(len(medium.data) for medium in media if medium is not None)


class RewardQueue:
    """Takes jobs and sets the outcome of each: scores or an error."""

    def __init__(self, config: RewardConfig, service: ServiceConfig, metrics: Metrics) -> None:
        self.config = config
        self.name = config.name
        self.reads: Sequence[str] = ()
        self._service, self._metrics = service, metrics
        self._queue: FairQueue[Job] = FairQueue()
        self._filled = asyncio.Event()
        limits = service.server.limits
        self._per_client = max(limits.items, int(limits.client_share * config.max_queue))
        self._replicas = [Replica(self, number) for number in range(config.num_replicas)]
        self._per_item_s = 0.01

    async def start(self) -> None:
        """Waits until every replica has loaded the scorer. Scoring continues in the background.

        Raises:
            UniRLError: a replica cannot load the scorer.
        """
        await asyncio.gather(*(replica.start() for replica in self._replicas))

    async def close(self) -> None:
        """Ends every replica. Waiting jobs get the error `unavailable`."""
        await asyncio.gather(*(replica.close() for replica in self._replicas))
        self.settle(self._queue.remove(lambda job: True), STOPS)

    @property
    def readiness(self) -> list[bool | str]:
        """The readiness of each replica."""
        return [replica.ready for replica in self._replicas]

    @property
    def num_ready(self) -> int:
        return sum(replica.ready for replica in self._replicas)

    @property
    def pids(self) -> list[int]:
        return [replica.child.pid for replica in self._replicas if replica.child is not None]

    def __len__(self) -> int:
        """The number of items that wait."""
        return len(self._queue)

    def has_room(self, count: int, client: str = "") -> bool:
        """Returns True if a client may queue `count` more items."""
        mine = self._queue.count(client) + count
        return len(self._queue) + count <= self.config.max_queue and mine <= self._per_client

    def retry_after_s(self) -> int:
        """Returns the estimated number of seconds until the queue is half empty."""
        ready = max(1, self.num_ready)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(len(self._queue) * self._per_item_s / ready / 2)))

    def submit(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._queue.push(job.client, job)
        self._changed()

    def submit_again(self, jobs: Sequence[Job]) -> None:
        """Puts the jobs of a worker that died at the front of the queue, to be scored one by one."""
        for job in jobs:
            job.tries += 1
        spent = [job for job in jobs if job.tries >= MAX_TRIES]
        self.settle(
            spent, ItemError("crashed", f"a worker of {self.name!r} died each of {MAX_TRIES} times with this item")
        )
        for job in reversed(jobs):
            if job not in spent:
                self._queue.push_first(job.client, job)
        self._changed()

    def expire(self, outcomes: Set[asyncio.Future[ItemOutcome]]) -> None:
        """Fails the jobs of these outcomes that no worker has started."""
        late = self._queue.remove(lambda job: job.outcome in outcomes)
        self._changed()
        self.settle(late, ItemError("timeout", f"waited {self._service.server.queue_timeout_s:g} s for a worker"))

    async def take(self) -> list[Job]:
        """Returns the next batch, of at most MAX_BATCH_BYTES unless it has one job.

        A job that was tried before is a batch of its own.
        """
        while not self._queue:
            self._filled.clear()
            await self._filled.wait()
        batch = [self._queue.pop()]
        size = batch[0].size
        while self._queue and len(batch) < self.config.batch_size and not batch[0].tries:
            job = self._queue.first()
            size += job.size
            if job.tries or size > MAX_BATCH_BYTES:
                break
            batch.append(self._queue.pop())
        self._changed()
        return batch

    def settle(self, jobs: Iterable[Job], outcome: ItemOutcome) -> None:
        """Sets one outcome for all jobs."""
        for job in jobs:
            self.settle_one(job, outcome)

    def settle_one(self, job: Job, outcome: ItemOutcome) -> None:
        if not job.outcome.done():
            job.outcome.set_result(outcome)
            kind = outcome.kind if isinstance(outcome, ItemError) else "scored"
            self._metrics.items.labels(self.name, kind).inc()

    def observe(self, jobs: Sequence[Job], begun: float) -> None:
        """Records the metrics of a batch that was scored from `begun` until now."""
        now, metrics = time.monotonic(), self._metrics
        self._per_item_s += 0.2 * ((now - begun) / len(jobs) - self._per_item_s)
        metrics.batch.labels(self.name).observe(len(jobs))
        metrics.busy.labels(self.name).inc(now - begun)
        for job in jobs:
            metrics.wait.labels(self.name).observe(begun - job.queued_at)
            metrics.latency.labels(self.name).observe(now - begun)

    def count_restart(self, cause: str) -> None:
        self._metrics.restarts.labels(self.name, cause).inc()

    def _changed(self) -> None:
        self._metrics.queue.labels(self.name).set(len(self._queue))
        self._metrics.ready.labels(self.name).set(self.num_ready)
        if self._queue:
            self._filled.set()

    def build_message(self) -> LoadScorer:
        """Returns the first message to a worker."""
        config = self.config
        return LoadScorer(
            reward=config.name,
            scorer=config.scorer,
            params=config.params,
            plugins=list(self._service.plugins),
            toy=self._service.toy,
            needs_cuda=config.device.startswith("cuda"),
        )

    @property
    def load_timeout_s(self) -> float:
        return self._service.server.load_timeout_s

    @property
    def score_timeout_s(self) -> float:
        return self._service.server.score_timeout_s


class Replica:
    """One worker process. It is replaced whenever it dies or does not answer in time."""

    def __init__(self, reward: RewardQueue, number: int) -> None:
        self._reward, self._number = reward, number
        self.child: Child | None = None
        self.ready = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises UniRLError when the first worker does not start."""
        child = await self._worker()
        self._task = asyncio.create_task(self._run(child))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.child is not None:
            await self.child.kill()

    async def _worker(self) -> Child:
        """Starts a worker and waits until it has loaded its scorer. Raises UniRLError."""
        config = self._reward.config
        command = [config.python or sys.executable, "-m", "reward_service.worker", config.name]
        try:
            self.child = child = await Child.start(command, config.environment(self._number))
        except OSError as error:
            raise RewardError(
                f"rewards: {config.name} has python={config.python!r}: {error.strerror}. Make this environment "
                f"({ENVIRONMENTS}), or remove `python` to use that of the service"
            ) from error
        try:
            answer = await child.ask(self._reward.build_message(), self._reward.load_timeout_s)
        except TimeoutError as error:
            await child.kill()
            seconds = self._reward.load_timeout_s
            raise StallError(
                f"the scorer of reward {config.name!r} was not loaded within {seconds:g} s: "
                "raise server.load_timeout_s, or download its files first"
            ) from error
        except PeerGone as error:
            how = await child.describe_end()
            raise RewardError(
                f"the worker of reward {config.name!r} {how} while it loaded its scorer; its output is above. If it "
                f"lacks a module, install what the scorer needs into {command[0]} ({ENVIRONMENTS})"
            ) from error
        if isinstance(answer, ScorerNotLoaded):
            await child.kill()
            raise error_of(answer)
        assert isinstance(answer, ScorerLoaded)
        self._reward.reads = answer.reads
        self.ready = True
        return child

    async def _run(self, child: Child) -> None:
        pause = FIRST_PAUSE_S
        while True:
            cause = await self._serve(child)
            self.ready = False
            self._reward.count_restart(cause)
            await child.kill()
            while not self.ready:
                try:
                    child = await self._worker()
                    pause = FIRST_PAUSE_S
                except UniRLError as error:
                    log.error("reward %r: %s; trying again in %g s", self._reward.name, error, pause)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LAST_PAUSE_S)

    async def _serve(self, child: Child) -> str:
        """Scores batch after batch until the worker dies or is late. Returns the cause."""
        while True:
            batch = await self._next(child)
            if batch is None:
                log.error("a worker of reward %r %s while it waited", self._reward.name, await child.describe_end())
                return "died"
            begun = time.monotonic()
            try:
                answer = await child.ask(ScoreBatch([job.row for job in batch]), self._reward.score_timeout_s)
            except asyncio.CancelledError:
                self._reward.settle(batch, STOPS)
                raise
            except PeerGone:
                end = await child.describe_end()
                ids = [job.row.id for job in batch[:SHOWN_IDS]]
                log.error("a worker of %r %s while it scored %d items: %r", self._reward.name, end, len(batch), ids)
                self._reward.submit_again(batch)
                return "died"
            except TimeoutError:
                timeout = self._reward.score_timeout_s
                ids = [job.row.id for job in batch[:SHOWN_IDS]]
                log.error("reward %r: no scores of %d items in %g s: %r", self._reward.name, len(batch), timeout, ids)
                self._reward.settle(
                    batch, ItemError("timeout", f"not scored within {timeout:g} s; the worker was ended")
                )
                return "timeout"
            assert isinstance(answer, BatchOutcomes)
            self._reward.observe(batch, begun)
            for job, outcome in zip(batch, answer.outcomes, strict=True):
                self._reward.settle_one(job, outcome)
            limit_mb = self._reward.config.recycle_mb
            if limit_mb is not None and (held_mb := child.resident_mb()) > limit_mb:
                name = self._reward.name
                log.warning("a worker of %r holds %.0f MiB, more than recycle_mb=%g", name, held_mb, limit_mb)
                return "memory"

    async def _next(self, child: Child) -> list[Job] | None:
        """Returns the next batch, or None if the worker ends first."""
        taking = asyncio.ensure_future(self._reward.take())
        try:
            await asyncio.wait([taking, child.ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not taking.done():
                taking.cancel()
        return None if taking.cancelled() or not taking.done() else taking.result()


def error_of(answer: ScorerNotLoaded) -> UniRLError:
    """Returns the error that a worker has reported."""
    kinds = {kind.exit_status: kind for kind in (UsageError, DependencyError, DataError, ResourceError)}
    return kinds.get(answer.exit_status, RewardError).of_code(answer.code)(answer.message)
