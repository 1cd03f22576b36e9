"""FLUX.1. Black Forest Labs 2024 (github.com/black-forest-labs/flux).

The transformer reads patches of 2 x 2 latent elements as tokens. The text encoders give it

    tokens  [B, L, 4096] = T5 states, padding included
    pooled  [B, 768]     = the CLIP-L state at the end of the text

which equals diffusers' `FluxPipeline.encode_prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.vae import KLBundle
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs, read_configs
from unirl.models.loading.toy_tokenizers import clip_tokenizer, t5_tokenizer
from unirl.sde.guidance import GUIDANCE, EmbeddedGuidance, NoGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, ScaleCondition, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

FOLDER = Path(__file__).parent
PATCH = 2
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
LORA_TARGETS = (
    *(f"attn.{name}" for name in ATTENTION),
    *(f"{part}.net.{name}" for part in ("ff", "ff_context") for name in ("0.proj", "2")),
)


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. A transformer without an input for the guidance scale (schnell) has no guidance."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    _check_text_to_image(transformer["in_channels"], vae["latent_channels"])
    return LatentFacts(
        family="flux1",
        block_class_names=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        lora_targets=LORA_TARGETS,
        latent_channels=vae["latent_channels"],
        vae_scale=2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=PATCH,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        timestep_scale=1.0,
        guidance=EmbeddedGuidance() if transformer.get("guidance_embeds") else NoGuidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["pooled_projection_dim"],
    )


def _check_text_to_image(in_channels: int, latent_channels: int) -> None:
    """Raises NotFoundError (4001) for Fill, Canny and Depth, whose transformer reads more than the sample."""
    if in_channels != PATCH**2 * latent_channels:
        raise NotFoundError(
            f"the checkpoint's transformer reads tokens of {in_channels} numbers, and a FLUX.1 model of text to image "
            f"reads {PATCH**2 * latent_channels} ({PATCH} x {PATCH} x {latent_channels} channels of its VAE). Fill, "
            "Canny and Depth are not supported. Use black-forest-labs/FLUX.1-dev"
        )


def toy_tokenizers() -> dict[str, Any]:
    """Character-level tokenizers, by component name."""
    return {"tokenizer": clip_tokenizer(), "tokenizer_2": t5_tokenizer()}


FLUX1 = DiffusersFamily(
    name="flux1",
    pipeline="FluxPipeline",
    classes={
        "transformer": "diffusers.FluxTransformer2DModel",
        "text_encoder": "transformers.CLIPTextModel",
        "text_encoder_2": "transformers.T5EncoderModel",
        "vae": "diffusers.AutoencoderKL",
    },
    tokenizers=("tokenizer", "tokenizer_2"),
    facts=facts,
    toys=read_configs(FOLDER / "toy.json"),
    toy_tokenizers=toy_tokenizers,
    published=read_configs(FOLDER / "published.json"),
)


class Flux1Denoiser:
    """The transformer as a velocity field."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer  # diffusers' FluxTransformer2DModel, which has no types

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given `text` and, if the network reads it, a scale."""
        text, scale = conditions["text"], conditions.get(GUIDANCE)
        assert isinstance(text, TextEmbedCondition) and text.pooled is not None
        assert scale is None or isinstance(scale, ScaleCondition)
        rows, columns = x.shape[-2] // PATCH, x.shape[-1] // PATCH
        dtype = self.transformer.x_embedder.weight.dtype
        v = self.transformer(
            hidden_states=tokens_of(x).to(dtype),
            timestep=sigma,  # the transformer multiplies timestep and guidance by 1000
            guidance=None if scale is None else scale.scale,
            encoder_hidden_states=text.embeds.to(dtype),
            pooled_projections=text.pooled.to(dtype),
            txt_ids=torch.zeros(text.embeds.shape[1], 3, device=x.device),
            img_ids=_positions(rows, columns, x.device),
            return_dict=False,
        )[0]
        return latents_of(v.float(), rows, columns)


def tokens_of(x: Tensor) -> Tensor:
    """[B, H W / 4, 4 C] tokens of latents [B, C, H, W], row by row; each token is ordered (C, 2, 2)."""
    return pixel_unshuffle(x, PATCH).flatten(2).transpose(1, 2)


def latents_of(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """[B, C, 2 rows, 2 columns] latents of tokens [B, rows columns, 4 C]."""
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, columns)), PATCH)


def _positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """[rows columns, 3] fp32 position (0, row, column) of each token."""
    zero = torch.zeros(1, device=device)
    row, column = torch.arange(rows, device=device).float(), torch.arange(columns, device=device).float()
    return torch.cartesian_prod(zero, row, column)


class Flux1TextEncoder:
    """The frozen CLIP-L and T5."""

    components: tuple[str, ...] = ("text_encoder", "text_encoder_2")

    def __init__(self, modules: Mapping[str, nn.Module], tokenizers: Mapping[str, Any]) -> None:
        """
        Args:
            modules: the encoders by component name; other components are ignored.
        """
        self.clip, self.t5 = (modules[name] for name in self.components)
        self.clip_tokenizer, self.t5_tokenizer = tokenizers["tokenizer"], tokenizers["tokenizer_2"]

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts T5 tokens."""
        device = next(self.t5.parameters()).device
        clip_ids = _token_ids(self.clip_tokenizer, texts, self.clip_tokenizer.model_max_length)
        t5_ids = _token_ids(self.t5_tokenizer, texts, max_sequence_length)
        pooled = self.clip(clip_ids.to(device)).pooler_output
        return TextEmbedCondition(embeds=self.t5(t5_ids.to(device))[0], pooled=pooled)


def _token_ids(tokenizer: Any, texts: Sequence[str], length: int) -> Tensor:
    """[B, length] ids, truncated or padded."""
    ids: Tensor = tokenizer(
        list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


class Flux1Bundle(KLBundle):
    """Transformer, CLIP-L, T5 and VAE."""

    family: ClassVar[DiffusersFamily] = FLUX1

    def denoiser(self) -> Flux1Denoiser:
        """The transformer as a velocity field."""
        return Flux1Denoiser(self.trainable())

    def text_encoder(self) -> TextEncoder:
        """CLIP-L and T5."""
        self.require(Flux1TextEncoder.components, "encode text")
        return Flux1TextEncoder(self.modules, self.tokenizers)


class Flux1Pipeline(DiffusersPipeline[Flux1Bundle]):
    """Text to image with FLUX.1. The network reads the guidance scale as an input; negative prompts are not used."""

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
            height=params.height,
            width=params.width,
            guidance_scale=params.guidance_scale,
            num_inference_steps=params.num_inference_steps,
            sigmas=unshifted_sigmas(params.num_inference_steps),
            latents=tokens_of(x_T),
            max_sequence_length=params.max_sequence_length,
            output_type="pt",
        ).images
        return result
