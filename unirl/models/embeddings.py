"""Text embeddings of unique prompts, kept across rollouts.

The cache cannot change a bit: prompts are always encoded in forward batches of one size, so a row is the same whenever
and beside whomever it is computed, and losing an entry only costs time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from unirl.models.base import Bundle, TextEncoder
from unirl.models.chunks import full_chunks, round_up
from unirl.types.conditions import TextEmbedCondition

Key = tuple[str, int]
GIB = 1024**3


class PromptEmbeddings:
    """Encodes each distinct prompt once, and remembers the last `cache_gb` GiB of embeddings in main memory."""

    def __init__(self, bundle: Bundle, encoder: TextEncoder, *, batch_size: int, cache_gb: float) -> None:
        self.bundle = bundle
        self.encoder = encoder
        self.batch_size = round_up(batch_size, bundle.facts.batch_multiple)
        self.capacity = int(cache_gb * GIB)
        self.size = 0
        self._rows: OrderedDict[Key, TextEmbedCondition] = OrderedDict()

    def __call__(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`, one row each, on the bundle's device."""
        unique = list(dict.fromkeys(texts))
        found = {text: self._remembered((text, max_sequence_length)) for text in unique}
        missing = [text for text, row in found.items() if row is None]
        found |= self._encode(missing, max_sequence_length)
        table = TextEmbedCondition.concat([row for row in found.values() if row is not None])
        position = {text: i for i, text in enumerate(unique)}
        return table.to(self.bundle.device).select([position[text] for text in texts])

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()
        self.size = 0

    def _remembered(self, key: Key) -> TextEmbedCondition | None:
        if key in self._rows:
            self._rows.move_to_end(key)
        return self._rows.get(key)

    def _encode(self, texts: list[str], max_sequence_length: int) -> dict[str, TextEmbedCondition]:
        if not texts:
            return {}
        rows: dict[str, TextEmbedCondition] = {}
        with torch.no_grad(), self.bundle.resident(self.encoder.components):
            for chunk in full_chunks(len(texts), self.batch_size):
                batch = self.encoder.encode([texts[row] for row in chunk.rows], max_sequence_length).to("cpu")
                for j in range(chunk.kept):
                    row = batch.select([j]).map_tensors(torch.clone)
                    rows[texts[chunk.rows[j]]] = row
                    self._remember((texts[chunk.rows[j]], max_sequence_length), row)
        return rows

    def _remember(self, key: Key, row: TextEmbedCondition) -> None:
        self._rows[key] = row
        self.size += _num_bytes(row)
        while self.size > self.capacity:
            self.size -= _num_bytes(self._rows.popitem(last=False)[1])


def _num_bytes(row: TextEmbedCondition) -> int:
    tensors = [t for t in (row.embeds, row.pooled, row.mask) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)
