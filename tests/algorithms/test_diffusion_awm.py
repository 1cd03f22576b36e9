"""AWM: the surrogate's forms, advantage-weighted flow matching at ratio one, and the clipped ratio beyond."""

import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.clean_samples import (
    SHAPES,
    all_noised,
    anchored,
    assert_close,
    clean_track,
    field_stage,
    gradient,
    latent_mean,
    velocity64,
    weights64,
)
from unirl.algorithms.diffusion_awm import FORMS, DiffusionAWM, Form, log_prob_surrogate
from unirl.algorithms.shared.training_times import UniformTimes
from unirl.config.errors import ConfigError
from unirl.testing.algorithm import check_algorithm
from unirl.types.protocols import Anchor
from unirl.types.results import merge, values

TIMES = UniformTimes(num_times=3, low=0.1)
DELTA = 1e-10


def published(form: Form, e: Tensor, t: Tensor) -> Tensor:
    """The log-prob surrogates as their equations are written."""
    return {
        "uniform": -e,
        "linear": -e * t,
        "quadratic": -e * t**2,
        "huber": -(torch.sqrt(e + DELTA) - 1e-5) * t,
        "power_huber": -t * ((e + DELTA) ** 0.25 - DELTA**0.25) / 0.25,
    }[form]


@pytest.mark.parametrize("form", FORMS)
def test_the_surrogate_has_its_published_value_and_slope(form: Form) -> None:
    e = torch.tensor([0.0, 1e-6, 0.01, 0.5, 1.0, 4.0], dtype=torch.float64)[:, None].expand(-1, 3).clone()
    t = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64).expand(6, 3)
    e.requires_grad_()
    result, expected = log_prob_surrogate(form, e, t), published(form, e, t)
    assert torch.allclose(result, expected, rtol=1e-12, atol=1e-15)
    slopes = [torch.autograd.grad(value.sum(), e)[0] for value in (result, expected)]
    assert torch.allclose(slopes[0], slopes[1], rtol=1e-10)
    assert (slopes[0] < 0).all()  # a larger error is less likely


@pytest.mark.parametrize("power", [1.0, 0.5, 0.1])
def test_the_power_is_that_of_the_error(power: float) -> None:
    e = torch.tensor([0.2, 3.0], dtype=torch.float64)
    expected = -0.5 * ((e + DELTA) ** power - DELTA**power) / power
    assert torch.allclose(log_prob_surrogate("power_huber", e, torch.full_like(e, 0.5), power), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=["image", "video"])
@pytest.mark.parametrize("form", FORMS)
def test_at_ratio_one_the_gradient_is_minus_advantage_times_that_of_the_surrogate(
    shape: tuple[int, ...], form: Form
) -> None:
    algorithm = DiffusionAWM(surrogate=form, velocity_coef=0.0, times=TIMES, times_per_forward=2)
    stage, track = field_stage(), clean_track(shape)
    noised, weights = all_noised(algorithm, track), weights64(stage)
    target = noised.eps.double() - noised.x0.double()
    error = latent_mean((velocity64(weights, track, noised) - target) ** 2)
    logp = published(form, error, noised.t.double())
    expected = -(track.advantages.double()[:, None] * logp).sum()
    assert_close(gradient(algorithm, stage, track), torch.autograd.grad(expected, weights)[0])


def test_the_uniform_form_at_ratio_one_is_advantage_weighted_flow_matching() -> None:
    algorithm = DiffusionAWM(surrogate="uniform", velocity_coef=0.0, times=TIMES)
    stage, track = field_stage(), clean_track()
    noised, weights = all_noised(algorithm, track), weights64(stage)
    error = (velocity64(weights, track, noised) - noised.target.double()).square()
    expected = (track.advantages.double()[:, None] * latent_mean(error)).sum()
    assert_close(gradient(algorithm, stage, track), torch.autograd.grad(expected, weights)[0])


@pytest.mark.parametrize("clip_range", [None, 0.05])
@pytest.mark.parametrize("shape", SHAPES, ids=["image", "video"])
def test_off_policy_the_loss_is_the_ratio_loss_plus_both_velocity_penalties(
    shape: tuple[int, ...], clip_range: float | None
) -> None:
    algorithm = DiffusionAWM(
        surrogate="huber", clip_range=clip_range, velocity_coef=0.3, ema_coef=0.7, times=TIMES, times_per_forward=2
    )
    live, behaviour, reference, slow = map(field_stage, range(4))
    track = anchored(algorithm, clean_track(shape), live=behaviour, reference=reference, old=slow)
    noised, weights = all_noised(algorithm, track), weights64(live)
    target = noised.eps.double() - noised.x0.double()
    others = [velocity64(weights64(stage).detach(), track, noised) for stage in (behaviour, reference, slow)]
    v = velocity64(weights, track, noised)
    logp, old = (published("huber", latent_mean((u - target) ** 2), noised.t.double()) for u in (v, others[0]))
    ratio, advantages = (logp - old).exp(), track.advantages.double()[:, None]
    assert ratio.min() < 0.95 and ratio.max() > 1.05  # both sides of the clip
    clipped = ratio if clip_range is None else ratio.clamp(1 - clip_range, 1 + clip_range)
    policy = torch.maximum(-advantages * ratio, -advantages * clipped)
    velocity_penalties = 0.3 * latent_mean((v - others[1]) ** 2) + 0.7 * latent_mean((v - others[2]) ** 2)
    expected = (policy + velocity_penalties).sum()
    result = sum(algorithm.loss(live, track, part).loss.item() for part in algorithm.parts(track.segment))
    assert result == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradient(algorithm, live, track), torch.autograd.grad(expected, weights)[0])


def test_the_ratio_is_exactly_one_before_the_first_update_with_and_without_the_anchor() -> None:
    algorithm, stage, track = DiffusionAWM(times=TIMES, velocity_coef=0.0), field_stage(), clean_track()
    for rows in (track, anchored(algorithm, track, live=stage)):
        metrics = merge([algorithm.loss(stage, rows, part).metrics for part in algorithm.parts(rows.segment)])
        result = values(metrics)
        assert (result["train/ratio_mean"], result["train/ratio_std"], result["train/approx_kl"]) == (1.0, 0.0, 0.0)


def test_clip_fractions_are_logged_if_there_is_a_clip() -> None:
    algorithm = DiffusionAWM(surrogate="uniform", clip_range=0.05, velocity_coef=0.0, times=TIMES)
    live, behaviour = field_stage(0), field_stage(1)
    track = anchored(algorithm, clean_track(), live=behaviour)
    noised = algorithm.noised(track, (0,))
    errors = [
        latent_mean((velocity64(weights64(stage).detach(), track, noised) - noised.target.double()) ** 2)
        for stage in (live, behaviour)
    ]
    ratio = (errors[1] - errors[0]).exp()
    result = values(algorithm.loss(live, track, (0,)).metrics)
    above, below = (float(outside.double().mean()) for outside in (ratio > 1.05, ratio < 0.95))
    assert above != below
    assert result["train/clip_fraction_high"] == pytest.approx(above)
    assert result["train/clip_fraction_low"] == pytest.approx(below)
    assert result["train/clip_fraction"] == pytest.approx(above + below)
    assert result["train/ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-5)
    assert result["train/matching_error"] == pytest.approx(float(errors[0].mean()), rel=1e-5)
    assert "train/clip_fraction" not in DiffusionAWM(times=TIMES, velocity_coef=0.0).loss(live, track, (0,)).metrics


def test_an_overflowing_ratio_stays_finite() -> None:
    algorithm = DiffusionAWM(surrogate="uniform", velocity_coef=0.0, times=TIMES)
    track = anchored(algorithm, clean_track(), live=field_stage())
    far = track.segment.anchors["old_logp"] - 1e4
    track = track.replace(segment=track.segment.replace(anchors={"old_logp": far}))
    assert gradient(algorithm, field_stage(1), track).isfinite().all()


def test_needs_follow_from_the_velocity_penalties() -> None:
    plain = DiffusionAWM(velocity_coef=0.0)
    assert plain.anchors() == {"old_logp": Anchor("live", "logp")} and plain.needs.snapshots == ()
    assert not plain.needs.ema_rollout and not plain.needs.density and plain.needs.multi_update
    both = DiffusionAWM(ema_coef=0.1)
    assert both.needs.snapshots == ("old", "reference")
    assert DiffusionAWM(ema_coef=0.1, ema_snapshot="ema", velocity_coef=0.0).needs.snapshots == ("ema",)
    assert plain.trust_width() is None  # no engine records this log-prob


@pytest.mark.parametrize(
    "options",
    [{"clip_range": 0.0}, {"clip_range": 1.0}, {"huber_power": 0.0}, {"ema_coef": -1.0}, {"velocity_coef": math.inf}],
)
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))) as error:
        DiffusionAWM(**options)  # type: ignore[arg-type]
    assert error.value.code == 2004


@pytest.mark.parametrize("options", [{}, {"clip_range": 0.1, "surrogate": "uniform"}, {"ema_coef": 0.5}])
def test_it_keeps_the_contract_of_losses(options: dict[str, object]) -> None:
    check_algorithm(DiffusionAWM(**options), field_stage(), clean_track())  # type: ignore[arg-type]
