"""Contracts of all model families: bundle, stage, pipeline, and the canary that compares two copies of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from unirl.models.loading.adapter_sources import AdapterLayers
from unirl.models.loading.saved_weights import SavedWeights
from unirl.types.batch import Batch, row
from unirl.types.conditions import Conditions
from unirl.types.device import CPU, move_module, put_back, tensors_of
from unirl.types.facts import ModelFacts
from unirl.types.primitives import Decoded
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack
from unirl.types.segments import Segment

CANARY_PROMPTS = ("a canary in a coal mine", "a yellow bird", "an empty cage", "")
CANARY_IDS = tuple(f"canary:{i}" for i in range(len(CANARY_PROMPTS)))


@dataclass(kw_only=True, eq=False)
class CanaryOutput(Batch):
    """The output of one small forward through all trained weights. Equal weights give equal values."""

    values: Tensor = row(heavy=True)  # [B, ...] fp32


@dataclass(kw_only=True, eq=False)
class LatentCanaryInputs(Batch):
    """The inputs of a denoiser's canary forward."""

    x: Tensor = row(heavy=True)  # [B, *latent]
    sigma: Tensor = row(heavy=True)  # [B]
    conditions: dict[str, Batch] = row()


class Stage(Protocol):
    """The part of a policy's contract that all domains share. Each domain defines its own `sample` and `replay`."""

    autocast_dtype: torch.dtype
    """The compute dtype of the network."""

    def canary(self, inputs: Any) -> CanaryOutput:
        """Run the network on the `canary_inputs` of its pipeline, which must be on the network's device."""


class Bundle(ABC):
    """The modules of one checkpoint by component name. `facts.trainable_attr` is trained; the others are frozen.

    Backends change the trained module in place (adapters, sharding), so every holder of the bundle sees the same
    weights. The trained module may be on the meta device: it has no storage until a backend fills it from `saved()`.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], facts: ModelFacts, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.modules = dict(modules)
        self.facts = facts
        self.dtype = dtype
        """The compute dtype of the network; a backend may keep trained parameters in a wider dtype."""
        self.device = device
        self.host_copies: dict[str, Mapping[str, Tensor]] = {}
        """Weights of frozen components that were brought from main memory. They stay there, and are not copied back."""
        for module in self.modules.values():
            module.eval().requires_grad_(False)
            if not next(module.parameters()).is_meta:
                module.to(device)
        self.trainable().requires_grad_(True)

    def trainable(self) -> nn.Module:
        """The module that is trained."""
        return self.modules[self.facts.trainable_attr]

    def with_network(self, network: nn.Module) -> Self:
        """A bundle with `network` as its trained module, moved to the same device. It shares all other modules."""
        other = copy(self)
        other.modules = {**self.modules, self.facts.trainable_attr: network.eval().to(self.device)}
        return other

    @abstractmethod
    def stage(self) -> Stage:
        """The trained network as a policy that samples and replays. It uses no other component."""

    def stage_of(self, track: str) -> Stage:
        """The policy of a track. One network may be several policies, such as one of text and one of images."""
        return self.stage()

    def spell(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """The text of each token. Empty for a model that writes no texts."""
        return ()

    def saved(self) -> SavedWeights:
        """The weights of the trained module as the checkpoint stores them, readable row by row."""
        raise NotImplementedError(f"{type(self).__name__} cannot fill a module that was built without storage")

    def saved_at(self, path: str, revision: str | None = None) -> SavedWeights:
        """The trained module's weights in another checkpoint of the same architecture, read row by row."""
        raise NotImplementedError(f"{type(self).__name__} cannot read the weights of another checkpoint")

    def read_adapter(self, path: str) -> AdapterLayers:
        """The layers of a LoRA file, or of the folder of one. Raises DataError unless all its tensors fit the model."""
        raise NotImplementedError(f"{type(self).__name__} cannot read adapters")

    @property
    def frozen(self) -> tuple[str, ...]:
        """The names of all components that are not trained, such as encoders and VAE."""
        return tuple(name for name in self.modules if name != self.facts.trainable_attr)

    def offload(self, names: Sequence[str]) -> None:
        """Move components to main memory."""
        self._move(names, CPU)

    def onload(self, names: Sequence[str]) -> None:
        """Move components to the bundle's device."""
        self._move(names, self.device)

    @contextmanager
    def resident(self, names: Sequence[str]) -> Iterator[None]:
        """Move components to the device for the duration of the context, and back afterwards."""
        before = {name: _device_of(self.modules[name]) for name in names}
        self.onload(names)
        try:
            yield
        finally:
            for name, device in before.items():
                self._move([name], device)

    def _move(self, names: Sequence[str], device: torch.device) -> None:
        for name in names:
            if name not in self.modules:
                raise ValueError(f"the bundle has no component {name!r}; it has {sorted(self.modules)}")
            module = self.modules[name]
            if _device_of(module) == device:
                continue
            if device == CPU and name in self.host_copies:
                put_back(module, self.host_copies[name])
                continue
            if name in self.frozen and _device_of(module) == CPU:
                self.host_copies[name] = {key: tensor.detach() for key, tensor in tensors_of(module).items()}
            move_module(module, device)


def components_to_load(components: Sequence[str] | None, all_names: Sequence[str], trained: str) -> tuple[str, ...]:
    """The named components and the trained one, in the checkpoint's order; all components if `components` is None."""
    if components is None:
        return tuple(all_names)
    unknown = [name for name in components if name not in all_names]
    if unknown:
        raise ValueError(f"the checkpoint has no component {unknown[0]!r}; it has {', '.join(all_names)}")
    return tuple(name for name in all_names if name in components or name == trained)


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def response_of(
    req: RolloutReq,
    conditions: Conditions,
    segment: Segment,
    decoded: Decoded,
    cut_prompts: list[bool] | None = None,
) -> RolloutResp:
    """The response with the one track of a request, rows in the order of the request."""
    [name] = req.tracks
    track = RolloutTrack(
        sample_ids=req.sample_ids,
        group_ids=req.group_ids,
        prompts=req.prompts(),
        cut_prompts=cut_prompts,
        conditions=conditions,
        segment=segment,
        decoded=decoded,
        weight=torch.ones(len(req)),
        weight_version=torch.full((len(req),), req.weight_version, dtype=torch.int64),
    )
    return RolloutResp({name: track})


class Pipeline(Protocol):
    """Turns a request into a response with one bundle. Rollout engines use this contract for every domain."""

    capabilities: ClassVar[Capabilities]
    """The modalities that it generates."""

    @property
    def bundle(self) -> Bundle: ...

    @property
    def stage(self) -> Stage: ...

    @property
    def facts(self) -> ModelFacts: ...

    def stage_of(self, track: str) -> Stage:
        """The policy of a track: `stage`, unless the pipeline has several."""

    def generate(self, req: RolloutReq, chunk_size: int) -> RolloutResp:
        """Sample all rows of a request with pinned sampling settings, about `chunk_size` rows at a time."""

    def canary_inputs(self) -> Batch:
        """Fixed inputs on which two networks that should hold the same weights are compared."""
