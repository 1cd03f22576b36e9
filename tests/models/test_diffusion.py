"""The stage: what it stores, that replay is the rollout, that rows are independent, that memory stays flat."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from unirl.models.denoising.stage import DiffusionStage
from unirl.sde.guidance import Guidance
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, DPMSolver2M, EulerODE, FlowSDEStrategy, predicted_x0
from unirl.sde.noise import NoiseSource
from unirl.testing.toy import toy_conditions, toy_facts, toy_params, toy_stage, toy_track
from unirl.types.conditions import Conditions
from unirl.types.protocols import Previous
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

KERNELS = [FlowSDEStrategy(), DanceSDEStrategy(), CPSSDEStrategy()]


class LinearField:
    """v = a x + b sigma: every trajectory has a closed form."""

    def __init__(self) -> None:
        self.sigmas: list[float] = []

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        self.sigmas.append(float(sigma[0]))
        return 0.5 * x + 0.25 * sigma.view(-1, 1, 1, 1)


def linear_stage() -> DiffusionStage:
    return DiffusionStage(LinearField(), toy_facts())


def start(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def sample(stage: DiffusionStage, params: DiffusionSamplingParams, x: Tensor):  # type: ignore[no-untyped-def]
    ids = [f"i{row}" for row in range(len(x))]
    conditions = toy_conditions(ids, params.guidance_scale)
    return stage.sample(conditions, x, params, NoiseSource(7, "r", 0), ids)


# --- what is stored --------------------------------------------------------------------------------------------------


def test_a_trajectory_follows_the_recursion_of_its_kernels() -> None:
    params = toy_params(sde_indices=(1,))
    segment = sample(linear_stage(), params, start())
    sigmas = segment.sigmas.tolist()
    x = start()
    noise = NoiseSource(7, "r", 0).normal(["i0", "i1", "i2"], "s1", (3, 4, 4))
    stored = []
    for i in range(5):
        kernel = params.kernel if i == 1 else EulerODE()
        stored.append(x)
        step = kernel.transition(x, 0.5 * x + 0.25 * sigmas[i], sigmas[i], sigmas[i + 1])
        x = step.sample(noise) if i == 1 else step.mean
        if i == 1:
            logp = step.log_prob(x)
    assert segment.indices == (1, 2, 5)
    torch.testing.assert_close(segment.latents, torch.stack([stored[1], stored[2], x], dim=1))
    torch.testing.assert_close(segment.logp, logp[:, None])


def test_the_network_sees_each_sigma_once_in_order() -> None:
    stage = linear_stage()
    segment = sample(stage, toy_params(), start())
    assert isinstance(stage.denoiser, LinearField)
    assert stage.denoiser.sigmas == segment.sigmas[:-1].tolist()


def test_without_stochastic_steps_only_the_sample_is_stored_and_noise_is_not_drawn() -> None:
    segment = sample(toy_stage(), toy_params(sde_indices=()), start())
    assert segment.indices == (5,) and segment.latents.shape == (3, 1, 3, 4, 4) and segment.logp.shape == (3, 0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_log_prob_is_that_of_the_rounded_values(dtype: str) -> None:
    stage, params = toy_stage(), toy_params(trajectory_dtype=dtype)
    with torch.no_grad():
        segment = sample(stage, params, start())
        replay = stage.replay(toy_conditions(["i0", "i1", "i2"]), segment, segment.sde_indices)
    assert segment.latents.dtype != torch.float32
    assert torch.equal(replay.logp, segment.logp)


def test_unpinned_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="pinned"):
        sample(toy_stage(), DiffusionSamplingParams(kernel=FlowSDEStrategy()), start())


def test_a_stochastic_step_without_a_density_is_refused() -> None:
    params = dataclasses.replace(toy_params(), kernel=EulerODE())
    with pytest.raises(ValueError, match="EulerODE has no density"):
        sample(toy_stage(), params, start())


# --- solvers ---------------------------------------------------------------------------------------------------------


def test_a_multistep_solver_gets_its_history_and_loses_it_at_a_jump() -> None:
    solver = DPMSolver2M()
    params = toy_params(solver=solver, num_inference_steps=7, sde_indices=(3,))
    segment = sample(linear_stage(), params, start())
    sigmas = segment.sigmas.tolist()
    noise = NoiseSource(7, "r", 0).normal(["i0", "i1", "i2"], "s3", (3, 4, 4))
    x, previous = start(), None
    for i in range(7):
        v = 0.5 * x + 0.25 * sigmas[i]
        if i == 3:
            x, previous = params.kernel.transition(x, v, sigmas[i], sigmas[i + 1]).sample(noise), None
            continue
        step = solver.transition(x, v, sigmas[i], sigmas[i + 1], previous)
        x, previous = step.mean, Previous(sigmas[i], predicted_x0(x, v, sigmas[i]))
    torch.testing.assert_close(segment.final, x)
    assert not torch.allclose(
        segment.final, sample(linear_stage(), toy_params(num_inference_steps=7, sde_indices=(3,)), start()).final
    )


def test_a_second_order_solver_is_nearer_the_exact_path_than_euler() -> None:
    def final(steps: int, solver: DPMSolver2M | None) -> Tensor:
        # Gaussian data: the exact velocity is linear, and a fine Euler run is the oracle.
        stage = DiffusionStage(GaussianField(), toy_facts())
        return sample(stage, toy_params(solver=solver, num_inference_steps=steps, sde_indices=()), start()).final

    exact = final(2000, None)
    euler, second = (final(12, None) - exact).abs().max(), (final(12, DPMSolver2M()) - exact).abs().max()
    assert second < 0.7 * euler


class GaussianField:
    """The exact velocity for data of mean 0.7 and standard deviation 0.5."""

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        s = sigma.view(-1, 1, 1, 1)
        variance = (1 - s) ** 2 * 0.25 + s**2
        gap = x - (1 - s) * 0.7
        return s / variance * gap - 0.7 - (1 - s) * 0.25 / variance * gap


# --- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_replay_on_unchanged_weights_is_the_rollout_bit_for_bit(kernel: FlowSDEStrategy, guidance_scale: float) -> None:
    stage = toy_stage()
    track = toy_track(stage, params=toy_params(kernel, guidance_scale=guidance_scale))
    for part in ([0], [3], [0, 1, 3], [3, 0]):
        logp = stage.replay(track.conditions, track.segment, part).logp
        assert torch.equal(logp.detach(), track.segment.columns(track.segment.logp, part))


@pytest.mark.parametrize("rows", [[0], [5, 2], [7, 6, 5, 4, 3, 2, 1, 0], [1, 1, 1]])
def test_replay_of_any_rows_in_any_order_keeps_their_bits(rows: list[int]) -> None:
    stage = toy_stage()
    track = toy_track(stage)
    some = track.select(rows)
    replay = stage.replay(some.conditions, some.segment, (0, 1, 3))
    assert torch.equal(replay.logp.detach(), track.segment.logp[rows])


def test_replay_gives_the_kernel_s_mean_and_std_at_the_network_s_velocity() -> None:
    stage = toy_stage()
    track = toy_track(stage)
    replay = stage.replay(track.conditions, track.segment, (1, 3))
    sigmas = track.segment.sigmas
    for s, i in enumerate((1, 3)):
        x = track.segment.latents_at(i)
        v = stage.velocity(x, sigmas[i].expand(len(x)), track.conditions, Guidance())
        step = track.segment.kernel.transition(x, v, float(sigmas[i]), float(sigmas[i + 1]))
        assert torch.equal(replay.velocity[:, s], v)
        assert torch.equal(replay.mean[:, s], step.mean)
        assert torch.equal(replay.std[s], step.std)


def gradient(stage: DiffusionStage, track: RolloutTrack, micro: int, parts: list[list[int]]) -> Tensor:
    """Of sum(advantage x log-prob), over micro-batches and parts."""
    assert isinstance(stage.denoiser, torch.nn.Module)
    stage.denoiser.zero_grad()
    for rows in track.chunk(micro):
        for part in parts:
            logp = stage.replay(rows.conditions, rows.segment, part).logp
            (rows.advantages[:, None] * logp).sum().backward()
    return torch.cat([p.grad.flatten().clone() for p in stage.denoiser.parameters() if p.grad is not None])


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_gradients_do_not_depend_on_micro_batch_or_parts(guidance_scale: float) -> None:
    stage = toy_stage()
    track = toy_track(stage, params=toy_params(guidance_scale=guidance_scale))
    whole = gradient(stage, track, 8, [[0, 1, 3]])
    assert whole.abs().max() > 1e-4
    for micro in (1, 2, 3, 4, 8):
        for parts in ([[0, 1, 3]], [[0], [1], [3]], [[1, 3], [0]]):
            torch.testing.assert_close(gradient(stage, track, micro, parts), whole, rtol=1e-4, atol=1e-6)


# --- guidance --------------------------------------------------------------------------------------------------------


def test_one_pass_and_two_passes_are_the_same_samples_and_gradients() -> None:
    stage = toy_stage()
    once = toy_track(stage, params=toy_params(guidance_scale=4.5, guidance_passes=1))
    twice = toy_track(stage, params=toy_params(guidance_scale=4.5, guidance_passes=2))
    assert torch.equal(once.segment.latents, twice.segment.latents)
    assert torch.equal(once.segment.logp, twice.segment.logp)
    torch.testing.assert_close(gradient(stage, once, 4, [[0, 1]]), gradient(stage, twice, 4, [[0, 1]]))


@pytest.mark.parametrize("passes", [1, 2])
def test_guidance_extrapolates_and_both_branches_get_gradients(passes: int) -> None:
    stage, x, sigma = toy_stage(), start(4), torch.full((4,), 0.5)
    conditions = toy_conditions(["a", "b", "c", "d"], guidance_scale=2.0)
    for condition in conditions.values():
        condition.pooled.requires_grad_()  # type: ignore[attr-defined]
    guided = stage.velocity(x, sigma, conditions, Guidance(scale=2.0, passes=passes))
    positive = stage.velocity(x, sigma, {"text": conditions["text"]}, Guidance())
    negative = stage.velocity(x, sigma, {"text": conditions["negative_text"]}, Guidance())
    torch.testing.assert_close(guided, negative + 2.0 * (positive - negative))
    cond, uncond = torch.autograd.grad(guided.sum(), [c.pooled for c in conditions.values()])  # type: ignore[attr-defined]
    assert cond.abs().sum() > 0 and uncond.abs().sum() > 0


@pytest.mark.parametrize("passes", [1, 2])
def test_guidance_of_one_is_the_condition_alone_and_of_zero_the_negative_alone(passes: int) -> None:
    stage, x, sigma = toy_stage(), start(4), torch.full((4,), 0.5)
    conditions = toy_conditions(["a", "b", "c", "d"], guidance_scale=2.0)
    for scale, name in ((1.0, "text"), (0.0, "negative_text")):
        alone = stage.velocity(x, sigma, {"text": conditions[name]}, Guidance())
        assert torch.equal(stage.velocity(x, sigma, conditions, Guidance(scale=scale, passes=passes)), alone)


def test_guidance_without_a_negative_condition_is_refused() -> None:
    with pytest.raises(ValueError, match="negative_text"):
        toy_stage().velocity(start(4), torch.ones(4), toy_conditions(["a"] * 4), Guidance(scale=2.0))


# --- memory ----------------------------------------------------------------------------------------------------------


def peak_saved_bytes(num_stochastic: int) -> int:
    """The most bytes that autograd holds while every stochastic step is replayed and backpropagated in turn."""
    stage = toy_stage(width=64)
    steps = tuple(range(num_stochastic))
    track = toy_track(stage, params=toy_params(num_inference_steps=num_stochastic + 1, sde_indices=steps))
    held, peak = 0, 0

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal held, peak
            self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
            held += self.size
            peak = max(peak, held)

        def __del__(self) -> None:
            nonlocal held
            held -= self.size

    with saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        for step in steps:
            stage.replay(track.conditions, track.segment, [step]).logp.sum().backward()
    return peak


def test_peak_memory_of_replay_does_not_grow_with_the_number_of_steps() -> None:
    assert peak_saved_bytes(8) == peak_saved_bytes(2) > 0
