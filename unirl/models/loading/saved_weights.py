"""Reads the weights of a checkpoint row by row, for modules that were built without storage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.loading.completeness import check_files

WEIGHTS = "diffusion_pytorch_model.safetensors"
"""The weight file of a component of diffusers. Larger ones are split into files that an index lists."""
LANGUAGE_WEIGHTS = "model.safetensors"
"""The weight file of a model of transformers."""


class SavedWeights(Protocol):
    """Tensors by their names in the module without adapters."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor."""

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows, on the CPU in the dtype of the bundle."""


class ModuleWeights:
    """The tensors of a small module in main memory."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors = module.state_dict()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        tensor: Tensor = self.tensors[name]
        return tensor if rows is None else tensor[rows]


@dataclass(eq=False)
class SafetensorsWeights:
    """The tensors of a folder that diffusers or transformers wrote. Only the requested rows are read."""

    folder: Path
    dtype_of: Callable[[str], torch.dtype]
    """The dtype of a parameter in the bundle, by its name in the module."""
    file: str = WEIGHTS
    """The name of the weight file."""
    name_of: Callable[[str], str] = str
    """Maps the name of a tensor in the file to its name in the module."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(own).get_shape()) for name, (file, own) in self._tensors.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        file, own_name = self._tensors[name]
        tensor: Tensor = file.get_tensor(own_name) if rows is None else file.get_slice(own_name)[rows]
        return tensor.to(self.dtype_of(name)) if tensor.is_floating_point() else tensor

    @cached_property
    def _tensors(self) -> dict[str, tuple[safe_open, str]]:
        """The open file that holds a tensor, and its name there, by its name in the module."""
        check_files(f"the weights in {self.folder}", self.folder, self.file)
        index = self.folder / f"{self.file}.index.json"
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [self.file]
            files = [safe_open(self.folder / name, "pt") for name in names]
        except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
            raise NotFoundError(
                f"cannot read the weights in {self.folder}: {error}. Download the model again"
            ) from error
        return {self.name_of(name): (file, name) for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)


class JoinedWeights:
    """The tensors of several components, named `<component>.<tensor>`."""

    def __init__(self, components: Mapping[str, SavedWeights]) -> None:
        self.components = components

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        pairs = self.components.items()
        return {f"{part}.{name}": shape for part, weights in pairs for name, shape in weights.shapes().items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        part, _, own_name = name.partition(".")
        return self.components[part].read(own_name, rows)
