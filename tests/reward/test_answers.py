"""Text rules give 1 to the right answer alone, 0 to a wrong or missing one, and no score without a right answer."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.config.errors import RewardError
from unirl.reward.local.exact_match import ExactMatchRewardScorer, ExactMatchSpec
from unirl.reward.local.gsm8k_exact_match import GSM8KExactMatchRewardScorer, GSM8KExactMatchSpec
from unirl.reward.local.mc_exact_match import MCExactMatchRewardScorer, chosen
from unirl.reward.mathematics.answers import last_boxed
from unirl.reward.scoring import checked_score
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest


def request(texts, answers, key="answer"):
    metadata = [{key: answer} for answer in answers]
    return RewardRequest(sample_ids=[f"s{i}" for i in range(len(texts))], texts=texts, metadata=metadata)


def test_exact_match_ignores_the_amount_of_white_space_and_case_by_choice():
    rows = request(["  New\n York ", "new york", "NewYork", ""], ["New York"] * 4)
    assert check_reward(ExactMatchRewardScorer(), rows).total.tolist() == [1, 0, 0, 0]
    loose = ExactMatchRewardScorer(config=ExactMatchSpec(ignore_case=True))
    assert check_reward(loose, rows).total.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"), ("(b)", "B"), ("**C.**", "C"), ("The answer is B.", "B"), ("Answer: (D)", "D"), 
        ("answer:\n**A**", "A"),
        ("the answer is A, no, the answer is C", "C"), (r"so \boxed{D}, though the answer is A", "D"),
        (r"\boxed{\text{B}}", None), (r"\boxed{12} and the answer is B", "B"), ("the answer is a cat", None),
        ("The answer is Berlin", None), ("AB", None), ("", None), ("I like A and B", None),
    ],
)  # fmt: skip
def test_the_chosen_letter(text, letter):
    assert chosen(text) == letter


def test_multiple_choice_compares_letters():
    rows = request(["Answer: B", "(b)", "C", "no idea"], ["B", "(B)", "b.", "B"])
    assert check_reward(MCExactMatchRewardScorer(), rows).total.tolist() == [1, 1, 0, 0]


def test_gsm8k_asks_for_its_form_and_compares_numbers():
    texts = ["18 * 4 = 72\n#### 72", "It is 72", "#### 72.0", "#### $1,072", "#### 5, no\n#### 72 apples, 9 left"]
    texts.append("#### seventy")
    rows = request(texts, ["18 x 4 = <<18*4=72>>72\n#### 72", "72", 72, "1072", 72.0, "72"])
    assert check_reward(GSM8KExactMatchRewardScorer(), rows).total.tolist() == [1, 0, 1, 1, 1, 0]
    flexible = GSM8KExactMatchRewardScorer(config=GSM8KExactMatchSpec(method="flexible", format_score=0.1))
    assert check_reward(flexible, rows).total.tolist() == pytest.approx([1, 1, 1, 1, 0.1, 0])


@given(st.decimals(min_value=-(10**6), max_value=10**6, places=2), st.decimals(min_value=-50, max_value=50, places=2))
def test_gsm8k_scores_equal_numbers_in_any_spelling(number: Decimal, other: Decimal):
    rows = request([f"#### {number:,}", f"#### {number:f}0", f"#### {other}"], [str(number)] * 3)
    assert GSM8KExactMatchRewardScorer().score(rows).total.tolist() == [1.0, 1.0, float(number == other)]


@given(st.recursive(st.text("ab1 ", max_size=3), lambda inner: st.tuples(inner, inner).map("{{{0[0]}}}{0[1]}".format)))
def test_the_last_box_is_found_with_its_braces(content):
    text = rf"first \boxed{{old}}, then \boxed{{{content}}} and a half-open \boxed{{x"
    assert last_boxed(text) == content.strip()
    assert last_boxed(rf"\fbox {{{content}}}") == content.strip()
    assert last_boxed(content) is None


RULES = [ExactMatchRewardScorer, MCExactMatchRewardScorer, GSM8KExactMatchRewardScorer]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("metadata", [{}, {"answer": ""}, {"answer": None}, {"answer": True}, {"answer": ["B"]}])
def test_a_missing_right_answer_is_found_at_the_start_and_named_when_scored(rule, metadata):
    with pytest.raises(RewardError, match="no right answer in metadata 'answer'"):
        rule().check_prompt("a question", metadata)
    rows = RewardRequest(sample_ids=["good", "bad"], texts=["B", "B"], metadata=[{"answer": 3}, metadata])
    assert 1 in rule().score(rows).failed_rows()
    with pytest.raises(RewardError, match="sample 'bad': no right answer"):
        checked_score(rule(), rows.select([1]), "rule")


@pytest.mark.parametrize(
    ("rule", "answer", "why"),
    [(MCExactMatchRewardScorer, "blue", "not the letter"), (GSM8KExactMatchRewardScorer, "#### many", "not a number")],
)
def test_a_right_answer_of_another_form_is_found_at_the_start(rule, answer, why):
    with pytest.raises(RewardError, match=why):
        rule().check_prompt("a question", {"answer": answer})
