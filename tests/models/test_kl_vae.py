"""The AutoencoderKL of a model, from the files of diffusers and from those in the layout of latent diffusion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.config.errors import NotFoundError
from unirl.models.loading.kl_vae import kl_vae_config, load_kl_vae

CONFIG: dict[str, Any] = {
    "block_out_channels": [32, 64, 64], "layers_per_block": 1, "latent_channels": 4, "sample_size": 32,
    "down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3,
    "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.5, "shift_factor": 0.1,
}  # fmt: skip


@pytest.fixture
def vae(tmp_path: Path) -> Any:
    """A VAE of diffusers, and its files in the folder."""
    from diffusers import AutoencoderKL

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        vae = AutoencoderKL.from_config(CONFIG)
    vae.save_pretrained(tmp_path)
    return vae.eval()


def to_latent_diffusion(folder: Path, config: Any) -> None:
    """Change the files of a VAE of diffusers to the names of latent diffusion, in `checkpoint.pt`."""
    from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING
    from safetensors.torch import load_file

    count = len(config["block_out_channels"])
    state: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "diffusion_pytorch_model.safetensors").items():
        new = DIFFUSERS_TO_LDM_MAPPING["vae"].get(name, name)
        for i in range(count):
            new = new.replace(f"encoder.down_blocks.{i}.resnets.", f"encoder.down.{i}.block.")
            new = new.replace(f"encoder.down_blocks.{i}.downsamplers.0", f"encoder.down.{i}.downsample")
            new = new.replace(f"decoder.up_blocks.{i}.resnets.", f"decoder.up.{count - 1 - i}.block.")
            new = new.replace(f"decoder.up_blocks.{i}.upsamplers.0", f"decoder.up.{count - 1 - i}.upsample")
        for i in (0, 1):
            new = new.replace(f"mid_block.resnets.{i}", f"mid.block_{i + 1}")
        new = new.replace("mid_block.attentions.0", "mid.attn_1").replace("conv_shortcut", "nin_shortcut")
        for theirs, ours in (("norm", "group_norm"), ("q", "to_q"), ("k", "to_k"), ("v", "to_v")):
            new = new.replace(f"attn_1.{ours}.", f"attn_1.{theirs}.")
        new = new.replace("attn_1.to_out.0.", "attn_1.proj_out.")
        is_matrix = "attn_1" in new and tensor.dim() == 2
        state[new] = tensor[:, :, None, None] if is_matrix else tensor
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    torch.save(state, folder / "checkpoint.pt")
    widths = config["block_out_channels"]
    values = {
        "resolution": 32, "in_channels": 3, "out_ch": 3, "ch": widths[0], "ch_mult": [w // widths[0] for w in widths],
        "num_res_blocks": config["layers_per_block"], "z_channels": config["latent_channels"], "scaling_factor": 0.5,
        "shift_factor": 0.1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("layout", ["diffusers", "latent diffusion"])
def test_both_layouts_give_the_vae_of_diffusers(vae: Any, tmp_path: Path, layout: str) -> None:
    if layout == "latent diffusion":
        to_latent_diffusion(tmp_path, CONFIG)
    config = kl_vae_config(tmp_path)
    read: Any = load_kl_vae(tmp_path, config, torch.float32)
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        latents = vae.encode(pixels).latent_dist.mode()
        assert torch.allclose(read.encode(pixels).latent_dist.mode(), latents, atol=1e-5)
        assert torch.allclose(read.decode(latents).sample, vae.decode(latents).sample, atol=1e-5)
    assert (read.config.scaling_factor, read.config.shift_factor) == (0.5, 0.1)


def test_a_folder_without_weights_is_named(vae: Any, tmp_path: Path) -> None:
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(
        NotFoundError, match=r"cannot read the VAE in .*checkpoint.pt in the layout of latent diffusion"
    ):
        load_kl_vae(tmp_path, kl_vae_config(tmp_path), torch.float32)


def test_weights_of_another_vae_are_refused(vae: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="have another shape than in AutoencoderKL"):
        load_kl_vae(tmp_path, {**kl_vae_config(tmp_path), "latent_channels": 8}, torch.float32)
