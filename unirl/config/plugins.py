"""Explains an exception that comes from a class of a plugin: the class, the line, and the contract that it breaks."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

OWN_PACKAGE = "unirl"
SHOWN_FRAMES = 2
"""Number of lines of a traceback that a message shows. `--debug` shows all."""

_packages: set[str] = set()
"""Top-level packages other than ours whose classes this process has looked up or built."""


def remember(module: str) -> None:
    """Records that classes of this module may run. Exceptions that pass through its package are then its own."""
    package = module.partition(".")[0]
    if package != OWN_PACKAGE:
        _packages.add(package)


def forget() -> None:
    """Forgets all classes, at the beginning of a command."""
    _packages.clear()


def suspects() -> str:
    """` or in your package leash` while classes of plugins are in use, for an error whose origin is not known."""
    return f" or in your package {', '.join(sorted(_packages))}" if _packages else ""


def explained(error: BaseException) -> str | None:
    """Explains an error of a plugin in up to four lines. None if no code of a plugin took part in it."""
    frames = list(_plugin_frames(error.__traceback__))
    if not frames:
        about = _class_without(error)
        return None if about is None else "\n  ".join([f"{definition(about)}: {summary(error)}", *contract_of(about)])
    frame, line = frames[-1]
    cls = _class_at(frame)
    subject = f"your class {cls.__module__}.{cls.__qualname__}" if cls else f"your module {_module(frame)}"
    shown = [_shown(*each) for each in frames[-SHOWN_FRAMES:]]
    contract = contract_of(cls, frame.f_code.co_name) if cls else []
    return "\n  ".join([f"{subject}, {frame.f_code.co_filename}:{line}: {summary(error)}", *shown, *contract])


def is_foreign(cls: type) -> bool:
    """True for a class that is not of this package."""
    return cls.__module__.partition(".")[0] != OWN_PACKAGE


def definition(cls: type, method: str = "") -> str:
    """A class with the place of its definition: `your class leash.rewards.Leash, leash/rewards.py:12`.

    Args:
        method: the place is that of this method if the class has it in its own module.
    """
    found = inspect.getattr_static(cls, method, None) if method else None
    function = found.fget if isinstance(found, property) else found
    place = function if inspect.isfunction(function) and function.__module__ == cls.__module__ else cls
    name = f"{'your ' if is_foreign(cls) else ''}class {cls.__module__}.{cls.__qualname__}"
    try:
        return f"{name}, {inspect.getsourcefile(place)}:{inspect.getsourcelines(place)[1]}"
    except (OSError, TypeError):  # its source is not there
        return name


def summary(error: BaseException) -> str:
    """Type and first line of an exception, as the last line of its traceback shows them."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__


def contract_of(cls: type, method: str = "") -> list[str]:
    """One line with the contract of our class that `cls` inherits from, and of its `method` if it has that one."""
    for base in cls.__mro__[1:]:
        documented = vars(base).get(method) if method != "__init__" else None
        is_method = inspect.isroutine(documented) or isinstance(documented, property)
        doc = inspect.getdoc(documented if is_method else base)
        if base.__module__.partition(".")[0] == OWN_PACKAGE and doc and (documented or method in ("", "__init__")):
            name = f"{base.__name__}.{method}" if documented else base.__name__
            return [f"Contract of {name}: {doc.splitlines()[0]}"]
    return contract_of(cls) if method else []


def _plugin_frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames of plugins in a traceback, outermost first, each with its line."""
    while trace is not None:
        if _module(trace.tb_frame).partition(".")[0] in _packages:
            yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _class_at(frame: FrameType) -> type | None:
    """The class whose method runs in a frame."""
    owner = frame.f_globals.get(frame.f_code.co_qualname.partition(".")[0])
    own = frame.f_locals.get("self")
    return type(own) if own is not None else owner if inspect.isclass(owner) else None


def _class_without(error: BaseException) -> type | None:
    """The class of a plugin that an error is about though none of its code ran: a missing attribute or argument."""
    missing = type(error.obj) if isinstance(error, AttributeError) else None
    if missing is not None and missing.__module__.partition(".")[0] in _packages:
        return missing
    name = str(error).partition("(")[0].partition(".")[0] if isinstance(error, TypeError) else ""
    modules = [module for key, module in list(sys.modules.items()) if key.partition(".")[0] in _packages]
    classes = [vars(module).get(name) for module in modules if name]
    return next(
        (cls for cls in classes if inspect.isclass(cls) and cls.__module__.partition(".")[0] in _packages), None
    )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _shown(frame: FrameType, line: int) -> str:
    """One line of a traceback with its code."""
    code = frame.f_code
    text = linecache.getline(code.co_filename, line).strip()
    return f'  File "{code.co_filename}", line {line}, in {code.co_name}: {text[:120]}'
