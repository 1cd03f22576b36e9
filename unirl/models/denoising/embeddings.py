"""Text embeddings of distinct prompts, cached across rollouts.

The cache changes no bit: prompts are always encoded in forward batches of one size, so a row has the same bits whenever
and with whatever other rows it is computed. A lost entry costs only time.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.base import Bundle
from unirl.models.chunks import padded_chunks, round_up
from unirl.models.denoising.bundle import MultimodalTextEncoder, TextEncoder
from unirl.types.conditions import TextEmbedCondition

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


class PromptEmbeddings:
    """Encodes each distinct prompt once, and caches up to `cache_gb` GiB of embeddings in main memory."""

    def __init__(self, bundle: Bundle, encoder: TextEncoder, *, batch_size: int, cache_gb: float) -> None:
        self.bundle = bundle
        self.encoder = encoder
        self.batch_size = round_up(batch_size, bundle.facts.batch_multiple)
        self.capacity = int(cache_gb * GIB)
        self.size = 0
        self._rows: OrderedDict[Prompt, TextEmbedCondition] = OrderedDict()

    def __call__(
        self, texts: Sequence[str], max_sequence_length: int, images: Sequence[ConditionImages] | None = None
    ) -> TextEmbedCondition:
        """The condition of `texts`, one row each, on the bundle's device.

        Args:
            images: the images of each text, all of one shape. They are ignored by encoders that read text only.
        """
        if images is None or not isinstance(self.encoder, MultimodalTextEncoder):
            images = [NO_IMAGES] * len(texts)
        pixels = {image.key: image.pixels for image in images if image.key}
        prompts = [(text, max_sequence_length, image.key) for text, image in zip(texts, images, strict=True)]
        unique = list(dict.fromkeys(prompts))
        rows = {prompt: self._cached(prompt) for prompt in unique}
        rows |= self._encode([prompt for prompt, row in rows.items() if row is None], max_sequence_length, pixels)
        table = TextEmbedCondition.concat([row for row in rows.values() if row is not None])
        position = {prompt: i for i, prompt in enumerate(unique)}
        return table.to(self.bundle.device).select([position[prompt] for prompt in prompts])

    def clear(self) -> None:
        """Empty the cache."""
        self._rows.clear()
        self.size = 0

    def _cached(self, prompt: Prompt) -> TextEmbedCondition | None:
        if prompt in self._rows:
            self._rows.move_to_end(prompt)
        return self._rows.get(prompt)

    def _encode(
        self, prompts: list[Prompt], max_sequence_length: int, pixels: dict[str, Tensor]
    ) -> dict[Prompt, TextEmbedCondition]:
        if not prompts:
            return {}
        rows: dict[Prompt, TextEmbedCondition] = {}
        with torch.no_grad(), self.bundle.resident(self.encoder.components):
            for chunk in padded_chunks(len(prompts), self.batch_size):
                chunk_prompts = [prompts[row] for row in chunk.rows]
                texts = [text for text, _, _ in chunk_prompts]
                if pixels and isinstance(self.encoder, MultimodalTextEncoder):
                    images = torch.stack([pixels[key] for _, _, key in chunk_prompts]).to(self.bundle.device)
                    batch = self.encoder.encode_with_images(texts, max_sequence_length, images).to("cpu")
                else:
                    batch = self.encoder.encode(texts, max_sequence_length).to("cpu")
                for j in range(chunk.num_real):
                    row = batch.select([j]).map_tensors(torch.clone)
                    rows[chunk_prompts[j]] = row
                    self._add_to_cache(chunk_prompts[j], row)
        return rows

    def _add_to_cache(self, prompt: Prompt, row: TextEmbedCondition) -> None:
        self._rows[prompt] = row
        self.size += _num_bytes(row)
        while self.size > self.capacity:
            self.size -= _num_bytes(self._rows.popitem(last=False)[1])


def causal_mask(mask: Tensor) -> Tensor:
    """[B, 1, L, L] bool: each token sees the real tokens up to itself; `mask` [B, L] is true at real tokens.

    The mask is explicit because transformers uses another kernel, with other bits, for batches without padding.
    """
    length = mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return causal & mask.bool()[:, None, None, :]


def _num_bytes(row: TextEmbedCondition) -> int:
    sizes: list[int] = []

    def measure(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    row.map_tensors(measure)
    return sum(sizes)
