"""Prompts, and strict reading of prompt files. Every error names file, line, text and the expected form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unirl.config.errors import DataError
from unirl.data.readers import EXPECTED, READERS
from unirl.data.schema import CONDITION, RECORDED_ROLES, BadEntry, RawEntry, parse_entry, refuse, result_or_error
from unirl.types.primitives import MediaRef
from unirl.types.rollout_req import RECORDED, group_id


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt with its media, and the epoch in which a data source returned it."""

    text: str
    prompt_id: str
    epoch: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    media: tuple[MediaRef, ...] = ()
    recorded: tuple[MediaRef, ...] = ()
    """The samples of its group, if they exist already."""
    size: tuple[int, int] | None = None
    """(height, width) of its samples in pixels. None: the size of `sampling`."""
    origin: str = ""
    """File and line of the entry."""

    @property
    def images(self) -> tuple[MediaRef, ...]:
        """The condition images, in order."""
        return tuple(ref for ref in self.media if ref.role == CONDITION)

    @property
    def group_id(self) -> str:
        """The id of the group of samples of this prompt and epoch."""
        return group_id(self.prompt_id, self.epoch)

    def in_epoch(self, epoch: int) -> Prompt:
        """The same prompt in another epoch."""
        return replace(self, epoch=epoch)


def load_prompts(path: str | Path, *, prompt_key: str = "prompt") -> tuple[Prompt, ...]:
    """The prompts of a file, in its order. Raises DataError (4002, 4003) at the first bad entry.

    Args:
        prompt_key: key of the text in an object; `caption` is accepted too.
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
    line_of: dict[str, int] = {}
    index = -1
    for index, item in enumerate(read(file, prompt_key)):
        yield (
            item
            if isinstance(item, DataError)
            else result_or_error(_unique_prompt, file, index, item, prompt_key, line_of)
        )
    if index < 0:
        raise DataError(f"data file {file} holds no prompts. Expected {EXPECTED[file.suffix.lower()]}")


def _unique_prompt(file: Path, index: int, item: RawEntry, prompt_key: str, line_of: dict[str, int]) -> Prompt:
    """The prompt of an entry. `line_of` has the lines of all earlier ids."""
    prompt = _to_prompt(file, index, item, prompt_key)
    if prompt.prompt_id in line_of:
        first = line_of[prompt.prompt_id]
        refuse(file, item, f"prompt_id {prompt.prompt_id!r} was already used in line {first}; ids are unique")
    line_of[prompt.prompt_id] = item.line
    return prompt


def with_recorded(prompts: Iterable[Prompt], roles: Sequence[str]) -> tuple[Prompt, ...]:
    """The prompts, each with its recorded images of `roles` in that order. Without roles no image is attached.

    Raises:
        DataError: 4002 if a role is missing, or if an entry has a recorded image that nothing reads.
    """
    return tuple(replace(prompt, recorded=_recorded(prompt, roles)) for prompt in prompts)


def _recorded(prompt: Prompt, roles: Sequence[str]) -> tuple[MediaRef, ...]:
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
    return tuple(refs[role] for role in roles)


def _to_prompt(file: Path, index: int, item: RawEntry, prompt_key: str) -> Prompt:
    try:
        parsed = parse_entry(item.value, prompt_key=prompt_key, folder=file.resolve().parent)
    except BadEntry as error:
        refuse(file, item, str(error), error.kind)
    prompt_id = parsed.prompt_id or f"{file.name}:{index}"
    return Prompt(
        text=parsed.text,
        prompt_id=prompt_id,
        metadata=parsed.metadata,
        media=parsed.media,
        origin=f"{file}:{item.line}",
    )
