"""Tables that survive a crash, and that a cut brings back to what they were."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unirl.tracking.tables import CsvTable, JsonLines, finite, read_rows

NAMES = ["a", "b/c", "d"]
METRICS = st.dictionaries(st.sampled_from(NAMES), st.floats(allow_nan=False), max_size=3)


def write_csv(path: Path, rows: list[dict[str, float]]) -> CsvTable:
    table = CsvTable(path)
    for step, row in enumerate(rows, start=1):
        table.append({"step": step, **row})
    table.sync()
    return table


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file, strict=True))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(METRICS, min_size=1, max_size=6))
def test_csv_stays_valid_and_exact_when_columns_appear_later(rows, tmp_path):
    (tmp_path / "m.csv").unlink(missing_ok=True)
    write_csv(tmp_path / "m.csv", rows).close()
    columns = ["step", *sorted({name for row in rows for name in row})]
    result = read_csv(tmp_path / "m.csv")
    assert [list(row) for row in result] == [columns] * len(rows)
    for row, cells in zip(rows, result, strict=True):
        assert {name: float(cell) for name, cell in cells.items() if cell and name != "step"} == row


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(METRICS, min_size=1, max_size=6), data=st.data())
def test_cut_and_continued_files_equal_those_of_an_unbroken_run(rows, data, tmp_path):
    for name in ("a.csv", "b.csv", "a.jsonl", "b.jsonl"):
        (tmp_path / name).unlink(missing_ok=True)
    back = data.draw(st.integers(0, len(rows)))
    half = data.draw(st.sampled_from(["", '{"step": 7, "a', "9,1.5", "9,"]))
    whole, broken = JsonLines(tmp_path / "a.jsonl"), JsonLines(tmp_path / "b.jsonl")
    for step, row in enumerate(rows, start=1):
        whole.append({"step": step, **row})
        broken.append({"step": step, **row})
    write_csv(tmp_path / "a.csv", rows).close()
    write_csv(tmp_path / "b.csv", rows).close()
    whole.close()
    broken.close()
    for name in ("b.csv", "b.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write(half)
    table, lines = CsvTable(tmp_path / "b.csv"), JsonLines(tmp_path / "b.jsonl")
    table.cut(back)
    lines.cut(back)
    for step, row in enumerate(rows[back:], start=back + 1):
        table.append({"step": step, **row})
        lines.append({"step": step, **row})
    table.close()
    lines.close()
    assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "a.csv").read_bytes()
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()


def test_numbers_that_json_has_no_word_for_are_words_that_float_reads(tmp_path):
    table, lines = CsvTable(tmp_path / "m.csv"), JsonLines(tmp_path / "m.jsonl")
    row = {"step": 1, "a": math.inf, "b": -math.inf, "c": math.nan, "d": 0.1 + 0.2}
    table.append(row)
    lines.append(row)
    table.close()
    lines.close()
    strict = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda word: 1 / 0)
    assert strict == {"step": 1, "a": "inf", "b": "-inf", "c": "nan", "d": 0.30000000000000004}
    assert read_csv(tmp_path / "m.csv") == [{"step": "1", "a": "inf", "b": "-inf", "c": "nan", "d": repr(0.1 + 0.2)}]
    assert math.isnan(float(strict["c"]))


def test_half_written_last_line_is_neither_read_nor_continued(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    lines = JsonLines(path)
    lines.append({"step": 3})
    lines.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_reading_stops_at_a_damaged_line(tmp_path):
    (tmp_path / "m.jsonl").write_bytes(b'{"step": 1}\n\x00\x00\x00\n{"step": 3}\n')
    assert list(read_rows(tmp_path / "m.jsonl")) == [{"step": 1}]
    assert list(read_rows(tmp_path / "absent.jsonl")) == []


def test_nested_values_are_made_finite():
    assert finite({"a": [math.inf, {"b": (1.0, math.nan)}]}) == {"a": ["inf", {"b": [1.0, "nan"]}]}
