"""Rewards that a service computes in processes, environments or machines of its own."""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unirl.config.errors import ConfigError, InvalidScoreError, RewardError, RewardUnreachableError, did_you_mean
from unirl.config.extras import need
from unirl.reward.base import RewardScorer
from unirl.reward.client.connection import PROBE_TIMEOUT_S, Connection, ConnectionConfig
from unirl.reward.client.encoding import image_medium, video_medium
from unirl.reward.client.retries import ItemResult, ScoresOrError, score_items
from unirl.reward.client.wire import ImageFormat, ItemError, MediaPayload, ScoreItem, Turn
from unirl.types.protocols import Capabilities
from unirl.types.reward import Answer, Failure, Failures, RewardRequest, RewardResponse

TOY = "toy"
TOTAL = "total"
CODES = {"not_finite": InvalidScoreError.code, "unavailable": RewardUnreachableError.code}
COLUMN = {"image": "images", "video": "videos", "text": "texts"}


@dataclass(frozen=True, kw_only=True)
class RemoteRewardSpec(ConnectionConfig):
    """Which rewards of which service, how their scores become one, and in which form the media travel."""

    required_rewards: tuple[str, ...]
    """Names that the service has; looked up when a run starts."""
    reward_weights: Mapping[str, float] | None = None
    """One per reward, for `weighted_sum`; a reward of weight 0 is logged only. None: all weigh the same."""
    aggregation_method: Literal["weighted_sum", "mean", "min", "max"] = "weighted_sum"
    """How several rewards become one; `weighted_sum` divides by the sum of the weights."""
    sub_metric_reduce: Literal["first", "mean", "max"] = "first"
    """How the parts of one reward become one score. UniRL's service sends the total first; the others leave it out."""
    input_kind: Literal["image", "video", "text"] = "image"
    image_format: ImageFormat = "raw"
    """`raw`, `png` and `webp` lose nothing; a `jpeg` in front of a scorer changes its scores."""
    image_quality: int = 95
    """Of JPEG, 1 to 95."""
    sends_sources: bool = False
    """The pictures that a prompt brings travel too, each in a turn before the sample's: for rewards of editing."""
    video_format: Literal["raw", "mp4"] = "raw"
    """Neither loses anything; `mp4` is smaller, slower, and needs PyAV."""
    video_fps: int = 8
    startup_s: float = PROBE_TIMEOUT_S
    """Seconds to wait for the service when a run starts; more for one that starts at the same time."""

    toy: ClassVar[dict[str, object]] = {"base_url": TOY}
    """A service of its own on this machine, with the scorers' toys; needs the package `unirl-reward-service`."""

    def __post_init__(self) -> None:
        if self.base_url != TOY:
            super().__post_init__()
        if not self.required_rewards:
            raise ValueError("required_rewards is empty: name at least one reward of the service")
        self._check_weights()
        if self.sends_sources and self.input_kind != "image":
            raise ValueError(f"sends_sources is for pictures that are edited, and input_kind is {self.input_kind}")
        if not 1 <= self.image_quality <= 95:
            raise ValueError(f"image_quality must lie in 1..95, got {self.image_quality}")
        if self.encoding == "json" and self.input_kind != "text" and self._format == "raw":
            raise ValueError(
                f"{self.input_kind}_format=raw cannot travel with encoding=json, whose contract knows files only: "
                f"choose {'png' if self.input_kind == 'image' else 'mp4'}"
            )

    def _check_weights(self) -> None:
        if self.reward_weights is None:
            return
        if self.aggregation_method != "weighted_sum":
            raise ValueError(
                f"reward_weights={self.reward_weights} plays no part in {self.aggregation_method}: remove it"
            )
        if set(self.reward_weights) != set(self.required_rewards):
            raise ValueError(
                f"reward_weights={self.reward_weights} must name each of {list(self.required_rewards)} once"
            )
        if not sum(self.reward_weights.values()) > 0:
            raise ValueError(f"reward_weights={self.reward_weights} must have a positive sum")

    @property
    def _format(self) -> str:
        return self.image_format if self.input_kind == "image" else self.video_format

    @property
    def weights(self) -> dict[str, float]:
        """Of every reward, with sum 1."""
        given = self.reward_weights or dict.fromkeys(self.required_rewards, 1.0)
        return {name: given[name] / sum(given.values()) for name in self.required_rewards}

    @property
    def logged_rewards(self) -> set[str]:
        """The rewards that are logged and teach nothing."""
        return {name for name, weight in self.weights.items() if weight == 0.0}


class RemoteRewardBackend(RewardScorer):
    """Sends rows to a service, and again until it has their scores. Threads may share it."""

    def __init__(self, *, config: RemoteRewardSpec) -> None:
        self.config = config
        self.reads = ("prompts", COLUMN[config.input_kind], "metadata", *(("sources",) if config.sends_sources else ()))
        self.capabilities = Capabilities(modalities=(config.input_kind,))
        self._connection: Connection | None = None
        self._starting = threading.Lock()

    def score(self, request: RewardRequest) -> RewardResponse:
        outcomes = score_items(self.connection(), RequestItems(request, self.config))
        return response(outcomes, self.config)

    def check_start(self) -> None:
        """Whether the service answers, takes the token and has every required reward; that of a toy does.

        Raises:
            RewardError: 6001 it does not answer; 6002 it refuses the token.
            ConfigError: it lacks a reward.
        """
        if self.config.base_url != TOY:
            check_required_rewards(self.connection(), self.config)

    def connection(self) -> Connection:
        """The connection; of a toy, to a service that is started when this is first asked."""
        with self._starting:
            if self._connection is None:
                self._connection = Connection(self.config if self.config.base_url != TOY else toy_service(self.config))
            return self._connection


def check_required_rewards(connection: Connection, config: RemoteRewardSpec) -> None:
    """Raises ConfigError when the service lacks a required reward, RewardError (6001) when it does not answer."""
    try:
        known = connection.health(config.startup_s).rewards
    except RewardUnreachableError as error:
        raise RewardUnreachableError(f"{error}. If it is still starting, write a larger startup_s") from error
    for name in config.required_rewards:
        if name not in known:
            raise ConfigError(
                f"required_rewards names {name!r}, which the service at {config.base_url} does not have."
                f"{did_you_mean(name, known)} It has {', '.join(known) or 'none'}"
            )


def toy_service(config: RemoteRewardSpec) -> ConnectionConfig:
    """Where a new service with the toys of the required rewards listens; it ends with this process.

    Raises:
        DependencyError: the package of the service is missing.
    """
    need("reward_service", by="base_url=toy, which starts a service,", install="pip install ./unirl-reward-service")
    from reward_service.running import RunningService

    rewards = [{"name": name, "scorer": name, "device": "cpu"} for name in config.required_rewards]
    service = RunningService({"rewards": rewards, "toy": True, "server": {"port": 0}}).start()
    return replace(config, base_url=service.url)


class RequestItems:
    """The rows of a request as items of the wire. Each is encoded when it is sent, by the thread that sends it."""

    def __init__(self, request: RewardRequest, config: RemoteRewardSpec) -> None:
        self._request, self._config = request, config

    def __len__(self) -> int:
        return len(self._request)

    def __getitem__(self, row: int) -> ScoreItem:
        request, config = self._request, self._config
        assert request.prompts is not None and request.metadata is not None
        try:
            return ScoreItem(
                history=self._history(row, request.prompts[row]),
                required_rewards=list(config.required_rewards),
                metadata=dict(request.metadata[row]),
            )
        except ValueError as error:
            raise RewardError(
                f"sample {request.sample_ids[row]!r} cannot be sent to {config.base_url}: {error}"
            ) from error

    def _history(self, row: int, prompt: str) -> list[Turn]:
        request, config = self._request, self._config
        if config.input_kind == "text":
            assert request.texts is not None
            return [Turn(text=prompt), Turn(text=request.texts[row])]
        if config.input_kind == "image":
            assert request.images is not None
            sources = () if request.sources is None else request.sources[row]
            return [self._picture(prompt, pixels) for pixels in (*sources, request.images[row])]
        assert request.videos is not None
        start, end = request.videos.offsets[row : row + 2].tolist()
        medium = video_medium(request.videos.frames[start:end], config.video_format, config.video_fps)
        return [
            Turn(text=prompt, video_b64=_base64(medium))
            if config.encoding == "json"
            else Turn(text=prompt, video=medium)
        ]

    def _picture(self, prompt: str, pixels: Tensor) -> Turn:
        medium = image_medium(pixels, self._config.image_format, self._config.image_quality)
        if self._config.encoding == "json":
            return Turn(text=prompt, image_b64=_base64(medium))
        return Turn(text=prompt, image=medium)


def _base64(medium: MediaPayload) -> str:
    return base64.b64encode(medium.data).decode()


def response(outcomes: Sequence[ItemResult], config: RemoteRewardSpec) -> RewardResponse:
    """The scores of all rows as columns; a row that a reward could not score says why.

    Raises:
        RewardError: 6002 a reward gives other parts for one row than for another.
    """
    columns = {
        name: reduced([outcome.scores[name] for outcome in outcomes], name, config) for name in config.required_rewards
    }
    failures: dict[int, Failures] = {}
    for name in sorted(columns, key=lambda name: name in config.logged_rewards):
        for row, outcome in enumerate(outcomes):
            found = outcome.scores[name]
            if isinstance(found, ItemError):
                failure = Failure(name, f"{name}: {found}", CODES.get(found.kind, RewardError.code))
                failures[row] = (*failures.get(row, ()), failure)
    named = {name: renamed(name, parts) for name, parts in columns.items()}
    return RewardResponse(
        total=aggregated({name: parts[TOTAL] for name, parts in columns.items()}, config),
        components=_merged(parts for name, parts in named.items() if name not in config.logged_rewards),
        logged_rewards=_merged(parts for name, parts in named.items() if name in config.logged_rewards),
        failures=failures,
        answers=answers_of(outcomes, config),
    )


def answers_of(outcomes: Sequence[ItemResult], config: RemoteRewardSpec) -> list[Answer | None] | None:
    """What each row answers, by the first reward that says so of any; those that teach are asked first."""
    for name in sorted(config.required_rewards, key=lambda name: name in config.logged_rewards):
        found = [outcome.said.get(name) for outcome in outcomes]
        if any(found):
            return [None if said is None else Answer(right=said.right, text=said.text) for said in found]
    return None


def reduced(outcomes: Sequence[ScoresOrError], name: str, config: RemoteRewardSpec) -> dict[str, Tensor]:
    """One reward's parts [B] and, as `total`, what they are reduced to; NaN where it could not score."""
    scored = [outcome for outcome in outcomes if not isinstance(outcome, ItemError)]
    parts = list(scored[0]) if scored else []
    for outcome in scored:
        if outcome.keys() != set(parts):
            raise RewardError(f"reward {name!r} gives the parts {parts} for one sample and {list(outcome)} for another")
    totals = [
        math.nan if isinstance(outcome, ItemError) else reduce(outcome, config.sub_metric_reduce)
        for outcome in outcomes
    ]
    return {TOTAL: torch.tensor(totals)} | {
        part: torch.tensor([math.nan if isinstance(outcome, ItemError) else outcome[part] for outcome in outcomes])
        for part in parts
        if part != TOTAL
    }


def reduce(parts: Mapping[str, float], how: str) -> float:
    """One score of several parts."""
    if how == "first":
        return next(iter(parts.values()))
    others = [score for part, score in parts.items() if part != TOTAL] or list(parts.values())
    return max(others) if how == "max" else sum(others) / len(others)


def renamed(name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The total under the reward's name, and its parts, if there are several, behind it."""
    others = {f"{name}_{part}": scores for part, scores in parts.items() if part != TOTAL}
    return {name: parts[TOTAL]} | (others if len(others) > 1 else {})


def aggregated(totals: Mapping[str, Tensor], config: RemoteRewardSpec) -> Tensor:
    """[B] several rewards as one; logged-only rewards do not enter it, whether they failed or not."""
    taught = {name: scores.double() for name, scores in totals.items() if name not in config.logged_rewards}
    stacked = torch.stack(list(taught.values()))
    if config.aggregation_method == "weighted_sum":
        weights = torch.tensor([config.weights[name] for name in taught], dtype=torch.float64)
        return (weights[:, None] * stacked).sum(dim=0).float()
    if config.aggregation_method == "mean":
        return stacked.mean(dim=0).float()
    return (stacked.amin(dim=0) if config.aggregation_method == "min" else stacked.amax(dim=0)).float()


def _merged(parts: Any) -> dict[str, Tensor]:
    return {name: scores for columns in parts for name, scores in columns.items()}
