"""Libraries that only some settings need: found before they are used, with what installs them."""

from __future__ import annotations

from importlib.util import find_spec

from unirl.config.errors import DependencyError


def need(*modules: str, by: str, extra: str = "", install: str = "") -> None:
    """Raises DependencyError (3001) when one of `modules` is not installed; nothing is imported.

    Args:
        by: who needs them, for the message.
        extra: the extra of this package that installs them.
        install: what installs them instead, where no extra does.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        way_out = install or f"pip install 'unirl[{extra}]'"
        raise DependencyError(f"{by} needs {', '.join(missing)}, not installed here: {way_out}")
