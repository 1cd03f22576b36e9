"""FLUX.2-klein. Black Forest Labs 2026 (github.com/black-forest-labs/flux2).

    pixels --VAE--> [B, 32, H / 8, W / 8] --patches of 2 x 2--> [B, 128, H / 16, W / 16] --(z - mean) / std--> latents

Each token has a position (time, row, column, index): (0, row, column, 0) for the sample, (10 + 10 i, row, column, 0)
for the i-th condition image and (0, 0, 0, index) for the text. The condition images follow the sample.

The text condition joins three hidden states of Qwen3, of a chat with the prompt as the user's message:

    tokens  [B, L, 3 D] = states after layers N/4 | N/2 | 3N/4

Qwen3-4B and -8B have N = 36 layers, so theirs are 9, 18 and 27. The result equals diffusers'
`Flux2KleinPipeline.encode_prompt`. The transformer attends to padding as to any other token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import (
    ConditionImageEncoder,
    Decoder,
    DiffusersBundle,
    Encoder,
    NetworkDenoiser,
    TextEncoder,
)
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.models.denoising.packing import packed, unpacked
from unirl.models.denoising.text_encoders import CausalTextEncoder
from unirl.models.denoising.vae import IMAGE, ReferenceEncoder, VAEAdapter, from_unit
from unirl.models.language.chat import chat
from unirl.models.loading.checkpoint import JOINT_ATTENTION, DiffusersFamily, ModelConfigs, family_files
from unirl.models.loading.toy_tokenizers import qwen_tokenizer
from unirl.sde.guidance import Guidance, NoGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, LatentCondition, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from diffusers import AutoencoderKLFlux2

PATCH = 2
NUM_TEXT_LAYERS = 3
"""Hidden states that are joined in each text token."""
MAX_CONDITION_IMAGES = 4
"""The limit that the model's authors state."""
IMAGE_GAP = 10
"""Distance in time between the sample and the first condition image, and between condition images."""
LORA_TARGETS = (
    *JOINT_ATTENTION,
    *(f"{part}.{name}" for part in ("ff", "ff_context") for name in ("linear_in", "linear_out")),
    "attn.to_qkv_mlp_proj",
)


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. `is_distilled` in model_index.json marks a distilled one, which has no guidance."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    _check_components(configs)
    return LatentFacts(
        family="flux2_klein",
        block_class_names=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
        lora_targets=LORA_TARGETS,
        latent_channels=transformer["in_channels"],
        vae_scale=PATCH * 2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=1,
        schedule=replace(SigmaSchedule.from_diffusers(configs.scheduler), mu="flux2"),
        timestep_scale=1.0,
        guidance=NoGuidance() if configs.settings.get("is_distilled") else Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["joint_attention_dim"],
        condition_images=(0, MAX_CONDITION_IMAGES),
    )


def _check_components(configs: ModelConfigs) -> None:
    """Raises NotFoundError (4001) if the components do not fit together, or the guidance scale is an input (dev)."""
    transformer, vae, text = (configs.components[name] for name in ("transformer", "vae", "text_encoder"))
    requirements = (
        ("in_channels", transformer["in_channels"], PATCH**2 * vae["latent_channels"]),
        ("joint_attention_dim", transformer["joint_attention_dim"], NUM_TEXT_LAYERS * text["hidden_size"]),
        ("guidance_embeds", transformer.get("guidance_embeds", True), False),
    )
    for name, value, required in requirements:
        if value != required:
            raise NotFoundError(
                f"the checkpoint's transformer has {name}={value}, and a FLUX.2-klein model with this VAE and text "
                f"encoder has {required}. Use black-forest-labs/FLUX.2-klein-base-4B or -9B"
            )


FLUX2_KLEIN = DiffusersFamily(
    name="flux2_klein",
    pipeline="Flux2KleinPipeline",
    classes={
        "transformer": "diffusers.Flux2Transformer2DModel",
        "text_encoder": "transformers.Qwen3ForCausalLM",
        "vae": "diffusers.AutoencoderKLFlux2",
    },
    facts=facts,
    toy_tokenizers=lambda: {"tokenizer": qwen_tokenizer()},
    **family_files(__file__),
)


class KleinDenoiser(NetworkDenoiser):
    """The transformer as a velocity field."""

    matrix: ClassVar[str] = "x_embedder.weight"
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks", "single_transformer_blocks")

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given `text` and, if there are any, `image` latents."""
        text, image = conditions["text"], conditions.get(IMAGE)
        assert isinstance(text, TextEmbedCondition)
        dtype = self.dtype
        tokens, positions = [packed(x, 1)], [_positions(0, x.shape[-2], x.shape[-1], 1, x.device)]
        if image is not None:
            assert isinstance(image, LatentCondition)
            for i, latents in enumerate(image.latents.to(x).unbind(1)):
                tokens.append(packed(latents, 1))
                positions.append(_positions(IMAGE_GAP * (i + 1), latents.shape[-2], latents.shape[-1], 1, x.device))
        v = self.network(
            hidden_states=torch.cat(tokens, dim=1).to(dtype),
            timestep=sigma,  # the transformer multiplies it by 1000
            encoder_hidden_states=text.embeds.to(dtype),
            txt_ids=_positions(0, 1, 1, text.embeds.shape[1], x.device),
            img_ids=torch.cat(positions),
            return_dict=False,
        )[0]
        return unpacked(v[:, : tokens[0].shape[1]].float(), x.shape, 1)


def _positions(time: int, rows: int, columns: int, indices: int, device: torch.device) -> Tensor:
    """[rows columns indices, 4] int64 positions (time, row, column, index)."""
    axes = [torch.arange(count, device=device) for count in (rows, columns, indices)]
    return torch.cartesian_prod(torch.full((1,), time, device=device), *axes)


def text_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose hidden states are joined, counted from 1."""
    return tuple(num_layers * part // (NUM_TEXT_LAYERS + 1) for part in range(1, NUM_TEXT_LAYERS + 1))


class KleinVAE(VAEAdapter):
    """diffusers' AutoencoderKLFlux2, with patches of latents whose channels are normalised."""

    vae: AutoencoderKLFlux2

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [0, 1] of latents [B, 128, H / 16, W / 16]."""
        mean, std = self._channel_statistics()
        return self.decoded(pixel_shuffle(latents * std + mean, PATCH))

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, 128, H / 16, W / 16] of pixels [B, 3, H, W] in [0, 1]: the mean of the encoder's Gaussian."""
        mean, std = self._channel_statistics()
        latents = pixel_unshuffle(self.encoded(from_unit(pixels)), PATCH)
        return (latents - mean) / std

    def _channel_statistics(self) -> tuple[Tensor, Tensor]:
        """[128, 1, 1] mean and standard deviation of each channel of a patch, which are buffers of the VAE."""
        mean, variance = self.vae.bn.running_mean.float(), self.vae.bn.running_var.float()
        return mean[:, None, None], (variance[:, None, None] + self.vae.config.batch_norm_eps).sqrt()


class Flux2KleinBundle(DiffusersBundle):
    """Transformer, Qwen3 and VAE."""

    family: ClassVar[DiffusersFamily] = FLUX2_KLEIN
    denoiser_class: ClassVar[type[NetworkDenoiser]] = KleinDenoiser

    def text_encoder(self) -> TextEncoder:
        [encoder], tokenizer = self.require(("text_encoder",), "encode text"), self.tokenizers["tokenizer"]
        template = partial(chat, tokenizer, enable_thinking=False)
        layers = text_layers(self.configs.components["text_encoder"]["num_hidden_layers"])
        return CausalTextEncoder(encoder.get_submodule("model"), tokenizer, template, layers=layers)

    def condition_image_encoder(self) -> ConditionImageEncoder | None:
        return ReferenceEncoder(self.encoder())

    def decoder(self) -> Decoder:
        return KleinVAE(*self.require(("vae",), "decode latents"))

    def encoder(self) -> Encoder:
        return KleinVAE(*self.require(("vae",), "encode images"))


class Flux2KleinPipeline(DiffusersPipeline[Flux2KleinBundle]):
    """Text to image and image editing with FLUX.2-klein."""

    def call_arguments(self, texts: Sequence[str], x_T: Tensor, params: DiffusionSamplingParams) -> dict[str, object]:  # noqa: N803
        """diffusers takes a negative prompt as embeddings only, and the numbers of the layers."""
        layers = text_layers(self.bundle.configs.components["text_encoder"]["num_hidden_layers"])
        negative = self.embed([params.negative_prompt] * len(texts), params.max_sequence_length).embeds
        further = {"text_encoder_out_layers": layers, "negative_prompt_embeds": negative}
        return super().call_arguments(texts, x_T, params) | further
