"""The run directory: identity, who is writing, how it ended, and what must not be in it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.tracking.owner import RunDirectoryError
from unirl.tracking.run_directory import (
    RunDirectory,
    RunIdentity,
    allowed_environment,
    default_root,
    latest_run,
    read_record,
    status_of,
)
from unirl.types.secrets import redact

IDENTITY = RunIdentity(project="demo", recipe="diffusion/quickstart", argv=("unirl", "train"), seed=42)


def test_run_directory_has_the_files_of_the_design(tmp_path):
    run = RunDirectory(tmp_path / "r", IDENTITY)
    run.write_config("bundle: 1\n", "bundle: 1\nseed: 42\n")
    names = {path.name for path in run.root.iterdir()}
    assert names == {"run.json", "heartbeat", "writers", "env.json", "config", "logs", "samples", "eval", "checkpoints"}
    assert (run.root / "config" / "resolved.yaml").read_text() == "bundle: 1\nseed: 42\n"
    record = read_record(run.root)
    assert (record["recipe"], record["seed"], record["determinism"]) == ("diffusion/quickstart", 42, "bitwise")
    run.close(0)


def test_status_is_derived_from_lock_process_and_exit_record(tmp_path):
    run = RunDirectory(tmp_path / "r", IDENTITY)
    assert status_of(run.root).state == "running"
    os.utime(run.root / "heartbeat", (0, 0))
    assert status_of(run.root).state == "stalled"
    for code, state in ((0, "finished"), (130, "stopped"), (75, "stopped"), (9, "failed")):
        run.close(code, "why")
        assert (status_of(run.root).state, status_of(run.root).code) == (state, code)
    assert status_of(tmp_path / "absent").state == "lost"


HOLD = """
import sys
from unirl.tracking.run_directory import RunDirectory, RunIdentity
run = RunDirectory(sys.argv[1], RunIdentity(project="demo", recipe="a/b"))
print("ready", flush=True)
sys.stdin.readline()
"""


def test_second_writer_is_refused_until_the_first_is_dead(tmp_path):
    root = tmp_path / "r"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    with child:
        child.stdout.readline()
        assert status_of(root).state == "running"
        with pytest.raises(RunDirectoryError, match=rf"written by process {child.pid} on .*another run\.dir"):
            RunDirectory(root, IDENTITY)
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert status_of(root).state == "lost"
    created = read_record(root)["created"]
    run = RunDirectory(root, IDENTITY)
    record = read_record(root)
    assert (len(record["sessions"]), record["created"]) == (2, created)
    run.close(0)


def test_folder_that_cannot_be_made_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"run\.dir=.*cannot be created: .*OUTPUT_DIR"):
        RunDirectory(tmp_path / "file" / "r", IDENTITY)


def test_damaged_run_record_is_named_and_replaced_by_a_new_run(tmp_path):
    (tmp_path / "run.json").write_text('{"schema')
    with pytest.raises(RunDirectoryError, match=r"is .* a run directory\?"):
        read_record(tmp_path)
    RunDirectory(tmp_path, IDENTITY).close(0)
    assert status_of(tmp_path).state == "finished"


def test_default_place_is_made_of_project_time_recipe_and_four_letters():
    root = default_root("demo", "diffusion/quickstart")
    assert re.fullmatch(r"runs/demo/\d{8}-\d{6}-diffusion-quickstart-[a-z]{4}", root.as_posix())
    assert default_root("demo", "a/b", name="mine") == Path("runs/demo/mine")
    for name in ("../x", "a/b", "", ".hidden"):
        with pytest.raises(RunDirectoryError, match=r"run\.name"):
            default_root("demo", "a/b", name=name)


def test_latest_run_of_a_recipe_is_the_newest_of_that_recipe(tmp_path):
    for name, recipe in (("one", "a/b"), ("two", "a/b"), ("three", "c/d")):
        run = RunDirectory(tmp_path / "demo" / name, RunIdentity(project="demo", recipe=recipe))
        run.note(created={"one": "2026-01-02", "two": "2026-01-01", "three": "2026-01-03"}[name])
        run.close(0)
    (tmp_path / "demo" / "broken").mkdir()
    (tmp_path / "demo" / "broken" / "run.json").write_text("{")
    assert latest_run("demo", "a/b", base=tmp_path) == tmp_path / "demo" / "one"
    assert latest_run("demo", "x/y", base=tmp_path) is None


SECRET = "canary4f9a17c2e8b3"
HIDDEN = [
    f"https://user:{SECRET}@example.org/x",
    f"api_key: {SECRET}",
    f"backend.token={SECRET}",
    f'"hf_token": "{SECRET}"',
    f"password = '{SECRET}'",
    f"+reward.auth.access_key={SECRET}",
    f"reward: {{url: x, secret: {SECRET}}}",
    f"hf_{SECRET}AAAA",
    f"sk-{SECRET}-{SECRET}",
]


@pytest.mark.parametrize("text", HIDDEN)
def test_secrets_are_masked_wherever_texts_are_written(text):
    assert SECRET not in redact(text)
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize("text", ["max_new_tokens: 512", "tokenizer: clip", "token: null", "key: a", "https://a.b/c@d"])
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


def test_no_secret_of_environment_command_line_or_recipe_reaches_the_folder(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_VARIABLE"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("HF_ENDPOINT", f"https://me:{SECRET}@mirror.example.org")
    identity = RunIdentity(project="demo", recipe="a/b", argv=("unirl", "train", f"reward.token={SECRET}"))
    run = RunDirectory(tmp_path / "r", identity)
    run.write_config(f"reward: {{api_key: {SECRET}}}\n", f"reward:\n  api_key: {SECRET}\n")
    run.close(1, f"could not reach https://me:{SECRET}@host/")
    texts = {path: path.read_text() for path in run.root.rglob("*") if path.is_file()}
    assert [path.name for path, text in texts.items() if SECRET in text] == []
    assert "mirror.example.org" in texts[run.root / "env.json"]


def test_environment_is_recorded_by_allow_list():
    recorded = allowed_environment({"DATA_PATH": "a.txt", "NCCL_DEBUG": "INFO", "USER": "me", "PATH": "/bin"})
    assert recorded == {"DATA_PATH": "a.txt", "NCCL_DEBUG": "INFO"}


def test_step_folders_are_cut_back(tmp_path):
    run = RunDirectory(tmp_path / "r", IDENTITY)
    for step in (0, 5, 10):
        (run.fresh_step_folder("samples", step) / "x").write_text("x")
        run.fresh_step_folder("eval", step)
    (run.root / "samples" / "notes").mkdir()
    run.cut_step_folders(5)
    assert sorted(path.name for path in (run.root / "samples").iterdir()) == ["notes", "step-000000", "step-000005"]
    assert not list(run.fresh_step_folder("samples", 5).iterdir())
    run.close(0)
    assert json.loads((run.root / "run.json").read_text())["exit"]["code"] == 0
