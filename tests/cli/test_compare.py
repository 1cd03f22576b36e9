"""`unirl compare`: what differs between runs, and bad input."""

import json
import shutil

import pytest

from tests.recorded_runs import PROMPTS, record
from unirl.cli.main import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of one recipe, one with other prompts, and one of texts."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "first": record(folder / "first"),
        "second": record(folder / "second", seed=2, steps=4),
        "other": record(folder / "other", prompts=("a", "b")),
        "part": record(folder / "part", prompts=(PROMPTS[2], PROMPTS[0], "c", PROMPTS[1])),
        "text": record(folder / "text", medium="text", prompts=("d",)),
    }


def compared(capsys, *paths) -> dict:
    assert main(["compare", *map(str, paths), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_settings_outcome_and_cost_are_compared(runs, capsys):
    found = compared(capsys, runs["first"], runs["second"])
    assert [(each["key"], each["values"]) for each in found["settings"]] == [("num_rollouts", [6, 4]), ("seed", [1, 2])]
    own = found["runs"][0]["outcome"]
    rises = [(p + 1) / 10 for p in range(4)]
    assert own["scores"]["reward"]["difference"] == pytest.approx(sum(rises) / 4)
    assert own["scores"]["reward"]["interval"]["low"] == pytest.approx(min(rises), abs=0.02)
    (across,) = found["against_first"]
    assert (across["steps"], across["scores"]["reward"]["num_prompts"]) == ([6, 4], 4)
    assert across["scores"]["reward"]["difference"] == across["scores"]["reward"]["interval"]["high"] == 0
    assert [run["cost"]["phases"]["generate"] for run in found["runs"]] == [9, 6]
    assert [run["cost"]["total_s"] for run in found["runs"]] == [12, 8]
    assert found["problems"] == {str(runs["first"]): [], str(runs["second"]): []}


def test_a_figure_is_given_only_for_prompts_that_both_evaluated(runs, capsys):
    none, some = compared(capsys, runs["first"], runs["other"], runs["part"])["against_first"]
    assert none["scores"] == {}
    assert (some["prompts"], some["scores"]["reward"]["num_prompts"]) == ([4, 4], 3)
    assert main(["compare", str(runs["first"]), str(runs["other"]), str(runs["part"])]) == 0
    text = capsys.readouterr().out
    assert "A -> B no figure: no prompt was scored in both evaluations" in text
    assert "A -> C step 6 -> 6, 3 of 4 and 4 prompts" in text
    assert "(no interval: fewer than 3 prompts)   n=2" in text


def test_runs_of_other_domains_without_evaluations_or_with_damage_are_noted(runs, tmp_path, capsys):
    bare = shutil.copytree(runs["first"], tmp_path / "bare")
    shutil.rmtree(bare / "eval")
    (bare / "run.json").write_text("{")
    assert main(["compare", str(runs["text"]), str(bare)]) == 0
    text = capsys.readouterr().out
    assert "A -> B no figure: it needs an evaluation of both" in text
    assert f"note: {bare}: run.json: it is damaged (Expecting property name" in text
    assert f"B  {bare}   unknown, 6/6 steps" in text


def test_text_of_runs_cannot_act_on_the_terminal(runs, tmp_path, capsys):
    bad = shutil.copytree(runs["first"], tmp_path / "bad")
    (bad / "config/resolved.yaml").write_text('"se\\ted\\e[2J": "\\e]0;title\\a"\n')
    assert main(["compare", str(runs["first"]), str(bad)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_what_is_no_run_and_a_single_run_are_refused(runs, tmp_path, capsys):
    assert main(["compare", str(runs["first"]), str(tmp_path)]) == 4
    assert "it has neither run.json nor metrics.jsonl" in capsys.readouterr().err
    assert main(["compare", str(runs["first"]), str(tmp_path / "absent")]) == 4
    assert main(["compare", str(runs["first"])]) == 2
    assert "unirl report RUN" in capsys.readouterr().err
    assert main(["compare"]) == 2
