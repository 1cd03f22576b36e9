"""Step choice: goldens, the range that may be trained, and what cannot be chosen."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.sde.steps import (
    AllSteps,
    EquallySpacedSteps,
    FractionSteps,
    LastSteps,
    ListedSteps,
    ProgressiveWindow,
    RandomTail,
    RandomWindow,
)

CHOICES = [
    AllSteps(),
    FractionSteps(),
    FractionSteps(num_steps=None),
    FractionSteps(low=0.2, high=1.0, num_steps=5),
    EquallySpacedSteps(),
    EquallySpacedSteps(num_steps=9),
    LastSteps(),
    ListedSteps(at=(0.0, 0.25, 0.5)),
    LastSteps(num_steps=4),
    RandomTail(),
    RandomTail(low=0.5, high=0.9),
    RandomWindow(),
    RandomWindow(size=2, low=0.5, high=1.0),
    ProgressiveWindow(),
    ProgressiveWindow(size=1, iters_per_window=1),
    ProgressiveWindow(size=2, iters_per_window=3, stride=2, start=1, roll_back=False),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@given(step=st.integers(0, 10_000), num_steps=st.integers(10, 60), seed=st.integers(0, 2**40))
def test_a_choice_is_sorted_distinct_and_never_holds_the_last_step(choice, step, num_steps, seed):
    chosen = choice.choose(step, num_steps, seed)
    assert chosen == tuple(sorted(set(chosen))) != ()
    assert chosen[0] >= 0 and chosen[-1] <= num_steps - 2
    assert choice.choose(step, num_steps, seed) == chosen


def test_all_steps_are_all_but_the_last():
    assert AllSteps().choose(7, 10, 42) == tuple(range(9))


@pytest.mark.parametrize(
    ("choice", "num_steps", "pool"),
    [
        (FractionSteps(num_steps=None), 10, range(5)),
        (FractionSteps(num_steps=None), 25, range(12)),
        (FractionSteps(low=0.0, high=0.6, num_steps=None), 16, range(9)),
        (FractionSteps(low=0.0, high=1.0, num_steps=None), 10, range(9)),
        (FractionSteps(low=0.3, high=0.7, num_steps=None), 10, range(3, 7)),
    ],
)
def test_the_part_of_the_trajectory_is_cut_by_rounding_down(choice, num_steps, pool):
    assert choice.choose(0, num_steps, 42) == tuple(pool)


def test_fraction_steps_are_drawn_anew_and_evenly():
    choice = FractionSteps(low=0.0, high=0.5, num_steps=3)
    drawn = [choice.choose(step, 10, 42) for step in range(2000)]
    counts = Counter(index for steps in drawn for index in steps)
    assert all(len(steps) == 3 for steps in drawn) and len(set(drawn)) == 10  # all of C(5, 3)
    assert set(counts) == set(range(5)) and all(abs(n - 1200) < 100 for n in counts.values())


def test_the_seed_of_the_run_matters():
    one, two = ([FractionSteps().choose(step, 10, seed) for step in range(50)] for seed in (1, 2))
    assert one != two


def test_equally_spaced_steps_cover_the_trajectory_evenly_where_they_divide_it():
    drawn = [EquallySpacedSteps(num_steps=3).choose(step, 13, 42) for step in range(2000)]
    assert set(drawn) == {(first, first + 4, first + 8) for first in range(4)}
    counts = Counter(index for steps in drawn for index in steps)
    assert set(counts) == set(range(12)) and all(abs(n - 500) < 70 for n in counts.values())


@given(num_steps=st.integers(1, 9), total=st.integers(10, 40))
def test_equally_spaced_steps_lie_one_interval_apart_and_reach_every_step(num_steps, total):
    choice, interval = EquallySpacedSteps(num_steps=num_steps), (total - 1) // num_steps
    drawn = {choice.choose(step, total, 42) for step in range(600)}
    assert all({b - a for a, b in pairwise(steps)} <= {interval} and len(steps) == num_steps for steps in drawn)
    assert {index for steps in drawn for index in steps} == set(range(total - 1))


def test_last_steps_are_those_before_the_last():
    assert LastSteps(num_steps=3).choose(7, 10, 42) == (6, 7, 8)
    assert LastSteps(num_steps=9).choose(0, 10, 42) == tuple(range(9))


def test_a_random_tail_begins_anywhere_in_its_part_and_ends_at_the_end():
    tails = Counter(RandomTail(low=0.2, high=0.6).choose(step, 10, 42) for step in range(2000))
    assert set(tails) == {tuple(range(first, 9)) for first in (2, 3, 4, 5)}
    assert all(abs(count - 500) < 80 for count in tails.values())


def test_a_random_window_stands_anywhere_in_its_part():
    choice = RandomWindow(size=3, low=0.0, high=0.5)
    windows = Counter(choice.choose(step, 10, 42) for step in range(1500))
    assert set(windows) == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}
    assert all(abs(count - 500) < 80 for count in windows.values())


def left_edges(choice, num_steps, count):
    return [choice.choose(step * choice.iters_per_window, num_steps, 42)[0] for step in range(count)]


def test_left_edges_of_mixgrpo_are_the_published_ones():
    assert left_edges(ProgressiveWindow(), 10, 9) == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert left_edges(ProgressiveWindow(), 25, 23) == [*range(22), 0]


def test_the_window_never_shrinks_to_nothing_and_leaves_out_the_last_step_only():
    windows = [ProgressiveWindow().choose(25 * move, 10, 42) for move in range(7)]
    assert windows[:6] == [tuple(range(left, left + 4)) for left in range(6)]
    assert windows[6] == (6, 7, 8)


def test_a_window_of_one_visits_every_step_but_the_last():
    assert left_edges(ProgressiveWindow(size=1), 5, 5) == [0, 1, 2, 3, 0]


def test_the_window_moves_after_its_iterations():
    choice = ProgressiveWindow(size=2, iters_per_window=3)
    assert [choice.choose(step, 10, 42)[0] for step in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_without_rolling_back_the_last_window_stays():
    choice = ProgressiveWindow(size=4, stride=3, roll_back=False)
    assert left_edges(choice, 10, 5) == [0, 3, 6, 6, 6]


def test_a_stride_of_zero_freezes_the_window():
    assert left_edges(ProgressiveWindow(stride=0, start=2), 10, 4) == [2, 2, 2, 2]


def test_windows_begin_at_start():
    assert left_edges(ProgressiveWindow(start=4), 10, 4) == [4, 5, 6, 4]


@pytest.mark.parametrize(
    ("choice", "num_steps", "message"),
    [
        (AllSteps(), 1, r"AllSteps needs 1 of the steps .* num_inference_steps=1, which has 0"),
        (
            FractionSteps(num_steps=3),
            4,
            r"FractionSteps needs 3 .* \[0, 0\.5\) of num_inference_steps=4, which has 2",
        ),
        (FractionSteps(low=0.9, high=1.0, num_steps=None), 10, r"FractionSteps needs 1 .* \[0\.9, 1\) .* has 0"),
        (EquallySpacedSteps(num_steps=10), 10, r"EquallySpacedSteps needs 10 .* has 9"),
        (LastSteps(num_steps=5), 5, r"LastSteps needs 5 .* has 4"),
        (ListedSteps(at=(0.1, 0.9)), 10, r"gives the steps \[1, 9\] of num_inference_steps=10"),
        (ListedSteps(at=(0.1, 0.2)), 4, r"gives the steps \[0, 0\]"),
        (RandomTail(low=0.95), 10, r"RandomTail needs 1 .* \[0\.95, 1\) .* has 0"),
        (RandomWindow(size=6), 10, r"RandomWindow needs 6 .* has 5"),
        (ProgressiveWindow(size=11), 10, r"size=11 from start=0 does not fit into num_inference_steps=10"),
        (ProgressiveWindow(size=4, start=7), 10, r"size=4 from start=7 does not fit"),
        (ProgressiveWindow(size=1), 1, r"does not fit into num_inference_steps=1"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(choice, num_steps, message):
    with pytest.raises(ValueError, match=message):
        choice.choose(0, num_steps, 42)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FractionSteps(low=0.5, high=0.5), r"low=0\.5 and high=0\.5 must satisfy"),
        (lambda: FractionSteps(high=1.5), r"high=1\.5"),
        (lambda: RandomWindow(low=-0.1), r"low=-0\.1"),
        (lambda: FractionSteps(num_steps=0), r"FractionSteps\.num_steps=0 must be >= 1"),
        (lambda: EquallySpacedSteps(num_steps=0), r"EquallySpacedSteps\.num_steps=0 must be >= 1"),
        (lambda: LastSteps(num_steps=0), r"LastSteps\.num_steps=0"),
        (lambda: RandomTail(low=1.0), r"RandomTail: low=1"),
        (lambda: RandomWindow(size=0), r"RandomWindow\.size=0"),
        (lambda: ProgressiveWindow(size=0), r"ProgressiveWindow\.size=0"),
        (lambda: ProgressiveWindow(iters_per_window=0), r"ProgressiveWindow\.iters_per_window=0"),
        (lambda: ProgressiveWindow(stride=-1), r"ProgressiveWindow\.stride=-1"),
        (lambda: ProgressiveWindow(start=-1), r"ProgressiveWindow\.start=-1"),
    ],
)
def test_a_parameter_out_of_range_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_listed_steps_are_the_same_in_every_step_of_the_loop() -> None:
    listed = ListedSteps(at=(0.1, 0.3))
    assert [listed.choose(step, 10, 42) for step in (0, 5)] == [(1, 3)] * 2
    assert ListedSteps(at=(0.07, 0.29)).choose(0, 100, 1) == (7, 29)  # 100 * 0.07 and 0.29 are not exact
    for wrong in ((), (0.3, 0.1), (0.1, 0.1), (-0.1,), (1.0,)):
        with pytest.raises(ValueError, match="rising fractions"):
            ListedSteps(at=wrong)
