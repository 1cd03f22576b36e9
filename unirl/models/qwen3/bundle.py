"""Qwen3 from transformers classes: a hub id, a directory, the toy, or the shipped quick start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from unirl.models.language.bundle import LanguageBundle, LanguageFamily
from unirl.models.qwen3.published import PUBLISHED
from unirl.models.qwen3.toy import TOY, toy_tokenizer

QWEN3 = LanguageFamily(
    name="qwen3", model_class="Qwen3ForCausalLM", config_class="Qwen3Config", block="Qwen3DecoderLayer"
)


class Qwen3Bundle(LanguageBundle):
    """The dense Qwen3 models."""

    families: ClassVar = {QWEN3.name: QWEN3}
    toys: ClassVar = {"toy": TOY}
    published = PUBLISHED
    shipped = Path(__file__).parent / "quickstart"

    @staticmethod
    def toy_tokenizer() -> Any:
        return toy_tokenizer()
