"""A small parquet file that unpacks to a huge one is refused before it fills the memory."""

from __future__ import annotations

import resource

import pytest

from unirl.config.errors import DataError
from unirl.data import readers
from unirl.data.readers import parquet_rows

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def test_one_long_text_in_all_rows_is_refused_and_takes_little_memory(tmp_path, monkeypatch):
    text = pyarrow.array(["x" * 1_000_000])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100_000, pyarrow.int32()), text)
    file = tmp_path / "bomb.parquet"  # 100 GB of text in some kilobytes
    parquet.write_table(pyarrow.table({"prompt": column}), file, compression="zstd", store_schema=False)
    monkeypatch.setattr(readers, "UNPACKED_BYTES", 2**28)
    assert file.stat().st_size < 200_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"bomb\.parquet has \d+ bytes and unpacks to more than 268435456"):
        for _ in parquet_rows(file):
            pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 800_000  # KiB


def test_a_list_of_prompts_is_read_row_by_row(tmp_path):
    file = tmp_path / "prompts.parquet"
    table = {"prompt": [f"a red circle {i}" for i in range(200)], "n": list(range(200))}
    parquet.write_table(pyarrow.table(table), file)
    rows = list(parquet_rows(file))
    assert len(rows) == 200 and rows[130] == {"prompt": "a red circle 130", "n": 130}
