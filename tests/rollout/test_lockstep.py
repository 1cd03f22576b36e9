"""Ranks sample the same bits with sharded weights as with gathered ones, however many forwards each of them runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.family_cases import CASES
from tests.toy import ToyBundle, ToyPipeline
from tests.train.ranks import fsdp_events, run_ranks
from unirl.distributed import current
from unirl.models.base import Pipeline
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.sde.kernels import EulerODE, FlowSDEStrategy
from unirl.testing.bundle import request_of
from unirl.testing.toy import ToyDenoiser, toy_params
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, Sampling
from unirl.types.segments import TextSegment

Model = Callable[[], tuple[Pipeline, RolloutReq]]
"""A new model, and a request of eight rows."""
ENDS = (258, *range(16))
"""Many tokens end a response, so that responses are ragged."""
WRITING = ARSamplingParams(max_new_tokens=8, temperature=1.5)


def requested(track: str, params: Sampling, count: int = 8) -> RolloutReq:
    return request_of(["ab" * (1 + 3 * i) for i in range(count)], track, params)


def drawn(pipeline: Any, **changes: Any) -> RolloutReq:
    """A request for images of 32 x 32 pixels, of which the second step is stochastic."""
    values = {"kernel": FlowSDEStrategy(), "num_inference_steps": 3, "height": 32, "width": 32, "sde_indices": (1,)}
    params = DiffusionSamplingParams(**(values | {"max_sequence_length": 16} | changes))
    return requested("image", params.pinned(0, tuple(pipeline.sigmas(params).tolist())))


def toy() -> tuple[Pipeline, RolloutReq]:
    return ToyPipeline(ToyBundle(width=18, blocks=3)), requested("image", toy_params(guidance_scale=2.0))


def toy_with_a_step_cache() -> tuple[Pipeline, RolloutReq]:
    params = toy_params(num_inference_steps=12, sde_indices=(), kernel=EulerODE(), cache_threshold=0.05)
    return ToyPipeline(ToyBundle(width=18, blocks=3)), requested("image", params)


class UnevenDenoiser(ToyDenoiser):
    """Leaves out its second block at some noise levels and latents, and its last one at others."""

    def forward(self, x: Tensor, sigma: Tensor, pooled: Tensor) -> Tensor:
        hidden = self.input_layer(torch.cat([x.flatten(1), sigma[:, None], pooled], dim=1))
        first, second, third = self.blocks
        hidden = first(hidden)
        if sigma[0] > 0.99 or x[0, 0, 0, 0] > 0:
            hidden = second(hidden)
        if sigma[0] > 0.5:
            hidden = third(hidden)
        return self.output_layer(hidden).view_as(x).clone()


class ReversedDenoiser(ToyDenoiser):
    """Runs its blocks in reverse order at low noise levels, or always on the second of several ranks."""

    def forward(self, x: Tensor, sigma: Tensor, pooled: Tensor) -> Tensor:
        hidden = self.input_layer(torch.cat([x.flatten(1), sigma[:, None], pooled], dim=1))
        is_reversed = sigma[0] < 0.5 if self.levels else current().dp_rank == 1
        for block in reversed(self.blocks) if is_reversed else self.blocks:
            hidden = block(hidden)
        return self.output_layer(hidden).view_as(x).clone()

    levels = True


class RankedDenoiser(ReversedDenoiser):
    levels = False


def toy_of(denoiser: type[ToyDenoiser]) -> tuple[Pipeline, RolloutReq]:
    """The toy with another order of blocks."""
    bundle = ToyBundle(width=18, blocks=3)
    bundle.trainable().__class__ = denoiser
    return ToyPipeline(bundle), requested("image", toy_params())


def uneven() -> tuple[Pipeline, RolloutReq]:
    return toy_of(UnevenDenoiser)


def reversed_later() -> tuple[Pipeline, RolloutReq]:
    return toy_of(ReversedDenoiser)


def reversed_on_one_rank() -> tuple[Pipeline, RolloutReq]:
    return toy_of(RankedDenoiser)


def texts() -> tuple[Pipeline, RolloutReq]:
    from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline

    bundle = Qwen3Bundle(path="toy", dtype="fp32")
    bundle.codec.ends = ENDS
    return Qwen3Pipeline(bundle), requested("text", WRITING)


def texts_in_bf16() -> tuple[Pipeline, RolloutReq]:
    from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline

    bundle = Qwen3Bundle(path="toy", dtype="bf16")
    bundle.codec.ends = ENDS
    return Qwen3Pipeline(bundle), requested("text", WRITING)


def hunyuan_image3() -> tuple[Pipeline, RolloutReq]:
    """Two texts and an image: each row thinks, recaptions and draws."""
    from unirl.models.hunyuan_image3.family import HunyuanImage3Bundle, HunyuanImage3Pipeline

    pipeline = HunyuanImage3Pipeline(HunyuanImage3Bundle(path="toy", dtype="fp32"))
    for stage in pipeline.text_stages.values():
        stage.codec.ends = (*stage.codec.ends, *range(16))
    req = drawn(pipeline, max_sequence_length=64, guidance_scale=3.0)
    tracks = {
        "think": TrackSpec(sampling=WRITING),
        "recaption": TrackSpec(sampling=replace(WRITING, max_new_tokens=5), parent="think", branch=1),
        "image": replace(req.tracks["image"], parent="recaption", branch=1),
    }
    return pipeline, req.replace(tracks=tracks)


def bagel() -> tuple[Pipeline, RolloutReq]:
    from unirl.models.bagel.family import BagelBundle, BagelPipeline

    pipeline = BagelPipeline(BagelBundle(path="toy", dtype="fp32"))
    req = drawn(pipeline, max_sequence_length=64)
    tracks = {"think": TrackSpec(sampling=WRITING), "image": replace(req.tracks["image"], parent="think", branch=1)}
    return pipeline, req.replace(tracks=tracks)


def nextstep() -> tuple[Pipeline, RolloutReq]:
    from unirl.models.nextstep1.family import NextStepBundle, NextStepPipeline

    pipeline = NextStepPipeline(NextStepBundle(path="toy", dtype="fp32"))
    return pipeline, drawn(pipeline, guidance_scale=2.0)


def family(name: str, dtype: str = "fp32") -> tuple[Pipeline, RolloutReq]:
    [case] = [case for case in CASES if case.name == name]
    bundle_class, pipeline_class = case.classes()
    pipeline = pipeline_class(bundle_class(path=case.path, dtype=dtype))
    (height, width, frames), _ = case.sizes
    sizes = {"height": height, "width": width, "num_frames": frames, "max_sequence_length": case.max_sequence_length}
    return pipeline, drawn(pipeline, **sizes)


def wan22_in_bf16() -> tuple[Pipeline, RolloutReq]:
    """Some parameters of each block stay in float32, so that a block is gathered in two units."""
    return family("wan22", "bf16")


OWN = (
    toy,
    toy_with_a_step_cache,
    uneven,
    reversed_later,
    reversed_on_one_rank,
    texts,
    texts_in_bf16,
    hunyuan_image3,
    bagel,
    nextstep,
    wan22_in_bf16,
)
MODELS: dict[str, Model] = {each.__name__: each for each in OWN}


def model_of(name: str) -> tuple[Pipeline, RolloutReq]:
    return MODELS[name]() if name in MODELS else family(name)


def backend_of(pipeline: Pipeline, lora: bool, **fsdp: Any) -> FSDPBackend:
    return FSDPBackend(
        pipeline.bundle,
        seed=3,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-2),
        lora_cfg=LoraConfig(rank=4) if lora else None,
        fsdp_cfg=FSDPConfig(**fsdp),
    )


@dataclass
class Sampled:
    """The samples of one rollout on one rank, and what it took to sample them."""

    tensors: dict[str, Any]
    """The sampled tokens or latents of each track, and their log-probs."""
    forwards: int
    whole: int
    """The most blocks that were whole at one time."""
    gathers: list[str]
    """What was gathered, in this order."""


def rollout(pipeline: Pipeline, backend: FSDPBackend, req: RolloutReq, gather: bool) -> Sampled:
    from torch.distributed.tensor import DTensor

    wholes: list[int] = []
    starts: list[object] = []
    blocks = list(backend.sharding.lockstep.units)  # type: ignore[attr-defined]

    def look(*_: object) -> None:
        wholes.append(sum(not any(isinstance(p, DTensor) for p in block.parameters()) for block in blocks))

    hooks = [block.register_forward_pre_hook(look) for block in blocks]
    hooks.append(backend.module.register_forward_pre_hook(lambda *_: starts.append(0)))
    engine = TrainsideRolloutEngine(pipeline, backend, forward_batch_size=4, gather_weights=gather)
    with fsdp_events() as events:
        resp = engine.generate(req)
    for hook in hooks:
        hook.remove()
    # Before the first forward, FSDP2 does not know the names of its units.
    gathers = [name for name in events if name == "FSDP::all_gather" or name.startswith("FSDP::all_gather (")]
    segments: dict[str, Any] = {name: track.segment for name, track in resp.tracks.items()}
    tensors = {name: each.tokens if isinstance(each, TextSegment) else each.latents for name, each in segments.items()}
    tensors |= {f"{name} logp": each.logp for name, each in segments.items()}
    return Sampled({name: tensor.numpy() for name, tensor in tensors.items()}, len(starts), max(wholes), gathers)


@dataclass(frozen=True)
class Case:
    """A model, how it is sharded, and the rows of each rank."""

    model: str
    lora: bool = True
    rows: tuple[int, ...] = (3, 5)
    fsdp: dict[str, Any] = field(default_factory=dict)
    weights: str = "live"


def sample(case: Case) -> list[Sampled]:
    """The rollouts of this rank: with gathered weights, then twice with sharded ones."""
    pipeline, req = model_of(case.model)
    backend = backend_of(pipeline, case.lora, **case.fsdp)
    rank = current().dp_rank
    mine = req.slice(sum(case.rows[:rank]), sum(case.rows[: rank + 1]))
    if case.weights != "live":
        backend.snapshot(case.weights)
        for shard in backend.shards.values():
            shard.data.add_(0.1)
        mine = mine.from_weights(case.weights, 0)
    return [rollout(pipeline, backend, mine, gather) for gather in (True, False, False)]


def sampled_alike(case: Case) -> list[list[Sampled]]:
    """The rollouts of all ranks. Fails unless the samples with sharded weights are those with gathered ones."""
    ranks = run_ranks(len(case.rows), sample, case)
    for gathered, *sharded in ranks:
        for i, each in enumerate(sharded):
            assert each.tensors.keys() == gathered.tensors.keys()
            for name, value in gathered.tensors.items():
                assert len(value) and np.array_equal(value, each.tensors[name]), name
            assert each.forwards == gathered.forwards  # a rank that gathers along runs none
            assert each.gathers == ranks[0][1 + i].gathers
    return ranks


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_rank_with_three_times_the_rows_of_the_other_samples_the_same_images(lora: bool, prefetch: int) -> None:
    ranks = sampled_alike(Case("toy", lora, (2, 6), {"prefetch_blocks": prefetch}))
    assert [rank[0].forwards for rank in ranks] == [5, 10]  # chunks of four rows, five steps
    for gathered, *sharded in ranks:
        assert gathered.whole == 3 and len(gathered.gathers) == 4  # three blocks and the rest
        for each in sharded:
            assert each.whole == 1 and len(each.gathers) == 10 * 3 + 1


@pytest.mark.parametrize(
    "fsdp", [{"reshard_after_forward": False}, {"shard_size": 2}, {"shard_size": 1}], ids=["kept", "copies", "whole"]
)
def test_any_layout_of_the_weights_samples_the_same_images(fsdp: dict[str, Any]) -> None:
    rows = (1, 5) if fsdp != {"shard_size": 2} else (1, 1, 1, 5)
    for _, *sharded in sampled_alike(Case("toy", rows=rows, fsdp=fsdp)):
        assert all(each.whole == (3 if fsdp == {"shard_size": 1} else 1) for each in sharded)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("model", ["toy_with_a_step_cache", "uneven"])
def test_blocks_that_one_rank_leaves_out_are_no_gathers_that_others_miss(model: str, prefetch: int) -> None:
    sampled_alike(Case(model, rows=(3, 5), fsdp={"prefetch_blocks": prefetch}))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("reversed_later", "runs in another order than in the first forward"),
        ("reversed_on_one_rank", "in different orders in their first forward"),
    ],
)
def test_blocks_without_a_common_order_are_refused(model: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"IncompatibleError.*{message}"):
        run_ranks(2, sample, Case(model), deadline_s=120.0)


def test_a_snapshot_is_sampled_from_its_own_shards() -> None:
    live, old = (sampled_alike(Case("toy", weights=weights)) for weights in ("live", "old"))
    for mine, theirs in zip(live, old, strict=True):
        assert all(np.array_equal(mine[0].tensors[name], value) for name, value in theirs[1].tensors.items())


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_ranks_whose_responses_end_at_different_tokens_sample_the_same_texts(lora: bool) -> None:
    ranks = sampled_alike(Case("texts", lora, (2, 6)))
    assert ranks[0][0].forwards < ranks[1][0].forwards


def test_ranks_think_recaption_and_draw_at_different_times() -> None:
    ranks = sampled_alike(Case("hunyuan_image3", rows=(2, 6)))
    assert set(ranks[0][0].tensors) == {f"{t}{end}" for t in ("think", "recaption", "image") for end in ("", " logp")}
    assert ranks[0][0].forwards < ranks[1][0].forwards
    assert all(each.whole == 1 for rank in ranks for each in rank[1:])


KINDS = {
    "texts_in_bf16": False,
    "bagel": True,
    "nextstep": True,
    "wan22": True,
    "wan22_in_bf16": False,
    "lumina2": True,
    "z_image": True,
    "hunyuan_video15": True,
}
"""Model to whether it has adapters."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "lora"), KINDS.items(), ids=list(KINDS))
def test_each_kind_of_network_samples_the_same_bits(model: str, lora: bool) -> None:
    """Blocks of two experts, blocks in another order than their modules, several heads, weights kept in float32."""
    prefetch = {"prefetch_blocks": 1} if model == "wan22_in_bf16" else {}
    sampled_alike(Case(model, lora, (2, 6), prefetch))
