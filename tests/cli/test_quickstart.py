"""What the quick start says at its end, and when it calls itself broken."""

from pathlib import Path

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


def test_the_report_shows_both_scores_with_their_spread(tmp_path):
    (tmp_path / "eval" / "step-000050").mkdir(parents=True)
    first, *_ = report(tmp_path, scores(0.6, 0.8))
    assert first.startswith("held-out reward  0.600 +- 0.010 -> 0.800 +- 0.010")


def test_the_report_does_not_repeat_the_summary_of_the_run():
    root = Path("runs/unirl/second")
    result = [score | {"eval/pass@4": share} for score, share in zip(scores(0.6, 0.8), (0.25, 0.75), strict=True)]
    shown = report(root, result)
    assert len(shown) == 3 and max(map(len, shown)) <= 80
    assert shown[1:] == [f"samples          {root / 'samples'}", f"metrics          {root / 'metrics.csv'}"]


@pytest.mark.parametrize(
    ("word", "recipe"),
    [("llm", "llm/quickstart"), ("llm/other", "llm/other"), ("mine.yaml", "mine.yaml"), (RECIPE, RECIPE)],
)
def test_a_domain_means_its_quick_start(word, recipe):
    assert recipe_of(word) == recipe
