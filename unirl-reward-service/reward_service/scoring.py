"""Answers score requests: looks up repeated items, decodes and queues the others, and waits for their outcomes."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from reward_service.config import ServerConfig
from reward_service.frames import ItemOutcome, ItemScores, ScorerRow
from reward_service.media import BadMedia, DecoderLost, MediaDecoder, MemoryCharge
from reward_service.metrics import Metrics
from reward_service.rewards import Job, RewardQueue
from unirl.config.errors import did_you_mean
from unirl.reward.client.wire import (
    RETRYABLE,
    ItemError,
    MediaPayload,
    ReceivedItem,
    Score,
    ScoreResponse,
    TextAnswer,
)


class RequestRefused(ValueError):
    """The service refuses a request as a whole."""

    def __init__(self, status: int, kind: str, detail: str, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail, self.retry_after_s = status, kind, detail, retry_after_s


@dataclass(frozen=True)
class ReceivedSample:
    """An item with its digest, `digest_of(item)`."""

    item: ReceivedItem
    digest: bytes


Key = tuple[str, str]
"""A reward and a request id."""


PendingOutcome = asyncio.Future[ItemOutcome]
"""The future outcome of one item for one reward."""


class OutcomeCache:
    """Finished and pending outcomes by request id, so that a repeated request gets the same scores."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[Key, tuple[bytes, PendingOutcome]] = OrderedDict()

    def lookup(self, reward: str, item: ReceivedItem, digest: bytes) -> PendingOutcome | None:
        """Returns the outcome for an identical item. Raises RequestRefused when its id was used for another item."""
        known_digest, outcome = self._known.get((reward, item.request_id or ""), (digest, None))
        if known_digest != digest:
            raise RequestRefused(
                409, "conflict", f"request_id {item.request_id!r} was used for another item: each needs its own"
            )
        return None if outcome is None or (outcome.done() and is_retryable(outcome.result())) else outcome

    def store(self, reward: str, item: ReceivedItem, digest: bytes, outcome: PendingOutcome) -> None:
        """Stores an outcome, and removes the oldest one if there are too many."""
        if item.request_id is not None:
            self._known[reward, item.request_id] = (digest, outcome)
            if len(self._known) > self._size:
                self._known.popitem(last=False)


def is_retryable(outcome: ItemOutcome) -> bool:
    return isinstance(outcome, ItemError) and outcome.kind in RETRYABLE


@dataclass
class AcceptedItem:
    """One item of a request in progress."""

    item: ReceivedItem
    digest: bytes
    outcomes: dict[str, PendingOutcome]
    """By reward: at first those that the cache has, later those of all rewards."""
    row: ScorerRow | None = None
    """The item with raw media; None if the cache has all its outcomes."""

    @property
    def open(self) -> list[str]:
        """The rewards that have no outcome yet."""
        return [name for name in self.item.required_rewards if name not in self.outcomes]


class Scoring:
    """Answers score requests."""

    def __init__(
        self, rewards: Mapping[str, RewardQueue], decoder: MediaDecoder, server: ServerConfig, metrics: Metrics
    ) -> None:
        self._rewards, self._decoder, self._metrics = rewards, decoder, metrics
        self._limits, self._patience_s = server.limits, server.queue_timeout_s
        self._cache = OutcomeCache(server.limits.remembered)

    async def answer(self, samples: Sequence[ReceivedSample], charge: MemoryCharge) -> ScoreResponse:
        """Returns the outcomes of all items. Raises RequestRefused."""
        self._check([sample.item for sample in samples])
        accepted = [self._accept(sample) for sample in samples]
        self._check_room(Counter(name for pending in accepted for name in pending.open), charge.client)
        for index, pending in enumerate(accepted):
            if pending.open:
                await self._decode(index, pending, charge)
        self._queue(accepted, charge.client)
        await self._wait({outcome for pending in accepted for outcome in pending.outcomes.values()})
        return response_of(accepted)

    def _check(self, items: Sequence[ReceivedItem]) -> None:
        """Raises RequestRefused.

        400 an unknown reward, 409 two items with one id, 413 too many items, 422 too many turns.
        """
        limits = self._limits
        if len(items) > limits.items:
            raise RequestRefused(413, "too_large", f"{len(items)} requests: at most {limits.items} at once")
        for index, item in enumerate(items):
            if len(item.history) > limits.turns:
                raise RequestRefused(422, "schema", f"$.requests[{index}].history is longer than {limits.turns} turns")
            for name in item.required_rewards:
                if name not in self._rewards:
                    known = f"{did_you_mean(name, self._rewards)} There are {', '.join(self._rewards)}"
                    raise RequestRefused(400, "unknown_reward", f"requests[{index}] requires {name!r}.{known}")
        ids = Counter(item.request_id for item in items if item.request_id is not None)
        twice = [name for name, count in ids.items() if count > 1]
        if twice:
            raise RequestRefused(409, "conflict", f"two items have request_id {twice[0]!r}: each needs its own")

    def _accept(self, sample: ReceivedSample) -> AcceptedItem:
        item, digest = sample.item, sample.digest
        cached = {name: self._cache.lookup(name, item, digest) for name in item.required_rewards}
        known = {name: outcome for name, outcome in cached.items() if outcome is not None}
        for name in known:
            self._metrics.repeated.labels(name).inc()
        return AcceptedItem(item, digest, known)

    async def _decode(self, index: int, pending: AcceptedItem, charge: MemoryCharge) -> None:
        """Sets the row of an item. An item whose media cannot be decoded gets an error as its outcome."""
        compared = any("sources" in self._rewards[name].reads for name in pending.open)
        try:
            pending.row = await self._row(index, pending.item, charge, compared=compared)
        except BadMedia as error:
            self._fail(pending, ItemError("invalid", str(error)))
        except DecoderLost as error:
            self._fail(pending, ItemError("unavailable", str(error)))

    def _fail(self, pending: AcceptedItem, error: ItemError) -> None:
        for name in pending.open:
            outcome = asyncio.get_running_loop().create_future()
            outcome.set_result(error)
            pending.outcomes[name] = outcome
            self._metrics.items.labels(name, error.kind).inc()

    async def _row(self, index: int, item: ReceivedItem, charge: MemoryCharge, *, compared: bool) -> ScorerRow:
        """Returns the item with raw media. The images of earlier turns are decoded only if a reward reads `sources`."""
        image, video = await self._raw(item, len(item.history) - 1, charge)
        before = [turn for turn in range(len(item.history) - 1) if compared and item.history[turn].has_image]
        images = [(await self._raw(item, turn, charge))[0] for turn in before]
        sources = [image for image in images if image is not None]
        return ScorerRow(
            item.request_id or f"item {index}", item.prompt, item.text, image, video, item.metadata, sources
        )

    async def _raw(
        self, item: ReceivedItem, turn: int, charge: MemoryCharge
    ) -> tuple[MediaPayload | None, MediaPayload | None]:
        """Returns the raw image and video of a turn. Raises BadMedia, DecoderLost and RequestRefused."""
        try:
            return await self._decoder.raw(item.history[turn], charge)
        except BadMedia as error:
            raise BadMedia(f"history[{turn}]: {error}") from error

    def _queue(self, accepted: Sequence[AcceptedItem], client: str) -> None:
        """Queues every open reward of every item. Queues none of them, with 429, if one queue lacks room."""
        loop = asyncio.get_running_loop()
        new: dict[str, list[tuple[AcceptedItem, Job]]] = {}
        for pending in accepted:
            for name in pending.open:
                assert pending.row is not None
                lacks = lacking(pending.row, self._rewards[name])
                # Another request may have queued the same item while this one was decoded.
                outcome = self._cache.lookup(name, pending.item, pending.digest)
                if outcome is None:
                    outcome = loop.create_future()
                    if lacks is None:
                        new.setdefault(name, []).append((pending, Job(pending.row, outcome, client)))
                    else:
                        outcome.set_result(lacks)
                pending.outcomes[name] = outcome
        self._check_room({name: len(jobs) for name, jobs in new.items()}, client)
        for name, jobs in new.items():
            self._rewards[name].submit([job for _, job in jobs])
            for pending, job in jobs:
                self._cache.store(name, pending.item, pending.digest, job.outcome)

    def _check_room(self, counts: Mapping[str, int], client: str) -> None:
        for name, count in counts.items():
            reward = self._rewards[name]
            if not reward.has_room(count, client):
                raise RequestRefused(
                    429, "busy", f"the queue of {name!r} has no room for {count} items", reward.retry_after_s()
                )

    async def _wait(self, outcomes: Set[PendingOutcome]) -> None:
        """Waits for all outcomes. Jobs that no worker has started in time fail."""
        open = {outcome for outcome in outcomes if not outcome.done()}
        if not open:
            return
        _, late = await asyncio.wait(open, timeout=self._patience_s)
        if late:
            for reward in self._rewards.values():
                reward.expire(late)
            await asyncio.wait(late)


def digest_of(item: ReceivedItem) -> bytes:
    """Returns a digest of the item's content without its id; b"" for an item without an id."""
    if item.request_id is None:
        return b""
    digest = sha256()
    for turn in item.history:
        for medium in (turn.image, turn.video):
            digest.update(b"" if medium is None else medium.data)
        bare = [medium and (medium.format, medium.shape, len(medium.data)) for medium in (turn.image, turn.video)]
        digest.update(msgspec.msgpack.encode([bare, turn.text, turn.image_b64, turn.video_b64, turn.video_path]))
    digest.update(item.metadata)
    return digest.digest()


def lacking(row: ScorerRow, reward: RewardQueue) -> ItemError | None:
    """Returns an error if the item lacks a column that the reward reads."""
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


def response_of(accepted: Sequence[AcceptedItem]) -> ScoreResponse:
    """Returns the outcomes as a message of the wire."""
    results: list[dict[str, dict[str, Score]]] = []
    errors: list[dict[str, str]] = []
    answers: list[dict[str, TextAnswer]] = []
    for pending in accepted:
        outcomes = {name: pending.outcomes[name].result() for name in pending.item.required_rewards}
        scored = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, ItemScores)}
        results.append({name: dict(scores.parts) for name, scores in scored.items()})
        errors.append({name: str(outcome) for name, outcome in outcomes.items() if isinstance(outcome, ItemError)})
        answers.append({name: scores.answer for name, scores in scored.items() if scores.answer is not None})
    return ScoreResponse(results=results, errors=errors, answers=answers if any(answers) else None)
