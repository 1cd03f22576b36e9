"""The reader of run directories: complete, killed, copied, damaged and hostile ones."""

import json
import shutil
from itertools import pairwise

import pytest

from tests.recorded_runs import PROMPTS, record
from unirl.tracking import step_tables
from unirl.tracking.catalog import run_roots
from unirl.tracking.record import RunRecord


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return record(tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def copy(finished, tmp_path):
    """A run that was copied elsewhere."""
    return shutil.copytree(finished, tmp_path / "copied")


def everything(run: RunRecord) -> dict[str, object]:
    """All parts of a run, read once."""
    return {
        "facts": run.facts, "status": run.status, "environment": run.environment, "settings": run.settings,
        "metrics": run.metrics, "evaluations": run.evaluations, "ledger": run.ledger, "events": run.events,
        "scores": [run.evaluation(step) for step in run.evaluated], "samples": [run.samples(s) for s in run.sampled],
    }  # fmt: skip


def test_a_run_is_read_back_as_it_was_recorded(finished):
    run = RunRecord(finished)
    assert (run.facts.recipe, run.facts.seed, run.status.state, run.total_steps) == ("demo/image", 1, "finished", 6)
    assert run.metrics.curve("rollout/reward_mean") == [(step, step / 10) for step in range(1, 7)]
    assert (run.metrics.count, run.metrics.totals["time/generate"], run.metrics.totals["samples/dropped"]) == (6, 9, 6)
    assert run.metrics.peaks["mem/host_peak_gib"] == run.metrics.last["mem/host_peak_gib"] > 0
    assert (run.evaluated, run.sampled) == ((0, 6), (6,))
    assert [row.prompt for row in run.evaluation(6).rows] == [prompt for prompt in PROMPTS for _ in (0, 1)]
    assert run.evaluations[1]["eval/reward_mean"] == pytest.approx(sum(r.reward for r in run.evaluation(6).rows) / 8)
    assert (run.ledger.generated, run.ledger.dropped, run.ledger.reasons) == (48, 6, {"not finite": 6})
    assert [event["text"] for event in run.events.named("warning")] == ["the reward looks odd"]
    assert [(s.key, s.source, s.place) for s in run.settings] == [
        ("num_rollouts", "recipe", "r.yaml:2"),
        ("seed", "command line", ""),
        ("lr", "default", ""),
    ]
    assert run.problems == ()


def test_a_copy_reads_the_same_and_is_not_changed(finished, copy):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert everything(RunRecord(copy)) == everything(RunRecord(finished))
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_killed_run_and_its_half_written_lines_are_no_problem(tmp_path):
    root = record(tmp_path / "run", code=None)
    for name in ("metrics.jsonl", "ledger.jsonl", "events.jsonl", "eval_metrics.csv"):
        with open(root / name, "a") as file:
            file.write('{"step": 7, "rollout/rew')
    (root / "eval/step-000009").mkdir()  # an evaluation that is being written
    run = RunRecord(root)
    assert run.status.state == "lost"
    assert (run.metrics.count, run.evaluated, len(run.evaluations)) == (6, (0, 6), 2)
    everything(run)
    assert run.problems == ()


def test_every_damaged_file_is_named_and_the_rest_is_read(copy):
    for path in [path for path in copy.rglob("*") if path.suffix in (".json", ".yaml")]:
        path.write_text("{[")
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join([lines[0], "nonsense\n", "[1]\n", '{"a": 1}\n', *lines[1:]]))
    run = RunRecord(copy)
    everything(run)
    assert run.metrics.count == 6
    assert run.status.state == "unknown"
    (copy / "run.json").rename(copy / "moved.json")
    assert list(run_roots(copy.parent)) == [copy]  # lists have it, too
    (copy / "moved.json").rename(copy / "run.json")
    named = {problem.partition(":")[0] for problem in run.problems}
    assert named == {
        "run.json", "env.json", "config/recipe.yaml", "config/resolved.yaml", "config/origins.json", "metrics.jsonl",
        "eval/step-000000/scores.json", "eval/step-000006/scores.json",
    }  # fmt: skip
    assert "metrics.jsonl: 2 of 9 lines are damaged, the first is line 2" in run.problems


def test_every_missing_file_is_named(copy):
    for path in [*copy.glob("*.*"), *copy.glob("config/*")]:
        path.unlink()
    run = RunRecord(copy)
    everything(run)
    named = {problem for problem in run.problems if problem.endswith("there is no such file")}
    assert {problem.partition(":")[0] for problem in named} == {
        "run.json", "env.json", "config/recipe.yaml", "config/resolved.yaml", "metrics.jsonl", "ledger.jsonl",
        "events.jsonl",
    }  # fmt: skip
    assert len(run.problems) == len(named)


def test_values_of_wrong_types_are_left_out(copy):
    scores = json.loads((copy / "eval/step-000006/scores.json").read_text())
    scores["samples"][0]["reward"] = "much"
    scores["samples"][1]["prompt"] = 7
    scores["samples"][2]["reward"] = "nan"
    scores["samples"][3]["later"] = "a fact of a newer version"
    (copy / "eval/step-000006/scores.json").write_text(json.dumps(scores))
    (copy / "ledger.jsonl").write_text('{"generated": "many", "reasons": [1]}\n{"generated": 4, "scored": true}\n')
    (copy / "metrics.jsonl").write_text(
        '{"step": 1, "rollout/reward_mean": {}, "train/loss": "inf", "big": 1' + "0" * 400 + "}\n"
    )
    run = RunRecord(copy)
    assert len(run.evaluation(6).rows) == 6
    assert run.ledger.generated == 4
    assert run.metrics.last == {"step": 1, "train/loss": float("inf")}
    assert [problem.partition(" (")[0] for problem in run.problems] == [
        "eval/step-000006/scores.json: 2 of 8 samples are damaged"
    ]


def test_a_record_of_a_newer_version_is_refused_by_its_number(copy):
    path = copy / "run.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    run = RunRecord(copy)
    assert (run.facts, run.status.state) == (None, "unknown")
    assert run.problems == ("run.json: it has schema 99, and this version of UniRL reads 1",)


def test_yaml_that_repeats_or_contains_itself_is_refused(copy):
    bomb = "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 40))
    for text in (bomb, "a: &a {b: *a}\n"):
        (copy / "config/resolved.yaml").write_text(text)
        run = RunRecord(copy)
        assert run.settings == ()
        assert run.problems[0].startswith("config/resolved.yaml: ")


def test_links_out_of_the_folder_and_odd_files_are_not_read(copy, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text('{"machine": {"key": "secret"}}')
    (copy / "env.json").unlink()
    (copy / "env.json").symlink_to(secret)
    run = RunRecord(copy)
    assert run.environment == {}
    assert run.files.frames("../secret.json") == run.files.frames("a\0b") == []
    assert run.files.frames("eval") == []
    assert run.files.frames("metrics.jsonl") == []
    assert len(run.problems) == 5
    assert not any("secret" in str(part) for part in everything(run).values())


def test_of_very_many_steps_evenly_spaced_rows_are_kept_and_all_are_summed(copy, monkeypatch):
    monkeypatch.setattr(step_tables, "MAX_ROWS", 16)
    rows = [{"step": step, "time/step": 0.5, "mem/host_peak_gib": step % 50} for step in range(1, 102)]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = RunRecord(copy).metrics
    steps = [row["step"] for row in metrics.rows]
    assert (metrics.count, steps[0], steps[-1]) == (101, 1, 101)
    assert 8 <= len(steps) <= 17
    assert len({b - a for a, b in pairwise(steps[:-1])}) == 1
    assert (metrics.totals["time/step"], metrics.peaks["mem/host_peak_gib"]) == (50.5, 49)
