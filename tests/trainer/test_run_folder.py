"""A run holds its folder from its first file to its end, and its record says how its start ended."""

import pytest

from unirl.config.errors import InvalidValueError, StoppedAtStart
from unirl.config.load import load
from unirl.tracking.console import Console
from unirl.tracking.run_directory import read_record, status_of
from unirl.trainer.run_folder import open_tracker


@pytest.fixture
def recipe():
    return load("diffusion/quickstart", [])


def test_a_started_run_holds_its_folder_and_has_no_end_yet(recipe, tmp_path):
    tracker = open_tracker(recipe, tmp_path / "run", ())
    assert read_record(tmp_path / "run")["exit"] is None
    assert status_of(tmp_path / "run").state == "running"
    with pytest.raises(InvalidValueError, match="is being written by process"):
        open_tracker(recipe, tmp_path / "run", ())
    tracker.finish()
    assert read_record(tmp_path / "run")["exit"]["code"] == 0


def test_a_start_that_fails_is_recorded_and_gives_the_folder_up(recipe, tmp_path, monkeypatch):
    def stopped(*_):
        raise StoppedAtStart("SIGTERM")

    monkeypatch.setattr(Console, "banner", stopped)
    with pytest.raises(StoppedAtStart):
        open_tracker(recipe, tmp_path / "run", ())
    end = read_record(tmp_path / "run")["exit"]
    assert end["code"] == 75 and end["reason"].startswith("StoppedAtStart: SIGTERM")
    monkeypatch.undo()
    open_tracker(recipe, tmp_path / "run", ()).finish()
