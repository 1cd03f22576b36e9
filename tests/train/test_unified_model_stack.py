"""One network trained on two tracks: the arithmetic of joint and alternating updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tokens import TableStage, TokenTable, token_track
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.base import START
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.config.errors import UniRLError
from unirl.models.denoising.stage import DiffusionStage
from unirl.testing.toy import toy_denoiser, toy_facts, toy_track
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack import TrainStack
from unirl.train.unified_model_stack import SHARED, TrackResults, UnifiedModelStack, merge_tracks
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

WEIGHTS = {"text": 0.5, "image": 2.0}


class Network(nn.Module):
    """A table of tokens and a denoiser, with one layer that both read: each logit and velocity is multiplied by it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.denoiser = TokenTable(prompts=4), toy_denoiser()
        with torch.no_grad():
            self.table.table.normal_(generator=torch.Generator().manual_seed(0))
        self.scale = nn.Parameter(torch.ones(()))
        self.facts = toy_facts(batch_multiple=1)

    def trainable(self) -> nn.Module:
        return self

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Any) -> Tensor:
        return self.scale * self.denoiser.velocity(x, sigma, conditions)


class ScaledTable(nn.Module):
    """The table of a network, times its shared factor."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self.vocabulary = [network], network.table.vocabulary

    def forward(self, prompt: Tensor, previous: Tensor) -> Tensor:
        return self.network[0].scale * self.network[0].table(prompt, previous)


class Setup:
    """A fresh network, its stacks, and a rollout of 2 prompts x 4 texts x 1 image."""

    def __init__(self, micro: int = 99, **options: Any) -> None:
        network = Network()
        self.backend = FSDPBackend(network, optimizer_cfg=OptimizerConfig(learning_rate=1e-2))
        stages = {"text": TableStage(ScaledTable(network)), "image": DiffusionStage(network, network.facts)}
        losses = {"text": ARGRPO(), "image": DiffusionGRPO()}
        updates = {"num_updates_per_batch": options.get("num_updates_per_batch", 1)}
        self.stacks = {
            name: TrainStack(self.backend, losses[name], stages[name], micro_batch_size=micro, **updates)
            for name in stages
        }
        self.stack = UnifiedModelStack(self.backend, self.stacks, **options)
        text = token_track(stages["text"], prompts=2)
        image = toy_track(stages["image"], prompts=2)
        self.tracks = {"text": text, "image": image.replace(parent_track="text", parent_ids=list(text.sample_ids))}
        self.caught: list[dict[str, Tensor]] = []
        step = self.backend.step

        def catching(max_grad_norm: float, loss: Tensor) -> Any:
            self.caught.append({k: p.grad.clone() for k, p in self.backend.trainable.items() if p.grad is not None})
            return step(max_grad_norm, loss)

        self.backend.step = catching  # type: ignore[method-assign]

    def train(self, **tracks: RolloutTrack) -> TrackResults:
        return self.stack.train_tracks(RolloutResp(self.tracks | tracks), {"text": START, "image": START})

    def alone(self, name: str) -> dict[str, Tensor]:
        """The gradient of the first update of one track by itself, on a fresh network."""
        fresh = Setup()
        fresh.stacks[name].train_track(self.tracks[name])
        return fresh.caught[0]


def assert_same(have: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert have.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.allclose(have[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max())), name


def weighted_sum(parts: Mapping[str, Mapping[str, Tensor]], factors: Mapping[str, float]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for part in parts.values() for name in part)
    return {n: sum(factors[t] * part[n] for t, part in parts.items() if n in part) for n in names}  # type: ignore[misc]


def norm(gradient: Mapping[str, Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in gradient.values()]).double().norm())


@pytest.mark.parametrize("micro", [3, 99])
def test_the_gradient_of_a_joint_update_is_the_weighted_sum_of_those_of_the_tracks(micro: int) -> None:
    setup = Setup(micro, loss_weights=WEIGHTS)
    setup.train()
    parts = {name: setup.alone(name) for name in WEIGHTS}
    assert "scale" in parts["text"] and "scale" in parts["image"]  # a parameter that both losses reach
    assert len(setup.caught) == 1
    assert_same(setup.caught[0], weighted_sum(parts, WEIGHTS))


def test_balanced_gradients_have_norms_in_the_ratio_of_the_loss_weights() -> None:
    setup = Setup(loss_weights=WEIGHTS, balance="gradient_norm")
    results = setup.train()
    parts = {name: setup.alone(name) for name in WEIGHTS}
    norms = {name: norm(part) for name, part in parts.items()}
    mean = sum(WEIGHTS[t] * norms[t] for t in WEIGHTS) / sum(WEIGHTS.values())
    assert_same(setup.caught[0], weighted_sum(parts, {t: WEIGHTS[t] * mean / norms[t] for t in WEIGHTS}))
    for name in WEIGHTS:
        assert values(results[name].metrics)["train/grad_norm"] == pytest.approx(norms[name], rel=1e-5)


def test_the_loss_of_a_joint_update_is_the_weighted_sum_of_the_losses() -> None:
    losses = {name: values(r.metrics)["train/loss"] for name, r in Setup(loss_weights=WEIGHTS).train().items()}
    assert losses[SHARED] == pytest.approx(losses["text"] + losses["image"], abs=1e-12)


def test_alternating_updates_train_the_first_track_as_it_trains_alone() -> None:
    setup = Setup(schedule="alternating")
    setup.train()
    assert len(setup.caught) == 2
    assert_same(setup.caught[0], setup.alone("text"))


def test_in_alternating_updates_every_ratio_is_one_to_the_policy_that_sampled() -> None:
    setup = Setup(schedule="alternating")
    results = setup.train()
    # Its weights have moved by the update of the text, so its ratio is not 1. Its anchors are the recorded log-probs.
    image = values(results["image"].metrics)
    assert values(results["text"].metrics)["train/ratio_std"] < 1e-6 < image["train/ratio_std"]
    work = Setup().stacks["image"].prepare(setup.tracks["image"], is_first=False)
    [[micro]] = work.updates
    assert torch.allclose(micro.segment.anchors["old_logp"], micro.segment.logp, atol=1e-6)


def test_in_joint_updates_the_first_ratio_of_every_track_is_one() -> None:
    results = Setup().train()
    for name in WEIGHTS:
        assert values(results[name].metrics)["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("schedule", "steps"), [("joint", 2), ("alternating", 4)])
def test_every_update_trains_its_own_rows(schedule: str, steps: int) -> None:
    setup = Setup(schedule=schedule, num_updates_per_batch=2)
    setup.train()
    assert setup.backend.updates == steps


def test_a_track_whose_rows_all_have_weight_zero_adds_nothing() -> None:
    setup = Setup()
    dropped = setup.tracks["image"].replace(weight=torch.zeros(len(setup.tracks["image"])))
    setup.train(image=dropped)
    assert_same(setup.caught[0], setup.alone("text"))


def test_a_step_without_any_counted_row_is_skipped() -> None:
    setup = Setup()
    results = setup.train(**{n: t.replace(weight=torch.zeros(len(t))) for n, t in setup.tracks.items()})
    assert not setup.caught and values(results[SHARED].metrics)["train/skipped_updates"] == 1


def test_the_results_of_ranks_merge_by_track() -> None:
    results = Setup().train()
    merged = merge_tracks([results, results])
    assert values(merged["text"].metrics) == pytest.approx(values(results["text"].metrics), nan_ok=True)


def test_a_weight_for_a_track_without_a_loss_is_refused() -> None:
    with pytest.raises(UniRLError, match=r"loss_weights names the track 'imag'.*text, image"):
        Setup(loss_weights={"imag": 1.0})
    with pytest.raises(UniRLError, match="gradient_norm balances the gradients that one joint update adds up"):
        Setup(balance="gradient_norm", schedule="alternating")
