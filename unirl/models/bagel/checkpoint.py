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
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unirl.models.loading.checkpoint import VAE, Config, DiffusersFamily, ModelConfigs
from unirl.models.loading.completeness import check_dtypes, check_files, read_headers
from unirl.models.loading.estimate import ModelEstimate
from unirl.models.loading.hub import read_json, single_folder
from unirl.models.loading.saved_weights import SafetensorsWeights

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

LLM_CONFIG, VIT_CONFIG = "llm_config.json", "vit_config.json"
NETWORK_FILE, VAE_FILE = "ema.safetensors", "ae.safetensors"
NETWORK = "transformer"
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
    return {n: t[:, :, None, None].contiguous() if is_convolution.search(n) else t for n, t in tensors.items()}


class BagelFamily(DiffusersFamily):
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

    def load(self, root: Path, component: str, dtype: torch.dtype) -> nn.Module:
        """A component with the weights in a folder. Raises NotFoundError (4001) unless they are exactly its weights."""
        configs = self.read(root)
        with torch.device("meta"):
            module = self.build(configs, component)
        own, place = module.state_dict(), f"{component} of the model in {root}"
        file = NETWORK_FILE if component == NETWORK else VAE_FILE
        check_files(place, root, file)
        check_dtypes(place, module, read_headers(place, root, file), ())
        weights = SafetensorsWeights(root, lambda _: dtype, file, self.names_in(configs, component, own))
        shapes = {name: without_window(shape, own.get(name)) for name, shape in weights.shapes().items()}
        self.check(root, component, module, shapes)
        module.load_state_dict({name: weights.read(name).reshape(own[name].shape) for name in own}, assign=True)
        return module

    def names_in(self, configs: ModelConfigs, component: str, names: Iterable[str]) -> Callable[[str], str]:
        """Maps the name of a tensor in a file to its name in the component, which has tensors of these `names`."""
        if component == NETWORK:
            return str
        levels = len(configs.components[component]["block_out_channels"])
        own = {bfl_name(name, levels): name for name in names}
        return lambda name: own.get(name, name)


def without_window(shape: tuple[int, ...], own: Tensor | None) -> tuple[int, ...]:
    """The shape of a matrix that a file has as a convolution of size 1. `own` is the tensor of the component."""
    is_wider = own is not None and set(shape[own.dim() :]) == {1}
    return shape[: own.dim()] if own is not None and is_wider else shape


def write_checkpoint(folder: Path, network: nn.Module, vae: AutoencoderKL, config: Config, source: Path | None) -> None:
    """Write the configurations and the weights of a model in the published layout.

    Args:
        source: the folder that the model was loaded from. Its encoder of images is copied.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    if source is not None:
        file = SafetensorsWeights(source, lambda _: next(network.parameters()).dtype, NETWORK_FILE)
        tensors |= {name: file.read(name) for name in file.shapes() if name not in tensors}
        if (source / VIT_CONFIG).is_file():
            shutil.copyfile(source / VIT_CONFIG, folder / VIT_CONFIG)
    save_file(tensors, folder / NETWORK_FILE, metadata={"format": "pt"})
    save_file(vae_tensors(vae), folder / VAE_FILE, metadata={"format": "pt"})
    own = {name: value for name, value in config.items() if name not in OWN_KEYS}
    (folder / LLM_CONFIG).write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")
