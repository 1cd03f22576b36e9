"""The benchmark of one day on a GPU runs, with the smallest models, on any machine."""

import json

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import PARTS, Day, Row
from unirl.models.qwen3.family import Qwen3Bundle


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight"
)  # Wan's norms in fp32, as diffusers keeps them
@pytest.mark.parametrize("part", PARTS)
def test_part_measures_what_a_cpu_can_measure(part, monkeypatch):
    monkeypatch.setattr(Qwen3Bundle, "toys", Qwen3Bundle.toys)
    rows = list(PARTS[part][0](Day(toy=True)))
    assert rows and all(row.part == part for row in rows)
    assert [row for row in rows if row.holds is False] == []
    names = [(row.case, row.quantity) for row in rows]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("value", "expected", "rule", "holds"),
    [
        (1.0, 2.0, "at most", True),
        (3.0, 2.0, "at most", False),
        (3.0, 2.0, "at least", True),
        (1.2, 1.0, "about", True),
        (1.3, 1.0, "about", False),
        (0, 0, "equal", True),
        (1, 0, "equal", False),
        (None, 1.0, "equal", None),
        (1.0, None, "equal", None),
    ],
)
def test_a_row_says_whether_its_value_is_as_expected(value, expected, rule, holds):
    assert Row("part", "case", "quantity", value, "", expected, rule).holds is holds


def test_a_failed_part_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(PARTS, "machine", (gpu_day.the_machine, 60))
    monkeypatch.setattr(gpu_day, "__file__", str(tmp_path / "broken.py"))
    (tmp_path / "broken.py").write_text("import sys; sys.exit(3 if sys.argv[1] == 'copies' else 0)")
    record = tmp_path / "day.jsonl"
    assert gpu_day.run_all(["copies", "machine"], toy=True, path=str(record)) == 1
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    failures = {row["part"]: row["value"] for row in rows if row["quantity"] == "failure"}
    assert failures == {"copies": "exit status 3", "machine": "none"}


def test_the_table_marks_what_deviates(tmp_path):
    record = tmp_path / "day.jsonl"
    gpu_day.write(Row("models", "SD3", "utilisation", 0.15, "", 0.45, "at least"), str(record))
    gpu_day.write(Row("models", "SD3", "peak memory", None, "GiB", 40.0, "at most"), str(record))
    assert gpu_day.table(str(record)).splitlines()[2:] == [
        "| models | SD3 | utilisation | 0.15 | >= 0.45 | **deviates** |",
        "| models | SD3 | peak memory | not measured | <= 40 GiB |  |",
    ]
