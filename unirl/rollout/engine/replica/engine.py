"""A second copy of the model samples: the same pipeline, kernels and noise as the trainer's, weights by weight sync.

With equal weights and dtypes its samples are trainside's bit for bit, so it is what other engines are compared with.
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
    """Samples with a pipeline of its own, `forward_batch_size` rows per forward."""

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
            pipeline: over a bundle that nobody else uses.
            forward_batch_size: rows per forward; it changes speed and memory, never a bit of a sample.
            dtype: of the network, stored and computed; absent = the bundle's. Adapters are float32.
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
        """One pass of the pipeline."""
        return self.pipeline.generate(req, self.forward_batch_size)

    def prepare(self, layout: Layout) -> ParamMapping:
        """Adapters are injected as the trainer's are; every tensor of the layout gets its parameter."""
        self.held = None
        if layout.adapter is not None and not adapter_names(self.network):
            spec = LoraSpec(layout.adapter.rank, layout.adapter.alpha, tuple(layout.adapter.targets))
            inject_lora(self.network, spec, seed=0)
        self._check_adapters(layout)
        self.receiver = WeightReceiver(self.network, layout)
        # Flags as the trainer's, also under no_grad: torch.matmul folds dimensions by them, and so rounds by them.
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name in layout.tensors and layout.payload != "merged")
        numerics = Numerics.of(self.network, self.pipeline.stage.autocast_dtype, self.pipeline.bundle.device)
        return ParamMapping(self.receiver.dtypes(), numerics)

    def _check_adapters(self, layout: Layout) -> None:
        """No adapter acts that the trainer does not send, and those that it sends do."""
        extra = [name for name in adapter_names(self.network) if name not in layout.tensors]
        if extra:
            raise SyncError(
                f"the engine's network carries the adapter weight {extra[0]!r} ({len(extra)} in all), which the "
                "trainer does not send: it would add to the trained weights"
            )
        if layout.adapter is not None:
            spec = LoraSpec(layout.adapter.rank, layout.adapter.alpha, tuple(layout.adapter.targets))
            idle = inconsistent_adapters(self.network, spec)
            if idle:
                raise SyncError(
                    f"the adapter of {idle[0]!r} ({len(idle)} layers) is disabled, merged or scaled otherwise than "
                    f"alpha / rank = {spec.scale:g}: what arrives would not act"
                )

    def take(self, bucket: Bucket) -> None:
        """Copy tensors into the network's parameters."""
        self._bound().receive(bucket)

    def arrival(self) -> Arrival:
        """Fingerprints of the network's parameters."""
        return self._bound().arrival()

    def _bound(self) -> WeightReceiver:
        if self.receiver is None:
            raise SyncError("weights came before the engine knew which: prepare(layout) comes first")
        return self.receiver

    def canary_inputs(self) -> Batch:
        """What the pipeline asks two networks; the engine's own encoders take part."""
        return self.pipeline.canary_inputs()

    @torch.no_grad()
    def canary(self, inputs: Batch, answer: CanaryOutput) -> CanaryResult:
        """The network's own answer against the trainer's."""
        device = self.pipeline.bundle.device
        with uncompiled():
            mine = self.pipeline.stage.canary(inputs.to(device)).values
        theirs = answer.values.to(device)
        gap = (mine - theirs).double()
        relative = gap.square().mean().sqrt() / theirs.double().square().mean().sqrt()
        return CanaryResult(torch.equal(mine, theirs), float(gap.abs().max()), float(relative))

    def move(self, asleep: bool) -> None:
        """All components of the bundle."""
        names = tuple(self.pipeline.bundle.modules)
        if asleep:
            self.pipeline.offload(names)
        else:
            self.pipeline.onload(names)


def compile_blocks(network: nn.Module, facts: ModelFacts) -> None:
    """Compile each block of `network` in place."""
    blocks = [module for module in network.modules() if type(module).__name__ in facts.block_class_names]
    if not blocks:
        raise ValueError(f"{type(network).__name__} holds no block of {list(facts.block_class_names)} to compile")
    for block in blocks:
        block.forward = torch.compile(block.forward)
