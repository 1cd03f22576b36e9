"""Builds and loads diffusers' AutoencoderKL, also from the files of implementations in the layout of latent diffusion.

diffusers           config.json with `block_out_channels`, diffusion_pytorch_model.safetensors
latent diffusion    config.json with `ch` and `ch_mult`, checkpoint.pt
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.loading.completeness import check_tensors, loading_info
from unirl.models.loading.dtypes import cast_module
from unirl.models.loading.hub import quiet_libraries, read_json
from unirl.models.loading.saved_weights import WEIGHTS

LDM_WEIGHTS = "checkpoint.pt"
"""The weight file in the layout of latent diffusion."""
Config = Mapping[str, Any]


def kl_vae_config(folder: Path) -> Config:
    """The configuration of diffusers' AutoencoderKL for the VAE in `folder`. Raises NotFoundError if there is none."""
    config = read_json(folder / "config.json")
    if "ch_mult" not in config:
        return config
    count = len(config["ch_mult"])
    return {
        "in_channels": config["in_channels"],
        "out_channels": config["out_ch"],
        "block_out_channels": [config["ch"] * factor for factor in config["ch_mult"]],
        "down_block_types": ["DownEncoderBlock2D"] * count,
        "up_block_types": ["UpDecoderBlock2D"] * count,
        "layers_per_block": config["num_res_blocks"],
        "latent_channels": config["z_channels"],
        "sample_size": config["resolution"],
        "scaling_factor": config["scaling_factor"],
        "shift_factor": config["shift_factor"],
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }


def build_kl_vae(config: Config) -> nn.Module:
    """The VAE with new weights, or without storage under the meta device."""
    from diffusers import AutoencoderKL

    with quiet_libraries():
        vae: nn.Module = AutoencoderKL.from_config(dict(config))
    return vae


def random_kl_vae(config: Config, seed: int, dtype: torch.dtype) -> nn.Module:
    """The VAE of a toy. Its random weights depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = build_kl_vae(config)
    cast_module(vae, dtype)
    return vae


def load_kl_vae(folder: Path, config: Config, dtype: torch.dtype) -> nn.Module:
    """The VAE with the weights in `folder`. Raises NotFoundError (4001) if they are missing or do not fit."""
    with torch.device("meta"):
        vae = build_kl_vae(config)
    state = _tensors(folder, config)
    expected = {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}
    info = loading_info({name: tuple(tensor.shape) for name, tensor in state.items()}, expected)
    check_tensors(f"the VAE in {folder}", "AutoencoderKL", info, may_have_more=True)
    vae.load_state_dict({name: state[name] for name in expected}, assign=True)
    cast_module(vae, dtype)
    return vae


def _tensors(folder: Path, config: Config) -> Mapping[str, Tensor]:
    """The tensors of the VAE, by the names of diffusers."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
    from safetensors.torch import load_file

    try:
        if (folder / WEIGHTS).is_file():
            return load_file(folder / WEIGHTS)
        state = torch.load(folder / LDM_WEIGHTS, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise NotFoundError(
            f"cannot read the VAE in {folder}: {str(error).splitlines()[0]}. It needs {WEIGHTS} of diffusers, or "
            f"{LDM_WEIGHTS} in the layout of latent diffusion. Download it again"
        ) from error
    tensors: Mapping[str, Tensor] = convert_ldm_vae_checkpoint(state, config)
    return tensors
