"""Replay: transitions of n steps against a loop over episodes, the ring, and runs that continue bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.off_policy import replay_stack, squashed_pipeline, transitions
from tests.scripted_environment import request
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.sac import critics_of
from unirl.config.errors import IncompatibleError, ResumeError
from unirl.data.demonstrations import DemonstrationsConfig, toy_segment
from unirl.train.backend.health import not_finite
from unirl.train.replay_stack import ReplayStack, num_updates
from unirl.train.replay_store import ReplayConfig, ReplayStore
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import ActionSegment
from unirl.types.transitions import transitions_of


def rows_of(cuts: bool = False, rows: int = 5, **settings: Any) -> RolloutTrack[ActionSegment]:
    resp = squashed_pipeline(cuts).generate(request(rows, **settings), 8)
    return resp.tracks["action"].sampled_as(ActionSegment)


@pytest.mark.parametrize("settings", [{}, {"max_steps": 2}, {"max_steps": 23, "continuing": True}], ids=str)
@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("n_step", [1, 2, 4, 9])
def test_a_transition_sums_n_rewards_and_ends_with_its_episode(settings, cuts, n_step) -> None:
    gamma, track = 0.9, rows_of(cuts, **settings)
    segment = track.segment
    found, i = transitions_of(segment, track.weight, gamma, n_step), 0
    for row in range(len(segment)):
        for t in range(int(segment.offsets[row]), int(segment.offsets[row + 1])):
            if not segment.loss_mask[t]:
                continue
            total, steps, place, over = 0.0, 0, t, False
            while steps < n_step and not over and segment.loss_mask[place]:
                total += gamma**steps * float(segment.rewards[place])
                over, is_cut = bool(segment.terminated[place]), bool(segment.truncated[place])
                steps, place = steps + 1, place + 1
                if is_cut:
                    break
            assert float(found.rewards[i]) == pytest.approx(total, rel=1e-6)
            assert float(found.discounts[i]) == pytest.approx(0.0 if over else gamma**steps, rel=1e-6)
            assert torch.equal(found.observations["state"][i], segment.observations["state"][t])
            if not over:
                assert torch.equal(found.following["state"][i], segment.observations["state"][place])
            i += 1
    assert i == len(found)


def test_rows_of_weight_0_are_not_stored() -> None:
    track = rows_of()
    weight = track.weight.clone()
    weight[2] = 0.0
    kept = transitions_of(track.segment, weight, 0.9)
    assert len(kept) == int(track.segment.lengths.sum() - track.segment.lengths[2])


def test_a_full_ring_has_the_newest_transitions_and_its_saved_state_continues_it() -> None:
    store, rows = ReplayStore(ReplayConfig(capacity=10)), transitions(27)
    for start, stop in ((0, 4), (4, 9), (9, 27)):
        store.add(type(rows).of_tensors({name: value[start:stop] for name, value in rows.tensors().items()}))
    assert sorted(store.columns["rewards"].tolist()) == sorted(rows.rewards[-10:].tolist())
    other = ReplayStore(ReplayConfig(capacity=10))
    other.restore(store.state())
    for each in (store, other):
        each.add(transitions(3, seed=7))
    draws = [each.sample(64, torch.Generator().manual_seed(1)).transitions.tensors() for each in (store, other)]
    assert all(torch.equal(draws[0][name], draws[1][name]) for name in draws[0])
    with pytest.raises(ResumeError, match="capacity=11"):
        ReplayStore(ReplayConfig(capacity=11)).restore(store.state())


def test_fractions_of_updates_add_up() -> None:
    steps = [7, 1, 1, 30, 2]
    ends = [sum(steps[: i + 1]) for i in range(len(steps))]
    made = [num_updates(end - step, end, 0.3) for step, end in zip(steps, ends, strict=True)]
    assert sum(made) == int(0.3 * sum(steps)) and made[1:3] == [0, 0]


def trained(stack: ReplayStack, *steps: int) -> ReplayStack:
    for step in steps:
        stack.train_track(rows_of(step=step))
    return stack


@pytest.mark.parametrize("settings", [{}, {"store": ReplayConfig(capacity=30, n_step=3)}], ids=["", "full ring"])
def test_a_restored_stack_continues_bit_for_bit(settings, tmp_path: Path) -> None:
    first = trained(replay_stack(squashed_pipeline(), **settings), 0, 1)
    first.backend.save(str(tmp_path))
    assert not_finite(load_file(tmp_path / "kept.safetensors")) == []  # counts are integers
    second = replay_stack(squashed_pipeline(), **settings)
    second.backend.load(str(tmp_path))
    weights = []
    for stack in (trained(first, 2), trained(second, 2)):
        weights.append(dict(stack.backend.gather()) | critics_of(stack.stage).state_dict() | dict(stack.replay.state()))
    assert first.backend.version() > 0 and weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_warmup_collects_and_changes_no_weight() -> None:
    stack = replay_stack(squashed_pipeline(), warmup=10_000)
    before = dict(stack.backend.gather())
    result = stack.train_track(rows_of())
    assert result.metrics["train/replay_updates"].value == 0 and result.metrics["train/replay_size"].value > 0
    assert all(torch.equal(before[name], value) for name, value in stack.backend.gather().items())


def offline(path: str = "toy", **settings: Any) -> ReplayStack:
    return replay_stack(squashed_pipeline(), offline=DemonstrationsConfig(path=path), minibatch_size=10, **settings)


@pytest.mark.parametrize(("share", "count"), [(0.5, 5), (0.3, 3), (1.0, 10)])
def test_a_share_of_a_minibatch_is_offline(share, count) -> None:
    stack = offline(offline_share=share)
    shown = stack.demonstrations.columns["rewards"].tolist()
    own = transitions(20)
    stack.replay.add(own)
    _, batch = stack._minibatch(torch.Generator().manual_seed(0))
    assert sum(float(reward) in shown for reward in batch.rewards) == count
    assert sum(float(reward) in own.rewards.tolist() for reward in batch.rewards) == 10 - count


def test_demonstrated_actions_become_what_a_squashed_policy_executes() -> None:
    stack = offline(store=ReplayConfig(n_step=3))
    found, stored = toy_segment(stack.stage.facts), stack.demonstrations
    executed = stack.stage.policy.executed(stored.columns["actions"])[:, 0]
    assert torch.allclose(executed, found.actions[found.loss_mask].clamp(-0.999, 0.999), atol=1e-6)
    own = transitions_of(found, torch.ones(len(found)), stack.loss.gamma, 3)
    assert torch.equal(stored.columns["rewards"], own.rewards)


def test_a_resumed_run_with_demonstrations_continues_and_checkpoints_have_their_digest_alone(tmp_path: Path) -> None:
    first = trained(offline(), 0, 1)
    first.backend.save(str(tmp_path))
    saved = load_file(tmp_path / "kept.safetensors")
    assert [name for name in saved if "demonstrations" in name] == ["0:demonstrations:digest"]
    second = offline()
    second.backend.load(str(tmp_path))
    weights = [dict(trained(stack, 2).backend.gather()) for stack in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_resumed_run_without_the_demonstrations_is_refused(tmp_path: Path) -> None:
    trained(offline(), 0).backend.save(str(tmp_path))
    with pytest.raises(ResumeError, match=r"objects beside the weights are .*'demonstrations'.* resume=none"):
        replay_stack(squashed_pipeline(), minibatch_size=10).backend.load(str(tmp_path))


@pytest.mark.parametrize("before", [True, False])
def test_a_resumed_run_with_other_demonstrations_is_refused(tmp_path: Path, monkeypatch, before) -> None:
    first = offline() if before else replay_stack(squashed_pipeline())
    trained(first, 0).backend.save(str(tmp_path))
    segment = toy_segment(first.stage.facts, episodes=3)
    monkeypatch.setattr("unirl.data.demonstrations.toy_segment", lambda facts: segment)
    with pytest.raises(ResumeError, match="demonstrations"):
        offline().backend.load(str(tmp_path))


def test_data_without_rewards_teach_no_critic(monkeypatch) -> None:
    segment = toy_segment(squashed_pipeline().facts)
    bare = segment.replace(rewards=segment.rewards * torch.nan)
    monkeypatch.setattr("unirl.data.demonstrations.toy_segment", lambda facts: bare)
    with pytest.raises(IncompatibleError, match="no rewards"):
        offline()


def test_losses_on_the_samples_of_a_step_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="ARGRPO"):
        replay_stack(squashed_pipeline(), ARGRPO())  # type: ignore[arg-type]
