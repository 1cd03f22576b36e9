"""The toy checkpoints: the same classes, tiny, with fixed random weights."""

from __future__ import annotations

from typing import Any

from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.loading.toy_tokenizers import t5_tokenizer
from unirl.models.wan21.published import I2V, scheduler

LATENT_CHANNELS = 4
TRANSFORMER: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}
SHOWN: dict[str, Any] = {"in_channels": 2 * LATENT_CHANNELS + 4}
"""Of a transformer that reads the first frame and its mask beside the video."""
TEXT_ENCODER: dict[str, Any] = {
    "vocab_size": 98,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": False,
    "use_cache": False,
    "decoder_start_token_id": 0,
}
IMAGE_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
VAE: dict[str, Any] = {
    "base_dim": 4,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": (-0.75, 0.1, 0.95, -0.3),
    "latents_std": (2.8, 1.5, 2.3, 1.2),
}
TOY = ModelConfigs(
    components={"transformer": TRANSFORMER, "text_encoder": TEXT_ENCODER, "vae": VAE},
    scheduler=scheduler(3.0),
)
TOY_I2V = ModelConfigs(
    components={
        "transformer": TRANSFORMER | SHOWN | {"image_dim": 32, "added_kv_proj_dim": 24},
        "text_encoder": TEXT_ENCODER,
        "image_encoder": IMAGE_ENCODER,
        "vae": VAE,
    },
    scheduler=scheduler(3.0),
    pipeline=I2V,
)


def toy_tokenizers() -> dict[str, Any]:
    """A character-level tokenizer, and the processor of the toy's small images."""
    from transformers import CLIPImageProcessorPil

    side = IMAGE_ENCODER["image_size"]
    processor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    return {"tokenizer": t5_tokenizer(), "image_processor": processor}
