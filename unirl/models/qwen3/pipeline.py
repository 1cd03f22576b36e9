"""Text to text with Qwen3: the general pipeline over a Qwen3 bundle."""

from __future__ import annotations

from unirl.models.language.pipeline import TextPipeline
from unirl.models.qwen3.bundle import Qwen3Bundle


class Qwen3Pipeline(TextPipeline[Qwen3Bundle]):
    """Qwen3's chat, thinking switch and sampling are the general ones."""
