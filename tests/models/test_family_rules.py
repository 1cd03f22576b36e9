"""A family is a thin adapter: small, alone in its folder, and unknown to everything above and around it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.source_tree import ROOT, modules

MODELS = ROOT / "unirl" / "models"
FAMILIES = sorted(path.parent for path in MODELS.glob("*/family.py"))
CONFIGURATIONS = ("toy.py", "published.py")
"""Files that hold configurations, not code."""
MOST_LINES = 450
FILES = ("family.py", "toy.json", "published.json")

LOOP = (
    "denoising/stage.py",
    "denoising/pipeline.py",
    "denoising/bundle.py",
    "denoising/diffusers_pipeline.py",
    "denoising/embeddings.py",
    "loading/checkpoint.py",
)
"""Files that serve every family."""

each_family = pytest.mark.parametrize("folder", FAMILIES, ids=lambda folder: folder.name)


@each_family
def test_a_family_is_small(folder: Path) -> None:
    files = [path for path in folder.glob("*.py") if path.name not in CONFIGURATIONS]
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    assert sum(lines.values()) <= MOST_LINES, lines


@each_family
def test_families_have_the_same_files(folder: Path) -> None:
    assert [name for name in FILES if not (folder / name).is_file()] == []


def test_nothing_outside_of_a_family_knows_it() -> None:
    """A recipe names a bundle and a pipeline; no code does."""
    named = re.compile(rf"unirl\.models\.({'|'.join(folder.name for folder in FAMILIES)})\b")
    knows = [
        f"{module.name} imports {named.search(text)}"
        for module in modules().values()
        if not any(module.name.startswith(f"unirl.models.{folder.name}") for folder in FAMILIES)
        for text in module.path.read_text().splitlines()
        if named.search(text)
    ]
    assert knows == []


def test_the_loop_of_all_families_names_none() -> None:
    words = {word for folder in FAMILIES for word in (folder.name, folder.name.split("_")[0])} | {"hunyuan", "klein"}
    for name in LOOP:
        code = re.sub(r'""".*?"""|#.*', "", (MODELS / name).read_text(), flags=re.DOTALL).lower()
        assert [word for word in sorted(words) if re.search(rf"\b{word}", code)] == [], name
