"""Repositories with the files of published ones and small tensors are downloaded, checked, loaded and filled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.models.family_cases import built
from tests.models.layouts import (
    LANGUAGE_MODELS,
    LAYOUTS,
    PIPELINES,
    Hub,
    bundle_of,
    case_of,
    files_in,
    write_repository,
)
from tests.models.test_loaded_dtypes import assert_same, contents
from tests.source_tree import ROOT
from unirl.cli.main import main
from unirl.config.compose import compose
from unirl.config.merge import leaves
from unirl.config.recipe_files import list_recipes
from unirl.models.loading import hub as loading_hub
from unirl.models.loading.completeness import weight_files
from unirl.models.loading.hub import components, quiet_libraries, read_json
from unirl.models.loading.saved_weights import LANGUAGE_WEIGHTS
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend

OWN_LAYOUTS = {
    *("ByteDance-Seed/BAGEL-7B-MoT", "stepfun-ai/NextStep-1-Large", "tencent/HunyuanImage-3.0-Instruct"),
    *("openvla/openvla-7b", "lerobot/pi0_base", "lerobot/pi05_base", "lerobot/smolvla_base"),
    "nvidia/GR00T-N1.5-3B",
}
"""Models of neither library, and of neither form. Tests of their families write, download and load their files."""

each_pipeline = pytest.mark.parametrize("hub_id", PIPELINES)
each_language_model = pytest.mark.parametrize("hub_id", LANGUAGE_MODELS)


@pytest.fixture
def hub(hub_answers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Hub:
    fake = Hub(write_repository(request.getfixturevalue("hub_id"), tmp_path / "repository"), tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    monkeypatch.setattr(loading_hub, "_fetch", loading_hub._fetch.__wrapped__)  # a process asks the hub only once
    return fake


def named_hub_ids() -> dict[str, str]:
    """The hub ids of models that recipes name, with the first recipe that does."""
    result: dict[str, str] = {}
    for recipe in list_recipes((ROOT / "examples",)):
        for key, value in leaves(compose(recipe.name).tree):
            text = re.sub(r"\$\{oc\.env:\w+,(.*)\}", r"\1", str(value))
            is_path = key.split(".")[-1] == "path" and not (ROOT / text).exists()
            if is_path and loading_hub.HUB_ID.fullmatch(text):
                result.setdefault(text, recipe.name)
    return result


def test_every_model_that_a_recipe_names_has_a_layout() -> None:
    """Add the files of a new model to published_layouts.json, with a source."""
    named = named_hub_ids()
    assert {"Qwen/Qwen3-4B-Base", "stabilityai/stable-diffusion-3.5-medium"} <= set(named)
    known = {*LAYOUTS, *OWN_LAYOUTS}
    assert {hub_id: recipe for hub_id, recipe in named.items() if hub_id not in known} == {}


def test_every_layout_has_a_source() -> None:
    assert [hub_id for hub_id, layout in LAYOUTS.items() if not layout["source"]] == []
    assert set(PIPELINES) | set(LANGUAGE_MODELS) == set(LAYOUTS)


@each_pipeline
def test_a_published_pipeline_is_downloaded_without_other_files_and_loads(
    hub_id: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    case, layout = case_of(hub_id), LAYOUTS[hub_id]
    bundle_class, _ = case.classes()
    with quiet_libraries():
        bundle = bundle_class(path=hub_id, dtype="fp32")
    expected = built(case).bundle
    assert files_in(hub.cache) == files_in(hub.repository) - set(layout.get("beside", ()))
    assert bundle.facts == expected.facts
    for name, module in bundle.modules.items():
        wanted = contents(expected.modules[name])
        if name in layout.get("bf16", ()):
            saved = module.state_dict()
            wanted = {key: tensor.bfloat16().float() if key in saved else tensor for key, tensor in wanted.items()}
        assert_same(contents(module), wanted)
    for name, tokenizer in expected.tokenizers.items():
        if hasattr(tokenizer, "get_vocab"):
            assert bundle.tokenizers[name]("Two cats.").input_ids == tokenizer("Two cats.").input_ids
    assert main(["models", "check", str(hub.cache), "--json"]) == 0
    reports = {row["component"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name for name, row in reports.items() if row["dtypes"] == ["BF16"]} == set(layout.get("bf16", ()))


@each_pipeline
def test_a_published_pipeline_is_planned_and_filled_shard_by_shard(hub_id: str, hub: Hub) -> None:
    case = case_of(hub_id)
    bundle_class, _ = case.classes()
    counted = bundle_class.estimate(str(hub.repository)).parameters
    modules: list[dict[str, Any]] = []
    for meta_init in (True, False):
        bundle = bundle_class(components=(), path=hub_id, dtype="bf16", meta_init=meta_init)
        backend = FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-3))
        modules.append(contents(backend.module))
    assert_same(*modules)
    assert counted[bundle.facts.trainable_attr] == sum(p.numel() for p in backend.module.parameters())
    assert set(counted) <= set(components(hub.repository)) | {bundle.facts.trainable_attr}
    assert all(tensor.dtype == torch.float32 for tensor in backend.trainable.values())


@each_language_model
def test_a_published_language_model_is_downloaded_without_other_files_and_loads(
    hub_id: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle is the library's own auto class on the same directory."""
    import transformers

    layout, bundle_class = LAYOUTS[hub_id], bundle_of(hub_id)
    bundle = bundle_class(path=hub_id, dtype="fp32")
    assert files_in(hub.cache) == files_in(hub.repository) - set(layout["beside"])
    names = tensor_names(hub.repository)
    assert {name.split(".")[0] for name in names} == set(layout["prefixes"])
    config = read_json(hub.repository / "config.json")
    kind = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    with quiet_libraries():
        theirs = kind.from_pretrained(hub.cache, dtype=torch.float32, local_files_only=True)
    ours = bundle.trainable().state_dict()
    assert_same(ours, bundle.family.weights_of_policy(theirs.state_dict()))
    if "lm_head" not in bundle.family.left_out:
        tied = ours["lm_head.weight"].data_ptr() == bundle.trainable().get_input_embeddings().weight.data_ptr()
        assert tied == layout["tied"]
        ends = layout["generation_config"]["eos_token_id"]
        assert set(bundle.codec.ends) >= set(ends if isinstance(ends, list) else [ends])
    assert main(["models", "check", str(hub.cache), "--json"]) == 0
    [report] = json.loads(capsys.readouterr().out)
    assert (report["num_tensors"], report["dtypes"], report["class_name"]) == (
        len(names),
        ["BF16"],
        bundle.family.model_class,
    )


@each_language_model
def test_a_published_language_model_is_planned_and_filled_shard_by_shard(hub_id: str, hub: Hub) -> None:
    bundle_class = bundle_of(hub_id)
    counted = bundle_class.estimate(str(hub.repository)).parameters
    modules: list[dict[str, Any]] = []
    for meta_init in (True, False):
        bundle = bundle_class(path=hub_id, dtype="bf16", meta_init=meta_init)
        backend = FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-3))
        modules.append(contents(backend.module))
    assert_same(*modules)
    assert counted == {name: sum(p.numel() for p in module.parameters()) for name, module in bundle.modules.items()}


def tensor_names(folder: Path) -> list[str]:
    """The names of the tensors in the weight files of a language model."""
    names: list[str] = []
    for file in sorted(set(weight_files(folder, LANGUAGE_WEIGHTS).values())) or [LANGUAGE_WEIGHTS]:
        with safe_open(folder / file, "pt") as content:
            names += content.keys()
    return names
