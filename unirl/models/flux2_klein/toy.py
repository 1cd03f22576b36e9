"""The toy checkpoints: the same classes, tiny, with fixed random weights; the second one says that it is distilled."""

from __future__ import annotations

from typing import Any

from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.loading.toy_tokenizers import QWEN_VOCABULARY, qwen_tokenizer

_CONFIGS: dict[str, Any] = {
    "transformer": {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 96,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": (4, 4, 4, 4),
        "guidance_embeds": False,
    },
    "text_encoder": {
        "vocab_size": QWEN_VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 256,
    },
    "vae": {
        "sample_size": 32,
        "block_out_channels": (8, 8, 8, 8),
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
    },
}
_SCHEDULER: dict[str, Any] = {"shift": 3.0, "use_dynamic_shifting": True}
TOY = ModelConfigs(components=_CONFIGS, scheduler=_SCHEDULER, settings={"is_distilled": False})
DISTILLED = ModelConfigs(components=_CONFIGS, scheduler=_SCHEDULER, settings={"is_distilled": True})


def toy_tokenizers() -> dict[str, Any]:
    """One token per byte, and Qwen's chat."""
    return {"tokenizer": qwen_tokenizer()}
