"""Qwen-Image. Wu et al. 2025 (arXiv:2508.02324). Qwen-Image-Edit shares most of it.

The transformer reads the last hidden states of Qwen2.5-VL for a chat around the prompt:

    chat    [opening | prompt | closing | padding]  --Qwen2.5-VL-->  [B, num_dropped + L, D]
    tokens  [B, L, D] without the opening, zero at padding

These tensors equal those of diffusers' `encode_prompt`, except that all prompts have the same length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import Decoder, DiffusersBundle, Encoder, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.stage import Denoiser
from unirl.models.denoising.vae import from_unit, to_unit
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs, read_configs
from unirl.models.loading.toy_tokenizers import qwen_tokenizer
from unirl.sde.guidance import NormCorrectedGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

FOLDER = Path(__file__).parent
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
LORA_TARGETS = tuple(
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
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
        lora_targets=LORA_TARGETS,
        latent_channels=transformer["in_channels"] // patch_size**2,
        vae_scale=2 ** len(vae["temperal_downsample"]),
        patch_size=patch_size,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        timestep_scale=1.0,
        guidance=NormCorrectedGuidance(patch_size=patch_size),
        batch_multiple=batch_multiple,
        text_width=transformer["joint_attention_dim"],
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


def nonempty(text: str) -> str:
    """`text`, or a space for the empty prompt."""
    return text or " "


TEMPLATE = Template(
    chat_opening(
        "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
        "objects and background:"
    ),
    34,
)

# The toy's tokenizer has a token for each word of the chat, so that the opening has as many tokens as in the real one.

WORD = re.compile(r"'s|\),| ?\w+| \(")


def chat_words(opening: str) -> Sequence[str]:
    """The distinct words of a chat with this opening, with their leading spaces."""
    texts = (re.sub(r"<\|\w+\|>", "\n", text) for text in (opening, CLOSING))
    return tuple(dict.fromkeys(word for text in texts for word in WORD.findall(text)))


def toy_tokenizer(opening: str) -> Any:
    """A Qwen tokenizer with one token per byte, special token and word of the chat."""
    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens(list(chat_words(opening)))
    return tokenizer


def toy_tokenizers() -> Mapping[str, Any]:
    """The tokenizer of Qwen2.5-VL."""
    return {"tokenizer": toy_tokenizer(TEMPLATE.opening)}


QWEN_IMAGE = DiffusersFamily(
    name="qwen_image",
    pipeline=PIPELINE,
    foreign_pipelines={EDIT_PIPELINE: EDIT_CLASSES, EDIT_PLUS_PIPELINE: EDIT_CLASSES},
    classes=COMPONENT_CLASSES,
    facts=facts,
    toys=read_configs(FOLDER / "toy.json"),
    toy_tokenizers=toy_tokenizers,
    published=read_configs(FOLDER / "published.json"),
    seed=TOY_SEED,
)


class QwenImageDenoiser:
    """The transformer (an MMDiT) as a velocity field."""

    def __init__(self, transformer: Any, patch_size: int) -> None:
        self.transformer = transformer  # diffusers' QwenImageTransformer2DModel, which has no types
        self.patch_size = patch_size

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given `text`."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition)
        latents = [x, *self.references(conditions)]
        tokens = [packed(z, self.patch_size) for z in latents]
        shapes = [(1, z.shape[-2] // self.patch_size, z.shape[-1] // self.patch_size) for z in latents]
        dtype = self.transformer.img_in.weight.dtype
        v = self.transformer(
            hidden_states=torch.cat(tokens, dim=1).to(dtype),
            timestep=sigma,  # the network rounds it to its dtype, as in its own pipeline
            encoder_hidden_states=text.embeds.to(dtype),
            encoder_hidden_states_mask=text.mask,
            img_shapes=[shapes] * len(x),
            return_dict=False,
        )[0]
        return unpacked(v[:, : tokens[0].shape[1]].float(), x.shape, self.patch_size)

    def references(self, conditions: Conditions) -> Sequence[Tensor]:
        """Latents [B, C, H, W] of each condition image, whose tokens follow the sample's. Qwen-Image has none."""
        return ()


def packed(latents: Tensor, patch_size: int) -> Tensor:
    """[B, H W / p^2, C p^2] tokens of latents [B, C, H, W]. The numbers of a token are ordered channel, row, column."""
    p = patch_size
    patches = latents.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # [B, C, H/p, p, W/p, p]
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpacked(tokens: Tensor, shape: torch.Size, patch_size: int) -> Tensor:
    """Latents of `shape` [B, C, H, W] from their tokens."""
    batch, channels, height, width = shape
    p = patch_size
    patches = tokens.reshape(batch, height // p, width // p, channels, p, p)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(shape)


class QwenImageTextEncoder:
    """The frozen Qwen2.5-VL, which reads text."""

    components: tuple[str, ...] = ("text_encoder",)

    def __init__(self, encoder: Any, tokenizer: Any, template: Template) -> None:
        """
        Args:
            encoder: transformers' `Qwen2_5_VLForConditionalGeneration`, which has no types.
        """
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.template = template

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts the tokens of the prompt and of the closing."""
        return self._states(self._tokens(texts, self.template.opening, max_sequence_length))

    def _tokens(self, texts: Sequence[str], before: str, length: int) -> dict[str, Tensor]:
        """Ids and mask [B, tokens of `before` + length] of chats that begin with `before`."""
        batch = self.tokenizer(
            [f"{before}{nonempty(text)}{CLOSING}" for text in texts],
            padding="max_length",
            padding_side="right",
            max_length=len(self.tokenizer(before).input_ids) + length,
            truncation=True,
            return_tensors="pt",
        )
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def _states(self, inputs: Mapping[str, Tensor]) -> TextEmbedCondition:
        """The encoder's last hidden states for `inputs`, without the opening."""
        device = self.encoder.device
        # `encoder.model` runs without the head, which would compute logits over the vocabulary for every token.
        hidden = self.encoder.model(**{name: value.to(device) for name, value in inputs.items()}, use_cache=False)[0]
        mask = inputs["attention_mask"][:, self.template.num_dropped :].to(device).bool()
        embeds = hidden[:, self.template.num_dropped :].masked_fill(~mask[:, :, None], 0)
        return TextEmbedCondition(embeds=embeds, mask=mask)


class QwenImageVAE:
    """diffusers' AutoencoderKLQwenImage (fp32), a video VAE, on one frame, with normalised channels."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [0, 1] of latents [B, C, H / 8, W / 8]."""
        latents = latents * self._per_channel("latents_std") + self._per_channel("latents_mean")
        return to_unit(self.vae.decode(latents[:, :, None], return_dict=False)[0][:, :, 0])

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, H / 8, W / 8] of pixels [B, 3, H, W] in [0, 1]: the mean of the encoder's Gaussian."""
        mean = self.vae.encode(from_unit(pixels)[:, :, None]).latent_dist.mode()[:, :, 0]
        return (mean - self._per_channel("latents_mean")) / self._per_channel("latents_std")

    def _per_channel(self, name: str) -> Tensor:
        """A statistic of each channel, [C, 1, 1]."""
        return torch.tensor(self.vae.config[name], device=self.vae.device)[:, None, None]


class QwenImageBundle(DiffusersBundle):
    """Transformer, Qwen2.5-VL and VAE."""

    family: ClassVar[DiffusersFamily] = QWEN_IMAGE

    def denoiser(self) -> Denoiser:
        """The transformer as a velocity field."""
        return QwenImageDenoiser(self.trainable(), self.facts.patch_size)

    def text_encoder(self) -> TextEncoder:
        """Qwen2.5-VL, which reads text."""
        self.require(("text_encoder",), "encode text")
        return QwenImageTextEncoder(self.modules["text_encoder"], self.tokenizers["tokenizer"], TEMPLATE)

    def decoder(self) -> Decoder:
        """The VAE."""
        self.require(("vae",), "decode latents")
        return QwenImageVAE(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The VAE."""
        self.require(("vae",), "encode images")
        return QwenImageVAE(self.modules["vae"])


class QwenImagePipeline(DiffusersPipeline[QwenImageBundle]):
    """Text to image with Qwen-Image."""

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """Pixels [B, 3, H, W]."""
        return call_diffusers(plain, texts, x_T, params)


def call_diffusers(
    plain: PlainPipeline,
    texts: Sequence[str],
    x_T: Tensor,  # noqa: N803
    params: DiffusionSamplingParams,
    **images: object,
) -> Tensor:
    """Pixels [B, 3, H, W] from a diffusers pipeline of Qwen-Image; `images` is its argument for condition images."""
    prompts: dict[str, object] = {"prompt": [nonempty(text) for text in texts]}
    if params.guidance_scale != 1:
        prompts["negative_prompt"] = [nonempty(params.negative_prompt)] * len(texts)
    pixels: Tensor = plain(
        **prompts,
        **images,
        true_cfg_scale=params.guidance_scale,
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        sigmas=unshifted_sigmas(params.num_inference_steps),
        latents=packed(x_T, 2),  # diffusers uses 2 whatever the configuration says
        max_sequence_length=params.max_sequence_length,
        output_type="pt",
    ).images
    return pixels
