"""Qwen-Image. Wu et al. 2025 (arXiv:2508.02324). Qwen-Image-Edit shares most of it.

The transformer reads the last hidden states of Qwen2.5-VL for a chat around the prompt:

    chat    [opening | prompt | closing | padding]  --Qwen2.5-VL-->  [B, num_dropped + L, D]
    tokens  [B, L, D] without the opening, zero at padding

These tensors equal those of diffusers' `encode_prompt`, except that all prompts have the same length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import Decoder, DiffusersBundle, Encoder, NetworkDenoiser, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.models.denoising.packing import packed, unpacked
from unirl.models.denoising.ragged import call
from unirl.models.denoising.text_encoders import longer_than, tokenize
from unirl.models.denoising.vae import CausalVAE
from unirl.models.loading.checkpoint import JOINT_ATTENTION, DiffusersFamily, ModelConfigs, family_files
from unirl.models.loading.toy_tokenizers import qwen_tokenizer
from unirl.sde.guidance import NormCorrectedGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from diffusers import QwenImageTransformer2DModel
    from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

PIPELINE = "QwenImagePipeline"
EDIT_PIPELINE, EDIT_PLUS_PIPELINE = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
"""diffusers' pipelines of Qwen-Image-Edit, for one condition image and for one to three."""
EDIT_CLASSES = (
    "unirl.models.qwen_image_edit.family.QwenImageEditBundle and "
    "unirl.models.qwen_image_edit.family.QwenImageEditPipeline"
)
COMPONENT_CLASSES = {
    "transformer": "diffusers.QwenImageTransformer2DModel",
    "text_encoder": "transformers.Qwen2_5_VLForConditionalGeneration",
    "vae": "diffusers.AutoencoderKLQwenImage",
}
TOY_SEED = 20261
UNSUPPORTED_OPTIONS = ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope")
"""Options of the transformer class that only other models set, and that require further inputs."""


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. Raises NotFoundError (4001) for a layered or distilled model."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    for option in UNSUPPORTED_OPTIONS:
        if transformer.get(option):
            raise NotFoundError(
                f"the transformer's configuration has {option}={transformer[option]}: that is another model than "
                "Qwen-Image or Qwen-Image-Edit (layered or distilled), which is not supported. Use another checkpoint"
            )
    patch_size = transformer["patch_size"]
    return LatentFacts(
        family="qwen_image",
        block_class_names=("QwenImageTransformerBlock",),
        lora_targets=JOINT_ATTENTION,
        latent_channels=transformer["in_channels"] // patch_size**2,
        vae_scale=2 ** len(vae["temperal_downsample"]),
        patch_size=patch_size,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        timestep_scale=1.0,
        guidance=NormCorrectedGuidance(patch_size=patch_size),
        batch_multiple=batch_multiple,
        text_width=transformer["joint_attention_dim"],
        text_is_masked=True,
    )


# The chat around a prompt

CLOSING = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Template:
    """The beginning of a chat."""

    opening: str
    num_dropped: int
    """Number of tokens of the opening, which the transformer does not read."""


def chat_opening(instruction: str) -> str:
    """The system's instruction and the start of the user's message."""
    return f"<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n"


TEMPLATE = Template(
    chat_opening(
        "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
        "objects and background:"
    ),
    34,
)

# The toy's tokenizer has a token for each word of the chat, so that the opening has as many tokens as in the real one.

WORD = re.compile(r"'s|\),| ?\w+| \(")


def toy_tokenizer(opening: str) -> PreTrainedTokenizerBase:
    """A Qwen tokenizer with one token per byte, special token and word of the chat, with its leading space."""
    tokenizer = qwen_tokenizer()
    texts = (re.sub(r"<\|\w+\|>", "\n", text) for text in (opening, CLOSING))
    tokenizer.add_tokens(list(dict.fromkeys(word for text in texts for word in WORD.findall(text))))
    return tokenizer


def toy_tokenizers() -> Mapping[str, PreTrainedTokenizerBase]:
    """The tokenizer of Qwen2.5-VL."""
    return {"tokenizer": toy_tokenizer(TEMPLATE.opening)}


QWEN_IMAGE = DiffusersFamily(
    name="qwen_image",
    vae_in_bf16=True,
    pipeline=PIPELINE,
    foreign_pipelines={EDIT_PIPELINE: EDIT_CLASSES, EDIT_PLUS_PIPELINE: EDIT_CLASSES},
    classes=COMPONENT_CLASSES,
    facts=facts,
    toy_tokenizers=toy_tokenizers,
    seed=TOY_SEED,
    **family_files(__file__),
)


class QwenImageDenoiser(NetworkDenoiser):
    """The transformer (an MMDiT) as a velocity field."""

    matrix: ClassVar[str] = "img_in.weight"

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.mask is not None
        latents = [x, *self.references(conditions)]
        tokens = [packed(z, self.facts.patch_size) for z in latents]
        shapes = [(1, z.shape[-2] // self.facts.patch_size, z.shape[-1] // self.facts.patch_size) for z in latents]
        dtype = self.dtype
        inputs = torch.cat(tokens, dim=1).to(dtype), sigma.to(dtype), text.embeds.to(dtype), text.mask
        v = call(self.network, partial(network_velocity, shapes=shapes), *inputs)
        return unpacked(v[:, : tokens[0].shape[1]].float(), x.shape, self.facts.patch_size)

    def references(self, conditions: Conditions) -> Sequence[Tensor]:
        """Latents [B, C, H, W] of each condition image, whose tokens follow the sample's. Qwen-Image has none."""
        return ()


def network_velocity(
    network: QwenImageTransformer2DModel,
    tokens: Tensor,
    sigma: Tensor,
    text: Tensor,
    mask: Tensor,
    *,
    shapes: Sequence[tuple[int, int, int]],
) -> Tensor:
    """The network's velocity [B, tokens, p^2 C]: its own forward, without copies of lengths and indices to the device.

    Args:
        sigma: [B] in the dtype of the network, as in its own pipeline.
        shapes: frames, rows and columns of the sample, and of each condition image.
    """
    kinds = None
    if network.zero_cond_t:  # condition images get the timestep 0
        sigma = torch.cat([sigma, torch.zeros_like(sigma)])
        kinds = torch.zeros(tokens.shape[:2], dtype=torch.int, device=tokens.device)
        kinds[:, math.prod(shapes[0]) :] = 1
    states, context = network.img_in(tokens), network.txt_in(network.txt_norm(text))
    temb = network.time_text_embed(sigma, states)
    rotations = network.pos_embed([list(shapes)], max_txt_seq_len=text.shape[1], device=tokens.device)
    for block in network.transformer_blocks:
        context, states = block(states, context, mask, temb, rotations, None, kinds)
    if network.zero_cond_t:
        temb = temb.chunk(2)[0]
    velocity: Tensor = network.proj_out(network.norm_out(states, temb))
    return velocity


@dataclass(frozen=True)
class QwenImageTextEncoder:
    """The frozen Qwen2.5-VL, which reads text."""

    encoder: Qwen2_5_VLForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    template: Template
    components: tuple[str, ...] = field(default=("text_encoder",), kw_only=True)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts the tokens of the prompt and of the closing."""
        return self._states(self._tokens(texts, self.template.opening, max_sequence_length))

    def _tokens(self, texts: Sequence[str], before: str, length: int) -> dict[str, Tensor]:
        """Ids and mask [B, tokens of `before` + length] of chats that begin with `before`."""
        texts, length = self._chats(texts, before), length + len(self.tokenizer(before).input_ids)
        tokens = tokenize(self.tokenizer, texts, length, self.encoder.device, padding_side="right")
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}

    def cuts(self, texts: Sequence[str], max_sequence_length: int) -> list[bool]:
        before = self.template.opening
        length = max_sequence_length + len(self.tokenizer(before).input_ids)
        return longer_than(self.tokenizer, self._chats(texts, before), length)

    def _chats(self, texts: Sequence[str], before: str) -> list[str]:
        return [f"{before}{text or ' '}{CLOSING}" for text in texts]

    def _states(self, inputs: Mapping[str, Tensor]) -> TextEmbedCondition:
        """The encoder's last hidden states for `inputs`, without the opening."""
        device = self.encoder.device
        # `encoder.model` runs without the head, which would compute logits over the vocabulary for every token.
        hidden = self.encoder.model(**{name: value.to(device) for name, value in inputs.items()}, use_cache=False)[0]
        mask = inputs["attention_mask"][:, self.template.num_dropped :].to(device).bool()
        embeds = hidden[:, self.template.num_dropped :].masked_fill(~mask[:, :, None], 0)
        return TextEmbedCondition(embeds=embeds, mask=mask)


class QwenImageVAE(CausalVAE):
    """diffusers' AutoencoderKLQwenImage, a video VAE, on one frame."""

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [0, 1] of latents [B, C, H / 8, W / 8]."""
        return super().decode(latents[:, :, None])[:, :, 0]

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, H / 8, W / 8] of pixels [B, 3, H, W] in [0, 1]."""
        return super().encode(pixels)[:, :, 0]


class QwenImageBundle(DiffusersBundle):
    """Transformer, Qwen2.5-VL and VAE."""

    family: ClassVar[DiffusersFamily] = QWEN_IMAGE
    denoiser_class: ClassVar[type[NetworkDenoiser]] = QwenImageDenoiser

    def text_encoder(self) -> TextEncoder:
        [encoder] = self.require(("text_encoder",), "encode text")
        return QwenImageTextEncoder(encoder, self.tokenizers["tokenizer"], TEMPLATE)

    def decoder(self) -> Decoder:
        return QwenImageVAE(*self.require(("vae",), "decode latents"))

    def encoder(self) -> Encoder:
        return QwenImageVAE(*self.require(("vae",), "encode images"))


class QwenImagePipeline(DiffusersPipeline[QwenImageBundle]):
    """Text to image with Qwen-Image."""

    def call_arguments(self, texts: Sequence[str], x_T: Tensor, params: DiffusionSamplingParams) -> dict[str, object]:  # noqa: N803
        """Without the guidance scale that diffusers' class has for distilled models."""
        return super().call_arguments([text or " " for text in texts], x_T, params) | {
            "negative_prompt": [params.negative_prompt or " "] * len(texts),
            "guidance_scale": None,
            "true_cfg_scale": params.guidance_scale,
            "latents": packed(x_T, 2),  # diffusers uses 2 whatever the configuration says
        }
