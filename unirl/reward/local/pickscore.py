"""PickScore: how well a picture fits its prompt, by a CLIP tuned on what people chose.

Kirstain et al. 2023, arXiv:2305.01569.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unirl.config.errors import DataError
from unirl.models.chunks import full_chunks
from unirl.reward.base import Device, LocalRewardBackend, single
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

SCALE = 26.0
"""Scores of good pictures come out near 1: PickScore's own logits lie near 20 to 26."""
MAX_TOKENS = 77
ROWS = 4
"""Forward batches are multiples of this: on one CPU thread a row's bits then do not depend on the batch. On several,
CLIP's last bit depends on the row's place in it (2e-8 of a score); the same batch always gives the same bits."""


@dataclass(frozen=True, kw_only=True)
class PickScoreSpec:
    """Which CLIP, and how many pictures at a time."""

    path: str = "yuvalkirstain/PickScore_v1"
    """Hub id or local directory of the model; `toy` is the same class, tiny, with fixed random weights."""
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Hub id or local directory of the tokenizer and image processor; not read by `toy`."""
    batch_size: int = 8
    device: Device = "auto"

    toy: ClassVar[dict[str, object]] = {"path": "toy", "batch_size": 4}

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"PickScoreSpec.batch_size must be >= 1, got {self.batch_size}")


class PickScoreRewardScorer(LocalRewardBackend):
    """exp(logit_scale) * cosine(image, prompt) / 26, in float32."""

    reads = ("prompts", "images")
    capabilities = Capabilities(modalities=("image",), differentiable=True)

    def __init__(self, *, config: PickScoreSpec = PickScoreSpec()) -> None:
        super().__init__(device=config.device)
        self.config = config
        self._processor: Any = None

    def load_model(self) -> nn.Module:
        from transformers import CLIPModel

        if self.config.path == "toy":
            return toy_clip()
        return load(CLIPModel, self.config.path, "reward.backend.config.path").float()

    @property
    def processor(self) -> Any:
        """Tokenizer and image processor, loaded on first use."""
        if self._processor is None:
            self._processor = self._load_processor()
        return self._processor

    def _load_processor(self) -> Any:
        from transformers import CLIPProcessor

        if self.config.path == "toy":
            return toy_processor()
        return load(CLIPProcessor, self.config.processor, "reward.backend.config.processor")

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.images is not None and request.prompts is not None
        scores = torch.empty(len(request))
        for chunk in full_chunks(len(request), self.config.batch_size, ROWS):
            rows = list(chunk.rows)
            answer = self._score(request.images[rows], [request.prompts[row] for row in rows])
            scores[rows[: chunk.kept]] = answer[: chunk.kept]
        return single("pickscore", scores)

    @torch.no_grad()
    def _score(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        images = self.processor.image_processor(as_pil(pixels), return_tensors="pt")
        return self._scaled_cosine(images["pixel_values"], prompts).cpu()

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] the score with its gradient; pictures of any size are scaled and cut as the processor does."""
        return self._scaled_cosine(clip_pixels(images.float(), self.processor.image_processor), prompts)

    def _scaled_cosine(self, pixel_values: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] the scores of pictures as CLIP takes them."""
        tokens = self.processor.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        model: Any = self.model
        out = model(pixel_values=pixel_values.to(self.device), **tokens.to(self.device))
        cosine = (out.image_embeds * out.text_embeds).sum(dim=-1)
        scores: Tensor = model.logit_scale.exp() * cosine / SCALE
        return scores


def clip_pixels(images: Tensor, processor: Any) -> Tensor:
    """[B, 3, S, S] what CLIP's image processor makes of pictures [B, 3, H, W] in [0, 1], without rounding to levels.

    Bicubic with antialiasing to the shortest edge, along rows, then along columns, each cut to [0, 1]; the middle
    S x S, normalised. The processor rounds to 256 levels after either pass: its pixels differ by up to 1.2 levels.
    """
    edge, side = processor.size["shortest_edge"], processor.crop_size["height"]
    height, width = images.shape[-2:]
    if min(height, width) != edge:
        tall, wide = (edge, int(edge * width / height)) if height <= width else (int(edge * height / width), edge)
        for size in ((height, wide), (tall, wide)):
            images = torch.nn.functional.interpolate(images, size, mode="bicubic", antialias=True).clamp(0.0, 1.0)
    top, left = ((length - side) // 2 for length in images.shape[-2:])
    mean, std = (
        torch.tensor(v, device=images.device)[:, None, None] for v in (processor.image_mean, processor.image_std)
    )
    return (images[..., top : top + side, left : left + side] - mean) / std


def as_pil(pixels: Tensor) -> list[Any]:
    """PIL images of [B, 3, H, W] in [0, 1]."""
    from PIL import Image

    levels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(image) for image in levels]


def load(cls: Any, path: str, key: str) -> Any:
    """A pretrained object of transformers from a hub id or a local directory.

    Raises:
        DataError: 4001 when it is not there.
    """
    try:
        return cls.from_pretrained(path)
    except OSError as error:
        where = (
            "the directory lacks its files" if Path(path).is_dir() else "no such directory, and the hub did not give it"
        )
        raise DataError(
            f"{key}={path!r}: {where} ({cls.__name__}). Give a local directory, a hub id that can be reached, or `toy`",
            code=4001,
        ) from error


def toy_clip() -> nn.Module:
    """A CLIPModel of about 30 thousand parameters with fixed random weights; the global generator is left alone."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {
        "vocab_size": 514,
        "max_position_embeddings": 77,
        "bos_token_id": 512,
        "eos_token_id": 513,
        "pad_token_id": 513,
    }
    config = CLIPConfig(
        text_config=small | text, vision_config=small | {"image_size": 32, "patch_size": 8}, projection_dim=32
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CLIPModel(config)


def toy_processor() -> Any:
    """A CLIPProcessor for the toy: a tokenizer of bytes and 32-pixel images."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPImageProcessorPil, CLIPProcessor, CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=MAX_TOKENS
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return CLIPProcessor(image_processor=images, tokenizer=tokenizer)
