"""Images of prompts that were made to do harm: none hangs, fills the memory, or runs another program."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from unirl.config.errors import DataError
from unirl.data.datasets import load_prompts
from unirl.data.images import image_problems, read_image_info
from unirl.media import images, process
from unirl.media.files import ImageLimits, UnreadableMedia, read_regular
from unirl.media.images import decode_exact, decode_upright, is_plain, open_header
from unirl.media.memory import MemoryBudget
from unirl.media.process import decode_apart
from unirl.models.images import read_image

LIMITS = ImageLimits(pixels=8192 * 8192)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def photo(mode: str = "RGB", height: int = 72, width: int = 96) -> Image.Image:
    """A smooth image, so that files are small; with an alpha channel it is half transparent."""
    small = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    if mode == "RGBA":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image.convert(mode)


def scan_bomb(count: int) -> bytes:
    """A progressive JPEG of 4 MP whose last scan is repeated: 16 bytes per scan, each of which takes 10 ms."""
    plain = encoded(Image.new("L", (2048, 2048), 128), "JPEG", progressive=True)
    return plain[:-2] + plain[plain.rindex(b"\xff\xda") : -2] * count + plain[-2:]


def prompt_file(folder: Path, *names: str) -> Path:
    rows = [
        f'{{"prompt": "a", "media_refs": [{{"modality": "image", "role": "condition", "uri": "{name}"}}]}}\n'
        for name in names
    ]
    (folder / "p.jsonl").write_text("".join(rows))
    return folder / "p.jsonl"


@pytest.mark.parametrize("format", ["EPS", "GIF", "TIFF", "BMP", "ICNS", "PPM"])
def test_only_three_formats_are_read_and_no_other_program_starts(format: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(photo(), format))
    with pytest.raises(DataError, match=r"a\.png cannot be read: it does not begin as a PNG or JPEG or WEBP file"):
        read_image(str(tmp_path / "a.png"))


@pytest.mark.parametrize("name", ["fifo", "/dev/zero", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    prompts, found = load_prompts(prompt_file(tmp_path, name)), []
    thread = threading.Thread(target=lambda: found.extend(image_problems(prompts)), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "reading it waits"
    assert len(found) == 1 and f"{name} cannot be read" in str(found[0])


def test_a_large_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    with open(tmp_path / "a.png", "wb") as file:
        file.truncate(10**12)  # a sparse file
    with pytest.raises(
        DataError, match=r"a\.png cannot be read: the file has 67108865 bytes or more: at most 67108864"
    ):
        read_image(str(tmp_path / "a.png"))
    (tmp_path / "b").write_bytes(bytes(10))
    assert read_regular(tmp_path / "b", 10) == bytes(10)
    with pytest.raises(UnreadableMedia, match="the file has 10 bytes or more: at most 9 are read"):
        read_regular(tmp_path / "b", 9)


@pytest.mark.parametrize(
    ("format", "options"),
    [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("WEBP", {"lossless": True})],
    ids=str,
)
def test_no_cut_of_a_file_gives_other_pixels_than_the_whole(
    format: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(photo(), format, **options)
    whole = np.asarray(decode_upright(open_header(data, LIMITS)))
    refused = 0
    for end in range(0, len(data), max(len(data) // 150, 1)):
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as a library that a reward imports may do
        try:
            assert np.array_equal(np.asarray(decode_upright(open_header(data[:end], LIMITS))), whole)
        except UnreadableMedia:
            refused += 1
    assert refused > 100


def test_an_animation_says_that_its_first_frame_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = photo(), Image.new("RGB", (96, 72), "red")
    for name, format in (("a.webp", "WEBP"), ("b.png", "PNG")):
        first.save(tmp_path / name, format, save_all=True, append_images=[second], lossless=True)
    assert list(image_problems(load_prompts(prompt_file(tmp_path, "a.webp", "b.png")))) == []
    assert capsys.readouterr().err.endswith("a.webp and 1 more: an image of several frames; its first frame is read\n")
    assert np.array_equal(np.asarray(read_image(str(tmp_path / "a.webp"))), np.asarray(first))
    assert read_image_info(str(tmp_path / "b.png")).num_frames == 2
    with pytest.raises(UnreadableMedia, match="an animation of 2 frames"):
        decode_exact(open_header((tmp_path / "a.webp").read_bytes(), LIMITS))


# Memory


def test_threads_hold_no_more_than_the_budget_together() -> None:
    budget, most = MemoryBudget(10), 0

    def work(size: int) -> None:
        nonlocal most
        with budget.hold(size):
            most = max(most, budget.held)
            time.sleep(0.002)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(work, [3, 4, 100, 1, 10, 7] * 5))
    assert most == 10 and budget.held == 0


@pytest.mark.parametrize(("room", "at_once"), [(1, {1}), (3, {2, 3})])
def test_the_loader_decodes_what_its_memory_holds(
    room: int, at_once: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen threads, and memory for `room` images."""
    active = most = 0

    def counted(image: Image.Image, opaque: bool) -> Image.Image:
        nonlocal active, most
        active += 1
        most = max(most, active)
        time.sleep(0.02)
        active -= 1
        return decode_upright(image, opaque)

    monkeypatch.setattr("unirl.models.images.MEMORY", MemoryBudget(room * images.BYTES_PER_PIXEL * 96 * 72))
    monkeypatch.setattr("unirl.media.images.decode_upright", counted)
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(encoded(photo(), "PNG"))
    prompts = load_prompts(prompt_file(tmp_path, *(f"{number}.png" for number in range(8))))
    assert list(image_problems(prompts)) == []
    assert most in at_once and active == 0


# A process of its own


@pytest.mark.parametrize("opaque", [False, True])
def test_a_process_of_its_own_gives_the_same_image(opaque: bool) -> None:
    exif = Image.Exif()
    exif[images.ORIENTATION] = 6
    files = [encoded(photo("RGB" if opaque else "RGBA"), "PNG"), encoded(photo(), "JPEG", exif=exif)]
    for data in files:
        here = decode_upright(open_header(data, LIMITS), opaque)
        apart = decode_apart(data, LIMITS, opaque)
        assert apart.size == here.size and np.array_equal(np.asarray(apart), np.asarray(here))


def test_a_process_of_its_own_reports_why_there_is_no_image() -> None:
    with pytest.raises(UnreadableMedia, match=r"^it is damaged .*truncated"):
        decode_apart(encoded(photo(), "PNG")[:500], LIMITS)
    with pytest.raises(UnreadableMedia, match="transparent parts"):
        decode_apart(encoded(photo("RGBA"), "PNG"), LIMITS, opaque=True)
    with pytest.raises(UnreadableMedia, match="it has 96 x 72 pixels: at most 100 are decoded"):
        decode_apart(encoded(photo(), "PNG"), ImageLimits(pixels=100))


def test_large_images_and_files_of_many_scans_have_a_process_of_their_own() -> None:
    few, many = scan_bomb(0), scan_bomb(100)
    assert is_plain(open_header(few, LIMITS), few) and not is_plain(open_header(many, LIMITS), many)
    large = encoded(Image.new("1", (4097, 4096)), "PNG")
    assert not is_plain(open_header(large, LIMITS), large)


def test_a_small_file_that_takes_minutes_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CPU_S", 1)
    (tmp_path / "a.jpg").write_bytes(scan_bomb(20_000))
    with pytest.raises(DataError, match=r"a\.jpg cannot be read: it takes more than 1 s to decode"):
        read_image(str(tmp_path / "a.jpg"))
