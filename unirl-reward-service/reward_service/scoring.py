"""From a request to its answer: what was asked before is remembered, the rest is decoded, queued and waited for."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

import msgspec
from prometheus_client import Gauge

from reward_service.config import ServerConfig
from reward_service.frames import ItemOutcome, ItemScores, ScorerRow
from reward_service.media import BadMedia, MediaDecoder
from reward_service.metrics import Metrics
from reward_service.rewards import Job, RewardQueue
from unirl.config.errors import did_you_mean
from unirl.reward.client.wire import (
    RETRYABLE,
    ItemError,
    MediaPayload,
    Score,
    ScoreItem,
    ScoreRequest,
    ScoreResponse,
    TextAnswer,
)


class RequestRefused(ValueError):
    """The request as a whole cannot be answered."""

    def __init__(self, status: int, kind: str, detail: str, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail, self.retry_after_s = status, kind, detail, retry_after_s


class MemoryBudget:
    """The bytes that all requests together may hold: bodies, and what their files unpack to."""

    def __init__(self, limit_mb: float, gauge: Gauge) -> None:
        self.limit_mb, self._gauge = limit_mb, gauge
        self.used = 0

    @contextmanager
    def share(self) -> Iterator[MemoryShare]:
        """What one request holds; given back at its end."""
        share = MemoryShare(self)
        try:
            yield share
        finally:
            self.add(-share.held)

    def add(self, count: int) -> None:
        self.used += count
        self._gauge.set(self.used)


class MemoryShare:
    """The part of one request."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.held = 0

    def take(self, count: int) -> None:
        """Hold so many bytes more. Raises RequestRefused: 413 too many for one request, 503 too many for now."""
        limit_mb = self._budget.limit_mb
        if self.held + count > limit_mb * 2**20:
            raise RequestRefused(
                413, "too_large", f"the request unpacks to more than {limit_mb:g} MiB: send fewer items at once"
            )
        if self._budget.used + count > limit_mb * 2**20:
            raise RequestRefused(503, "busy", f"{limit_mb:g} MiB of requests are being worked on", 1)
        self.held += count
        self._budget.add(count)


Key = tuple[str, str]
"""A reward and a request id."""


PendingOutcome = asyncio.Future[ItemOutcome]
"""What one reward will say about one item."""


class OutcomeCache:
    """Which items were scored, or are being scored, by request id: a repeated request gets the same scores."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[Key, tuple[bytes, PendingOutcome]] = OrderedDict()

    def lookup(self, reward: str, item: ScoreItem, digest: bytes) -> PendingOutcome | None:
        """The answer for this very item. Raises RequestRefused when its id was used for another one."""
        before, answer = self._known.get((reward, item.request_id or ""), (digest, None))
        if before != digest:
            raise RequestRefused(
                409, "conflict", f"request_id {item.request_id!r} was used for another item: each needs its own"
            )
        return None if answer is None or (answer.done() and is_retryable(answer.result())) else answer

    def keep(self, reward: str, item: ScoreItem, digest: bytes, answer: PendingOutcome) -> None:
        """Remember an answer; the oldest is forgotten."""
        if item.request_id is not None:
            self._known[reward, item.request_id] = (digest, answer)
            if len(self._known) > self._size:
                self._known.popitem(last=False)


def is_retryable(outcome: ItemOutcome) -> bool:
    return isinstance(outcome, ItemError) and outcome.kind in RETRYABLE


@dataclass
class AcceptedItem:
    """One item of a request on its way."""

    item: ScoreItem
    digest: bytes
    answers: dict[str, PendingOutcome]
    """Of the rewards that were asked before, later of all."""
    row: ScorerRow | None = None
    """With raw media; None when every answer is known."""

    @property
    def open(self) -> list[str]:
        """The rewards without an answer."""
        return [name for name in self.item.required_rewards if name not in self.answers]


class Scoring:
    """Answers score requests."""

    def __init__(
        self, rewards: Mapping[str, RewardQueue], decoder: MediaDecoder, server: ServerConfig, metrics: Metrics
    ) -> None:
        self._rewards, self._decoder, self._metrics = rewards, decoder, metrics
        self._limits, self._patience_s = server.limits, server.queue_timeout_s
        self._memory = OutcomeCache(server.limits.remembered)

    async def answer(self, request: ScoreRequest, share: MemoryShare) -> ScoreResponse:
        """The outcome of every item and reward. Raises RequestRefused."""
        self._check(request)
        digests = await asyncio.to_thread(lambda: [digest_of(item) for item in request.requests])
        entries = [self._entry(item, digest) for item, digest in zip(request.requests, digests, strict=True)]
        self._check_room(Counter(name for entry in entries for name in entry.open))
        for place, entry in enumerate(entries):
            if entry.open:
                compared = any("sources" in self._rewards[name].reads for name in entry.open)
                entry.row = await self._row(place, entry.item, share, compared=compared)
        self._queue(entries)
        await self._wait({answer for entry in entries for answer in entry.answers.values()})
        return response_of(entries)

    def _check(self, request: ScoreRequest) -> None:
        """Raises RequestRefused: 400 an unknown reward, 409 one id for two items, 413 too many items or turns."""
        items, limits = request.requests, self._limits
        if len(items) > limits.items:
            raise RequestRefused(413, "too_large", f"{len(items)} requests: at most {limits.items} at once")
        for place, item in enumerate(items):
            if len(item.history) > limits.turns:
                raise RequestRefused(413, "too_large", f"requests[{place}].history is longer than {limits.turns} turns")
            for name in item.required_rewards:
                if name not in self._rewards:
                    known = f"{did_you_mean(name, self._rewards)} There are {', '.join(self._rewards)}"
                    raise RequestRefused(400, "unknown_reward", f"requests[{place}] requires {name!r}.{known}")
        ids = Counter(item.request_id for item in items if item.request_id is not None)
        twice = [name for name, count in ids.items() if count > 1]
        if twice:
            raise RequestRefused(409, "conflict", f"request_id {twice[0]!r} stands at two items: each needs its own")

    def _entry(self, item: ScoreItem, digest: bytes) -> AcceptedItem:
        found = {name: self._memory.lookup(name, item, digest) for name in item.required_rewards}
        known = {name: answer for name, answer in found.items() if answer is not None}
        for name in known:
            self._metrics.repeated.labels(name).inc()
        return AcceptedItem(item, digest, known)

    async def _row(self, place: int, item: ScoreItem, share: MemoryShare, *, compared: bool) -> ScorerRow:
        """With raw media; of the turns before the last only where it is `compared` with them."""
        image, video = await self._raw(place, item, len(item.history) - 1, share)
        before = [turn for turn in range(len(item.history) - 1) if compared and item.history[turn].has_image]
        pictures = [(await self._raw(place, item, turn, share))[0] for turn in before]
        sources = [picture for picture in pictures if picture is not None]
        return ScorerRow(
            item.request_id or f"item {place}", item.prompt, item.text, image, video, item.metadata, sources
        )

    async def _raw(
        self, place: int, item: ScoreItem, turn: int, share: MemoryShare
    ) -> tuple[MediaPayload | None, MediaPayload | None]:
        """Picture and video of a turn."""
        said = item.history[turn]
        try:
            image, video = await self._decoder.raw(said)
            for medium, sent in ((image, said.image), (video, said.video)):
                if medium is not None and medium is not sent:
                    share.take(len(medium.data))
        except BadMedia as error:
            raise RequestRefused(400, "bad_media", f"requests[{place}].history[{turn}]: {error}") from error
        return image, video

    def _queue(self, entries: Sequence[AcceptedItem]) -> None:
        """Give every open reward of every item to its queue: all of them, or (429) none."""
        loop = asyncio.get_running_loop()
        new: dict[str, list[tuple[AcceptedItem, Job]]] = {}
        for entry in entries:
            for name in entry.open:
                assert entry.row is not None
                lacks = lacking(entry.row, self._rewards[name])
                # Another request may have brought the same item while this one was decoded.
                answer = self._memory.lookup(name, entry.item, entry.digest)
                if answer is None:
                    answer = loop.create_future()
                    if lacks is None:
                        new.setdefault(name, []).append((entry, Job(entry.row, answer)))
                    else:
                        answer.set_result(lacks)
                entry.answers[name] = answer
        self._check_room({name: len(jobs) for name, jobs in new.items()})
        for name, jobs in new.items():
            self._rewards[name].submit([job for _, job in jobs])
            for entry, job in jobs:
                self._memory.keep(name, entry.item, entry.digest, job.outcome)

    def _check_room(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            reward = self._rewards[name]
            if not reward.has_room(count):
                raise RequestRefused(
                    429, "busy", f"the queue of {name!r} has no room for {count} items", reward.retry_after_s()
                )

    async def _wait(self, answers: Set[PendingOutcome]) -> None:
        """Until every answer is there. What no worker has begun in time is given up."""
        open = {answer for answer in answers if not answer.done()}
        if not open:
            return
        _, late = await asyncio.wait(open, timeout=self._patience_s)
        if late:
            for reward in self._rewards.values():
                reward.expire(late)
            await asyncio.wait(late)


def digest_of(item: ScoreItem) -> bytes:
    """What tells one item from another, apart from its id; b"" without an id."""
    if item.request_id is None:
        return b""
    digest = sha256()
    for turn in item.history:
        for medium in (turn.image, turn.video):
            digest.update(b"" if medium is None else medium.data)
        bare = [medium and (medium.format, medium.shape, len(medium.data)) for medium in (turn.image, turn.video)]
        digest.update(msgspec.msgpack.encode([bare, turn.text, turn.image_b64, turn.video_b64, turn.video_path]))
    digest.update(msgspec.msgpack.encode(item.metadata))
    return digest.digest()


def lacking(row: ScorerRow, reward: RewardQueue) -> ItemError | None:
    """What the reward reads and the item does not have."""
    have = {
        "prompts": row.prompt is not None,
        "texts": row.text is not None,
        "images": row.image is not None,
        "videos": row.video is not None,
        "sources": bool(row.sources),
        "metadata": True,
    }
    lacks = [column for column in reward.reads if not have.get(column)]
    if not lacks:
        return None
    return ItemError("invalid", f"reward {reward.name!r} reads {', '.join(reward.reads)}; this item has no {lacks[0]}")


def response_of(entries: Sequence[AcceptedItem]) -> ScoreResponse:
    """The answers as the wire has them."""
    results: list[dict[str, dict[str, Score]]] = []
    errors: list[dict[str, str]] = []
    answers: list[dict[str, TextAnswer]] = []
    for entry in entries:
        outcomes = {name: entry.answers[name].result() for name in entry.item.required_rewards}
        scored = {name: found for name, found in outcomes.items() if isinstance(found, ItemScores)}
        results.append({name: dict(found.parts) for name, found in scored.items()})
        errors.append({name: str(found) for name, found in outcomes.items() if isinstance(found, ItemError)})
        answers.append({name: found.said for name, found in scored.items() if found.said is not None})
    return ScoreResponse(results=results, errors=errors, answers=answers if any(answers) else None)
