"""Pictures of prompts: opened before a run, judged by one set of rules, and part of what the data is."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from unirl.cli.data import check
from unirl.config.errors import CheckpointError, DataError
from unirl.data.data_source import MultimodalRLDataSource
from unirl.data.datasets import load_prompts
from unirl.data.images import check_images, image_problems
from unirl.models.images import MediaFile, read_file, read_image, split_at_images, with_marks


def line(*uris: str, prompt: str = "what is it?", **more: object) -> str:
    refs = [{"modality": "image", "role": "condition", "uri": uri} for uri in uris]
    return json.dumps({"prompt": prompt, "media_refs": refs, **more}) + "\n"


def picture(path: Path, size: tuple[int, int] = (8, 6), color: object = "red", mode: str = "RGB", **save) -> Path:
    Image.new(mode, size, color).save(path, **save)
    return path


def png_header(path: Path, width: int, height: int) -> Path:
    """A PNG that says it is of any size and holds no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")))
    return path


def source(path: Path, **keys) -> MultimodalRLDataSource:
    return MultimodalRLDataSource(data_path=str(path), **keys)


def test_several_images_of_a_prompt_keep_their_order(tmp_path) -> None:
    for name in "ba":
        picture(tmp_path / f"{name}.png")
    (tmp_path / "p.jsonl").write_text(line("b.png", "a.png", "b.png"))
    (prompt,) = source(tmp_path / "p.jsonl").prompts
    assert [Path(ref.uri).name for ref in prompt.images] == ["b.png", "a.png", "b.png"]


def bad_files(folder: Path) -> dict[str, str]:
    """Names of files and what is wrong with each."""
    whole = picture(folder / "whole.png", (64, 64), "blue").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_text("no picture")
    (folder / "folder.png").mkdir()
    png_header(folder / "huge.png", 8193, 8192)
    png_header(folder / "bomb.png", 60_000, 60_000)
    png_header(folder / "thread.png", 2001, 10)
    picture(folder / "deep.png", mode="I;16", color=7)
    return {
        "gone.png": "is not a file on this machine",
        "cut.png": "cannot be read: it is damaged (OSError: image file is truncated",
        "text.png": "cannot be read: it does not begin as a PNG or JPEG or WEBP file",
        "folder.png": "cannot be read",
        "huge.png": "it has 8193 x 8192 pixels: at most 67,108,864 are decoded",
        "bomb.png": "cannot be read: too many pixels: Image size",
        "thread.png": "2001 x 10 pixels: one side may be at most 200 times the other",
        "deep.png": "has mode I;16",
    }


def test_unreadable_image_is_refused_at_start_by_prompt_file_and_rule(tmp_path) -> None:
    for uri, why in bad_files(tmp_path).items():
        (tmp_path / "p.jsonl").write_text(line("whole.png") + line("whole.png", uri, prompt_id="second"))
        for keys in ({}, {"eval_data_path": str(tmp_path / "p.jsonl")}):
            with pytest.raises(DataError) as caught:
                source(tmp_path / "p.jsonl", **keys)
            assert caught.value.code == 4003
            for part in ("p.jsonl:2: prompt 'second'", uri, why):
                assert part in str(caught.value)


def test_data_check_names_every_bad_image(tmp_path) -> None:
    bad = bad_files(tmp_path)
    (tmp_path / "p.jsonl").write_text(line("whole.png") + "".join(line(uri) for uri in bad) + line("a.png", prompt=""))
    with pytest.raises(DataError) as caught:
        check([str(tmp_path / "p.jsonl")])
    assert f"{len(bad) + 1} problems" in str(caught.value)
    for number, why in enumerate(bad.values(), start=2):
        assert f"p.jsonl:{number}: " in str(caught.value) and why in str(caught.value)


def test_a_file_of_many_prompts_is_opened_once(tmp_path, monkeypatch) -> None:
    opened = []
    for name in "ab":
        picture(tmp_path / f"{name}.png")

    def read(uri: str) -> MediaFile:
        opened.append(uri)
        return read_file(uri)

    monkeypatch.setattr("unirl.data.images.read_file", read)
    (tmp_path / "p.jsonl").write_text(line("a.png", "b.png") + line("b.png") * 3)
    assert list(image_problems(load_prompts(tmp_path / "p.jsonl"))) == []
    assert sorted(Path(path).name for path in opened) == ["a.png", "b.png"]


def test_transparent_parts_are_white_and_the_camera_s_turn_is_undone(tmp_path) -> None:
    half = np.zeros((4, 2, 4), dtype=np.uint8)
    half[:2] = (255, 0, 0, 255)
    Image.fromarray(half).save(tmp_path / "half.png")
    assert np.asarray(read_image(str(tmp_path / "half.png")))[:, 0].tolist() == [[255, 0, 0]] * 2 + [[255] * 3] * 2
    exif = Image.Exif()
    exif[0x0112] = 6  # held upright, stored lying
    picture(tmp_path / "turned.jpg", (8, 6), exif=exif)
    assert read_image(str(tmp_path / "turned.jpg")).size == (6, 8)


@pytest.mark.parametrize(
    ("text", "num_images", "parts"),
    [
        ("a", 0, ["a"]),
        ("say <image>", 0, ["say <image>"]),
        ("a", 2, [None, None, "a"]),
        ("<image>a", 1, [None, "a"]),
        ("a<image>b <image>", 2, ["a", None, "b ", None]),
    ],
)
def test_images_stand_at_their_marks_or_before_the_text(text, num_images, parts) -> None:
    assert split_at_images(text, num_images) == parts
    assert with_marks(text, num_images) == "".join("<image>" if part is None else part for part in parts)


def test_marks_that_do_not_match_the_images_are_refused_at_start(tmp_path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "p.jsonl").write_text(line("a.png", prompt="<image> or <image>?"))
    with pytest.raises(DataError, match=r"p\.jsonl:1: .*2 placeholders <image>, but the prompt has 1 images"):
        check_images(load_prompts(tmp_path / "p.jsonl"))


def test_state_survives_a_move_and_not_another_image_or_order(tmp_path) -> None:
    def folder(name: str, color: str, uris: tuple[str, ...] = ("a.png", "b.png")) -> MultimodalRLDataSource:
        (tmp_path / name).mkdir()
        picture(tmp_path / name / "a.png", color=color)
        picture(tmp_path / name / "b.png", color="white")
        (tmp_path / name / "p.jsonl").write_text(line(*uris))
        return source(tmp_path / name / "p.jsonl")

    state = folder("here", "red").state_dict()
    folder("there", "red").load_state_dict(state)
    for other in (folder("changed", "green"), folder("swapped", "red", ("b.png", "a.png"))):
        with pytest.raises(CheckpointError):
            other.load_state_dict(state)
