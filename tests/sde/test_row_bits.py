"""A row's bits: whatever the batch around it, and however its sigma came."""

from itertools import pairwise

import pytest
import torch

from unirl.sde.gaussian import Gaussian, row_means
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, EulerODE, FlowDDIM, FlowSDEStrategy
from unirl.sde.schedule import SigmaSchedule

KERNELS = [
    FlowSDEStrategy(),
    DanceSDEStrategy(),
    CPSSDEStrategy(),
    CPSSDEStrategy(log_prob_form="unnormalised"),
    FlowDDIM(eta=0.6),
    EulerODE(),
]
SIGMAS = SigmaSchedule(shift=3.0).sigmas(25)
STEPS = len(SIGMAS) - 2  # all that can have a density


def latents(rows, size, dtype):
    draws = torch.randn(3, rows, size, generator=torch.Generator().manual_seed(2))
    return tuple(draw.to(dtype) for draw in draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_replay_of_all_steps_in_one_batch_gives_the_bits_of_sampling_step_by_step(kernel, dtype):
    x, v, noise = latents(STEPS, 333, dtype)
    batch = kernel.transition(x, v, SIGMAS[:STEPS], SIGMAS[1 : STEPS + 1])
    x_next = batch.sample(noise)
    log_prob = batch.log_prob(x_next) if kernel.has_density(0, 25) else None
    for i, (sigma, sigma_next) in enumerate(pairwise(SIGMAS[: STEPS + 1])):
        row = slice(i, i + 1)
        for start, end in ((float(sigma), float(sigma_next)), (sigma, sigma_next)):
            alone = kernel.transition(x[row], v[row], start, end)
            assert alone.std.dim() == 0 and torch.equal(alone.std, batch.std[i])
            assert torch.equal(alone.mean[0], batch.mean[i])
            assert torch.equal(alone.sample(noise[row])[0], x_next[i])
            if log_prob is not None:
                assert torch.equal(alone.log_prob(x_next[row])[0], log_prob[i])


@pytest.mark.parametrize("neighbours", [1, 2, 5])
def test_neighbours_change_no_bit_of_a_row_at_sd3_size(neighbours):
    x, v, noise = latents(6, 16 * 64 * 64, torch.float32)
    sigma, sigma_next = SIGMAS[3], SIGMAS[4]
    whole = FlowSDEStrategy().transition(x, v, sigma, sigma_next)
    x_next = whole.sample(noise)
    log_prob, kl = whole.log_prob(x_next), whole.kl(Gaussian(v, whole.std))
    for rows in torch.arange(6).split(neighbours):
        part = FlowSDEStrategy().transition(x[rows], v[rows], sigma, sigma_next)
        assert torch.equal(part.mean, whole.mean[rows])
        assert torch.equal(part.log_prob(x_next[rows]), log_prob[rows])
        assert torch.equal(part.kl(Gaussian(v[rows], part.std)), kl[rows])


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000])
def test_row_means_is_the_mean_of_each_row(size):
    values = latents(3, size, torch.float64)[0]
    torch.testing.assert_close(row_means(values), values.mean(1), rtol=1e-13, atol=1e-15)


def test_row_means_takes_any_number_of_latent_dims():
    values = latents(3, 60, torch.float64)[0]
    for shape in ((3, 60), (3, 4, 15), (3, 4, 5, 3)):
        assert torch.equal(row_means(values.reshape(shape)), row_means(values))
    assert torch.equal(row_means(values[:, 0]), values[:, 0])


@pytest.mark.parametrize("shape", [(3,), (3, 1), (2, 7), (2, 3, 5)])
def test_row_means_has_the_gradient_of_a_mean(shape):
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(row_means, values)
    assert torch.autograd.gradgradcheck(row_means, values)


def test_the_number_of_threads_changes_no_bit_of_a_log_prob():
    x, v, noise = latents(1, 16 * 64 * 64, torch.float32)
    threads, result = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        result.append(FlowSDEStrategy().transition(x, v, 0.5, 0.45).log_prob(noise))
    torch.set_num_threads(threads)
    assert torch.equal(result[0], result[1]) and torch.equal(result[0], result[2])


@pytest.mark.parametrize(("given", "worked"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)])
def test_low_precision_inputs_are_worked_on_in_float32(given, worked):
    x, v, _ = latents(2, 50, given)
    result = FlowSDEStrategy().transition(x, v, 0.5, 0.45)
    exact = FlowSDEStrategy().transition(x.to(worked), v.to(worked), 0.5, 0.45)
    assert result.mean.dtype == result.std.dtype == worked
    assert torch.equal(result.mean, exact.mean)


def test_one_float64_input_is_enough_for_float64():
    x, v, _ = latents(2, 50, torch.float32)
    assert EulerODE().transition(x, v.double(), 0.5, 0.45).mean.dtype == torch.float64


def test_float32_coefficients_are_the_float64_ones_rounded():
    x, v, _ = latents(2, 50, torch.float64)
    exact = FlowSDEStrategy().transition(x, v, 0.5, 0.45)
    rounded = FlowSDEStrategy().transition(x.float(), v.float(), 0.5, 0.45)
    assert rounded.std == exact.std.float()
    torch.testing.assert_close(rounded.mean, exact.mean.float(), rtol=1e-6, atol=1e-6)
