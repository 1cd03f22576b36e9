"""The generations of Qwen-VL that are written."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.models.language.bundle import LanguageFamily
from unirl.models.qwen_vl.policy import DeepstackPolicy, QwenVLPolicy


def _nested_name(name: str) -> str:
    """Qwen2.5-VL was published before its language model and its vision tower moved below one module."""
    if name.startswith(("model.language_model.", "model.visual.", "lm_head.")):
        return name
    return f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)


QWEN2_5_VL = LanguageFamily(
    name="qwen2_5_vl",
    model_class="Qwen2_5_VLForConditionalGeneration",
    config_class="Qwen2_5_VLConfig",
    block="Qwen2_5_VLDecoderLayer",
    policy=QwenVLPolicy,
    parameter_name=_nested_name,
    sees=True,
)
QWEN3_VL = LanguageFamily(
    name="qwen3_vl",
    model_class="Qwen3VLForConditionalGeneration",
    config_class="Qwen3VLConfig",
    block="Qwen3VLTextDecoderLayer",
    policy=DeepstackPolicy,
    sees=True,
)
FAMILIES: Mapping[str, LanguageFamily] = {family.name: family for family in (QWEN2_5_VL, QWEN3_VL)}
