"""Shares of right answers: held against enumeration of all subsets, and against votes counted by hand."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from unirl.types.evaluation import EvalResult, accuracy, majority, pass_at
from unirl.types.primitives import ImagePreviews, Texts
from unirl.types.reward import Answer


def answers(*texts: str | None, right: str = "7") -> list[Answer]:
    return [Answer(text == right, text) for text in texts]


def result(prompts: list[list[Answer | None]]) -> EvalResult:
    rows = [(f"p{p}@0", answer) for p, group in enumerate(prompts) for answer in group]
    return EvalResult(
        sample_ids=tuple(f"{group}:{i}" for i, (group, _) in enumerate(rows)),
        group_ids=tuple(group for group, _ in rows),
        prompts=("?",) * len(rows),
        rewards=torch.zeros(len(rows)),
        components={},
        answers=tuple(answer for _, answer in rows),
        media=Texts(texts=["."] * len(rows)),
        track="text",
    )


def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_right_answer() -> None:
    for n in range(1, 8):
        for k, right in product(range(1, n + 1), range(n + 1)):
            samples = [i < right for i in range(n)]
            subsets = list(combinations(samples, k))
            assert pass_at(k, n, right) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_neither_overflows_nor_loses_digits_with_many_samples() -> None:
    assert pass_at(512, 1024, 1) == 0.5
    assert pass_at(1, 10_000, 1) == pytest.approx(1e-4, rel=1e-9)


@pytest.mark.parametrize(
    ("said", "share"),
    [
        (("7", "7", "8", "9"), 1.0),
        (("8", "8", "7", "9"), 0.0),
        (("7", "7", "8", "8"), 0.5),  # a tie counts as the mean of those that tie
        (("7", "8", "9", "10"), 0.25),
        (("8", "8", "9", "9"), 0.0),
        (("7", "", "", ""), 1.0),  # no answer, no vote
        (("", "", "", ""), 0.0),
    ],
)
def test_the_most_frequent_answer_wins_and_ties_are_shared(said, share) -> None:
    assert majority(answers(*said)) == share
    assert majority(answers(*reversed(said))) == share


def test_right_answers_vote_together_however_they_are_written() -> None:
    assert majority([Answer(True, "1/2"), Answer(True, "0.5"), Answer(False, "3"), Answer(False, "4")]) == 1.0


def test_an_evaluation_has_every_power_of_two_up_to_n_and_means_over_prompts() -> None:
    result = accuracy([answers("7", "7", "8", "8", "8", "9"), answers("7", "7", "7", "7", "7", "8")])
    assert list(result) == ["eval/avg@6", "eval/pass@1", "eval/pass@2", "eval/pass@4", "eval/maj@6"]
    assert result["eval/avg@6"] == result["eval/pass@1"] == pytest.approx((2 + 5) / 12)
    assert result["eval/pass@2"] == pytest.approx((1 - 6 / 15 + 1) / 2)
    assert result["eval/maj@6"] == 0.5


def test_a_single_sample_per_prompt_gives_its_share_of_right_ones_three_times() -> None:
    assert accuracy([answers("7"), answers("8")]) == {"eval/avg@1": 0.5, "eval/pass@1": 0.5, "eval/maj@1": 0.5}


def test_prompts_that_lost_samples_count_for_the_k_that_they_still_have() -> None:
    result = accuracy([answers("7", "8", "8", "8"), answers("7", "7")])
    assert result["eval/avg@4"] == pytest.approx((0.25 + 1) / 2)
    assert result["eval/pass@4"] == 1.0
    assert result["eval/pass@2"] == pytest.approx((1 - 3 / 6 + 1) / 2)


def test_without_texts_of_answers_there_is_no_vote_and_without_answers_nothing() -> None:
    assert set(accuracy([[Answer(True), Answer(False)]])) == {"eval/avg@2", "eval/pass@1", "eval/pass@2"}
    assert accuracy([]) == accuracy([[]]) == {}


def test_metrics_of_an_evaluation_count_only_what_was_judged() -> None:
    metrics = result([[*answers("7", "8")], [None, *answers("7")]]).metrics()
    assert metrics["eval/avg@2"] == pytest.approx(0.75)
    assert "eval/reward_mean" in metrics
    unjudged = EvalResult(**{**vars(result([[None]])), "answers": None})
    assert not any("@" in name for name in unjudged.metrics())


def test_facts_of_a_row_say_its_answer_and_whether_it_is_right() -> None:
    actual = result([[*answers("8"), None, Answer(True)]])
    assert [actual.facts_of(row) for row in range(3)] == [{"answer": "8", "right": False}, {}, {"right": True}]


def drawn(height: int, width: int, first: int, logged_rewards: dict[str, torch.Tensor]) -> EvalResult:
    """Two samples of one size, of one prompt."""
    return EvalResult(
        sample_ids=(f"p{first}@0:0", f"p{first}@0:1"),
        group_ids=(f"p{first}@0",) * 2,
        prompts=("?",) * 2,
        prompt_image_uris=((f"{first}.png",),) * 2,
        rewards=torch.tensor([first, first + 1.0]),
        components={"a": torch.tensor([first, first + 2.0])},
        logged_rewards=logged_rewards,
        unscored=first,
        media=ImagePreviews(pixels=torch.full((2, 3, height, width), first, dtype=torch.uint8)),
        track="image",
    )


def test_draws_of_several_sizes_are_one_evaluation() -> None:
    parts = [drawn(4, 8, 1, {"w": torch.ones(2)}), drawn(8, 4, 3, {})]
    joined = EvalResult.joined(parts)
    assert joined.sample_ids == ("p1@0:0", "p1@0:1", "p3@0:0", "p3@0:1") and len(joined.groups()) == 2
    assert joined.rewards.tolist() == [1, 2, 3, 4] and joined.components["a"].tolist() == [1, 3, 3, 5]
    assert joined.unscored == 4 and joined.prompt_image_uris[2:] == (("3.png",),) * 2
    assert joined.metrics()["eval/w_mean"] == 1.0
    assert joined.logged_rewards["w"].isnan().tolist() == [False, False, True, True]
    assert EvalResult.joined(parts[:1]) is parts[0]


def test_previews_of_several_sizes_stand_in_the_middle_of_a_white_canvas() -> None:
    pixels = EvalResult.joined([drawn(4, 8, 1, {}), drawn(8, 4, 3, {})]).media.pixels
    assert pixels.shape == (4, 3, 8, 8)
    assert (pixels[:2, :, 2:6] == 1).all() and (pixels[2:, :, :, 2:6] == 3).all()
    assert (pixels[:2, :, [0, 1, 6, 7]] == 255).all() and (pixels[2:, :, :, [0, 1, 6, 7]] == 255).all()
