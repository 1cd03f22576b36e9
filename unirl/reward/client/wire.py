"""The requests and responses of a reward service as types. This module loads neither torch nor transformers.

    POST /score {"requests": [{"history": [{"text": ..., "image": {...}}], "required_rewards": [...], "metadata": {}}]}
             -> {"results": [{reward: {part: score}}], "errors": [{reward: "<kind>: <message>"}],
                 "answers": [{reward: {"right": true, "text": "42"}}]}

Bodies are msgpack (`application/msgpack`) or JSON (`application/json`, where bytes are base64 text). Results and errors
are in the order of the requests. A reward that failed is absent from the results and present in the errors. Only
rewards that compare a text with a right answer send `answers`, and other services may not know the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

MSGPACK, JSON = "application/msgpack", "application/json"
ContentType = Literal["application/msgpack", "application/json"]

ImageFormat = Literal["raw", "png", "webp", "jpeg"]
IMAGE_FORMATS: tuple[ImageFormat, ...] = get_args(ImageFormat)
VIDEO_FORMATS = ("raw", "mp4", "webm")

MAX_DEPTH = 16
"""Largest nesting depth of lists and mappings in metadata."""
MAX_VALUES = 10_000
"""Largest number of values in the metadata of an item, those in lists and mappings included."""
MAX_METADATA_BYTES = 2**18
"""Largest encoded metadata of an item."""
MAX_INT = 2**63
SHOWN = 200
"""Largest number of characters of a key or a place that an error message shows."""

T = TypeVar("T")


class MediaPayload(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An image or a video. `raw` is uint8 RGB in C order, [H, W, 3] for an image or [F, H, W, 3] for a video."""

    format: Literal["raw", "png", "webp", "jpeg", "mp4", "webm"]
    data: bytes
    shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=3, max_length=4)] | None = None
    """The shape of `raw` data; None for files, which contain theirs."""

    def __post_init__(self) -> None:
        if self.format != "raw":
            if self.shape is not None:
                raise ValueError(f"shape is only for raw media, and the format is {self.format}: leave it out")
        elif self.shape is None or self.shape[-1] != 3:
            raise ValueError(f"raw media need their shape, [H, W, 3] or [F, H, W, 3], got {self.shape}")
        elif math.prod(self.shape) != len(self.data):
            raise ValueError(f"shape {list(self.shape)} means {math.prod(self.shape)} bytes, got {len(self.data)}")


MEDIA_FIELDS = ("image", "image_b64", "video", "video_b64", "video_path")


class Turn(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One turn of a conversation: a text and at most one image or video."""

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
            raise ValueError(f"a turn has at most one image or video, got {' and '.join(given)}")
        if self.image is not None:
            _check_format(self.image, "an image", IMAGE_FORMATS, "[H, W, 3]")
        if self.video is not None:
            _check_format(self.video, "a video", VIDEO_FORMATS, "[F, H, W, 3]")

    @property
    def texts(self) -> list[str]:
        """The text and the media in base64."""
        return [text for text in (self.text, self.image_b64, self.video_b64) if text is not None]

    @property
    def has_image(self) -> bool:
        return self.image is not None or self.image_b64 is not None

    @property
    def has_video(self) -> bool:
        return self.video is not None or self.video_b64 is not None or self.video_path is not None


def _check_format(media: MediaPayload, what: str, formats: Sequence[str], axes: str) -> None:
    if media.format not in formats or (media.shape and len(media.shape) != axes.count(",") + 1):
        actual = f"{media.format} {list(media.shape)}" if media.shape else media.format
        raise ValueError(f"{what} must have one of the formats {', '.join(formats)}, and {axes} if raw, got {actual}")


Name = Annotated[str, Meta(min_length=1, max_length=128)]
NO_METADATA = msgspec.Raw(b"\xc0")
"""The metadata of an item that has none, in msgpack."""


class ItemContent(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """An item without its metadata.

    The last turn is scored. If it has an image or a video, its text is the prompt. Otherwise its text was generated and
    the turn before it is the prompt. The source of an edited image is in an earlier turn.
    """

    history: Annotated[list[Turn], Meta(min_length=1, max_length=64)]
    required_rewards: Annotated[list[Name], Meta(min_length=1, max_length=64)]
    request_id: Name | None = None
    """Is the same in all attempts to score this item. The service returns the scores of a known id without scoring."""

    def __post_init__(self) -> None:
        if len(set(self.required_rewards)) < len(self.required_rewards):
            raise ValueError(f"required_rewards names a reward twice: {self.required_rewards}")

    @property
    def answer(self) -> Turn:
        """The turn that is scored."""
        return self.history[-1]

    @property
    def prompt(self) -> str | None:
        """The prompt; None for a generated text without a turn before it."""
        if self.answer.has_image or self.answer.has_video:
            return self.answer.text
        return self.history[-2].text if len(self.history) > 1 else None

    @property
    def text(self) -> str | None:
        """The generated text; None if an image or a video was generated."""
        return None if self.answer.has_image or self.answer.has_video else self.answer.text


class ScoreItem(ItemContent, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One sample to score."""

    metadata: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        ItemContent.__post_init__(self)
        check_plain(self.metadata, "metadata")


class ReceivedItem(ItemContent, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """An item as a service reads it: the metadata stay encoded until `read_metadata` has checked their size."""

    metadata: msgspec.Raw = NO_METADATA


class ScoreRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The body of `POST /score`."""

    requests: Annotated[list[ScoreItem], Meta(min_length=1, max_length=4096)]
    version: Literal[1] = 1


class ReceivedRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The body of `POST /score` as a service reads it."""

    requests: Annotated[list[ReceivedItem], Meta(min_length=1, max_length=4096)]
    version: Literal[1] = 1


Score = float | bool | None
"""Only a finite float is a score. The other values are read so that an error can name their sample."""


class TextAnswer(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer that a reward about right answers reads in a text."""

    right: bool
    text: str | None = None
    """Equal for equal answers; "" if the text gives no answer; absent if the reward does not report it."""


class ScoreResponse(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The body of the response to `POST /score`, in the order of the requests."""

    results: list[dict[str, dict[str, Score]]]
    """reward -> part -> score. The part `total` comes first and is what becomes the reward."""
    errors: list[dict[str, str]]
    """reward -> "<kind>: <message>", where the kind is one of `Kind`."""
    answers: list[dict[str, TextAnswer]] | None = None
    """reward -> answer that the item's text gives; absent if no reward reports answers."""

    def __post_init__(self) -> None:
        if len(self.results) != len(self.errors):
            raise ValueError(f"{len(self.results)} results and {len(self.errors)} errors: the numbers must be equal")
        if self.answers is not None and len(self.answers) != len(self.results):
            raise ValueError(f"{len(self.results)} results and {len(self.answers)} answers: the numbers must be equal")


class Health(Struct, frozen=True, kw_only=True):
    """The body of the response to `GET /health`."""

    status: Literal["ok", "degraded"]
    rewards: dict[str, list[bool | str]]
    """reward -> readiness of each of its replicas."""


class Probe(Struct, frozen=True, kw_only=True):
    """The body of a successful response to `GET /live` and `GET /ready`."""

    status: Literal["live", "ready"]


class Refusal(Struct, frozen=True, kw_only=True):
    """The body of every response that is not a success."""

    kind: str
    detail: str


Kind = Literal["invalid", "failed", "not_finite", "timeout", "crashed", "unavailable"]
"""Why a reward has no score for an item. The first three concern the item itself, so another attempt is useless."""
RETRYABLE: tuple[Kind, ...] = ("timeout", "crashed", "unavailable")


class ItemError(Struct, frozen=True, array_like=True):
    """Why one reward has no score for one item."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"

    @classmethod
    def read(cls, text: str) -> ItemError:
        """Parses the error of a service. A text without a known kind has the kind `failed`."""
        kind, colon, message = text.partition(": ")
        return cls(kind, message) if colon and kind in get_args(Kind) else cls("failed", text)


NO_VALUES: dict[Any, object] = {}
Place = tuple["Place | None", object]
"""A place inside of metadata: the place around it, and its key or index there."""


def check_plain(value: object, where: str) -> None:
    """Raises ValueError unless `value` is small JSON: str, bool, None, 64-bit int, finite float, list, dict.

    The time is linear in the number of values, of which at most MAX_VALUES are visited.
    """
    if type(value) is dict and len(value) <= MAX_VALUES and {*map(type, value), *map(type, value.values())} == {str}:
        return  # most metadata
    level: list[tuple[object, Place]] = [(value, (None, where))]
    visited = 0
    for _ in range(MAX_DEPTH + 1):
        below: list[tuple[object, Place]] = []
        for each, place in level:
            inner = _inside(each, place)
            if not inner:
                continue
            visited += len(inner)
            if visited > MAX_VALUES:
                raise ValueError(f"{where} has more than {MAX_VALUES} values: send less")
            below += ((inside, (place, key)) for key, inside in inner.items())
        if not below:
            return
        level = below
    raise ValueError(f"{where} is nested more than {MAX_DEPTH} levels deep")


def _inside(value: object, place: Place) -> Mapping[Any, object]:
    """Returns the values inside of a list or mapping, by index or key; none for other JSON. Raises ValueError."""
    if value is None or isinstance(value, (str, bool)):
        return NO_VALUES
    if isinstance(value, (dict, Mapping)):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{_shown(place)} has the key {str(key)[:SHOWN]}, which is not a string")
        return value
    if isinstance(value, list):
        return dict(enumerate(value))
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{_shown(place)} is {value}: only finite numbers are JSON")
    if isinstance(value, int) and not -MAX_INT <= value < MAX_INT:
        raise ValueError(f"{_shown(place)} is an integer beyond 64 bits")
    if not isinstance(value, (int, float)):
        raise ValueError(f"{_shown(place)} is a {type(value).__name__}, which JSON does not have")
    return NO_VALUES


def _shown(place: Place) -> str:
    """Returns a place as text, at most MAX_DEPTH keys of SHOWN characters each."""
    around, key = place
    return str(key) if around is None else f"{_shown(around)}[{repr(key)[:SHOWN]}]"


def read_metadata(raw: msgspec.Raw, content_type: str, where: str) -> dict[str, Any] | None:
    """Returns the metadata of a received item.

    Raises:
        msgspec.ValidationError: they are too large, too deep or not plain JSON; the message names the place.
    """
    data = memoryview(raw)
    if len(data) > MAX_METADATA_BYTES:
        raise msgspec.ValidationError(
            f"metadata has {len(data)} bytes: at most {MAX_METADATA_BYTES} are read - at `{where}`"
        )
    kind: Any = dict[str, Any] | None
    try:
        value: dict[str, Any] | None = decode(kind, data, content_type)
        check_plain(value, "metadata")
    except ValueError as error:
        raise msgspec.ValidationError(f"{error} - at `{where}`") from error
    return value


def encode(value: Struct, content_type: str = MSGPACK) -> bytes:
    """Returns a message as bytes."""
    return msgspec.msgpack.encode(value) if content_type == MSGPACK else msgspec.json.encode(value)


def decode(kind: type[T], body: bytes | bytearray | memoryview, content_type: str = MSGPACK) -> T:
    """Returns the message in `body`.

    Raises:
        msgspec.ValidationError: the body does not have the form of `kind`; the message names the place.
        msgspec.DecodeError: the body is not msgpack or not JSON.
    """
    try:
        if content_type == MSGPACK:
            return msgspec.msgpack.decode(body, type=kind)
        return msgspec.json.decode(body, type=kind)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from error
