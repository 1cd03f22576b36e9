"""`${...}` in recipes: keys of the recipe, and environment variables. No other resolver exists for a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unirl.config.errors import ConfigError
from unirl.config.layers import Tree, leaves

_RESOLVER = re.compile(r"\$\{\s*([^}{$:\s]+)\s*:")


def resolve(tree: Tree, where: Callable[[str], str] = lambda path: "") -> Tree:
    """The tree with `${key}` and `${oc.env:NAME,default}` replaced.

    Raises:
        ConfigError: 2003 for another resolver, an unknown key or a variable that is not set.
    """
    for path, value in leaves(tree):
        for name in _RESOLVER.findall(str(value)):
            if name != "oc.env":
                message = f"{path}={value}: '{name}:' is not allowed. Use ${{key}} or ${{oc.env:NAME,default}}"
                raise ConfigError(message + where(path))
    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        path = str(error.full_key or "")
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path}: {reason}{where(path)}. A reference names a key that the recipe itself writes, or oc.env"
        ) from error


def one_line(error: Exception) -> str:
    """A library's message without its line breaks, cut to a readable length."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())[:300]
