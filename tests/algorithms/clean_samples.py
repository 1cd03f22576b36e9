"""Clean samples by hand, and a small velocity field on latents of any shape, for losses of the forward process."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from unirl.algorithms.shared.forward_process import ForwardProcessLoss, Noised
from unirl.models.denoising.stage import DiffusionStage
from unirl.sde.kernels import EulerODE
from unirl.sde.schedule import SigmaSchedule
from unirl.testing.toy import toy_facts, toy_params, toy_stage, toy_text, toy_track
from unirl.types.conditions import Conditions
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import LatentSegment

IMAGE, VIDEO = (2, 4, 4), (2, 3, 4, 4)
SHAPES = [IMAGE, VIDEO]
T = 5
SIGMAS = SigmaSchedule(shift=3.0).sigmas(T)


def field_velocity(weights: Tensor, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """v(x, sigma, text) in the dtype of its arguments; x [B, *latent], sigma [B], text [B]."""
    sigma, text = (value.view(-1, *[1] * (x.dim() - 1)) for value in (sigma, text))
    a, b, c, d = weights
    return a * x + b * torch.tanh(c * x + sigma) + d * text


class Field(nn.Module):
    """`field_velocity` as a denoiser of four weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weights = nn.Parameter(0.7 * torch.randn(4, generator=torch.Generator().manual_seed(seed)))

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        return field_velocity(self.weights, x, sigma, conditions["text"].pooled.mean(1))  # type: ignore[attr-defined]


def field_stage(seed: int = 0) -> DiffusionStage:
    return DiffusionStage(Field(seed), toy_facts(batch_multiple=1))


@cache
def any_segment() -> LatentSegment:
    """One sample of T deterministic steps, of which only the end is kept."""
    segment: LatentSegment = toy_track(toy_stage(), 1, toy_params(EulerODE(), samples_per_prompt=1)).segment
    assert segment.indices == (T,) and torch.equal(segment.sigmas, SIGMAS)
    return segment


def clean_track(
    shape: Sequence[int] = IMAGE, prompts: int = 2, siblings: int = 4, step: int = 0, seed: int = 7
) -> RolloutTrack:
    """Samples and advantages that come from nowhere: normal latents, normal advantages."""
    groups = [f"p{i}@0" for i in range(prompts) for _ in range(siblings)]
    ids = [f"{group}:{i % siblings}" for i, group in enumerate(groups)]
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(len(ids), 1, *shape, generator=generator)
    advantages = torch.randn(len(ids), generator=generator)
    return RolloutTrack(
        sample_ids=ids,
        group_ids=groups,
        conditions={"text": toy_text([group.partition("@")[0] for group in groups])},
        segment=any_segment().replace(latents=latents, logp=torch.zeros(len(ids), 0), seed=seed, step=step),
        rewards=advantages.clone(),
        advantages=advantages,
        weight=torch.ones(len(ids)),
        weight_version=torch.zeros(len(ids), dtype=torch.int64),
    )


def offline_track(winners: Tensor, losers: Tensor, prompts: Sequence[str], step: int = 0) -> RolloutTrack:
    """Preference pairs of a data set: winner, loser, winner, loser, ... with rewards 1 and 0."""
    track = clean_track(winners.shape[1:], prompts=len(prompts), siblings=2, step=step)
    rewards = torch.tensor([1.0, 0.0]).repeat(len(prompts))
    latents = torch.stack([winners, losers], dim=1).flatten(0, 1)[:, None]
    return track.replace(
        conditions={"text": toy_text([prompt for prompt in prompts for _ in range(2)])},
        segment=track.segment.replace(latents=latents),
        rewards=rewards,
        advantages=rewards - 0.5,
    )


def anchored(algorithm: ForwardProcessLoss, track: RolloutTrack, **policies: DiffusionStage) -> RolloutTrack:
    """The track with its anchors, measured by the stage that stands for each snapshot (`live`, `old`, ...)."""
    for snapshot, stage in policies.items():
        with torch.no_grad():
            segment, _ = algorithm.prepare_segment(stage, track, snapshot)
        track = track.replace(segment=segment)
    return track


def all_noised(algorithm: ForwardProcessLoss, track: RolloutTrack) -> Noised:
    """The samples at all training times."""
    return algorithm.noised(track, tuple(i for part in algorithm.parts(track.segment) for i in part))


def velocity64(weights: Tensor, track: RolloutTrack, noised: Noised) -> Tensor:
    """[B, n, *latent] float64: the field at x_t = (1 - t) x0 + t eps, straight from the definition."""
    t = noised.t.double()
    x0, eps = noised.x0.double(), noised.eps.double()
    text = track.conditions["text"].pooled.double().mean(1)  # type: ignore[attr-defined]
    rows = []
    for b in range(len(t)):
        points = torch.stack([(1 - s) * x0[b, 0] + s * eps[b, j] for j, s in enumerate(t[b])])
        rows.append(field_velocity(weights, points, t[b], text[b].expand(len(t[b]))))
    return torch.stack(rows)


def weights64(stage: DiffusionStage) -> Tensor:
    """The field's weights in float64, a leaf of their own."""
    return stage.denoiser.weights.detach().double().requires_grad_()  # type: ignore[attr-defined]


def gradient(algorithm: ForwardProcessLoss, stage: DiffusionStage, track: RolloutTrack) -> Tensor:
    """[4] the gradient that a train stack would see, for the sum of all elements."""
    weights = stage.denoiser.weights  # type: ignore[attr-defined]
    weights.grad = None
    algorithm.compute_loss_and_backward(stage, track, lambda loss, last: loss.backward())
    return weights.grad.clone()


def latent_mean(values: Tensor) -> Tensor:
    """[B, n] mean over latent dims."""
    return values.flatten(2).mean(2)


def assert_close(result: Tensor, expected: Tensor) -> None:
    """Equal within 1e-5 of the largest entry: float32 forwards against float64."""
    assert torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
