"""What the quick start says at its end, and when it calls itself broken."""

import pytest

from unirl.cli.quickstart import PROMISES, RECIPE, check_promise, recipe_of, report
from unirl.config.errors import DivergenceError


def scores(*means: float) -> list[dict[str, float]]:
    return [{"eval/reward_mean": mean, "eval/reward_stderr": 0.01} for mean in means]


def test_a_rise_as_promised_is_success():
    check_promise(RECIPE, scores(0.6, 0.5, 0.6 + PROMISES[RECIPE] + 0.01), ["sampling.seed=3", "run.dir=x"])


def test_too_small_a_rise_is_an_error_with_its_own_status():
    with pytest.raises(DivergenceError, match=r"rose by 0\.050") as caught:
        check_promise(RECIPE, scores(0.6, 0.65), ["sampling.seed=3"])
    assert (caught.value.code, caught.value.exit_status) == (9003, 9)


@pytest.mark.parametrize("setting", ["num_rollouts=1", "++num_rollouts=1", "scale=toy"])
def test_other_settings_than_the_shipped_ones_promise_nothing(setting):
    check_promise(RECIPE, scores(0.6, 0.5), [setting])


def test_the_report_shows_both_scores_with_their_spread_on_one_line_of_a_terminal():
    shown = report(scores(0.6, 0.8))
    assert shown.startswith("held-out reward  0.600 +- 0.010 -> 0.800 +- 0.010") and len(shown) <= 80


@pytest.mark.parametrize(
    ("word", "recipe"),
    [("llm", "llm/quickstart"), ("llm/other", "llm/other"), ("mine.yaml", "mine.yaml"), (RECIPE, RECIPE)],
)
def test_a_domain_means_its_quick_start(word, recipe):
    assert recipe_of(word) == recipe
