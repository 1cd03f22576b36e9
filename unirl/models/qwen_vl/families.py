"""What differs between the generations of Qwen-VL that are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unirl.models.qwen_vl.policy import DeepstackPolicy, QwenVLPolicy


@dataclass(frozen=True)
class Family:
    """One generation."""

    name: str
    model_class: str
    """transformers' name of the network's class."""
    config_class: str
    block: str
    """The class of a layer of the language model."""
    policy: type[QwenVLPolicy]
    parameter_name: Callable[[str], str] = str
    """The name in the network of a tensor of a checkpoint's files."""


def _nested_name(name: str) -> str:
    """Qwen2.5-VL was published before its language model and its vision tower moved below one module."""
    if name.startswith(("model.language_model.", "model.visual.", "lm_head.")):
        return name
    return f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)


QWEN2_5_VL = Family(
    name="qwen2_5_vl",
    model_class="Qwen2_5_VLForConditionalGeneration",
    config_class="Qwen2_5_VLConfig",
    block="Qwen2_5_VLDecoderLayer",
    policy=QwenVLPolicy,
    parameter_name=_nested_name,
)
QWEN3_VL = Family(
    name="qwen3_vl",
    model_class="Qwen3VLForConditionalGeneration",
    config_class="Qwen3VLConfig",
    block="Qwen3VLTextDecoderLayer",
    policy=DeepstackPolicy,
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in (QWEN2_5_VL, QWEN3_VL)}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the language model; early files of Qwen2.5-VL have it at the top."""
    found: Mapping[str, Any] = config.get("text_config", config)
    return found
