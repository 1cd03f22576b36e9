"""Samples that are videos: moving files and a strip of frames each; sheets of strips, and a page that moves."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageSequence

from unirl.tracking.images import LOSSLESS_UP_TO, grid
from unirl.tracking.mirrors import Mirrors, MovingPreview, Preview
from unirl.tracking.samples import Entry, Fact, Media, MirroredPage, SampleRow, SampleTable, Sides
from unirl.tracking.sheets import (
    BACKGROUND,
    GAP,
    LABEL,
    MAX_PER_ROW,
    PAGE,
    Tiles,
    before_after_sheet,
    contact_sheet,
    fit,
    saved,
)
from unirl.tracking.tables import replace_text
from unirl.tracking.texts import listing
from unirl.types.primitives import VideoPreviews

STRIP_FRAMES, STRIP_SIDE = 5, 128
"""Frames on a strip, and pixels along the longer side of each; smaller ones are enlarged by repeating pixels."""
STRIP_GAP = 4
FEWEST_ACROSS = 2
"""Strips of a prompt that stand side by side on a sheet, however wide they are."""
MAX_MOVING = 4
"""Videos of one step that are mirrored, beside the contact sheet."""


@dataclass(frozen=True, eq=False)
class Clip:
    """What is kept of a video: frames at even distances, which last together as long as it does."""

    pixels: np.ndarray  # [F, h, w, 3] uint8
    num_frames: int
    """Of the video, as are the fields below."""
    fps: float
    width: int
    height: int

    def __post_init__(self) -> None:
        assert self.pixels.dtype == np.uint8 and self.pixels.ndim == 4 and self.pixels.shape[3] == 3
        assert 1 <= len(self.pixels) <= self.num_frames

    @property
    def seconds(self) -> float:
        """How long the video lasts."""
        return self.num_frames / self.fps

    @property
    def frame_ms(self) -> float:
        """How long each frame that is kept is shown."""
        return 1000 * self.seconds / len(self.pixels)

    def facts(self) -> dict[str, Fact]:
        """What a manifest says of it. `shown`: the frames that are kept."""
        size = f"{self.width}x{self.height}"
        return {"frames": self.num_frames, "shown": len(self.pixels), "fps": self.fps, "size": size}

    @classmethod
    def read(cls, row: SampleRow, folder: Path) -> Clip:
        """From a row of a manifest and the file beside it."""
        width, height = (int(side) for side in str(row.facts["size"]).split("x"))
        num_frames, shown, fps = int(row.facts["frames"]), int(row.facts["shown"]), float(row.facts["fps"])
        pixels = read_webp(folder / row.file, shown, 1000 * num_frames / fps / shown)
        return cls(pixels, num_frames, fps, width, height)

    def strip(self) -> np.ndarray:
        """[h', w', 3] uint8: STRIP_FRAMES frames from the first to the last, side by side; all of a shorter clip."""
        count = min(STRIP_FRAMES, len(self.pixels))
        chosen = [round(place * (len(self.pixels) - 1) / max(count - 1, 1)) for place in range(count)]
        frames = [_framed(self.pixels[number]) for number in chosen]
        gap = np.full((len(frames[0]), STRIP_GAP, 3), BACKGROUND, np.uint8)
        return np.concatenate([frames[0], *(part for frame in frames[1:] for part in (gap, frame))], axis=1)

    def write(self, name: str, folder: Path, mp4: bool) -> Entry:
        """Its files: `name`.webp, `name`-strip.png and, if asked for, `name`.mp4."""
        file = f"{name}.webp"
        write_webp(folder / file, self.pixels, self.frame_ms, lossless=max(self.pixels.shape[1:3]) <= LOSSLESS_UP_TO)
        Image.fromarray(self.strip()).save(folder / f"{name}-strip.png")
        if mp4:
            write_mp4(folder / f"{name}.mp4", self.pixels, 1000 / self.frame_ms)
        return Entry(file=file, facts=self.facts())


@dataclass(frozen=True, eq=False)
class VideoMedia:
    """Videos whose frames have one size, of any number of frames."""

    clips: tuple[Clip, ...]
    kind: ClassVar[str] = "video"

    def __post_init__(self) -> None:
        sizes = {clip.pixels.shape[1:3] for clip in self.clips}
        assert len(sizes) <= 1, f"frames of several sizes: {sizes}"

    @classmethod
    def of(cls, clips: VideoPreviews) -> VideoMedia:
        """As an engine shows them."""
        pixels = clips.frames.permute(0, 2, 3, 1).contiguous().numpy()
        bounds = pairwise(clips.offsets.tolist())
        rows = zip(bounds, clips.num_frames.tolist(), strict=True)
        return cls(tuple(Clip(pixels[a:b], count, clips.fps, clips.width, clips.height) for (a, b), count in rows))

    def __len__(self) -> int:
        return len(self.clips)

    @classmethod
    def read(cls, rows: Sequence[SampleRow], folder: Path) -> VideoMedia:
        """The videos in the files that the rows name."""
        return cls(tuple(Clip.read(row, folder) for row in rows))

    def write(self, names: Sequence[str], folder: Path) -> list[Entry]:
        """Of each an animated WebP, a strip of frames and, where it can be written, an MP4."""
        mp4 = can_write_mp4()
        return [clip.write(name, folder, mp4) for name, clip in zip(names, self.clips, strict=True)]

    def compares_with(self, other: Media) -> bool:
        """Videos whose frames have the same size."""
        return isinstance(other, VideoMedia) and self._shape() == other._shape()

    def tiles(self) -> Tiles:
        """The strip of each. One of few frames leaves the rest of its place empty."""
        strips = [clip.strip() for clip in self.clips]
        height, width = len(strips[0]), max(strip.shape[1] for strip in strips)
        across = min(max((PAGE - LABEL) // (width + GAP), FEWEST_ACROSS), MAX_PER_ROW)
        return Tiles([_padded(strip, width) for strip in strips], width, height, across, self._about())

    def page(self, table: SampleTable[Any], folder: Path, title: str) -> Path:
        """A sheet of strips, and beside it a page on which the videos move."""
        replace_text(folder / "samples.md", samples_page(table, folder, title))
        return saved(contact_sheet(table, title), folder / "contact_sheet.png")

    def comparison(self, before: SampleTable[Any], after: SampleTable[Any], sides: Sides, folder: Path) -> Path:
        sheet = before_after_sheet(before, after, sides, "before and after training")
        return saved(sheet, folder / "before_after.png")

    def album(self, prompts: Sequence[str], folder: Path) -> Path:
        """The files of every video, and a grid of strips with a row per prompt."""
        columns = len(self.clips) // len(prompts)
        self.write([f"p{i // columns:02d}-s{i % columns:02d}" for i in range(len(self.clips))], folder)
        cells = [_padded(strip, strip.shape[1] + 4 * STRIP_GAP, STRIP_GAP) for strip in self.tiles().pictures]
        return saved(grid([Image.fromarray(cell) for cell in cells], columns), folder / "grid.png")

    def lines(self) -> list[str]:
        """Nothing: a console shows no videos."""
        return []

    def remarks(self) -> list[str]:
        """Whether a file of each is missing here."""
        if can_write_mp4():
            return []
        return ["videos are kept as animated WebP, without MP4: pip install 'unirl[video]' to have both"]

    def mirror(self, mirrors: Mirrors, page: MirroredPage, rows: Sequence[SampleRow]) -> None:
        """The sheet, and the first videos by themselves."""
        mirrors.images(page.step, page.key, [Preview(page.path, page.title)])
        files = [(page.path.parent / row.file, f"{row.reward:.3f}  {row.prompt}") for row in rows[:MAX_MOVING]]
        mirrors.videos(page.step, page.key, [MovingPreview.of(path, caption) for path, caption in files])

    def _shape(self) -> set[tuple[int, ...]]:
        return {clip.pixels.shape[1:] for clip in self.clips}

    def _about(self) -> str:
        """How strips are to be read."""
        first = self.clips[0]
        fewest, most = (pick(clip.num_frames for clip in self.clips) for pick in (min, max))
        frames = f"{fewest} to {most} frames" if fewest < most else f"{most} frames" if most > 1 else "1 frame"
        strip = f"{STRIP_FRAMES} of {frames}" if most > STRIP_FRAMES else frames
        return f"{strip} of {first.width} x {first.height}, {first.fps:g} per second"


def samples_page(table: SampleTable[VideoMedia], folder: Path, title: str) -> str:
    """Markdown with the videos that lie in `folder`, by prompt, best reward first, with what is known of each."""

    def shown_as(row: int, _: int) -> str:
        file, clip = table.rows[row].file, table.media.clips[row]
        height, width = enlarged(clip.pixels[0], STRIP_SIDE).shape[:2]
        moving = f'<img src="{file}" width="{width}" height="{height}" alt="sample {row}">'
        mp4 = Path(file).with_suffix(".mp4").name
        return f"{moving}\n\n[MP4]({mp4})\n\n" if (folder / mp4).exists() else f"{moving}\n\n"

    return listing(table, title, shown_as)


def _framed(frame: np.ndarray) -> np.ndarray:
    """The frame [h, w, 3] as it is on a strip."""
    height, width = frame.shape[:2]
    if max(height, width) <= STRIP_SIDE:
        return enlarged(frame, STRIP_SIDE)
    scale = STRIP_SIDE / max(height, width)
    return np.asarray(fit(frame, max(1, round(width * scale)), max(1, round(height * scale))))


def _padded(picture: np.ndarray, width: int, below: int = 0) -> np.ndarray:
    """The picture with room to its right and below it."""
    room = Image.new("RGB", (width, picture.shape[0] + below), BACKGROUND)
    room.paste(Image.fromarray(picture), (0, 0))
    return np.asarray(room)


PLAYED_SIDE = 256
"""Clips whose sides are all shorter are enlarged to about this many pixels for MP4 and GIF, by repeating pixels."""
ENCODER = "libx264"
QUALITY = {"crf": "16", "preset": "veryfast"}
"""Of MP4: a difference that eyes rarely see."""


def write_webp(path: Path, frames: np.ndarray, frame_ms: float, lossless: bool) -> None:
    """Frames [F, H, W, 3] uint8 that are shown for `frame_ms` each, over and over."""
    first, *others = [Image.fromarray(frame) for frame in frames]
    lasting = [max(b - a, 1) for a, b in pairwise(_starts(len(frames) + 1, frame_ms))]
    first.save(
        path, save_all=True, append_images=others, duration=lasting, loop=0, lossless=lossless, quality=90, method=0
    )


def read_webp(path: Path, num_frames: int, frame_ms: float) -> np.ndarray:
    """[F, H, W, 3] uint8, the inverse of `write_webp`: a file holds frames that are equal and adjacent only once."""
    moments = _moments(path)
    shown = np.searchsorted([moment.start_ms for moment in moments], _starts(num_frames, frame_ms), side="right") - 1
    return np.stack([moments[number].picture for number in shown])


@dataclass(frozen=True)
class Moment:
    """One picture of a file, and when it is shown."""

    picture: np.ndarray  # [H, W, 3] uint8
    start_ms: int
    lasting_ms: int


def _moments(path: Path) -> list[Moment]:
    moments = []
    with Image.open(path, formats=["WEBP"]) as file:
        for frame in ImageSequence.Iterator(file):
            picture = np.asarray(frame.convert("RGB"))  # reading the pixels is what fills in the times
            moments.append(Moment(picture, frame.info.get("timestamp", 0), frame.info.get("duration", 0)))
    return moments


def _starts(count: int, frame_ms: float) -> list[int]:
    """When each frame begins, in whole milliseconds, at least one apart."""
    return [round(number * max(frame_ms, 1.0)) for number in range(count)]


def can_write_mp4() -> bool:
    """Whether PyAV is installed, with an encoder of H.264."""
    if find_spec("av") is None:
        return False
    try:
        import av
    except ImportError:
        return False  # installed for another system
    return ENCODER in av.codecs_available


def write_mp4(path: Path, frames: np.ndarray, fps: float) -> None:
    """Frames [F, H, W, 3] uint8 as H.264 that any player shows; an odd side loses nothing and gains a line."""
    import av

    pictures = [_even(enlarged(frame, PLAYED_SIDE)) for frame in frames]
    # With its index at the front, a browser plays the file while it loads.
    with av.open(str(path), mode="w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream: Any = container.add_stream(ENCODER, rate=Fraction(fps).limit_denominator(1000), options=QUALITY)
        stream.height, stream.width, stream.pix_fmt = *pictures[0].shape[:2], "yuv420p"
        stream.thread_count = 1
        for frame in [*(av.VideoFrame.from_ndarray(picture, format="rgb24") for picture in pictures), None]:
            container.mux(stream.encode(frame))


def gif_of(webp: Path) -> bytes:
    """The moving picture of a file as GIF, 256 colours a frame."""
    moments = _moments(webp)
    first, *others = [Image.fromarray(enlarged(moment.picture, PLAYED_SIDE)) for moment in moments]
    lasting = [moment.lasting_ms for moment in moments]
    file = io.BytesIO()
    first.save(file, format="GIF", save_all=True, append_images=others, duration=lasting, loop=0)
    return file.getvalue()


def enlarged(picture: np.ndarray, side: int) -> np.ndarray:
    """The picture [H, W, 3], every pixel repeated as often as it stays within `side`."""
    times = max(1, side // max(picture.shape[:2]))
    return np.repeat(np.repeat(picture, times, axis=0), times, axis=1)


def _even(picture: np.ndarray) -> np.ndarray:
    """H.264 takes even sides: the last line again where one is odd."""
    height, width = picture.shape[:2]
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
