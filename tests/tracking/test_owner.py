"""One process at a time writes a run directory, also where the file system has no locks and the other one is paused."""

from __future__ import annotations

import json
import os
import re

import pytest

from scripts.attack_run_directory import starts, woken_owner
from unirl.tracking import owner
from unirl.tracking.owner import OwnershipLostError, RunDirectoryError, newest_writer
from unirl.tracking.run_directory import RunDirectory, RunIdentity, read_record, status_of
from unirl.tracking.tables import JsonLines, read_rows
from unirl.train.backend.checkpoint import CheckpointStore

IDENTITY = RunIdentity(project="demo", recipe="diffusion/quickstart")


@pytest.mark.parametrize("has_locks", [True, False], ids=["locks", "no-locks"])
def test_of_twelve_starts_ten_milliseconds_apart_one_writes_and_the_others_name_it(tmp_path, has_locks):
    result = starts(tmp_path / "r", count=12, gap_s=0.01, has_locks=has_locks)
    [pid] = result.writers
    named = re.compile(rf"written by (process {pid} on \S+, started at|a process that starts).*another run\.dir")
    assert [text for text in result.refusals if not named.search(text)] == []
    assert len(read_record(tmp_path / "r")["sessions"]) == 1


def test_an_owner_that_wakes_after_a_takeover_publishes_nothing(tmp_path):
    woken = woken_owner(tmp_path / "r")
    assert woken.changed == []
    assert set(woken.refusals) == {"checkpoint under way", "checkpoint", "state", "config", "samples", "end"}
    for text in woken.refusals.values():
        assert f"was taken over by process {os.getpid()} on" in text and "unirl tail" in text


def test_an_owner_paused_between_the_last_check_and_the_rename_cannot_publish(tmp_path):
    run = RunDirectory(tmp_path / "r", IDENTITY)
    calls = []

    def check() -> None:
        run.fence.check()
        calls.append("")
        if len(calls) == LAST_CHECK:  # here the process is paused, and another one takes over
            (run.root / "writers" / "000002").write_text(json.dumps({"pid": 1, "host": "b", "started": "now"}))
            CheckpointStore(run.checkpoints).collect()

    store = CheckpointStore(run.checkpoints, check_writer=check)
    with pytest.raises(OwnershipLostError, match="taken over by process 1 on b"), store.stage(1) as folder:
        (folder / "weights").write_text("old")
    assert CheckpointStore(run.checkpoints).checkpoints() == []
    with pytest.raises(OwnershipLostError):
        run.close(0)


LAST_CHECK = 3
"""At the beginning of a save, when it removes what dead processes left, and before the rename."""


def test_rows_of_a_woken_owner_go_to_a_file_that_nobody_reads(tmp_path):
    old = JsonLines(tmp_path / "metrics.jsonl")
    old.append({"step": 1})
    old.sync()
    new = JsonLines(tmp_path / "metrics.jsonl")
    for table, step in ((old, 99), (new, 2)):
        table.append({"step": step})
        table.sync()
        table.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_reader_that_holds_the_lock_for_a_moment_refuses_no_writer(tmp_path):
    RunDirectory(tmp_path / "r", IDENTITY).close(1)
    descriptor = os.open(tmp_path / "r" / "heartbeat", os.O_RDWR)
    assert owner._lock(descriptor)
    timer = owner.threading.Timer(0.2, os.close, [descriptor])
    timer.start()
    RunDirectory(tmp_path / "r", IDENTITY).close(0)
    timer.join()


def test_a_writer_on_another_host_counts_as_alive_until_its_heartbeat_is_a_minute_old(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "r", IDENTITY)
    run._owner._stop.set()  # the process is killed: no heartbeat, no record of its end
    os.close(run._owner.descriptor)
    monkeypatch.setattr(owner.socket, "gethostname", lambda: "other")
    with pytest.raises(RunDirectoryError, match=r"If it is dead, its run can be continued 60 s after"):
        RunDirectory(run.root, IDENTITY)
    os.utime(run.root / "heartbeat", (0, 0))
    second = RunDirectory(run.root, IDENTITY)
    newest = newest_writer(run.root)
    assert newest is not None and (newest.number, newest.pid) == (2, os.getpid())
    second.close(0)
    assert status_of(run.root).state == "finished"


def test_a_run_that_ended_in_order_on_another_host_continues_at_once(tmp_path, monkeypatch):
    RunDirectory(tmp_path / "r", IDENTITY).close(75, "preempted")
    monkeypatch.setattr(owner.socket, "gethostname", lambda: "other")
    RunDirectory(tmp_path / "r", IDENTITY).close(0)
