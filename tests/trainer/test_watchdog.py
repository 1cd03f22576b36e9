"""Each alarm is raised by a trace with its sign, and by no other; a run that resumes raises the same ones."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import uniform_filter

from tests.run_files import lines_of
from tests.trainer.test_loop import checkpoints_of, run
from unirl.config.errors import AlarmError, ConfigError
from unirl.config.load import load
from unirl.config.watching import AlarmName, WatchConfig
from unirl.tracking.measures import image_measures, text_measures
from unirl.trainer import watchdog
from unirl.trainer.watchdog import SIGNS, Course, Finding, History

CONFIG = WatchConfig()
HELD = "rollout/reward_mean"
Trace = Mapping[str, Sequence[float]]


def noisy(start: float, end: float, count: int = 40, spread: float = 0.01) -> list[float]:
    """A line with noise of a fixed seed."""
    noise = np.random.default_rng(7).normal(0.0, spread, count)
    return (np.linspace(start, end, count) + noise).tolist()


def course_of(trace: Trace, evaluations: Sequence[tuple[int, float, float]] = ()) -> Course:
    """A trace of metrics by step, and the held-out rewards (step, mean, standard error) of evaluations."""

    def rows_of(is_evaluated: bool) -> list[dict[str, float]]:
        part = {name: each for name, each in trace.items() if name.startswith("eval/") == is_evaluated}
        count = max((len(values) for values in part.values()), default=0)
        return [{"step": step + 1, **{name: each[step] for name, each in part.items()}} for step in range(count)]

    scored = [{"step": step, "eval/reward_mean": mean, "eval/reward_stderr": se} for step, mean, se in evaluations]
    return Course(History(rows_of(False)), History([*rows_of(True), *scored]))


def found(name: str, trace: Trace, evaluations: Sequence[tuple[int, float, float]] = ()) -> Finding | None:
    [sign] = [sign for sign in SIGNS if sign.name == name]
    return sign.look(course_of(trace, evaluations), CONFIG)


RISING = noisy(0.2, 0.8)
BAD: dict[AlarmName, tuple[Trace, Sequence[tuple[int, float, float]]]] = {
    "heldout.falls": ({HELD: RISING}, [(0, 0.2, 0.02), (20, 0.5, 0.02), (40, 0.3, 0.02)]),
    "component.falls": ({HELD: RISING, "reward/clip_mean": noisy(0.5, 0.2)}, ()),
    "diversity.collapse": ({"eval/diversity": [0.3, 0.28, 0.2, 0.05]}, ()),
    "detail.grows": ({"eval/fine_detail": [0.001, 0.0012, 0.006]}, ()),
    "length.drift": ({"rollout/response_len_mean": noisy(20.0, 90.0)}, ()),
    "kl.runaway": ({"train/approx_kl": [*noisy(0.01, 0.02), *noisy(0.5, 2.0)]}, ()),
    "ratio.runaway": ({"train/clip_fraction": noisy(0.1, 0.99)}, ()),
    "groups.equal": ({"rollout/zero_std_group_ratio": [0.2] * 5 + [1.0] * 20}, ()),
    "reward.saturated": ({"rollout/reward_std": [0.2] * 6 + [0.001] * 20, "rollout/reward_max": [1.0] * 26}, ()),
    "entropy.collapse": ({"train/entropy": noisy(2.0, 0.02)}, ()),
}
GOOD: dict[AlarmName, tuple[Trace, Sequence[tuple[int, float, float]]]] = {
    "heldout.falls": ({HELD: RISING}, [(0, 0.2, 0.02), (20, 0.5, 0.02), (40, 0.45, 0.02)]),
    "component.falls": ({HELD: RISING, "reward/clip_mean": noisy(0.5, 0.45)}, ()),
    "diversity.collapse": ({"eval/diversity": [0.3, 0.28, 0.2, 0.1]}, ()),
    "detail.grows": ({"eval/fine_detail": [0.001, 0.0012, 0.0015]}, ()),
    "length.drift": ({"rollout/response_len_mean": noisy(20.0, 21.5)}, ()),
    "kl.runaway": ({"train/approx_kl": noisy(0.01, 0.1)}, ()),
    "ratio.runaway": ({"train/clip_fraction": noisy(0.1, 0.7), "train/ratio_max": noisy(1.2, 5.0)}, ()),
    "groups.equal": ({"rollout/zero_std_group_ratio": [0.2] * 5 + [1.0] * 15 + [0.5] + [1.0] * 4}, ()),
    "reward.saturated": ({"rollout/reward_std": noisy(0.2, 0.05), "rollout/reward_max": [1.0] * 40}, ()),
    "entropy.collapse": ({"train/entropy": noisy(2.0, 0.5)}, ()),
}


def test_every_alarm_has_a_name_of_the_settings_and_traces_here():
    names = set(typing.get_args(AlarmName))
    assert {sign.name for sign in SIGNS} == names == set(BAD) == set(GOOD)


@pytest.mark.parametrize("name", BAD)
def test_a_trace_with_the_sign_raises_its_alarm_alone(name):
    raised = [sign.name for sign in SIGNS if found(sign.name, *BAD[name]) is not None]
    assert raised == [name]


@pytest.mark.parametrize("name", GOOD)
def test_a_trace_without_it_raises_none(name):
    assert [sign.name for sign in SIGNS if found(sign.name, *GOOD[name]) is not None] == []


def raised_in(trace: Sequence[float]) -> bool:
    """The alarm about lengths begins after some step of a run."""
    [sign] = [sign for sign in SIGNS if sign.name == "length.drift"]
    course = Course(History(), History())
    for step, value in enumerate(trace):
        course.steps.add({"step": step, "rollout/response_len_mean": value})
        if sign.look(course, CONFIG) is not None:
            return True
    return False


@pytest.mark.parametrize("spread", [0.03, 0.1, 0.2])
def test_noise_alone_raises_the_alarm_about_lengths_in_few_runs(spread):
    runs = np.random.default_rng(0).normal(1.0, spread, (60, 100))
    assert sum(map(raised_in, runs.tolist())) <= 3


def test_a_slow_drift_that_is_larger_than_the_noise_raises_the_alarm_about_lengths():
    assert raised_in(noisy(25.0, 29.0, spread=0.75))


def test_an_alarm_says_since_when():
    trace = {"rollout/zero_std_group_ratio": [0.2] * 5 + [1.0] * 25}
    finding = found("groups.equal", trace)
    assert finding is not None and finding.since == 6 and "100%" in finding.text
    finding = found("detail.grows", {"eval/fine_detail": [0.001, 0.001, 0.005, 0.009]})
    assert finding is not None and (finding.since, finding.value) == (3, 0.009)


def test_a_fall_on_held_out_prompts_while_training_falls_too_is_no_sign_of_a_gamed_reward():
    _, evaluations = BAD["heldout.falls"]
    assert found("heldout.falls", {HELD: noisy(0.8, 0.2)}, evaluations) is None
    assert found("heldout.falls", {HELD: noisy(0.5, 0.55, spread=0.1)}, evaluations) is None


def test_groups_of_one_sample_and_one_extreme_step_raise_no_alarm():
    assert found("groups.equal", {"rollout/zero_std_group_ratio": [1.0] * 40}) is None
    assert found("entropy.collapse", {"train/entropy": [1e6, *noisy(60.0, 50.0)]}) is None


def test_episodes_that_look_alike_raise_no_alarm():
    trace, _ = BAD["diversity.collapse"]
    assert found("diversity.collapse", {**trace, "env/return": [1.0] * 4}) is None


def test_the_tracks_of_a_run_are_watched_one_by_one():
    trace = {"text/train/entropy": noisy(2.0, 0.02), "image/train/entropy": noisy(2.0, 2.0)}
    finding = found("entropy.collapse", trace)
    assert finding is not None and "(text/train/entropy)" in finding.text


@pytest.mark.parametrize("name", BAD)
def test_a_metric_that_is_not_finite_or_short_is_no_sign(name):
    trace, evaluations = BAD[name]
    missing = {metric: [float("nan")] * len(values) for metric, values in trace.items()}
    assert found(name, missing, evaluations) is None
    assert found(name, {metric: values[:1] for metric, values in trace.items()}) is None


# Measures of samples


def test_the_measures_of_images_are_those_of_scipy_and_pillow():
    images = np.random.default_rng(0).integers(0, 256, (5, 24, 16, 3), dtype=np.uint8)
    levels = images / 255
    means = uniform_filter(levels, size=(0, 3, 3, 0), mode="nearest")
    small = levels.reshape(5, 8, 3, 8, 2, 3).mean((2, 4))
    apart = [np.sqrt(((a - b) ** 2).mean()) for a, b in combinations(small, 2)]
    measured = image_measures(images)
    assert measured["fine_detail"] == pytest.approx(float(((levels - means) ** 2).mean()), rel=1e-9)
    assert measured["diversity"] == pytest.approx(float(np.mean(apart)), abs=2e-3)  # Pillow rounds to levels


def test_blurred_images_have_less_detail_and_equal_ones_no_diversity():
    image = Image.effect_noise((32, 32), 80).convert("RGB")
    sharp, soft = np.asarray(image), np.asarray(image.resize((4, 4)).resize((32, 32)))
    assert (
        image_measures(np.stack([soft] * 2))["fine_detail"]
        < 0.1 * (image_measures(np.stack([sharp] * 2))["fine_detail"])
    )
    assert image_measures(np.stack([sharp] * 3))["diversity"] == 0.0


@pytest.mark.parametrize(
    ("texts", "diversity"),
    [(["abcd", "abcd"], 0.0), (["abc", "xyz"], 1.0), (["abcd", "bcde"], 1 - 1 / 3), (["", ""], 0.0), (["a"], None)],
)
def test_the_diversity_of_texts_is_one_minus_jaccards_index(texts, diversity):
    assert text_measures(texts).get("diversity") == (None if diversity is None else pytest.approx(diversity))


# Runs


def planted(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    """From step `start` on, the alarm about lengths sees its sign."""

    def look(course: Course, config: WatchConfig) -> Finding | None:
        reward = course.steps.of_run(HELD)
        last = 0 if reward is None else reward.steps[-1]
        return Finding("planted", start, 1.0) if last >= start else None

    signs = tuple(watchdog.Sign(s.name, s.helps, look, s.metrics) if s.name == "length.drift" else s for s in SIGNS)
    monkeypatch.setattr(watchdog, "SIGNS", signs)


def alarms_of(folder: Path) -> list[tuple[str, int]]:
    return [(each["alarm"], each["step"]) for each in lines_of(folder / "events.jsonl") if each["ev"] == "alarm.raise"]


def test_an_alarm_is_raised_once_also_by_a_run_that_resumes(monkeypatch, tmp_path, capsys):
    planted(monkeypatch, 1)
    folder = tmp_path / "run"
    run(folder, "num_rollouts=2")
    said = "".join(capsys.readouterr())
    run(folder, "num_rollouts=4", "watch.on_alarm=stop")
    assert "alarm length.drift was raised before this run was continued and lasts" in "".join(capsys.readouterr())
    assert alarms_of(folder) == [("length.drift", 1)]
    assert "alarm length.drift after step 1: planted, beyond its bound since step 1. What helps: " in said
    told = [each["ev"] for each in lines_of(folder / "events.jsonl") if "after step 1: planted" in each.get("text", "")]
    assert told == ["alarm.raise"]


def test_an_alarm_after_the_last_step_is_a_warning(monkeypatch, tmp_path, capsys):
    planted(monkeypatch, 2)
    folder = tmp_path / "run"
    run(folder, "num_rollouts=2", "watch.on_alarm=stop")
    assert "alarm length.drift after step 2" in "".join(capsys.readouterr())
    assert json.loads((folder / "run.json").read_text())["exit"]["code"] == 0


@pytest.mark.parametrize(("action", "saved"), [("stop", []), ("checkpoint_and_stop", ["checkpoint-000001"])])
def test_an_alarm_ends_the_run_where_the_recipe_says_so(action, saved, monkeypatch, tmp_path):
    planted(monkeypatch, 1)
    folder = tmp_path / "run"
    with pytest.raises(AlarmError, match=r"length\.drift after step 1(.|\n)*watch\.ignore=\[length\.drift\]") as ended:
        run(folder, f"watch.on_alarm={action}")
    assert checkpoints_of(folder) == saved
    assert ("Step 1 is saved. Go on with:" in str(ended.value)) == bool(saved)
    assert json.loads((folder / "run.json").read_text())["exit"]["code"] == 9
    run(folder, f"watch.on_alarm={action}", "watch.ignore=[length.drift]")
    assert len(lines_of(folder / "metrics.jsonl")) == 2


def test_an_unknown_alarm_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"watch\.ignore.*length\.drift"):
        load("diffusion/quickstart", ["watch.ignore=[length.drifts]"])
