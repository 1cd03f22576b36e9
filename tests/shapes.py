"""Checks the shapes of annotations such as `Float[Tensor, "B *latent"]` at every call, under pytest only.

The annotated modules import jaxtyping for type checkers alone, so that they run with torch alone. The finder below
gives them its names before they are executed, and wraps every function whose annotations mention a shape. Only these
annotations are checked: mypy checks the others. A letter means one size within a call (jaxtyping's documentation).
Shapes that passed are not checked again.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped
from torch import Tensor

ANNOTATED = (
    "unirl.sde",
    "unirl.algorithms",
    "unirl.models.denoising.stage",
    *(f"unirl.models.language.{module}" for module in ("stage", "decoding", "packing", "policy", "sampling", "slots")),
)
"""Packages and modules whose public functions name the shape of every Tensor."""
DTYPES = {name: getattr(jaxtyping, name) for name in ("Bool", "Float", "Int", "Shaped")}
CONF = BeartypeConf(is_pep484_tower=True)  # an int is a float
_switched_off = 0


@contextmanager
def unchecked() -> Iterator[None]:
    """Shapes are not checked in this block: for tests of the errors that a user sees who passes a wrong shape."""
    global _switched_off
    _switched_off += 1
    yield
    _switched_off -= 1


def install(*packages: str) -> None:
    """Checks the shapes of modules that are imported from now on. Call it before the first of them is imported."""
    loaded = [name for name in sys.modules if _covers(packages, name)]
    assert not loaded, f"{loaded} were imported before their shapes could be checked"
    sys.meta_path.insert(0, _Finder(packages))


def _covers(packages: Sequence[str], name: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


class _Finder(MetaPathFinder):
    """Finds the modules of `packages`, each a dotted name of a package or a module."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not _covers(self.packages, fullname):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Executes a module, then wraps its functions, before any other module can import them."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(DTYPES)
        super().exec_module(module)
        classes = [value for value in vars(module).values() if inspect.isclass(value)]
        for owner in (module, *classes):
            if inspect.ismodule(owner) or owner.__module__ == module.__name__:
                _check_members(owner, module.__name__)


def _check_members(owner: ModuleType | type, module: str) -> None:
    """Replaces the functions, methods and properties that `owner` itself defines by checked ones."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, property) and value.fget is not None:
            setattr(owner, name, property(checked(value.fget), value.fset, value.fdel))
        elif isinstance(value, classmethod | staticmethod):
            setattr(owner, name, type(value)(checked(value.__func__)))
        elif isinstance(value, FunctionType) and value.__module__ == module:
            setattr(owner, name, checked(value))


def checked(function: FunctionType) -> Callable[..., Any]:
    """`function` with the shapes of its annotations checked; itself where there are none."""
    inner = getattr(function, "__wrapped__", None)
    if isinstance(inner, FunctionType):
        # A decorator such as torch.no_grad() calls the inner function through its closure.
        for cell in function.__closure__ or ():
            if cell.cell_contents is inner:
                cell.cell_contents = checked(inner)
        return function
    # Under `from __future__ import annotations`, annotations are strings.
    shapes = {
        name: eval(hint, function.__globals__)
        for name, hint in function.__annotations__.items()
        if any(f"{dtype}[" in str(hint) for dtype in DTYPES)
    }
    if not shapes:
        return function
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__annotations__, copy.__qualname__ = (
        function.__kwdefaults__,
        shapes,
        function.__qualname__,
    )
    first = _with_shapes(copy)
    accepted: dict[Hashable, set[Hashable]] = {}  # form of the arguments -> forms of the results

    @functools.wraps(function)
    def choose(*args: Any, **kwargs: Any) -> Any:
        if _switched_off:
            return function(*args, **kwargs)
        arguments = (*[_form(value) for value in args], _form(kwargs) if kwargs else None)
        if arguments not in accepted:
            result = first(*args, **kwargs)
            accepted[arguments] = {_form(result)}
            return result
        result = function(*args, **kwargs)
        form = _form(result)
        if form not in accepted[arguments]:
            _with_shapes(functools.wraps(copy)(lambda *args, **kwargs: result))(*args, **kwargs)
            accepted[arguments].add(form)
        return result

    return choose


def _with_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    return jaxtyped(beartype(conf=CONF)(function), typechecker=None)


def _form(value: Any) -> Hashable:
    """All that a check can see of a value. A check takes 20 times as long as to find that it has been made before."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), *[_form(item) for item in value]
    if isinstance(value, dict):
        return type(value), *[(key, _form(item)) for key, item in value.items()]
    return value if isinstance(value, int) else type(value)  # a shape may be said in terms of a number
