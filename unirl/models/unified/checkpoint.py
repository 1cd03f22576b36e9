"""Checkpoints of one network that writes and draws: one folder in a layout of its own, without model_index.json."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs
from unirl.models.loading.completeness import check_dtypes, check_files, read_headers
from unirl.models.loading.saved_weights import SafetensorsWeights

NETWORK = "transformer"


class UnifiedFamily(DiffusersFamily):
    """A family whose checkpoints diffusers does not read. At most the VAE has a class of diffusers."""

    @abstractmethod
    def weights(self, root: Path, component: str, dtype: torch.dtype) -> SafetensorsWeights:
        """The tensors of a component in a folder, by their names in the component."""

    @abstractmethod
    def write(
        self, folder: Path, components: Mapping[str, nn.Module], configs: ModelConfigs, source: Path | None
    ) -> None:
        """Write the configurations and the weights of a model in the published layout.

        Args:
            components: all components of the model, by name.
            source: the folder that the model was loaded from, whose encoder of images is copied. None for a toy.
        """

    def load(self, root: Path, component: str, dtype: torch.dtype) -> nn.Module:
        """A component with the weights in a folder. Raises NotFoundError (4001) unless all of its weights are there."""
        with torch.device("meta"):
            module = self.build(self.read(root), component)
        weights, place = self.weights(root, component, dtype), f"{component} of the model in {root}"
        check_files(place, root, weights.file)
        check_dtypes(place, module, read_headers(place, root, weights.file), ())
        self.check(root, component, module, weights.shapes())
        module.load_state_dict({name: weights.read(name) for name in module.state_dict()}, assign=True)
        return module


def write_weights(path: Path, tensors: Mapping[str, Tensor], source: Path | None = None) -> None:
    """Write `tensors` into one file.

    Args:
        source: the folder that the model was loaded from. The further tensors of its weights, such as those of an
            encoder of images, are copied in the dtype of the first of `tensors`.
    """
    from safetensors.torch import save_file

    if source is not None:
        dtype = next(iter(tensors.values())).dtype
        file = SafetensorsWeights(source, lambda _: dtype, path.name)
        tensors = {**tensors, **{name: file.read(name) for name in file.shapes() if name not in tensors}}
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})
