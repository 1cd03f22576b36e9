"""What a request pins: the schedule, and MixGRPO-Flash's short tail of it."""

from dataclasses import replace

import pytest

from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.schedule import SigmaSchedule, static_shift
from unirl.sde.steps import ProgressiveWindow
from unirl.testing.toy import toy_facts
from unirl.types.sampling import DiffusionSamplingParams

T = 25
SCHEDULE = SigmaSchedule(shift=3.0)


def levels(num_steps: int) -> tuple[float, ...]:
    return tuple(SCHEDULE.sigmas(num_steps).tolist())


def flash(fraction: float, **window: int) -> DiffusionSamplingParams:
    steps = ProgressiveWindow(size=4, **({"iters_per_window": 1} | window))
    return DiffusionSamplingParams(
        kernel=FlowSDEStrategy(), num_inference_steps=T, sde_steps=steps, tail_fraction=fraction
    )


@pytest.mark.parametrize(("left", "forwards"), [(0, 12), (4, 14), (8, 17), (12, 19), (16, 22), (20, 25)])
def test_the_forwards_of_mixgrpo_flash(left: int, forwards: int) -> None:
    """The published counts at T = 25, a window of 4 and a ratio of 0.4."""
    pinned = flash(0.4).pinned(left, levels(T), levels)
    assert pinned.sde_indices == tuple(range(left, left + 4))
    assert pinned.num_inference_steps == len(pinned.sigmas) - 1 == forwards


def test_the_forwards_of_a_frozen_window() -> None:
    assert flash(0.2, stride=0).pinned(999, levels(T), levels).num_inference_steps == 8


def test_the_tail_is_the_models_schedule_of_an_even_grid() -> None:
    pinned = flash(0.4).pinned(4, levels(T), levels)
    assert pinned.sigmas[:9] == levels(T)[:9]
    start = 1 - 8 / T  # the grid position of the last level that is kept
    expected = [static_shift(start * (1 - j / 6), 3.0) for j in range(1, 7)]
    assert pinned.sigmas[9:] == pytest.approx(expected, abs=1e-7)


def test_the_grid_of_the_recipe_replaces_that_of_the_model() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    params = DiffusionSamplingParams(kernel=FlowSDEStrategy(), height=4, width=4)  # 10 steps
    assert params.sigma_grid is None and toy_facts().pinned(params, 0).sigmas == levels(10)
    pinned = toy_facts().pinned(replace(params, sigma_grid="diffusers"), 0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    assert pinned.sigmas == pytest.approx(scheduler.sigmas.tolist(), abs=3e-7)
    assert toy_facts().pinned(pinned, 0).sigmas == pinned.sigmas, "a pinned request keeps its levels"


def test_an_explicit_schedule_has_no_grid() -> None:
    with pytest.raises(ValueError, match=r"sampling\.sigma_grid .* remove one of them"):
        DiffusionSamplingParams(
            kernel=FlowSDEStrategy(), num_inference_steps=2, sigmas=(1.0, 0.5, 0.0), sigma_grid="diffusers"
        )


def test_a_fraction_of_one_keeps_the_schedule() -> None:
    assert flash(1.0).pinned(3, levels(T), levels).sigmas == pytest.approx(levels(T), abs=1e-7)


def test_evaluation_keeps_every_step() -> None:
    assert flash(0.4).deterministic().pinned(0, levels(T)).num_inference_steps == T


@pytest.mark.parametrize("fraction", [0.0, -0.4, 1.5])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"sampling\.tail_fraction must lie in \(0, 1\]"):
        flash(fraction)


def test_an_explicit_schedule_has_no_tail_to_shorten() -> None:
    with pytest.raises(ValueError, match="remove one of them"):
        DiffusionSamplingParams(
            kernel=FlowSDEStrategy(), num_inference_steps=2, sigmas=(1.0, 0.5, 0.0), tail_fraction=0.5
        )


@pytest.mark.parametrize(
    ("scale", "second", "passes", "rows"),
    [(1.0, None, 1, 1), (4.0, None, 1, 2), (1.0, 3.0, 1, 2), (3.0, 1.0, 1, 2), (1.0, 1.0, 1, 1), (4.0, 3.0, 2, 1)],
)
def test_a_sample_takes_two_rows_where_some_step_is_guided_in_one_pass(
    scale: float, second: float | None, passes: int, rows: int
) -> None:
    params = DiffusionSamplingParams(
        kernel=FlowSDEStrategy(), guidance_scale=scale, guidance_scale_2=second, guidance_passes=passes
    )
    assert params.rows_per_sample == rows and params.is_guided == (max(rows, passes) == 2)
