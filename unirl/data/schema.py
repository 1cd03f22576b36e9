"""The schema of one entry of a prompt file: text, id, metadata, media references."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, ParamSpec, TypeVar, get_args
from urllib.parse import urlsplit

from unirl.config.errors import DataError, UnreadableFileError
from unirl.models.loading.remote_files import REMOTE_SCHEMES
from unirl.types.primitives import MediaRef, RecordedRole

LEGACY_EMBEDDING = re.compile(r"(^|_)embed(s|ding|dings)?(_(path|paths|mask))?$")
FROM_THE_RECIPE = {
    "negative_prompt": "sampling.negative_prompt",
    "seed": "sampling.seed",
    "guidance_scale": "sampling.guidance_scale",
}
MEDIA_FORM = '{"modality": "image", "role": "condition", "uri": "frames/01.png"}'
CONDITION = "condition"
RECORDED_ROLES: tuple[str, ...] = get_args(RecordedRole)
MEDIA = tuple(("image", role) for role in (CONDITION, *RECORDED_ROLES))
"""The media that a prompt may have, as (modality, role)."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
SURROGATE = re.compile(r"[\ud800-\udfff]")


class BadEntry(ValueError):
    """An entry that breaks the schema. The caller adds the file and the line."""

    def __init__(self, message: str, kind: type[DataError] = DataError) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class ParsedEntry:
    """One valid entry. `prompt_id` is None if the file gives none."""

    text: str
    prompt_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    media: tuple[MediaRef, ...] = ()


def parse_entry(value: object, *, prompt_key: str, folder: Path) -> ParsedEntry:
    """Parses an entry. Relative uris start at `folder` and may not leave it. Raises BadEntry."""
    if isinstance(value, str):
        return ParsedEntry(_text(value, "the prompt"))
    if not isinstance(value, dict):
        raise BadEntry(f"expected a string or an object with {prompt_key!r}, found {_kind(value)}")
    _refuse_legacy(value)
    return ParsedEntry(
        text=_prompt(value, prompt_key),
        prompt_id=_prompt_id(value["prompt_id"]) if "prompt_id" in value else None,
        metadata=_metadata(value, prompt_key),
        media=_media(value, folder),
    )


def _prompt(value: dict[str, object], prompt_key: str) -> str:
    present = [key for key in dict.fromkeys((prompt_key, "caption")) if key in value]
    if not present:
        raise BadEntry(f"the entry has no key {prompt_key!r} (or 'caption'); its keys are {sorted(value)}")
    if len(present) == 2 and value[present[0]] != value[present[1]]:
        raise BadEntry(f"both {prompt_key!r} and 'caption' are given and differ; move one of them to metadata")
    return _text(value[present[0]], repr(present[0]))


def _prompt_id(value: object) -> str:
    prompt_id = _text(value, "'prompt_id'")
    if len(prompt_id.split()) > 1:
        raise BadEntry(f"'prompt_id' {prompt_id!r} contains white space; an id is a single word")
    return prompt_id


def _metadata(value: dict[str, object], prompt_key: str) -> dict[str, Any]:
    extra = {key: entry for key, entry in value.items() if key not in _own_keys(prompt_key)}
    if "metadata" not in value:
        return extra
    given = value["metadata"]
    if not isinstance(given, dict):
        raise BadEntry(f"'metadata' must be an object, found {_kind(given)}")
    if extra:
        raise BadEntry(f"the keys {sorted(extra)} beside 'metadata' would be ignored; move them into metadata")
    return given


def _own_keys(prompt_key: str) -> set[str]:
    return {prompt_key, "caption", "prompt_id", "metadata", "media", "media_refs"}


def _refuse_legacy(value: dict[str, object]) -> None:
    for key in value:
        if LEGACY_EMBEDDING.search(key):
            raise BadEntry(f"{key!r} is a precomputed embedding; remove it, since embeddings are computed at run time")
        if key in FROM_THE_RECIPE:
            raise BadEntry(f"{key!r} cannot be set per prompt; set {FROM_THE_RECIPE[key]}, or move it to metadata")


def _media(value: dict[str, object], folder: Path) -> tuple[MediaRef, ...]:
    if "media" in value and "media_refs" in value:
        raise BadEntry("both 'media' and 'media_refs' are given; they are two names of one list, so keep one")
    given = value.get("media_refs", value.get("media", []))
    if not isinstance(given, list):
        raise BadEntry(f"'media_refs' must be a list of {MEDIA_FORM}, found {_kind(given)}")
    refs = tuple(_media_ref(entry, folder) for entry in given)
    roles = [ref.role for ref in refs]
    for role in RECORDED_ROLES:
        if roles.count(role) > 1:
            raise BadEntry(f"the entry has {roles.count(role)} media references of role {role!r}; keep only one")
    return refs


def _media_ref(entry: object, folder: Path) -> MediaRef:
    if not isinstance(entry, dict) or set(entry) != {"modality", "role", "uri"}:
        actual = sorted(entry) if isinstance(entry, dict) else _kind(entry)
        raise BadEntry(f"a media reference must have exactly the form {MEDIA_FORM}, found {actual}")
    modality, role = entry["modality"], entry["role"]
    if (modality, role) not in MEDIA:
        known = ", ".join(f"{modality!r} as {role!r}" for modality, role in MEDIA)
        raise BadEntry(f"media with modality {modality!r} and role {role!r} is not supported; use {known}")
    uri = _uri(_text(entry["uri"], "'uri'"), folder)
    if role in RECORDED_ROLES and not os.path.isfile(uri):
        raise BadEntry(
            f"the {role} image {uri} is not a file; recorded images must be files on this machine", UnreadableFileError
        )
    return MediaRef(modality, role, uri)


def _uri(uri: str, folder: Path) -> str:
    """Returns absolute paths and http, https, s3 and gs addresses unchanged, and makes relative paths absolute."""
    scheme = _scheme(uri)
    if scheme in REMOTE_SCHEMES or (not scheme and PurePosixPath(uri).is_absolute()):
        return uri
    if scheme:
        raise BadEntry(f"uri scheme {scheme!r} is not supported; use a path or one of {', '.join(REMOTE_SCHEMES)}")
    path = (folder / uri).resolve()
    if not path.is_relative_to(folder):
        raise BadEntry(
            f"uri {uri!r} is outside the folder {folder} of the data file; give an absolute path instead",
            UnreadableFileError,
        )
    return str(path)


def _scheme(uri: str) -> str:
    try:
        return urlsplit(uri).scheme.lower()
    except ValueError as error:
        raise BadEntry(f"uri {uri!r} is not a valid address: {error}") from error


def _text(value: object, what: str) -> str:
    """`value` without surrounding white space. Raises BadEntry unless it is printable, valid Unicode text."""
    if not isinstance(value, str):
        raise BadEntry(f"{what} must be text, found {_kind(value)}" + _quoted(value))
    text = value.strip()
    if not text:
        raise BadEntry(f"{what} is empty")
    control = CONTROL.search(text)
    if control:
        raise BadEntry(f"{what} contains the control character U+{ord(control[0]):04X}; remove it")
    if SURROGATE.search(text):
        raise BadEntry(f"{what} contains half of a UTF-16 surrogate pair, which is not a character")
    return text


def _quoted(value: object) -> str:
    return f'; write it as "{value}"' if type(value) in (int, float) else ""


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {value}")


P = ParamSpec("P")
T = TypeVar("T")
SHOWN = 100
"""Characters of a bad entry that an error shows."""


@dataclass(frozen=True)
class RawEntry:
    """One entry of a data file before it is parsed: its line, its source text and its JSON value."""

    line: int
    source: str
    value: object


def refuse(file: Path, item: RawEntry, why: str, kind: type[DataError] = DataError) -> NoReturn:
    """Raises DataError with file, line and the source of the entry."""
    source = item.source if len(item.source) <= SHOWN else item.source[:SHOWN] + " ..."
    raise kind(f"{file}:{item.line}: {why}\n  source: {source!a}")


def result_or_error(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | DataError:
    """The result of `make`, or the DataError that it raised."""
    try:
        return make(*args, **kwargs)
    except DataError as error:
        return error
