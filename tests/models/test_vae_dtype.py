"""The VAE computes in bf16 where the family's published pipeline does, and never where diffusers asks for float32."""

import inspect
import re
import sys
from importlib import import_module

import diffusers
import pytest
import torch

from unirl.config.load import load
from unirl.models.denoising.bundle import DiffusersBundle
from unirl.plan.cost import memory_table
from unirl.plan.sizes import RunSizes, resident_parts

BUNDLES = {
    "sd3": "SD3Bundle",
    "flux1": "Flux1Bundle",
    "flux2_klein": "Flux2KleinBundle",
    "z_image": "ZImageBundle",
    "lumina2": "Lumina2Bundle",
    "wan21": "Wan21Bundle",
    "wan22": "Wan22Bundle",
    "qwen_image": "QwenImageBundle",
    "qwen_image_edit": "QwenImageEditBundle",
    "hunyuan_video": "HunyuanVideoBundle",
    "hunyuan_video15": "HunyuanVideo15Bundle",
}


def bundle_class(name) -> type[DiffusersBundle]:
    return getattr(import_module(f"unirl.models.{name}.family"), BUNDLES[name])


@pytest.mark.parametrize("name", BUNDLES)
def test_bf16_is_the_default_only_where_diffusers_examples_use_it_and_its_classes_do_not_upcast(name):
    family = bundle_class(name).family
    if family.vae_dtype("auto", "bf16") == torch.bfloat16:
        example = sys.modules[getattr(diffusers, family.pipeline).__module__].EXAMPLE_DOC_STRING
        assert set(re.findall(r"torch\.(b?float\d+)", example)) == {"bfloat16"}
        assert "force_upcast" not in inspect.signature(family.class_of("vae").__init__).parameters
    assert (family.vae_dtype("auto", "bf16") == torch.bfloat16) == name.startswith("qwen_image")
    assert family.vae_dtype("auto", "fp32") == torch.float32
    assert family.vae_dtype("bf16", "fp32") == torch.bfloat16
    assert family.vae_dtype("fp32", "bf16") == torch.float32


@pytest.mark.parametrize("name", ["sd3", "flux2_klein", "qwen_image", "hunyuan_video", "wan21"])
def test_pixels_in_bf16_are_those_of_float32_but_for_rounding(name):
    wide, narrow = (bundle_class(name)(path="toy", dtype="fp32", vae_dtype=dtype) for dtype in ("fp32", "bf16"))
    assert {each.dtype for each in narrow.modules["vae"].parameters()} == {torch.bfloat16}
    facts = wide.facts
    frames = () if facts.frame_scale is None else (2,)
    latents = torch.randn(2, facts.latent_channels, *frames, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, result = (bundle.decoder().decode(latents) for bundle in (wide, narrow))
    assert result.dtype == torch.float32
    assert result.shape == expected.shape
    assert (result - expected).abs().mean() < 0.01
    assert not torch.equal(result, expected)


def test_a_plan_counts_half_of_the_memory_in_bf16():
    runs = [
        RunSizes.of(load("diffusion/qwen_image_trainside", [f"bundle.vae_dtype={dtype}"]).config)
        for dtype in ("fp32", "bf16", "auto")
    ]
    wide, narrow, auto = (
        {row.name: row.gib["decode"] for row in memory_table(run.sizes, run.settings, resident_parts(run.placement))}
        for run in runs
    )
    assert auto == narrow
    for name in ("VAE", "activations of the decoder"):
        assert narrow[name] == pytest.approx(wide[name] / 2, rel=0.05)
