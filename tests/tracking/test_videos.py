"""Videos in a run directory: what was written is decoded by PIL and PyAV and compared with the frames."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from unirl.tracking.images import ImageMedia
from unirl.tracking.media import MEDIA, media_of, read_samples
from unirl.tracking.mirrors import Mirror, Preview
from unirl.tracking.run_directory import RunDirectory, RunIdentity
from unirl.tracking.samples import Gallery, SampleRow, SampleTable, write_manifest
from unirl.tracking.sheets import BACKGROUND, before_after_sheet, contact_sheet
from unirl.tracking.tables import read_rows
from unirl.tracking.tracker import Tracker
from unirl.tracking.videos import (
    STRIP_FRAMES,
    STRIP_GAP,
    STRIP_SIDE,
    StoredVideo,
    VideoMedia,
    can_write_mp4,
    gif_of,
    read_webp,
    write_mp4,
    write_webp,
)
from unirl.types.evaluation import EvalResult
from unirl.types.primitives import Videos

needs_encoder = pytest.mark.skipif(not can_write_mp4(), reason="PyAV is not installed")
EVIL = "<script>alert(1)</script>\n# [b]a square[/b]\n```"


def moving_square(frames: int, height: int = 16, width: int = 20, seed: int = 0) -> np.ndarray:
    """[F, H, W, 3] uint8 a square that goes one pixel to the right each frame, over a ground of its own.

    The first pixel of all is of a colour that is nowhere else, so that the clip can be found on a sheet.
    """
    ground = np.random.default_rng(seed).integers(60, 200, 3)
    clip = np.broadcast_to(ground, (frames, height, width, 3)).astype(np.uint8)
    side = height // 2
    for number, frame in enumerate(clip):
        left = number % (width - side + 1)
        frame[height // 4 : height // 4 + side, left : left + side] = [230, 30 + 5 * seed, 20]
    clip[0, 0, 0] = [seed + 1, 2, 3]
    return clip


def videos(frames: int, count: int = 4, height: int = 16, width: int = 20, fps: float = 16.0) -> Videos:
    pixels = np.stack([moving_square(frames, height, width, seed) for seed in range(count)])
    return Videos.of(torch.from_numpy(pixels).permute(0, 4, 1, 2, 3) / 255, fps=fps)


def table_of(decoded: Videos, gain: float = 0.0, per_prompt: int = 2, prompt: str = "a square"):
    rows = [
        SampleRow(
            sample_id=f"{i}", group_id=f"g{i // per_prompt}", prompt=f"{prompt} {i // per_prompt}", reward=i / 10 + gain
        )
        for i in range(len(decoded))
    ]
    return SampleTable(tuple(rows), media_of(decoded.preview()))


def mp4_frames(path: Path) -> tuple[np.ndarray, float]:
    """[F, H, W, 3] and frames per second, as PyAV finds them."""
    import av

    with av.open(str(path)) as file:
        rate = file.streams.video[0].average_rate
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]), float(rate)


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Decibels; the same = infinite."""
    error = np.mean((one.astype(float) - other.astype(float)) ** 2)
    return float("inf") if error == 0 else 10 * np.log10(255**2 / error)


# Files


@pytest.mark.parametrize("frames", [1, 2, 5, 9, 33])
def test_a_small_clip_is_read_back_exactly(tmp_path, frames):
    rng = np.random.default_rng(frames)
    for clip in (moving_square(frames), rng.integers(0, 256, (frames, 7, 9, 3), dtype=np.uint8)):
        write_webp(tmp_path / "a.webp", clip, 62.5, lossless=True)
        assert (read_webp(tmp_path / "a.webp", frames, 62.5) == clip).all()


@pytest.mark.parametrize("order", [(0, 0, 0, 0), (0, 1, 1, 2, 2, 2), (0, 0, 1, 0, 0), (0, 1, 2, 2)])
@pytest.mark.parametrize("frame_ms", [41.7, 62.5, 187.5, 1000 / 7])
def test_frames_that_stand_still_are_read_back_as_often_as_they_were(tmp_path, order, frame_ms):
    """A WebP file keeps equal neighbours once, however many there were."""
    clip = moving_square(3)[list(order)]
    write_webp(tmp_path / "a.webp", clip, frame_ms, lossless=True)
    with Image.open(tmp_path / "a.webp") as file:
        assert sum(1 for _ in ImageSequence.Iterator(file)) < len(order)
    assert (read_webp(tmp_path / "a.webp", len(order), frame_ms) == clip).all()


def test_an_animation_lasts_as_long_as_the_video_and_repeats(tmp_path):
    write_webp(tmp_path / "a.webp", moving_square(9), 1000 / 16, lossless=True)
    with Image.open(tmp_path / "a.webp") as file:
        assert file.info["loop"] == 0
        lasting = []
        for frame in ImageSequence.Iterator(file):
            frame.load()
            lasting.append(frame.info["duration"])
    assert len(lasting) == 9 and sum(lasting) == round(9 * 1000 / 16) and max(lasting) - min(lasting) <= 1


def smooth(frames: int, height: int, width: int) -> np.ndarray:
    """[F, H, W, 3] uint8 waves that wander, as images of a camera are: no edges, all colours."""
    t, y, x = np.mgrid[0:frames, 0:height, 0:width].astype(float)
    waves = [np.sin(x / 17 + t / 3), np.cos(y / 23 - t / 4), np.sin((x + y) / 31 + t / 5)]
    return (127.5 + 100 * np.stack(waves, axis=-1)).astype(np.uint8)


def test_a_large_clip_is_kept_as_good_webp(tmp_path):
    clip = smooth(9, 148, 256)
    write_webp(tmp_path / "a.webp", clip, 62.5, lossless=False)
    assert psnr(read_webp(tmp_path / "a.webp", 9, 62.5), clip) > 36


@needs_encoder
@pytest.mark.parametrize("frames", [1, 5, 27])
@pytest.mark.parametrize(("height", "width"), [(148, 256), (201, 147)])
def test_mp4_plays_all_frames_at_their_rate(tmp_path, frames, height, width):
    clip = smooth(frames, height, width)
    write_mp4(tmp_path / "a.mp4", clip, 16 / 3)
    decoded, rate = mp4_frames(tmp_path / "a.mp4")
    assert decoded.shape == (frames, height + height % 2, width + width % 2, 3)
    assert frames == 1 or rate == pytest.approx(16 / 3)
    assert min(psnr(*pair) for pair in zip(decoded[:, :height, :width], clip, strict=True)) > 36


@needs_encoder
def test_mp4_of_a_small_clip_is_enlarged_with_its_colours(tmp_path):
    clip = moving_square(5)
    write_mp4(tmp_path / "a.mp4", clip, 16)
    decoded, _ = mp4_frames(tmp_path / "a.mp4")
    assert decoded.shape[1:3] == (16 * 12, 20 * 12)
    assert psnr(decoded, clip.repeat(12, axis=1).repeat(12, axis=2)) > 36


@needs_encoder
def test_files_of_equal_clips_are_equal(tmp_path):
    for name in "ab":
        write_mp4(tmp_path / f"{name}.mp4", smooth(9, 120, 256), 16)
        write_webp(tmp_path / f"{name}.webp", smooth(9, 120, 256), 62.5, lossless=False)
    for suffix in (".mp4", ".webp"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 256), (256, 1), (3, 5)])
def test_frames_of_any_shape_can_be_kept(tmp_path, height, width):
    clip = smooth(3, height, width)
    name = StoredVideo(clip, 3, 16.0, width, height).write("a", tmp_path)
    assert (tmp_path / name).stat().st_size > 0 and gif_of(tmp_path / "a.webp")[:6] == b"GIF89a"
    if can_write_mp4():
        assert len(mp4_frames(tmp_path / "a.mp4")[0]) == 3


@pytest.mark.parametrize("frames", [1, 9])
def test_gif_has_the_frames_enlarged_and_nearly_their_times(tmp_path, frames):
    clip = moving_square(frames)
    write_webp(tmp_path / "a.webp", clip, 60.0, lossless=True)
    with Image.open(io.BytesIO(gif_of(tmp_path / "a.webp"))) as file:
        result = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(file)]
        assert frames == 1 or file.info["duration"] == 60
    assert psnr(np.stack(result), clip.repeat(12, axis=1).repeat(12, axis=2)) > 40


# Strips


@pytest.mark.parametrize(
    ("frames", "chosen"),
    [(1, [0]), (2, [0, 1]), (5, [0, 1, 2, 3, 4]), (9, [0, 2, 4, 6, 8]), (33, [0, 8, 16, 24, 32]), (7, [0, 2, 3, 4, 6])],
)
def test_a_strip_is_the_frames_from_the_first_to_the_last(frames, chosen):
    clip = moving_square(frames)
    strip = StoredVideo(clip, frames, 16.0, 20, 16).strip()
    times, wide = STRIP_SIDE // 20, 20 * (STRIP_SIDE // 20)
    assert strip.shape == (16 * times, len(chosen) * (wide + STRIP_GAP) - STRIP_GAP, 3)
    for place, number in enumerate(chosen):
        left = place * (wide + STRIP_GAP)
        assert (strip[:, left : left + wide] == clip[number].repeat(times, 0).repeat(times, 1)).all()
        assert (strip[:, left + wide : left + wide + STRIP_GAP] == BACKGROUND).all()


def test_a_strip_of_large_frames_shows_them_shrunk():
    clip = smooth(5, 148, 256)
    strip = StoredVideo(clip, 81, 16.0, 832, 480).strip()
    assert strip.shape == (74, 5 * 128 + 4 * STRIP_GAP, 3)
    halved = clip.reshape(5, 74, 2, 128, 2, 3).mean(axis=(2, 4))
    assert psnr(strip[:, -128:], halved[-1]) > 40


# The run directory


@pytest.mark.parametrize("frames", [1, 5, 9, 81])
def test_what_a_run_directory_keeps_is_read_back_as_it_was(tmp_path, frames):
    table = table_of(videos(frames, fps=12.5))
    saved = table.saved(tmp_path)
    write_manifest(saved.rows, tmp_path / "manifest.jsonl")
    rows = list(read_rows(tmp_path / "manifest.jsonl"))
    shown = {1: 1, 5: 5, 9: 9, 81: 27}[frames]
    for row, name in zip(rows, ("p00-s00", "p00-s01", "p01-s00", "p01-s01"), strict=True):
        assert (row["medium"], row["file"]) == ("video", f"{name}.webp")
        assert row["facts"] == {"frames": frames, "shown": shown, "fps": 12.5, "size": "20x16"}
        strip = np.asarray(Image.open(tmp_path / f"{name}-strip.png"))
        assert strip.shape[1] == min(frames, STRIP_FRAMES) * (120 + STRIP_GAP) - STRIP_GAP
        assert (tmp_path / f"{name}.mp4").exists() == can_write_mp4()
    result = read_samples(rows, tmp_path)
    assert isinstance(result.media, VideoMedia) and result.rows == saved.rows and MEDIA["video"] is VideoMedia
    assert isinstance(table.media, VideoMedia)
    for one, other in zip(result.media.videos, table.media.videos, strict=True):
        assert (one.pixels == other.pixels).all()
        assert one.facts() == other.facts() and one.num_frames / one.fps == pytest.approx(frames / 12.5)


def test_videos_of_different_lengths_share_a_table_and_a_sheet(tmp_path):
    decoded = Videos.concat([videos(frames, count=1) for frames in (1, 9, 5, 40)])
    table = table_of(decoded).saved(tmp_path)
    result = read_samples([vars(row) for row in table.rows], tmp_path)
    assert isinstance(result.media, VideoMedia)
    assert [len(clip.pixels) for clip in result.media.videos] == [1, 9, 5, 20]
    sheet = np.asarray(contact_sheet(result, "t"))
    assert (sheet[:20] == BACKGROUND).all() and (sheet[:, -20:] == BACKGROUND).all()


def places(sheet: Image.Image, image: np.ndarray) -> list[tuple[int, int]]:
    """Every (left, top) where the image stands on the sheet."""
    page = np.asarray(sheet).astype(int)
    height, width = image.shape[:2]
    corners = np.argwhere((page[: 1 - height or None, : 1 - width or None] == image[0, 0]).all(axis=2))
    return [(int(x), int(y)) for y, x in corners if (page[y : y + height, x : x + width] == image).all()]


def test_a_sheet_shows_the_strip_of_every_sample_best_first():
    table = table_of(videos(9))
    sheet = contact_sheet(table, "t")
    [[one], [two], [three], [four]] = [places(sheet, clip.strip()) for clip in table.media.videos]
    assert three[1] == four[1] < two[1] == one[1]  # the second prompt has the higher rewards
    assert (two[0] < one[0], four[0] < three[0]) == (True, True)


def test_before_is_left_of_after_and_says_what_the_strips_are(tmp_path):
    before, after = table_of(videos(9)), table_of(videos(9, count=8).select([4, 5, 6, 7]), gain=0.2)
    assert after.media.compares_with(before.media)
    sheet = before_after_sheet(before, after, ("before", "after"), "t")
    for old, new in zip(before.media.videos, after.media.videos, strict=True):
        [left], [right] = places(sheet, old.strip()), places(sheet, new.strip())
        assert left[0] < right[0] and left[1] == right[1]
    assert before.media.tiles().about == "5 of 9 frames of 20 x 16, 16 per second"
    assert media_of(videos(1).preview()).tiles().about == "1 frame of 20 x 16, 16 per second"


def test_videos_compare_with_videos_of_the_same_size_alone():
    media = media_of(videos(5).preview())
    assert media.compares_with(media_of(videos(9).preview()))
    assert not media.compares_with(media_of(videos(5, width=24).preview()))
    assert not media.compares_with(ImageMedia(np.zeros((4, 16, 20, 3), np.uint8)))


def test_the_page_plays_every_sample_and_interprets_no_prompt(tmp_path):
    table = table_of(videos(5), prompt=EVIL).saved(tmp_path)
    assert table.media.page(table, tmp_path, "samples of step 3") == tmp_path / "contact_sheet.png"
    page = (tmp_path / "samples.md").read_text()
    assert page.index("p01-s01.webp") < page.index("p01-s00.webp") < page.index("p00-s01.webp")
    assert 'width="120" height="96"' in page
    assert ("(p01-s00.mp4)" in page) == can_write_mp4()
    assert "\n    <script>alert(1)</script>\n    # [b]" in page
    assert all("<script>" not in line for line in page.splitlines() if not line.startswith("    "))


def test_an_album_has_every_video_and_a_grid_with_a_row_per_prompt(tmp_path):
    media = media_of(videos(5).preview())
    grid = media.gallery(Gallery(("a", "b"), 2, {"seed": 7}), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.webp")) == [
        f"p{p:02d}-s{s:02d}.webp" for p in (0, 1) for s in (0, 1)
    ]
    result = [places(Image.open(grid).convert("RGB"), clip.strip()) for clip in media.videos]
    [[one], [two], [three], [four]] = result
    assert one[1] == two[1] < three[1] == four[1] and one[0] == three[0] < two[0] == four[0]
    rows = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert rows[3] == {"file": "p01-s01.webp", "prompt": "b", "sample": 1, "seed": 7}


# Without an encoder


@pytest.fixture
def tracker(tmp_path):
    with Tracker(RunDirectory(tmp_path / "run", RunIdentity(project="demo", recipe="video"))) as tracker:
        yield tracker


def evaluation(gain: float) -> EvalResult:
    return EvalResult(
        sample_ids=("a:0", "a:1", "b:0", "b:1"),
        group_ids=("a", "a", "b", "b"),
        prompts=("a cat", "a cat", "a dog", "a dog"),
        rewards=torch.tensor([0.1, 0.2, 0.3, 0.4]) + gain,
        components={},
        media=videos(9).preview(),
        track="image",
    )


def test_without_an_encoder_videos_are_kept_as_webp_which_is_said_once(tracker, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    for step in (1, 2):
        tracker.samples(step, table_of(videos(5)))
    tracker.eval(2, evaluation(0.0))
    tracker.flush()
    root = tracker.run.root
    warnings = [row["text"] for row in read_rows(root / "events.jsonl") if row["ev"] == "warning"]
    assert len(warnings) == 1 and "pip install 'unirl[video]'" in warnings[0]
    assert list(root.glob("**/*.mp4")) == [] and len(list(root.glob("**/p*.webp"))) == 12


class Recorded(Mirror):
    """A mirror that remembers what it was shown."""

    name = "recorded"

    def __init__(self) -> None:
        self.pages: list[tuple[str, str]] = []
        self.films: list[Preview] = []

    def images(self, step, key, previews) -> None:
        self.pages += [(key, preview.path.name) for preview in previews]

    def videos(self, step, key, previews) -> None:
        self.films += previews


def test_mirrors_are_shown_the_sheet_and_the_first_videos(tmp_path):
    mirror = Recorded()
    with Tracker(RunDirectory(tmp_path / "run", RunIdentity(project="demo", recipe="video")), mirrors=[mirror]) as told:
        told.samples(1, table_of(videos(5, count=6)))
    assert mirror.pages == [("samples", "contact_sheet.png")]
    assert [film.path.name for film in mirror.films] == ["p00-s00.webp", "p00-s01.webp", "p01-s00.webp", "p01-s01.webp"]
    assert [film.caption for film in mirror.films][:2] == ["0.000  a square 0", "0.100  a square 0"]
    assert all((film.mp4 is not None) == can_write_mp4() for film in mirror.films)


def test_a_broken_encoder_is_none(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    assert not can_write_mp4()


def test_evaluations_of_videos_stand_before_and_after(tracker):
    for step, gain in ((0, 0.0), (3, 0.5)):
        page = tracker.eval(step, evaluation(gain))
    assert page.name == "contact_sheet.png" and (page.parent / "before_after.png").exists()
    scores = json.loads((page.parent / "scores.json").read_text())
    assert {row["medium"] for row in scores["samples"]} == {"video"}
    assert scores["samples"][0]["facts"]["frames"] == 9
    tracker.flush()
    warnings = [row for row in read_rows(tracker.run.root / "events.jsonl") if row["ev"] == "warning"]
    assert len(warnings) == (0 if can_write_mp4() else 1)


def test_pages_leave_out_samples_without_a_video_and_the_manifest_keeps_them(tmp_path):
    """Every second sample was not drawn: the pages have the others, and say of how many."""
    whole = videos(frames=3)
    drawn = Videos.concat([whole.select([0]), whole.select([2])])
    some = Videos(frames=drawn.frames, offsets=torch.tensor([0, 3, 3, 6, 6]))
    tables = []
    for name, gain in (("before", 0.0), ("after", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        table = table_of(some, gain).saved(folder)
        write_manifest(table.rows, folder / "manifest.jsonl")
        tables.append(read_samples(read_rows(folder / "manifest.jsonl"), folder))
    before, after = tables
    assert [video.num_frames for video in after.media.videos] == [3, 0, 3, 0]
    assert np.array_equal(after.media.videos[2].pixels, moving_square(3, seed=2))
    after.media.page(after, tmp_path, "page")
    text = (tmp_path / "samples.md").read_text()
    assert "of 2 of 4 samples" in text
    assert [name in text for name in ("p00-s00", "p00-s01", "p01-s00", "p01-s01")] == [True, False, True, False]
    pages = [table.rows for table in (before, after)]
    assert [len(rows) for rows in pages] == [4, 4]
    assert [bool(row.file) for row in before.rows] == [True, False, True, False]
    assert before.rows[1].text == "no video was made of this one" and not list(tmp_path.glob("before/p00-s01*"))
    sheet = np.asarray(Image.open(after.media.comparison(before, after, ("before", "after"), tmp_path)))
    whole_table = table_of(whole, 1.0).saved(tmp_path / "after")
    full = np.asarray(Image.open(whole_table.media.comparison(table_of(whole), whole_table, ("a", "b"), tmp_path)))
    assert len(sheet) < len(full), "fewer samples, fewer rows"
