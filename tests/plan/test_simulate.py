"""Simulated steps against closed forms, and against the runs that benchmarks/asynchronous.py measured."""

import json
from itertools import product

import pytest

from tests.source_tree import ROOT
from unirl.plan.simulate import LoopSchedule, PhaseSeconds, predict

CASES = [(1.0, 1.0, 1.0), (4.0, 0.5, 2.0), (1.0, 3.0, 2.0), (0.5, 0.1, 5.0)]


def step(generate, score, train, sync=0.25, **schedule) -> float:
    seconds = PhaseSeconds(generate=generate, score=score, train=train, sync=sync)
    return predict(LoopSchedule(seconds=seconds, **schedule)).step_seconds


def scored_after(generate: float, score: float, parts: int) -> float:
    """When the last of `parts` equal parts has gone through both queues: a flow shop of two machines."""
    return max(generate + score / parts, generate / parts + score)


@pytest.mark.parametrize("seconds", CASES)
@pytest.mark.parametrize("place", ["train", "rollout", "reward"])
def test_in_turns_a_step_is_the_sum_of_its_phases(seconds, place):
    assert step(*seconds, reward_place=place) == pytest.approx(sum(seconds) + 0.25)


@pytest.mark.parametrize(("seconds", "parts", "staleness"), list(product(CASES, [1, 2, 8], [0, 1, 2, 3])))
def test_the_step_is_the_largest_cycle_mean_of_the_loop(seconds, parts, staleness):
    """Max-plus algebra: a period is the largest mean of a cycle of waits.

    Sync and generation, sync and training, and scoring each wait for themselves in every step. The samples of a step
    are synced, generated, scored and trained within k + 1 steps.
    """
    generate, score, train = seconds
    whole = 0.25 + scored_after(generate, score, parts) + train
    longest = max(0.25 + generate, 0.25 + train, score) if staleness else 0.0
    expected = max(longest, whole / (staleness + 1))
    assert step(*seconds, reward_parts=parts, max_staleness=staleness) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("seconds", CASES)
def test_a_reward_on_the_devices_of_the_engine_adds_to_its_work(seconds):
    generate, score, train = seconds
    measured = step(*seconds, max_staleness=2, reward_place="rollout")
    assert measured == pytest.approx(max(0.25 + generate + score, 0.25 + train, (sum(seconds) + 0.25) / 3), rel=0.02)


def test_the_bottleneck_is_the_place_that_never_rests():
    seconds = PhaseSeconds(generate=4.0, score=0.1, train=2.0)
    prediction = predict(LoopSchedule(seconds=seconds, max_staleness=1, reward_parts=8))
    assert prediction.bottleneck == "rollout"
    assert prediction.busy["train"] == pytest.approx(2.0 / prediction.step_seconds)


RESULTS = json.loads((ROOT / "benchmarks" / "asynchronous.json").read_text())["results"]
EQUAL, UNEQUAL = (1.0,), (1.6, 0.4)
"""The time of generation in even and odd steps, over its mean. Step 0 is even."""


@pytest.mark.parametrize("row", RESULTS, ids=lambda row: "-".join(map(str, row.values())))
def test_runs_that_were_measured_are_predicted_within_15_percent(row):
    generate, score, train = row["generate_s, score_s, train_s"]
    lengths = UNEQUAL if row["case"].startswith("generate 0.4") else EQUAL
    schedule = {key: row[key] for key in ("max_staleness", "reward_parts", "order")}
    schedule["join"] = generate if row["elastic"] else None
    predicted = step(generate, score, train, sync=0.0, lengths=lengths, **schedule)
    assert predicted == pytest.approx(row["step_s"], rel=0.15)
    assert predicted == pytest.approx(row["predicted_s"], abs=1e-3)


@pytest.mark.parametrize("steps_ahead", [2, 4])
def test_in_free_order_steps_of_unequal_length_take_the_longest_mean(steps_ahead):
    """Training takes 1.2 and generation 1.0 in the mean, so a queue hides generation; a fixed order waits each time."""
    schedule = {"reward_parts": 8, "lengths": UNEQUAL}
    free = step(1.0, 0.1, 1.2, sync=0.0, order="free", max_staleness=2, steps_ahead=steps_ahead, **schedule)
    assert 1.2 - 1e-9 <= free <= 1.2 + 1.6 / 8  # weights wait for the end of at most one part
    fixed = step(1.0, 0.1, 1.2, sync=0.0, max_staleness=2, **schedule)
    assert fixed == pytest.approx((1.6 + 1.2) / 2, rel=0.01)


TIMELINES = [
    # Four parts of 1 s on the engine. While the weights learn (2 s) it samples two; then both sample one each: 3 s.
    ("both equally fast", 2.0, 4.0, 1, 3.0),
    # In turns, both sample two parts each, and then the weights learn.
    ("in turns", 2.0, 4.0, 0, 4.0),
    # One part while the weights learn, then two beside each other; somebody samples the last one alone.
    ("an odd number of parts is left", 1.0, 4.0, 1, 3.0),
    # A part takes 0.5 s on the training devices. From 1 s to 2 s they sample two, and the engine one.
    ("training devices that are twice as fast", 1.0, 2.0, 1, 2.0),
    # A part takes 4 s on the training devices. They take the last one at 2 s and have it at 6 s, when the engine rests.
    ("training devices that are four times as slow", 2.0, 16.0, 1, 6.0),
    # Training is the longer phase, so the loop never waits and nobody joins.
    ("training takes longer", 5.0, 4.0, 1, 5.0),
]


@pytest.mark.parametrize(
    ("train", "join", "staleness", "expected"), [row[1:] for row in TIMELINES], ids=[row[0] for row in TIMELINES]
)
def test_training_devices_that_join_follow_the_timeline_by_hand(train, join, staleness, expected):
    schedule = {"max_staleness": staleness, "reward_parts": 4, "join": join}
    assert step(4.0, 0.0, train, sync=0.0, **schedule) == pytest.approx(expected)


def test_the_weights_learn_after_the_last_part_of_a_joining_device_is_scored():
    """The engine ends three parts at 3 s, the training devices one at 4.5 s, which is scored until 5.5 s."""
    assert step(4.0, 4.0, 2.0, sync=0.0, reward_parts=4, join=18.0) == pytest.approx(7.5)


@pytest.mark.parametrize(("generate", "train", "join"), list(product([4.0, 9.0], [0.5, 3.0], [1.0, 4.0, 12.0])))
def test_with_many_parts_both_engines_end_a_step_together(generate, train, join):
    """What is left after training is shared in the ratio of the speeds. Engines get weights one after the other."""
    left = max(generate - train, 0.0) / generate
    expected = 2 * 0.2 + train + left / (1 / generate + 1 / join)
    elastic = step(generate, 0.0, train, sync=0.2, max_staleness=1, reward_parts=500, join=join)
    assert elastic == pytest.approx(expected, rel=0.02)


def test_every_length_is_counted_as_often_as_any_other():
    """In turns a step is the sum of its phases, whatever the number of lengths is."""
    lengths = (0.1, 2.5, 0.4, 1.2, 0.8, 1.6, 0.4)
    assert step(3.0, 0.5, 1.0, lengths=lengths) == pytest.approx(3.0 + 0.5 + 1.0 + 0.25)
