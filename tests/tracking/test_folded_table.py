"""Tables that grow, are replaced, or are damaged between two readings."""

import json
import os
import time

import pytest

from unirl.tracking.folded_table import LINES_PER_CHECK, FoldedTable
from unirl.tracking.record import RunRecord
from unirl.tracking.run_files import RunFiles
from unirl.tracking.step_tables import MetricsFold


def line(step: int, seconds: float = 0.5) -> str:
    return json.dumps({"step": step, "time/step": seconds, "samples/generated": 4}) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize("cut", range(0, 130, 7))
def test_a_table_that_is_read_in_two_parts_gives_what_it_gives_at_once(path, tmp_path, cut):
    content = "".join(map(line, (1, 2))) + "nonsense\n" + line(3) + '{"a": 1}\n'
    table, files = FoldedTable(MetricsFold), RunFiles(tmp_path)
    path.write_text(content[:cut])
    assert table.advance(files)
    path.write_text(content)
    assert table.advance(files)
    table.report(files)
    whole = RunRecord(tmp_path)
    assert table.fold.result == whole.metrics
    assert files.problems == whole.problems
    assert [done.seconds for done in table.fold.result.progress] == [0.5, 1.0, 1.5]


def test_what_was_read_is_not_read_again(path, tmp_path, monkeypatch):
    taken = []
    take = FoldedTable._take
    monkeypatch.setattr(FoldedTable, "_take", lambda self, line: (taken.append(line), take(self, line)))
    table, files = FoldedTable(MetricsFold), RunFiles(tmp_path)
    path.write_text("".join(map(line, range(100))))
    table.advance(files)
    with path.open("a") as file:
        file.write(line(100))
    table.advance(files)
    table.advance(files)
    assert (len(taken), table.fold.result.count) == (101, 101)


@pytest.mark.parametrize("steps", [(1, 2), (1, 2, 3, 4, 5)], ids=["shorter", "longer"])
def test_a_table_that_a_restart_cut_back_is_read_from_its_start(path, tmp_path, steps):
    table, files = FoldedTable(MetricsFold), RunFiles(tmp_path)
    path.write_text("".join(map(line, (1, 2, 3))))
    table.advance(files)
    (tmp_path / "new").write_text("".join(line(step, 0.25) for step in steps))
    os.replace(tmp_path / "new", path)
    table.advance(files)
    assert [row["step"] for row in table.fold.result.rows] == list(steps)
    assert table.fold.result.totals["time/step"] == 0.25 * len(steps)
    path.unlink()
    assert table.advance(files)
    assert table.fold.result.count == 0


def test_reading_stops_in_time_and_goes_on(path, tmp_path):
    table, files = FoldedTable(MetricsFold), RunFiles(tmp_path)
    path.write_text("".join(map(line, range(3 * LINES_PER_CHECK + 1))))
    counts = []
    while not table.advance(files, until=time.monotonic() - 1):
        counts.append(table.fold.result.count)
    assert counts == [LINES_PER_CHECK, 2 * LINES_PER_CHECK, 3 * LINES_PER_CHECK]
    assert table.fold.result.count == 3 * LINES_PER_CHECK + 1
