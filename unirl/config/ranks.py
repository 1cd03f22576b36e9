"""The grammar of ranks in placements: `0-3`, `0,2`, `0-1:0-3,2:4`. Errors show the place under a caret."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from unirl.config.errors import GeometryError, InvalidValueError

TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
"""A variable of the environment that only torchrun sets."""
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class RankItem:
    """One item of a list: consecutive resources, and the processes on them if the text names any."""

    resources: range
    processes: range | None = None


def rank_items(key: str, value: object, ways: str, takes_processes: bool = False) -> list[RankItem]:
    """The items of a list of ranks. Blanks may stand around every sign.

    Args:
        key, ways: the key and what may be written there, for errors.
        takes_processes: True for the grammar of RLinf, in which `:` and ranks of processes may follow the resources.

    Raises:
        ConfigError: 2004 at the first character that does not fit, 2010 for a descending range.
    """
    text = str(value)
    reader = _Reader(key, text, ways)
    items: list[RankItem] = []
    while True:
        resources = reader.range()
        processes = reader.range() if takes_processes and reader.takes(":") else None
        items.append(RankItem(resources, processes))
        if reader.at == len(text):
            return items
        if not reader.takes(","):
            reader.refuse("',', '-' or ':'" if takes_processes else "',', '-'")


@dataclass
class _Reader:
    """A text that is read from left to right."""

    key: str
    text: str
    ways: str
    at: int = 0

    def range(self) -> range:
        """The range that begins here, such as `3` or `0-3`."""
        first = self._number()
        begin = self.at
        last = self._number() if self.takes("-") else first
        if last < first:
            raise GeometryError(
                f"{self.key}={self.text} is a descending range: write {last}-{first}\n{self._caret(begin)}"
            )
        return range(first, last + 1)

    def takes(self, sign: str) -> bool:
        """True if the sign stands here. It is then read."""
        if self.text[self.at : self.at + 1] != sign:
            return False
        self.at += 1
        return True

    def refuse(self, expected: str) -> NoReturn:
        raise InvalidValueError(
            f"{self.key}={self.text} names no devices: expected {expected} or the end\n{self._caret(self.at)}\n"
            f"  Write {self.ways}"
        )

    def _number(self) -> int:
        self._skip_blanks()
        match = _NUMBER.match(self.text, self.at)
        if match is None:
            raise InvalidValueError(
                f"{self.key}={self.text} names no devices: expected a number\n{self._caret(self.at)}\n"
                f"  Write {self.ways}"
            )
        self.at = match.end()
        self._skip_blanks()
        return int(match[0])

    def _skip_blanks(self) -> None:
        while self.text[self.at : self.at + 1] == " ":
            self.at += 1

    def _caret(self, at: int) -> str:
        """The text, and a caret below the character at `at`, each on an indented line."""
        return f"    {self.text}\n    {' ' * at}^"
