"""The toy of `unirl.testing.toy` as a bundle with a pipeline: prompts in, 4 x 4 images out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from unirl.models.base import components_to_load
from unirl.models.denoising.bundle import DiffusionBundle
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.models.loading.saved_weights import ModuleWeights, SavedWeights
from unirl.testing.toy import ToyDenoiser, toy_denoiser, toy_facts, toy_text
from unirl.types.conditions import TextEmbedCondition


class _HashEncoder:
    components: tuple[str, ...] = ()

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        return toy_text(texts)


class _ImageDecoder:
    components: tuple[str, ...] = ()

    def decode(self, latents: Tensor) -> Tensor:
        return (latents / 2 + 0.5).clamp(0, 1)


class _ImageEncoder:
    components: tuple[str, ...] = ()

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels * 2 - 1


class ToyBundle(DiffusionBundle):
    """The toy as a bundle. Recipes in tests use it as a target."""

    toy: ClassVar[Mapping[str, object]] = {}

    def __init__(
        self,
        components: Sequence[str] | None = None,
        *,
        init_seed: int = 0,
        width: int = 16,
        blocks: int = 1,
        meta_init: bool = False,
    ) -> None:
        components_to_load(components, ("denoiser",), "denoiser")
        self.fresh = partial(toy_denoiser, init_seed, width=width, blocks=blocks)
        denoiser = self.fresh().to("meta") if meta_init else self.fresh()
        super().__init__({"denoiser": denoiser}, toy_facts(), dtype=torch.float32, device=torch.device("cpu"))

    def saved(self) -> SavedWeights:
        return ModuleWeights(self.fresh())

    def denoiser(self) -> ToyDenoiser:
        denoiser = self.trainable()
        assert isinstance(denoiser, ToyDenoiser)
        return denoiser

    def text_encoder(self) -> _HashEncoder:
        return _HashEncoder()

    def decoder(self) -> _ImageDecoder:
        return _ImageDecoder()

    def encoder(self) -> _ImageEncoder:
        return _ImageEncoder()


class ToyPipeline(DiffusionPipeline[ToyBundle]):
    """The general pipeline with the toy bundle."""
