"""DiffusionNFT: the paper's loss and gradient, its neutral and stationary points, the schedules of the old policy."""

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.algorithms.clean_samples import (
    SHAPES,
    Field,
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
from unirl.algorithms.diffusion_nft import AdvantageMode, DiffusionNFT, optimality, prediction_loss
from unirl.algorithms.shared.forward_process import Noised
from unirl.algorithms.shared.training_times import ScheduleTimes, UniformTimes
from unirl.config.errors import ConfigError
from unirl.models.denoising.stage import DiffusionStage
from unirl.testing.algorithm import check_algorithm
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import EmaLoraConfig
from unirl.types.protocols import Anchor
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack

TIMES = UniformTimes(num_times=3, low=0.1)


def paper_loss(
    algorithm: DiffusionNFT, track: RolloutTrack, noised: Noised, v: Tensor, v_old: Tensor, v_ref: Tensor
) -> Tensor:
    """The sum over elements, in float64, written out from the equations; velocities [B, n, *latent]."""
    beta, a_max = algorithm.beta, algorithm.adv_clip_max
    t = noised.t.double().reshape(*noised.t.shape, *[1] * (v.dim() - 2))
    x0, x = noised.x0.double(), (1 - t) * noised.x0.double() + t * noised.eps.double()
    q = (track.advantages.double() / a_max * 0.5 + 0.5).clamp(0, 1)[:, None]

    def side(velocity: Tensor) -> Tensor:
        x0_hat = x - t * velocity
        weight = latent_mean((x0_hat - x0).abs()).clamp(min=1e-5).detach() if algorithm.use_adaptive_weight else 1.0
        return latent_mean((x0_hat - x0) ** 2) / weight

    positive, negative = beta * v + (1 - beta) * v_old, (1 + beta) * v_old - beta * v
    policy = a_max * (q * side(positive) + (1 - q) * side(negative)) / beta
    return (policy + algorithm.velocity_coef * latent_mean((v - v_ref) ** 2)).sum()


@pytest.mark.parametrize("shape", SHAPES, ids=["image", "video"])
@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "plain"])
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_loss_and_gradient_are_the_papers(shape: tuple[int, ...], adaptive: bool, beta: float) -> None:
    algorithm = DiffusionNFT(
        beta=beta, adv_clip_max=1.5, use_adaptive_weight=adaptive, velocity_coef=0.3, times=TIMES, times_per_forward=2
    )
    live, old, reference = field_stage(0), field_stage(1), field_stage(2)
    track = anchored(algorithm, clean_track(shape), old=old, reference=reference)
    noised, weights = all_noised(algorithm, track), weights64(live)
    v, v_old, v_ref = (velocity64(w, track, noised) for w in (weights, weights64(old), weights64(reference)))
    expected = paper_loss(algorithm, track, noised, v, v_old.detach(), v_ref.detach())
    result = sum(algorithm.loss(live, track, part).loss.item() for part in algorithm.parts(track.segment))
    assert result == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradient(algorithm, live, track), torch.autograd.grad(expected, weights)[0])


def test_the_error_of_the_predicted_sample_is_t_times_that_of_the_velocity() -> None:
    noised = all_noised(DiffusionNFT(times=TIMES), clean_track())
    v = torch.randn(noised.eps.shape, dtype=torch.float64)
    t = noised.t_like(v).double()
    x = (1 - t) * noised.x0.double() + t * noised.eps.double()
    expected = latent_mean((x - t * v - noised.x0.double()) ** 2)
    assert torch.allclose(prediction_loss(noised, v, adaptive=False), expected, rtol=1e-5)


def at_the_old_policy(beta: float, advantages: Tensor) -> tuple[float, Tensor]:
    """Loss and gradient where the trained policy is the one that sampled."""
    algorithm, stage = DiffusionNFT(beta=beta, velocity_coef=0.0, times=TIMES), field_stage()
    track = anchored(algorithm, clean_track().replace(advantages=advantages), old=stage)
    loss = sum(algorithm.loss(stage, track, part).loss.item() for part in algorithm.parts(track.segment))
    return loss, gradient(algorithm, stage, track)


def test_at_the_old_policy_only_the_gradient_depends_on_the_reward() -> None:
    one, other = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    (loss, slope), (loss_other, slope_other) = at_the_old_policy(1.0, one), at_the_old_policy(1.0, other)
    assert loss == pytest.approx(loss_other, rel=1e-6)
    assert not torch.allclose(slope, slope_other, rtol=0.1)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_at_the_old_policy_both_sides_are_its_own_error_and_the_loss_their_mean_over_beta(beta: float) -> None:
    algorithm, stage = DiffusionNFT(beta=beta, adv_clip_max=3.0, velocity_coef=0.0, times=TIMES), field_stage()
    track = anchored(algorithm, clean_track(), old=stage)
    noised = algorithm.noised(track, (1,))
    error = prediction_loss(noised, velocity64(weights64(stage).detach(), track, noised), adaptive=True)
    result = values(algorithm.loss(stage, track, (1,)).metrics)
    assert result["train/positive_loss"] == pytest.approx(float(error.mean()), rel=1e-5)
    assert result["train/negative_loss"] == pytest.approx(result["train/positive_loss"], rel=1e-5)
    assert result["train/policy_loss"] == pytest.approx(3.0 * float(error.mean()) / beta, rel=1e-5)


def test_at_the_old_policy_the_gradient_does_not_depend_on_beta() -> None:
    advantages = clean_track().advantages
    slopes = [at_the_old_policy(beta, advantages)[1] for beta in (0.1, 1.0, 3.0)]
    assert_close(slopes[0], slopes[1].double())
    assert_close(slopes[2], slopes[1].double())


def test_at_the_old_policy_the_gradient_has_its_closed_form() -> None:
    algorithm, track = DiffusionNFT(beta=0.5, velocity_coef=0.0, times=TIMES), clean_track()
    noised = all_noised(algorithm, track)
    v = torch.randn(noised.eps.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    leaf = v.clone().requires_grad_()
    stage = DiffusionStage(Constant(leaf), field_stage().facts)
    track = track.replace(segment=track.segment.replace(anchors={"old_velocity": v}))
    algorithm.compute_loss_and_backward(stage, track, lambda loss, last: loss.backward())
    t = noised.t_like(v).double()
    residual = t * (noised.target.double() - v)  # x_t - t v - x0
    q = (track.advantages.double() / 10 + 0.5).clamp(0, 1).view(-1, 1, 1, 1, 1)
    weight = latent_mean(residual.abs())[..., None, None, None]
    expected = 5.0 * (2 * q - 1) * (-2 * t * residual) / (weight * v[0, 0].numel())
    assert leaf.grad is not None and torch.allclose(leaf.grad, expected, rtol=1e-4, atol=1e-6)


class Constant:
    """Given velocities [B, n, *latent], those of time j at call j."""

    def __init__(self, velocities: Tensor) -> None:
        self.velocities, self.calls = velocities, 0

    def velocity(self, x: Tensor, sigma: Tensor, conditions: object) -> Tensor:
        self.calls += 1
        return self.velocities[:, self.calls - 1]


def test_a_sample_of_advantage_zero_is_neutral() -> None:
    _, slope = at_the_old_policy(1.0, torch.zeros(8))
    _, some = at_the_old_policy(1.0, torch.ones(8))
    assert slope.abs().max() < 1e-6 * some.abs().max()


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_the_stationary_point_depends_on_the_optimality_of_the_sample(beta: float) -> None:
    algorithm, track = DiffusionNFT(beta=beta, use_adaptive_weight=False, times=TIMES), clean_track()
    noised = all_noised(algorithm, track)
    v_old = torch.randn(noised.eps.shape, dtype=torch.float64)
    q = optimality(track.advantages, algorithm.adv_clip_max).double().view(-1, 1, 1, 1, 1)
    v = (v_old + (2 * q - 1) / beta * (noised.target - v_old)).requires_grad_()
    positive = prediction_loss(noised, beta * v + (1 - beta) * v_old, adaptive=False)
    negative = prediction_loss(noised, (1 + beta) * v_old - beta * v, adaptive=False)
    q = q.view(-1, 1)
    (slope,) = torch.autograd.grad((q * positive + (1 - q) * negative).sum(), v)
    (scale,) = torch.autograd.grad(prediction_loss(noised, v, adaptive=False).sum(), v)
    assert slope.abs().max() < 1e-9 * scale.abs().max()


def test_an_exact_prediction_has_a_finite_gradient() -> None:
    noised = all_noised(DiffusionNFT(times=TIMES), clean_track())
    v = noised.target.double().requires_grad_()
    loss = prediction_loss(noised, v, adaptive=True)
    (slope,) = torch.autograd.grad(loss.sum(), v)
    assert (loss == 0).all() and (slope == 0).all()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [0.0, 0.0, 0.3, 0.5, 0.6, 1.0, 1.0]),
        ("positive_only", [0.5, 0.5, 0.5, 0.5, 0.6, 1.0, 1.0]),
        ("negative_only", [0.0, 0.0, 0.3, 0.5, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.4, 0.5, 0.6, 0.6, 0.6]),
    ],
)
def test_optimality_of_advantages_by_mode(mode: AdvantageMode, expected: list[float]) -> None:
    advantages = torch.tensor([-7.0, -5.0, -2.0, 0.0, 1.0, 5.0, 7.0])
    assert optimality(advantages, 5.0, mode).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["positive_only", "negative_only", "one_only", "binary"])
def test_the_loss_uses_the_advantages_as_its_mode_says(mode: AdvantageMode) -> None:
    live, old = field_stage(0), field_stage(1)
    algorithm = DiffusionNFT(adv_mode=mode, adv_clip_max=2.0, velocity_coef=0.0, times=TIMES)
    plain = dataclasses.replace(algorithm, adv_mode="all")
    track = anchored(algorithm, clean_track(), old=old)
    used = track.replace(advantages=4.0 * optimality(track.advantages, 2.0, mode) - 2.0)
    result, expected = gradient(algorithm, live, track), gradient(plain, live, used)
    assert_close(result, expected.double())
    assert not torch.allclose(result, gradient(plain, live, track), rtol=1e-2)


def test_distances_between_the_policies_are_logged() -> None:
    algorithm, live, old, reference = DiffusionNFT(times=TIMES, velocity_coef=0.5), *map(field_stage, range(3))
    track = anchored(algorithm, clean_track(), old=old, reference=reference)
    noised = algorithm.noised(track, (1,))
    result = values(algorithm.loss(live, track, (1,)).metrics)
    v, v_old, v_ref = (velocity64(weights64(stage).detach(), track, noised) for stage in (live, old, reference))
    assert result["train/velocity_mse_old"] == pytest.approx(float((v - v_old).square().mean()), rel=1e-5)
    assert result["train/velocity_mse"] == pytest.approx(float((v - v_ref).square().mean()), rel=1e-5)
    assert result["train/velocity_loss"] == pytest.approx(0.5 * result["train/velocity_mse"], rel=1e-6)
    q = optimality(track.advantages, 5.0).double()
    assert result["train/optimality"] == pytest.approx(float(q.mean()), rel=1e-6)
    sides = (("positive", v), ("negative", 2.0 * v_old - v))  # beta is 1
    for name, velocity in sides:
        error = prediction_loss(noised, velocity, adaptive=True)
        assert result[f"train/{name}_loss"] == pytest.approx(float(error.mean()), rel=1e-5)
    total = algorithm.loss(live, track, (1,)).loss.item() / len(track)
    assert total == pytest.approx(result["train/policy_loss"] + result["train/velocity_loss"], rel=1e-6)


def test_needs_are_the_old_policy_and_the_reference_only_with_a_penalty() -> None:
    algorithm = DiffusionNFT()
    assert algorithm.anchors() == {
        "old_velocity": Anchor("old", "velocity"),
        "reference_velocity": Anchor("reference", "velocity"),
    }
    assert algorithm.needs.ema_rollout and algorithm.needs.snapshots == ("old", "reference")
    assert algorithm.needs.multi_update and not algorithm.needs.density
    assert DiffusionNFT(velocity_coef=0.0).needs.snapshots == ("old",)
    assert algorithm.trust_width() is None


@pytest.mark.parametrize(
    "options",
    [{"beta": 0.0}, {"beta": -1.0}, {"adv_clip_max": 0.0}, {"velocity_coef": -1e-4}, {"times_per_forward": 0}],
)
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))) as error:
        DiffusionNFT(**options)  # type: ignore[arg-type]
    assert error.value.code == 2004


@pytest.mark.parametrize("velocity_coef", [0.0, 0.1])
def test_it_keeps_the_contract_of_losses(velocity_coef: float) -> None:
    check_algorithm(DiffusionNFT(velocity_coef=velocity_coef), field_stage(), clean_track())


# The old policy


@pytest.mark.parametrize(
    ("rule", "decays"),
    [
        (EmaLoraConfig(ceiling=0.0), {0: 0.0, 76: 0.0, 500: 0.0}),
        (EmaLoraConfig(), {0: 0.0, 76: 0.076, 499: 0.499, 500: 0.5, 5000: 0.5}),
        (
            EmaLoraConfig(flat_updates=75, rate=0.0075, ceiling=0.999),
            {0: 0, 75: 0, 100: 0.1875, 208: 0.9975, 209: 0.999},
        ),
    ],
    ids=["type 0", "type 1", "type 2"],
)
def test_the_old_policy_follows_by_the_papers_schedules(rule: EmaLoraConfig, decays: dict[int, float]) -> None:
    assert {n: rule.decay_at(n) for n in decays} == pytest.approx(decays)


def test_a_step_without_an_update_leaves_the_old_policy_what_its_version_says() -> None:
    rule = EmaLoraConfig(flat_updates=0, rate=0.5, ceiling=0.9)
    backend = FSDPBackend(
        DiffusionBundleOf(Field()), optimizer_cfg=OptimizerConfig(learning_rate=0.1), ema_lora_cfg=rule
    )

    def update(loss: Tensor) -> bytes:
        backend.backward(loss, last=True)
        backend.step(1.0, loss)
        backend.finish_step()
        return backend.gather("old")["weights"].numpy().tobytes()

    field = backend.module
    assert isinstance(field, Field)
    first = update(field.weights.square().sum())
    assert update(field.weights.sum() * float("nan")) == first and backend.updates == 1
    assert update(field.weights.square().sum()) != first


class DiffusionBundleOf:
    """The part of a bundle that a backend needs, for one module."""

    def __init__(self, module: Field) -> None:
        self.module, self.facts = module, field_stage().facts

    def trainable(self) -> Field:
        return self.module


def test_the_schedule_of_the_rollout_is_trained_by_default() -> None:
    track = clean_track()
    assert DiffusionNFT().times == ScheduleTimes() and len(DiffusionNFT().parts(track.segment)) == 4
