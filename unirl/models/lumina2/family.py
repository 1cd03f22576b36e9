"""Lumina-Image 2.0. Qin et al. 2025 (arXiv:2503.21758).

The transformer reads the hidden states of Gemma 2 before its last layer, as diffusers' `Lumina2Pipeline.encode_prompt`
gives them. Prompts follow a template and negative prompts do not, so the pipeline adds the template, not the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from unirl.config.errors import InvalidValueError
from unirl.models.denoising.bundle import NetworkDenoiser, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.ragged import Rotations, call, patches, unpatched
from unirl.models.denoising.text_encoders import longer_than, tokenize
from unirl.models.denoising.vae import KLBundle
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs, family_files
from unirl.models.loading.toy_tokenizers import gemma_tokenizer, with_pieces
from unirl.sde.guidance import LineNormGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from diffusers import Lumina2Transformer2DModel
    from transformers import Gemma2Model, PreTrainedTokenizerBase

TEMPLATE = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment "
    "based on textual prompts or user prompts. <Prompt Start> "
)
TOY_TEMPLATE_TOKENS = 3
"""Tokens of the template in the toy tokenizer."""


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
        text_is_masked=True,
    )


LUMINA2 = DiffusersFamily(
    name="lumina2",
    pipeline="Lumina2Pipeline",
    classes={
        "transformer": "diffusers.Lumina2Transformer2DModel",
        "text_encoder": "transformers.Gemma2Model",
        "vae": "diffusers.AutoencoderKL",
    },
    facts=facts,
    toy_tokenizers=lambda: {"tokenizer": with_pieces(gemma_tokenizer(), TEMPLATE, TOY_TEMPLATE_TOKENS)},
    **family_files(__file__),
)


class Lumina2Denoiser(NetworkDenoiser):
    """The transformer (a Next-DiT) as a velocity field."""

    matrix: ClassVar[str] = "x_embedder.weight"
    block_lists: ClassVar[tuple[str, ...]] = ("layers",)
    network: Lumina2Transformer2DModel

    def __init__(self, network: Lumina2Transformer2DModel, facts: LatentFacts) -> None:
        super().__init__(network, facts)
        self.rotations = Rotations(network.rope_embedder.freqs_cis)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.mask is not None
        dtype = self.dtype
        # The network's time is 0 at noise and 1 at data, and its velocity points from noise to data.
        v = call(self.network, self.toward_data, x.to(dtype), 1.0 - sigma, text.embeds.to(dtype), text.mask)
        return -v.float()

    def toward_data(
        self, network: Lumina2Transformer2DModel, x: Tensor, time: Tensor, text: Tensor, mask: Tensor
    ) -> Tensor:
        """The network's velocity [B, C, H, W]: its own forward, without cutting rows to the length of their text."""
        size, length = self.facts.patch_size, text.shape[1]
        temb, text = network.time_caption_embed(x, time, text)
        image = network.x_embedder(patches(x, size))
        text_rotations = self.rotations.of_text(length, 0, x.device).expand(len(x), -1, -1)
        # The image tokens take the position after the last text token of their row.
        image_rotations = self.rotations.of_image(mask.sum(1), x.shape[-2] // size, x.shape[-1] // size)
        for layer in network.context_refiner:
            text = layer(text, mask, text_rotations)
        for layer in network.noise_refiner:
            image = layer(image, None, image_rotations, temb)
        tokens = torch.cat([text, image], dim=1)
        rotations = torch.cat([text_rotations, image_rotations], dim=1)
        mask = pad(mask, (0, image.shape[1]), value=True)
        for layer in network.layers:
            tokens = layer(tokens, mask, rotations, temb)
        return unpatched(network.norm_out(tokens[:, length:], temb), x.shape, size)


@dataclass(frozen=True)
class Lumina2TextEncoder:
    """The frozen Gemma 2."""

    encoder: Gemma2Model
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    """The longest prompt for which the transformer has positions."""
    components: tuple[str, ...] = ("text_encoder",)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts` without changes; `max_sequence_length` includes the tokens of the template."""
        if max_sequence_length > self.max_tokens:
            raise InvalidValueError(
                f"sampling.max_sequence_length={max_sequence_length}: this model has positions for {self.max_tokens} "
                f"text tokens. Use {self.max_tokens} or fewer"
            )
        tokens = tokenize(self.tokenizer, texts, max_sequence_length, self.encoder.device, padding_side="right")
        states = self.encoder(
            tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True, use_cache=False
        ).hidden_states
        return TextEmbedCondition(embeds=states[-2], mask=tokens.attention_mask.bool())

    def cuts(self, texts: Sequence[str], max_sequence_length: int) -> list[bool]:
        return longer_than(self.tokenizer, texts, max_sequence_length)


class Lumina2Bundle(KLBundle):
    """Transformer, Gemma 2 and VAE."""

    family: ClassVar[DiffusersFamily] = LUMINA2
    denoiser_class: ClassVar[type[NetworkDenoiser]] = Lumina2Denoiser

    def text_encoder(self) -> TextEncoder:
        [encoder] = self.require(("text_encoder",), "encode text")
        num_positions = self.configs.components["transformer"]["axes_lens"][0]
        # The image tokens take the position after the last text token.
        return Lumina2TextEncoder(encoder, self.tokenizers["tokenizer"], num_positions - 1)


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
