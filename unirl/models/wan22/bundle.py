"""Wan 2.2 from diffusers classes: a hub id, a directory, or a toy; two experts of 14B, or one model of 5B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from unirl.models.denoising.bundle import ConditionImageEncoder
from unirl.models.denoising.stage import Denoiser
from unirl.models.loading.checkpoint import DiffusersFamily
from unirl.models.loading.saved_weights import JoinedWeights, SavedWeights
from unirl.models.wan21.bundle import WanBundle
from unirl.models.wan22.conditioning import FirstLatentEncoder
from unirl.models.wan22.denoiser import ExpertsDenoiser, FirstFrameDenoiser
from unirl.models.wan22.experts import WanExperts
from unirl.models.wan22.family import HIGH, LOW, WAN22


class Wan22Bundle(WanBundle):
    """Wan 2.2; the two experts of the 14B models are one trained module."""

    family: ClassVar[DiffusersFamily] = WAN22

    @property
    def has_experts(self) -> bool:
        """Whether there are two."""
        return LOW in self.configs

    def assemble(self, parts: Mapping[str, nn.Module]) -> nn.Module:
        """Both experts, or the one model."""
        if not self.has_experts:
            return super().assemble(parts)
        return WanExperts(parts[HIGH], parts[LOW], self.configs.settings["boundary_ratio"])

    def trained_parts(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """Both experts, or the one model, by component name."""
        return {name: module.get_submodule(name) for name in (HIGH, LOW)} if self.has_experts else {HIGH: module}

    def saved(self) -> SavedWeights:
        """The trained weights as the checkpoint has them, read row by row."""
        if not self.has_experts or self.family.is_toy(self.path):
            return super().saved()
        return JoinedWeights({name: self.saved_part(name) for name in (HIGH, LOW)})

    def denoiser(self) -> Denoiser:
        """The experts, or the one model, as a velocity field."""
        if self.has_experts:
            return ExpertsDenoiser(self.trainable(), self.facts.timestep_scale, self.facts.batch_multiple)
        return FirstFrameDenoiser(self.trainable(), self.facts.timestep_scale)

    def first_frame_encoder(self) -> ConditionImageEncoder:
        """The experts read a first frame beside the video, the 5B model in its place."""
        return super().first_frame_encoder() if self.has_experts else FirstLatentEncoder(self.vae())


class Wan22ImageBundle(Wan22Bundle):
    """The same, whose toy is one of image to video."""

    toy: ClassVar[Mapping[str, object]] = {**Wan22Bundle.toy, "path": "toy-i2v"}


class Wan22SmallBundle(Wan22Bundle):
    """The same, whose toy is one of the 5B model."""

    toy: ClassVar[Mapping[str, object]] = {**Wan22Bundle.toy, "path": "toy-ti2v"}
