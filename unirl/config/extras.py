"""Libraries that only some settings need: found before they are used, with the extra that installs them."""

from __future__ import annotations

from importlib.util import find_spec

from unirl.config.errors import DependencyError


def need(*modules: str, extra: str, by: str) -> None:
    """Raises DependencyError (3001) when one of `modules` is not installed; nothing is imported.

    Args:
        extra: the extra of this package that installs them.
        by: who needs them, for the message.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise DependencyError(f"{by} needs {', '.join(missing)}, not installed here: pip install 'unirl[{extra}]'")
