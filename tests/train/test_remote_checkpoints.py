"""Copies of checkpoints at a URL: whole or absent, pruned like those on the disk, fetched with their manifest."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from tests.train.test_checkpoint_store import save
from unirl.config.errors import CheckpointError, DependencyError, InvalidValueError, StorageError
from unirl.train.backend import remote
from unirl.train.backend.checkpoint import CheckpointStore, verify
from unirl.train.backend.remote import RemoteCheckpoints
from unirl.trainer.resume import resume_point


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/second disk/run"
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket/run"


def saved(tmp_path: Path, *steps: int) -> list[Path]:
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=0)
    for step in steps:
        save(store, step)
    return [tmp_path / f"run/checkpoints/checkpoint-{step:06d}" for step in steps]


def steps_at(url: str) -> list[int]:
    return [each.step for each in RemoteCheckpoints(url).checkpoints()]


def test_a_run_resumes_from_a_url_with_the_bytes_that_were_saved(url: str, tmp_path: Path) -> None:
    copies = RemoteCheckpoints(url)
    copies.check()
    older, newer = saved(tmp_path, 1, 2)
    copies.copy(older)
    copies.copy(newer)
    here = CheckpointStore(tmp_path / "machine 2/run/checkpoints")
    for place, step in ((url, 2), (f"{url}/checkpoint-000001", 1)):
        checkpoint = resume_point(here, place).checkpoint
        assert checkpoint is not None and checkpoint.step == step and verify(checkpoint.path) == []
        original = older if step == 1 else newer
        assert {p.name: p.read_bytes() for p in checkpoint.path.rglob("*") if p.is_file()} == {
            p.name: p.read_bytes() for p in original.rglob("*") if p.is_file()
        }


def test_only_the_newest_copies_and_milestones_remain(url: str, tmp_path: Path) -> None:
    copies = RemoteCheckpoints(url, keep=2, keep_every=3)
    for folder in saved(tmp_path, *range(1, 9)):
        copies.copy(folder)
    assert steps_at(url) == [8, 7, 6, 3]


def test_a_copy_that_stopped_half_way_does_not_count_and_a_damaged_one_is_passed_over(url, tmp_path, monkeypatch):
    copies = RemoteCheckpoints(url)
    first, second = saved(tmp_path, 1, 2)
    copies.copy(first)
    files = remote.sealed_files(second)

    def cut_off(folder: Path):
        yield files[0]
        raise InterruptedError("the machine is gone")

    monkeypatch.setattr(remote, "PAUSE_S", 0.0)
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="cannot be written to: InterruptedError"):
        patch.setattr(remote, "sealed_files", cut_off)
        copies.copy(second)
    assert steps_at(url) == [1]
    copies.copy(second)
    assert steps_at(url) == [2, 1]
    where, name = copies.files, f"{copies.root}/checkpoint-000002/{files[0].relative_to(second).as_posix()}"
    where.pipe_file(name, b"other")
    assert RemoteCheckpoints(url).fetch_newest(tmp_path / "cache").name == "checkpoint-000001"
    where.pipe_file(name.replace("000002", "000001"), b"other")
    with pytest.raises(CheckpointError, match="no valid checkpoint at this URL"):
        RemoteCheckpoints(url).fetch_newest(tmp_path / "other cache")


def test_a_save_over_an_older_copy_replaces_it_and_is_never_mixed_with_it(url: str, tmp_path: Path) -> None:
    copies = RemoteCheckpoints(url)
    [folder] = saved(tmp_path, 4)
    copies.copy(folder)
    copies.files.pipe_file(f"{copies.root}/checkpoint-000004/left over", b"of an earlier attempt")
    copies.copy(folder)
    assert verify(RemoteCheckpoints(url).fetch_newest(tmp_path / "cache")) == []


def test_a_url_that_cannot_be_used_is_refused_by_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_S", 0.0)
    with pytest.raises(InvalidValueError, match=r"checkpoint.copy_to=nowhere://x is not a URL of fsspec"):
        RemoteCheckpoints("nowhere://x")
    with pytest.raises(DependencyError, match="needs gcsfs"):
        RemoteCheckpoints("gs://bucket/run")
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StorageError, match="taken/run cannot be written to"):
        RemoteCheckpoints(f"file://{tmp_path}/taken/run").check()
