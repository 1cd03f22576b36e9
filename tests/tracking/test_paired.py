"""Paired differences and their bootstrap intervals, against scipy, Student's t and invariances."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from unirl.tracking.paired import expanded_tail, interval, paired_differences, resampled_means, scores_by_prompt
from unirl.tracking.samples import SampleRow

VALUES = np.random.default_rng(3).gamma(2.0, size=40)


def rows_of(scores: list[list[float]], shift: float = 0.0) -> list[SampleRow]:
    """Samples by prompt, with two scores."""
    return [
        SampleRow(
            sample_id=f"{p}:{s}",
            group_id=f"g{p}",
            prompt=f"prompt {p}",
            reward=score + shift,
            rewards={"half": (score + shift) / 2},
        )
        for p, of_prompt in enumerate(scores)
        for s, score in enumerate(of_prompt)
    ]


def test_percentiles_of_resampled_means_are_those_of_scipy():
    ours = np.quantile(resampled_means(VALUES, 50_000), (0.025, 0.975))
    scipys = stats.bootstrap(
        (VALUES,), np.mean, n_resamples=50_000, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval
    noise = VALUES.std() / math.sqrt(len(VALUES)) / 30
    assert ours == pytest.approx([scipys.low, scipys.high], abs=noise)


def test_the_interval_of_normal_values_is_students():
    """Hesterberg 2014: the expanded levels make both intervals equal for normal values."""
    normal = stats.norm.ppf((np.arange(25) + 0.5) / 25)
    found = interval(list(normal))
    student = stats.t.interval(0.95, 24, loc=normal.mean(), scale=stats.sem(normal))
    assert (found.low, found.high) == pytest.approx(student, rel=0.03)
    plain = np.quantile(resampled_means(normal), (0.025, 0.975))
    assert plain[1] < 0.96 * student[1]


def test_the_expanded_levels_reach_as_far_as_student_t():
    assert expanded_tail(10**7) == pytest.approx(0.025, rel=1e-5)
    n, level = 12, 0.95
    sd_ratio = math.sqrt((n - 1) / n)  # resampled means have this smaller standard deviation
    reach = stats.norm.isf(expanded_tail(n, level)) * sd_ratio
    assert reach == pytest.approx(stats.t.ppf(0.975, n - 1), rel=1e-9)


def test_the_interval_covers_the_mean_of_few_prompts_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        found = interval(list(generator.normal(1.0, 1.0, size=8)))
        hits += found.low <= 1.0 <= found.high
    assert 0.90 <= hits / 200 <= 0.99


def test_the_order_of_samples_and_prompts_and_the_size_of_blocks_change_nothing(monkeypatch):
    before = rows_of([[0.1, 0.4], [0.2, 0.3, 0.9], [0.5], [0.7, 0.1]])
    after = rows_of([[0.3, 0.4], [0.1, 0.8, 0.9], [0.6], [0.9, 0.4]])
    expected = paired_differences(scores_by_prompt(before), scores_by_prompt(after))
    shuffled = random.Random(0)
    for rows in (before, after):
        shuffled.shuffle(rows)
    assert paired_differences(scores_by_prompt(before), scores_by_prompt(after)) == expected
    monkeypatch.setattr("unirl.tracking.paired.BLOCK", 4096)
    assert paired_differences(scores_by_prompt(before), scores_by_prompt(after)) == expected
    assert [each.name for each in expected] == ["reward", "half"]
    assert (resampled_means(VALUES) == resampled_means(VALUES[::-1])).all()


def test_equal_shifts_have_no_noise_and_the_difficulty_of_prompts_drops_out():
    scores = [[0.0, 1.0], [5.0], [9.0, 9.5], [2.0]]
    (whole, half) = paired_differences(scores_by_prompt(rows_of(scores)), scores_by_prompt(rows_of(scores, 0.25)))
    assert (whole.difference, whole.interval.low, whole.interval.high) == pytest.approx((0.25,) * 3)
    assert half.difference == pytest.approx(0.125)
    assert whole.num_prompts == 4


def test_only_prompts_and_scores_that_both_have_are_compared():
    before, after = rows_of([[0.1], [0.2], [0.3], [0.4]]), rows_of([[1.1], [1.2], [1.3], [1.4], [1.5]])
    before[0] = replace(before[0], reward=math.nan)
    after[3] = replace(after[3], rewards={})
    before[1] = replace(before[1], rewards={**before[1].rewards, "other": 1.0})
    found = {each.name: each for each in paired_differences(scores_by_prompt(before), scores_by_prompt(after))}
    assert {name: each.num_prompts for name, each in found.items()} == {"reward": 3, "half": 3}
    assert found["reward"].before == pytest.approx(0.3)
    assert paired_differences(scores_by_prompt(rows_of([[1.0]])), {}) == []


def test_groups_with_one_text_are_told_apart_by_their_id_and_fewer_than_three_prompts_have_no_interval():
    episodes = [replace(row, prompt="") for row in rows_of([[0.1], [0.2], [0.3]])]
    later = [replace(row, reward=row.reward + 1) for row in episodes]
    (whole, _) = paired_differences(scores_by_prompt(episodes), scores_by_prompt(later))
    assert whole.num_prompts == 3
    renamed = [replace(row, group_id=f"other {row.group_id}") for row in rows_of([[0.1], [0.2]])]
    (whole, _) = paired_differences(scores_by_prompt(rows_of([[0.1], [0.2]])), scores_by_prompt(renamed))
    assert (whole.num_prompts, whole.interval) == (2, None)
