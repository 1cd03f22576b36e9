"""The toy checkpoint: the same classes, tiny, with fixed random weights.

The tokenizer knows the words of the chat, so that its opening is as many tokens as the real one makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.loading.toy_tokenizers import QWEN_SPECIALS, QWEN_VOCABULARY, qwen_tokenizer
from unirl.models.qwen_image.templates import CLOSING, DRAW
from unirl.models.qwen_vl.toy import TOYS as QWEN_VL

WORD = re.compile(r"'s|\),| ?\w+| \(")
_VL = QWEN_VL["toy-qwen2.5"]

_TRANSFORMER: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "guidance_embeds": False,
    "axes_dims_rope": (4, 6, 6),
}
_VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.1, -0.2, 0.3, 0.05],
    "latents_std": [1.5, 0.8, 1.2, 2.0],
}
SCHEDULER: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
}
"""Of the public checkpoints too."""


def words_of(*openings: str) -> Sequence[str]:
    """The different words of chats that open so, with the spaces before them."""
    texts = (re.sub(r"<\|\w+\|>", "\n", text) for text in (*openings, CLOSING))
    return tuple(dict.fromkeys(word for text in texts for word in WORD.findall(text)))


def toy_checkpoint(words: Sequence[str], pipeline: str = "", **transformer: Any) -> ModelConfigs:
    """
    Args:
        words: tokens of the encoder besides those of every toy.
        transformer: what its configuration says besides.
    """
    text = _VL["text_config"] | {"vocab_size": QWEN_VOCABULARY + len(words)}
    configs = {"transformer": _TRANSFORMER | transformer, "text_encoder": _VL | {"text_config": text}, "vae": _VAE}
    return ModelConfigs(components=configs, scheduler=SCHEDULER, pipeline=pipeline)


def toy_tokenizer(words: Sequence[str]) -> Any:
    """Qwen's, one token per byte, special token and word of the chats."""
    tokenizer = qwen_tokenizer(specials=QWEN_SPECIALS)
    tokenizer.add_tokens(list(words))
    return tokenizer


WORDS = words_of(DRAW.opening)
TOY = toy_checkpoint(WORDS)


def toy_tokenizers() -> Mapping[str, Any]:
    """The one of Qwen2.5-VL."""
    return {"tokenizer": toy_tokenizer(WORDS)}
