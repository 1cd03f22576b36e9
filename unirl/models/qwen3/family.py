"""Qwen3: text to text, from transformers classes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from unirl.models.language.bundle import LanguageBundle, LanguageFamily
from unirl.models.language.pipeline import TextPipeline
from unirl.models.loading.checkpoint import read_entries, with_random
from unirl.models.loading.toy_tokenizers import qwen3_tokenizer

FOLDER = Path(__file__).parent
QWEN3 = LanguageFamily(
    name="qwen3", model_class="Qwen3ForCausalLM", config_class="Qwen3Config", block="Qwen3DecoderLayer"
)


class Qwen3Bundle(LanguageBundle):
    """The dense Qwen3 models."""

    families: ClassVar = {QWEN3.name: QWEN3}
    published = read_entries(FOLDER / "published.json")
    toys = with_random(read_entries(FOLDER / "toy.json"), published)
    shipped: ClassVar = {name: FOLDER / name for name in ("quickstart", "quickstart_teacher", "quickstart_rewriter")}
    toy_tokenizer = staticmethod(qwen3_tokenizer)


class Qwen3Pipeline(TextPipeline[Qwen3Bundle]):
    """Text to text with Qwen3."""
