"""A role to be placed: how to make it, given the siblings that live on the same worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Siblings = Mapping[str, Any]


@dataclass(frozen=True)
class Remote:
    """A named role and the function that builds it on its worker from its siblings."""

    name: str
    build: Callable[[Siblings], Any]
