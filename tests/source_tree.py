"""Read the project's own source: which modules there are and what each imports. For tests about the code itself."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Import:
    """One imported name, dotted."""

    target: str
    line: int
    top_level: bool  # runs when the module is imported
    for_types: bool  # never runs: under `if TYPE_CHECKING:`


@dataclass(frozen=True, eq=False)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The room it lives in: "sde" of unirl.sde.kernels, "train_diffusion" of unirl.train_diffusion, "" of unirl."""
        return self.name.split(".")[1] if "." in self.name else ""


@cache
def modules() -> dict[str, Module]:
    """Every module of the package by dotted name."""
    return {module.name: module for module in _read("unirl")}


PACKAGES = ("unirl", "unirl-reward-service/reward_service")


def scanned_files() -> list[Path]:
    """The Python files that people run: the packages, the scripts and the benchmarks."""
    return [path for folder in (*PACKAGES, "scripts", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


def _read(folder: str) -> Iterator[Module]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield Module(name, path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))


@cache
def imports_of(module: Module) -> list[Import]:
    """Every import of the module, wherever it stands."""
    inside = _below(module, _is_function)
    for_types = _below(module, _is_type_checking)
    return [
        Import(target, node.lineno, id(node) not in inside | for_types, id(node) in for_types)
        for node in ast.walk(module.tree)
        for target in _targets(node, module)
    ]


def _below(module: Module, chosen: Callable[[ast.AST], bool]) -> set[int]:
    """The ids of every node at or below one that is chosen."""
    return {id(node) for top in ast.walk(module.tree) if chosen(top) for node in ast.walk(top)}


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"


def _targets(node: ast.AST, module: Module) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = _absolute(node, module)
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    is_package = module.path.name == "__init__.py"
    parts = module.name.split(".")
    parents = parts[: len(parts) - node.level + is_package]
    return ".".join([*parents, *(node.module.split(".") if node.module else [])])


def resolved(target: str) -> str:
    """The module that `target` names: unirl.sde.kernels of unirl.sde.kernels.EulerODE."""
    while target and target not in modules():
        target = target.rpartition(".")[0]
    return target
