"""A first frame to what Wan reads of it.

image   [B, 4 + C, F, h, w] = mask (1 at the first latent frame)   ++   VAE(first frame, then grey frames)
vision  [B, L, D]           = CLIP-vision's states before its last layer; Wan 2.1 only
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.models.denoising.vae import from_unit
from unirl.models.images import to_pil
from unirl.models.wan21.denoiser import FIRST_FRAME, VISION
from unirl.models.wan21.vae import WanVAE
from unirl.types.conditions import Conditions, LatentCondition, VisionCondition
from unirl.types.sampling import DiffusionSamplingParams


class FirstFrameEncoder:
    """By the VAE, and by CLIP where the checkpoint has one. The same tensors as `WanImageToVideoPipeline`'s."""

    def __init__(self, vae: WanVAE, frame_scale: int, image_encoder: Any = None, processor: Any = None) -> None:
        self.vae = vae
        self.frame_scale = frame_scale
        self.image_encoder = image_encoder  # transformers' CLIPVisionModel
        self.processor = processor
        self.components = vae.components if image_encoder is None else (*vae.components, "image_encoder")

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """The conditions of images [B, 1, 3, H, W] in [0, 1]."""
        first = from_unit(images[:, 0])
        grey = first.new_zeros(*first.shape[:2], params.num_frames - 1, *first.shape[2:])
        latents = self.vae.latents_of(torch.cat([first[:, :, None], grey], dim=2))
        mask = latents.new_zeros(len(latents), self.frame_scale, *latents.shape[2:])
        mask[:, :, 0] = 1.0
        conditions: Conditions = {FIRST_FRAME: LatentCondition(latents=torch.cat([mask, latents], dim=1))}
        if self.image_encoder is not None:
            conditions[VISION] = self._vision(images[:, 0])
        return conditions

    def _vision(self, images: Tensor) -> VisionCondition:
        inputs = self.processor(images=[to_pil(image) for image in images], return_tensors="pt")
        pixels = inputs.pixel_values.to(images.device)
        states = self.image_encoder(pixel_values=pixels, output_hidden_states=True).hidden_states
        return VisionCondition(embeds=states[-2])
