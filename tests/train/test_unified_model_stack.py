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
from unirl.types.protocols import TrainingProgress
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
        self.without_gradient = 0
        """Forward passes of the denoiser without gradients."""

    def trainable(self) -> nn.Module:
        return self

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Any) -> Tensor:
        self.without_gradient += not torch.is_grad_enabled()
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

    def __init__(self, micro: int = 99, rate: float = 1e-2, **options: Any) -> None:
        network = self.network = Network()
        self.backend = FSDPBackend(network, optimizer_cfg=OptimizerConfig(learning_rate=rate))
        stages = {"text": TableStage(ScaledTable(network)), "image": DiffusionStage(network, network.facts)}
        losses = {"text": ARGRPO(), "image": DiffusionGRPO(clip_schedule="linear")}
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

    def alone(self, name: str, rows: slice = slice(None)) -> dict[str, Tensor]:
        """The gradient of the first update of some rows of one track by itself, on a fresh network."""
        fresh, track = Setup(), self.tracks[name]
        fresh.stacks[name].train_track(track.slice(*rows.indices(len(track))[:2]))
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


@pytest.mark.parametrize("schedule", ["joint", "alternating"])
def test_every_update_trains_its_own_rows_over_their_own_number(schedule: str) -> None:
    setup = Setup(rate=1e-9, schedule=schedule, num_updates_per_batch=2, loss_weights=WEIGHTS)
    dropped = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])  # 1 row of the first update, 3 of the second
    setup.tracks = {name: track.replace(weight=dropped) for name, track in setup.tracks.items()}
    results = setup.train()
    parts = [{name: setup.alone(name, rows) for name in WEIGHTS} for rows in (slice(0, 4), slice(4, 8))]
    if schedule == "joint":
        wanted = [weighted_sum(part, WEIGHTS) for part in parts]
    else:
        wanted = [weighted_sum({name: part[name]}, WEIGHTS) for part in parts for name in WEIGHTS]
    assert len(setup.caught) == setup.backend.updates == setup.backend.finished_updates == len(wanted)
    for have, want in zip(setup.caught, wanted, strict=True):
        assert_same(have, want)
    assert {len(result.updates) for result in results.values()} == {2}


@pytest.mark.parametrize("balance", ["fixed", "gradient_norm"])
def test_a_gradient_is_complete_after_its_last_backward_pass_and_not_before(balance: str) -> None:
    """Ranks reduce their gradients on that pass alone."""
    setup, flags = Setup(3, balance=balance), []
    backward = setup.backend.backward

    def watched(loss: Tensor, last: bool) -> None:
        flags.append(last)
        backward(loss, last)

    setup.backend.backward = watched  # type: ignore[method-assign]
    setup.train()
    text, image = 3, 3 * 3  # micro-batches, each of three denoising steps for the image
    whole = [*[False] * (text - 1), True], [*[False] * (image - 1), True]
    assert flags == ([*[False] * (text + image - 1), True] if balance == "fixed" else [*whole[0], *whole[1]])


@pytest.mark.parametrize("options", [{}, {"balance": "gradient_norm"}, {"schedule": "alternating"}])
def test_the_policy_that_sampled_is_compared_with_its_record_alone(options: dict[str, str]) -> None:
    """Later weights differ from it by what they have learned, which is no disagreement with the engine."""
    results = Setup(num_updates_per_batch=2, **options).train()
    for name in WEIGHTS:
        metrics = values(results[name].metrics)
        assert metrics["rollout/parity_absdiff_max"] < 1e-6 < metrics["train/ratio_std"]


def test_only_later_updates_and_later_tracks_need_an_anchor_pass() -> None:
    passes = {}
    for schedule, num_updates in [("joint", 1), ("joint", 2), ("alternating", 1), ("alternating", 2)]:
        setup = Setup(schedule=schedule, num_updates_per_batch=num_updates)
        sampled = setup.network.without_gradient
        setup.train()
        passes[schedule, num_updates] = setup.network.without_gradient - sampled
    steps = 3  # of the image, whose rows of an update are one micro-batch
    assert list(passes.values()) == [0, steps, steps, 2 * steps]


def test_every_track_has_the_schedule_of_its_own_progress() -> None:
    setup, half = Setup(), TrainingProgress(progress=0.5)
    results = setup.stack.train_tracks(RolloutResp(setup.tracks), {"text": START, "image": half})
    clip_range = DiffusionGRPO().clip_range
    assert values(results["image"].metrics)["train/clip_range"] == pytest.approx(0.75 * clip_range)


def test_alternating_updates_leave_out_a_track_without_counted_rows() -> None:
    setup = Setup(schedule="alternating")
    dropped = setup.tracks["text"].replace(weight=torch.zeros(len(setup.tracks["text"])))
    results = setup.train(text=dropped)
    assert values(results["text"].metrics) == {"train/skipped_updates": 1}
    [caught] = setup.caught
    assert_same(caught, setup.alone("image"))


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
    setup, ranks = Setup(), []
    for advantage in (1.0, 3.0):
        text = setup.tracks["text"]
        setup.tracks["text"] = text.replace(advantages=torch.full_like(text.advantages, advantage))
        ranks.append(setup.train())
    merged = values(merge_tracks(ranks)["text"].metrics)
    assert merged["train/policy_loss"] == pytest.approx(-2.0, rel=1e-6)  # at ratio 1 it is minus the mean advantage


def test_a_weight_for_a_track_without_a_loss_is_refused() -> None:
    with pytest.raises(UniRLError, match=r"loss_weights names the track 'imag'.*text, image"):
        Setup(loss_weights={"imag": 1.0})
    with pytest.raises(UniRLError, match="gradient_norm balances the gradients that one joint update adds up"):
        Setup(balance="gradient_norm", schedule="alternating")
