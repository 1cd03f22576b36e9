"""Prompt files, read strictly. Every refusal names file, line, text and the expected form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unirl.config.errors import DataError
from unirl.data.readers import EXPECTED, READERS
from unirl.data.schema import CONDITION, RECORDED_ROLES, BadItem, Item, attempt, parse_item, refuse
from unirl.types.primitives import MediaRef
from unirl.types.rollout_req import RECORDED, group_id


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
    size: tuple[int, int] | None = None
    """(height, width) of its samples in pixels; None: that of `sampling`."""
    origin: str = ""
    """The file and line that it stands in."""

    @property
    def images(self) -> tuple[MediaRef, ...]:
        """The pictures that it is about, in order."""
        return tuple(ref for ref in self.media if ref.role == CONDITION)

    @property
    def group_id(self) -> str:
        """The id of the group of samples that this draw makes."""
        return group_id(self.prompt_id, self.epoch)

    def in_epoch(self, epoch: int) -> Prompt:
        """The same prompt, drawn in another epoch."""
        return replace(self, epoch=epoch)


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
    for index, item in enumerate(read(file, prompt_key)):
        yield item if isinstance(item, DataError) else attempt(_unique_prompt, file, index, item, prompt_key, line_of)
    if index < 0:
        raise DataError(f"data file {file} holds no prompts. Expected {EXPECTED[file.suffix.lower()]}")


def _unique_prompt(file: Path, index: int, item: Item, prompt_key: str, line_of: dict[str, int]) -> Prompt:
    """The prompt of an entry; `line_of` holds the ids of those before it."""
    prompt = _to_prompt(file, index, item, prompt_key)
    if prompt.prompt_id in line_of:
        first = line_of[prompt.prompt_id]
        refuse(file, item, f"prompt_id {prompt.prompt_id!r} was already used in line {first}; ids are unique")
    line_of[prompt.prompt_id] = item.line
    return prompt


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
        refuse(file, item, str(error), error.kind)
    prompt_id = parsed.prompt_id or f"{file.name}:{index}"
    return Prompt(
        text=parsed.text,
        prompt_id=prompt_id,
        metadata=parsed.metadata,
        media=parsed.media,
        origin=f"{file}:{item.line}",
    )
