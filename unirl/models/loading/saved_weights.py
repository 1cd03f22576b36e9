"""Reads the weights of a checkpoint row by row, for modules that were built without storage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from unirl.config.errors import NotFoundError

WEIGHTS = "diffusion_pytorch_model.safetensors"
"""The weight file of a component of diffusers. Larger ones are split into files that an index lists."""
LANGUAGE_WEIGHTS = "model.safetensors"
"""The weight file of a model of transformers."""


class SavedWeights(Protocol):
    """Tensors by their names in the module without adapters."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor."""
        ...

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows, on the CPU in the dtype of the bundle."""
        ...


class ModuleWeights:
    """The tensors of a small module in main memory."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors = module.state_dict()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        tensor: Tensor = self.tensors[name]
        return tensor if rows is None else tensor[rows]


class SafetensorsWeights:
    """The tensors of a folder that diffusers or transformers wrote. Only the requested rows are read."""

    def __init__(self, folder: Path, dtype: torch.dtype, name: str = WEIGHTS) -> None:
        self.folder = folder
        self.dtype = dtype
        self.name = name

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name) if rows is None else self._files[name].get_slice(name)[rows]
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    @cached_property
    def _files(self) -> dict[str, Any]:
        """Tensor name -> the open file that holds it."""
        index = self.folder / f"{self.name}.index.json"
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [self.name]
            files = [safe_open(self.folder / name, "pt") for name in names]
        except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
            raise NotFoundError(
                f"cannot read the weights in {self.folder}: {error}. Download the model again"
            ) from error
        return {name: file for file in files for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)


class RenamedWeights:
    """The tensors of a checkpoint whose files use other names than the module."""

    def __init__(self, weights: SavedWeights, name_of: Callable[[str], str]) -> None:
        """`name_of` maps the name of a tensor in the files to its name in the module."""
        self.weights = weights
        self.name_of = name_of

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {self.name_of(name): shape for name, shape in self.weights.shapes().items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self.weights.read(self._file_names[name], rows)

    @cached_property
    def _file_names(self) -> Mapping[str, str]:
        return {self.name_of(name): name for name in self.weights.shapes()}


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
