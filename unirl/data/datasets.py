"""Prompt files: .txt, .jsonl and .json, read strictly. Every refusal names file, line, text and the expected form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from unirl.config.errors import DataError
from unirl.data.schema import CONDITION, RECORDED_ROLES, BadItem, parse_item
from unirl.types.primitives import MediaRef
from unirl.types.rollout_req import RECORDED, group_id

P = ParamSpec("P")
T = TypeVar("T")
SHOWN = 100
"""How many characters of an offending line are shown."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One draw from a data source: what is asked for, and in which epoch it was drawn."""

    text: str
    prompt_id: str
    epoch: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    media: tuple[MediaRef, ...] = ()
    recorded: tuple[MediaRef, ...] = ()
    """The samples of its group, where these exist already."""
    origin: str = ""
    """The file and line that it stands in."""

    @property
    def group_id(self) -> str:
        """The id of the group of samples that this draw makes."""
        return group_id(self.prompt_id, self.epoch)

    def in_epoch(self, epoch: int) -> Prompt:
        """The same prompt, drawn in another epoch."""
        return replace(self, epoch=epoch)


@dataclass(frozen=True)
class Item:
    """One entry of a prompt file before it is judged: where it stands, how it is written, and its JSON value."""

    line: int
    source: str
    value: object


def load_prompts(path: str | Path, *, prompt_key: str = "prompt") -> tuple[Prompt, ...]:
    """The prompts of a file, in its order. Raises DataError (4002, 4003) at the first entry that breaks the schema.

    `prompt_key`: the key that holds the text of an object (`caption` is accepted beside it).
    """
    prompts: list[Prompt] = []
    for entry in read_entries(path, prompt_key=prompt_key):
        if isinstance(entry, DataError):
            raise entry
        prompts.append(entry)
    return tuple(prompts)


def read_entries(path: str | Path, *, prompt_key: str = "prompt") -> Iterator[Prompt | DataError]:
    """The entries of a file, in its order: each a prompt, or what is wrong with it. Raises DataError without any."""
    file = Path(path)
    read = READERS.get(file.suffix.lower())
    if read is None:
        raise DataError(f"data file {file}: unknown extension {file.suffix!r}. Accepted: {', '.join(READERS)}")
    line_of: dict[str, int] = {}
    index = -1
    for index, item in enumerate(read(file, _read_text(file), prompt_key)):
        yield item if isinstance(item, DataError) else _attempt(_unique_prompt, file, index, item, prompt_key, line_of)
    if index < 0:
        raise DataError(f"data file {file} holds no prompts. Expected {EXPECTED[file.suffix.lower()]}")


def _unique_prompt(file: Path, index: int, item: Item, prompt_key: str, line_of: dict[str, int]) -> Prompt:
    """The prompt of an entry; `line_of` holds the ids of those before it."""
    prompt = _to_prompt(file, index, item, prompt_key)
    if prompt.prompt_id in line_of:
        first = line_of[prompt.prompt_id]
        _refuse(file, item, f"prompt_id {prompt.prompt_id!r} was already used in line {first}; ids are unique")
    line_of[prompt.prompt_id] = item.line
    return prompt


def _attempt(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | DataError:
    """What `make` gives, or why it refuses."""
    try:
        return make(*args, **kwargs)
    except DataError as error:
        return error


def require_text_only(prompts: Iterable[Prompt], model: str) -> None:
    """Raises DataError when a prompt carries a medium, which `model` has no way to take."""
    for prompt in prompts:
        for ref in prompt.media:
            if ref.role == CONDITION:
                raise DataError(
                    f"prompt {prompt.prompt_id!r} carries an image condition ({ref.uri}), but {model} is conditioned "
                    "on text alone. Remove media_refs from the data file, or use a model that takes images"
                )


def with_recorded(prompts: Iterable[Prompt], roles: Sequence[str]) -> tuple[Prompt, ...]:
    """The prompts, the samples of each being its recorded pictures of `roles`, in that order; no roles = none exist.

    Raises:
        DataError: 4002 where a role is missing; where nothing would look at a recorded picture.
    """
    return tuple(replace(prompt, recorded=_recorded(prompt, roles)) for prompt in prompts)


def _recorded(prompt: Prompt, roles: Sequence[str]) -> tuple[MediaRef, ...]:
    found = {ref.role: ref for ref in prompt.media if ref.role in RECORDED_ROLES}
    missing = [role for role in roles if role not in found]
    if missing:
        raise DataError(
            f"{prompt.origin}: no picture of role {missing[0]!r}, which data_source.recorded={list(roles)} asks for in "
            f'every entry. Add {{"modality": "image", "role": "{missing[0]}", "uri": ...}} to its media_refs'
        )
    if found and not roles:
        raise DataError(
            f"{prompt.origin}: it brings a recorded picture ({next(iter(found))}), and samples are drawn here. Write "
            f"data_source.recorded={list(found)} to train on recorded pictures, or take them out of media_refs"
        )
    if roles and RECORDED in prompt.metadata:
        raise DataError(
            f"{prompt.origin}: the metadata key {RECORDED!r} is where the role of a recorded picture goes; rename it"
        )
    return tuple(found[role] for role in roles)


def _to_prompt(file: Path, index: int, item: Item, prompt_key: str) -> Prompt:
    try:
        parsed = parse_item(item.value, prompt_key=prompt_key, folder=file.resolve().parent)
    except BadItem as error:
        _refuse(file, item, str(error), error.code)
    prompt_id = parsed.prompt_id or f"{file.name}:{index}"
    return Prompt(
        text=parsed.text,
        prompt_id=prompt_id,
        metadata=parsed.metadata,
        media=parsed.media,
        origin=f"{file}:{item.line}",
    )


def _refuse(file: Path, item: Item, why: str, code: int = 4002) -> NoReturn:
    source = item.source if len(item.source) <= SHOWN else item.source[:SHOWN] + " ..."
    raise DataError(f"{file}:{item.line}: {why}\n  found: {source!a}", code)


def _read_text(file: Path) -> str:
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"data file {file} does not exist (looked in {Path.cwd()}). Check DATA_PATH") from error
    except OSError as error:
        raise DataError(f"data file {file} cannot be read: {error.strerror}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{file}:1: the file is UTF-16 or UTF-32; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        bad = data[error.start : error.start + 4]
        raise DataError(f"{file}:{line}: not UTF-8 (bytes {bad.hex(' ')}); save the file as UTF-8") from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank. Only line feeds separate: str.splitlines would also cut at U+2028."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _txt(file: Path, text: str, prompt_key: str) -> Iterator[Item | DataError]:
    for number, line in _lines(text):
        yield _attempt(_plain, file, number, line)


def _plain(file: Path, number: int, line: str) -> Item:
    if "\r" in line:
        _refuse(file, Item(number, line, line), "a carriage return inside a line; save with LF or CRLF line ends")
    return Item(number, line, line)


def _jsonl(file: Path, text: str, prompt_key: str) -> Iterator[Item | DataError]:
    for number, line in _lines(text):
        yield _attempt(_object, file, number, line, prompt_key)


def _object(file: Path, number: int, line: str, prompt_key: str) -> Item:
    value = _decode(file, line, number)
    if not isinstance(value, dict):
        _refuse(file, Item(number, line, value), f'expected one JSON object per line, like {{"{prompt_key}": "..."}}')
    return Item(number, line, value)


def _json(file: Path, text: str, prompt_key: str) -> Iterator[Item | DataError]:
    if not text.strip():
        return
    document = _decode(file, text, 1)
    if isinstance(document, dict) and "prompts" not in document:
        yield Item(1, text.strip(), document)
        return
    if isinstance(document, dict) and len(document) > 1:
        others = sorted(set(document) - {"prompts"})
        raise DataError(f"{file}: beside 'prompts' stand {others}, which nothing reads; remove them")
    entries = document["prompts"] if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise DataError(f"{file}: expected {EXPECTED['.json']}, found {json.dumps(document)[:SHOWN]}")
    yield from _entries(text, entries)


def _entries(text: str, entries: list[object]) -> Iterator[Item]:
    """Each entry of the document's list, with the line where it begins. The first bracket of `text` opens the list."""
    decoder = json.JSONDecoder()
    before, line, counted = text.find("["), 1, 0
    for value in entries:
        begin = _skip(text, before + 1)
        line, counted = line + text.count("\n", counted, begin), begin
        _, end = decoder.raw_decode(text, begin)
        yield Item(line, text[begin:end], value)
        before = _skip(text, end)


def _skip(text: str, at: int) -> int:
    """The next position that is not white space."""
    while text[at] in " \t\r\n":
        at += 1
    return at


Read = Callable[[Path, str, str], Iterator[Item | DataError]]
READERS: dict[str, Read] = {".txt": _txt, ".jsonl": _jsonl, ".json": _json}
EXPECTED = {
    ".txt": "one prompt per line",
    ".jsonl": 'one JSON object per line, like {"prompt": "a red circle"}',
    ".json": 'a list of strings or objects, or {"prompts": [...]}, or one object with a prompt',
}


def _decode(file: Path, text: str, first_line: int) -> object:
    """The JSON value of `text`, without the liberties that Python's decoder takes (NaN, repeated keys)."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        line, shown = first_line + error.lineno - 1, error.doc.split("\n")[error.lineno - 1].strip()
        why = f"not valid JSON: {error.msg} (column {error.colno})"
        _refuse(file, Item(line, shown, None), why)
    except RecursionError:
        _refuse(file, Item(first_line, text, None), "not valid data: nested too deeply")
    except ValueError as error:
        _refuse(file, Item(first_line, text, None), f"not valid JSON: {error}")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    repeated = next((key for key in keys if keys.count(key) > 1), None) if len(set(keys)) < len(keys) else None
    if repeated is not None:
        raise ValueError(f"the key {repeated!r} stands twice in one object")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits} is too large")
    return number
