"""Advantages against each prompt's own history, against a plain implementation over lists."""

import json
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.algorithms.shared.advantages import RunningAdvantage, prompt_id
from unirl.config.errors import ConfigError, RewardError
from unirl.types.protocols import Stateful
from unirl.types.results import values
from unirl.types.rollout_req import group_id
from unirl.types.rollout_resp import AdvantageResult, Scores

Step = list[tuple[str, float]]
"""(prompt id, reward) of each row."""


def credited(estimator: RunningAdvantage, step: Step, epoch: int, **fields: Any) -> AdvantageResult:
    rewards = torch.tensor([reward for _, reward in step], dtype=torch.float64)
    ids = [group_id(prompt, epoch) for prompt, _ in step]
    return estimator(Scores(**({"total": rewards, "group_ids": ids, "weight": torch.ones(len(step))} | fields)))


class Tracker:
    """DDPO's per-prompt statistics, as the paper's appendix tells them."""

    def __init__(self, buffer_size: int, min_count: int) -> None:
        self.buffer_size, self.min_count = buffer_size, min_count
        self.past: dict[str, list[float]] = {}

    def update(self, step: Step) -> list[float]:
        for prompt, reward in step:
            self.past[prompt] = [*self.past.get(prompt, []), reward][-self.buffer_size :]
        advantages = []
        for prompt, reward in step:
            seen = self.past[prompt]
            if len(seen) < self.min_count:
                seen = [reward for _, reward in step]
            std = statistics.pstdev(seen)
            advantages.append((reward - statistics.fmean(seen)) / (std + 1e-6) if std else 0.0)
        return advantages


steps_of_few_prompts = st.lists(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-20, 20).map(lambda n: n / 8)), min_size=1, max_size=12),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=40)
@given(steps=steps_of_few_prompts, buffer_size=st.integers(2, 9), data=st.data())
def test_statistics_equal_those_of_ddpo(steps: list[Step], buffer_size: int, data: st.DataObject) -> None:
    min_count = data.draw(st.integers(1, buffer_size))
    estimator = RunningAdvantage(buffer_size=buffer_size, min_count=min_count, clip=None)
    tracker = Tracker(buffer_size, min_count)
    for epoch, step in enumerate(steps):
        result = credited(estimator, step, epoch).advantages
        np.testing.assert_allclose(result.numpy(), tracker.update(step), rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(steps=steps_of_few_prompts, data=st.data())
def test_a_run_saved_and_loaded_in_the_middle_gives_the_same_bits(steps: list[Step], data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(steps)))
    unbroken = RunningAdvantage(buffer_size=6, min_count=3)
    expected = [credited(unbroken, step, i).advantages for i, step in enumerate(steps)]
    first, second = RunningAdvantage(buffer_size=6, min_count=3), RunningAdvantage(buffer_size=6, min_count=3)
    result = [credited(first, step, i).advantages for i, step in enumerate(steps[:stop])]
    credited(second, [("z", 9.0), ("a", 1.0)], 0)  # what it held before is gone
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), sort_keys=True, allow_nan=False)))
    result += [credited(second, step, i).advantages for i, step in enumerate(steps[stop:], stop)]
    assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))
    assert second.state_dict() == unbroken.state_dict()


def test_float32_rewards_survive_the_checkpoint_exactly() -> None:
    estimator = RunningAdvantage(min_count=1)
    rewards = torch.randn(8, generator=torch.Generator().manual_seed(0))
    credited(estimator, [("a", 0.0)] * 8, 0, total=rewards)
    saved = json.loads(json.dumps(estimator.state_dict()))["/total"]["a"]
    assert torch.equal(torch.tensor(saved), rewards)


def test_state_dict_contains_all_state() -> None:
    assert isinstance(RunningAdvantage(), Stateful)


def test_two_estimators_share_no_history() -> None:
    one, other = RunningAdvantage(min_count=1), RunningAdvantage(min_count=1)
    credited(one, [("a", 1.0), ("a", 2.0)], 0)
    assert other.state_dict() == {} and one == other


def test_a_prompt_keeps_its_history_in_later_epochs_and_below_a_parent() -> None:
    assert [prompt_id(id) for id in ("a.txt:3@0", "a.txt:3@17", "a.txt:3@17:2", "me@home@4", "plain")] == [
        *["a.txt:3"] * 3,
        "me@home",
        "plain",
    ]


def test_tracks_and_rewards_have_histories_of_their_own() -> None:
    estimator = RunningAdvantage(min_count=2, weights={"x": 1.0, "y": 1.0}, combine="advantages")
    components = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([5.0, 5.0])}
    for track in ("text", "image"):
        credited(estimator, [("a", 0.0), ("a", 1.0)], 0, components=components, track=track)
    assert estimator.state_dict() == {
        f"{track}/{name}": {"a": past} for track in ("text", "image") for name, past in (("x", [1, 2]), ("y", [5, 5]))
    }


def test_equal_rewards_above_the_history_have_positive_advantages() -> None:
    estimator = RunningAdvantage(min_count=4)
    credited(estimator, [("a", 0.0), ("a", 0.0)], 0)
    result = credited(estimator, [("a", 1.0), ("a", 1.0)], 1)
    assert result.advantages.tolist() == pytest.approx([1.0, 1.0], rel=1e-5)  # history 0 0 1 1: mean 1/2, std 1/2
    assert values(result.metrics)["rollout/own_history_ratio"] == 1.0
    assert values(result.metrics)["rollout/zero_std_group_ratio"] == 0.0


def test_a_history_of_equal_rewards_gives_exactly_zero_and_is_counted() -> None:
    estimator = RunningAdvantage(min_count=12)
    result = credited(estimator, [("a", 0.0)] * 12 + [("b", 1.0)], 0, total=torch.tensor([0.1] * 12 + [1.0]))
    assert torch.equal(result.advantages[:12], torch.zeros(12)) and result.advantages[12] > 1
    assert values(result.metrics)["rollout/zero_std_group_ratio"] == 0.5
    assert values(result.metrics)["rollout/own_history_ratio"] == pytest.approx(12 / 13)


def test_a_dropped_row_enters_no_history_and_a_bad_reward_leaves_it_as_it_was() -> None:
    estimator = RunningAdvantage(min_count=1)
    weight = torch.tensor([1.0, 0.0, 1.0])
    step = [("a", 1.0), ("a", float("nan")), ("a", 3.0)]
    assert credited(estimator, step, 0, weight=weight).advantages[1] == 0
    assert estimator.state_dict() == {"/total": {"a": [1.0, 3.0]}}
    with pytest.raises(RewardError, match="row 1"):
        credited(estimator, step, 1)
    assert estimator.state_dict() == {"/total": {"a": [1.0, 3.0]}}


@pytest.mark.parametrize("min_count", [0, 9])
def test_a_count_that_no_history_reaches_is_refused(min_count: int) -> None:
    with pytest.raises(ConfigError, match=r"min_count must lie in 1\.\.buffer_size=8") as raised:
        RunningAdvantage(buffer_size=8, min_count=min_count)
    assert raised.value.code == 2004
