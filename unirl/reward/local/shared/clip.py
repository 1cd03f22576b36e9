"""The base class of scores by the cosine similarity of image and prompt in a CLIP embedding (arXiv:2103.00020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from unirl.models.loading.hub import ModelSource
from unirl.models.loading.toy_tokenizers import clip_tokenizer
from unirl.reward.local.shared.images import ImageScorer, ImageScorerSpec
from unirl.reward.local.shared.pretrained import fixed_seed, load

if TYPE_CHECKING:
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

MAX_TOKENS = 77


@dataclass(frozen=True, kw_only=True)
class ClipSimilaritySpec(ImageScorerSpec):
    """The CLIP and its batch size."""

    processor: ModelSource
    """Hub id or local directory of the tokenizer and image processor; `toy` does not read it."""


class ClipSimilarityScorer(ImageScorer["CLIPModel"]):
    """exp(logit_scale) * cosine(image, prompt) / divisor, in float32. Prompts are truncated to 77 tokens."""

    config: ClipSimilaritySpec
    divisor: ClassVar[float]
    """Brings the scores of good images near 1. exp(logit_scale) * cosine are the logits that CLIP was trained with."""

    def load_model(self) -> CLIPModel:
        from transformers import CLIPModel

        if self.config.path == "toy":
            with fixed_seed():
                return CLIPModel(toy_clip_config())
        return load(CLIPModel, self.config.path, "config.path").float()

    @cached_property
    def processor(self) -> CLIPProcessor:
        """The tokenizer and image processor, loaded on first use."""
        from transformers import CLIPProcessor

        if self.config.path == "toy":
            return toy_processor()
        return load(CLIPProcessor, self.config.processor, "config.processor")

    @property
    def image_processor(self) -> CLIPImageProcessorPil:
        return self.processor.image_processor

    def judge(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        tokens = self.processor.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        out = self.model(pixel_values=pixels.to(self.device), **tokens.to(self.device))
        return self.scaled((out.image_embeds * out.text_embeds).sum(dim=-1))

    def scaled(self, cosine: Tensor) -> Tensor:
        """Returns the scores [B] for cosine similarities [B]."""
        return self.model.logit_scale.exp() * cosine / self.divisor


def toy_clip_config() -> CLIPConfig:
    """Returns the configuration of the toy, which has about 30,000 parameters, for the tokens of `toy_processor`."""
    from transformers import CLIPConfig

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {
        "vocab_size": 514,
        "max_position_embeddings": 77,
        "bos_token_id": 512,
        "eos_token_id": 513,
        "pad_token_id": 513,
    }
    vision = {"image_size": 32, "patch_size": 8, "projection_dim": 32}
    return CLIPConfig(text_config=small | text, vision_config=small | vision, projection_dim=32)


def toy_processor() -> CLIPProcessor:
    """Returns the CLIPProcessor of the toy: a tokenizer of bytes and images of 32 pixels."""
    from transformers import CLIPProcessor

    return CLIPProcessor(image_processor=clip_image_processor(32), tokenizer=clip_tokenizer())


def clip_image_processor(side: int) -> CLIPImageProcessorPil:
    """Returns CLIP's preprocessing (openai/CLIP): a bicubic resize of the shortest edge, a centre crop, normalisation.

    If an odd number of pixels is cropped, torchvision's CenterCrop may differ by one pixel.
    """
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
