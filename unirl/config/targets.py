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

from unirl.config.errors import ConfigError, DependencyError, PluginError, UnsafeTargetError, did_you_mean
from unirl.config.plugins import OWN_PACKAGE, explained, remember, summary

FINDABLE = "Run from its folder, set PYTHONPATH, or install it"
SHOWN_CLASSES = 8
"""Classes of a module that a message lists."""
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


def check_plugins(plugins: Sequence[str]) -> None:
    """Refuses packages that Python cannot find, and the standard library, whose classes start processes and open files.

    Nothing is imported.

    Raises:
        ConfigError: 2030.
        DependencyError: 3001 if there is no such package.
    """
    for name in plugins:
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names or not all(part.isidentifier() for part in name.split(".")):
            raise UnsafeTargetError(f"plugins may not name '{name}': give the package of your own classes")
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            hint = did_you_mean(package, (info.name for info in pkgutil.iter_modules(["."])))
            raise DependencyError(f"plugins=[{name}]: Python cannot import '{package}'.{hint} {FINDABLE}")


def find_target(dotted: object, path: str, plugins: Sequence[str] = ()) -> Callable[..., object]:
    """The class or bound classmethod called `dotted`; `path` is the recipe's key path, for messages.

    Raises:
        ConfigError: 2030 if the name may not be used, 2003 if an allowed package does not have it, 2031 if it raises.
        DependencyError: 3001 if Python cannot import it.
    """
    if not isinstance(dotted, str) or not _NAME.fullmatch(dotted) or "__" in dotted:
        raise UnsafeTargetError(f"{path}._target_={dotted!r} is not the dotted name of a class")
    if not _allowed(dotted, plugins):
        package = dotted.partition(".")[0]
        way_out = f"If '{package}' holds your own classes, allow it: plugins=[{package}]"
        if package in sys.stdlib_module_names:
            way_out = f"Name a class of {OWN_PACKAGE}"
        raise UnsafeTargetError(
            f"{path}._target_={dotted} is outside the packages that a recipe may use "
            f"({', '.join((OWN_PACKAGE, *plugins))}). {way_out}"
        )
    remember(dotted)
    module, names = _import_longest(dotted, path, plugins)
    if names and names[0] not in vars(module):
        raise ConfigError(_no_such_name(module, names[0], dotted, path))
    target = _class_or_classmethod(module, names, plugins)
    if target is None:
        raise UnsafeTargetError(
            f"{path}._target_={dotted} is not a class (or a classmethod of one) defined in an allowed package: "
            "functions, modules and re-exported names of other packages are refused"
        )
    return target


def _allowed(module: str | None, plugins: Sequence[str]) -> bool:
    return module is not None and any(f"{module}.".startswith(f"{package}.") for package in (OWN_PACKAGE, *plugins))


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
            raise DependencyError(f"{path}._target_={name}: Python cannot import '{error.name}'. {FINDABLE}") from error
        raise DependencyError(f"{path}._target_={name}... needs '{error.name}': pip install {error.name}") from error
    except (Exception, SystemExit) as error:  # a plugin is foreign code, which may raise anything
        if _allowed(name, ()):
            raise
        where = (
            f"{error.filename}:{error.lineno}: {summary(error)}" if isinstance(error, SyntaxError) else explained(error)
        )
        raise PluginError(f"{path}._target_: Python cannot import {name}: {where or summary(error)}") from error


def _class_or_classmethod(
    module: ModuleType, names: Sequence[str], plugins: Sequence[str]
) -> Callable[..., object] | None:
    """The class, or the classmethod of one, called `names` in `module`. None unless an allowed package defines it."""
    cls = vars(module)[names[0]] if names else None
    if not inspect.isclass(cls) or not _allowed(cls.__module__, plugins):
        return None
    if len(names) == 1:
        return cls
    method = inspect.getattr_static(cls, names[1], None)
    if len(names) > 2 or not isinstance(method, classmethod) or not _allowed(method.__func__.__module__, plugins):
        return None
    return method.__get__(None, cls)


def _no_such_name(module: ModuleType, name: str, dotted: str, path: str) -> str:
    origins = (module.__name__.partition(".")[0],)
    classes = [
        key for key, value in vars(module).items() if inspect.isclass(value) and _allowed(value.__module__, origins)
    ]
    submodules = [info.name for info in pkgutil.iter_modules(vars(module).get("__path__", []))]
    hint = did_you_mean(name, classes + submodules)
    own = [cls for cls in classes if vars(module)[cls].__module__ == module.__name__]
    if not hint and own:
        hint = f" It has: {', '.join(own[:SHOWN_CLASSES])}{', ...' * (len(own) > SHOWN_CLASSES)}"
    return f"{path}._target_={dotted}: {module.__name__} has no '{name}'.{hint}"
