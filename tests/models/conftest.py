"""The toy SD3, a pixel-space SD3 on disk, and requests for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unirl.models.sd3.family import SD3, SD3Bundle, SD3Pipeline


@pytest.fixture(scope="session")
def toy() -> SD3Pipeline:
    return SD3Pipeline(SD3Bundle(path="toy", dtype="fp32"))


@pytest.fixture(scope="session")
def pixel_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory like the quick start's: pixels, one small CLIP encoder, nothing else."""
    import diffusers
    import transformers

    toy = SD3.toys["toy"].components
    config = toy["transformer"] | {
        "sample_size": 16,
        "patch_size": 4,
        "in_channels": 3,
        "out_channels": 3,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        transformer = diffusers.SD3Transformer2DModel(**config)
        encoder = transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**toy["text_encoder"]))
    folder = tmp_path_factory.mktemp("pixel")
    diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=None,
        text_encoder=encoder,
        tokenizer=SD3.toy_tokenizers()["tokenizer"],
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pixel(pixel_directory: Path) -> SD3Pipeline:
    return SD3Pipeline(SD3Bundle(path=str(pixel_directory), dtype="fp32"))
