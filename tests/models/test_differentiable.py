"""Sampling with gradients: the same samples, the gradients of plain autograd, and memory that K alone decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.models.plain_sampling import (
    assert_close,
    by_prompt,
    differentiable,
    euler,
    gradient_of,
    in_double,
    reward_of,
    velocity,
)
from unirl.models.denoising.differentiable import DifferentiableStage
from unirl.models.denoising.stage import DiffusionStage, GradientMask
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, DPMSolver2M, EulerODE, FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.toy import toy_facts, toy_params, toy_stage, toy_track
from unirl.types.conditions import Conditions
from unirl.types.primitives import Texts
from unirl.types.protocols import Kernel
from unirl.types.rollout_resp import RolloutTrack

T = 5
ODE = {"kernel": EulerODE(), "sde_indices": ()}


def drawn(stage: DiffusionStage, **changes: object) -> RolloutTrack:
    return toy_track(stage, params=toy_params(**({"num_inference_steps": T} | changes)))  # type: ignore[arg-type]


def found_gradient(stage: DiffusionStage, track: RolloutTrack, mask: GradientMask) -> Tensor:
    """Of the sum of rewards."""
    both = differentiable(stage)
    return gradient_of(stage.denoiser, both.objective(both.sample(track, T, mask), track).sum())  # type: ignore[arg-type]


# --- the same samples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        ODE,
        ODE | {"guidance_scale": 4.5, "guidance_passes": 2},
        ODE | {"solver": DPMSolver2M(), "num_inference_steps": 7},
        ODE | {"init_same_noise": True},
        {"kernel": FlowSDEStrategy()},
        {"kernel": CPSSDEStrategy(), "guidance_scale": 2.0},
        {"kernel": DanceSDEStrategy(), "sde_indices": (1,), "solver": DPMSolver2M(), "init_same_noise": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [(), (0, 3), (4,)], ids=str)
def test_samples_drawn_again_are_those_of_the_rollout_bit_for_bit(
    changes: dict[str, object], steps: tuple[int, ...]
) -> None:
    stage = toy_stage()
    track = drawn(stage, **changes)
    for through_inputs in (True, False):
        again = differentiable(stage).sample(
            track, track.segment.num_steps, GradientMask(steps=steps, through_inputs=through_inputs)
        )
        assert torch.equal(again, track.segment.final)
        assert again.requires_grad == bool(steps)


def test_rows_in_any_order_and_number_are_drawn_again() -> None:
    stage = toy_stage()
    track = drawn(stage, init_same_noise=True)
    for rows in ([6], [5, 2, 0]):
        again = differentiable(stage).sample(track.select(rows), T, GradientMask())
        assert torch.equal(again, track.segment.final[rows])


def test_a_rollout_in_half_precision_is_drawn_again_in_full() -> None:
    stage = toy_stage()
    again = differentiable(stage).sample(drawn(stage, **ODE, trajectory_dtype="bf16"), T, GradientMask())
    assert torch.equal(again, drawn(stage, **ODE).segment.final)


def test_a_run_that_stops_early_ends_in_the_clean_prediction_there() -> None:
    stage = toy_stage()
    track = drawn(stage, kernel=FlowSDEStrategy(), sde_indices=(0, 1, 2, 3))  # stores x_0 .. x_4
    for num_steps in (1, 3, 5):
        x, sigma = track.segment.latents_at(num_steps - 1), float(track.segment.sigmas[num_steps - 1])
        with torch.no_grad():
            v = stage.denoiser.velocity(x, torch.full((len(x),), sigma), track.conditions)
        stopped = differentiable(stage).sample(track, num_steps, GradientMask())
        torch.testing.assert_close(stopped, x - sigma * v)


# --- gradients, against autograd on a plain loop in float64 ----------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_through_all_steps_it_is_the_full_gradient(scale: float) -> None:
    stage = toy_stage()
    track, network = drawn(stage, **ODE, guidance_scale=scale), in_double(stage)
    x0 = euler(network, track, scale=scale)
    expected = gradient_of(network, reward_of(x0, track).sum())
    assert_close(found_gradient(stage, track, GradientMask(steps=tuple(range(T)))), expected)


@pytest.mark.parametrize("last", [1, 2, 4])
def test_through_the_last_steps_it_is_truncated_backpropagation(last: int) -> None:
    stage = toy_stage()
    track, network = drawn(stage, **ODE), in_double(stage)
    x0 = euler(network, track, keep=lambda i, v: v if i >= T - last else v.detach())
    expected = gradient_of(network, reward_of(x0, track).sum())
    assert_close(found_gradient(stage, track, GradientMask(steps=tuple(range(T - last, T)))), expected)


@pytest.mark.parametrize("steps", [(0, 2), (1, 2, 4), (0,)], ids=str)
def test_through_some_steps_gradients_pass_the_others_along_the_path_alone(steps: tuple[int, ...]) -> None:
    stage = toy_stage()
    track, network = drawn(stage, **ODE), in_double(stage)
    x0 = euler(network, track, keep=lambda i, v: v if i in steps else v.detach())
    expected = gradient_of(network, reward_of(x0, track).sum())
    assert_close(found_gradient(stage, track, GradientMask(steps=steps)), expected)


@pytest.mark.parametrize("steps", [(0, 2, 4), (3,), (0, 1, 2, 3, 4)], ids=str)
def test_with_constant_inputs_it_is_a_sum_over_steps(steps: tuple[int, ...]) -> None:
    """d/dtheta = sum over i of -(sigma_i - sigma_{i+1}) (dv_i / dtheta)^T dR/dx_0: no product of Jacobians."""
    stage = toy_stage()
    track, network = drawn(stage, **ODE), in_double(stage)
    inputs: dict[int, Tensor] = {}
    with torch.no_grad():
        x0 = euler(network, track, enter=lambda i, x: inputs.setdefault(i, x))
    (dreward,) = torch.autograd.grad(reward_of(x0.requires_grad_(), track).sum(), x0)
    sigmas, expected = track.segment.sigmas.double().tolist(), torch.zeros(())
    for i in steps:
        v = velocity(network, inputs[i], sigmas[i], track)
        expected = expected + gradient_of(network, -(sigmas[i] - sigmas[i + 1]) * (v * dreward).sum())
    assert_close(found_gradient(stage, track, GradientMask(steps=steps, through_inputs=False)), expected)


@pytest.mark.parametrize("kernel", [FlowSDEStrategy(), CPSSDEStrategy()], ids=lambda kernel: type(kernel).__name__)
def test_on_stochastic_steps_the_sum_has_the_coefficients_of_the_kernel(kernel: Kernel) -> None:
    """x_{i+1} = a_i x_i + b_i v_i + noise: the coefficient of v_i in x_0 is b_i times all later a."""
    stage = toy_stage()
    track, network = drawn(stage, kernel=kernel, sde_indices=(0, 1, 2, 3)), in_double(stage)
    sigmas = track.segment.sigmas.tolist()
    one, zero = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    pairs = []
    for i in range(T):
        step = kernel if i < T - 1 else EulerODE()
        pairs.append(
            [float(step.transition(x, v, sigmas[i], sigmas[i + 1]).mean) for x, v in ((one, zero), (zero, one))]
        )
    x0 = track.segment.final.double().requires_grad_()
    (dreward,) = torch.autograd.grad(reward_of(x0, track).sum(), x0)
    expected = torch.zeros(())
    for i in (1, 3):
        coefficient = pairs[i][1] * torch.tensor([a for a, _ in pairs[i + 1 :]]).prod().item()
        v = velocity(network, track.segment.latents_at(i).double(), sigmas[i], track)
        expected = expected + gradient_of(network, coefficient * (v * dreward).sum())
    assert_close(found_gradient(stage, track, GradientMask(steps=(1, 3), through_inputs=False)), expected)


class Field(nn.Module):
    """v = a x + b sigma on latents of any shape, with a and b to train."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.4)), nn.Parameter(torch.tensor(0.2))

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        return self.a * x + self.b * sigma.view(-1, *[1] * (x.dim() - 1))


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 3, 4, 4)], ids=["image", "video"])
@pytest.mark.parametrize("through_inputs", [True, False])
def test_gradients_of_images_and_videos_have_their_closed_form(shape: tuple[int, ...], through_inputs: bool) -> None:
    """x_{i+1} = (1 + a dt) x_i + b sigma_i dt; with constant inputs dv_i / da is x_i and dv_i / db is sigma_i."""
    field = Field()
    stage, ids = DiffusionStage(field, toy_facts()), ["p@0:0", "p@0:1", "p@0:2"]
    params = toy_params(num_inference_steps=T, **ODE)  # type: ignore[arg-type]
    noise = NoiseSource(params.seed, "r", 3)
    conditions: Conditions = {"text": Texts(texts=["", "", ""])}
    start = noise.normal(ids, "x", shape)
    with torch.no_grad():
        segment = stage.sample(conditions, start, params, noise, ids)
    track = RolloutTrack(
        sample_ids=ids,
        group_ids=["p@0"] * 3,
        prompts=["a", "bb", "c"],
        conditions=conditions,
        segment=segment,
        weight=torch.ones(3),
        weight_version=torch.zeros(3),
    )
    both = differentiable(stage)
    x0 = both.sample(track, T, GradientMask(steps=(1, 3), through_inputs=through_inputs))
    result = gradient_of(field, both.objective(x0, track).sum())
    a, b = (torch.tensor(p.item(), dtype=torch.float64, requires_grad=True) for p in (field.a, field.b))
    x, sigmas = start.double(), segment.sigmas.double()
    for i in range(T):
        v = a * (x if through_inputs else x.detach()) + b * sigmas[i]
        x = x + (sigmas[i + 1] - sigmas[i]) * (v if i in (1, 3) else v.detach())
    expected = torch.stack(torch.autograd.grad(reward_of(x, track).sum(), [a, b]))
    assert_close(result, expected)


def test_without_any_step_there_is_no_gradient_at_all() -> None:
    stage = toy_stage()
    both, track = differentiable(stage), drawn(stage)
    assert not both.objective(both.sample(track, T, GradientMask()), track).requires_grad


class Kept(GradientMask):
    """The same gradients with everything kept for the backward pass."""

    def velocity(self, step: int, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.set_grad_enabled(step in self.steps):
            return network(x if self.through_inputs else x.detach())


@pytest.mark.parametrize("through_inputs", [True, False])
def test_running_a_forward_again_gives_the_bits_of_keeping_it(through_inputs: bool) -> None:
    stage = toy_stage()
    track = drawn(stage, guidance_scale=2.0)
    masks = [kind(steps=(0, 2, 3), through_inputs=through_inputs) for kind in (GradientMask, Kept)]
    again, kept = (found_gradient(stage, track, mask) for mask in masks)
    assert torch.equal(again, kept)


def test_gradients_do_not_depend_on_the_micro_batch() -> None:
    stage = toy_stage()
    both, track = differentiable(stage), drawn(stage)
    mask = GradientMask(steps=(0, 1, 4))
    whole = found_gradient(stage, track, mask)
    for size in (1, 3, 4):
        pieces = [found_gradient(stage, rows, mask) for rows in track.chunk(size)]
        torch.testing.assert_close(torch.stack(pieces).sum(0), whole, rtol=1e-4, atol=1e-6)
    assert both.batch_size == 8


# --- the copies of DRaFT-LV ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [T, 3])
def test_a_copy_is_noised_to_the_last_level_and_its_gradient_is_that_of_one_step(num_steps: int) -> None:
    stage = toy_stage()
    both, track, network = differentiable(stage), drawn(stage, **ODE), in_double(stage)
    x0 = both.sample(track, num_steps, GradientMask(steps=(num_steps - 1,)))
    copies = [both.denoise_again(track, num_steps, x0, copy) for copy in (1, 2)]
    sigma = float(track.segment.sigmas[num_steps - 1])
    for j, result in enumerate(copies, 1):
        eps = NoiseSource(track.segment.seed, "r", 0).normal(track.sample_ids, f"t{j}", (3, 4, 4)).double()
        x = (1 - sigma) * x0.detach().double() + sigma * eps
        expected = x - sigma * velocity(network, x, sigma, track)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
        gradient = gradient_of(stage.denoiser, both.objective(result, track).sum())  # type: ignore[arg-type]
        assert_close(gradient, gradient_of(network, reward_of(expected, track).sum()))
    assert not torch.allclose(copies[0], copies[1])


# --- the velocity that is held near the reference's -------------------------------------------------------------------


def test_the_compared_velocity_is_that_at_the_rollouts_sample_noised_by_its_own_draws() -> None:
    stage = toy_stage()
    track, network = drawn(stage, guidance_scale=2.0), in_double(stage)
    noise = NoiseSource(track.segment.seed, "r", 0)
    result = differentiable(stage).velocity(track)
    for row, sample_id in enumerate(track.sample_ids):
        t = float(noise.uniform([sample_id], "t", ()))
        x = (1 - t) * track.segment.final[row] + t * noise.normal([sample_id], "t0", (3, 4, 4))[0]
        expected = velocity(network, x[None].double(), t, track.select([row]), 2.0)[0]
        torch.testing.assert_close(result[row].double(), expected, rtol=1e-5, atol=1e-5)
    assert result.requires_grad


def test_a_row_that_counts_nowhere_is_compared_at_zeros() -> None:
    stage = toy_stage()
    track = drawn(stage)
    track.segment.latents[2] = torch.nan
    weight = torch.ones(len(track))
    weight[2] = 0.0
    assert differentiable(stage).velocity(track.replace(weight=weight)).isfinite().all()


# --- the objective ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_slope_of_the_objective_is_that_of_plain_autograd(batch_size: int) -> None:
    stage = toy_stage()
    track = drawn(stage)
    latents = track.segment.final.clone().requires_grad_()
    weights = torch.linspace(-1, 2, len(track))
    rewards = differentiable(stage, batch_size=batch_size).objective(latents, track)
    (result,) = torch.autograd.grad((weights * rewards).sum(), latents)
    plain = reward_of(latents, track)
    (expected,) = torch.autograd.grad((weights * plain).sum(), latents)
    torch.testing.assert_close(rewards, plain)
    torch.testing.assert_close(result, expected)


def test_a_row_that_counts_nowhere_passes_nothing_on_even_if_its_slope_is_not_finite() -> None:
    stage = toy_stage()
    track = drawn(stage)
    latents = track.segment.final.clone()
    latents[0] = torch.nan
    latents.requires_grad_()
    rewards = differentiable(stage).objective(latents, track)
    rewards[1:].sum().backward()
    assert rewards[0].isnan() and latents.grad is not None
    assert torch.equal(latents.grad[0], torch.zeros(3, 4, 4)) and latents.grad[1:].isfinite().all()


def test_the_decoder_is_on_the_device_while_rewards_and_slopes_are_computed() -> None:
    stage, log = toy_stage(), []

    @contextmanager
    def resident() -> Iterator[None]:
        log.append("in")
        yield
        log.append("out")

    def objective(images: Tensor, prompts: Sequence[str]) -> Tensor:
        images.register_hook(lambda grad: log.append("slope")) if images.requires_grad else log.append("score")
        return by_prompt(images, prompts)

    both, track = DifferentiableStage(stage, torch.sin, objective, resident=resident), drawn(stage)
    both.objective(track.segment.final.clone().requires_grad_(), track).sum().backward()
    assert log == ["in", "slope", "out"]
    log.clear()
    both.objective(track.segment.final, track)
    assert log == ["in", "score", "out"]


def test_rows_without_prompts_are_refused() -> None:
    stage = toy_stage()
    track = drawn(stage).replace(prompts=None)
    with pytest.raises(ValueError, match="rows have no prompts"):
        differentiable(stage).objective(track.segment.final, track)


# --- memory ----------------------------------------------------------------------------------------------------------


def saved_bytes(total: int, steps: Sequence[int], through_inputs: bool, **changes: object) -> int:
    """What autograd keeps for the backward pass of one loss."""
    stage, held = toy_stage(width=64), []
    both = differentiable(stage)
    track = drawn(stage, **(ODE | {"num_inference_steps": total} | changes))

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor.numel() * tensor.element_size())
        return tensor

    mask = GradientMask(steps=tuple(steps), through_inputs=through_inputs)
    with saved_tensors_hooks(pack, lambda saved: saved):
        both.objective(both.sample(track, total, mask), track)
    return sum(size for size in held if size > 8)  # every step keeps its two coefficients, differentiated or not


@pytest.mark.parametrize("through_inputs", [True, False])
def test_memory_grows_with_the_differentiated_steps_and_not_with_all(through_inputs: bool) -> None:
    latent = 8 * 3 * 4 * 4 * 4
    few = saved_bytes(10, [1, 8], through_inputs)
    assert 0 < few <= 6 * latent
    assert saved_bytes(40, [1, 8], through_inputs) == few
    assert saved_bytes(40, [1, 38], through_inputs) == few
    more = saved_bytes(10, [1, 3, 5, 8], through_inputs) - few
    assert more == saved_bytes(10, [0, 1, 3, 5, 7, 8], through_inputs) - few - more
    assert latent <= more / 2 <= 2 * latent  # one input of the network a step, and none of its activations


def test_stochastic_steps_keep_no_more_than_deterministic_ones() -> None:
    noisy = {"kernel": FlowSDEStrategy(), "sde_indices": tuple(range(9))}
    assert saved_bytes(10, [1, 8], True, **noisy) == saved_bytes(10, [1, 8], True)
