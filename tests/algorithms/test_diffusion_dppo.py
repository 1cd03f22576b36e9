"""Flow-DPPO: the paper's equation in float64, its limits in the threshold, and its anchors."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.algorithms.trajectories import (
    IMAGE,
    ROWS,
    VIDEO,
    Step,
    anchored,
    assert_same,
    expected,
    loss_and_gradient,
    mean_of,
    policies,
    trajectory,
)
from unirl.algorithms.diffusion_dppo import DiffusionDPPO
from unirl.config.errors import ConfigError
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, FlowDDIM, FlowSDEStrategy
from unirl.testing.algorithm import check_algorithm
from unirl.testing.toy import toy_params, toy_stage, toy_track
from unirl.types.protocols import Anchor, Kernel

STEPS = (0, 1, 3)
LATENTS = pytest.mark.parametrize("latent", [IMAGE, VIDEO], ids=["image", "video"])


def divergence(step: Step) -> Tensor:
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(normal(step.new.mean, step.std), normal(step.old.mean, step.std))
    return mean_of(kl.detach())


def without_noise_level(step: Step) -> Tensor:
    return mean_of((step.new.mean - step.old.mean).detach() ** 2) / 2


def unclipped(step: Step) -> Tensor:
    return -step.advantages * (step.new.logp - step.old.logp).exp()


def masked(step: Step, divergence: Tensor, threshold: float) -> Tensor:
    """The paper's case distinction, one row at a time."""
    losses = unclipped(step)
    for b, (gain, ratio) in enumerate(zip(step.advantages, (step.new.logp - step.old.logp).exp(), strict=True)):
        if divergence[b] >= threshold and ((ratio > 1 and gain > 0) or (ratio < 1 and gain < 0)):
            losses = losses.index_fill(0, torch.tensor([b]), 0.0)
    return losses


@LATENTS
@pytest.mark.parametrize("with_std", [True, False])
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_loss_and_gradient_are_those_of_the_papers_equation(
    latent: tuple[int, ...], with_std: bool, beta: float
) -> None:
    named = policies(latent)
    threshold = 1e-3 if with_std else 3e-4
    algorithm = DiffusionDPPO(kl_threshold=threshold, add_kl_coefficient=with_std, kl_coef=beta)
    track = anchored(algorithm, named, trajectory(named.old, latent))

    def equation(step: Step) -> Tensor:
        kl = mean_of((step.new.mean - step.reference.mean) ** 2) / (2 * step.std**2)
        return masked(step, divergence(step) if with_std else without_noise_level(step), threshold) + beta * kl

    have = loss_and_gradient(algorithm, named.new, track)
    assert_same(have, expected(named, track, equation))
    assert 0 < have.metrics["train/clip_fraction"] < 0.5  # some are dropped, and the mask is not all there is
    one = loss_and_gradient(replace(algorithm, steps_per_forward=3), named.new, track)
    assert torch.allclose(one.gradient, have.gradient, rtol=0, atol=1e-6 * float(have.gradient.abs().max()))


@LATENTS
def test_without_a_threshold_it_is_the_plain_policy_gradient(latent: tuple[int, ...]) -> None:
    named = policies(latent)
    algorithm = DiffusionDPPO(kl_threshold=math.inf)
    track = anchored(algorithm, named, trajectory(named.old, latent))
    have = loss_and_gradient(algorithm, named.new, track)
    assert_same(have, expected(named, track, unclipped))
    assert have.metrics["train/clip_fraction"] == 0.0


def test_with_a_threshold_of_zero_only_rows_that_move_back_have_a_gradient() -> None:
    named = policies(IMAGE)
    algorithm = DiffusionDPPO(kl_threshold=0.0)
    track = anchored(algorithm, named, trajectory(named.old, IMAGE))

    def equation(step: Step) -> Tensor:
        back = (step.new.logp > step.old.logp) != (step.advantages > 0)
        return torch.where(back, unclipped(step), 0.0)

    assert_same(loss_and_gradient(algorithm, named.new, track), expected(named, track, equation))


@pytest.mark.parametrize(
    "kernel",
    [FlowSDEStrategy(), DanceSDEStrategy(), CPSSDEStrategy(), FlowDDIM()],
    ids=lambda kernel: type(kernel).__name__,
)
def test_before_the_first_update_nothing_is_dropped_whatever_the_threshold(kernel: Kernel) -> None:
    stage = toy_stage()
    track = toy_track(stage, params=toy_params(kernel))
    have = loss_and_gradient(DiffusionDPPO(kl_threshold=0.0), stage, track)
    free = loss_and_gradient(DiffusionDPPO(kl_threshold=math.inf), stage, track)
    assert torch.equal(have.gradient, free.gradient) and bool(have.gradient.any())
    assert have.metrics["train/ratio_mean"] == 1.0 and have.metrics["train/ratio_std"] == 0.0
    silent = ("clip_fraction", "approx_kl", "kl_old", "kl_old_max", *(f"log_ratio_step_{i}" for i in STEPS))
    assert all(have.metrics[f"train/{name}"] == 0.0 for name in silent)


def test_the_divergence_of_the_mask_is_logged() -> None:
    named = policies(IMAGE)
    algorithm = DiffusionDPPO()
    track = anchored(algorithm, named, trajectory(named.old, IMAGE))
    metrics = loss_and_gradient(algorithm, named.new, track).metrics
    seen: list[Tensor] = []
    mean = expected(named, track, lambda step: seen.append(divergence(step)) or unclipped(step) * 0 + seen[-1]).loss
    assert metrics["train/kl_old"] == pytest.approx(mean / (ROWS * len(STEPS)), rel=1e-5)
    assert metrics["train/kl_old_max"] == pytest.approx(float(torch.stack(seen).max()), rel=1e-5)
    dropped = expected(
        named, track, lambda step: unclipped(step) * 0 + (masked(step, divergence(step), 1e-5) == 0).double()
    )
    assert metrics["train/clip_fraction"] == pytest.approx(dropped.loss / (ROWS * len(STEPS)))
    assert metrics["train/clip_fraction_high"] + metrics["train/clip_fraction_low"] == pytest.approx(
        metrics["train/clip_fraction"]
    )


@pytest.mark.parametrize(("sign", "side", "other"), [(1.0, "high", "low"), (-1.0, "low", "high")])
def test_dropped_elements_are_counted_by_the_side_of_their_ratio(sign: float, side: str, other: str) -> None:
    named = policies(IMAGE)
    algorithm = DiffusionDPPO(kl_threshold=0.0)
    track = anchored(algorithm, named, trajectory(named.old, IMAGE))
    metrics = loss_and_gradient(algorithm, named.new, track.replace(advantages=sign * track.advantages.abs())).metrics
    assert metrics[f"train/clip_fraction_{side}"] > 0.0 == metrics[f"train/clip_fraction_{other}"]


def test_an_overflowing_ratio_is_dropped_with_a_finite_loss_and_gradient() -> None:
    named = policies(IMAGE)
    algorithm = DiffusionDPPO()
    track = anchored(algorithm, named, trajectory(named.old, IMAGE))
    anchors = dict(track.segment.anchors)
    anchors["old_logp"] = anchors["old_logp"].clone()
    anchors["old_logp"][0] = -1e5
    wild = track.replace(segment=track.segment.replace(anchors=anchors), advantages=track.advantages.abs() + 0.1)
    have = loss_and_gradient(algorithm, named.new, wild)
    assert math.isfinite(have.loss) and bool(have.gradient.isfinite().all())


def test_it_reads_the_old_log_prob_and_the_old_mean() -> None:
    live = {"old_logp": Anchor("live", "logp"), "old_mean": Anchor("live", "mean")}
    assert DiffusionDPPO().anchors() == live and DiffusionDPPO().needs.snapshots == ()
    assert DiffusionDPPO(kl_coef=0.1).anchors() == live | {"ref_mean": Anchor("reference", "mean")}
    recorded = DiffusionDPPO(old_logp_source="rollout")
    assert set(recorded.anchors()) == {"old_mean"} and recorded.needs.behaviour_logp


def test_trust_width_is_the_threshold_if_that_is_in_nats() -> None:
    assert DiffusionDPPO(kl_threshold=3e-5).trust_width() == 3e-5
    assert DiffusionDPPO(add_kl_coefficient=False).trust_width() is None
    assert DiffusionDPPO(kl_threshold=0.0).trust_width() is None


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ConfigError, match="kl_threshold") as error:
        DiffusionDPPO(kl_threshold=-1e-5)
    assert error.value.code == 2004


@pytest.mark.parametrize("options", [{}, {"add_kl_coefficient": False}, {"kl_coef": 0.1, "steps_per_forward": 2}])
def test_it_keeps_the_contract_of_losses(options: dict[str, object]) -> None:
    stage = toy_stage()
    check_algorithm(DiffusionDPPO(**options), stage, toy_track(stage))  # type: ignore[arg-type]
