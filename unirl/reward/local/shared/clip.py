"""The base class of scores by the cosine similarity of image and prompt in a CLIP embedding (arXiv:2103.00020)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unirl.reward.local.shared.images import ImageScorer, ImageScorerSpec
from unirl.reward.local.shared.pretrained import fixed_seed, load

MAX_TOKENS = 77


@dataclass(frozen=True, kw_only=True)
class ClipSimilaritySpec(ImageScorerSpec):
    """The CLIP and its batch size."""

    processor: str
    """Hub id or local directory of the tokenizer and image processor; `toy` does not read it."""


class ClipSimilarityScorer(ImageScorer):
    """A function of cosine(image, prompt), in float32. Prompts are truncated to 77 tokens."""

    config: ClipSimilaritySpec

    def __init__(self, config: ClipSimilaritySpec) -> None:
        super().__init__(config)
        self._processor: Any = None

    @abstractmethod
    def scaled(self, cosine: Tensor) -> Tensor:
        """Returns the scores [B] for cosine similarities [B]."""

    def load_model(self) -> nn.Module:
        from transformers import CLIPModel

        if self.config.path == "toy":
            return toy_clip()
        model: nn.Module = load(CLIPModel, self.config.path, "config.path").float()
        return model

    @property
    def processor(self) -> Any:
        """The tokenizer and image processor, loaded on first use."""
        if self._processor is None:
            self._processor = self._load_processor()
        return self._processor

    def _load_processor(self) -> Any:
        from transformers import CLIPProcessor

        if self.config.path == "toy":
            return toy_processor()
        return load(CLIPProcessor, self.config.processor, "config.processor")

    @property
    def image_processor(self) -> Any:
        return self.processor.image_processor

    def judge(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        tokens = self.processor.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        model: Any = self.model
        out = model(pixel_values=pixels.to(self.device), **tokens.to(self.device))
        return self.scaled((out.image_embeds * out.text_embeds).sum(dim=-1))

    def logits(self, cosine: Tensor) -> Tensor:
        """Returns exp(logit_scale) * cosine [B], the logits that CLIP was trained with."""
        model: Any = self.model
        logits: Tensor = model.logit_scale.exp() * cosine
        return logits


def toy_clip() -> nn.Module:
    """Returns a CLIPModel of about 30,000 parameters with fixed random weights. The global generator is not used."""
    from transformers import CLIPModel

    with fixed_seed():
        return CLIPModel(toy_clip_config())


def toy_clip_config() -> Any:
    """Returns the configuration of the toy: 2 layers, width 32, the tokens of `toy_processor`, images of 32 pixels."""
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


def toy_processor() -> Any:
    """Returns the CLIPProcessor of the toy: a tokenizer of bytes and images of 32 pixels."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPProcessor, CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=MAX_TOKENS
    )
    return CLIPProcessor(image_processor=clip_image_processor(32), tokenizer=tokenizer)


def clip_image_processor(side: int) -> Any:
    """Returns CLIP's preprocessing (openai/CLIP): a bicubic resize of the shortest edge, a centre crop, normalisation.

    If an odd number of pixels is cropped, torchvision's CenterCrop may differ by one pixel.
    """
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
