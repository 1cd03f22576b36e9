"""Samples with a second copy of the model: the trainer's pipeline, kernels and noise, and weights by weight sync.

With equal weights and dtypes its samples equal those of the trainside engine bit for bit, so it is the reference for
every engine with weights of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.compiler import set_stance

from unirl.config.errors import SyncError
from unirl.distributed.weight_sync.base import Arrival, CanaryResult, Numerics, ParamMapping, WeightLayout
from unirl.distributed.weight_sync.buckets import Bucket
from unirl.distributed.weight_sync.endpoints import WeightReceiver
from unirl.models.base import CanaryOutput, Pipeline
from unirl.models.loading.compiled import compile_blocks
from unirl.models.loading.dtypes import cast_module
from unirl.models.loading.lora import AdapterCopies, adapter_names, inconsistent_adapters, inject_lora, masters
from unirl.rollout.engine.base import DedicatedEngine, RowsPerForward, checked_rows, rows_per_forward, sampled_from
from unirl.types.batch import Batch
from unirl.types.facts import ModelFacts
from unirl.types.fp8 import Fp8Linear
from unirl.types.protocols import TORCH_DTYPES, Capabilities, DtypeName
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp


class ReplicaRolloutEngine(DedicatedEngine):
    """Samples with its own pipeline, `forward_batch_size` rows per forward."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        old_logp="native", snapshots=True, dedicated=True, adapters=True, tools=True, pauses=True
    )
    toy: ClassVar[Mapping[str, object]] = {"forward_batch_size": 8}

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        forward_batch_size: RowsPerForward = "auto",
        dtype: DtypeName | None = None,
        weight_dtype: Literal["fp8"] | None = None,
        use_torch_compile: bool = False,
    ) -> None:
        """
        Args:
            pipeline: over a bundle that no other object uses.
            forward_batch_size: rows per forward. It changes speed and memory, but no bit of a sample. The word "auto"
                takes 8; for tokens on a GPU, it takes as many slots as fit 24 GiB of keys and values, at most 256.
            dtype: the dtype in which the network is stored and computes. Absent = the bundle's. Adapters are float32.
            weight_dtype: store the linear layers of the blocks in eight bits, with a scale for each row, after every
                transfer. The engine then is another policy than the trained one, so the loss must weigh its samples.
                Absent = the dtype of the network.
            use_torch_compile: compile each block.
        """
        self.pipeline = pipeline
        self.forward_batch_size = checked_rows(forward_batch_size)
        self.network: nn.Module = pipeline.bundle.trainable().eval().requires_grad_(False)
        if dtype is not None:
            cast_module(self.network, TORCH_DTYPES[dtype])
            pipeline.stage.autocast_dtype = TORCH_DTYPES[dtype]
        self.is_quantized = weight_dtype is not None
        self.is_compiled = use_torch_compile
        if use_torch_compile:
            compile_blocks(blocks_of(self.network, pipeline.facts))
        self.receiver: WeightReceiver | None = None

    def facts(self) -> ModelFacts:
        return self.pipeline.facts

    def spell(self, rows: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        return [self.pipeline.bundle.spell(row) for row in rows]

    def sample(self, req: RolloutReq) -> RolloutResp:
        resp = self.pipeline.generate(req, rows_per_forward(self.forward_batch_size, self.pipeline, req))
        return sampled_from(req.weight_version, resp)

    def prepare(self, layout: WeightLayout) -> ParamMapping:
        self.held = None
        if layout.adapter is not None and not adapter_names(self.network):
            inject_lora(self.network, layout.adapter, seed=0)
            if not self.is_compiled:
                AdapterCopies.attach(self.network)
        self._check_adapters(layout)
        if self.is_quantized:
            quantize_blocks(blocks_of(self.network, self.pipeline.facts))
        self.receiver = WeightReceiver(self.network, layout)
        # requires_grad as at the trainer, also under no_grad: torch.matmul folds dimensions, and rounds, by it.
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name in layout.tensors and layout.payload != "merged")
        numerics = Numerics.of(self.network, self.pipeline.stage.autocast_dtype, self.pipeline.bundle.device)
        return ParamMapping(self.receiver.dtypes(), numerics, self.receiver.quantized())

    def _check_adapters(self, layout: WeightLayout) -> None:
        """Raises SyncError when an adapter acts that the trainer does not send, or one that it sends does not act."""
        extra = [name for name in adapter_names(self.network) if name not in layout.tensors]
        if extra:
            raise SyncError(
                f"the engine's network has the adapter weight {extra[0]!r} ({len(extra)} in all), which the "
                "trainer does not send: it would add to the trained weights"
            )
        spec = layout.adapter
        idle = [] if spec is None else inconsistent_adapters(self.network, spec)
        if spec is not None and idle:
            raise SyncError(
                f"the adapter of {idle[0]!r} ({len(idle)} layers) is disabled, merged or not scaled by "
                f"alpha / rank = {spec.scale:g}: the weights that arrive would not act"
            )

    def take(self, bucket: Bucket) -> None:
        self._bound().receive(bucket)

    def arrival(self) -> Arrival:
        return self._bound().arrival()

    def _bound(self) -> WeightReceiver:
        if self.receiver is None:
            raise SyncError("weights arrived before prepare(layout) was called")
        return self.receiver

    def canary_inputs(self) -> Batch:
        return self.pipeline.canary_inputs()

    @torch.no_grad()
    def canary(self, inputs: Batch, answer: CanaryOutput) -> CanaryResult:
        device = self.pipeline.bundle.device
        with set_stance("force_eager"):
            mine = self.pipeline.stage.canary(inputs.to(device)).values
        theirs = answer.values.to(device)
        gap = (mine - theirs).double()
        relative = gap.square().mean().sqrt() / theirs.double().square().mean().sqrt()
        return CanaryResult(torch.equal(mine, theirs), float(gap.abs().max()), float(relative))

    def move(self, asleep: bool) -> None:
        bundle = self.pipeline.bundle
        (bundle.offload if asleep else bundle.onload)(tuple(bundle.modules))


def blocks_of(network: nn.Module, facts: ModelFacts) -> list[nn.Module]:
    """The blocks of `network`, which are compiled one by one and whose linear layers may be quantised."""
    blocks = [module for module in network.modules() if type(module).__name__ in facts.block_class_names]
    if not blocks:
        raise ValueError(f"{type(network).__name__} has no block of {list(facts.block_class_names)}")
    return blocks


def quantize_blocks(blocks: Sequence[nn.Module]) -> None:
    """Store the weights of all linear layers of the blocks in eight bits, in place. Adapters and biases are kept."""
    for block in blocks:
        kept = {id(weight) for layer in block.modules() if hasattr(layer, "lora_A") for weight in masters(layer)}
        for layer in block.modules():
            if type(layer) is nn.Linear and id(layer.weight) not in kept:
                Fp8Linear.convert(layer)
