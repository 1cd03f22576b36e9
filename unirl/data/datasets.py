"""Prompts, and strict reading of prompt files. Every error names file, line, text and the expected form."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import get_args
from urllib.parse import urlsplit

from unirl.config.errors import DataError, UnreadableFileError
from unirl.data.readers import EXPECTED, READERS, BadEntry
from unirl.models.loading.remote_files import REMOTE_SCHEMES
from unirl.types.primitives import MediaRef, RecordedRole
from unirl.types.rollout_req import RECORDED, group_id

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
MOST_CHARACTERS = 1_000_000
"""A longer prompt is a mistake: a file without line ends, or one that holds no text."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt with its media, and the epoch in which a data source returned it."""

    text: str
    prompt_id: str
    epoch: int = 0
    metadata: dict[str, object] = field(default_factory=dict)
    media: tuple[MediaRef, ...] = ()
    recorded: tuple[MediaRef, ...] = ()
    """The samples of its group, if they exist already."""
    size: tuple[int, int] | None = None
    """(height, width) of its samples in pixels. None: the size of `sampling`."""
    origin: str = ""
    """File and line of the entry."""

    @property
    def place(self) -> str:
        """File and line of the entry, for messages. The id of a prompt that comes from no file."""
        return self.origin or f"prompt {self.prompt_id!r}"

    @property
    def images(self) -> tuple[MediaRef, ...]:
        """The condition images, in order."""
        return tuple(ref for ref in self.media if ref.role == CONDITION)

    @property
    def group_id(self) -> str:
        """The id of the group of samples of this prompt and epoch."""
        return group_id(self.prompt_id, self.epoch)


def load_prompts(path: str | Path, *, prompt_key: str = "prompt") -> tuple[Prompt, ...]:
    """The prompts of a file, in its order. Raises DataError (4002, 4003) at the first bad entry.

    `prompt_key` is the key of the text in an object; `caption` is accepted too.
    """
    prompts: list[Prompt] = []
    for entry in read_entries(path, prompt_key=prompt_key):
        if isinstance(entry, DataError):
            raise entry
        prompts.append(entry)
    return tuple(prompts)


def read_entries(path: str | Path, *, prompt_key: str = "prompt") -> Iterator[Prompt | DataError]:
    """The entries of a file in its order: a prompt, or the error of a bad entry. Raises DataError if there is none."""
    file = Path(path)
    read = READERS.get(file.suffix.lower())
    if read is None:
        raise DataError(f"data file {file}: unknown extension {file.suffix!r}. Accepted: {', '.join(READERS)}")
    folder = file.resolve().parent
    line_of: dict[str, int] = {}
    index = -1
    for index, item in enumerate(read(file, prompt_key)):
        try:
            prompt = parse_entry(item.decode(), prompt_key=prompt_key, folder=folder)
            prompt_id = prompt.prompt_id or f"{file.name}:{index}"
            if prompt_id in line_of:
                first = line_of[prompt_id]
                raise BadEntry(f"prompt_id {prompt_id!r} was already used in line {first}; ids are unique")
        except BadEntry as error:
            yield item.error(file, error)
        else:
            line_of[prompt_id] = item.line
            yield replace(prompt, prompt_id=prompt_id, origin=f"{file}:{item.line}")
    if index < 0:
        raise DataError(f"data file {file} holds no prompts. Expected {EXPECTED[file.suffix.lower()]}")


def with_recorded(prompt: Prompt, roles: Sequence[str]) -> Prompt:
    """The prompt with its recorded images of `roles` in that order. Without roles no image is attached.

    Raises DataError (4002) if a role is missing, or if the entry has a recorded image that nothing reads.
    """
    refs = {ref.role: ref for ref in prompt.media if ref.role in RECORDED_ROLES}
    missing = [role for role in roles if role not in refs]
    if missing:
        raise DataError(
            f"{prompt.origin}: the entry has no image of role {missing[0]!r}, and data_source.recorded={list(roles)} "
            f'requires it. Add {{"modality": "image", "role": "{missing[0]}", "uri": ...}} to its media_refs'
        )
    if refs and not roles:
        raise DataError(
            f"{prompt.origin}: the entry has a recorded image ({next(iter(refs))}), but this run samples its own. "
            f"Set data_source.recorded={list(refs)} to train on recorded images, or remove them from media_refs"
        )
    if roles and RECORDED in prompt.metadata:
        raise DataError(
            f"{prompt.origin}: the metadata key {RECORDED!r} is reserved for the role of recorded images; rename it"
        )
    return replace(prompt, recorded=tuple(refs[role] for role in roles))


# The schema of one entry


def parse_entry(value: object, *, prompt_key: str, folder: Path) -> Prompt:
    """The prompt of an entry; its id is empty if the entry has none.

    Relative uris start at `folder` and may not leave it. Raises BadEntry.
    """
    if isinstance(value, str):
        return Prompt(text=_text(value, "the prompt"), prompt_id="")
    if not isinstance(value, dict):
        raise BadEntry(f"expected a string or an object with {prompt_key!r}, found {_kind(value)}")
    _refuse_legacy(value)
    return Prompt(
        text=_prompt(value, prompt_key),
        prompt_id=_prompt_id(value["prompt_id"]) if "prompt_id" in value else "",
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


def _metadata(value: dict[str, object], prompt_key: str) -> dict[str, object]:
    own = {prompt_key, "caption", "prompt_id", "metadata", "media", "media_refs"}
    extra = {key: entry for key, entry in value.items() if key not in own}
    if "metadata" not in value:
        return extra
    given = value["metadata"]
    if not isinstance(given, dict):
        raise BadEntry(f"'metadata' must be an object, found {_kind(given)}")
    if extra:
        raise BadEntry(f"the keys {sorted(extra)} beside 'metadata' would be ignored; move them into metadata")
    return given


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
        quoted = f'; write it as "{value}"' if type(value) in (int, float) else ""
        raise BadEntry(f"{what} must be text, found {_kind(value)}{quoted}")
    text = value.strip()
    if not text:
        raise BadEntry(f"{what} is empty")
    if len(text) > MOST_CHARACTERS:
        raise BadEntry(f"{what} has {len(text):,} characters, and {MOST_CHARACTERS:,} are the most: is this a prompt?")
    control = CONTROL.search(text)
    if control:
        raise BadEntry(f"{what} contains the control character U+{ord(control[0]):04X}; remove it")
    if SURROGATE.search(text):
        raise BadEntry(f"{what} contains half of a UTF-16 surrogate pair, which is not a character")
    return text


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {value}")
