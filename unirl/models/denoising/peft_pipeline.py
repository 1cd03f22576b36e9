"""Exports of families that diffusers does not load: whole models in the layout of the family, and adapters for peft."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import ClassVar, TypeVar

from torch import nn

from unirl.models.denoising.bundle import CheckpointBundle
from unirl.models.denoising.diffusers_pipeline import sample_with_euler
from unirl.models.denoising.pipeline import LatentPipeline
from unirl.models.loading.adapter_files import Adapter, load_peft_adapter, write_peft_adapter
from unirl.models.loading.base_model import OWN_LAYOUT, BaseModel
from unirl.types.sampling import DiffusionSamplingParams

BundleT = TypeVar("BundleT", bound=CheckpointBundle, covariant=True)


class PeftPipeline(LatentPipeline[BundleT]):
    """A pipeline that writes adapters for peft, and verifies exports by loading them into a second network.

    A subclass writes whole models with `write_model`, in the layout that `CheckpointBundle.network_at` reads.
    """

    lora_formats: ClassVar[tuple[str, ...]] = ("peft",)

    @property
    def base_model(self) -> BaseModel:
        """The model before training, in the layout of its publisher."""
        return BaseModel(library=OWN_LAYOUT, is_toy=self.bundle.is_toy)

    def write_lora(self, folder: Path, adapter: Adapter) -> Path:
        """Write an adapter as a folder that peft loads onto the untrained network."""
        return write_peft_adapter(folder, adapter, self.bundle.path)

    def verify_model(self, folder: Path, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """Max abs difference between samples with the current weights and those of the model in `folder`."""
        return self.difference(self.bundle.network_at(folder), texts, params)

    def verify_lora(self, folder: Path, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """The same for the untrained network with the adapter in `folder`, loaded by peft."""
        return self.difference(load_peft_adapter(folder, self.bundle.untrained()), texts, params)

    def difference(self, network: nn.Module, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """Max abs difference between samples with the current weights and those of another network, by Euler steps."""
        other = copy(self)
        other.stage = self.bundle.with_network(network).stage()
        ours, theirs = (sample_with_euler(pipeline, texts, params).latents for pipeline in (self, other))
        return float((ours - theirs).abs().max())
