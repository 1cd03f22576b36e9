"""Finds the class, or the classmethod, that a `_target_` names, in allowed packages only.

The dotted text is checked before anything is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from unirl.config.errors import ConfigError, DependencyError, UnsafeTargetError, did_you_mean

OWN_PACKAGE = "unirl"

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


def check_plugins(plugins: Sequence[str]) -> None:
    """Refuses the standard library as a plugin, since its classes start processes and open files.

    Raises:
        ConfigError: 2030.
    """
    for name in plugins:
        standard = name.partition(".")[0] in sys.stdlib_module_names
        if standard or not all(part.isidentifier() for part in name.split(".")):
            raise UnsafeTargetError(f"plugins may not name '{name}': give the package of your own classes")


def find_target(dotted: object, path: str, plugins: Sequence[str] = ()) -> Callable[..., Any]:
    """The class or bound classmethod called `dotted`; `path` is the recipe's key path, for messages.

    Raises:
        ConfigError: 2030 if the name may not be used, 2003 if an allowed package does not have it.
    """
    if not isinstance(dotted, str) or not _NAME.fullmatch(dotted) or "__" in dotted:
        raise UnsafeTargetError(f"{path}._target_={dotted!r} is not the dotted name of a class")
    if not _allowed(dotted, plugins):
        raise UnsafeTargetError(_not_allowed(dotted, path, plugins))
    module, names = _import_longest(dotted, path, plugins)
    return _find_in(module, names, dotted, path, plugins)


def _allowed(module: str | None, plugins: Sequence[str]) -> bool:
    return module is not None and any(f"{module}.".startswith(f"{package}.") for package in (OWN_PACKAGE, *plugins))


def _not_allowed(dotted: str, path: str, plugins: Sequence[str]) -> str:
    allowed = ", ".join((OWN_PACKAGE, *plugins))
    package = dotted.partition(".")[0]
    refused = f"{path}._target_={dotted} is outside the packages that a recipe may use ({allowed})"
    if package in sys.stdlib_module_names:
        return f"{refused}. Name a class of {OWN_PACKAGE}"
    return f"{refused}. If '{package}' holds your own classes, allow it: plugins=[{package}]"


def _import_longest(dotted: str, path: str, plugins: Sequence[str]) -> tuple[ModuleType, list[str]]:
    """The longest prefix that is a module of an allowed package, and the remaining names."""
    parts = dotted.split(".")
    depth = next(n for n in range(1, len(parts) + 1) if _allowed(".".join(parts[:n]), plugins))
    module = _import(".".join(parts[:depth]), path)
    while depth < len(parts) and _has_submodule(module, parts[depth]):
        depth += 1
        module = _import(".".join(parts[:depth]), path)
    return module, parts[depth:]


def _has_submodule(module: ModuleType, name: str) -> bool:
    return "__path__" in vars(module) and importlib.util.find_spec(f"{module.__name__}.{name}") is not None


def _import(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            raise UnsafeTargetError(f"{path}._target_: there is no package '{error.name}' here") from error
        raise DependencyError(f"{path}._target_={name}... needs '{error.name}': pip install {error.name}") from error


def _find_in(
    module: ModuleType, names: list[str], dotted: str, path: str, plugins: Sequence[str]
) -> Callable[..., Any]:
    value = vars(module).get(names[0]) if names else None
    if names and value is None:
        raise ConfigError(_no_such_name(module, names[0], dotted, path))
    if not inspect.isclass(value) or not _allowed(value.__module__, plugins) or len(names) > 2:
        raise UnsafeTargetError(_not_a_class(dotted, path))
    return value if len(names) == 1 else _classmethod(value, names[1], dotted, path, plugins)


def _classmethod(cls: type, name: str, dotted: str, path: str, plugins: Sequence[str]) -> Callable[..., Any]:
    method = inspect.getattr_static(cls, name, None)
    if not isinstance(method, classmethod) or not _allowed(method.__func__.__module__, plugins):
        raise UnsafeTargetError(_not_a_class(dotted, path))
    return method.__get__(None, cls)


def _not_a_class(dotted: str, path: str) -> str:
    return (
        f"{path}._target_={dotted} is not a class (or a classmethod of one) defined in an allowed package: "
        "functions, modules and re-exported names of other packages are refused"
    )


def _no_such_name(module: ModuleType, name: str, dotted: str, path: str) -> str:
    classes = [key for key, value in vars(module).items() if inspect.isclass(value) and _allowed(value.__module__, ())]
    submodules = _submodules(module)
    hint = did_you_mean(name, classes + submodules)
    return f"{path}._target_={dotted}: {module.__name__} has no '{name}'.{hint}"


def _submodules(module: ModuleType) -> list[str]:
    return [module_info.name for module_info in pkgutil.iter_modules(vars(module).get("__path__", []))]
