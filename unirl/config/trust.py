"""The packages whose classes a recipe may name: those that the user allows. A recipe file only says what it needs.

plugins=[leash]                      on the command line, for one command
UNIRL_PLUGINS=leash,other            in the environment
~/.config/unirl/plugins              one package per line, `#` begins a comment; $XDG_CONFIG_HOME replaces ~/.config

Importing a package runs its code, and a recipe, or a checkpoint that holds one, may come from a stranger.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from unirl.config.errors import UnsafeTargetError

VARIABLE = "UNIRL_PLUGINS"
_typed: set[str] = set()
"""Packages that the command line of this process has allowed, also for recipes that it reads back from checkpoints."""


def trusted(typed: Sequence[str], needed: Sequence[str], where: str) -> tuple[str, ...]:
    """The packages that may be used: those that the user allows anywhere.

    Args:
        typed: the packages of the command line.
        needed: the packages that the files of the recipe name.
        where: the place of that line, for the message.

    Raises:
        ConfigError: 2030 for a needed package that the user does not allow. Nothing is imported before.
    """
    _typed.update(typed)
    allowed = tuple(dict.fromkeys((*typed, *sorted(_typed), *_named_by_user())))
    missing = [name for name in needed if not any(f"{name}.".startswith(f"{each}.") for each in allowed)]
    if missing:
        names = ",".join(missing)
        raise UnsafeTargetError(
            f"plugins=[{names}]{where}: the recipe needs code of {names}, and a recipe file cannot allow that itself. "
            f"If you trust that code, set {VARIABLE}={names}, write the name into {user_file()}, or add "
            f"plugins=[{names}] to a command that takes settings"
        )
    return allowed


def user_file() -> Path:
    """The file in which the user lists packages for all commands."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "unirl" / "plugins"


def forget() -> None:
    """Forgets the packages of the command line, at the beginning of a command."""
    _typed.clear()


def _named_by_user() -> list[str]:
    """The packages of the environment and of the user's file."""
    names = os.environ.get(VARIABLE, "").replace(",", " ").split()
    path = user_file()
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [*names, *(name for line in lines if (name := line.partition("#")[0].strip()))]
