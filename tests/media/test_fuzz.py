"""Damaged images and data files give a result or an error for the user, and nothing else.

`scripts/damaged_media.py` does the same with thousands of files.
"""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from unirl.config.errors import DataError
from unirl.data.datasets import Prompt, load_prompts, read_entries
from unirl.models.images import read_image

ROWS = [
    {"prompt": "a cat", "prompt_id": "p1", "metadata": {"answer": "4", "n": [1, 2]}},
    {"prompt": "two dogs", "media_refs": [{"modality": "image", "role": "condition", "uri": "a.png"}]},
]
Change = tuple[int, int, bytes]
"""A place as a share of 10,000 of the file, the number of bytes removed there, and the bytes put in their place."""
PIECES = st.binary(max_size=8) | st.sampled_from([b"\xff" * 4, bytes(4)])
CHANGES = st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 40), PIECES), min_size=1, max_size=8)
SMALL = settings(max_examples=60, deadline=None, derandomize=True)


def changed(data: bytes, changes: Sequence[Change]) -> bytes:
    body = bytearray(data)
    for place, removed, put in changes:
        at = place * len(body) // 10_000
        body[at : at + removed] = put
    return bytes(body)


def image_file(format: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((24, 16)).convert("RGB").save(file, format, **options)
    return file.getvalue()


def parquet_file() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"] * 20, "answer": ["1", "2"] * 20}), file)
    return file.getvalue()


IMAGES = {
    "png": image_file("PNG"),
    "jpeg": image_file("JPEG"),
    "progressive.jpeg": image_file("JPEG", progressive=True),
    "webp": image_file("WEBP"),
    "lossless.webp": image_file("WEBP", lossless=True),
}
DATA = {
    "jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "json": json.dumps(ROWS).encode(),
    "txt": "a cat\ntwo dogs\n\u00e9\n".encode(),
    "parquet": parquet_file(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("kind", IMAGES)
def test_a_damaged_image_is_an_rgb_image_or_an_error_for_the_user(kind: str, folder: Path) -> None:
    path = folder / kind

    @SMALL
    @given(changes=CHANGES)
    def check(changes: list[Change]) -> None:
        path.write_bytes(changed(IMAGES[kind], changes))
        try:
            image = read_image(str(path))
        except DataError as error:
            assert error.code == 4003 and str(path) in str(error)
        else:
            assert image.mode == "RGB" and image.width * image.height <= 8192 * 8192

    check()


@pytest.mark.parametrize("kind", DATA)
def test_a_damaged_data_file_gives_prompts_or_errors_for_the_user(kind: str, folder: Path) -> None:
    path = folder / f"prompts.{kind}"

    @SMALL
    @given(changes=CHANGES)
    def check(changes: list[Change]) -> None:
        path.write_bytes(changed(DATA[kind], changes))
        try:
            entries = list(read_entries(path))
        except DataError as error:
            entries = [error]
        assert entries and all(isinstance(entry, Prompt) or str(path) in str(entry) for entry in entries)

    check()


def test_a_parquet_file_with_a_damaged_column_name_is_refused(folder: Path) -> None:
    path = folder / "names.parquet"
    path.write_bytes(DATA["parquet"].replace(b"answer", b"\xe1nswer"))
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load_prompts(path)


def test_a_data_file_that_is_a_pipe_is_refused_at_once(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    errors: list[str] = []

    def read() -> None:
        try:
            load_prompts(folder / "pipe.jsonl")
        except DataError as error:
            errors.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and "is a pipe, a socket or a device" in errors[0]
