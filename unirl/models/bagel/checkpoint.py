"""The files of a BAGEL checkpoint: one folder, without model_index.json.

    llm_config.json    the configuration of the Qwen2 experts
    vit_config.json    the configuration of the encoder that reads images, which is not loaded
    ema.safetensors    the network, and that encoder
    ae.safetensors     the VAE of FLUX, by the names of Black Forest Labs
    tokenizer.json, vocab.json, ...

The configurations of the VAE and of the latents are not in a file. They follow from the shapes of the tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unirl.models.loading.checkpoint import VAE, Config, ModelConfigs
from unirl.models.loading.completeness import check_files, read_headers
from unirl.models.loading.estimate import ModelEstimate
from unirl.models.loading.hub import copy_files, read_json, single_folder
from unirl.models.loading.saved_weights import SafetensorsWeights
from unirl.models.unified.checkpoint import NETWORK, UnifiedFamily, write_weights

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

LLM_CONFIG, VIT_CONFIG = "llm_config.json", "vit_config.json"
NETWORK_FILE, VAE_FILE = "ema.safetensors", "ae.safetensors"
PATCH_SIZE = 2
SHIFT = 3.0
"""The shift of the noise levels of the published sampler. No file has it."""
PUBLISHED_LATENTS = {"latent_channels": 16, "max_latent_size": 64}
OWN_KEYS = (*PUBLISHED_LATENTS, "latent_patch_size")
"""Keys of our configuration of the network that the file of the experts does not have."""
TO_BFL = (
    (r"mid_block\.attentions\.0\.to_([qkv])\.", r"mid.attn_1.\1."),
    (r"mid_block\.attentions\.0\.to_out\.0\.", "mid.attn_1.proj_out."),
    (r"mid_block\.attentions\.0\.group_norm\.", "mid.attn_1.norm."),
    (r"mid_block\.resnets\.0\.", "mid.block_1."),
    (r"mid_block\.resnets\.1\.", "mid.block_2."),
    (r"conv_norm_out\.", "norm_out."),
    (r"conv_shortcut\.", "nin_shortcut."),
    (r"\.resnets\.(\d+)\.", r".block.\1."),
    (r"\.downsamplers\.0\.", ".downsample."),
    (r"\.upsamplers\.0\.", ".upsample."),
    (r"down_blocks\.", "down."),
)
"""Parts of the names of diffusers' AutoencoderKL, and how Black Forest Labs spell them."""
ATTENTION_WEIGHT = re.compile(r"\.attentions\.\d+\.to_.+\.weight")
"""The names of diffusers for the matrices of attention."""


def bfl_name(name: str, num_levels: int) -> str:
    """The name of a tensor of diffusers' AutoencoderKL in a file of Black Forest Labs, who count decoders backwards."""
    for pattern, replacement in TO_BFL:
        name = re.sub(pattern, replacement, name)
    return re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{num_levels - 1 - int(match[1])}", name)


def vae_config(shapes: Mapping[str, tuple[int, ...]]) -> Config:
    """The configuration of diffusers' AutoencoderKL from the shapes in `ae.safetensors`."""
    levels = sum(re.fullmatch(r"encoder\.down\.\d+\.block\.0\.conv1\.weight", name) is not None for name in shapes)
    layers = sum(re.fullmatch(r"encoder\.down\.0\.block\.\d+\.conv1\.weight", name) is not None for name in shapes)
    return {
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "block_out_channels": [shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(levels)],
        "layers_per_block": layers,
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
    }


def file_shapes(root: Path, file: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a weight file, by their names there."""
    check_files(f"the model in {root}", root, file)
    return {name: tensor.shape for name, tensor in read_headers(f"the model in {root}", root, file).items()}


def vae_tensors(vae: AutoencoderKL) -> dict[str, Tensor]:
    """The tensors of diffusers' AutoencoderKL as Black Forest Labs save them: attention is made of convolutions."""
    levels = len(vae.config.block_out_channels)
    tensors = {bfl_name(name, levels): tensor for name, tensor in vae.state_dict().items()}
    is_convolution = re.compile(r"\.attn_1\.(q|k|v|proj_out)\.weight")
    return {n: t[:, :, None, None] if is_convolution.search(n) else t for n, t in tensors.items()}


class BagelFamily(UnifiedFamily):
    """The family of BAGEL, whose checkpoints have a layout of their own. Only the VAE has a class of diffusers."""

    def directory(self, path: str, revision: str | None, *, configs_only: bool = False) -> Path:
        """The folder of a local model, or of a downloaded copy of a hub id."""
        return single_folder(
            path, revision, LLM_CONFIG, "a folder with the files of ByteDance-Seed/BAGEL-7B-MoT", configs_only
        )

    def read(self, root: Path) -> ModelConfigs:
        """The configurations in a folder. Without weights, latents and VAE are those of the published model."""
        latents, vae = PUBLISHED_LATENTS, next(iter(self.published.values())).components[VAE]
        if (root / NETWORK_FILE).is_file():
            shapes, vae = file_shapes(root, NETWORK_FILE), vae_config(file_shapes(root, VAE_FILE))
            side = round(shapes["latent_pos_embed.pos_embed"][0] ** 0.5)
            latents = {"latent_channels": vae["latent_channels"], "max_latent_size": side}
        network = {**read_json(root / LLM_CONFIG), **latents, "latent_patch_size": PATCH_SIZE}
        return ModelConfigs(components={NETWORK: network, VAE: vae}, scheduler={"shift": SHIFT})

    def estimate(self, path: str, revision: str | None = None) -> ModelEstimate:
        """Counts all parameters. The layers are those of a forward for images, which does not run the head."""
        estimate = super().estimate(path, revision)
        linears = {name: shape for name, shape in estimate.linears.items() if not name.endswith("lm_head")}
        return replace(estimate, linears=linears)

    def weights(self, root: Path, component: str, dtype: torch.dtype) -> SafetensorsWeights:
        if component == NETWORK:
            return SafetensorsWeights(root, lambda _: dtype, NETWORK_FILE)
        configs = self.read(root)
        with torch.device("meta"):
            names = self.build(configs, component).state_dict()
        levels = len(configs.components[component]["block_out_channels"])
        own = {bfl_name(name, levels): name for name in names}
        return VAEWeights(root, lambda _: dtype, VAE_FILE, lambda name: own.get(name, name))

    def write(
        self, folder: Path, components: Mapping[str, nn.Module], configs: ModelConfigs, source: Path | None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_weights(folder / NETWORK_FILE, components[NETWORK].state_dict(), source)
        write_weights(folder / VAE_FILE, vae_tensors(components[VAE]))
        if source is not None:
            copy_files(source, folder, (VIT_CONFIG,))
        own = {name: value for name, value in configs.components[NETWORK].items() if name not in OWN_KEYS}
        (folder / LLM_CONFIG).write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")


class VAEWeights(SafetensorsWeights):
    """The tensors of the VAE by the names of diffusers. The file has convolutions of size 1 for the attention."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        def without_window(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
            return shape[:2] if ATTENTION_WEIGHT.search(name) and set(shape[2:]) <= {1} else shape

        return {name: without_window(name, shape) for name, shape in super().shapes().items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        tensor = super().read(name, rows)
        return tensor.flatten(1) if ATTENTION_WEIGHT.search(name) else tensor
