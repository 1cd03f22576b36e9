"""Rewards that a reward service computes in other processes, in other environments or on other machines."""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unirl.config.dependencies import need
from unirl.config.errors import ConfigError, InvalidScoreError, RewardError, RewardUnreachableError, did_you_mean
from unirl.config.http import PROBE_TIMEOUT_S
from unirl.reward.base import RewardScorer
from unirl.reward.client.connection import Connection, ConnectionConfig
from unirl.reward.client.encoding import encode_image, encode_video
from unirl.reward.client.retries import ItemResult, score_items
from unirl.reward.client.wire import ImageFormat, ItemError, MediaPayload, ScoreItem, Turn
from unirl.reward.combine import combined
from unirl.types.protocols import Capabilities
from unirl.types.reward import Answer, RewardRequest, RewardResponse, ScoringFailure

TOY = "toy"
TOTAL = "total"
CODES = {"not_finite": InvalidScoreError.code, "unavailable": RewardUnreachableError.code}
COLUMN = {"image": "images", "video": "videos", "text": "texts"}


@dataclass(frozen=True, kw_only=True)
class RemoteRewardSpec(ConnectionConfig):
    """The service, its rewards, how their scores are combined, and how images and videos are encoded."""

    required_rewards: tuple[str, ...]
    """Names of rewards of the service. The start of a run checks that the service has them."""
    reward_weights: Mapping[str, float] | None = None
    """One weight per reward, for `weighted_sum`. A reward of weight 0 is logged only. None: all weights are equal."""
    aggregation_method: Literal["weighted_sum", "mean", "min", "max"] = "weighted_sum"
    """How several rewards are combined. `weighted_sum` divides by the sum of the weights."""
    sub_metric_reduce: Literal["first", "mean", "max"] = "first"
    """How the parts of one reward are combined. UniRL's service sends the total first; `mean` and `max` ignore it."""
    input_kind: Literal["image", "video", "text"] = "image"
    """What is scored."""
    image_format: ImageFormat = "raw"
    """`raw`, `png` and `webp` are lossless. `jpeg` is not, and changes the scores."""
    image_quality: int = 95
    """JPEG quality, 1 to 95."""
    sends_sources: bool = False
    """Also sends the images of a prompt, each in a turn before the sample's. Rewards of image editing need them."""
    video_format: Literal["raw", "mp4"] = "raw"
    """Both are lossless. `mp4` is smaller and slower, and needs PyAV."""
    video_fps: int = 8
    """Frames per second of the video that the service gets."""
    startup_s: float = PROBE_TIMEOUT_S
    """Seconds to wait for the service when a run starts. Increase it for a service that starts at the same time."""

    toy: ClassVar[dict[str, object]] = {"base_url": TOY}
    """Starts a service with the scorers' toys on this machine; needs the package `unirl-reward-service`."""

    def __post_init__(self) -> None:
        if self.base_url != TOY:
            super().__post_init__()
        if not self.required_rewards:
            raise ValueError("required_rewards is empty: name at least one reward of the service")
        self._check_weights()
        if self.sends_sources and self.input_kind != "image":
            raise ValueError(f"sends_sources needs input_kind=image, got {self.input_kind}")
        if not 1 <= self.image_quality <= 95:
            raise ValueError(f"image_quality must lie in 1..95, got {self.image_quality}")
        if self.encoding == "json" and self.input_kind != "text" and self._format == "raw":
            raise ValueError(
                f"{self.input_kind}_format=raw cannot be sent with encoding=json, which supports files only: "
                f"choose {'png' if self.input_kind == 'image' else 'mp4'}"
            )

    def _check_weights(self) -> None:
        if self.reward_weights is None:
            return
        if self.aggregation_method != "weighted_sum":
            raise ValueError(
                f"reward_weights={self.reward_weights} has no effect with {self.aggregation_method}: remove it"
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
        """The weight of every reward. The weights have the sum 1."""
        given = self.reward_weights or dict.fromkeys(self.required_rewards, 1.0)
        return {name: given[name] / sum(given.values()) for name in self.required_rewards}

    @property
    def logged_rewards(self) -> set[str]:
        """The rewards of weight 0, which are logged and do not enter the total."""
        return {name for name, weight in self.weights.items() if weight == 0.0}


class RemoteRewardBackend(RewardScorer):
    """Sends rows to a reward service and retries until it has their scores. Threads may share it."""

    reads_levels = True
    capabilities = Capabilities()  # of the class; an object scores what its `input_kind` says

    def __init__(self, *, config: RemoteRewardSpec) -> None:
        self.config = config
        self.reads = ("prompts", COLUMN[config.input_kind], "metadata", *(("sources",) if config.sends_sources else ()))
        self.capabilities = Capabilities(modalities=(config.input_kind,))
        self._connection: Connection | None = None
        self._starting = threading.Lock()

    def score(self, request: RewardRequest) -> RewardResponse:
        config = self.config
        results = score_items(self.connection(), RequestItems(request, config))
        responses = {name: reward_response(name, results, config) for name in config.required_rewards}
        total = aggregate({name: response.total for name, response in responses.items()}, config)
        return combined(total, responses, config.logged_rewards)

    def check_start(self) -> None:
        """Checks that the service answers, accepts the token and has every required reward. Skipped at toy scale.

        Raises:
            RewardError: 6001 the service does not answer; 6002 it refuses the token.
            ConfigError: the service lacks a reward.
        """
        config = self.config
        if config.base_url == TOY:
            return
        try:
            known = self.connection().health(config.startup_s).rewards
        except RewardUnreachableError as error:
            raise RewardUnreachableError(f"{error}. If it is still starting, write a larger startup_s") from error
        for name in config.required_rewards:
            if name not in known:
                raise ConfigError(
                    f"required_rewards names {name!r}, which the service at {config.base_url} does not have."
                    f"{did_you_mean(name, known)} It has {', '.join(known) or 'none'}"
                )

    def connection(self) -> Connection:
        """Returns the connection. At toy scale, the first call starts a service on this machine."""
        with self._starting:
            if self._connection is None:
                self._connection = Connection(self.config if self.config.base_url != TOY else toy_service(self.config))
            return self._connection


def toy_service(config: RemoteRewardSpec) -> ConnectionConfig:
    """Starts a service with the toys of the required rewards, and returns its address. It ends with this process."""
    need("reward_service", by="base_url=toy, which starts a service,", install="pip install ./unirl-reward-service")
    from reward_service.running import RunningService

    rewards = [{"name": name, "scorer": name, "device": "cpu"} for name in config.required_rewards]
    service = RunningService({"rewards": rewards, "toy": True, "server": {"port": 0}}).start()
    return replace(config, base_url=service.url)


class RequestItems:
    """The rows of a request as items of the wire. The thread that sends an item encodes it at that moment."""

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
            return [self._image_turn(prompt, pixels) for pixels in (*sources, request.images[row])]
        assert request.videos is not None
        start, end = request.videos.offsets[row : row + 2].tolist()
        video = encode_video(request.videos.frames[start:end], config.video_format, config.video_fps)
        as_text = config.encoding == "json"
        return [Turn(text=prompt, video_b64=_base64(video)) if as_text else Turn(text=prompt, video=video)]

    def _image_turn(self, prompt: str, pixels: Tensor) -> Turn:
        image = encode_image(pixels, self._config.image_format, self._config.image_quality)
        as_text = self._config.encoding == "json"
        return Turn(text=prompt, image_b64=_base64(image)) if as_text else Turn(text=prompt, image=image)


def _base64(payload: MediaPayload) -> str:
    return base64.b64encode(payload.data).decode()


def reward_response(name: str, results: Sequence[ItemResult], config: RemoteRewardSpec) -> RewardResponse:
    """Returns the scores by one reward: the reduction of its parts, and the parts. Rows without scores are NaN.

    Raises RewardError when the reward gives different parts for different rows.
    """
    rows = [result.scores[name] for result in results]
    errors = {row: scores for row, scores in enumerate(rows) if isinstance(scores, ItemError)}
    scored = {row: scores for row, scores in enumerate(rows) if not isinstance(scores, ItemError)}
    parts = list(next(iter(scored.values()), ()))
    for scores in scored.values():
        if scores.keys() != set(parts):
            raise RewardError(f"reward {name!r} gives the parts {parts} for one sample and {list(scores)} for another")
    total = torch.full((len(rows),), math.nan)
    components = {part: total.clone() for part in parts if part != TOTAL}
    for row, scores in scored.items():
        total[row] = reduce_parts(scores, config.sub_metric_reduce)
        for part, column in components.items():
            column[row] = scores[part]
    answers = [result.answers.get(name) for result in results]
    return RewardResponse(
        total=total,
        components=components,
        failures={
            row: (ScoringFailure(name, f"{name}: {error}", CODES.get(error.kind, RewardError.code)),)
            for row, error in errors.items()
        },
        answers=[None if a is None else Answer(a.right, a.text) for a in answers] if any(answers) else None,
    )


def reduce_parts(parts: Mapping[str, float], how: str) -> float:
    """Reduces the parts of one reward to one score."""
    if how == "first":
        return next(iter(parts.values()))
    others = [score for part, score in parts.items() if part != TOTAL] or list(parts.values())
    return max(others) if how == "max" else sum(others) / len(others)


def aggregate(totals: Mapping[str, Tensor], config: RemoteRewardSpec) -> Tensor:
    """Combines the totals of several rewards [B] into one [B]. Logged-only rewards are left out, failed or not."""
    counted = {name: scores.double() for name, scores in totals.items() if name not in config.logged_rewards}
    stacked = torch.stack(list(counted.values()))
    if config.aggregation_method == "weighted_sum":
        weights = torch.tensor([config.weights[name] for name in counted], dtype=torch.float64)
        return (weights[:, None] * stacked).sum(dim=0).float()
    if config.aggregation_method == "mean":
        return stacked.mean(dim=0).float()
    return (stacked.amin(dim=0) if config.aggregation_method == "min" else stacked.amax(dim=0)).float()
