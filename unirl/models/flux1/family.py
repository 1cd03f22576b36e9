"""FLUX.1. Black Forest Labs 2024 (github.com/black-forest-labs/flux).

The transformer reads patches of 2 x 2 latent elements as tokens. The text encoders give it

    tokens  [B, L, 4096] = T5 states, padding included
    pooled  [B, 768]     = the CLIP-L state at the end of the text

which equals diffusers' `FluxPipeline.encode_prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import NetworkDenoiser, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.models.denoising.packing import packed, unpacked
from unirl.models.denoising.text_encoders import longer_than, tokenize
from unirl.models.denoising.vae import KLBundle
from unirl.models.loading.checkpoint import JOINT_BLOCK, DiffusersFamily, ModelConfigs, family_files
from unirl.models.loading.toy_tokenizers import clip_tokenizer, t5_tokenizer
from unirl.sde.guidance import GUIDANCE, EmbeddedGuidance, NoGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, ScaleCondition, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from transformers import CLIPTextModel, PreTrainedTokenizerBase, T5EncoderModel

PATCH = 2


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. A transformer without an input for the guidance scale (schnell) has no guidance.

    Raises NotFoundError (4001) for Fill, Canny and Depth, whose transformer reads more than the sample.
    """
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    in_channels, latent_channels = transformer["in_channels"], vae["latent_channels"]
    if in_channels != PATCH**2 * latent_channels:
        raise NotFoundError(
            f"the checkpoint's transformer reads tokens of {in_channels} numbers, and a FLUX.1 model of text to image "
            f"reads {PATCH**2 * latent_channels} ({PATCH} x {PATCH} x {latent_channels} channels of its VAE). Fill, "
            "Canny and Depth are not supported. Use black-forest-labs/FLUX.1-dev"
        )
    return LatentFacts(
        family="flux1",
        block_class_names=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        lora_targets=JOINT_BLOCK,
        latent_channels=latent_channels,
        vae_scale=2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=PATCH,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        timestep_scale=1.0,
        guidance=EmbeddedGuidance() if transformer.get("guidance_embeds") else NoGuidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["pooled_projection_dim"],
    )


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
    toy_tokenizers=lambda: {"tokenizer": clip_tokenizer(), "tokenizer_2": t5_tokenizer()},
    **family_files(__file__),
)


class Flux1Denoiser(NetworkDenoiser):
    """The transformer as a velocity field."""

    matrix: ClassVar[str] = "x_embedder.weight"
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks", "single_transformer_blocks")

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given `text` and, if the network reads it, a scale."""
        text, scale = conditions["text"], conditions.get(GUIDANCE)
        assert isinstance(text, TextEmbedCondition) and text.pooled is not None
        assert scale is None or isinstance(scale, ScaleCondition)
        sides = (1, x.shape[-2] // PATCH, x.shape[-1] // PATCH)
        axes = (torch.arange(count, device=x.device).float() for count in sides)
        dtype = self.dtype
        v = self.network(
            hidden_states=packed(x, PATCH).to(dtype),
            timestep=sigma,  # the transformer multiplies timestep and guidance by 1000
            guidance=None if scale is None else scale.scale,
            encoder_hidden_states=text.embeds.to(dtype),
            pooled_projections=text.pooled.to(dtype),
            txt_ids=torch.zeros(text.embeds.shape[1], 3, device=x.device),
            img_ids=torch.cartesian_prod(*axes),  # (0, row, column) of each token
            return_dict=False,
        )[0]
        return unpacked(v.float(), x.shape, PATCH)


class Flux1TextEncoder:
    """The frozen CLIP-L and T5."""

    components: tuple[str, ...] = ("text_encoder", "text_encoder_2")

    def __init__(
        self, clip: CLIPTextModel, t5: T5EncoderModel, tokenizers: Mapping[str, PreTrainedTokenizerBase]
    ) -> None:
        self.clip, self.t5 = clip, t5
        self.clip_tokenizer, self.t5_tokenizer = tokenizers["tokenizer"], tokenizers["tokenizer_2"]

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts T5 tokens."""
        device = self.t5.device
        clip_tokens = tokenize(self.clip_tokenizer, texts, self.clip_tokenizer.model_max_length, device)
        t5_tokens = tokenize(self.t5_tokenizer, texts, max_sequence_length, device)
        pooled = self.clip(clip_tokens.input_ids).pooler_output
        return TextEmbedCondition(embeds=self.t5(t5_tokens.input_ids)[0], pooled=pooled)

    def cuts(self, texts: Sequence[str], max_sequence_length: int) -> list[bool]:
        return longer_than(self.t5_tokenizer, texts, max_sequence_length)


class Flux1Bundle(KLBundle):
    """Transformer, CLIP-L, T5 and VAE."""

    family: ClassVar[DiffusersFamily] = FLUX1
    denoiser_class: ClassVar[type[NetworkDenoiser]] = Flux1Denoiser

    def text_encoder(self) -> TextEncoder:
        clip, t5 = self.require(Flux1TextEncoder.components, "encode text")
        return Flux1TextEncoder(clip, t5, self.tokenizers)


class Flux1Pipeline(DiffusersPipeline[Flux1Bundle]):
    """Text to image with FLUX.1. The network reads the guidance scale as an input; negative prompts are not used."""

    def call_arguments(self, texts: Sequence[str], x_T: Tensor, params: DiffusionSamplingParams) -> dict[str, object]:  # noqa: N803
        return super().call_arguments(texts, x_T, params) | {"latents": packed(x_T, PATCH)}
