"""Writes repositories with the files of published ones and small tensors, and serves them as the hub does.

published_layouts.json says how a repository differs from what `save_pretrained` writes, and from where that is known:
weights that are split into several files, their dtype, files beside the model, tokenizers without tokenizer.json,
further keys of config.json, configurations and tensor names of older libraries. No weight was downloaded for it.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.family_cases import CASES, FamilyCase, built
from unirl.models.language.bundle import LanguageBundle
from unirl.models.loading.hub import quiet_libraries, read_json

LAYOUTS = read_json(Path(__file__).parent / "published_layouts.json")
PIPELINES = [hub_id for hub_id, layout in LAYOUTS.items() if "case" in layout]
LANGUAGE_MODELS = [hub_id for hub_id, layout in LAYOUTS.items() if "bundle" in layout]


def case_of(hub_id: str) -> FamilyCase:
    return next(case for case in CASES if case.name == LAYOUTS[hub_id]["case"])


def bundle_of(hub_id: str) -> type[LanguageBundle]:
    """The bundle class of a language model."""
    module, name = LAYOUTS[hub_id]["bundle"].rsplit(".", 1)
    kind: type[LanguageBundle] = getattr(importlib.import_module(f"unirl.models.{module}"), name)
    return kind


def write_repository(hub_id: str, folder: Path) -> Path:
    """The toy of a family in the layout of a published repository."""
    layout = LAYOUTS[hub_id]
    if "case" in layout:
        pipeline = built(case_of(hub_id))
        pipeline.write_model({}, folder)
        for component in layout.get("without_tokenizer_json", ()):
            write_vocabulary(folder / component, pipeline.bundle.tokenizers[component].get_vocab())
        for component, values in layout.get("config", {}).items():
            edit_json(folder / component / "config.json", values)
    else:
        write_language_model(hub_id, folder)
    for component in layout.get("bf16", ()):
        round_to_bf16(folder / component)
    for component, count in layout.get("shards", {}).items():
        split(folder / component, count)
    for name in layout.get("beside", ()):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}" if name.endswith("config.json") else "not a weight file of this model")
    return folder


def write_language_model(hub_id: str, folder: Path) -> None:
    """A tiny model of a language family as version 4 of transformers published it."""
    layout, bundle_class = LAYOUTS[hub_id], bundle_of(hub_id)
    config = as_published(bundle_class.toys[layout["toy"]], layout)
    family = bundle_class.families[config["model_type"]]
    with torch.random.fork_rng(devices=[]), quiet_libraries():
        torch.manual_seed(7)
        network = family.network_class()(family.configuration(config))
        network.save_pretrained(folder)
        bundle_class.toy_tokenizer().save_pretrained(folder)
        if family.reads_images:
            bundle_class(path=layout["toy"], dtype="fp32").image_processor.save_pretrained(folder)  # type: ignore[attr-defined]
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [family.model_class]}))
    (folder / "generation_config.json").write_text(json.dumps(layout["generation_config"]))
    if layout.get("tied_head_in_file"):
        [path] = folder.glob("*.safetensors")
        tensors = load_file(path)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path, metadata={"format": "pt"})


def as_published(toy: Mapping[str, Any], layout: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a toy with the keys of published files, which version 4 of transformers wrote."""
    config = dict(toy) | {"tie_word_embeddings": layout["tied"], "torch_dtype": "bfloat16"}
    text = dict(config.pop("text_config", {}))
    rope = dict((text or config).pop("rope_parameters", {"rope_theta": 10000.0}))
    (text or config).update(rope_theta=rope.pop("rope_theta"), rope_scaling=layout.get("rope_scaling", rope or None))
    return text | config if layout.get("flat_config") or not text else config | {"text_config": text}


def edit_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(read_json(path) | values))


def write_vocabulary(folder: Path, vocabulary: dict[str, int]) -> None:
    """Replace tokenizer.json by the files of older tokenizers. The toys have no merges."""
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def round_to_bf16(folder: Path) -> None:
    """Store the tensors of the weight file in a folder as bfloat16."""
    [path] = folder.glob("*.safetensors")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def split(folder: Path, count: int) -> None:
    """Split the weight file in a folder into `count` files with an index, as libraries split large models."""
    [path] = folder.glob("*.safetensors")
    tensors = load_file(path)
    names = [f"{path.stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    shares = {name: names[i * count // len(tensors)] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({n: t for n, t in tensors.items() if shares[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / f"{path.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shares}))
    path.unlink()


class Hub:
    """`snapshot_download` from a local repository into a cache."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository = repository
        self.cache = cache

    def __call__(
        self,
        repo: str,
        *,
        revision: str | None,
        allow_patterns: Iterable[str],
        ignore_patterns: Iterable[str],
        local_files_only: bool,
    ) -> str:
        from huggingface_hub.utils import filter_repo_objects

        patterns = {"allow_patterns": list(allow_patterns), "ignore_patterns": list(ignore_patterns)}
        for name in filter_repo_objects(sorted(files_in(self.repository)), **patterns):
            (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.repository / name, self.cache / name)
        return str(self.cache)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
