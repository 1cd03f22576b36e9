"""Values along samples that training reports: log-ratios against replays and known shifts, advantages against GAE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.test_action_ppo import credit_of_stable_baselines, rows_of, stack_of
from tests.algorithms.test_ar_ppo_stack import setup as token_setup
from tests.scripted_environment import Clocks, pipeline
from tests.tokens import token_table, token_track
from tests.train.test_stack import make
from tests.train.test_unified_model_stack import Setup
from tests.train.test_value_head import Setup as ValueSetup
from unirl.algorithms.action_ppo import ActionPPO
from unirl.algorithms.ar_ppo import ARPPO
from unirl.algorithms.base import START
from unirl.algorithms.diffusion_ppo import DiffusionPPO
from unirl.algorithms.shared.critic import OLD_VALUE
from unirl.train.stack import TrainStack, merge_ranks
from unirl.train.transition_stack import TransitionStack
from unirl.types.environments import ContinuousActions
from unirl.types.results import TrainStepResult
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

STILL = 1e-30
"""A learning rate that changes no weight."""


def shifted(track: RolloutTrack) -> tuple[RolloutTrack, list[list[float]]]:
    """Rows whose recorded log-probs are lower by known numbers, which are the log-ratios of unchanged weights."""
    logp = track.segment.logp
    shift = torch.arange(logp.numel()).reshape(logp.shape) / 8 + 0.5
    lower = track.replace(segment=track.segment.replace(logp=logp - shift))
    # `series` is the order in which the log-probs of a sample are stored.
    order = track.replace(segment=track.segment.replace(logp=shift)).segment.series()
    return lower, [row["logp"] for row in order]


def assert_close(have: list[float], want: list[float]) -> None:
    assert have == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("micro_batch_size", [1, 5])
def test_log_ratios_of_denoising_steps_go_back_to_their_samples(micro_batch_size: int) -> None:
    setup = make(lr=STILL, micro_batch_size=micro_batch_size, num_updates_per_batch=2)
    track, expected = shifted(setup.track)
    shown = [track.sample_ids[i] for i in (10, 0, 3)]
    result = setup.stack.train_track(track, shown=shown)
    assert set(result.series) == set(shown)
    for i in (10, 0, 3):
        # Each step has the advantage of the sample, so there is none of its own.
        assert set(result.series[track.sample_ids[i]]) == {"log_ratio"}
        assert_close(result.series[track.sample_ids[i]]["log_ratio"], expected[i])


def test_a_step_without_shown_samples_collects_nothing() -> None:
    setup = make(lr=STILL)
    assert setup.stack.train_track(setup.track).series == {}
    assert setup.stack.train_track(setup.track, shown=["of another track"]).series == {}


def test_the_log_ratio_of_the_second_update_is_that_of_weights_that_the_first_one_moved() -> None:
    setup = make(num_updates_per_batch=2)
    track = setup.track
    series = setup.stack.train_track(track, shown=track.sample_ids).series
    alone = make()
    alone.stack.train_track(alone.track.slice(0, 6))
    with torch.no_grad():
        moved = alone.stack.stage.replay(track.conditions, track.segment, track.segment.sde_indices).logp
    gaps = (moved - track.segment.logp)[6:]
    assert gaps.abs().max() > 1e-5
    for i, sample_id in enumerate(track.sample_ids):
        assert series[sample_id]["log_ratio"] == pytest.approx([0.0] * 3 if i < 6 else gaps[i - 6].tolist(), abs=1e-6)


def test_copies_that_fill_up_micro_batches_do_not_replace_the_sample() -> None:
    stack, stage = token_setup(ARPPO(), token_table(0), learning_rate=STILL, value_rate=STILL, micro_batch_tokens=1)
    track, expected = shifted(token_track(stage))
    split = stack._split
    stack._split = lambda rows: [  # type: ignore[method-assign]
        [*micros, micros[0].replace(weight=torch.zeros(len(micros[0])))] for micros in split(rows)
    ]
    series = stack.train_track(track, shown=track.sample_ids).series
    for i, sample_id in enumerate(track.sample_ids):
        assert_close(series[sample_id]["log_ratio"], expected[i])
        assert any(series[sample_id]["advantage"])


def gae_by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = delta_t + gamma lam A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t, and nothing after the end."""
    advantages, running, following = [0.0] * len(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        running = rewards[t] + gamma * following - values[t] + gamma * lam * running
        advantages[t], following = running, values[t]
    return advantages


@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_advantages_of_tokens_are_gae_from_the_values_before_the_step(micro_batch_size: int) -> None:
    algorithm = ARPPO(outcome="rewards", gamma=0.9, lam=0.7)
    options: dict[str, Any] = {"micro_batch_size": micro_batch_size, "num_updates_per_batch": 2}
    stack, stage = token_setup(algorithm, token_table(0), learning_rate=STILL, value_rate=STILL, **options)
    track, expected = shifted(token_track(stage))
    old = stage.replay(track.conditions, track.segment, values="head").values
    values = track.segment.along_rows([(0,)], [old.detach()])
    series = stack.train_track(track, shown=track.sample_ids).series
    for i, sample_id in enumerate(track.sample_ids):
        rewards = [0.0] * (len(values[i]) - 1) + [float(track.rewards[i])]
        assert_close(series[sample_id]["advantage"], gae_by_hand(rewards, values[i], 0.9, 0.7))
        assert_close(series[sample_id]["log_ratio"], expected[i])


def test_advantages_of_denoising_steps_are_gae_from_the_values_before_the_step() -> None:
    setup = ValueSetup(DiffusionPPO(outcome="rewards", gamma=0.9, lam=0.7))
    with torch.no_grad():
        for shard in setup.backend.layouts[1].shards.values():
            shard += 0.1  # a fresh head says zero
    track, expected = shifted(setup.track())
    old = setup.stage.values(track.conditions, track.segment, track.segment.sde_indices).tolist()
    series = setup.stack.train_track(track, shown=track.sample_ids).series
    for i, sample_id in enumerate(track.sample_ids):
        rewards = [0.0, 0.0, float(track.rewards[i])]
        assert_close(series[sample_id]["advantage"], gae_by_hand(rewards, old[i], 0.9, 0.7))
        assert_close(series[sample_id]["log_ratio"], expected[i])


@pytest.mark.parametrize("forward_decisions", [None, 3])
def test_decisions_that_minibatches_permute_go_back_to_their_places(forward_decisions: int | None) -> None:
    """Old values are those of the head before the step; the advantages are those of Stable-Baselines3."""
    policy = pipeline(Clocks(ContinuousActions(2), cuts=True))
    track, expected = shifted(rows_of(policy, rows=4, max_steps=11, continuing=True))
    algorithm = replace(ActionPPO(gamma=0.97, whiten=False), lam=0.8)
    settings = {"micro_batch_size": 4, "epochs": 2, "minibatch_size": 20, "forward_decisions": forward_decisions}
    stack = stack_of(policy, TransitionStack, algorithm, **settings)
    still(stack)
    old = policy.stage.replay(track.conditions, track.segment, entropy=False, values="head").values.detach()
    rows = track.replace(segment=track.segment.replace(anchors={OLD_VALUE: old}))
    advantages = rows.segment.along_rows([(0,)], [credit_of_stable_baselines(rows.segment, 0.97, 0.8)])
    series = stack.train_track(track, shown=track.sample_ids[1:3]).series
    assert set(series) == set(track.sample_ids[1:3])
    for i in (1, 2):
        assert_close(series[track.sample_ids[i]]["log_ratio"], expected[i])
        assert_close(series[track.sample_ids[i]]["advantage"], advantages[i])


def still(stack: TrainStack) -> None:
    """Make the updates of a stack change no weight."""
    step = stack.backend.step

    def without_gradient(max_grad_norm: float, loss: Tensor) -> Any:
        for layout in stack.backend.layouts:
            for shard in layout.shards.values():
                if shard.grad is not None:
                    shard.grad.zero_()
        return step(max_grad_norm, loss)

    stack.backend.step = without_gradient  # type: ignore[method-assign]


@pytest.mark.parametrize("schedule", ["joint", "alternating"])
def test_a_shared_network_reports_the_samples_of_each_track(schedule: str) -> None:
    setup = Setup(micro=3, rate=STILL, schedule=schedule)
    tracks = {name: shifted(track) for name, track in setup.tracks.items()}
    image = tracks["image"][0]
    tracks["image"] = image.replace(sample_ids=[f"{each}/image0" for each in image.sample_ids]), tracks["image"][1]
    resp = RolloutResp({name: track for name, (track, _) in tracks.items()})
    shown = [resp.tracks["image"].sample_ids[2], resp.tracks["text"].sample_ids[5]]
    results = setup.stack.train_tracks(resp, {"text": START, "image": START}, shown)
    for name, row in {"image": 2, "text": 5}.items():
        track, expected = tracks[name]
        assert list(results[name].series) == [track.sample_ids[row]]
        assert_close(results[name].series[track.sample_ids[row]]["log_ratio"], expected[row])


def test_the_values_of_all_ranks_are_joined() -> None:
    ranks = [TrainStepResult(({},), {f"p{rank}:0": {"log_ratio": [0.5 * rank]}}) for rank in range(2)]
    assert merge_ranks(ranks).series == {"p0:0": {"log_ratio": [0.0]}, "p1:0": {"log_ratio": [0.5]}}
