"""The step cache: which steps and rows reuse blocks, that nothing else changes, and what is left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.models.family_cases import CASES, FamilyCase, built
from tests.models.rollouts import roll
from unirl.config.errors import IncompatibleError
from unirl.models.denoising.stage import BlockwiseDenoiser, DiffusionStage, GradientMask
from unirl.models.denoising.step_cache import BlockChain, StepCache
from unirl.models.sd3.family import SD3Pipeline
from unirl.sde.kernels import EulerODE
from unirl.sde.noise import NoiseSource
from unirl.testing.toy import ToyDenoiser, toy_conditions, toy_facts, toy_params, toy_stage
from unirl.types.conditions import Conditions
from unirl.types.sampling import DiffusionSamplingParams

ALWAYS = 1e9
"""A threshold that every change stays below."""
LATENT = (3, 4, 4)


@contextmanager
def counted(blocks: list[nn.Module]) -> Iterator[list[int]]:
    """The number of runs of the forward of each block."""
    counts, handles = [0] * len(blocks), []
    for number, block in enumerate(blocks):
        forward = block.forward

        def count(*inputs, _number=number, _forward=forward, **named):
            counts[_number] += 1
            return _forward(*inputs, **named)

        block.forward = count
        handles.append(block)
    try:
        yield counts
    finally:
        for block in handles:
            del block.forward


def sampled(stage: DiffusionStage, params: DiffusionSamplingParams, rows: list[int] | None = None, **options):
    """A run of the rows `rows` of four, whose noise and prompts depend on the row alone."""
    ids = [f"i{row}" for row in rows or range(4)]
    noise = NoiseSource(7, "r", 0)
    return stage.sample(toy_conditions(ids), noise.normal(ids, "x", LATENT), params, noise, ids, **options)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_threshold_of_zero_changes_no_bit_of_a_rollout(toy: SD3Pipeline, passes: int) -> None:
    options = {"guidance_scale": 4.5, "guidance_passes": passes}
    full, cached = roll(toy, **options), roll(toy, cache_threshold=0.0, **options)
    assert torch.equal(cached.segment.latents, full.segment.latents)
    assert torch.equal(cached.segment.logp, full.segment.logp)
    assert full.segment.skipped is None and cached.segment.skipped.tolist() == [0.0] * 6


class ConstantBlock(nn.Module):
    """Adds a constant, so the residual of a chain of such blocks is the same at all times."""

    def __init__(self, added: float) -> None:
        super().__init__()
        self.added = added

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.added


class ConstantResidual(nn.Module):
    """v = a rounded x, plus what the blocks add."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ConstantBlock(added) for added in (0.5, 0.25, -2.0, 1.5))

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        hidden = (8 * x).round() / 8  # few digits, so that sums and differences are exact
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def block_chains(self) -> list[list[nn.Module]]:
        return [list(self.blocks)]


def test_a_residual_that_is_constant_in_time_is_reused_exactly_in_all_steps_but_the_first() -> None:
    network = ConstantResidual()
    stage = DiffusionStage(network, toy_facts())
    params = toy_params(kernel=EulerODE(), sde_indices=())
    full = sampled(stage, params)
    with counted(list(network.blocks)) as runs:
        cached = sampled(stage, replace(params, cache_threshold=ALWAYS))
    assert torch.equal(cached.final, full.final)
    assert runs == [5, 1, 1, 1]
    assert cached.skipped.tolist() == pytest.approx([12 / 20] * 4)
    assert cached.statistics() == {"rollout/skipped_blocks": pytest.approx(0.6)}


def test_stochastic_steps_run_all_blocks_and_their_log_probs_are_those_of_the_replay() -> None:
    stage = toy_stage(blocks=3)
    params = toy_params(sde_indices=(1, 3), cache_threshold=ALWAYS)
    with counted(list(stage.denoiser.blocks)) as runs, torch.no_grad():
        segment = sampled(stage, params)
    assert runs == [5, 3, 3]  # steps 0, 1 and 3: the first step has nothing to reuse
    replay = stage.replay(toy_conditions([f"i{row}" for row in range(4)]), segment, [1, 3])
    assert torch.equal(replay.logp, segment.logp)


def reference(network: ToyDenoiser, row: str, params: DiffusionSamplingParams, threshold: float) -> tuple[Tensor, int]:
    """One row's sample and the number of steps that reuse, written step by step."""
    x = NoiseSource(7, "r", 0).normal([row], "x", LATENT)
    pooled = toy_conditions([row])["text"].pooled
    sigmas, first, residual, reused = params.sigmas or (), None, None, 0
    for now, after in pairwise(sigmas):
        begin = network.blocks[0](network.input_layer(torch.cat([x.flatten(1), torch.tensor([[now]]), pooled], 1)))
        if first is not None and (begin - first).abs().sum() < threshold * first.abs().sum():
            end, reused = begin + residual, reused + 1
        else:
            end = network.blocks[2](network.blocks[1](begin))
            first, residual = begin, end - begin
        x = x + (after - now) * network.output_layer(end).view_as(x)
    return x, reused


def test_each_row_follows_the_rule_of_its_own_change() -> None:
    stage = toy_stage(blocks=3)
    params = toy_params(kernel=EulerODE(), sde_indices=(), num_inference_steps=12)
    with torch.no_grad():
        wanted = [reference(stage.denoiser, f"i{row}", params, 0.06) for row in range(4)]
        mine = sampled(stage, replace(params, cache_threshold=0.06))
    numbers = {reused for _, reused in wanted}
    assert len(numbers) > 1 and min(numbers) > 0, "the rows should differ"
    torch.testing.assert_close(mine.final, torch.cat([x for x, _ in wanted]), rtol=1e-5, atol=1e-6)


def test_the_bits_of_a_row_do_not_depend_on_the_other_rows() -> None:
    stage = toy_stage(blocks=3)
    params = toy_params(kernel=EulerODE(), sde_indices=(), num_inference_steps=12, cache_threshold=0.06)
    with torch.no_grad():
        together, apart = sampled(stage, params), [sampled(stage, params, [row]) for row in range(4)]
    assert torch.equal(together.final, torch.cat([segment.final for segment in apart]))
    assert len({float(segment.skipped[0]) for segment in apart}) > 1
    assert float(together.skipped[0]) <= min(float(segment.skipped[0]) for segment in apart)


def test_the_chunk_size_changes_no_bit_of_a_rollout_with_a_cache(toy: SD3Pipeline) -> None:
    options = {"cache_threshold": 0.05, "sde_indices": (0,), "num_inference_steps": 8}
    whole, cut = roll(toy, 8, **options), roll(toy, 4, **options)
    assert torch.equal(cut.segment.latents, whole.segment.latents)
    assert cut.segment.skipped.max() > whole.segment.skipped.max() > 0


def test_a_differentiated_step_runs_all_blocks_and_keeps_its_gradient() -> None:
    stage = toy_stage(blocks=3)
    params = toy_params(kernel=EulerODE(), sde_indices=(), cache_threshold=ALWAYS)
    mask = GradientMask(steps=(4,))
    with counted(list(stage.denoiser.blocks)) as runs:
        sampled(stage, params, gradient=mask).final.sum().backward()
    assert runs == [5 + 1, 2 + 1, 2 + 1]  # steps 0 and 4, and step 4 again in the backward pass
    assert stage.denoiser.blocks[2].proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_family_gives_the_same_velocity_without_the_blocks_at_the_same_input(case: FamilyCase) -> None:
    """The residual of an equal input is exact, so only the rounding of (z - a) + a is left."""
    pipeline = built(case)
    inputs, stage = pipeline.canary_inputs(), pipeline.stage
    assert isinstance(stage.denoiser, BlockwiseDenoiser)
    chains = stage.denoiser.block_chains()
    cache = StepCache([BlockChain(blocks, ALWAYS) for blocks in chains])
    with torch.no_grad(), cache.attached():
        cache.begin_step(may_reuse=True)
        full = stage.canary(inputs).values
        cache.begin_step(may_reuse=True)
        reused = stage.canary(inputs).values
    later = sum(len(blocks) - 1 for blocks in chains)
    assert cache.skipped_share() == later / (2 * sum(map(len, chains))) and later > 0
    torch.testing.assert_close(reused, full, rtol=1e-4, atol=1e-5)
    assert not any("forward" in vars(block) for blocks in chains for block in blocks)


def test_an_error_in_a_step_leaves_no_cache_around_the_blocks() -> None:
    stage = toy_stage(blocks=2)
    with pytest.raises(RuntimeError):
        stage.sample(
            toy_conditions(["a"]),
            torch.zeros(1, 2, 2, 2),
            toy_params(cache_threshold=1.0),
            NoiseSource(7, "r", 0),
            ["a"],
        )
    assert not any("forward" in vars(block) for block in stage.denoiser.blocks)


def test_a_denoiser_that_does_not_name_its_blocks_is_refused() -> None:
    class Plain:
        def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
            return x

    with pytest.raises(IncompatibleError, match="Plain of toy does not name its blocks"):
        sampled(DiffusionStage(Plain(), toy_facts()), toy_params(cache_threshold=0.1))


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf")])
def test_a_threshold_outside_its_range_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"sampling\.cache_threshold must be >= 0"):
        toy_params(cache_threshold=threshold)


def test_evaluations_run_all_blocks() -> None:
    assert toy_params(cache_threshold=0.1).for_evaluation({}).cache_threshold is None
