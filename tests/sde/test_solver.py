"""DPM-Solver++(2M): exact where theory says so, first order where it has no history."""

import math

import pytest
import torch

from unirl.sde.kernels import DPMSolver2M, EulerODE, FlowSDEStrategy, Previous, predicted_x0

SOLVERS = [DPMSolver2M(variant="midpoint"), DPMSolver2M(variant="heun")]
PREVIOUS, SIGMA, NEXT = 0.8, 0.6, 0.35


def log_snr(sigma):
    return math.log((1 - sigma) / sigma)


def latents(seed=0, rows=2, size=6):
    return torch.randn(rows, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def linear_case(solver):
    """(found, exact) when the clean prediction is p + q lambda, by the variation-of-constants integral."""
    p, q, x = latents(0), latents(1), latents(2)
    start, end = log_snr(SIGMA), log_snr(NEXT)
    v = (x - (p + q * start)) / SIGMA
    previous = Previous(PREVIOUS, p + q * log_snr(PREVIOUS))

    def integral(at):  # of e^lambda (p + q lambda)
        return math.exp(at) * (p + q * (at - 1))

    exact = NEXT / SIGMA * x + NEXT * (integral(end) - integral(start))
    return solver.transition(x, v, SIGMA, NEXT, previous).mean, exact


def test_heun_is_exact_for_a_prediction_linear_in_lambda():
    torch.testing.assert_close(*linear_case(DPMSolver2M(variant="heun")), rtol=1e-12, atol=1e-12)


def test_midpoint_is_close_and_not_exact_for_a_prediction_linear_in_lambda():
    result, exact = linear_case(DPMSolver2M(variant="midpoint"))
    euler, _ = linear_case(EulerODE())
    assert 1e-3 < (result - exact).abs().max() < 0.5 * (euler - exact).abs().max()


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_without_history_it_is_eulers_step(solver):
    x, v = latents(0), latents(1)
    assert torch.equal(solver.transition(x, v, SIGMA, NEXT).mean, EulerODE().transition(x, v, SIGMA, NEXT).mean)


def test_the_first_order_formula_of_the_paper_is_eulers_step():
    x, v = latents(0), latents(1)
    h = log_snr(NEXT) - log_snr(SIGMA)
    paper = NEXT / SIGMA * x - (1 - NEXT) * math.expm1(-h) * predicted_x0(x, v, SIGMA)
    torch.testing.assert_close(EulerODE().transition(x, v, SIGMA, NEXT).mean, paper, rtol=0, atol=1e-13)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("points", [(1.0, 0.8, 0.6), (0.8, 0.6, 0.0), (1.0, 0.6, 0.0)])
def test_at_the_ends_it_is_eulers_step(solver, points):
    before, sigma, sigma_next = points
    x, v, x0 = latents(0), latents(1), latents(2)
    result = solver.transition(x, v, sigma, sigma_next, Previous(before, x0)).mean
    assert torch.equal(result, EulerODE().transition(x, v, sigma, sigma_next).mean)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_an_unchanged_prediction_needs_no_correction(solver):
    x, v = latents(0), latents(1)
    result = solver.transition(x, v, SIGMA, NEXT, Previous(PREVIOUS, predicted_x0(x, v, SIGMA))).mean
    assert torch.equal(result, EulerODE().transition(x, v, SIGMA, NEXT).mean)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("sigma", [1.0 - 1e-7, 1e-7])
def test_near_the_ends_it_stays_finite(solver, sigma):
    x, v = latents(0).float(), latents(1).float()
    before, after = (1.0 - 1e-8, 0.5) if sigma > 0.5 else (0.5, 1e-8)
    assert solver.transition(x, v, sigma, after, Previous(before, latents(2))).mean.isfinite().all()


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_rows_may_stand_at_different_levels(solver):
    x, v, previous = latents(0), latents(1), Previous(PREVIOUS, latents(2))
    sigma, sigma_next = torch.tensor([0.6, 0.5]), torch.tensor([0.35, 0.0])
    batch = solver.transition(x, v, sigma, sigma_next, previous)
    for row in range(2):
        start, end = float(sigma[row]), float(sigma_next[row])
        alone = solver.transition(
            x[row : row + 1], v[row : row + 1], start, end, Previous(0.8, previous.x0[row : row + 1])
        )
        assert torch.equal(alone.mean[0], batch.mean[row])


def test_a_history_from_below_is_refused():
    with pytest.raises(ValueError, match=r"previous\.sigma=0\.5 must be above sigma=0\.6"):
        DPMSolver2M().transition(latents(0), latents(1), SIGMA, NEXT, Previous(0.5, latents(2)))


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match=r"DPMSolver2M\.variant='euler' must be one of: midpoint, heun"):
        DPMSolver2M(variant="euler")


def test_only_solvers_read_history():
    x, v, previous = latents(0), latents(1), Previous(PREVIOUS, latents(2))
    assert [kernel.multistep for kernel in (*SOLVERS, FlowSDEStrategy(), EulerODE())] == [True, True, False, False]
    for kernel in (FlowSDEStrategy(), EulerODE()):
        alone = kernel.transition(x, v, SIGMA, NEXT)
        assert torch.equal(kernel.transition(x, v, SIGMA, NEXT, previous).mean, alone.mean)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_it_has_no_density(solver):
    assert not any(solver.has_density(i, 10) for i in range(10))
