"""Parquet files hold what a .jsonl file holds, and are refused as strictly, by row."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from unirl.config.errors import DataError, DependencyError
from unirl.data.datasets import load_prompts, read_entries

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {"prompt": "a", "prompt_id": "x", "metadata": {"answer": "3", "level": 2, "tags": ["n", "m"]}},
    {"prompt": "b", "media_refs": [{"modality": "image", "role": "condition", "uri": "/p/a.png"}]},
    {"prompt": "c", "metadata": {"answer": "4"}},
]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows, schema=pa.Table.from_pylist(rows).schema), path, row_group_size=2)
    return path


def test_rows_are_the_prompts_of_a_jsonl_file_and_nulls_are_absent_keys(tmp_path) -> None:
    columns = ("prompt", "prompt_id", "metadata", "media_refs")
    table = pa.table({name: [row.get(name) for row in ROWS] for name in columns})
    parquet.write_table(table, tmp_path / "p.parquet", row_group_size=2)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    result, expected = load_prompts(tmp_path / "p.parquet"), load_prompts(tmp_path / "p.jsonl")
    assert [p.text for p in result] == ["a", "b", "c"]
    for one, other in zip(result, expected, strict=True):
        assert (one.text, one.metadata, one.media) == (other.text, other.metadata, other.media)
    assert [p.prompt_id for p in result] == ["x", "p.parquet:1", "p.parquet:2"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "image": {"bytes": b"\x89PNG"}}, "image.bytes holds 4 bytes.*name them in media_refs"),
        ({"prompt": "a", "when": date(2026, 1, 2)}, "when is a date, which is not a JSON value"),
        ({"prompt": "a", "score": float("nan")}, "score is nan"),
        ({"prompt": "a", "scores": [1.0, float("inf")]}, r"scores\[1\] is inf"),
        ({"prompt": " "}, "'prompt' is empty"),
        ({"caption": None, "other": 1}, "no key 'prompt'"),
    ],
)
def test_bad_row_is_refused_by_file_and_row(row, why, tmp_path) -> None:
    path = write(tmp_path / "p.parquet", [{"prompt": "fine"}])
    assert len(load_prompts(path)) == 1
    path = write(tmp_path / "p.parquet", [row])
    with pytest.raises(DataError, match=why) as caught:
        load_prompts(path)
    assert str(caught.value).startswith(f"{path}:1: ")


def test_every_bad_row_is_found(tmp_path) -> None:
    path = write(tmp_path / "p.parquet", [{"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}, {"prompt": " "}])
    result = list(read_entries(path))
    assert [isinstance(entry, DataError) for entry in result] == [False, True, False, True]
    assert ":4: " in str(result[3])


def test_file_that_is_no_parquet_is_named(tmp_path) -> None:
    (tmp_path / "p.parquet").write_text("PAR1 and more")
    with pytest.raises(DataError, match=r"p\.parquet cannot be read as parquet"):
        load_prompts(tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"absent\.parquet does not exist"):
        load_prompts(tmp_path / "absent.parquet")
    write(tmp_path / "none.parquet", [{"prompt": "a"}])
    parquet.write_table(parquet.read_table(tmp_path / "none.parquet").slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"none\.parquet holds no prompts. Expected one row per prompt"):
        load_prompts(tmp_path / "none.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("unirl.config.dependencies.find_spec", lambda name: None)
    with pytest.raises(
        DependencyError, match=r"p\.parquet needs pyarrow, not installed here: pip install 'unirl\[data\]"
    ):
        load_prompts(tmp_path / "p.parquet")
