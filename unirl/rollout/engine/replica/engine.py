"""Samples with a second copy of the model: the trainer's pipeline, kernels and noise, and weights by weight sync.

With equal weights and dtypes its samples equal those of the trainside engine bit for bit, so it is the reference for
every engine with weights of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from unirl.config.errors import SyncError
from unirl.distributed.weight_sync.base import Arrival, CanaryResult, Layout, Numerics, ParamMapping
from unirl.distributed.weight_sync.buckets import Bucket
from unirl.distributed.weight_sync.endpoints import WeightReceiver, uncompiled
from unirl.models.base import CanaryOutput, Pipeline
from unirl.models.loading.lora import LoraSpec, adapter_names, inconsistent_adapters, inject_lora
from unirl.rollout.engine.base import DedicatedEngine
from unirl.types.batch import Batch
from unirl.types.facts import ModelFacts
from unirl.types.protocols import TORCH_DTYPES, Capabilities, DtypeName
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp


class ReplicaRolloutEngine(DedicatedEngine):
    """Samples with its own pipeline, `forward_batch_size` rows per forward."""

    capabilities: ClassVar[Capabilities] = Capabilities(behaviour_logp=True, snapshots=True, dedicated=True)
    toy: ClassVar[Mapping[str, object]] = {"forward_batch_size": 8}

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        forward_batch_size: int = 8,
        dtype: DtypeName | None = None,
        use_torch_compile: bool = False,
    ) -> None:
        """
        Args:
            pipeline: over a bundle that no other object uses.
            forward_batch_size: rows per forward. It changes speed and memory, but no bit of a sample.
            dtype: the dtype in which the network is stored and computes. Absent = the bundle's. Adapters are float32.
            use_torch_compile: compile each block.
        """
        if forward_batch_size < 1:
            raise ValueError(f"rollout.forward_batch_size must be >= 1, got {forward_batch_size}")
        self.pipeline = pipeline
        self.forward_batch_size = forward_batch_size
        self.network: nn.Module = pipeline.bundle.trainable().eval().requires_grad_(False)
        if dtype is not None:
            self.network.to(TORCH_DTYPES[dtype])
            pipeline.stage.autocast_dtype = TORCH_DTYPES[dtype]
        if use_torch_compile:
            compile_blocks(self.network, pipeline.facts)
        self.receiver: WeightReceiver | None = None

    def facts(self) -> ModelFacts:
        """The facts of the model."""
        return self.pipeline.facts

    def sample(self, req: RolloutReq) -> RolloutResp:
        """Run the pipeline."""
        return self.pipeline.generate(req, self.forward_batch_size)

    def prepare(self, layout: Layout) -> ParamMapping:
        """Inject adapters like the trainer's, and map every tensor of the layout to its parameter."""
        self.held = None
        if layout.adapter is not None and not adapter_names(self.network):
            spec = LoraSpec(layout.adapter.rank, layout.adapter.alpha, tuple(layout.adapter.targets))
            inject_lora(self.network, spec, seed=0)
        self._check_adapters(layout)
        self.receiver = WeightReceiver(self.network, layout)
        # requires_grad as at the trainer, also under no_grad: torch.matmul folds dimensions, and rounds, by it.
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name in layout.tensors and layout.payload != "merged")
        numerics = Numerics.of(self.network, self.pipeline.stage.autocast_dtype, self.pipeline.bundle.device)
        return ParamMapping(self.receiver.dtypes(), numerics)

    def _check_adapters(self, layout: Layout) -> None:
        """Raises SyncError when an adapter acts that the trainer does not send, or one that it sends does not act."""
        extra = [name for name in adapter_names(self.network) if name not in layout.tensors]
        if extra:
            raise SyncError(
                f"the engine's network has the adapter weight {extra[0]!r} ({len(extra)} in all), which the "
                "trainer does not send: it would add to the trained weights"
            )
        if layout.adapter is not None:
            spec = LoraSpec(layout.adapter.rank, layout.adapter.alpha, tuple(layout.adapter.targets))
            idle = inconsistent_adapters(self.network, spec)
            if idle:
                raise SyncError(
                    f"the adapter of {idle[0]!r} ({len(idle)} layers) is disabled, merged or not scaled by "
                    f"alpha / rank = {spec.scale:g}: the weights that arrive would not act"
                )

    def take(self, bucket: Bucket) -> None:
        """Copy the tensors of a bucket into the network's parameters."""
        self._bound().receive(bucket)

    def arrival(self) -> Arrival:
        """Fingerprints of the network's parameters."""
        return self._bound().arrival()

    def _bound(self) -> WeightReceiver:
        if self.receiver is None:
            raise SyncError("weights arrived before prepare(layout) was called")
        return self.receiver

    def canary_inputs(self) -> Batch:
        """The pipeline's fixed input, encoded by the engine's own encoders."""
        return self.pipeline.canary_inputs()

    @torch.no_grad()
    def canary(self, inputs: Batch, answer: CanaryOutput) -> CanaryResult:
        """Compare the network's own output with the trainer's."""
        device = self.pipeline.bundle.device
        with uncompiled():
            mine = self.pipeline.stage.canary(inputs.to(device)).values
        theirs = answer.values.to(device)
        gap = (mine - theirs).double()
        relative = gap.square().mean().sqrt() / theirs.double().square().mean().sqrt()
        return CanaryResult(torch.equal(mine, theirs), float(gap.abs().max()), float(relative))

    def move(self, asleep: bool) -> None:
        """Move all components of the bundle."""
        names = tuple(self.pipeline.bundle.modules)
        if asleep:
            self.pipeline.offload(names)
        else:
            self.pipeline.onload(names)


def compile_blocks(network: nn.Module, facts: ModelFacts) -> None:
    """Compile each block of `network` in place."""
    blocks = [module for module in network.modules() if type(module).__name__ in facts.block_class_names]
    if not blocks:
        raise ValueError(f"{type(network).__name__} has no block of {list(facts.block_class_names)} to compile")
    for block in blocks:
        block.forward = torch.compile(block.forward)
