"""Stable Diffusion 3 and 3.5. Esser et al. 2024 (arXiv:2403.03206).

The text encoders give the transformer

    tokens  [B, 77 + L, joint] = pad(CLIP-L states | CLIP-G states)  ++  T5 states,     L = max_sequence_length
    pooled  [B, D']            = CLIP-L projection | CLIP-G projection

which equals diffusers' `StableDiffusion3Pipeline.encode_prompt`. The CLIP states are those before the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unirl.models.denoising.bundle import Decoder, DiffusersBundle, Encoder, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.vae import KLDecoder, KLEncoder, from_unit, to_unit
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs, read_configs
from unirl.models.loading.toy_tokenizers import clip_tokenizer, t5_tokenizer
from unirl.sde.guidance import Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

FOLDER = Path(__file__).parent
CLIP = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
"""The tokenizer of each CLIP encoder, by component name."""
T5, T5_TOKENIZER = "text_encoder_3", "tokenizer_3"
LORA_TARGETS = tuple(
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. Without a VAE, the transformer works on pixels in [-1, 1]."""
    transformer, vae = configs.components["transformer"], configs.components.get("vae")
    return LatentFacts(
        family="sd3",
        block_class_names=("JointTransformerBlock",),
        lora_targets=LORA_TARGETS,
        latent_channels=transformer["in_channels"],
        vae_scale=1 if vae is None else 2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=transformer["patch_size"],
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["pooled_projection_dim"],
    )


def toy_tokenizers() -> dict[str, Any]:
    """Character-level tokenizers, by component name."""
    return {"tokenizer": clip_tokenizer(), "tokenizer_2": clip_tokenizer(), T5_TOKENIZER: t5_tokenizer()}


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
    toys=read_configs(FOLDER / "toy.json"),
    toy_tokenizers=toy_tokenizers,
    published=read_configs(FOLDER / "published.json"),
    shipped={name: FOLDER / name for name in ("quickstart", "quickstart_letters")},
)


class SD3Denoiser:
    """The transformer (an MMDiT) as a velocity field."""

    def __init__(self, transformer: Any, timestep_scale: float) -> None:
        self.transformer = transformer  # diffusers' SD3Transformer2DModel, which has no types
        self.timestep_scale = timestep_scale

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given the condition `text`."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.pooled is not None
        dtype = self.transformer.pos_embed.proj.weight.dtype
        v = self.transformer(
            hidden_states=x.to(dtype),
            # The timestep stays in fp32: bf16 has 8 bits of precision, too few for 1000 sigma.
            timestep=self.timestep_scale * sigma,
            encoder_hidden_states=text.embeds.to(dtype),
            pooled_projections=text.pooled.to(dtype),
            return_dict=False,
        )[0]
        return v.float()


class SD3TextEncoder:
    """The frozen text encoders that a checkpoint has.

    A checkpoint with both CLIP encoders and no T5 gets zeros in place of T5's tokens, as in diffusers. A checkpoint
    with CLIP-L alone gets no T5 tokens.
    """

    def __init__(self, modules: Mapping[str, nn.Module], tokenizers: Mapping[str, Any], joint_dim: int) -> None:
        """
        Args:
            modules: the encoders by component name; other components are ignored.
            joint_dim: width of the tokens that the transformer reads.
        """
        self.modules = modules
        self.tokenizers = tokenizers
        self.joint_dim = joint_dim
        self.components = tuple(name for name in (*CLIP, T5) if name in modules)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts T5 tokens."""
        clip = [self._clip(name, list(texts)) for name in CLIP if name in self.modules]
        tokens = torch.cat([hidden for hidden, _ in clip], dim=-1)
        tokens = nn.functional.pad(tokens, (0, self.joint_dim - tokens.shape[-1]))
        if len(clip) == len(CLIP):
            tokens = torch.cat([tokens, self._t5(list(texts), max_sequence_length, tokens)], dim=1)
        return TextEmbedCondition(embeds=tokens, pooled=torch.cat([pooled for _, pooled in clip], dim=-1))

    def _clip(self, name: str, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Penultimate hidden states [B, 77, D] and projection [B, D'] of one CLIP encoder."""
        encoder = self.modules[name]
        ids = _token_ids(self.tokenizers[CLIP[name]], texts, self.tokenizers["tokenizer"].model_max_length)
        out = encoder(ids.to(next(encoder.parameters()).device), output_hidden_states=True)
        return out.hidden_states[-2], out[0]

    def _t5(self, texts: list[str], length: int, clip_tokens: Tensor) -> Tensor:
        """T5 states [B, length, joint], or zeros if the checkpoint has no T5."""
        if T5 not in self.modules:
            return clip_tokens.new_zeros(len(texts), length, self.joint_dim)
        ids = _token_ids(self.tokenizers[T5_TOKENIZER], texts, length)
        hidden: Tensor = self.modules[T5](ids.to(clip_tokens.device))[0]
        return hidden.to(clip_tokens.dtype)


def _token_ids(tokenizer: Any, texts: list[str], length: int) -> Tensor:
    """[B, length] ids, truncated or padded."""
    ids: Tensor = tokenizer(
        texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


class PixelDecoder:
    """The decoder of a model without a VAE, whose latents are pixels in [-1, 1]."""

    components: tuple[str, ...] = ()

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [0, 1] of latents of the same shape."""
        return to_unit(latents)


class PixelEncoder:
    """The encoder of a model without a VAE, whose latents are pixels in [-1, 1]."""

    components: tuple[str, ...] = ()

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of pixels [B, 3, H, W] in [0, 1], of the same shape."""
        return from_unit(pixels)


class SD3Bundle(DiffusersBundle):
    """Transformer, VAE, CLIP-L, CLIP-G and T5. Components that model_index.json does not name are absent."""

    family: ClassVar[DiffusersFamily] = SD3

    def denoiser(self) -> SD3Denoiser:
        """The transformer as a velocity field."""
        return SD3Denoiser(self.trainable(), self.facts.timestep_scale)

    def text_encoder(self) -> TextEncoder:
        """The text encoders that this checkpoint has."""
        self.require([name for name in (*CLIP, T5) if name in self.configs], "encode text")
        joint_dim = self.configs.components["transformer"]["joint_attention_dim"]
        return SD3TextEncoder(self.modules, self.tokenizers, joint_dim)

    def decoder(self) -> Decoder:
        """The VAE's decoder, or a change of range for a model on pixels."""
        if "vae" not in self.configs:
            return PixelDecoder()
        self.require(("vae",), "decode latents")
        return KLDecoder(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The VAE's encoder, or a change of range for a model on pixels."""
        if "vae" not in self.configs:
            return PixelEncoder()
        self.require(("vae",), "encode images")
        return KLEncoder(self.modules["vae"])


class SD3Pipeline(DiffusersPipeline[SD3Bundle]):
    """Text to image with Stable Diffusion 3."""

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """Pixels, or latents from our embeddings for a model that lacks an encoder or the VAE."""
        complete = all(name in self.bundle.modules for name in (*CLIP, T5, "vae"))
        result: Tensor = plain(
            **(_prompts(texts, params) if complete else self._embeddings(texts, params)),
            # Only validated, since the latents are given; diffusers assumes 8 pixels per latent element.
            height=x_T.shape[-2] * plain.vae_scale_factor,
            width=x_T.shape[-1] * plain.vae_scale_factor,
            guidance_scale=params.guidance_scale,
            num_inference_steps=params.num_inference_steps,
            sigmas=unshifted_sigmas(params.num_inference_steps),
            latents=x_T,
            output_type="pt" if complete else "latent",
        ).images
        return result

    def _embeddings(self, texts: Sequence[str], params: DiffusionSamplingParams) -> dict[str, Tensor | None]:
        length = params.max_sequence_length
        positive, negative = self.embed(texts, length), self.embed([params.negative_prompt] * len(texts), length)
        return {
            "prompt_embeds": positive.embeds,
            "pooled_prompt_embeds": positive.pooled,
            "negative_prompt_embeds": negative.embeds,
            "negative_pooled_prompt_embeds": negative.pooled,
        }


def _prompts(texts: Sequence[str], params: DiffusionSamplingParams) -> dict[str, object]:
    return {
        "prompt": list(texts),
        "negative_prompt": [params.negative_prompt] * len(texts),
        "max_sequence_length": params.max_sequence_length,
    }
