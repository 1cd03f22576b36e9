"""GRPO on denoising steps: identities of the ratio, its gradient, and its anchors, on a toy network."""

import pytest
import torch
from torch import Tensor

from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.config.errors import ConfigError
from unirl.models.diffusion import DiffusionStage
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, FlowDDIM, FlowSDEStrategy
from unirl.testing.algorithm import check_algorithm
from unirl.testing.toy import toy_params, toy_stage, toy_track
from unirl.types.protocols import Anchor, Kernel
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
    found = values(merge([algorithm.loss(stage, track, part).metrics for part in algorithm.parts(track.segment)]))
    assert (found["train/ratio_mean"], found["train/ratio_std"]) == (1.0, 0.0)
    assert found["train/approx_kl"] == found["train/clip_fraction"] == 0.0


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
def test_at_ratio_one_the_gradient_is_minus_advantage_times_grad_log_prob(kernel: Kernel) -> None:
    stage = toy_stage()
    track = toy_track(stage, params=toy_params(kernel))
    found = gradient(DiffusionGRPO(), stage, track)
    replayed = torch.distributions.Normal
    segment, total = track.segment, torch.zeros(())
    for step in STEPS:  # the log-prob from its definition, by torch's own Normal
        x, sigma, sigma_next = segment.latents_at(step), segment.sigmas[step], segment.sigmas[step + 1]
        v = stage.denoiser.velocity(x, sigma.expand(len(x)), track.conditions)
        move = kernel.transition(x, v, sigma, sigma_next)
        logp = replayed(move.mean, move.std).log_prob(segment.latents_at(step + 1)).flatten(1).mean(1)
        total = total - (track.advantages * logp).sum()
    expected = torch.autograd.grad(total, list(stage.denoiser.parameters()))  # type: ignore[attr-defined]
    for have, want in zip(found, expected, strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_off_policy_the_loss_is_the_papers_clipped_mean() -> None:
    behaviour, stage = toy_stage(seed=0), toy_stage(seed=1)
    track = toy_track(behaviour)
    algorithm = DiffusionGRPO(clip_range=1e-3, clip_range_high=5e-3, old_logp_source="rollout")
    new = stage.replay(track.conditions, track.segment, STEPS).logp.detach().double()
    ratio = (new - track.segment.logp.double()).exp()
    advantages = track.advantages.double()[:, None]
    expected = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - 1e-3, 1 + 5e-3)).sum()
    found = sum(algorithm.loss(stage, track, part).loss.item() for part in algorithm.parts(track.segment))
    assert algorithm.count(track) == len(track) * len(STEPS)
    assert found == pytest.approx(float(expected), rel=1e-4)


def test_the_anchor_pass_gives_the_bits_of_the_forward_that_trains() -> None:
    stage = toy_stage()
    track = toy_track(stage)
    algorithm = DiffusionGRPO(steps_per_forward=2)
    with torch.no_grad():
        segment, parity = algorithm.prepare_segment(stage, track, "live")
    parts = algorithm.parts(segment)
    trained = torch.cat([algorithm.loss(stage, track, part).columns["logp"] for part in parts], dim=1)
    assert torch.equal(segment.anchors["old_logp"], trained)
    assert torch.equal(segment.anchors["old_logp"], track.segment.logp)
    assert values(parity) == {"rollout/parity_absdiff_max": 0.0}


def test_an_anchor_is_read_instead_of_the_loss_own_value() -> None:
    stage = toy_stage()
    track = toy_track(stage)
    shifted = track.replace(segment=track.segment.replace(anchors={"old_logp": track.segment.logp - 0.1}))
    found = values(DiffusionGRPO(clip_range=0.5).loss(stage, shifted, (1,)).metrics)
    assert found["train/ratio_mean"] == pytest.approx(2.718281828**0.1, rel=1e-5)


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


@pytest.mark.parametrize(
    "options", [{"clip_range": 0.0}, {"clip_range": 1.0}, {"clip_range_high": -1e-4}, {"steps_per_forward": 0}]
)
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        DiffusionGRPO(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["replay", "rollout"])
def test_it_keeps_the_contract_of_losses(source: str) -> None:
    stage = toy_stage()
    check_algorithm(DiffusionGRPO(clip_range=1e-3, old_logp_source=source), stage, toy_track(stage))  # type: ignore[arg-type]
