"""Text embeddings of unique prompts, kept across rollouts.

The cache cannot change a bit: prompts are always encoded in forward batches of one size, so a row is the same whenever
and beside whomever it is computed, and losing an entry only costs time.
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
    """The condition images of one prompt, known by what they show."""

    pixels: Tensor  # [N, 3, H, W] in [0, 1]
    key: str

    @classmethod
    def of(cls, pixels: Tensor) -> ConditionImages:
        """From pixels [N, 3, H, W]."""
        shown = pixels.mul(255).round().to(torch.uint8).contiguous()
        digest = hashlib.blake2b(shown.numpy().tobytes(), digest_size=16).hexdigest()
        return cls(pixels, f"{tuple(pixels.shape)}:{digest}")


NO_IMAGES = ConditionImages(torch.zeros(0), "")
Prompt = tuple[str, int, str]
"""Text, sequence length, and the key of its images ("" = it is read without any)."""


class PromptEmbeddings:
    """Encodes each distinct prompt once, and remembers the last `cache_gb` GiB of embeddings in main memory."""

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
            images: of each text, all of one shape; encoders that do not see any are not shown them.
        """
        if images is None or not isinstance(self.encoder, MultimodalTextEncoder):
            images = [NO_IMAGES] * len(texts)
        shown = {image.key: image.pixels for image in images if image.key}
        prompts = [(text, max_sequence_length, image.key) for text, image in zip(texts, images, strict=True)]
        unique = list(dict.fromkeys(prompts))
        found = {prompt: self._remembered(prompt) for prompt in unique}
        found |= self._encode([prompt for prompt, row in found.items() if row is None], max_sequence_length, shown)
        table = TextEmbedCondition.concat([row for row in found.values() if row is not None])
        position = {prompt: i for i, prompt in enumerate(unique)}
        return table.to(self.bundle.device).select([position[prompt] for prompt in prompts])

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()
        self.size = 0

    def _remembered(self, prompt: Prompt) -> TextEmbedCondition | None:
        if prompt in self._rows:
            self._rows.move_to_end(prompt)
        return self._rows.get(prompt)

    def _encode(
        self, prompts: list[Prompt], max_sequence_length: int, shown: dict[str, Tensor]
    ) -> dict[Prompt, TextEmbedCondition]:
        if not prompts:
            return {}
        rows: dict[Prompt, TextEmbedCondition] = {}
        with torch.no_grad(), self.bundle.resident(self.encoder.components):
            for chunk in padded_chunks(len(prompts), self.batch_size):
                chosen = [prompts[row] for row in chunk.rows]
                texts = [text for text, _, _ in chosen]
                if shown and isinstance(self.encoder, MultimodalTextEncoder):
                    images = torch.stack([shown[key] for _, _, key in chosen]).to(self.bundle.device)
                    batch = self.encoder.encode_with_images(texts, max_sequence_length, images).to("cpu")
                else:
                    batch = self.encoder.encode(texts, max_sequence_length).to("cpu")
                for j in range(chunk.num_real):
                    row = batch.select([j]).map_tensors(torch.clone)
                    rows[chosen[j]] = row
                    self._remember(chosen[j], row)
        return rows

    def _remember(self, prompt: Prompt, row: TextEmbedCondition) -> None:
        self._rows[prompt] = row
        self.size += _num_bytes(row)
        while self.size > self.capacity:
            self.size -= _num_bytes(self._rows.popitem(last=False)[1])


def causal_mask(mask: Tensor) -> Tensor:
    """[B, 1, L, L] bool: each token sees the real ones up to itself; `mask` [B, L] is true at real tokens.

    Written out, since transformers gives a batch in which no text is padded to another kernel, whose bits may differ.
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
