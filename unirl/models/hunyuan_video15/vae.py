"""Latents to pixels in [0, 1]."""

from __future__ import annotations

from typing import Any

from unirl.models.hunyuan_video.vae import VideoDecoder


class HunyuanVideo15Decoder(VideoDecoder):
    """One video at a time: the VAE's attention mask fits no more."""

    def __init__(self, vae: Any) -> None:
        super().__init__(vae)
        vae.enable_slicing()
