"""Stable Diffusion 3 and 3.5. Esser et al. 2024 (arXiv:2403.03206).

The text encoders give the transformer

    tokens  [B, 77 + L, joint] = pad(CLIP-L states | CLIP-G states)  ++  T5 states,     L = max_sequence_length
    pooled  [B, D']            = CLIP-L projection | CLIP-G projection

which equals diffusers' `StableDiffusion3Pipeline.encode_prompt`. The CLIP states are those before the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from unirl.models.denoising.bundle import Decoder, Encoder, NetworkDenoiser, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.models.denoising.text_encoders import longer_than, tokenize
from unirl.models.denoising.vae import KLBundle, from_unit, to_unit
from unirl.models.loading.checkpoint import JOINT_ATTENTION, DiffusersFamily, ModelConfigs, family_files
from unirl.models.loading.toy_tokenizers import clip_tokenizer, t5_tokenizer
from unirl.sde.guidance import Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = Path(__file__).parent
CLIP = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
"""The tokenizer of each CLIP encoder, by component name."""
CLIP_TOKENS = 77
T5, T5_TOKENIZER = "text_encoder_3", "tokenizer_3"


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. Without a VAE, the transformer works on pixels in [-1, 1]."""
    transformer, vae = configs.components["transformer"], configs.components.get("vae")
    return LatentFacts(
        family="sd3",
        block_class_names=("JointTransformerBlock",),
        lora_targets=JOINT_ATTENTION,
        latent_channels=transformer["in_channels"],
        vae_scale=1 if vae is None else 2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=transformer["patch_size"],
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["pooled_projection_dim"],
        extra_text_tokens=CLIP_TOKENS,
    )


SD3 = DiffusersFamily(
    name="sd3",
    pipeline="StableDiffusion3Pipeline",
    classes={
        "transformer": "diffusers.SD3Transformer2DModel",
        "text_encoder": "transformers.CLIPTextModelWithProjection",
        "text_encoder_2": "transformers.CLIPTextModelWithProjection",
        "text_encoder_3": "transformers.T5EncoderModel",
        "vae": "diffusers.AutoencoderKL",
    },
    tokenizers=("tokenizer", "tokenizer_2", "tokenizer_3"),
    optional=("text_encoder", "text_encoder_2", "text_encoder_3", "vae"),
    facts=facts,
    toy_tokenizers=lambda: {
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": clip_tokenizer(),
        "tokenizer_3": t5_tokenizer(),
    },
    shipped={name: FOLDER / name for name in ("quickstart", "quickstart_letters")},
    **family_files(__file__),
)


class SD3Denoiser(NetworkDenoiser):
    """The transformer (an MMDiT) as a velocity field."""

    matrix: ClassVar[str] = "pos_embed.proj.weight"

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.pooled is not None
        dtype = self.dtype
        v = self.network(
            hidden_states=x.to(dtype),
            # The timestep stays in fp32: bf16 has 8 bits of precision, too few for 1000 sigma.
            timestep=self.timestep_scale * sigma,
            encoder_hidden_states=text.embeds.to(dtype),
            pooled_projections=text.pooled.to(dtype),
            return_dict=False,
        )[0]
        return v.float()


@dataclass(frozen=True)
class SD3TextEncoder:
    """The frozen text encoders that a checkpoint has.

    A checkpoint with both CLIP encoders and no T5 gets zeros in place of T5's tokens, as in diffusers. A checkpoint
    with CLIP-L alone gets no T5 tokens.
    """

    modules: Mapping[str, nn.Module]
    """The encoders by component name; other components are ignored."""
    tokenizers: Mapping[str, PreTrainedTokenizerBase]
    joint_dim: int
    """Width of the tokens that the transformer reads."""

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(name for name in (*CLIP, T5) if name in self.modules)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts T5 tokens."""
        clip = [self._clip(name, texts) for name in CLIP if name in self.modules]
        tokens = torch.cat([hidden for hidden, _ in clip], dim=-1)
        tokens = nn.functional.pad(tokens, (0, self.joint_dim - tokens.shape[-1]))
        if len(clip) == len(CLIP):
            tokens = torch.cat([tokens, self._t5(texts, max_sequence_length, tokens)], dim=1)
        return TextEmbedCondition(embeds=tokens, pooled=torch.cat([pooled for _, pooled in clip], dim=-1))

    def cuts(self, texts: Sequence[str], max_sequence_length: int) -> list[bool]:
        if T5 in self.modules:
            return longer_than(self.tokenizers[T5_TOKENIZER], texts, max_sequence_length)
        tokenizer = self.tokenizers["tokenizer"]
        return longer_than(tokenizer, texts, tokenizer.model_max_length)

    def _clip(self, name: str, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Penultimate hidden states [B, 77, D] and projection [B, D'] of one CLIP encoder."""
        encoder, tokenizer = self.modules[name], self.tokenizers[CLIP[name]]
        length, device = self.tokenizers["tokenizer"].model_max_length, next(encoder.parameters()).device
        out = encoder(tokenize(tokenizer, texts, length, device).input_ids, output_hidden_states=True)
        return out.hidden_states[-2], out[0]

    def _t5(self, texts: Sequence[str], length: int, clip_tokens: Tensor) -> Tensor:
        """T5 states [B, length, joint], or zeros if the checkpoint has no T5."""
        if T5 not in self.modules:
            return clip_tokens.new_zeros(len(texts), length, self.joint_dim)
        tokens = tokenize(self.tokenizers[T5_TOKENIZER], texts, length, clip_tokens.device)
        hidden: Tensor = self.modules[T5](tokens.input_ids)[0]
        return hidden.to(clip_tokens.dtype)


class PixelRange:
    """Decoder and encoder of a model without a VAE, whose latents are pixels in [-1, 1]."""

    components: tuple[str, ...] = ()

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [0, 1] of latents of the same shape."""
        return to_unit(latents)

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of pixels [B, 3, H, W] in [0, 1], of the same shape."""
        return from_unit(pixels)


class SD3Bundle(KLBundle):
    """Transformer, VAE, CLIP-L, CLIP-G and T5. Components that model_index.json does not name are absent."""

    family: ClassVar[DiffusersFamily] = SD3
    denoiser_class: ClassVar[type[NetworkDenoiser]] = SD3Denoiser

    def text_encoder(self) -> TextEncoder:
        self.require([name for name in (*CLIP, T5) if name in self.configs], "encode text")
        joint_dim = self.configs.components["transformer"]["joint_attention_dim"]
        return SD3TextEncoder(self.modules, self.tokenizers, joint_dim)

    def decoder(self) -> Decoder:
        return super().decoder() if "vae" in self.configs else PixelRange()

    def encoder(self) -> Encoder:
        return super().encoder() if "vae" in self.configs else PixelRange()


class SD3Pipeline(DiffusersPipeline[SD3Bundle]):
    """Text to image with Stable Diffusion 3."""

    def call_arguments(self, texts: Sequence[str], x_T: Tensor, params: DiffusionSamplingParams) -> dict[str, object]:  # noqa: N803
        """With our embeddings, and latents as the result, for a model that lacks an encoder or the VAE."""
        arguments = super().call_arguments(texts, x_T, params)
        if all(name in self.bundle.modules for name in (*CLIP, T5, "vae")):
            return arguments
        length, negatives = params.max_sequence_length, [params.negative_prompt] * len(texts)
        positive, negative = self.embed(texts, length), self.embed(negatives, length)
        return arguments | {
            "prompt": None,
            "prompt_embeds": positive.embeds,
            "pooled_prompt_embeds": positive.pooled,
            "negative_prompt": None,
            "negative_prompt_embeds": negative.embeds,
            "negative_pooled_prompt_embeds": negative.pooled,
            # Only validated, since the latents are given.
            "height": None,
            "width": None,
            "output_type": "latent",
        }
