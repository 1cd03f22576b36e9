"""GRPO on denoising steps: identities of the ratio, its gradient, and its anchors, on a toy network."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

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
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.shared.kl import AdaptiveKL
from unirl.algorithms.shared.mismatch import SequenceTIS, TokenTIS
from unirl.config.errors import ConfigError
from unirl.models.denoising.stage import DiffusionStage
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, FlowDDIM, FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.algorithm import check_algorithm
from unirl.testing.toy import toy_params, toy_stage, toy_track
from unirl.types.conditions import Conditions
from unirl.types.protocols import Anchor, Kernel, TrainingProgress
from unirl.types.results import merge, values
from unirl.types.rollout_resp import RolloutTrack

KERNELS: list[Kernel] = [FlowSDEStrategy(), DanceSDEStrategy(), CPSSDEStrategy(), FlowDDIM()]
STEPS = (0, 1, 3)


def gradient(algorithm: DiffusionGRPO, stage: DiffusionStage, track: RolloutTrack) -> list[Tensor]:
    stage.denoiser.zero_grad()  # type: ignore[attr-defined]
    algorithm.compute_loss_and_backward(stage, track, lambda loss, last: loss.backward())
    return [p.grad.clone() for p in stage.denoiser.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("steps_per_forward", [1, 2, 3])
def test_replay_on_unchanged_weights_gives_ratio_exactly_one(kernel: Kernel, steps_per_forward: int) -> None:
    stage = toy_stage()
    track = toy_track(stage, params=toy_params(kernel))
    algorithm = DiffusionGRPO(steps_per_forward=steps_per_forward)
    result = values(merge([algorithm.loss(stage, track, part).metrics for part in algorithm.parts(track.segment)]))
    assert (result["train/ratio_mean"], result["train/ratio_std"]) == (1.0, 0.0)
    assert result["train/approx_kl"] == result["train/clip_fraction"] == 0.0


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
def test_at_ratio_one_the_gradient_is_minus_advantage_times_grad_log_prob(kernel: Kernel) -> None:
    stage = toy_stage()
    track = toy_track(stage, params=toy_params(kernel))
    result = gradient(DiffusionGRPO(), stage, track)
    replayed = torch.distributions.Normal
    segment, total = track.segment, torch.zeros(())
    for step in STEPS:  # the log-prob from its definition, by torch's own Normal
        x, sigma, sigma_next = segment.latents_at(step), segment.sigmas[step], segment.sigmas[step + 1]
        v = stage.denoiser.velocity(x, sigma.expand(len(x)), track.conditions)
        move = kernel.transition(x, v, sigma, sigma_next)
        logp = replayed(move.mean, move.std).log_prob(segment.latents_at(step + 1)).flatten(1).mean(1)
        total = total - (track.advantages * logp).sum()
    expected = torch.autograd.grad(total, list(stage.denoiser.parameters()))  # type: ignore[attr-defined]
    for have, want in zip(result, expected, strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("differentiated", ["both", "conditional"])
def test_the_gradient_of_guidance_goes_through_the_branches_of_the_recipe(passes: int, differentiated: str) -> None:
    """Against the sum over the branches, each with its own forward, in which v_uncond is a constant or not."""
    stage = toy_stage()
    guided = toy_params(guidance_scale=4.5, guidance_passes=passes, guidance_gradient=differentiated)
    track = toy_track(stage, params=guided)
    result, segment, total = gradient(DiffusionGRPO(), stage, track), track.segment, torch.zeros(())
    for step in STEPS:
        x, sigma, sigma_next = segment.latents_at(step), segment.sigmas[step], segment.sigmas[step + 1]
        cond, uncond = (
            stage.denoiser.velocity(x, sigma.expand(len(x)), {"text": track.conditions[name]})
            for name in ("text", "negative_text")
        )
        constant = uncond if differentiated == "both" else uncond.detach()
        move = FlowSDEStrategy().transition(x, constant + 4.5 * (cond - constant), sigma, sigma_next)
        logp = torch.distributions.Normal(move.mean, move.std).log_prob(segment.latents_at(step + 1))
        total = total - (track.advantages * logp.flatten(1).mean(1)).sum()
    expected = torch.autograd.grad(total, list(stage.denoiser.parameters()))  # type: ignore[attr-defined]
    for have, want in zip(result, expected, strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_off_policy_the_loss_is_the_papers_clipped_mean() -> None:
    behaviour, stage = toy_stage(seed=0), toy_stage(seed=1)
    track = toy_track(behaviour)
    algorithm = DiffusionGRPO(clip_range=1e-3, clip_range_high=5e-3, old_logp_source="rollout")
    new = stage.replay(track.conditions, track.segment, STEPS).logp.detach().double()
    ratio = (new - track.segment.logp.double()).exp()
    advantages = track.advantages.double()[:, None]
    expected = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - 1e-3, 1 + 5e-3)).sum()
    result = sum(algorithm.loss(stage, track, part).loss.item() for part in algorithm.parts(track.segment))
    assert algorithm.count(track) == len(track) * len(STEPS)
    assert result == pytest.approx(float(expected), rel=1e-4)


def test_the_anchor_pass_gives_the_bits_of_the_training_forward() -> None:
    stage = toy_stage()
    track = toy_track(stage)
    algorithm = DiffusionGRPO(steps_per_forward=2)
    with torch.no_grad():
        segment, parity = algorithm.prepare_segment(stage, track, "live")
    parts = algorithm.parts(segment)
    trained = torch.cat([algorithm.loss(stage, track, part).outputs["logp"] for part in parts], dim=1)
    assert torch.equal(segment.anchors["old_logp"], trained)
    assert torch.equal(segment.anchors["old_logp"], track.segment.logp)
    assert values(parity) == {"rollout/parity_absdiff_max": 0.0}


def test_an_anchor_is_read_instead_of_the_loss_own_value() -> None:
    stage = toy_stage()
    track = toy_track(stage)
    shifted = track.replace(segment=track.segment.replace(anchors={"old_logp": track.segment.logp - 0.1}))
    result = values(DiffusionGRPO(clip_range=0.5).loss(stage, shifted, (1,)).metrics)
    assert result["train/ratio_mean"] == pytest.approx(2.718281828**0.1, rel=1e-5)


def test_parity_sees_an_engine_whose_log_prob_is_off_and_ignores_rows_of_weight_zero() -> None:
    stage = toy_stage()
    track = toy_track(stage)
    logp = track.segment.logp.clone()
    logp[2, 1] += 0.25
    wrong = track.replace(segment=track.segment.replace(logp=logp))
    algorithm = DiffusionGRPO()

    def parity(rows: RolloutTrack) -> float:
        metrics = algorithm.compute_loss_and_backward(
            stage, rows, lambda loss, last: loss.backward(), first_update=True
        )
        return metrics["rollout/parity_absdiff_max"].value

    assert parity(wrong) == pytest.approx(0.25, rel=1e-5)
    weight = torch.ones(len(track))
    weight[2] = 0
    assert parity(wrong.replace(weight=weight)) == 0.0
    logp[2, 1] = torch.nan
    assert parity(wrong.replace(weight=weight, segment=track.segment.replace(logp=logp))) == 0.0


def test_what_it_needs_and_anchors_follows_from_the_source_of_old_log_probs() -> None:
    replay, rollout = DiffusionGRPO(), DiffusionGRPO(old_logp_source="rollout")
    assert replay.anchors() == {"old_logp": Anchor("live", "logp")} and not replay.needs.behaviour_logp
    assert rollout.anchors() == {} and rollout.needs.behaviour_logp
    assert replay.needs.multi_update and not replay.needs.ema_rollout and replay.needs.snapshots == ()


def test_the_clip_range_follows_its_schedule_on_both_sides() -> None:
    algorithm = DiffusionGRPO(clip_range=1e-4, clip_range_high=3e-4, clip_schedule="linear")
    assert algorithm.clip_at(0.0) == (1e-4, 3e-4)
    assert algorithm.clip_at(1.0) == pytest.approx((0.5e-4, 1.5e-4))
    assert DiffusionGRPO(clip_range=2e-5).clip_at(0.3) == (2e-5, 2e-5)


# --- the papers' equations, in float64, off policy -------------------------------------------------------------------

LOW, HIGH = 2e-3, 4e-3
CLIP = {"clip_range": LOW, "clip_range_high": HIGH}
LATENTS = pytest.mark.parametrize("latent", [IMAGE, VIDEO], ids=["image", "video"])


def clipped(step: Step, log_ratio: Tensor) -> Tensor:
    """Flow-GRPO, eq. 6, for one step."""
    ratio, gain = log_ratio.exp(), step.advantages
    return torch.max(-gain * ratio, -gain * ratio.clamp(1 - LOW, 1 + HIGH))


def flow_grpo(step: Step) -> Tensor:
    return clipped(step, step.new.logp - step.old.logp)


def dual_clipped(step: Step) -> Tensor:
    bounded = torch.min(flow_grpo(step), -1.005 * step.advantages)
    return torch.where(step.advantages < 0, bounded, flow_grpo(step))


def guard(step: Step) -> Tensor:
    """GRPO-Guard's ratio: the drift of the log-ratio added back, times std."""
    drift = mean_of((step.new.mean - step.old.mean) ** 2) / (2 * step.std**2)
    return clipped(step, step.std * (step.new.logp - step.old.logp + drift))


def guard_by_dt(step: Step) -> Tensor:
    """Its loss over -dt, with mean weight 1 over the four steps of the schedule that have a density."""
    return guard(step) / -step.dt / INVERSE_DT


def tempflow(step: Step) -> Tensor:
    return 2.25 * step.std * flow_grpo(step)


def true_kl(step: Step) -> Tensor:
    """KL(N(mean, std^2) || N(mean_ref, std^2)) by torch."""
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(normal(step.new.mean, step.std), normal(step.reference.mean, step.std))
    return mean_of(kl)


def released_kl(step: Step) -> Tensor:
    """Flow-GRPO's released code: over twice the square of the diffusion coefficient, without dt."""
    return mean_of((step.new.mean - step.reference.mean) ** 2) / (2 * step.s**2)


def velocity_mse(step: Step) -> Tensor:
    return mean_of((step.new.v - step.reference.v) ** 2)


def penalised(step: Step) -> Tensor:
    """The log-ratio of the sampling policy to the reference, over all latent elements, taken off the advantage."""
    log_ratio = (step.old.logp - step.reference.logp).detach() * step.x_next[0].numel()
    return flow_grpo(replace(step, advantages=step.advantages - 0.3 * log_ratio))


SIGMAS = toy_params().sigmas or ()
INVERSE_DT = sum(1 / (SIGMAS[i] - SIGMAS[i + 1]) for i in range(4)) / 4

EQUATIONS: dict[str, tuple[DiffusionGRPO, Callable[[Step], Tensor]]] = {
    "flow-grpo": (DiffusionGRPO(**CLIP), flow_grpo),
    "dual clip": (DiffusionGRPO(**CLIP, dual_clip=1.005), dual_clipped),
    "guard": (DiffusionGRPO(**CLIP, ratio="guard"), guard),
    "guard by dt": (DiffusionGRPO(**CLIP, ratio="guard", step_weights="inverse_dt"), guard_by_dt),
    "tempflow": (DiffusionGRPO(**CLIP, step_weights="tempflow"), tempflow),
    "true kl": (DiffusionGRPO(**CLIP, kl_coef=2.0), lambda step: flow_grpo(step) + 2.0 * true_kl(step)),
    "released kl": (
        DiffusionGRPO(**CLIP, kl_coef=2.0, kl_form="flow_grpo"),
        lambda step: flow_grpo(step) + 2.0 * released_kl(step),
    ),
    "kl in the reward": (DiffusionGRPO(**CLIP, kl_coef=0.3, kl_in="reward"), penalised),
    "velocity": (DiffusionGRPO(**CLIP, velocity_coef=3.0), lambda step: flow_grpo(step) + 3.0 * velocity_mse(step)),
    "all": (
        DiffusionGRPO(**CLIP, ratio="guard", step_weights="tempflow", kl_coef=2.0, velocity_coef=3.0),
        lambda step: 2.25 * step.std * guard(step) + 2.0 * true_kl(step) + 3.0 * velocity_mse(step),
    ),
}


@LATENTS
@pytest.mark.parametrize("name", EQUATIONS)
def test_loss_and_gradient_are_those_of_the_papers_equation(name: str, latent: tuple[int, ...]) -> None:
    algorithm, equation = EQUATIONS[name]
    named = policies(latent)
    track = anchored(algorithm, named, trajectory(named.old, latent))
    have = loss_and_gradient(algorithm, named.new, track)
    assert_same(have, expected(named, track, equation))
    if algorithm.ratio == "plain":  # so that the clip, on both sides, is part of what agrees
        assert have.metrics["train/clip_fraction_high"] > 0 and have.metrics["train/clip_fraction_low"] > 0


@LATENTS
def test_samples_of_another_policy_are_weighed_by_truncated_importance_weights(latent: tuple[int, ...]) -> None:
    """The decoupled objective: the reference samples, the ratio is clipped around the old policy."""
    named, cap = policies(latent), 1.001

    def decoupled(step: Step) -> Tensor:
        return (step.old.logp - step.reference.logp).exp().clamp(max=cap) * flow_grpo(step)

    algorithm = DiffusionGRPO(**CLIP, mismatch=TokenTIS(cap=cap))
    track = anchored(algorithm, named, trajectory(named.reference, latent))
    have = loss_and_gradient(algorithm, named.new, track)
    assert_same(have, expected(named, track, decoupled))
    assert 0.0 < have.metrics["train/mismatch_cut"] < 1.0
    assert algorithm.needs.behaviour_logp


def test_a_weight_of_whole_responses_is_refused() -> None:
    with pytest.raises(ConfigError, match="TokenTIS or MaskedIS"):
        DiffusionGRPO(mismatch=SequenceTIS())


def test_the_loss_clips_by_the_current_range_and_logs_it() -> None:
    named = policies(IMAGE)
    algorithm = DiffusionGRPO(clip_range=2 * LOW, clip_range_high=2 * HIGH, clip_schedule="linear")
    track = anchored(algorithm, named, trajectory(named.old, IMAGE))
    late = loss_and_gradient(algorithm, named.new, track, TrainingProgress(progress=1.0))
    assert_same(late, expected(named, track, flow_grpo))
    assert late.metrics["train/clip_range"] == pytest.approx(LOW)


def test_trust_width_is_the_smaller_clip_range_at_the_start() -> None:
    for low, high in ((1e-4, 3e-4), (3e-4, 1e-4)):
        algorithm = DiffusionGRPO(clip_range=low, clip_range_high=high, clip_schedule="cosine")
        assert algorithm.trust_width() == 1e-4


def test_it_logs_how_far_the_ratio_of_each_step_is_from_one() -> None:
    named, sizes = policies(IMAGE), []
    algorithm = DiffusionGRPO(**CLIP)
    track = anchored(algorithm, named, trajectory(named.old, IMAGE))

    def measured(step: Step) -> Tensor:
        sizes.append((step.new.logp - step.old.logp).abs().mean().item())
        return flow_grpo(step)

    expected(named, track, measured)
    metrics = loss_and_gradient(algorithm, named.new, track).metrics
    assert [metrics[f"train/log_ratio_step_{i}"] for i in STEPS] == pytest.approx(sizes, rel=1e-4)


@LATENTS
@pytest.mark.parametrize("name", EQUATIONS)
def test_replaying_all_steps_in_one_forward_or_one_by_one_gives_one_gradient(
    name: str, latent: tuple[int, ...]
) -> None:
    algorithm, _ = EQUATIONS[name]
    named = policies(latent)
    track = anchored(algorithm, named, trajectory(named.old, latent))
    one = loss_and_gradient(algorithm, named.new, track)
    for size in (2, 3):
        other = loss_and_gradient(replace(algorithm, steps_per_forward=size), named.new, track)
        assert torch.allclose(one.gradient, other.gradient, rtol=0, atol=1e-6 * float(one.gradient.abs().max()))
        assert other.metrics == pytest.approx(one.metrics, rel=1e-5, abs=1e-9)


# --- regularisers ----------------------------------------------------------------------------------------------------


def test_an_unchanged_policy_has_kl_and_kl_gradient_zero() -> None:
    stage = toy_stage()
    track = toy_track(stage)
    plain = loss_and_gradient(DiffusionGRPO(), stage, track)
    regular = DiffusionGRPO(kl_coef=5.0, velocity_coef=5.0)
    with torch.no_grad():
        segment, _ = regular.prepare_segment(stage, track, "reference")
    have = loss_and_gradient(regular, stage, track.replace(segment=segment))
    assert torch.equal(have.gradient, plain.gradient) and have.loss == plain.loss
    silent = ("kl", "kl_loss", "velocity_mse", "velocity_loss", *(f"kl_step_{i}" for i in STEPS))
    assert all(have.metrics[f"train/{name}"] == 0.0 for name in silent)


@pytest.mark.parametrize("ratio", ["plain", "guard"])
def test_a_loss_without_penalties_reads_no_other_policy(ratio: str) -> None:
    plain = DiffusionGRPO(ratio=ratio, step_weights="flash", dual_clip=3.0)  # type: ignore[arg-type]
    assert plain.needs.snapshots == () and {anchor.snapshot for anchor in plain.anchors().values()} == {"live"}
    assert DiffusionGRPO(old_logp_source="rollout").anchors() == {}


@pytest.mark.parametrize(
    ("options", "anchors"),
    [
        ({}, {"old_logp"}),
        ({"ratio": "guard"}, {"old_mean"}),
        ({"kl_coef": 1.0}, {"old_logp", "ref_mean"}),
        ({"kl_coef": 1.0, "kl_form": "flow_grpo"}, {"old_logp", "ref_mean"}),
        ({"kl_coef": 1.0, "kl_in": "reward"}, {"old_logp", "ref_logp"}),
        ({"kl_coef": 1.0, "kl_in": "reward", "ratio": "guard"}, {"old_logp", "old_mean", "ref_logp"}),
        ({"kl_coef": 1.0, "kl_in": "reward", "old_logp_source": "rollout"}, {"ref_logp"}),
        ({"kl_in": "reward"}, {"old_logp"}),
        ({"velocity_coef": 1.0}, {"old_logp", "ref_velocity"}),
    ],
)
def test_each_penalty_anchors_exactly_what_it_reads(options: dict[str, object], anchors: set[str]) -> None:
    algorithm = DiffusionGRPO(**options)  # type: ignore[arg-type]
    assert set(algorithm.anchors()) == anchors
    for name, anchor in algorithm.anchors().items():
        source, _, quantity = name.partition("_")
        assert anchor == Anchor("live" if source == "old" else "reference", quantity)  # type: ignore[arg-type]
    regular = bool({"ref_mean", "ref_logp", "ref_velocity"} & anchors)
    assert algorithm.needs.snapshots == (("reference",) if regular else ())


def test_the_divergence_is_logged_in_nats_whatever_its_form_and_weight() -> None:
    named = policies(IMAGE)
    track = trajectory(named.old, IMAGE)
    kls = expected(named, track, true_kl).loss / (ROWS * len(STEPS))
    for algorithm in (DiffusionGRPO(kl_coef=2.0), DiffusionGRPO(kl_coef=7.0, kl_form="flow_grpo")):
        have = loss_and_gradient(algorithm, named.new, anchored(algorithm, named, track)).metrics
        assert have["train/kl"] == pytest.approx(kls, rel=1e-5)
        assert sum(have[f"train/kl_step_{i}"] for i in STEPS) / 3 == pytest.approx(kls, rel=1e-5)
        assert len({have[f"train/kl_step_{i}"] for i in STEPS}) == 3


def test_the_parts_of_the_loss_add_up_to_it() -> None:
    named = policies(IMAGE)
    algorithm = DiffusionGRPO(kl_coef=2.0, velocity_coef=3.0, step_weights="flash")
    have = loss_and_gradient(algorithm, named.new, anchored(algorithm, named, trajectory(named.old, IMAGE)))
    parts = [have.metrics[f"train/{name}_loss"] for name in ("policy", "kl", "velocity")]
    assert sum(parts) == pytest.approx(have.loss / (ROWS * len(STEPS)), rel=1e-5) and all(parts)
    assert parts[2] == pytest.approx(3.0 * have.metrics["train/velocity_mse"], rel=1e-6)


def test_the_coefficient_follows_its_schedule_and_the_feedback() -> None:
    algorithm = DiffusionGRPO(kl_coef=0.2, kl_schedule="linear")
    assert algorithm.kl_at(TrainingProgress()) == 0.2
    assert algorithm.kl_at(TrainingProgress(progress=1.0, kl_scale=3.0)) == pytest.approx(0.2 * 0.5 * 3.0)
    named = policies(IMAGE)
    track = anchored(algorithm, named, trajectory(named.old, IMAGE))
    early, late = (
        loss_and_gradient(algorithm, named.new, track, now).metrics
        for now in (TrainingProgress(), TrainingProgress(kl_scale=3.0))
    )
    assert (early["train/kl_coef"], late["train/kl_coef"]) == pytest.approx((0.2, 0.6))
    assert late["train/kl_loss"] == pytest.approx(3 * early["train/kl_loss"]) and late["train/kl"] == early["train/kl"]


def test_only_a_loss_with_feedback_has_a_controller() -> None:
    rule = AdaptiveKL(target=1e-4)
    controller = DiffusionGRPO(kl_coef=0.1, kl_adaptive=rule).kl_controller()
    assert controller is not None and controller.settings == rule
    assert DiffusionGRPO(kl_coef=0.1).kl_controller() is None


class Constant(nn.Module):
    """v = theta, the same everywhere."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        return self.theta.expand_as(x)


def test_a_kl_in_the_reward_has_the_expected_gradient_of_a_kl_in_the_loss() -> None:
    rows, params = 8192, toy_params(FlowSDEStrategy(eta=0.7))
    facts = toy_stage().facts
    stage = DiffusionStage(Constant(torch.tensor([0.3, -0.2, 0.1])), facts)
    other = DiffusionStage(Constant(torch.tensor([0.1, 0.1, 0.4])), facts)
    x_T = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))  # noqa: N806
    with torch.no_grad():
        segment = stage.sample({}, x_T, params, NoiseSource(0, "r", 0), [str(i) for i in range(rows)])
    track = RolloutTrack(
        sample_ids=[str(i) for i in range(rows)],
        group_ids=["g"] * rows,
        conditions={},
        segment=segment,
        advantages=torch.zeros(rows),
        weight=torch.ones(rows),
        weight_version=torch.zeros(rows, dtype=torch.int64),
    )
    gradients = []
    for place in ("loss", "reward"):
        algorithm = DiffusionGRPO(kl_coef=1.0, kl_in=place, steps_per_forward=3)  # type: ignore[arg-type]
        with torch.no_grad():
            anchors, _ = algorithm.prepare_segment(other, track, "reference")
        gradients.append(loss_and_gradient(algorithm, stage, track.replace(segment=anchors)).gradient / rows)
    assert torch.allclose(gradients[0], gradients[1], atol=0.05 * float(gradients[0].abs().max()))


# --- what cannot be ---------------------------------------------------------------------------------------------------


NEEDS_DENSITY = pytest.mark.parametrize("options", [{"ratio": "guard"}, {"kl_coef": 1.0, "kl_in": "reward"}])


@NEEDS_DENSITY
def test_what_needs_a_density_refuses_a_log_prob_without_its_normaliser(options: dict[str, object]) -> None:
    stage, algorithm = toy_stage(), DiffusionGRPO(**options)  # type: ignore[arg-type]
    params = toy_params(CPSSDEStrategy(log_prob_form="unnormalised"))
    track = toy_track(stage, params=params)
    with pytest.raises(ConfigError, match="log_prob_form=gaussian") as before:
        algorithm.check_sampling(params)
    with pytest.raises(ConfigError, match="log_prob_form=gaussian"):
        algorithm.loss(stage, track, (1,))
    assert before.value.code == 2020
    DiffusionGRPO().check_sampling(params)
    assert DiffusionGRPO().loss(stage, track, (1,)).loss.isfinite()


@NEEDS_DENSITY
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
def test_what_needs_a_density_takes_every_kernel_that_has_one(options: dict[str, object], kernel: Kernel) -> None:
    stage, algorithm = toy_stage(), DiffusionGRPO(**options)  # type: ignore[arg-type]
    algorithm.check_sampling(toy_params(kernel))
    assert algorithm.loss(stage, toy_track(stage, params=toy_params(kernel)), (1,)).loss.isfinite()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"kl_coef": float("nan")}, "kl_coef"),
        ({"velocity_coef": float("inf")}, "velocity_coef"),
        ({"ratio": "guard", "old_logp_source": "rollout"}, "old_logp_source=replay"),
        ({"kl_adaptive": AdaptiveKL(target=1e-4)}, "kl_coef"),
        ({"kl_coef": 1.0, "kl_in": "reward", "kl_form": "flow_grpo"}, "kl_form"),
    ],
)
def test_settings_that_contradict_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as error:
        DiffusionGRPO(**options)  # type: ignore[arg-type]
    assert error.value.code == 2004


def test_values_in_rows_of_weight_zero_change_no_bit() -> None:
    named = policies(IMAGE)
    algorithm = DiffusionGRPO(ratio="guard", kl_coef=2.0, velocity_coef=3.0)
    track = anchored(algorithm, named, trajectory(named.old, IMAGE))
    weight = torch.ones(ROWS)
    weight[2] = 0.0
    track = track.replace(weight=weight)
    spoilt = {name: column.clone() for name, column in track.segment.anchors.items()}
    for column in spoilt.values():
        column[2] = torch.nan
    logp, advantages = track.segment.logp.clone(), track.advantages.clone()
    logp[2], advantages[2] = torch.nan, torch.inf
    bad = track.replace(segment=track.segment.replace(anchors=spoilt, logp=logp), advantages=advantages)
    have, want = loss_and_gradient(algorithm, named.new, bad), loss_and_gradient(algorithm, named.new, track)
    assert torch.equal(have.gradient, want.gradient) and have == replace(want, gradient=have.gradient)


@pytest.mark.parametrize(
    "options", [{"clip_range": 0.0}, {"clip_range": 1.0}, {"clip_range_high": -1e-4}, {"steps_per_forward": 0}]
)
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        DiffusionGRPO(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"old_logp_source": "rollout"},
        {"ratio": "guard", "step_weights": "inverse_dt", "dual_clip": 3.0},
        {"kl_coef": 0.1, "velocity_coef": 0.1, "step_weights": "flash", "steps_per_forward": 2},
        {"kl_coef": 0.1, "kl_in": "reward", "step_weights": "tempflow"},
    ],
)
def test_it_keeps_the_contract_of_losses(options: dict[str, object]) -> None:
    stage = toy_stage()
    check_algorithm(DiffusionGRPO(clip_range=1e-3, **options), stage, toy_track(stage))  # type: ignore[arg-type]
