"""A model family is a small adapter in a folder of its own, and no other code depends on it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from scripts.model_page import families
from tests.source_tree import ROOT, modules
from unirl.models.loading.checkpoint import TOY, DiffusersFamily, read_entries

MODELS = ROOT / "unirl" / "models"
FAMILIES = sorted(path.parent for path in MODELS.glob("*/family.py"))
FILES = ("family.py", "toy.json", "published.json")
MAX_LINES = 570
"""Lines of code of a family."""
NETWORK_FILES, MAX_NETWORK_LINES = ("network.py", "adaptive.py", "packing.py", "vae.py", "vision_towers.py"), 690
"""Files of networks that no library has, and their lines. They are counted by themselves."""
SHARED = (
    "denoising/stage.py",
    "denoising/pipeline.py",
    "denoising/bundle.py",
    "denoising/diffusers_pipeline.py",
    "denoising/embeddings.py",
    "loading/checkpoint.py",
)
"""Files that all families use."""

each_family = pytest.mark.parametrize("folder", FAMILIES, ids=lambda folder: folder.name)


@each_family
def test_a_family_is_small(folder: Path) -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
    of_network = [lines.pop(name) for name in NETWORK_FILES if name in lines]
    assert sum(lines.values()) <= MAX_LINES, lines
    assert sum(of_network) <= MAX_NETWORK_LINES, of_network


@each_family
def test_families_have_the_same_files(folder: Path) -> None:
    assert [name for name in FILES if not (folder / name).is_file()] == []


@each_family
def test_a_family_imports_no_heavy_library_at_the_top(folder: Path) -> None:
    module = importlib.import_module(f"unirl.models.{folder.name}.family")
    assert not {"diffusers", "transformers", "peft"} & set(vars(module))


def test_no_code_outside_a_family_imports_it() -> None:
    """Only recipes name the bundle and the pipeline of a family."""
    family = re.compile(rf"unirl\.models\.({'|'.join(folder.name for folder in FAMILIES)})\b")
    imports = [
        f"{module.name} imports {family.search(text)}"
        for module in modules().values()
        if not any(module.name.startswith(f"unirl.models.{folder.name}") for folder in FAMILIES)
        for text in module.path.read_text().splitlines()
        if family.search(text)
    ]
    assert imports == []


def test_shared_code_names_no_family() -> None:
    words = {word for folder in FAMILIES for word in (folder.name, folder.name.split("_")[0])} | {"hunyuan", "klein"}
    for name in SHARED:
        code = re.sub(r'""".*?"""|#.*', "", (MODELS / name).read_text(), flags=re.DOTALL).lower()
        assert [word for word in sorted(words) if re.search(rf"\b{word}", code)] == [], name


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_the_toy_encoders_have_an_embedding_for_every_token(family: DiffusersFamily) -> None:
    tokenizers = family.toy_tokenizers()
    for path, configs in family.toys.items():
        for name, config in configs.components.items():
            tokenizer = tokenizers.get(name.replace("text_encoder", "tokenizer"))
            vocab_size = config.get("text_config", config).get("vocab_size")
            if tokenizer is not None and vocab_size is not None:
                assert vocab_size >= len(tokenizer), f"{path}: {name}"


def test_every_diffusers_family_has_a_toy() -> None:
    assert [family.name for family in families() if TOY not in family.toys] == []


def test_an_entry_that_extends_another_one_changes_only_the_values_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "published.json"
    path.write_text('{"a": {"x": {"y": 1, "z": [1]}, "w": 2}, "b": {"extends": "a", "x": {"z": [3, 4]}, "v": 5}}')
    assert read_entries(path) == {
        "a": {"x": {"y": 1, "z": [1]}, "w": 2},
        "b": {"x": {"y": 1, "z": [3, 4]}, "w": 2, "v": 5},
    }
