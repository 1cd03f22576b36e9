"""Runs that write checkpoints while they train: equal results, one save at a time, and failures that stop them."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from tests.run_files import metrics_of
from tests.trainer.test_loop import checkpoints_of, run, trainer_of, weights_of
from unirl.config.errors import Preempted, StorageError
from unirl.train.backend import remote, writer
from unirl.train.backend.checkpoint import verify
from unirl.train.backend.remote import RemoteCheckpoints

BACKGROUND = ("save_interval=1", "checkpoint.asynchronous=true")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    run(folder, "save_interval=1", "num_rollouts=3")
    return folder


def test_a_run_that_saves_in_the_background_equals_one_that_does_not(plain: Path, tmp_path: Path) -> None:
    run(tmp_path, *BACKGROUND, "num_rollouts=3")
    assert checkpoints_of(tmp_path) == checkpoints_of(plain)
    assert metrics_of(tmp_path) == metrics_of(plain)
    for step in (1, 2, 3):
        assert weights_of(tmp_path, step) == weights_of(plain, step)
        assert verify(tmp_path / f"checkpoints/checkpoint-{step:06d}") == []
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["ev"] == "ckpt.commit"] == [1, 2, 3]


def held_back(monkeypatch, write) -> threading.Event:
    """Runs `write` for each file, after the event is set."""
    goes_on = threading.Event()
    original = writer.write_hashed

    def slow(*args):
        assert goes_on.wait(60)
        write()
        return original(*args)

    monkeypatch.setattr(writer, "write_hashed", slow)
    return goes_on


def test_the_next_step_runs_while_a_checkpoint_is_written_and_the_next_save_waits(monkeypatch, tmp_path) -> None:
    goes_on = held_back(monkeypatch, lambda: None)
    with trainer_of(tmp_path, *BACKGROUND) as trainer:
        save = trainer.state.save
        seen = []

        def watched(*args):
            seen.append(checkpoints_of(tmp_path))
            if trainer.state.step == 2:
                threading.Timer(0.5, goes_on.set).start()
            save(*args)
            seen.append(checkpoints_of(tmp_path))

        monkeypatch.setattr(trainer.state, "save", watched)
        trainer.train()
    # The second step has ended before the first checkpoint is there. The second save returns after that.
    assert seen[:3] == [[], [], []] and seen[3][0] == "checkpoint-000001"
    assert checkpoints_of(tmp_path) == ["checkpoint-000001", "checkpoint-000002", "checkpoint-final"]


def test_a_failure_of_the_writer_stops_the_run_at_the_next_step_by_name(monkeypatch, tmp_path: Path) -> None:
    def full() -> None:
        if failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    failing: list[int] = []
    held_back(monkeypatch, full).set()
    with trainer_of(tmp_path, *BACKGROUND, "num_rollouts=4") as trainer:
        save = trainer.state.save

        def second_fails(*args):
            failing.extend([1] * (trainer.state.step == 2))
            save(*args)

        monkeypatch.setattr(trainer.state, "save", second_fails)
        with pytest.raises(StorageError, match=r"checkpoint-000002 could not be saved.*checkpoint-000001 is untouched"):
            trainer.train()
        assert trainer.state.step in (2, 3)
    assert checkpoints_of(tmp_path) == ["checkpoint-000001"]
    assert not list((tmp_path / "checkpoints").glob(".staging-*"))


def test_a_signal_and_an_error_wait_for_the_write(monkeypatch, plain: Path, tmp_path: Path) -> None:
    goes_on = held_back(monkeypatch, lambda: None)
    with trainer_of(tmp_path / "signal", *BACKGROUND, "num_rollouts=3") as trainer, pytest.raises(Preempted):
        threading.Timer(1.0, goes_on.set).start()
        trainer.request_stop(15)
        trainer.train()
    assert checkpoints_of(tmp_path / "signal") == ["checkpoint-000001"]
    goes_on.clear()
    with trainer_of(tmp_path / "error", *BACKGROUND, "num_rollouts=3") as trainer:
        produce = trainer.produce

        def fails(step: int):
            if step == 1:
                threading.Timer(1.0, goes_on.set).start()
                raise RuntimeError("a bug")
            return produce(step)

        monkeypatch.setattr(trainer, "produce", fails)
        with pytest.raises(RuntimeError, match="a bug"):
            trainer.train()
    assert weights_of(tmp_path / "error", 1) == weights_of(plain, 1)
    assert verify(tmp_path / "error/checkpoints/checkpoint-000001") == []


@pytest.mark.parametrize("asynchronous", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_run_continues_from_its_copies_at_a_url_bit_for_bit(asynchronous: str, plain: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/disk2"
    settings = ("save_interval=1", f"checkpoint.asynchronous={asynchronous}", f"checkpoint.copy_to={url}")
    run(tmp_path / "lost/run", *settings)
    assert RemoteCheckpoints(url).checkpoints()[0].step == 2
    run(tmp_path / "other/run", *settings, f"resume={url}", "num_rollouts=3")
    assert weights_of(tmp_path / "other/run", 3) == weights_of(plain, 3)
    assert metrics_of(tmp_path / "other/run") == metrics_of(plain)[2:]


def test_a_copy_that_fails_warns_and_only_the_last_one_ends_the_run(monkeypatch, tmp_path: Path) -> None:
    failing = {1}
    copy = RemoteCheckpoints.copy

    def fails(self, folder: Path) -> None:
        if int(folder.name[-6:]) in failing:
            raise StorageError(f"no connection for {folder.name}")
        copy(self, folder)

    monkeypatch.setattr(RemoteCheckpoints, "copy", fails)
    run(tmp_path / "a", *BACKGROUND, "checkpoint.copy_to=memory://a")
    events = [json.loads(line) for line in (tmp_path / "a/events.jsonl").read_text().splitlines()]
    [warning] = [event["text"] for event in events if event["ev"] == "warning"]
    assert warning == "checkpoint-000001 was not copied: no connection for checkpoint-000001"
    failing.add(2)
    with pytest.raises(StorageError, match="no connection for checkpoint-000002"):
        run(tmp_path / "b", *BACKGROUND, "checkpoint.copy_to=memory://b")
    assert verify(tmp_path / "b/checkpoints/checkpoint-000002") == []


def test_a_place_of_copies_that_cannot_be_written_is_refused_before_anything_is_made(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(remote, "PAUSE_S", 0.0)
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StorageError, match="taken/run cannot be written to"):
        run(tmp_path / "run", f"checkpoint.copy_to=file://{tmp_path}/taken/run")
    assert not (tmp_path / "run").exists()
