"""The tracker: what is in the files after a step, after a crash and a resume, and after an evaluation."""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unirl.tracking.console import Console
from unirl.tracking.images import ImageMedia
from unirl.tracking.media import read_samples
from unirl.tracking.mirrors import Mirror, Preview, RunInfo
from unirl.tracking.overview import draw_overview, exchanges
from unirl.tracking.run_directory import RunDirectory, RunIdentity, status_of
from unirl.tracking.samples import SampleRow, SampleTable
from unirl.tracking.tables import read_rows
from unirl.tracking.texts import TextMedia
from unirl.tracking.tracker import Tracker
from unirl.types.evaluation import EvalResult
from unirl.types.primitives import ImagePreviews, Texts
from unirl.types.protocols import Stateful
from unirl.types.reward import Answer

CLOCKS = ("time/", "mem/", "throughput/")


def tracker(root: Path, **options) -> Tracker:
    return Tracker(RunDirectory(root, RunIdentity(project="demo", recipe="diffusion/quickstart")), **options)


def evaluation(level: float) -> EvalResult:
    rewards = torch.tensor([0.1, 0.2, 0.3, 0.4]) + level
    return EvalResult(
        sample_ids=("a@0:0", "a@0:1", "b@0:0", "b@0:1"),
        group_ids=("a@0", "a@0", "b@0", "b@0"),
        prompts=("a cat", "a cat", "a dog", "a dog"),
        rewards=rewards,
        components={"shape": rewards / 2},
        media=ImagePreviews(pixels=(torch.arange(4 * 3 * 64).reshape(4, 3, 8, 8) * (1 + level)).to(torch.uint8)),
        track="image",
    )


def samples() -> SampleTable[ImageMedia]:
    rows = tuple(
        SampleRow(sample_id=f"a@0:{j}", group_id="a@0", prompt="a cat \u732b", reward=j / 3, rewards={"x": 1.0})
        for j in range(3)
    )
    return SampleTable(rows, ImageMedia(np.arange(3 * 8 * 8 * 3, dtype=np.uint8).reshape(3, 8, 8, 3)))


def run_steps(target: Tracker, first: int, last: int, crash: int | None = None) -> None:
    """Steps whose metrics depend on the step alone; a new column appears at step 4; evaluation every 3."""
    for step in range(first, last + 1):
        with target.timers.phase("step"):
            target.record({"rollout/reward_mean": step / 7, "train/loss": float("inf") if step == 2 else 0.1 * step})
            target.ledger(step, generated=8, scored=7, dropped=1, reasons={"not_finite": 1})
            if step >= 4:
                target.record({"train/kl": 1 / step})
        if step % 2 == 0:
            target.samples(step, samples())
        if step == crash:
            return
        target.log_step(step)
        if step % 3 == 0:
            target.eval(step, evaluation(step / 10))
        target.flush()


def abandon(target: Tracker, half_line: str) -> None:
    """The process dies: nothing is closed in order, and every file ends in half a line."""
    for table in (target._metrics, target._table, target._eval_table, target._ledger, target._events):
        table.close()
        with open(table.path, "a") as file:
            file.write(half_line)
    target.run._owner.release()


def content(root: Path) -> dict[str, object]:
    """Everything that must be bit-identical, by file; clocks left out."""
    result: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        has_clock = path.parent.name == "writers" or name in ("run.json", "env.json", "heartbeat", "events.jsonl")
        if path.is_file() and not has_clock:
            result[name] = path.read_bytes()
    result["metrics.jsonl"] = [timeless(row) for row in read_rows(root / "metrics.jsonl")]
    with open(root / "metrics.csv", newline="") as file:
        result["metrics.csv"] = [timeless(row) for row in csv.DictReader(file, strict=True)]
    return result


def timeless(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if not name.startswith(CLOCKS)}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("unbroken") / "run"
    with tracker(root) as target:
        target.truncate(-1)
        target.eval(0, evaluation(0.0))
        run_steps(target, 1, 9)
    return root


HALF_JSON, HALF_CSV = '{"step": 6, "tr', "6,0.25"


@pytest.mark.parametrize(
    ("crash", "back", "half_line"),
    [(1, -1, HALF_CSV), (3, -1, ""), (5, 4, HALF_JSON), (8, 4, HALF_CSV), (8, 2, HALF_JSON), (9, 8, "")],
)
def test_killed_and_resumed_run_has_the_files_of_an_unbroken_one(crash, back, half_line, unbroken, tmp_path):
    root = tmp_path / "run"
    first = tracker(root)
    first.truncate(-1)
    first.eval(0, evaluation(0.0))
    run_steps(first, 1, crash, crash=crash)
    abandon(first, half_line)
    with tracker(root) as second:
        second.truncate(back)
        if back < 0:
            second.eval(0, evaluation(0.0))
        run_steps(second, max(back, 0) + 1, 9)
    assert content(root) == content(unbroken)


def test_unbroken_run_has_every_file_and_a_record_of_its_end(unbroken):
    names = set(content(unbroken))
    assert {"metrics.jsonl", "metrics.csv", "eval_metrics.csv", "ledger.jsonl"} <= names
    assert {"samples/step-000008/manifest.jsonl", "samples/step-000008/contact_sheet.png"} <= names
    assert {"eval/step-000009/scores.json", "eval/step-000009/before_after.png"} <= names
    assert "eval/step-000000/before_after.png" not in names
    assert status_of(unbroken).state == "finished"
    events = [row["ev"] for row in read_rows(unbroken / "events.jsonl")]
    assert (events[0], events[-1], events.count("step.end"), events.count("eval.end")) == (
        "run.start", "run.end", 9, 4,
    )  # fmt: skip


def test_rows_of_metrics_are_numbers_under_their_names(unbroken):
    rows = list(read_rows(unbroken / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert rows[0]["rollout/reward_mean"] == 1 / 7
    assert (rows[1]["train/loss"], "train/kl" in rows[2], rows[3]["train/kl"]) == ("inf", False, 0.25)
    assert rows[0]["throughput/samples_per_s"] == 8 / rows[0]["time/step"]
    assert rows[0]["samples/dropped"] == 1
    with open(unbroken / "eval_metrics.csv", newline="") as file:
        means = [float(row["eval/reward_mean"]) for row in csv.DictReader(file)]
    assert means == pytest.approx([0.25, 0.55, 0.85, 1.15])


def test_kept_samples_read_back_exactly_with_their_facts(unbroken):
    folder = unbroken / "samples" / "step-000004"
    rows = list(read_rows(folder / "manifest.jsonl"))
    table = read_samples(rows, folder)
    assert (table.media.images == samples().media.images).all()
    assert [row.file for row in table.rows] == ["p00-s00.webp", "p00-s01.webp", "p00-s02.webp"]
    assert (table.rows[1].prompt, table.rows[1].rewards) == ("a cat \u732b", {"x": 1.0})


def test_scores_of_an_evaluation_hold_every_sample_and_the_metrics(unbroken):
    scores = json.loads((unbroken / "eval" / "step-000003" / "scores.json").read_text())
    assert scores["metrics"]["eval/reward_mean"] == pytest.approx(0.55)
    assert [row["reward"] for row in scores["samples"]] == pytest.approx([0.4, 0.5, 0.6, 0.7])
    assert scores["samples"][0]["rewards"]["shape"] == pytest.approx(0.2)


def test_samples_that_do_not_add_up_are_refused_with_the_numbers(tmp_path):
    with tracker(tmp_path / "r") as target:
        with pytest.raises(ValueError, match=r"step 1 do not add up: generated 8 != scored 6 \+ dropped 1"):
            target.ledger(1, generated=8, scored=6, dropped=1)
        with pytest.raises(ValueError, match="do not add up"):
            target.ledger(1, generated=8, scored=7, dropped=1, reasons={"late": 2})


def test_unknown_metric_and_step_out_of_order_are_refused(tmp_path):
    with tracker(tmp_path / "r") as target:
        with pytest.raises(ValueError, match="Did you mean 'train/loss'"):
            target.record({"train/los": 1.0})
        target.log_step(1)
        with pytest.raises(ValueError, match="step 1 was logged after step 1"):
            target.log_step(1)


def test_position_is_state(tmp_path):
    with tracker(tmp_path / "r") as target:
        assert isinstance(target, Stateful)
        target.log_step(1)
        state = target.state_dict()
        target.log_step(2)
        target.load_state_dict(state)
        target.log_step(2)
    assert [row["step"] for row in read_rows(tmp_path / "r" / "metrics.jsonl")] == [1, 2]


def test_error_in_the_run_is_recorded_and_passed_on(tmp_path):
    with pytest.raises(ZeroDivisionError), tracker(tmp_path / "r"):
        raise ZeroDivisionError("by zero")
    status = status_of(tmp_path / "r")
    assert (status.state, status.code, status.reason) == ("failed", 1, "ZeroDivisionError: by zero")


def test_changes_span_the_whole_run_also_after_a_resume(unbroken, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(unbroken, root)
    with tracker(root) as target:
        target.truncate(8)
        changes = {change.name: (change.start, change.end) for change in target.changes()}
    assert changes["rollout/reward_mean"] == (1 / 7, 8 / 7)
    assert changes["eval/reward_mean"] == pytest.approx((0.25, 0.85))


def test_other_evaluation_prompts_give_a_warning_instead_of_a_wrong_sheet(tmp_path):
    stream = io.StringIO()
    with tracker(tmp_path / "r", console=Console(2, stream, {})) as target:
        target.eval(0, evaluation(0.0))
        other = EvalResult(**{**vars(evaluation(1.0)), "prompts": ("x", "x", "y", "y")})
        target.eval(1, other)
    assert not (tmp_path / "r" / "eval" / "step-000001" / "before_after.png").exists()
    assert "warning: no before/after page" in stream.getvalue()


class Broken(Mirror):
    """A mirror that fails at one of its methods and counts its calls."""

    name = "broken"

    def __init__(self, at: str) -> None:
        self.at, self.calls = at, []

    def _call(self, method: str) -> None:
        self.calls.append(method)
        if method == self.at:
            raise ConnectionError("no route")

    def start(self, about: RunInfo) -> None:
        self._call("start")
        self.about = about

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._call("log")

    def images(self, step: int, key: str, previews: list[Preview]) -> None:
        self._call("images")
        assert all(preview.path.exists() for preview in previews)

    def finish(self, code: int) -> None:
        self._call("finish")


@pytest.mark.parametrize("at", ["start", "log", "images", "finish"])
def test_failing_mirror_is_reported_once_and_never_stops_the_run(at, tmp_path):
    stream, broken, whole = io.StringIO(), Broken(at), Broken("never")
    with tracker(tmp_path / "r", console=Console(9, stream, {}), mirrors=[broken, whole]) as target:
        run_steps(target, 1, 4)
    assert stream.getvalue().count("warning: broken failed") == 1
    assert "ConnectionError: no route" in stream.getvalue()
    assert broken.calls.count(at) == 1
    assert broken.calls[-1] == at
    assert whole.calls.count("log") == 5
    assert whole.calls[-1] == "finish"
    failed = [row for row in read_rows(tmp_path / "r" / "events.jsonl") if row["ev"] == "mirror.failed"]
    assert [(row["mirror"], row["error"]) for row in failed] == [("broken", "ConnectionError: no route")]


def test_mirror_learns_where_a_resumed_run_continues_and_no_secret(tmp_path):
    mirror = Broken("never")
    about = RunInfo(root=tmp_path, project="demo", run_id="r", config={"reward": {"api_key": "canary"}})
    with tracker(tmp_path / "r", mirrors=[mirror], about=about) as target:
        target.truncate(3)
        run_steps(target, 4, 4)
    assert mirror.about.resumed_step == 3
    assert "canary" not in str(mirror.about)


def folders(root: Path, kind: str) -> list[str]:
    return sorted(path.name for path in (root / kind).iterdir())


@pytest.mark.parametrize(("crash", "back"), [(5, 4), (8, 2), (9, 8)])
def test_only_the_newest_samples_and_the_first_evaluation_remain_also_after_a_crash(crash, back, tmp_path):
    whole, root = tmp_path / "whole", tmp_path / "run"
    with tracker(whole, keep_samples=2) as target:
        target.truncate(-1)
        target.eval(0, evaluation(0.0))
        run_steps(target, 1, 9)
    first = tracker(root, keep_samples=2)
    first.truncate(-1)
    first.eval(0, evaluation(0.0))
    run_steps(first, 1, crash, crash=crash)
    abandon(first, "")
    with tracker(root, keep_samples=2) as second:
        second.truncate(back)
        run_steps(second, back + 1, 9)
    assert folders(root, "samples") == folders(whole, "samples") == ["step-000006", "step-000008"]
    assert folders(root, "eval") == folders(whole, "eval") == ["step-000000", "step-000006", "step-000009"]
    assert [row["step"] for row in read_rows(root / "metrics.jsonl")] == list(range(1, 10))
    with tracker(tmp_path / "all") as target:
        run_steps(target, 1, 9)
    assert len(folders(tmp_path / "all", "samples")) == 4


def evaluation_of_texts(right: int) -> EvalResult:
    """Two prompts of two samples each, of which the first `right` are right."""
    answers = tuple(Answer(i < right, "7" if i < right else "8") for i in range(4))
    fields = {name: value for name, value in vars(evaluation(0.0)).items() if name != "media"}
    return EvalResult(
        **{**fields, "answers": answers, "facts": tuple({"tokens": i} for i in range(4))},
        media=Texts(texts=[f"so it is {answer.text}\n```" for answer in answers]),
    )


def steps_of_texts(target: Tracker, first: int, last: int) -> None:
    for step in range(first, last + 1):
        target.record({"rollout/reward_mean": 0.5, "samples/tokens": 40.0})
        rows = tuple(SampleRow(sample_id=f"a:{i}", group_id="a", prompt="?", reward=i / 2) for i in range(2))
        target.samples(step, SampleTable(rows, TextMedia(("one", "two \ud800"))))
        with target.timers.phase("step"), target.timers.phase("generate"):
            pass
        target.log_step(step)
        target.eval(step, evaluation_of_texts(step))
        target.flush()


def test_samples_and_evaluations_of_text_have_their_pages_and_come_back_after_a_kill(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    stream = io.StringIO()
    with tracker(whole, console=Console(3, stream, {})) as target:
        target.eval(0, evaluation_of_texts(0))
        steps_of_texts(target, 1, 3)
        changes = {change.name: (change.start, change.end) for change in target.changes()}
        pages = dict(target.pages())
    assert changes["eval/avg@2"] == (0.0, 0.75) and changes["eval/pass@2"] == (0.0, 1.0)
    assert "eval after step 3: reward 0.250 (standard error 0.100), avg@2 0.75, pass@2 1.00, maj@2 0.75" in (
        stream.getvalue()
    )
    assert pages["before/after"] == str(whole / "eval/step-000003/before_after.md")
    assert pages["samples"] == str(whole / "samples/step-000003")
    names = {name for name in content(whole) if "step-000003" in name}
    assert names == {
        *(f"eval/step-000003/{name}" for name in ("scores.json", "samples.md", "before_after.md")),
        *(f"samples/step-000003/{name}" for name in ("manifest.jsonl", "samples.md")),
    }
    row = next(read_rows(whole / "metrics.jsonl"))
    assert row["throughput/tokens_per_s"] == 40.0 / row["time/step"]
    assert row["throughput/generated_tokens_per_s"] == 40.0 / row["time/generate"]

    first = tracker(killed)
    first.eval(0, evaluation_of_texts(0))
    steps_of_texts(first, 1, 2)
    abandon(first, HALF_JSON)
    with tracker(killed) as second:
        second.truncate(1)
        steps_of_texts(second, 2, 3)
    assert content(killed) == content(whole)


def test_pictures_before_and_texts_after_are_not_set_side_by_side(tmp_path):
    stream = io.StringIO()
    with tracker(tmp_path / "r", console=Console(1, stream, {})) as target:
        target.eval(0, evaluation(0.0))
        target.eval(1, evaluation_of_texts(1))
    assert "warning: no before/after page" in stream.getvalue()
    assert not list(tmp_path.glob("r/eval/*/before_after.*"))


@pytest.mark.parametrize("code", [0, 130])
def test_every_run_of_the_console_ends_with_its_curve_beside_the_newest_sheet(code, unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path / "run")
    target = tracker(tmp_path / "run", console=Console(9, io.StringIO(), {}))
    if code == 0:
        target.summary("run")
    target.finish(code)
    with Image.open(max(unbroken.glob("eval/step-*")) / "before_after.png") as sheet:
        size = sheet.size
    with Image.open(tmp_path / "run" / "overview.png") as overview:
        assert overview.size == (size[0] + 720, max(size[1], 420))


def test_an_overview_that_cannot_be_drawn_is_a_warning(unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path / "run")
    (max((tmp_path / "run").glob("eval/step-*")) / "before_after.png").write_bytes(b"no image")
    stream = io.StringIO()
    with tracker(tmp_path / "run", console=Console(9, stream, {})) as target:
        target.summary("run")
    assert "overview.png was not drawn" in stream.getvalue()
    assert status_of(tmp_path / "run").state == "finished"


@pytest.mark.parametrize("error", [SyntaxError("broken PNG file"), Image.DecompressionBombError("too large")])
def test_whatever_stops_the_drawing_the_end_is_recorded_and_the_console_closed(error, unbroken, tmp_path, monkeypatch):
    def draw(root):
        states.append(status_of(root).state)
        raise error

    states: list[str] = []
    monkeypatch.setattr("unirl.tracking.tracker.draw_overview", draw)
    shutil.copytree(unbroken, tmp_path / "run")
    console = Console(9, io.StringIO(), {}, log=tmp_path / "console.log")
    target = tracker(tmp_path / "run", console=console)
    target.finish(130, "interrupted")
    assert states == ["stopped"] and console._log_file.closed
    other = tracker(tmp_path / "run", console=Console(9, stream := io.StringIO(), {}))
    other.summary("run")
    other.finish()
    assert f"overview.png was not drawn ({type(error).__name__}" in stream.getvalue()


def test_a_run_without_a_step_has_no_overview(tmp_path):
    with tracker(tmp_path / "run") as target:
        target.truncate(-1)
    assert draw_overview(tmp_path / "run") is None


def test_an_overview_of_texts_shows_the_prompts_whose_reward_changed_most(tmp_path):
    with tracker(tmp_path / "run") as target:
        target.record({"rollout/reward_mean": 0.5})
        target.eval(0, evaluation_of_texts(0))
        target.log_step(1)
        target.eval(1, replace(evaluation_of_texts(4), rewards=torch.tensor([0.1, 0.2, 0.3, 0.9])))
    first, second = exchanges(tmp_path / "run", tmp_path / "run" / "eval" / "step-000001")
    assert (first.prompt.prompt, second.prompt.prompt) == ("a dog", "a cat")
    heading, text = first.responses[1]
    assert heading == "after: reward 0.90" and text.startswith("so it is 7")
    assert draw_overview(tmp_path / "run") is not None
