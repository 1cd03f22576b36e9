"""What a reward service is asked and what it answers, typed; loads neither torch nor transformers.

    POST /score {"requests": [{"history": [{"text": ..., "image": {...}}], "required_rewards": [...], "metadata": {}}]}
             -> {"results": [{reward: {part: score}}], "errors": [{reward: "<kind>: <message>"}],
                 "answers": [{reward: {"right": true, "text": "42"}}]}

As msgpack (`application/msgpack`) or JSON (`application/json`, where bytes are base64 text). Results and errors stand
in the order of the requests; a reward that failed is absent from the results and present in the errors. Answers are
said by rewards about right answers alone, and by no service that does not know them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

MSGPACK, JSON = "application/msgpack", "application/json"
ContentType = Literal["application/msgpack", "application/json"]

ImageFormat = Literal["raw", "png", "webp", "jpeg"]
VideoFormat = Literal["raw", "mp4", "webm"]
IMAGE_FORMATS: tuple[ImageFormat, ...] = ("raw", "png", "webp", "jpeg")
VIDEO_FORMATS: tuple[VideoFormat, ...] = ("raw", "mp4", "webm")

MAX_DEPTH = 16
"""Lists and mappings within metadata."""
MAX_INT = 2**63

T = TypeVar("T")


class MediaPayload(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A picture or a video. `raw` is uint8 RGB, [H, W, 3] or [F, H, W, 3], laid out in that order; it loses nothing."""

    format: Literal["raw", "png", "webp", "jpeg", "mp4", "webm"]
    data: bytes
    shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=3, max_length=4)] | None = None
    """Of `raw` alone; files know their own."""

    def __post_init__(self) -> None:
        if self.format != "raw":
            if self.shape is not None:
                raise ValueError(f"shape is only for raw media, and this one is {self.format}: leave it out")
        elif self.shape is None or self.shape[-1] != 3:
            raise ValueError(f"a raw medium needs its shape, [H, W, 3] or [F, H, W, 3], got {self.shape}")
        elif math.prod(self.shape) != len(self.data):
            raise ValueError(f"shape {list(self.shape)} means {math.prod(self.shape)} bytes, got {len(self.data)}")


MEDIA_FIELDS = ("image", "image_b64", "video", "video_b64", "video_path")


class Turn(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What was said, and what was generated for it: at most one medium."""

    text: Annotated[str, Meta(max_length=100_000)] = ""
    image: MediaPayload | None = None
    image_b64: str | None = None
    """A PNG, JPEG or WebP file in base64."""
    video: MediaPayload | None = None
    video_b64: str | None = None
    """An MP4 or WebM file in base64."""
    video_path: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """A file below one of the service's media roots."""

    def __post_init__(self) -> None:
        given = [name for name in MEDIA_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"a turn has at most one medium, got {' and '.join(given)}")
        if self.image is not None:
            _check_kind(self.image, "an image", IMAGE_FORMATS, "[H, W, 3]")
        if self.video is not None:
            _check_kind(self.video, "a video", VIDEO_FORMATS, "[F, H, W, 3]")

    @property
    def has_image(self) -> bool:
        return self.image is not None or self.image_b64 is not None

    @property
    def has_video(self) -> bool:
        return self.video is not None or self.video_b64 is not None or self.video_path is not None


def _check_kind(medium: MediaPayload, what: str, formats: Sequence[str], axes: str) -> None:
    if medium.format not in formats or (medium.shape and len(medium.shape) != axes.count(",") + 1):
        found = f"{medium.format} {list(medium.shape)}" if medium.shape else medium.format
        raise ValueError(f"{what} is one of {', '.join(formats)}, and {axes} if raw, got {found}")


Name = Annotated[str, Meta(min_length=1, max_length=128)]


class ScoreItem(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One sample to score.

    Its last turn is what is scored: a picture or a video with the text as its prompt; without a medium, the text is
    what was generated and the turn before holds the prompt. An edited picture comes after the turn of its source.
    """

    history: Annotated[list[Turn], Meta(min_length=1, max_length=64)]
    required_rewards: Annotated[list[Name], Meta(min_length=1, max_length=64)]
    metadata: dict[str, Any] | None = None
    request_id: Name | None = None
    """The same for every attempt to have this item scored: a service that knows it answers without scoring again."""

    def __post_init__(self) -> None:
        if len(set(self.required_rewards)) < len(self.required_rewards):
            raise ValueError(f"required_rewards names one reward twice: {self.required_rewards}")
        check_plain(self.metadata, "metadata")

    @property
    def answer(self) -> Turn:
        """The turn that is scored."""
        return self.history[-1]

    @property
    def prompt(self) -> str | None:
        """What was asked for; None for a text without a turn before it."""
        if self.answer.has_image or self.answer.has_video:
            return self.answer.text
        return self.history[-2].text if len(self.history) > 1 else None

    @property
    def text(self) -> str | None:
        """The text that was generated; None when a medium was."""
        return None if self.answer.has_image or self.answer.has_video else self.answer.text


class ScoreRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The body of `POST /score`."""

    requests: Annotated[list[ScoreItem], Meta(min_length=1, max_length=4096)]
    version: Literal[1] = 1


Score = float | bool | None
"""Only a finite float is a score. The others can be read, so that the sample which has one can be named."""


class TextAnswer(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a text answers, as a reward about right answers reads it."""

    right: bool
    text: str | None = None
    """Equal for answers that are the same; "" = it gives none; absent = the reward does not say."""


class ScoreResponse(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to `POST /score`, in the order of the requests."""

    results: list[dict[str, dict[str, Score]]]
    """reward -> part -> score. The part `total` comes first and is what becomes the reward."""
    errors: list[dict[str, str]]
    """reward -> "<kind>: <message>", the kind one of `Kind`."""
    answers: list[dict[str, TextAnswer]] | None = None
    """reward -> what the item answers; absent where no reward says that of any item."""

    def __post_init__(self) -> None:
        if len(self.results) != len(self.errors):
            raise ValueError(f"results are {len(self.results)} and errors {len(self.errors)}: they must be as many")
        if self.answers is not None and len(self.answers) != len(self.results):
            raise ValueError(f"results are {len(self.results)} and answers {len(self.answers)}: they must be as many")


class Health(Struct, frozen=True, kw_only=True):
    """The answer to `GET /health`."""

    status: Literal["ok", "degraded"]
    rewards: dict[str, list[bool | str]]
    """reward -> whether each of its replicas is ready."""


class Refusal(Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    kind: str
    detail: str


Kind = Literal["invalid", "failed", "not_finite", "timeout", "crashed", "unavailable"]
"""Why a reward has no score of an item. The first three say that the item itself is at fault: asking again is vain."""
RETRYABLE: tuple[Kind, ...] = ("timeout", "crashed", "unavailable")


class ItemError(Struct, frozen=True, array_like=True):
    """Why one reward has no score of one item."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"

    @classmethod
    def read(cls, text: str) -> ItemError:
        """The error that a service wrote; one of a service that knows no kinds has failed."""
        kind, found, message = text.partition(": ")
        return cls(kind, message) if found and kind in Kind.__args__ else cls("failed", text)  # type: ignore[attr-defined]


def check_plain(value: Any, where: str, depth: int = MAX_DEPTH) -> None:
    """Raises ValueError unless `value` is JSON: text, bool, None, 64-bit int, finite float, lists and mappings."""
    if isinstance(value, (Mapping, list)):
        if depth == 0:
            raise ValueError(f"{where} is nested more than {MAX_DEPTH} deep")
        for key, below in _entries(value):
            check_plain(below, f"{where}[{key!r}]", depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: only finite numbers are JSON")
    elif isinstance(value, int) and not -MAX_INT <= value < MAX_INT:
        raise ValueError(f"{where} is an integer beyond 64 bits")
    elif not isinstance(value, (str, bool, int, float, type(None))):
        raise ValueError(f"{where} is a {type(value).__name__}, which JSON does not have")


def _entries(value: Mapping[Any, Any] | Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        yield from enumerate(value)
        return
    for key, below in value.items():
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} is not text")
        yield key, below


def encode(value: Struct, content_type: str = MSGPACK) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(value) if content_type == MSGPACK else msgspec.json.encode(value)


def decode(kind: type[T], body: bytes | memoryview, content_type: str = MSGPACK) -> T:
    """The message in `body`.

    Raises:
        msgspec.ValidationError: it has another form than `kind`; the message says where.
        msgspec.DecodeError: it is not msgpack, or not JSON, at all.
    """
    try:
        if content_type == MSGPACK:
            return msgspec.msgpack.decode(body, type=kind)
        return msgspec.json.decode(body, type=kind)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from error
