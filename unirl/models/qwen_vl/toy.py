"""The toy checkpoints: both generations, tiny, with fixed random weights; a tokenizer and a picture size to match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirl.models.qwen3.toy import byte_letters

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIALS = (END_OF_TEXT, START, END, VISION_START, VISION_END, IMAGE, VIDEO)
PATCH = 4
MERGE = 2

_TEXT: dict[str, Any] = {
    "vocab_size": 256 + len(SPECIALS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "initializer_range": 0.1,
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.1,
}
_TOKENS: dict[str, Any] = {
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "image_token_id": 261,
    "video_token_id": 262,
    "tie_word_embeddings": True,
}
TOYS: Mapping[str, dict[str, Any]] = {
    "toy": {
        "model_type": "qwen3_vl",
        "text_config": _TEXT
        | {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        "vision_config": _VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **_TOKENS,
    },
    "toy-qwen2.5": {
        "model_type": "qwen2_5_vl",
        "text_config": _TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "vision_config": _VISION | {"window_size": 2 * PATCH * MERGE, "fullatt_block_indexes": [1]},
        **_TOKENS,
    },
}
"""Configurations by the path that names them."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_tokenizer() -> Any:
    """One token per byte, and Qwen's own special tokens and chat."""
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate([*byte_letters(), *SPECIALS])},
        merges=[],
        pad_token=END_OF_TEXT,
        eos_token=END,
        extra_special_tokens=list(SPECIALS),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def toy_image_processor() -> Any:
    """Qwen's own, for pictures of 16 x 16 to 32 x 32 pixels: 4 to 16 tokens."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": 16 * 16, "longest_edge": 32 * 32},
    )
