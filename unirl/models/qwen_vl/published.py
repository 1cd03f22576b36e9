"""Configurations of public Qwen-VL checkpoints, so that a run can be planned without a connection."""

from __future__ import annotations

from typing import Any

_TOWER: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": True,
        "vision_config": _TOWER | {"out_hidden_size": 2048},
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128000,
            "tie_word_embeddings": True,
        },
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        "vision_config": _TOWER | {"out_hidden_size": 3584},
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128000,
            "tie_word_embeddings": False,
        },
    },
}
