"""Lumina-Image 2.0. Qin et al. 2025 (arXiv:2503.21758).

The transformer reads the hidden states of Gemma 2 before its last layer, as diffusers' `Lumina2Pipeline.encode_prompt`
gives them. Prompts follow a template and negative prompts do not, so the pipeline adds the template, not the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.config.errors import InvalidValueError
from unirl.models.denoising.bundle import TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.vae import KLBundle
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs, read_configs
from unirl.models.loading.toy_tokenizers import gemma_tokenizer, with_pieces
from unirl.sde.guidance import LineNormGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

FOLDER = Path(__file__).parent
TEMPLATE = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment "
    "based on textual prompts or user prompts. <Prompt Start> "
)
TOY_TEMPLATE_TOKENS = 3


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    return LatentFacts(
        family="lumina2",
        block_class_names=("Lumina2TransformerBlock",),
        lora_targets=("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        latent_channels=transformer["in_channels"],
        vae_scale=2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=transformer["patch_size"],
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=LineNormGuidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["cap_feat_dim"],
    )


def toy_tokenizers() -> dict[str, Any]:
    """A character-level Gemma tokenizer, for which the template is three tokens."""
    return {"tokenizer": with_pieces(gemma_tokenizer(), TEMPLATE, TOY_TEMPLATE_TOKENS)}


LUMINA2 = DiffusersFamily(
    name="lumina2",
    pipeline="Lumina2Pipeline",
    classes={
        "transformer": "diffusers.Lumina2Transformer2DModel",
        "text_encoder": "transformers.Gemma2Model",
        "vae": "diffusers.AutoencoderKL",
    },
    facts=facts,
    toys=read_configs(FOLDER / "toy.json"),
    toy_tokenizers=toy_tokenizers,
    published=read_configs(FOLDER / "published.json"),
)


class Lumina2Denoiser:
    """The transformer (a Next-DiT) as a velocity field, with one forward per row."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer  # diffusers' Lumina2Transformer2DModel, which has no types

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given the condition `text`."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.mask is not None
        dtype = self.transformer.x_embedder.weight.dtype
        embeds, latents = text.embeds.to(dtype), x.to(dtype)
        # The network's time is 0 at noise and 1 at data, and its velocity points from noise to data.
        time = 1.0 - sigma
        # Row by row: the transformer pads a batch to its longest prompt, so a row's bits would depend on the others.
        velocities = [
            self.transformer(
                hidden_states=latents[i : i + 1],
                timestep=time[i : i + 1],
                encoder_hidden_states=embeds[i : i + 1],
                encoder_attention_mask=text.mask[i : i + 1],
                return_dict=False,
            )[0]
            for i in range(len(x))
        ]
        return -torch.cat(velocities).float()


class Lumina2TextEncoder:
    """The frozen Gemma 2."""

    components: tuple[str, ...] = ("text_encoder",)

    def __init__(self, encoder: Any, tokenizer: Any, max_tokens: int) -> None:
        """
        Args:
            encoder: transformers' `Gemma2Model`, which has no types.
            max_tokens: the longest prompt for which the transformer has positions.
        """
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts` without changes; `max_sequence_length` includes the tokens of the template."""
        if max_sequence_length > self.max_tokens:
            raise InvalidValueError(
                f"sampling.max_sequence_length={max_sequence_length}: this model has positions for {self.max_tokens} "
                f"text tokens. Use {self.max_tokens} or fewer"
            )
        tokens = self.tokenizer(
            list(texts),
            padding="max_length",
            padding_side="right",
            max_length=max_sequence_length,
            truncation=True,
            return_tensors="pt",
        ).to(self.encoder.device)
        states = self.encoder(
            tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True, use_cache=False
        ).hidden_states
        return TextEmbedCondition(embeds=states[-2], mask=tokens.attention_mask.bool())


class Lumina2Bundle(KLBundle):
    """Transformer, Gemma 2 and VAE."""

    family: ClassVar[DiffusersFamily] = LUMINA2

    def denoiser(self) -> Lumina2Denoiser:
        """The transformer as a velocity field."""
        return Lumina2Denoiser(self.trainable())

    def text_encoder(self) -> TextEncoder:
        """Gemma 2."""
        self.require(("text_encoder",), "encode text")
        num_positions = self.configs.components["transformer"]["axes_lens"][0]
        # The image tokens take the position after the last text token.
        return Lumina2TextEncoder(self.modules["text_encoder"], self.tokenizers["tokenizer"], num_positions - 1)


class Lumina2Pipeline(DiffusersPipeline[Lumina2Bundle]):
    """Text to image with Lumina-Image 2.0."""

    def encode(
        self,
        texts: Sequence[str],
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Conditions:
        """The conditions of prompts, which follow the template that the model was trained with."""
        return super().encode([TEMPLATE + text for text in texts], params, images)

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        result: Tensor = plain(
            prompt=list(texts),
            negative_prompt=[params.negative_prompt] * len(texts),
            height=params.height,
            width=params.width,
            guidance_scale=params.guidance_scale,
            num_inference_steps=params.num_inference_steps,
            sigmas=unshifted_sigmas(params.num_inference_steps),
            latents=x_T,
            max_sequence_length=params.max_sequence_length,
            output_type="pt",
        ).images
        return result
