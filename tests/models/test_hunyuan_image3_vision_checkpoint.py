"""Files of a HunyuanImage-3 checkpoint with its vision tower: read, refused if they lack it, and written again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.test_hunyuan_image3_checkpoint import noised, published_names, published_vae_names
from unirl.config.errors import DataError, NotFoundError
from unirl.config.load import load
from unirl.models.hunyuan_image3.family import HunyuanImage3Bundle
from unirl.models.hunyuan_image3_vision.family import HunyuanImage3VisionBundle, HunyuanImage3VisionPipeline
from unirl.models.loading.lora import inject_lora
from unirl.plan.preflight import preflight
from unirl.plan.prompts import load_data
from unirl.sde.kernels import EulerODE
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.trainer.export import Exporter
from unirl.types.facts import LoraSpec
from unirl.types.sampling import DiffusionSamplingParams

TEXTS = ("a red circle", "")
PARAMS = DiffusionSamplingParams(
    kernel=EulerODE(), num_inference_steps=3, height=32, width=32, guidance_scale=4.0, max_sequence_length=16
)
HEAD = {"vision_model.head.probe": torch.ones(1, 1, 16), "vision_model.head.mlp.fc1.bias": torch.ones(24)}
"""Tensors of the pooled output of the tower, which published files have and the network does not read."""
ALIGNER = {f"vision_aligner.layers.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
NORM = "vision_model.post_layernorm.weight"


def tower_names() -> set[str]:
    """The layers of the tower, as the classes of the published code have them."""
    layers = ["layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2"]
    layers += [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    names = {f"encoder.layers.{i}.{layer}" for i in range(2) for layer in layers}
    names |= {"embeddings.patch_embedding", "post_layernorm"}
    both = {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
    return {f"vision_model.{name}" for name in {*both, "embeddings.position_embedding.weight"}}


def vision_toy() -> HunyuanImage3VisionPipeline:
    return HunyuanImage3VisionPipeline(HunyuanImage3VisionBundle(path="toy", dtype="fp32"), condition_size=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the published layout, with the head of the tower."""
    toy = vision_toy()
    place = toy.write_model(noised(toy.bundle), tmp_path_factory.mktemp("published"))
    save_file(load_file(place / "model.safetensors") | HEAD, place / "model.safetensors")
    return place


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy of the folder with other keys in its configuration, and other tensors."""

    def change(config: dict[str, Any] | None = None, tensors: Callable[[dict[str, Tensor]], object] = len) -> Path:
        place = tmp_path / "changed"
        place.mkdir()
        for file in folder.iterdir():
            (place / file.name).write_bytes(file.read_bytes())
        own = json.loads((place / "config.json").read_text()) | (config or {})
        kept = {name: value for name, value in own.items() if value is not None}
        (place / "config.json").write_text(json.dumps(kept))
        saved = load_file(place / "model.safetensors")
        tensors(saved)
        save_file(saved, place / "model.safetensors")
        return place

    return change


def test_tower_and_aligner_have_the_published_names_of_tensors(folder: Path) -> None:
    saved = set(load_file(folder / "model.safetensors"))
    assert saved == published_names() | published_vae_names() | tower_names() | ALIGNER | set(HEAD)
    config = json.loads((folder / "config.json").read_text())
    assert config["vit"]["num_patches"] == 9 and config["vit_aligner"]["depth"] == 2
    assert config["vit_processor"]["max_num_patches"] == 16


def test_a_folder_in_the_published_layout_is_the_model_that_wrote_it(folder: Path) -> None:
    toy, bundle = vision_toy().bundle, HunyuanImage3VisionBundle(path=str(folder), dtype="fp32")
    expected = noised(toy)
    assert bundle.facts == toy.facts and set(bundle.modules) == {"transformer", "vae", "vision_model"}
    for name, tensor in bundle.trainable().state_dict().items():
        assert torch.equal(tensor, expected[name]) and torch.equal(bundle.saved().read(name), tensor), name
    for part in ("vae", "vision_model"):
        own = toy.modules[part].state_dict()
        loaded = bundle.modules[part].state_dict()
        assert own.keys() == loaded.keys() and all(torch.equal(loaded[name], own[name]) for name in own)


def test_the_published_configuration_of_the_tower_is_read(changed: Callable[..., Path]) -> None:
    """It has keys that the class of transformers does not have, and does not say that the head is left out."""
    vit = json.loads(json.dumps(HunyuanImage3VisionBundle.family.toys["toy"].components["vision_model"]))
    published = {"_attn_implementation": "sdpa", "output_attentions": False, "use_return_dict": True}
    place = changed({"vit": {key: vit[key] for key in vit if key != "vision_use_head"} | published})
    configs = HunyuanImage3VisionBundle.family.read(place)
    assert configs.components["vision_model"] == vit
    assert HunyuanImage3VisionBundle(path=str(place), dtype="fp32").modules["vision_model"].use_head is False


def test_the_bundle_without_images_ignores_the_tower(folder: Path) -> None:
    bundle = HunyuanImage3Bundle(path=str(folder), dtype="fp32")
    assert set(bundle.modules) == {"transformer", "vae"} and bundle.facts.condition_images == (0, 0)
    assert not any(name.startswith("vision_") for name in bundle.trainable().state_dict())


def test_a_network_without_storage_is_filled_from_the_folder(folder: Path) -> None:
    bundle = HunyuanImage3VisionBundle(path=str(folder), dtype="fp32", meta_init=True, components=())
    assert set(bundle.modules) == {"transformer"} and next(bundle.trainable().parameters()).is_meta
    backend = FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-2))
    expected, filled = noised(vision_toy().bundle), dict(bundle.trainable().named_parameters())
    assert set(backend.gather()) == set(filled) == set(expected) > ALIGNER
    assert all(torch.equal(filled[name], expected[name]) for name in expected)


def test_an_exported_model_keeps_all_tensors_and_draws_the_same(folder: Path, tmp_path: Path) -> None:
    pipeline = HunyuanImage3VisionPipeline(HunyuanImage3VisionBundle(path=str(folder), dtype="fp32"), condition_size=32)
    changed, network = "vision_aligner.layers.0.weight", pipeline.bundle.trainable()
    with torch.no_grad():
        network.get_parameter(changed).mul_(1.5)
    assert pipeline.verify_model(folder, TEXTS, PARAMS) > 1e-4  # the folder has the weights before the change
    out = pipeline.write_model({changed: network.get_parameter(changed).detach()}, tmp_path / "out")
    assert pipeline.verify_model(out, TEXTS, PARAMS) == 0.0
    before, after = (load_file(place / "model.safetensors") for place in (folder, out))
    assert before.keys() == after.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {changed}


def test_an_exported_adapter_has_no_layer_of_the_tower(tmp_path: Path) -> None:
    pipeline = vision_toy()
    network = pipeline.bundle.trainable()
    inject_lora(network, LoraSpec(4, 6.0, pipeline.facts.lora_targets), seed=1)
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in named.values():
            parameter.normal_(std=0.2, generator=generator)
    backend: Any = SimpleNamespace(gather=lambda weights: named)
    lora: Any = SimpleNamespace(rank=4, alpha=6.0, target_modules="model")
    exporter = Exporter(pipeline, backend, lora)
    path = exporter.write(tmp_path / "adapter", "peft")
    assert exporter.verify(tmp_path / "adapter", "peft", TEXTS, PARAMS) < 1e-5  # type: ignore[operator]
    tensors = load_file(path if path.is_file() else path / "adapter_model.safetensors")
    assert len(tensors) == 3 * 2 * 2 and all(".model.layers." in name for name in tensors)


READS = {
    "no vit, vit_aligner, so the model has no vision tower": {"vit": None, "vit_aligner": None},
    "no vit_processor, so the model has no vision tower": {"vit_processor": None},
    "cond_image_type='vae', which is not available": {"cond_image_type": "vae"},
    "cond_token_attn_type='causal'": {"cond_token_attn_type": "causal"},
    "vit_type='siglip-anyres'": {"vit_type": "siglip-anyres"},
    "vit_aligner.projector_type='linear'": {
        "vit_aligner": {"projector_type": "linear", "input_dim": 16, "n_embed": 64, "depth": 1}
    },
}


@pytest.mark.parametrize("message", READS)
def test_a_checkpoint_that_reads_images_in_no_or_another_way_is_refused(
    changed: Callable[..., Path], message: str
) -> None:
    place = changed(READS[message])
    with pytest.raises(NotFoundError, match=message):
        HunyuanImage3VisionBundle.facts_of(str(place))
    with pytest.raises(NotFoundError, match=message):
        HunyuanImage3VisionBundle(path=str(place), dtype="fp32")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop(NORM), r"vision_model of the model .* are missing \(1\): post_layernorm.weight"),
        (lambda tensors: tensors.update({NORM: torch.ones(3)}), "have another shape than in Siglip2VisionModel"),
        (
            lambda tensors: tensors.pop("vision_aligner.layers.2.bias"),
            r"are missing \(1\): vision_aligner.layers.2.bias",
        ),
    ],
)
def test_a_damaged_tower_or_aligner_is_refused(
    changed: Callable[..., Path], damage: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    place = changed(tensors=damage)
    with pytest.raises(NotFoundError, match=message):
        HunyuanImage3VisionBundle(path=str(place), dtype="fp32")


# Modes that do not fit the model or the data, before a model is loaded


def check(recipe: str, *overrides: str) -> None:
    loaded = load(f"unified_model/{recipe}", list(overrides))
    preflight(loaded)
    load_data(loaded)


@pytest.mark.parametrize("recipe", ["hi3_i2t", "hi3_it2i"])
def test_a_mode_that_the_model_lacks_is_refused_before_it_is_loaded(changed: Callable[..., Path], recipe: str) -> None:
    place = changed({"vit": None})
    with pytest.raises(NotFoundError, match="has no vit, so the model has no vision tower and reads no images"):
        check(recipe, f"bundle.path={place}")


@pytest.mark.parametrize(
    ("recipe", "data", "message"),
    [
        (
            "hi3_i2t",
            "datasets/pickscore/train.txt",
            "no images .* hunyuan_image3_vision takes 1 or more",
        ),
        (
            "hi3_it2i",
            "datasets/pickscore/train.txt",
            "no images .* hunyuan_image3_vision takes 1 or more",
        ),
        ("hi3_trainside", "datasets/first_frames/train.jsonl", "has 1 image .* hunyuan_image3 is conditioned on text"),
        ("hi3_joint", "datasets/first_frames/train.jsonl", "has 1 image .* hunyuan_image3 is conditioned on text"),
    ],
)
def test_prompts_of_another_mode_are_refused(recipe: str, data: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check(recipe, f"data_source.data_path={data}")


@pytest.mark.parametrize("recipe", ["hi3_i2t", "hi3_it2i"])
def test_the_recipes_of_both_modes_pass_the_checks(recipe: str) -> None:
    check(recipe)
