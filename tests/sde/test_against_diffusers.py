"""Our schedules and solvers against diffusers' own schedulers."""

import numpy as np
import pytest
import torch

from unirl.sde.kernels import DPMSolver2M, EulerODE, FlowDDIM, Previous, predicted_x0
from unirl.sde.schedule import SigmaSchedule, flux2_mu


def flow_scheduler(**config):
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**config)


@pytest.mark.parametrize(
    "config",
    [
        {"shift": 3.0},
        {"shift": 5.0, "shift_terminal": 0.1},
        {"use_dynamic_shifting": True},
        {"use_dynamic_shifting": True, "shift": 3.0, "time_shift_type": "linear"},
        {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_steps", [2, 10, 28])
@pytest.mark.parametrize("grid", ["clean", "diffusers"])
def test_sigmas_are_those_of_diffusers(config, num_steps, grid):
    scheduler, tokens = flow_scheduler(**config), 1024
    ours = SigmaSchedule.from_diffusers(scheduler.config, grid=grid)
    request = {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps)} if grid == "clean" else {}
    if config.get("use_dynamic_shifting"):
        request["mu"] = ours.mu_at(num_steps, tokens)
    scheduler.set_timesteps(num_steps, **request)
    torch.testing.assert_close(ours.sigmas(num_steps, tokens), scheduler.sigmas, rtol=0, atol=3e-7)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [256, 1024, 4096, 4301, 8192])
@pytest.mark.parametrize("num_steps", [4, 10, 50, 200])
def test_flux2_mu_is_that_of_diffusers(tokens, num_steps):
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    assert flux2_mu(tokens, num_steps) == pytest.approx(compute_empirical_mu(tokens, num_steps), rel=1e-12)


def velocity(x, sigma):
    return torch.tanh(x * (1.3 - sigma)) + 0.3 * x


def test_eulers_step_has_the_bits_of_diffusers():
    scheduler = flow_scheduler(shift=3.0)
    scheduler.set_timesteps(10)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    for i, timestep in enumerate(scheduler.timesteps):
        sigma, sigma_next = scheduler.sigmas[i], scheduler.sigmas[i + 1]
        v = velocity(x, sigma)
        ours = EulerODE().transition(x, v, sigma, sigma_next).mean
        x = scheduler.step(v, timestep, x).prev_sample
        assert torch.equal(ours, x)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers with numpy 2
@pytest.mark.parametrize("variant", ["midpoint", "heun"])
@pytest.mark.parametrize("num_steps", [5, 20])
def test_the_solver_walks_the_path_of_diffusers(variant, num_steps):
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
        solver_type=variant,
        solver_order=2,
        euler_at_final=True,
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(num_steps)
    solver, previous = DPMSolver2M(variant=variant), None
    theirs = ours = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    for i, timestep in enumerate(scheduler.timesteps):
        sigma, sigma_next = scheduler.sigmas[i], scheduler.sigmas[i + 1]
        theirs = scheduler.step(velocity(theirs, sigma), timestep, theirs).prev_sample
        v = velocity(ours, sigma)
        step = solver.transition(ours, v, sigma, sigma_next, previous)
        previous, ours = Previous(float(sigma), predicted_x0(ours, v, sigma)), step.mean
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-6)


def drawn(seed):
    return torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kind", "eta"), [("DDIM", 0.0), ("DDIM", 0.4), ("DDIM", 1.0), ("DDPM", 1.0)])
def test_ddim_is_that_of_diffusion_models_and_with_eta_one_their_posterior(kind, eta):
    """A point sqrt(a) x0 + sqrt(1 - a) eps of a diffusion model, over sqrt(a) + sqrt(1 - a), is one of a flow."""
    import diffusers

    scheduler = getattr(diffusers, f"{kind}Scheduler")(clip_sample=False)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.set_timesteps(10)
    alphas = [*scheduler.alphas_cumprod[scheduler.timesteps], torch.ones((), dtype=torch.float64)]
    if kind == "DDIM":
        alphas[-1] = scheduler.final_alpha_cumprod.double()
    x, z = drawn(0), drawn(1)
    for i, timestep in enumerate(scheduler.timesteps):
        eps = drawn(2 + i)
        x0 = (x - (1 - alphas[i]).sqrt() * eps) / alphas[i].sqrt()
        scales = [a.sqrt() + (1 - a).sqrt() for a in alphas[i : i + 2]]
        levels = [float((1 - a).sqrt() / scale) for a, scale in zip(alphas[i : i + 2], scales, strict=True)]
        ours = FlowDDIM(eta=eta).transition(x / scales[0], eps - x0, *levels).sample(z) * scales[1]
        noise = {"eta": eta, "variance_noise": z} if kind == "DDIM" else {"generator": torch.Generator().manual_seed(1)}
        x = scheduler.step(eps, timestep, x, **noise).prev_sample
        torch.testing.assert_close(ours, x, rtol=1e-12, atol=1e-12)
