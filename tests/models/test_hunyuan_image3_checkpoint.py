"""The files of a HunyuanImage-3 checkpoint: read in the published layout, refused if damaged, and written again.

The VAE is compared with the published equations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import conv3d, group_norm, silu

from tests.models.layouts import Hub
from unirl.config.errors import NotFoundError
from unirl.models.hunyuan_image3.family import HunyuanImage3Bundle, HunyuanImage3Pipeline
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
READER = {
    "vision_model.encoder.layers.0.mlp.fc1.weight": torch.ones(4, 12),
    "vision_aligner.layers.0.bias": torch.ones(3),
}
NORM = "model.ln_f.weight"


def of_mlp(name: str) -> set[str]:
    return {f"{name}.{layer}.weight" for layer in ("gate_and_up_proj", "down_proj")}


def of_block(name: str, has_skip: bool) -> set[str]:
    layers = ("in_layers.0", "in_layers.2", "emb_layers.1", "out_layers.0", "out_layers.3")
    return {f"{name}.{each}.{k}" for each in (*layers, *["skip_connection"] * has_skip) for k in ("weight", "bias")}


def published_names() -> set[str]:
    """The names of the network's tensors, as the classes of the published code have them."""
    kinds = ("weight", "bias")
    names = {"model.wte.weight", NORM, "lm_head.weight"}
    names |= {
        f"{part}.mlp.{i}.{k}" for part in ("timestep_emb", "time_embed", "time_embed_2") for i in (0, 2) for k in kinds
    }
    names |= {f"patch_embed.model.0.{k}" for k in kinds} | of_block("patch_embed.model.1", has_skip=False)
    names |= {f"final_layer.model.1.{i}.{k}" for i in (0, 2) for k in kinds}
    names |= of_block("final_layer.model.0", has_skip=False)
    for i in range(3):
        layer = f"model.layers.{i}"
        attention = ("qkv_proj", "o_proj", "query_layernorm", "key_layernorm")
        names |= {f"{layer}.self_attn.{each}.weight" for each in attention}
        names |= {f"{layer}.{each}.weight" for each in ("input_layernorm", "post_attention_layernorm")}
        if i == 0:
            names |= of_mlp(f"{layer}.mlp")
            continue
        names |= {f"{layer}.mlp.gate.wg.weight"} | of_mlp(f"{layer}.mlp.shared_mlp")
        for expert in range(4):
            names |= of_mlp(f"{layer}.mlp.experts.{expert}")
    return names


def published_vae_names() -> set[str]:
    """The layers of the VAE, by the loops that build its modules."""
    names = {f"{part}.{layer}" for part in ("encoder", "decoder") for layer in ("conv_in", "norm_out", "conv_out")}
    for part, side, blocks in (("encoder", "down", 1), ("decoder", "up", 2)):
        resnets = [f"{part}.mid.block_1", f"{part}.mid.block_2"]
        resnets += [f"{part}.{side}.{level}.block.{i}" for level in range(5) for i in range(blocks)]
        names |= {f"{name}.{layer}" for name in resnets for layer in ("norm1", "conv1", "norm2", "conv2")}
        names |= {f"{part}.mid.attn_1.{layer}" for layer in ("norm", "q", "k", "v", "proj_out")}
        names |= {f"{part}.{side}.{level}.{side}sample.conv" for level in range(4)}
    return {f"vae.{name}.{kind}" for name in names for kind in ("weight", "bias")}


@pytest.fixture(scope="module")
def toy() -> HunyuanImage3Pipeline:
    return HunyuanImage3Pipeline(HunyuanImage3Bundle(path="toy", dtype="fp32"))


def noised(bundle: HunyuanImage3Bundle) -> dict[str, Tensor]:
    """The tensors of the network, each changed."""
    generator = torch.Generator().manual_seed(3)
    tensors = bundle.trainable().state_dict()
    return {name: t + 0.02 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


@pytest.fixture(scope="module")
def folder(toy: HunyuanImage3Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the published layout, with an encoder of images, and the weights in two files."""
    place = toy.write_model(noised(toy.bundle), tmp_path_factory.mktemp("published"))
    tensors = load_file(place / "model.safetensors") | READER
    (place / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-0001-of-0002.safetensors": names[::2], "model-0002-of-0002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, place / file, metadata={"format": "pt"})
    weight_map = {name: file for file, own in parts.items() for name in own}
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return place


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder with one file of weights, for a test to change."""
    place = tmp_path / "damaged"
    place.mkdir()
    for file in folder.iterdir():
        if "safetensors" not in file.name:
            (place / file.name).write_bytes(file.read_bytes())
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    save_file(tensors, place / "model.safetensors")
    return place


def test_the_network_and_the_vae_have_the_published_names_of_tensors(folder: Path) -> None:
    saved = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert saved == published_names() | published_vae_names() | set(READER)


def test_the_configurations_are_those_of_the_published_repository(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["moe_topk"] == [2, 2, 3] and config["vae"]["ffactor_temporal"] == 4
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"sequence_template": "instruct", "flow_shift": 3.0}
    assert not (folder / "model_index.json").exists()


def test_a_folder_in_the_published_layout_is_the_model_that_wrote_it(toy: HunyuanImage3Pipeline, folder: Path) -> None:
    bundle = HunyuanImage3Bundle(path=str(folder), dtype="fp32")
    expected = noised(toy.bundle)
    assert bundle.facts == toy.facts and bundle.format.has_roles
    for name, tensor in bundle.trainable().state_dict().items():
        assert torch.equal(tensor, expected[name]) and torch.equal(bundle.saved().read(name), tensor), name
    for name, tensor in bundle.modules["vae"].state_dict().items():
        assert torch.equal(tensor, toy.bundle.modules["vae"].state_dict()[name]), name
    assert bundle.codec.encode("a </think>") == toy.bundle.codec.encode("a </think>")
    assert bundle.codec.ends == toy.bundle.codec.ends


def test_the_generation_configuration_decides_template_and_shift(damaged: Path) -> None:
    settings = {"sequence_template": "pretrain", "drop_think": True, "flow_shift": 5.0}
    (damaged / "generation_config.json").write_text(json.dumps(settings))
    bundle = HunyuanImage3Bundle(path=str(damaged), dtype="fp32")
    assert (bundle.format.has_roles, bundle.format.drops_think) == (False, True)
    assert math.isclose(float(bundle.facts.schedule.sigmas(2, 4)[1]), 5 * 0.5 / (1 + 4 * 0.5), rel_tol=1e-6)


def test_keys_that_the_published_files_leave_out_have_the_published_defaults(damaged: Path) -> None:
    """The files name neither the size of images nor the layers to and from latents, as their class has them."""
    config = json.loads((damaged / "config.json").read_text())
    absent = {"patch_size": 1, "patch_embed_hidden_dim": 64, "image_base_size": 1024}
    assert {key: config.pop(key) for key in absent} == absent
    (damaged / "config.json").write_text(json.dumps(config))
    network = HunyuanImage3Bundle.family.read(damaged).components["transformer"]
    assert {key: network[key] for key in absent} == {**absent, "patch_embed_hidden_dim": 1024}


def test_a_plan_downloads_no_weights_and_a_run_all_of_them(
    toy: HunyuanImage3Pipeline, folder: Path, hub_answers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(folder, tmp_path))
    monkeypatch.setattr(loading_hub, "_fetch", loading_hub._fetch.__wrapped__)  # a process asks the hub only once
    HunyuanImage3Bundle.facts_of("someone/fine-tuned")
    assert not list(tmp_path.glob("*.safetensors"))
    bundle = HunyuanImage3Bundle(path="someone/fine-tuned", dtype="fp32")
    assert len(list(tmp_path.glob("*.safetensors"))) == 2 and bundle.facts == toy.facts


def test_a_network_without_storage_is_filled_from_the_folder(toy: HunyuanImage3Pipeline, folder: Path) -> None:
    bundle = HunyuanImage3Bundle(path=str(folder), dtype="fp32", meta_init=True, components=())
    assert set(bundle.modules) == {"transformer"} and next(bundle.trainable().parameters()).is_meta
    backend = FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-2))
    expected = noised(toy.bundle)
    filled = dict(bundle.trainable().named_parameters())
    assert set(backend.gather()) == set(filled) == set(expected)
    assert all(torch.equal(filled[name], expected[name]) for name in expected)


def test_an_exported_model_keeps_the_encoder_of_images_and_loads_into_a_second_network(
    folder: Path, tmp_path: Path
) -> None:
    pipeline = HunyuanImage3Pipeline(HunyuanImage3Bundle(path=str(folder), dtype="fp32"))
    changed = "model.layers.1.mlp.shared_mlp.down_proj.weight"
    network = pipeline.bundle.trainable()
    with torch.no_grad():
        network.get_parameter(changed).mul_(1.5)
    assert pipeline.verify_model(folder, TEXTS, PARAMS) > 1e-3  # the folder has the weights before the change
    out = pipeline.write_model({changed: network.get_parameter(changed).detach()}, tmp_path / "out")
    assert pipeline.verify_model(out, TEXTS, PARAMS) == 0.0
    saved = load_file(out / "model.safetensors")
    assert set(saved) == published_names() | published_vae_names() | set(READER)
    assert all(torch.equal(saved[name], tensor) for name, tensor in READER.items())
    assert (out / "config.json").read_text() == (folder / "config.json").read_text()


def test_an_exported_adapter_has_the_published_names_and_starts_another_run(tmp_path: Path) -> None:
    pipeline = HunyuanImage3Pipeline(HunyuanImage3Bundle(path="toy", dtype="fp32"))
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
    assert exporter.usual_formats == ("peft",)
    path = exporter.write(tmp_path / "adapter", "peft")
    assert exporter.verify(tmp_path / "adapter", "peft", TEXTS, PARAMS) < 1e-5  # type: ignore[operator]
    tensors = load_file(path if path.is_file() else path / "adapter_model.safetensors")
    layer = "model.layers.0.self_attn.qkv_proj"
    assert len(tensors) == 3 * 2 * 2
    own = pipeline.bundle.read_adapter(str(tmp_path / "adapter"))[layer]
    assert torch.equal(own.b, tensors[f"base_model.model.{layer}.lora_B.weight"]) and own.scale == 1.5
    exporter.write(tmp_path / "full", "full")
    assert exporter.verify(tmp_path / "full", "full", TEXTS, PARAMS) < 1e-5  # type: ignore[operator]


Change = Callable[[dict[str, Tensor]], object]
MISSING = (lambda tensors: tensors.pop(NORM), r"of HunyuanImage3Network are missing \(1\): model.ln_f.weight")
MISSHAPEN = (lambda tensors: tensors.update({NORM: torch.ones(3)}), "have another shape than in HunyuanImage3Network")
FOREIGN = (lambda tensors: tensors.update({"guidance_emb.a": torch.ones(3)}), r"do not belong to HunyuanImage3Network")
QUANTIZED = (lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int8)}), "The weights are quantized")
WITHOUT_VAE = (lambda tensors: tensors.pop("vae.decoder.conv_in.bias"), r"vae of the model .* are missing \(1\)")


@pytest.mark.parametrize(
    ("damage", "meta_init"),
    [
        *((damage, meta) for damage in (MISSING, MISSHAPEN, FOREIGN, WITHOUT_VAE) for meta in (False, True)),
        (QUANTIZED, False),
    ],
)
def test_a_damaged_model_is_refused(damaged: Path, damage: tuple[Change, str], meta_init: bool) -> None:
    """Without storage, integers are refused later, when the backend reads them."""
    change, message = damage
    tensors = load_file(damaged / "model.safetensors")
    change(tensors)
    save_file(tensors, damaged / "model.safetensors")
    with pytest.raises(NotFoundError, match=message):
        HunyuanImage3Bundle(path=str(damaged), dtype="fp32", meta_init=meta_init)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cfg_distilled": True}, "has cfg_distilled=true, which is not available"),
        ({"use_meanflow": True}, "has use_meanflow=true"),
        ({"patch_size": 2}, "has patch_size=2"),
        ({"vae": None}, "no image layers of HunyuanImage-3"),
        ({"vocab_size": 300}, "the network embeds 300 tokens, so they belong to different checkpoints"),
    ],
)
def test_a_model_of_another_kind_is_refused(damaged: Path, changes: dict[str, object], message: str) -> None:
    config = json.loads((damaged / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (damaged / "config.json").write_text(json.dumps(kept))
    tensors = load_file(damaged / "model.safetensors")
    rows = ("model.wte.weight", "lm_head.weight")
    smaller = {name: tensors[name][: kept["vocab_size"]].clone() for name in rows}
    save_file(tensors | smaller, damaged / "model.safetensors")
    with pytest.raises(NotFoundError, match=message):
        HunyuanImage3Bundle(path=str(damaged), dtype="fp32")


# --- the published equations of the VAE, in float64 -------------------------------------------------------------------


class PublishedVAE:
    """The VAE of one video [1, C, F, H, W]."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensor.detach().double() for name, tensor in tensors.items()}

    def conv(self, name: str, x: Tensor, padding: int = 1) -> Tensor:
        return conv3d(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], padding=padding)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return group_norm(x, 32, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], eps=1e-6)

    def resnet(self, name: str, x: Tensor) -> Tensor:
        h = self.conv(f"{name}.conv1", silu(self.norm(f"{name}.norm1", x)))
        return x + self.conv(f"{name}.conv2", silu(self.norm(f"{name}.norm2", h)))

    def middle(self, name: str, x: Tensor) -> Tensor:
        x = self.resnet(f"{name}.block_1", x)
        h = self.norm(f"{name}.attn_1.norm", x)
        q, k, v = (self.conv(f"{name}.attn_1.{n}", h, padding=0)[0].flatten(1) for n in "qkv")
        attended = v @ (q.T @ k / math.sqrt(len(q))).softmax(1).T
        x = x + self.conv(f"{name}.attn_1.proj_out", attended.reshape(x.shape), padding=0)
        return self.resnet(f"{name}.block_2", x)

    def moved(self, x: Tensor, frames: int, to_channels: bool) -> Tensor:
        """Cells of frames x 2 x 2 places to channels, or back: place (f, h, w) has channels ((f 2 + h) 2 + w) C + c."""
        _, channels, t, rows, columns = x.shape
        cells = [(f, h, w) for f in range(frames) for h in range(2) for w in range(2)]
        if to_channels:
            return torch.cat([x[:, :, f::frames, h::2, w::2] for f, h, w in cells], dim=1)
        result = x.new_zeros(1, channels // len(cells), t * frames, rows * 2, columns * 2)
        for part, (f, h, w) in zip(x.chunk(len(cells), dim=1), cells, strict=True):
            result[:, :, f::frames, h::2, w::2] = part
        return result

    def averaged(self, x: Tensor, channels: int) -> Tensor:
        """Adjacent channels, averaged."""
        size = x.shape[1] // channels
        return torch.stack([x[0, i * size : (i + 1) * size].mean(0) for i in range(channels)])[None]

    def repeated(self, x: Tensor, times: int) -> Tensor:
        return torch.stack([x[0, i // times] for i in range(x.shape[1] * times)])[None]

    def decode(self, z: Tensor) -> Tensor:
        x = self.conv("decoder.conv_in", z)
        x = self.middle("decoder.mid", x + self.repeated(z, x.shape[1] // z.shape[1]))
        for level in range(5):
            for i in range(2):
                x = self.resnet(f"decoder.up.{level}.block.{i}", x)
            if level < 4:
                frames = 2 if level < 2 else 1
                h = self.conv(f"decoder.up.{level}.upsample.conv", x)
                own = h.shape[1] // (4 * frames)
                shortcut = self.repeated(x, 4 * frames * own // x.shape[1])
                x = self.moved(h, frames, False) + self.moved(shortcut, frames, False)
        return self.conv("decoder.conv_out", silu(self.norm("decoder.norm_out", x)))[:, :, -1:]

    def encode(self, pixels: Tensor) -> Tensor:
        x = self.conv("encoder.conv_in", torch.cat([pixels] * 4, dim=2))
        for level in range(5):
            x = self.resnet(f"encoder.down.{level}.block.0", x)
            if level < 4:
                frames = 2 if level >= 2 else 1
                h = self.moved(self.conv(f"encoder.down.{level}.downsample.conv", x), frames, True)
                x = h + self.averaged(self.moved(x, frames, True), h.shape[1])
        x = self.middle("encoder.mid", x)
        out = self.conv("encoder.conv_out", silu(self.norm("encoder.norm_out", x)))
        return (out + self.averaged(x, out.shape[1])).chunk(2, dim=1)[0]


def test_the_vae_computes_the_published_equations(toy: HunyuanImage3Pipeline) -> None:
    bundle, scale = toy.bundle, 0.5627
    equations = PublishedVAE(bundle.modules["vae"].state_dict())
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(2, 4, 2, 3, generator=generator)
    pixels = torch.rand(2, 3, 32, 48, generator=generator)
    with torch.no_grad():
        decoded, encoded = bundle.decoder().decode(latents), bundle.encoder().encode(pixels)
    for row in range(2):
        expected = equations.decode(latents[row, None, :, None].double() / scale)[0, :, 0] / 2 + 0.5
        assert float(expected.std()) > 0.01
        assert torch.allclose(decoded[row].double(), expected.clamp(0, 1), atol=1e-5)
        mean = equations.encode(pixels[row, None, :, None].double() * 2 - 1)[0, :, 0] * scale
        assert torch.allclose(encoded[row].double(), mean, atol=1e-5)
