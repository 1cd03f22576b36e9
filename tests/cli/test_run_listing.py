"""`unirl runs` and `unirl tail`: what they say about runs in each state, from the files alone."""

import json
import threading
from pathlib import Path

import pytest

from unirl.cli.main import main
from unirl.cli.tail import follow
from unirl.tracking.run_directory import RunDirectory, RunIdentity
from unirl.tracking.run_files import RunFiles
from unirl.tracking.tables import JsonLines, read_rows


def started(root: Path, steps: int = 0) -> RunDirectory:
    """A run with some steps, under way."""
    run = RunDirectory(root, RunIdentity(project="p", recipe="diffusion/quickstart"))
    run.write_config("", "seed: 1\nnum_rollouts: 9\nevaluation:\n  num_rollouts: 5\n")
    metrics = JsonLines(run.metrics)
    for step in range(1, steps + 1):
        metrics.append({"step": step, "rollout/reward_mean": step / 10, "padding": "x" * 500})
    metrics.close()
    (root / "logs" / "console.log").write_text("".join(f"step {step}/9\n" for step in range(1, steps + 1)))
    return run


@pytest.fixture
def runs(tmp_path):
    """A finished, a stopped, a failed, a lost and a running run, oldest first."""
    for name, code in {"finished": 0, "stopped": 130, "failed": 5}.items():
        started(tmp_path / "p" / name, steps=2).close(code)
    started(tmp_path / "p" / "lost")._owner.release()
    running = started(tmp_path / "p" / "running", steps=400)
    started(tmp_path / "p" / "finished" / "drawn" / "latest").close(0)
    yield tmp_path
    running.close(0)


def test_runs_are_listed_with_state_steps_and_reward_newest_first(runs, capsys):
    assert main(["runs", str(runs), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in rows] == ["running", "lost", "failed", "stopped", "finished"]
    assert (rows[0]["steps"], rows[0]["total_steps"]) == (400, 9)
    assert (rows[0]["first_reward"], rows[0]["last_reward"]) == (0.1, 40.0)
    assert (rows[1]["steps"], rows[1]["first_reward"]) == (0, None)


def test_the_table_of_runs_fits_the_terminal_and_explains_its_states(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["runs", str(runs / "p")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith(("failed", "stopped "))] == [
        ["failed", "(5)", "2/9"],
        ["stopped", "2/9", "0.100"],
    ]
    assert any("lost: its process is gone" in line for line in lines)
    assert lines[-1] == "Continue one from its last checkpoint: see `resume` in RUN/logs/console.log"
    paths = [line for line in lines if str(runs) in line]
    assert len(paths) == 5
    assert max(len(line) for line in lines if line not in paths) <= 80


def test_a_folder_without_runs_says_how_to_start_one_and_an_unknown_one_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "unirl quickstart" in capsys.readouterr().out
    assert main(["runs", "elsewhere"]) == 4
    assert main(["tail"]) == 4
    assert main(["tail", "elsewhere"]) == 4


def test_the_last_row_is_found_without_reading_the_file_and_half_a_line_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    for rows in (1, 2, 3000):
        path.write_text("".join(json.dumps({"step": i, "pad": "x" * 40}) + "\n" for i in range(rows)) + '{"step": 7')
        every = list(read_rows(path))
        assert RunFiles(tmp_path).ends("rows.jsonl") == (every[0], every[-1])
    path.write_text("")
    assert RunFiles(tmp_path).ends("rows.jsonl") == ({}, {})


def test_tail_of_a_finished_run_prints_its_last_lines_and_ends(runs, capsys):
    assert main(["tail", str(runs / "p" / "finished"), "-n", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "step 2/9\n"
    assert shown.err.strip() == f"unirl: {runs / 'p' / 'finished'} finished"


def test_tail_follows_a_run_until_it_ends_and_misses_no_line(tmp_path):
    run = started(tmp_path, steps=2)
    log = tmp_path / "logs" / "console.log"
    lines = follow(log, tmp_path, 1, poll_s=0.01)
    assert next(lines) == "step 2/9\n"
    with log.open("a") as file:
        file.write("step 3/9\n")
    assert next(lines) == "step 3/9\n"

    def end() -> None:
        with log.open("a") as file:
            file.write("step 4/9\nthe end\n")
        run.close(0)

    ending = threading.Timer(0.1, end)
    ending.start()
    assert list(lines) == ["step 4/9\n", "the end\n"]
    ending.join()
