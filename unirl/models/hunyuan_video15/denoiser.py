"""HunyuanVideo 1.5's transformer as a velocity field. Tencent 2025 (arXiv:2511.18870)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unirl.types.conditions import Conditions, TextEmbedCondition


class HunyuanVideo15Denoiser:
    """One forward of the transformer, which reads a condition latent and images of which text to video has none."""

    def __init__(self, transformer: Any, timestep_scale: float) -> None:
        self.transformer = transformer  # diffusers' HunyuanVideo15Transformer3DModel, which has no types
        self.timestep_scale = timestep_scale

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, H, W] fp32 at x [B, C, F, H, W] and sigma [B], given the condition `text`."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.embeds_2 is not None
        dtype = self.transformer.x_embedder.proj.weight.dtype
        latent, condition, mask = x.to(dtype), torch.zeros_like(x, dtype=dtype), torch.zeros_like(x[:, :1], dtype=dtype)
        with one_kernel(latent):
            v = self.transformer(
                hidden_states=torch.cat([latent, condition, mask], dim=1),
                # fp32: 1000 sigma does not fit in the 8 bits of bf16
                timestep=self.timestep_scale * sigma,
                encoder_hidden_states=text.embeds.to(dtype),
                encoder_attention_mask=text.mask,
                encoder_hidden_states_2=text.embeds_2.to(dtype),
                encoder_attention_mask_2=text.mask_2,
                # All zeros means that there is no image: these tokens are masked, so one does what 729 do.
                image_embeds=latent.new_zeros(len(x), 1, self.transformer.config.image_embed_dim),
                return_dict=False,
            )[0]
        return v.float()


def one_kernel(x: Tensor) -> AbstractContextManager[None]:
    """One kernel for any number of rows: on one CPU thread, a 1 x 1 convolution is oneDNN's from 16 rows on only."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return nullcontext()
    return torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
