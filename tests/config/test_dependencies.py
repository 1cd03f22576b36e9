"""What a missing library is said to need is really an extra of this package."""

from __future__ import annotations

import ast
import sys
import tomllib

import pytest

from tests.source_tree import ROOT, modules
from unirl.config.dependencies import need, need_version
from unirl.config.errors import DependencyError
from unirl.reward.local.ocr import EXTRAS


def extras_named():
    """Every text that stands as the `extra=` argument of a call, over the whole package."""
    calls = [node for module in modules().values() for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    words = [word for call in calls for word in call.keywords if word.arg == "extra"]
    return {word.value.value for word in words if isinstance(word.value, ast.Constant)} | set(EXTRAS.values())


def test_every_extra_that_is_named_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"ocr", "math", "data"} <= extras_named() <= set(project["optional-dependencies"])


def test_what_is_missing_is_named_and_what_is_there_passes(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    need("json", "csv", extra="ocr", by="a test")
    with pytest.raises(DependencyError, match=r"a test needs yaml, not installed here: pip install 'unirl\[ocr\]'"):
        need("json", "yaml", extra="ocr", by="a test")
    with pytest.raises(DependencyError, match=r"a test needs yaml, not installed here: ask for it$"):
        need("yaml", by="a test", install="ask for it")


def test_a_folder_of_that_name_is_no_library(tmp_path, monkeypatch):
    """Libraries leave such folders in the current folder, which is on the path of the command line."""
    (tmp_path / "wandb_like" / "run-1").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DependencyError, match="needs wandb_like, not installed"):
        need("wandb_like", by="a test", install="ask for it")


def catches_missing_imports(module) -> bool:
    handlers = [node for node in ast.walk(module.tree) if isinstance(node, ast.ExceptHandler) and node.type is not None]
    return any("ImportError" in ast.unparse(h.type) or "ModuleNotFoundError" in ast.unparse(h.type) for h in handlers)


def test_rewards_ask_for_their_libraries_in_one_way():
    rewards = [module for name, module in modules().items() if name.startswith(("unirl.reward", "unirl.cli.reward"))]
    assert len(rewards) > 40
    assert [module.name for module in rewards if catches_missing_imports(module)] == []


@pytest.mark.parametrize(
    ("installed", "is_old"), [("5.9.1", True), ("5.24.0", False), ("5.100.0", False), ("6.0", False)]
)
def test_an_old_library_is_named_with_the_version_that_is_needed(installed, is_old, monkeypatch):
    monkeypatch.setattr("unirl.config.dependencies.version", lambda name: installed)
    if not is_old:
        return need_version("transformers", (5, 24), by="pi0")
    with pytest.raises(
        DependencyError, match=f"pi0 needs transformers>=5.24, and {installed} is installed: pip install"
    ):
        need_version("transformers", (5, 24), by="pi0")
