"""The files of a BAGEL checkpoint: read in the published layout, refused if they are damaged, and written again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.layouts import Hub
from unirl.config.errors import DataError, NotFoundError
from unirl.models.bagel.checkpoint import vae_tensors
from unirl.models.bagel.family import BagelBundle, BagelPipeline
from unirl.models.loading import hub as loading_hub
from unirl.models.loading.lora import inject_lora
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
FILES = {"ae.safetensors", "ema.safetensors", "llm_config.json", "vit_config.json"}
UNDERSTANDING = {
    "vit_model.vision_model.embeddings.patch_embedding.weight": torch.ones(4, 12),
    "connector.fc1.weight": torch.ones(3, 4),
    "vit_pos_embed.pos_embed": torch.zeros(9, 3),
}
EXPERT = (
    *(f"self_attn.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")),
    "self_attn.o_proj.weight",
    *(f"self_attn.{name}_norm.weight" for name in "qk"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
"""The tensors of the understanding expert in a layer."""


def of_generation(name: str) -> str:
    """The name of the same tensor of the generation expert."""
    module, kind = name.rsplit(".", 1)
    if module.startswith("mlp."):
        return f"{module.replace('mlp.', 'mlp_moe_gen.')}.{kind}"
    return f"{module}_moe_gen.{kind}"


def published_names(layers: int) -> set[str]:
    """The names of the network's tensors in ema.safetensors, as the classes of the published code have them."""
    model = "language_model.model"
    names = {f"{model}.embed_tokens.weight", "language_model.lm_head.weight", "latent_pos_embed.pos_embed"}
    names |= {f"{model}.norm.weight", f"{model}.norm_moe_gen.weight"}
    names |= {f"{part}.{kind}" for part in ("vae2llm", "llm2vae") for kind in ("weight", "bias")}
    names |= {f"time_embedder.mlp.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    for i in range(layers):
        names |= {f"{model}.layers.{i}.{each}" for name in EXPERT for each in (name, of_generation(name))}
    return names


@pytest.fixture(scope="module")
def toy() -> BagelPipeline:
    return BagelPipeline(BagelBundle(path="toy", dtype="fp32"))


def noised(bundle: BagelBundle) -> dict[str, Tensor]:
    """The tensors of the network, each changed."""
    generator = torch.Generator().manual_seed(3)
    tensors = bundle.trainable().state_dict()
    return {name: t + 0.02 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


@pytest.fixture(scope="module")
def folder(toy: BagelPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the published layout, with an encoder of images."""
    place = toy.write_model(noised(toy.bundle), tmp_path_factory.mktemp("published"))
    save_file(load_file(place / "ema.safetensors") | UNDERSTANDING, place / "ema.safetensors")
    (place / "vit_config.json").write_text('{"model_type": "siglip_vision_model"}')
    return place


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder, for a test to change."""
    place = tmp_path / "damaged"
    place.mkdir()
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def test_the_network_has_the_published_names_of_tensors(toy: BagelPipeline) -> None:
    assert set(toy.bundle.trainable().state_dict()) == published_names(2)


def test_the_files_are_those_of_the_published_repository(folder: Path) -> None:
    written = {path.name for path in folder.iterdir()}
    assert written >= FILES | {"tokenizer_config.json"} and "model_index.json" not in written
    config = json.loads((folder / "llm_config.json").read_text())
    assert config["hidden_size"] == 32 and "max_latent_size" not in config


def test_the_vae_of_diffusers_converts_from_the_published_names(toy: BagelPipeline, folder: Path) -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    vae: Any = toy.bundle.modules["vae"]
    saved = load_file(folder / "ae.safetensors")
    assert saved["decoder.mid.attn_1.q.weight"].shape == (32, 32, 1, 1)
    assert saved["decoder.up.3.block.0.conv1.weight"].equal(
        vae.state_dict()["decoder.up_blocks.0.resnets.0.conv1.weight"]
    )
    converted = convert_ldm_vae_checkpoint(saved, dict(vae.config))
    own = vae.state_dict()
    assert converted.keys() == own.keys()
    assert all(torch.equal(converted[name].reshape(own[name].shape), own[name]) for name in own)


def test_a_folder_in_the_published_layout_is_the_model_that_wrote_it(toy: BagelPipeline, folder: Path) -> None:
    bundle = BagelBundle(path=str(folder), dtype="fp32")
    expected = noised(toy.bundle)
    assert bundle.facts == toy.facts
    for name, tensor in bundle.trainable().state_dict().items():
        assert torch.equal(tensor, expected[name]) and torch.equal(bundle.saved().read(name), tensor), name
    for name, tensor in bundle.modules["vae"].state_dict().items():
        assert torch.equal(tensor, toy.bundle.modules["vae"].state_dict()[name]), name
    assert bundle.codec.encode("a <|im_end|>") == toy.bundle.codec.encode("a <|im_end|>")
    assert bundle.marks == toy.bundle.marks


def test_a_plan_downloads_no_weights_and_a_run_all_of_them(
    toy: BagelPipeline, folder: Path, hub_answers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(folder, tmp_path))
    monkeypatch.setattr(loading_hub, "_fetch", loading_hub._fetch.__wrapped__)  # a process asks the hub only once
    facts = BagelBundle.facts_of("someone/fine-tuned")
    assert facts.largest_side == 1024 and not list(tmp_path.glob("*.safetensors"))
    bundle = BagelBundle(path="someone/fine-tuned", dtype="fp32")
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"ae.safetensors", "ema.safetensors"}
    assert bundle.facts == toy.facts


def test_a_network_without_storage_is_filled_from_the_folder(toy: BagelPipeline, folder: Path) -> None:
    bundle = BagelBundle(path=str(folder), dtype="fp32", meta_init=True, components=())
    assert set(bundle.modules) == {"transformer"}
    backend = FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-2))
    expected = noised(toy.bundle)
    filled = dict(bundle.trainable().named_parameters())
    assert set(backend.gather()) == {name for name, p in filled.items() if p.requires_grad}
    assert all(torch.equal(filled[name], expected[name]) for name in expected)


def test_an_exported_model_keeps_the_encoder_of_images_and_loads_into_a_second_network(
    folder: Path, tmp_path: Path
) -> None:
    pipeline = BagelPipeline(BagelBundle(path=str(folder), dtype="fp32"))
    changed = "language_model.model.layers.1.mlp_moe_gen.up_proj.weight"
    network = pipeline.bundle.trainable()
    with torch.no_grad():
        network.get_parameter(changed).mul_(1.5)
    assert pipeline.verify_model(folder, TEXTS, PARAMS) > 1e-3  # the folder has the weights before the change
    out = pipeline.write_model({changed: network.get_parameter(changed).detach()}, tmp_path / "out")
    assert pipeline.verify_model(out, TEXTS, PARAMS) == 0.0
    saved = load_file(out / "ema.safetensors")
    assert set(saved) == published_names(2) | set(UNDERSTANDING)
    assert all(torch.equal(saved[name], tensor) for name, tensor in UNDERSTANDING.items())
    assert (out / "vit_config.json").read_text() == (folder / "vit_config.json").read_text()
    again = BagelBundle(path=str(out), dtype="fp32")
    assert all(torch.equal(t, network.state_dict()[name]) for name, t in again.trainable().state_dict().items())


def test_an_exported_adapter_has_the_published_names_and_starts_another_run(tmp_path: Path) -> None:
    pipeline = BagelPipeline(BagelBundle(path="toy", dtype="fp32"))
    facts, network = pipeline.facts, pipeline.bundle.trainable()
    inject_lora(network, LoraSpec(4, 6.0, facts.lora_targets), seed=1)
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in named.values():
            parameter.normal_(std=0.2, generator=generator)
    backend: Any = SimpleNamespace(gather=lambda weights: named)
    lora: Any = SimpleNamespace(rank=4, alpha=6.0, target_modules="model")
    exporter = Exporter(pipeline, backend, lora)
    assert exporter.usual_formats == ("peft",)
    path = exporter.write(tmp_path / "adapter", "peft")
    assert exporter.verify(tmp_path / "adapter", "peft", TEXTS, PARAMS) < 1e-5  # type: ignore[operator]
    layer = "base_model.model.language_model.model.layers.0.self_attn.q_proj_moe_gen"
    tensors = load_file(path if path.is_file() else path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 7 and f"{layer}.lora_A.weight" in tensors
    layers = pipeline.bundle.read_adapter(str(tmp_path / "adapter"))
    own = layers["language_model.model.layers.0.self_attn.q_proj_moe_gen"]
    assert torch.equal(own.b, tensors[f"{layer}.lora_B.weight"]) and own.scale == 1.5
    exporter.write(tmp_path / "full", "full")
    assert exporter.verify(tmp_path / "full", "full", TEXTS, PARAMS) < 1e-5  # type: ignore[operator]
    untrained = BagelPipeline(BagelBundle(path="toy", dtype="fp32"))
    assert untrained.verify_model(tmp_path / "full", TEXTS, PARAMS) > 1e-3


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "ema.safetensors")
    change(tensors)
    save_file(tensors, folder / "ema.safetensors")


NORM = "language_model.model.norm_moe_gen.weight"


MISSING = (lambda tensors: tensors.pop(NORM), rf"of BagelNetwork are missing \(1\): {re.escape(NORM)}")
MISSHAPEN = (lambda tensors: tensors.update({NORM: torch.ones(3)}), "have another shape than in BagelNetwork")
FOREIGN = (lambda tensors: tensors.update({"other.weight": torch.ones(3)}), r"do not belong to BagelNetwork \(1\)")
QUANTIZED = (lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int8)}), "The weights are quantized")


@pytest.mark.parametrize(
    ("damage", "meta_init"),
    [*((damage, meta) for damage in (MISSING, MISSHAPEN, FOREIGN) for meta in (False, True)), (QUANTIZED, False)],
)
def test_a_damaged_network_is_refused(damaged: Path, damage: tuple[Any, str], meta_init: bool) -> None:
    """Without storage, integers are refused later, when the backend reads them."""
    change, message = damage
    edit(damaged, change)
    with pytest.raises(NotFoundError, match=message):
        BagelBundle(path=str(damaged), dtype="fp32", meta_init=meta_init)


def test_a_vae_without_a_tensor_is_refused(damaged: Path) -> None:
    tensors = load_file(damaged / "ae.safetensors")
    tensors.pop("decoder.mid.attn_1.k.weight")
    save_file(tensors, damaged / "ae.safetensors")
    with pytest.raises(NotFoundError, match=r"vae of the model .* are missing \(1\): decoder.mid_block"):
        BagelBundle(path=str(damaged), dtype="fp32")


@pytest.mark.parametrize(
    ("file", "message"),
    [("llm_config.json", "has no llm_config.json"), ("ema.safetensors", "there is no ema.safetensors")],
)
def test_a_folder_without_a_file_is_refused(damaged: Path, file: str, message: str) -> None:
    (damaged / file).unlink()
    with pytest.raises(DataError, match=message):
        BagelBundle(path=str(damaged), dtype="fp32")


def test_a_tokenizer_of_another_model_is_refused(damaged: Path) -> None:
    config = json.loads((damaged / "llm_config.json").read_text())
    (damaged / "llm_config.json").write_text(json.dumps(config | {"vocab_size": 258}))
    edit(
        damaged,
        lambda tensors: tensors.update(
            {n: t[:258].clone() for n, t in tensors.items() if n.endswith(("embed_tokens.weight", "lm_head.weight"))}
        ),
    )
    message = "has '<|im_end|>' as token 258, and the network embeds 258 tokens"
    with pytest.raises(NotFoundError, match=re.escape(message)):
        BagelBundle(path=str(damaged), dtype="fp32")


def test_the_published_code_reads_the_vae_that_we_write(toy: BagelPipeline) -> None:
    """The names of an autoencoder of Black Forest Labs, by the loops that build its modules."""
    names = {f"{part}.{layer}" for part in ("encoder", "decoder") for layer in ("conv_in", "norm_out", "conv_out")}
    for part in ("encoder", "decoder"):
        names |= {f"{part}.mid.attn_1.{layer}" for layer in ("norm", "q", "k", "v", "proj_out")}
        names |= {f"{part}.mid.block_{i}.{layer}" for i in (1, 2) for layer in ("norm1", "conv1", "norm2", "conv2")}
    for part, side, blocks in (("encoder", "down", 1), ("decoder", "up", 2)):
        for level in range(4):
            names |= {
                f"{part}.{side}.{level}.block.{i}.{layer}"
                for i in range(blocks)
                for layer in ("norm1", "conv1", "norm2", "conv2")
            }
    names |= {f"encoder.down.{level}.downsample.conv" for level in range(3)}
    names |= {f"decoder.up.{level}.upsample.conv" for level in range(1, 4)}
    vae: Any = toy.bundle.modules["vae"]
    assert {name.rpartition(".")[0] for name in vae_tensors(vae)} == names
