"""Text embeddings of distinct prompts, cached across rollouts.

The cache changes no bit: prompts are always encoded in forward batches of one size, so a row has the same bits whenever
and with whatever other rows it is computed. A lost entry costs only time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from unirl.models.cache import BoundedCache
from unirl.models.chunks import padded_chunks, round_up, text_multiple
from unirl.models.denoising.bundle import DiffusionBundle, MeasuringTextEncoder, MultimodalTextEncoder, TextEncoder
from unirl.types.conditions import TextCondition, TextEmbedCondition
from unirl.types.progress import progress

ConditionT = TypeVar("ConditionT", bound=TextCondition, covariant=True)
GIB = 1024**3


@dataclass(frozen=True, eq=False)
class ConditionImages:
    """The condition images of one prompt, identified by their content."""

    pixels: Tensor  # [N, 3, H, W] in [0, 1]
    key: str

    @classmethod
    def of(cls, pixels: Tensor) -> ConditionImages:
        """From pixels [N, 3, H, W]."""
        levels = pixels.mul(255).round().to(torch.uint8).contiguous()
        digest = hashlib.blake2b(levels.numpy().tobytes(), digest_size=16).hexdigest()
        return cls(pixels, f"{tuple(pixels.shape)}:{digest}")


NO_IMAGES = ConditionImages(torch.zeros(0), "")
Prompt = tuple[str, int, str]
"""Text, sequence length, and the key of its images ("" if it is read without images)."""


class PromptEmbeddings(Generic[ConditionT]):
    """Encodes each distinct prompt once, and caches up to `cache_gb` GiB of embeddings in main memory."""

    def __init__(self, bundle: DiffusionBundle, encoder: TextEncoder, *, batch_size: int, cache_gb: float) -> None:
        self.bundle = bundle
        self.encoder = encoder
        self.batch_size = round_up(batch_size, bundle.facts.batch_multiple)
        self.text_multiple = text_multiple(bundle.device) if bundle.facts.text_is_masked else None
        self.capacity = int(cache_gb * GIB)
        self.cache: BoundedCache[Prompt, TextCondition] = BoundedCache(_num_bytes)

    def __call__(
        self, texts: Sequence[str], max_sequence_length: int, images: Sequence[ConditionImages] | None = None
    ) -> ConditionT:
        """The condition of `texts`, one row each, on the bundle's device.

        Args:
            images: the images of each text, all of one shape. They are ignored by encoders that read text only.
        """
        if images is None or not isinstance(self.encoder, MultimodalTextEncoder):
            images = [NO_IMAGES] * len(texts)
        pixels = {image.key: image.pixels for image in images if image.key}
        prompts = [(text, max_sequence_length, image.key) for text, image in zip(texts, images, strict=True)]
        rows = {prompt: self.cache.get(prompt) for prompt in dict.fromkeys(prompts)}
        rows |= self._encode([prompt for prompt, row in rows.items() if row is None], max_sequence_length, pixels)
        encoded: list[Any] = [row for row in rows.values() if row is not None]  # all of the class of this encoder
        table: TextCondition = type(encoded[0]).concat(encoded)
        position = {prompt: i for i, prompt in enumerate(rows)}
        condition: Any = table.to(self.bundle.device).select([position[prompt] for prompt in prompts])
        if self.text_multiple is None or not isinstance(table, TextEmbedCondition):
            return condition
        return condition.replace(lengths=[common_lengths(table, self.text_multiple)] * len(prompts))

    def cut(self, texts: Sequence[str], max_sequence_length: int) -> list[bool] | None:
        """True for each text that is longer than the encoder reads. None for an encoder that cannot say."""
        if not isinstance(self.encoder, MeasuringTextEncoder):
            return None
        distinct = list(dict.fromkeys(texts))
        is_cut = dict(zip(distinct, self.encoder.cuts(distinct, max_sequence_length), strict=True))
        return [is_cut[text] for text in texts]

    def _encode(
        self, prompts: list[Prompt], max_sequence_length: int, pixels: dict[str, Tensor]
    ) -> dict[Prompt, TextCondition]:
        if not prompts:
            return {}
        rows: dict[Prompt, TextCondition] = {}
        with torch.no_grad(), self.bundle.resident(self.encoder.components):
            chunks = padded_chunks(len(prompts), self.batch_size)
            for chunk in chunks:
                chunk_prompts = [prompts[row] for row in chunk.rows]
                texts = [text for text, _, _ in chunk_prompts]
                if pixels and isinstance(self.encoder, MultimodalTextEncoder):
                    images = torch.stack([pixels[key] for _, _, key in chunk_prompts]).to(self.bundle.device)
                    batch: TextCondition = self.encoder.encode_with_images(texts, max_sequence_length, images).to("cpu")
                else:
                    batch = self.encoder.encode(texts, max_sequence_length).to("cpu")
                progress("chunk of encoded prompts", len(chunks))
                for j in range(chunk.num_real):
                    row = batch.select([j]).map_tensors(torch.clone)
                    rows[chunk_prompts[j]] = row
                    self.cache.put(chunk_prompts[j], row, self.capacity)
        return rows


def common_lengths(table: TextEmbedCondition, multiple: int) -> tuple[int, int]:
    """The numbers of tokens, rounded up, that hold all real ones of the prompts in `table`, which is on the CPU."""
    longest = [1 if mask is None else 1 + last_token(mask) for mask in (table.mask, table.mask_2)]
    first, second = (round_up(length, multiple) for length in longest)
    return first, second


def last_token(mask: Tensor) -> int:
    """The index of the last real token of any row in a mask [B, L]; 0 if there is none."""
    return int((mask.any(0) * torch.arange(mask.shape[1])).max())


def _num_bytes(row: TextCondition) -> int:
    return sum(value.nbytes for value in vars(row).values() if isinstance(value, Tensor))
