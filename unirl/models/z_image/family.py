"""Z-Image and Z-Image-Turbo. Alibaba 2025 (arXiv:2511.22699).

The transformer takes one list entry per row. Each row has its own number of text tokens, filled to a multiple of 32 by
a learned token that is attended to, and the image tokens come before them. diffusers pads shorter rows to the longest
of the batch, and masks only if rows differ. Here every row is padded to the longest possible prompt and always masked.
Otherwise a row's bits would depend on its neighbours, and a replay's micro-batches would differ from the rollout's.

The text condition is the hidden states of Qwen3 before its last layer, of a chat with the prompt as the user's message,
as diffusers' `ZImagePipeline.encode_prompt` gives them, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages, causal_mask
from unirl.models.denoising.vae import KLBundle
from unirl.models.loading.checkpoint import Config, DiffusersFamily, ModelConfigs, read_configs
from unirl.models.loading.toy_tokenizers import qwen_tokenizer
from unirl.sde.guidance import Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

FOLDER = Path(__file__).parent
PATCH_SIZE = 2
TEXT_MULTIPLE = 32


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. Raises NotFoundError (4001) for a model that reads images."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    _check_text_to_image(transformer)
    return LatentFacts(
        family="z_image",
        block_class_names=("ZImageTransformerBlock",),
        lora_targets=("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
        latent_channels=transformer["in_channels"],
        vae_scale=2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=PATCH_SIZE,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        timestep_scale=1.0,
        guidance=Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["cap_feat_dim"],
    )


def _check_text_to_image(transformer: Config) -> None:
    if transformer.get("siglip_feat_dim") is not None or PATCH_SIZE not in transformer["all_patch_size"]:
        raise NotFoundError(
            f"this Z-Image transformer has siglip_feat_dim={transformer.get('siglip_feat_dim')} and all_patch_size="
            f"{tuple(transformer['all_patch_size'])}. Only text to image is supported (siglip_feat_dim=None and "
            f"{PATCH_SIZE} in all_patch_size). Use such a checkpoint, for instance Tongyi-MAI/Z-Image"
        )


def toy_tokenizers() -> dict[str, Any]:
    """A byte-level Qwen tokenizer."""
    return {"tokenizer": qwen_tokenizer()}


Z_IMAGE = DiffusersFamily(
    name="z_image",
    pipeline="ZImagePipeline",
    classes={
        "transformer": "diffusers.ZImageTransformer2DModel",
        "text_encoder": "transformers.Qwen3Model",
        "vae": "diffusers.AutoencoderKL",
    },
    facts=facts,
    toys=read_configs(FOLDER / "toy.json"),
    toy_tokenizers=toy_tokenizers,
    published=read_configs(FOLDER / "published.json"),
    uninitialised=("x_pad_token", "cap_pad_token"),
)


class ZImageDenoiser:
    """The transformer as a velocity field."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer  # diffusers' ZImageTransformer2DModel, which has no types
        self.padding = EqualLengths.of(transformer)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given the condition `text`."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.mask is not None
        dtype = self.transformer.cap_embedder[1].weight.dtype
        self.padding.text_length = -(-text.embeds.shape[1] // TEXT_MULTIPLE) * TEXT_MULTIPLE
        toward_data = self.transformer(
            list(x.to(dtype)[:, :, None]),
            1.0 - sigma,
            [tokens[mask] for tokens, mask in zip(text.embeds.to(dtype), text.mask, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(toward_data)[:, :, 0].float()


class EqualLengths:
    """Replaces the transformer's padding: each row is padded to the length of the longest possible row."""

    @classmethod
    def of(cls, transformer: Any) -> EqualLengths:
        """The padding of a transformer, which several denoisers may share."""
        replaced = vars(transformer).get("_prepare_sequence")
        return cls(transformer) if replaced is None else replaced.__self__

    def __init__(self, transformer: Any) -> None:
        self.text_length = 0
        self._prepare = type(transformer)._prepare_sequence
        self._join = type(transformer)._build_unified_sequence
        self._transformer = transformer
        transformer._prepare_sequence = self._prepared
        transformer._build_unified_sequence = self._joined

    def _prepared(
        self, feats: Any, pos_ids: Any, inner_pad_mask: Any, pad_token: Any, *others: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Tokens [B, L, D], rotations [B, L, d], mask [B, L], lengths and an unused value, of the image or the text."""
        tokens, rotations, _, lengths, unused = self._prepare(
            self._transformer, feats, pos_ids, inner_pad_mask, pad_token, *others
        )
        length = self.text_length if pad_token is self._transformer.cap_pad_token else tokens.shape[1]
        return *padded(tokens, rotations, lengths, length), lengths, unused

    def _joined(self, x: Any, x_rotations: Any, x_lengths: Any, *others: Any) -> tuple[Any, Any, Any, Any]:
        """Tokens, rotations, mask and an unused value, of images followed by their texts."""
        text_lengths = others[3]
        tokens, rotations, _, unused = self._join(self._transformer, x, x_rotations, x_lengths, *others)
        lengths = [image + text for image, text in zip(x_lengths, text_lengths, strict=True)]
        return *padded(tokens, rotations, lengths, x.shape[1] + self.text_length), unused


def padded(tokens: Tensor, rotations: Tensor, lengths: list[int], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, length, D] and rotations [B, length, d] padded with zeros, and the mask [B, length] of real tokens."""
    missing = (0, 0, 0, length - tokens.shape[1])
    ends = torch.tensor(lengths, device=tokens.device)[:, None]
    return pad(tokens, missing), pad(rotations, missing), torch.arange(length, device=tokens.device) < ends


class ZImageTextEncoder:
    """The frozen Qwen3, without its head."""

    components: tuple[str, ...] = ("text_encoder",)

    def __init__(self, text_encoder: Any, tokenizer: Any) -> None:
        self.text_encoder = text_encoder  # transformers' Qwen3Model, which has no types
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts the tokens of the whole chat."""
        batch = self.tokenizer(
            [self._chat(text) for text in texts],
            padding="max_length",
            max_length=max_sequence_length,
            truncation=True,
            return_tensors="pt",
        ).to(self.text_encoder.device)
        mask = batch.attention_mask.bool()
        states = self.text_encoder(
            input_ids=batch.input_ids, attention_mask=causal_mask(mask), output_hidden_states=True, use_cache=False
        ).hidden_states
        return TextEmbedCondition(embeds=states[-2], mask=mask)

    def _chat(self, text: str) -> str:
        chat: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return chat


class ZImageBundle(KLBundle):
    """Transformer, Qwen3 and VAE."""

    family: ClassVar[DiffusersFamily] = Z_IMAGE

    def denoiser(self) -> ZImageDenoiser:
        """The transformer as a velocity field."""
        return ZImageDenoiser(self.trainable())

    def text_encoder(self) -> TextEncoder:
        """Qwen3."""
        self.require(ZImageTextEncoder.components, "encode text")
        return ZImageTextEncoder(self.modules["text_encoder"], self.tokenizers["tokenizer"])


class ZImagePipeline(DiffusersPipeline[ZImageBundle]):
    """Text to image with Z-Image."""

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """diffusers adds guidance_scale (v_cond - v_uncond) to v_cond, so its scale is ours minus 1."""
        result: Tensor = plain(
            prompt=list(texts),
            negative_prompt=[params.negative_prompt] * len(texts),
            max_sequence_length=params.max_sequence_length,
            height=params.height,
            width=params.width,
            guidance_scale=params.guidance_scale - 1.0,
            num_inference_steps=params.num_inference_steps,
            sigmas=unshifted_sigmas(params.num_inference_steps),
            latents=x_T,
            output_type="pt",
        ).images
        return result
