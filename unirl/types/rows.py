"""What can be cut by rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self


class Rows(ABC):
    """Samples, one per row. A call that is scattered over ranks cuts the arguments of this type, and no others."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def select(self, indices: Sequence[int]) -> Self:
        """The rows `indices`, in that order; repeats are allowed."""
