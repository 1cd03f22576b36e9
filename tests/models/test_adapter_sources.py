"""LoRA files of other tools as the start of a run compute what diffusers and peft compute with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.family_cases import CASES, FamilyCase, built
from unirl.config.errors import DataError, InvalidValueError
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, difference, plain_pipeline
from unirl.models.loading.adapter_files import Adapter, write_peft_adapter
from unirl.models.qwen3.family import Qwen3Bundle
from unirl.sde.kernels import EulerODE
from unirl.testing.bundle import PROMPTS
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig
from unirl.types.sampling import DiffusionSamplingParams

Tensors = dict[str, Tensor]
by_name = {case.name: case for case in CASES}
each_family = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
WAN_ATTENTION = {
    f"blocks.{i}.{theirs}.{o}": (f"blocks.{i}.{ours}.to_{'out.0' if o == 'o' else o}",)
    for i in range(2)
    for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
    for o in "qkvo"
}
WAN_FEED_FORWARD = {
    f"blocks.{i}.ffn.{n}": (f"blocks.{i}.ffn.net.{ours}",) for i in range(2) for n, ours in ((0, "0.proj"), (2, "2"))
}
DOUBLE_BLOCK = {
    "double_blocks.0.img_attn.qkv": tuple(f"transformer_blocks.0.attn.to_{n}" for n in "qkv"),
    "double_blocks.0.txt_attn.qkv": tuple(f"transformer_blocks.0.attn.add_{n}_proj" for n in "qkv"),
    "double_blocks.0.img_attn.proj": ("transformer_blocks.0.attn.to_out.0",),
}


@dataclass(frozen=True)
class Source:
    """The names that another tool gives to the layers of a family."""

    case: str
    layers: Mapping[str, tuple[str, ...]]
    """The module in the file, and our modules that its outputs belong to, in order."""
    prefix: str = "diffusion_model."
    is_kohya: bool = False
    """Names with underscores, `lora_down`, `lora_up` and alphas."""
    further_targets: tuple[str, ...] = ()
    """Adapted layers that are not adapted by default."""
    ranks: tuple[int, ...] = (2, 3)
    """The ranks of layers, in turn."""

    def write(self, folder: Path) -> Path:
        """The file, with random tensors."""
        network = built(by_name[self.case]).bundle.trainable()
        generator, tensors = torch.Generator().manual_seed(3), {}
        for i, (name, ours) in enumerate(self.layers.items()):
            shapes = [network.get_submodule(our).weight.shape for our in ours]
            rank = self.ranks[i % len(self.ranks)]
            key = f"lora_unet_{name.replace('.', '_')}" if self.is_kohya else f"{self.prefix}{name}"
            down, up = ("lora_down", "lora_up") if self.is_kohya else ("lora_A", "lora_B")
            tensors[f"{key}.{down}.weight"] = torch.randn(rank, shapes[0][1], generator=generator)
            tensors[f"{key}.{up}.weight"] = torch.randn(sum(s[0] for s in shapes), rank, generator=generator)
            if self.is_kohya:
                tensors[f"{key}.alpha"] = torch.tensor(1.0 + i % 2)
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "other_tool.safetensors")
        return folder / "other_tool.safetensors"


QWEN = {
    f"transformer_blocks.{i}.attn.{n}": (f"transformer_blocks.{i}.attn.{n}",) for i in (0, 1) for n in ("to_q", "to_v")
}
Z_IMAGE = [f"layers.0.attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")]
SOURCES = {
    "flux1-kohya": Source("flux1", DOUBLE_BLOCK, is_kohya=True),
    "flux2_klein-kohya": Source("flux2_klein", DOUBLE_BLOCK, is_kohya=True),
    "flux2_klein-comfy": Source(
        "flux2_klein",
        DOUBLE_BLOCK | {"single_blocks.0.linear1": ("single_transformer_blocks.0.attn.to_qkv_mlp_proj",)},
    ),
    "hunyuan_video-original": Source(
        "hunyuan_video",
        {name.replace(".qkv", "_qkv").replace(".proj", "_proj"): ours for name, ours in DOUBLE_BLOCK.items()},
        prefix="transformer.",
    ),
    "qwen_image-kohya": Source("qwen_image", QWEN, is_kohya=True),
    "qwen_image-comfy": Source("qwen_image", QWEN),
    "qwen_image_edit-comfy": Source("qwen_image_edit", QWEN),
    "wan21-comfy": Source("wan21", WAN_ATTENTION),
    "wan21-musubi": Source(
        "wan21", WAN_ATTENTION | WAN_FEED_FORWARD, is_kohya=True, further_targets=("ffn.net.0.proj", "ffn.net.2")
    ),
    "wan22-ti2v-comfy": Source("wan22-ti2v", WAN_ATTENTION),
    "z_image-comfy": Source("z_image", {name: (name,) for name in Z_IMAGE}),
    "sd3-diffusers": Source(
        "sd3", {name: (name,) for name in ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_v")},
        prefix="transformer.",
    ),
}  # fmt: skip


def start(bundle: Any, path: Path, further_targets: tuple[str, ...] = (), **changes: Any) -> FSDPBackend:
    """A backend whose adapters start from a file, with a rank and an alpha of its own."""
    targets = (*bundle.facts.lora_targets, *further_targets) if further_targets else "model"
    lora = LoraConfig(**{"rank": 4, "alpha": 2.0, "target_modules": targets, "path": str(path)} | changes)
    return FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-3), lora_cfg=lora)


def params_of(case: FamilyCase) -> DiffusionSamplingParams:
    height, width, frames = case.sizes[0]
    return DiffusionSamplingParams(
        kernel=EulerODE(), num_inference_steps=2, height=height, width=width, num_frames=frames,
        guidance_scale=case.scales[0], max_sequence_length=case.max_sequence_length,
    )  # fmt: skip


def untrained_difference(pipeline: DiffusersPipeline[Any], params: DiffusionSamplingParams) -> float:
    return difference(pipeline, plain_pipeline(pipeline.bundle, pipeline.bundle.untrained()), PROMPTS[:1], params)


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_of_another_tool_samples_as_diffusers_does_with_it(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    case = by_name[source.case]
    file = source.write(tmp_path)
    pipeline = case.build()
    start(pipeline.bundle, file, source.further_targets)
    assert pipeline.verify_lora(tmp_path, PROMPTS[:1], params_of(case)) < 1e-4
    assert untrained_difference(pipeline, params_of(case)) > 1e-3


def exported(case: FamilyCase, folder: Path, seed: int = 0) -> tuple[Path, Tensors]:
    """A file that a run exports, and the update of each layer."""
    pipeline = case.build()
    backend = FSDPBackend(
        pipeline.bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-3), lora_cfg=LoraConfig(rank=3, alpha=6.0)
    )
    assert backend.adapter is not None
    for i, (name, parameter) in enumerate(backend.trainable.items()):
        parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(seed + i))
        assert ".lora_" in name
    adapter = Adapter.from_named(backend.gather(), rank=3, alpha=6.0, target_modules=tuple(backend.adapter.targets))
    pipeline.write_lora(folder, adapter)
    return folder, updates(backend)


def updates(backend: FSDPBackend) -> Tensors:
    """alpha / rank * B A of every adapted layer."""
    assert backend.adapter is not None
    values = {name: parameter.detach() for name, parameter in backend.module.named_parameters()}
    layers = [name.removesuffix(".lora_A.default.weight") for name in values if name.endswith(".lora_A.default.weight")]
    sides = (
        (layer, values[f"{layer}.lora_A.default.weight"], values[f"{layer}.lora_B.default.weight"]) for layer in layers
    )
    return {layer: backend.adapter.scale * b @ a for layer, a, b in sides}


@pytest.mark.slow
@each_family
def test_an_exported_adapter_starts_the_next_run_where_the_last_one_ended(case: FamilyCase, tmp_path: Path) -> None:
    """Also with another rank and alpha, and for a network that is filled shard by shard."""
    folder, expected = exported(case, tmp_path / "lora")
    model = built(case).write_model({}, tmp_path / "model")
    bundle_class, _ = case.classes()
    for meta_init in (False, True):
        bundle = bundle_class(components=(), path=str(model), dtype="fp32", meta_init=meta_init)
        result = updates(start(bundle, folder))
        assert result.keys() == expected.keys()
        for name, update in result.items():
            torch.testing.assert_close(update, expected[name], rtol=1e-5, atol=1e-6)


def test_further_rows_of_the_adapter_train(tmp_path: Path) -> None:
    """The rows of A that the file does not fill start as without a file, so that a larger rank is of use."""
    case = by_name["sd3"]
    file = SOURCES["sd3-diffusers"].write(tmp_path)
    bundle_class, _ = case.classes()
    ours = start(bundle_class(components=(), path="toy", dtype="fp32"), file).trainable
    plain = FSDPBackend(
        bundle_class(components=(), path="toy", dtype="fp32"),
        optimizer_cfg=OptimizerConfig(learning_rate=1e-3),
        lora_cfg=LoraConfig(rank=4, alpha=2.0),
    ).trainable
    name = "transformer_blocks.0.attn.to_q.lora_A.default.weight"
    assert torch.equal(ours[name][2:], plain[name][2:]) and not torch.equal(ours[name][:2], plain[name][:2])
    assert not ours[name.replace("lora_A", "lora_B")][:, 2:].any()
    other = "transformer_blocks.0.attn.to_k.lora_A.default.weight"
    assert torch.equal(ours[other], plain[other])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
@pytest.mark.parametrize("family", ["sd3", "qwen3"])
def test_a_folder_of_peft_computes_what_peft_computes(family: str, tmp_path: Path) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import PeftModel, get_peft_model

    make = by_name["sd3"].classes()[0] if family == "sd3" else Qwen3Bundle
    bundle = make(path="toy", dtype="fp32", components=())
    ends = ["attn.to_q", "attn.to_v"] if family == "sd3" else ["q_proj", "o_proj"]
    config = PeftConfig(r=3, lora_alpha=5, target_modules=ends, rank_pattern={ends[0]: 2}, use_rslora=True)
    model = get_peft_model(bundle.untrained(), config)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(i))
    model.save_pretrained(str(tmp_path))
    plain: Any = PeftModel.from_pretrained(bundle.untrained(), str(tmp_path))
    expected = {
        name.removeprefix("base_model.model."): layer.get_delta_weight("default").detach()
        for name, layer in plain.named_modules()
        if hasattr(layer, "get_delta_weight")
    }
    result = {name: update for name, update in updates(start(bundle, tmp_path)).items() if update.any()}
    assert result.keys() == expected.keys()
    for name, update in result.items():
        torch.testing.assert_close(update, expected[name], rtol=1e-5, atol=1e-6)


# Files that are refused


def refused(change: Any, match: str, tmp_path: Path, name: str = "sd3-diffusers", **options: Any) -> None:
    """The file of a source, changed, is refused with a DataError or InvalidValueError that matches."""
    file = SOURCES[name].write(tmp_path)
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    bundle_class, _ = by_name[SOURCES[name].case].classes()
    with pytest.raises((DataError, InvalidValueError), match=match):
        start(bundle_class(components=(), path="toy", dtype="fp32"), file, **options)


QUERY = "transformer.transformer_blocks.0.attn.to_q"


def test_a_tensor_that_reaches_no_layer_is_named(tmp_path: Path) -> None:
    stray = torch.ones(2, 2)
    for name in ("transformer.nowhere.lora_A.weight", "unet.x.lora_A.weight", f"{QUERY}.alpha", f"{QUERY}.dora_scale"):
        refused(lambda t, name=name: t.update({name: stray}), name.replace(".", r"\."), tmp_path)
    refused(lambda t: t.pop(f"{QUERY}.lora_B.weight"), "transformer_blocks.0.attn.to_q", tmp_path)


def test_a_tensor_that_a_converter_drops_is_named(tmp_path: Path) -> None:
    """The converter of Qwen-Image drops alphas without a module, and that of Wan differences of norms."""
    key = "lora_unet_transformer_blocks_0_attn_to_q"
    refused(
        lambda t: t.update({f"{key}.dora_scale": torch.ones(32, 1)}),
        rf"{key}\.dora_scale",
        tmp_path,
        "qwen_image-kohya",
    )
    norm = "diffusion_model.blocks.0.norm3.diff"
    refused(lambda t: t.update({norm: torch.zeros(24)}), r"norm3\.diff", tmp_path, "wan21-comfy")


def test_an_alpha_that_is_not_applied_is_named(tmp_path: Path) -> None:
    key = "lora_unet_transformer_blocks_0_attn_to_q.alpha"
    refused(lambda t: t.pop(key), r"1 layers do not depend on an alpha.*0\.attn\.to_q", tmp_path, "qwen_image-kohya")


def test_adapters_of_text_encoders_are_refused_by_name(tmp_path: Path) -> None:
    name = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight"
    refused(lambda t: t.update({name: torch.ones(2, 4)}), f"also adapts text encoders.*{name}", tmp_path, "flux1-kohya")


def test_a_larger_rank_and_further_layers_are_refused_with_the_setting(tmp_path: Path) -> None:
    def nothing(tensors: Tensors) -> None: ...

    refused(nothing, r"backend\.lora_cfg\.rank=2: .* has rank 3 .*Set backend\.lora_cfg\.rank=3", tmp_path, rank=2)
    refused(nothing, r"adapts 1 layers that .* Add attn\.to_v to", tmp_path, target_modules=("attn.to_q",))
    refused(nothing, r"4 layers .* Add net\.0\.proj, net\.2|Add 0\.proj, net\.2", tmp_path, "wan21-musubi")


def test_a_lora_of_another_model_is_refused(tmp_path: Path) -> None:
    file = SOURCES["sd3-diffusers"].write(tmp_path)
    bundle_class, _ = by_name["flux1"].classes()
    with pytest.raises(DataError, match=r"does not fit FluxTransformer2DModel|belong to no layer"):
        start(bundle_class(components=(), path="toy", dtype="fp32"), file)
    refused(lambda t: t.update({f"{QUERY}.lora_A.weight": torch.ones(2, 7)}), "does not fit SD3Transformer", tmp_path)


def test_a_path_without_one_file_is_refused(tmp_path: Path) -> None:
    bundle_class, _ = by_name["sd3"].classes()
    bundle = bundle_class(components=(), path="toy", dtype="fp32")
    with pytest.raises(DataError, match=r"lora_cfg\.path='.*' is not one file of safetensors"):
        start(bundle, tmp_path)
    for name in "ab":
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(DataError, match=r"is a folder with a\.safetensors, b\.safetensors"):
        start(bundle, tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot read the adapter"):
        start(bundle, tmp_path / "a.safetensors")


def test_a_file_of_peft_needs_its_configuration(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, Adapter({"to_q": (torch.ones(1, 2), torch.ones(2, 1))}, 1, 1.0, ("to_q",)), "toy")
    (tmp_path / "adapter_config.json").unlink()
    bundle_class, _ = by_name["sd3"].classes()
    for bundle in (bundle_class(components=(), path="toy", dtype="fp32"), Qwen3Bundle(path="toy", dtype="fp32")):
        with pytest.raises(DataError, match=r"there is no adapter_config\.json beside it"):
            start(bundle, tmp_path)
