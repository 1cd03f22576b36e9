"""Files that are written in the background: equal to those written at once, whole when they have a receipt."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.train.ranks import run_ranks
from tests.train.test_sharded_backend import backend_of, update
from unirl.train.backend import writer
from unirl.train.backend.manifest import has_receipt, problems, read_manifest, seal
from unirl.train.backend.state import is_written
from unirl.train.backend.writer import DTYPES, FileWriter, Piece
from unirl.types.progress import Heartbeat, reporting_to


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {f"{name} x": torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype, name in DTYPES.items()}
    return {**values, "scalar": torch.tensor(1.5), "none": torch.empty(0, 4), "cut": torch.arange(12).view(3, 4).T}


def test_files_equal_those_of_safetensors_byte_for_byte(tmp_path: Path) -> None:
    values = tensors()
    save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "theirs")
    expected = (tmp_path / "theirs").read_bytes()
    writer, files = FileWriter(), {"ours": {name: Piece(value) for name, value in values.items()}}
    writer.write(tmp_path, files)
    assert (tmp_path / "ours").read_bytes() == expected
    (tmp_path / "ours").unlink()
    writer.begin(tmp_path, files)
    for value in values.values():
        value.fill_(1)  # training goes on
    writer.finish(wait=True)
    assert (tmp_path / "ours").read_bytes() == expected and has_receipt(tmp_path / "ours")
    (tmp_path / "theirs").unlink()
    assert seal(tmp_path, 1).files[0].sha256 == hashlib.sha256(expected).hexdigest()
    assert problems(tmp_path) == [] and not has_receipt(tmp_path / "ours")


def test_a_file_that_could_not_be_written_has_no_receipt_and_its_error_is_raised_once(tmp_path: Path) -> None:
    writer = FileWriter()
    writer.begin(tmp_path / "missing", {"a": {"x": Piece(torch.ones(2))}})
    with pytest.raises(FileNotFoundError):
        writer.finish(wait=True)
    writer.finish(wait=True)


def save_twice(folder: str) -> dict[str, object]:
    backend = backend_of()
    update(backend, 0)
    backend.save(f"{folder}/at once")
    backend.save(f"{folder}/later", in_background=True)
    update(backend, 1)
    backend.finish_save(wait=True)
    return {}


@pytest.mark.parametrize("num", [1, 2])
def test_a_save_in_the_background_holds_what_a_save_at_once_holds(num: int, tmp_path: Path) -> None:
    run_ranks(num, save_twice, str(tmp_path))
    at_once, later = tmp_path / "at once", tmp_path / "later"
    assert is_written(later) and not is_written(at_once) and not is_written(tmp_path)
    manifest = seal(later, 1)
    assert problems(later) == [] and read_manifest(later) == manifest
    assert {entry.name for entry in manifest.files} == {path.name for path in at_once.iterdir()}
    for entry in manifest.files:
        assert (later / entry.name).read_bytes() == (at_once / entry.name).read_bytes()


def test_waiting_for_a_write_is_progress_only_while_it_goes_on(tmp_path: Path, monkeypatch) -> None:
    original, goes_on, beat = writer.write_hashed, threading.Event(), Heartbeat()

    def slow(path, header, data, count):
        for _ in range(3):
            count()
            time.sleep(0.1)
        goes_on.wait(0.5)  # hangs
        return original(path, header, data, count)

    monkeypatch.setattr(writer, "write_hashed", slow)
    monkeypatch.setattr(writer, "PROGRESS_S", 0.05)
    files = FileWriter()
    with reporting_to(beat):
        files.begin(tmp_path, {"a": {"x": Piece(torch.ones(2))}})
        files.finish(wait=True)
    assert 2 <= beat.count <= 4  # three chunks, and the one after the pause
