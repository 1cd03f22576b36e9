"""Model directories as they are published: what their configuration files say, and what they lack."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.family_cases import CASES, FamilyCase, built
from unirl.config.errors import DataError
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend

by_name = {case.name: case for case in CASES}


Tensors = dict[str, Tensor]


def write_toy(case: FamilyCase, folder: Path) -> Path:
    """The toy of `case` as diffusers saves it."""
    return built(case).write_model({}, folder)


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_configuration_may_have_keys_that_its_class_ignores(tmp_path: Path) -> None:
    """The published transformer of Qwen-Image has `pooled_projection_dim`, which its class does not read."""
    case = by_name["qwen_image"]
    folder = write_toy(case, tmp_path)
    bundle_class, _ = case.classes()
    expected = bundle_class.estimate(str(folder))
    edit_json(folder / "transformer/config.json", pooled_projection_dim=768)
    assert bundle_class.estimate(str(folder)) == expected
    empty = bundle_class(path=str(folder), dtype="fp32", meta_init=True)
    assert [name for name, p in empty.trainable().named_parameters() if not p.is_meta] == []


# Files that lack something


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(by_name["sd3"], tmp_path_factory.mktemp("sd3"))


@pytest.fixture
def folder(sd3: Path, tmp_path: Path) -> Path:
    """A model directory of Stable Diffusion 3 that a test may change."""
    return Path(shutil.copytree(sd3, tmp_path / "model"))


def edit_weights(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refused(folder: Path, match: str, **options: object) -> None:
    bundle_class, _ = by_name["sd3"].classes()
    with pytest.raises(DataError, match=match) as caught:
        bundle_class(path=str(folder), dtype="bf16", **options)
    assert caught.value.code == 4001


def without(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


WEIGHT = {"transformer": "diffusion_pytorch_model.safetensors", "vae": "diffusion_pytorch_model.safetensors"}
QUERY = "transformer_blocks.0.attn.to_q.weight"
SELF_ATTENTION = "text_model.encoder.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("component", "name"),
    [
        ("transformer", QUERY),
        ("vae", "decoder.conv_in.weight"),
        ("text_encoder", SELF_ATTENTION),
        ("text_encoder_3", "encoder.block.1.layer.0.SelfAttention.q.weight"),
    ],
)
@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_a_tensor_that_is_missing_or_misshapen_is_named(folder: Path, component: str, name: str, change: str) -> None:
    path = folder / component / WEIGHT.get(component, "model.safetensors")
    if change == "missing":
        edit_weights(path, without(name))
        refused(folder, rf"^{component} of the model in .*: tensors of \w+ are missing \(1\): {name}\. Download")
    else:
        edit_weights(path, lambda tensors: tensors.update({name: tensors[name][:1].clone()}))
        refused(folder, rf"{component} of the model in .*{name}")


@pytest.mark.parametrize("meta_init", [False, True])
def test_a_trained_network_has_exactly_the_tensors_of_its_files(folder: Path, meta_init: bool) -> None:
    path = folder / "transformer" / WEIGHT["transformer"]
    edit_weights(path, lambda tensors: tensors.update({f"{QUERY}.lora_A": tensors[QUERY].clone()}))
    refused(
        folder, rf"tensors do not belong to SD3Transformer2DModel \(1\): {QUERY}.lora_A.*merge", meta_init=meta_init
    )
    edit_weights(path, without(QUERY, f"{QUERY}.lora_A"))
    refused(folder, rf"transformer of .* are missing \(1\): {QUERY}", meta_init=meta_init)


def test_integers_in_place_of_weights_are_refused(folder: Path) -> None:
    """Their values would otherwise be read as weights, without their scales."""
    path = folder / "transformer" / WEIGHT["transformer"]
    edit_weights(path, lambda tensors: tensors.update({QUERY: tensors[QUERY].to(torch.int8)}))
    refused(folder, rf"^transformer of the model in .* are integers in the files.* \(1\): {QUERY} \(I8\).*quantized")
    bundle_class, _ = by_name["sd3"].classes()
    empty = bundle_class(components=(), path=str(folder), dtype="bf16", meta_init=True)
    with pytest.raises(DataError, match=rf"{QUERY} of SD3Transformer2DModel is torch.int8.*are quantized"):
        FSDPBackend(empty, optimizer_cfg=OptimizerConfig(learning_rate=1e-3))


def test_weights_that_an_encoder_does_not_use_are_ignored(folder: Path) -> None:
    path = folder / "text_encoder_3/model.safetensors"
    norm = "final_layer_norm.weight"
    edit_weights(path, lambda tensors: tensors.update({f"decoder.{norm}": tensors[f"encoder.{norm}"].clone()}))
    bundle_class, _ = by_name["sd3"].classes()
    assert "text_encoder_3" in bundle_class(path=str(folder), dtype="bf16").modules


@pytest.mark.parametrize("meta_init", [False, True])
@pytest.mark.parametrize(
    ("component", "name", "match"),
    [
        ("transformer", "diffusion_pytorch_model.fp16.safetensors", "only the variant 'fp16' .*variant='fp16'"),
        ("text_encoder", "model.fp16.safetensors", "only the variant 'fp16' .*variant='fp16'"),
        (
            "transformer",
            "diffusion_pytorch_model.bin",
            r"only diffusion_pytorch_model\.bin\. Load the model",
        ),
        ("vae", "sd3_vae.safetensors", r"only sd3_vae\.safetensors\. Load the model with its own library"),
        ("transformer", "readme.txt", r"\. Download the model again"),
    ],
)
def test_weights_of_another_format_are_refused_with_a_way_out(
    folder: Path, component: str, name: str, match: str, meta_init: bool
) -> None:
    path = folder / component / WEIGHT.get(component, "model.safetensors")
    path.rename(path.with_name(name))
    refused(folder, rf"{component}.*: there is no {path.name}.*{match}", meta_init=meta_init)


def test_a_download_that_stopped_early_is_named_by_its_missing_files(folder: Path) -> None:
    path = folder / "transformer" / WEIGHT["transformer"]
    names = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(path), names[0]) | {QUERY: names[1]}}
    path.rename(path.with_name(names[0]))
    path.with_name(f"{path.name}.index.json").write_text(json.dumps(index))
    for meta_init in (False, True):
        refused(folder, f"1 of the 2 weight files .* are missing: {names[1]}", meta_init=meta_init)


def test_a_single_file_is_refused_with_the_way_to_convert_it(sd3: Path) -> None:
    refused(sd3 / "transformer" / WEIGHT["transformer"], "is a single file, .*from_single_file.*save_pretrained")


def test_a_run_reads_the_scheduler_of_the_checkpoint_where_a_plan_reads_the_published_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle_class, _ = by_name["sd3"].classes()
    hub_id = "stabilityai/stable-diffusion-3.5-medium"
    edit_json(folder / "scheduler/scheduler_config.json", shift=1.5)
    monkeypatch.setattr("unirl.models.loading.checkpoint.model_directory", lambda *arguments, **options: folder)
    assert bundle_class(path=hub_id, dtype="bf16").facts.schedule.shift == 1.5
    assert bundle_class.facts_of(hub_id).schedule.shift == 3.0


def test_an_export_refuses_a_tensor_that_the_network_does_not_have(tmp_path: Path) -> None:
    tensors = {"transformer_blocks.9.attn.to_q.weight": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"has no parameter 'transformer_blocks.9.attn.to_q.weight' \(1 unknown"):
        built(by_name["sd3"]).write_model(tensors, tmp_path)
    assert not list(tmp_path.iterdir())
