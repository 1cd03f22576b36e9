"""The toy checkpoints: the same classes, tiny, with fixed random weights. `toy-edit` and `toy-edit-plus` read pictures.

The tokenizer knows the words of the chats, so that their openings are as many tokens as the real one makes of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unirl.models.checkpoint import Checkpoint
from unirl.models.qwen_image.templates import CLOSING, EDIT, EDIT_PLUS, TEMPLATES
from unirl.models.qwen_vl.toy import TOYS as QWEN_VL
from unirl.models.toy_tokenizers import QWEN_SPECIALS, QWEN_VOCABULARY, qwen_tokenizer

WORD = re.compile(r"'s|\),| ?\w+| \(")
WORDS = tuple(
    dict.fromkeys(
        word
        for text in (*(template.opening for template in TEMPLATES.values()), CLOSING)
        for word in WORD.findall(re.sub(r"<\|\w+\|>", "\n", text))
    )
)
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
_FROZEN: dict[str, Any] = {
    "text_encoder": _VL | {"text_config": _VL["text_config"] | {"vocab_size": QWEN_VOCABULARY + len(WORDS)}},
    "vae": {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.1, -0.2, 0.3, 0.05],
        "latents_std": [1.5, 0.8, 1.2, 2.0],
    },
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


def _checkpoint(pipeline: str, **transformer: Any) -> Checkpoint:
    configs = {"transformer": _TRANSFORMER | transformer, **_FROZEN}
    return Checkpoint(configs=configs, scheduler=SCHEDULER, pipeline=pipeline)


TOY = _checkpoint("")
TOYS: Mapping[str, Checkpoint] = {
    "toy-edit": _checkpoint(EDIT),
    # References without noise of their own, as in the 2511 edition.
    "toy-edit-plus": _checkpoint(EDIT_PLUS, zero_cond_t=True),
}


def toy_tokenizers() -> dict[str, Any]:
    """Qwen's, one token per byte, special token and word of the chats."""
    tokenizer = qwen_tokenizer(specials=QWEN_SPECIALS)
    tokenizer.add_tokens(list(WORDS))
    return {"tokenizer": tokenizer}
