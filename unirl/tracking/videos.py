"""Video samples: WebP, MP4 and GIF files, strips of frames, sheets of strips, and a page that plays the videos."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from PIL import Image, ImageOps, ImageSequence

from unirl.tracking.images import LOSSLESS_UP_TO
from unirl.tracking.measures import image_measures
from unirl.tracking.mirrors import Mirrors, Preview
from unirl.tracking.samples import Fact, Gallery, Media, MirroredPage, SampleRow, SampleTable, Sides, StepRewards
from unirl.tracking.sheets import (
    BACKGROUND,
    GAP,
    LABEL,
    MAX_PER_ROW,
    PAGE,
    TiledMedia,
    Tiles,
    fit,
    gallery_sheet,
    saved,
)
from unirl.tracking.tables import replace_text
from unirl.tracking.texts import listing
from unirl.types.primitives import VideoPreviews

STRIP_FRAMES, STRIP_SIDE = 5, 128
"""Frames of a strip, and pixels along the longer side of each. Smaller frames are enlarged by repeating pixels."""
STRIP_GAP = 4
FEWEST_ACROSS = 2
"""Smallest number of strips side by side on a sheet, even if they are wide."""
BLANK = 128
"""The level of the frame that stands for a video which was not made."""
NOT_DRAWN = "no video was made of this one"
"""The text of a row without a video, such as an episode that was not drawn."""
MAX_MIRRORED_VIDEOS = 4
"""Videos of one step that mirrors get in addition to the contact sheet."""


@dataclass(frozen=True, eq=False)
class StoredVideo:
    """Evenly spaced frames of a video. Played back, they last as long as the whole video."""

    pixels: np.ndarray  # [F, h, w, 3] uint8
    num_frames: int
    """Number of frames of the whole video; the fields below describe the whole video too. 0: there is no video, and
    `pixels` is one blank frame."""
    fps: float
    width: int
    height: int

    def __post_init__(self) -> None:
        assert self.pixels.dtype == np.uint8 and self.pixels.ndim == 4 and self.pixels.shape[3] == 3
        assert 1 <= len(self.pixels) <= max(self.num_frames, 1)

    @property
    def frame_ms(self) -> float:
        """Milliseconds for which each stored frame is shown."""
        return 1000 * (max(self.num_frames, 1) / self.fps) / len(self.pixels)

    def facts(self) -> dict[str, Fact]:
        """Facts for the manifest. `shown` is the number of stored frames."""
        size = f"{self.width}x{self.height}"
        return {"frames": self.num_frames, "shown": len(self.pixels), "fps": self.fps, "size": size}

    @classmethod
    def read(cls, row: SampleRow, folder: Path) -> StoredVideo:
        """Reads the video of a row of a manifest. A row without a file gets one blank frame."""
        width, height = (int(side) for side in str(row.facts["size"]).split("x"))
        num_frames, shown, fps = int(row.facts["frames"]), int(row.facts["shown"]), float(row.facts["fps"])
        if not row.file:
            return cls(np.full((1, height, width, 3), BLANK, np.uint8), 0, fps, width, height)
        pixels = read_webp(folder / row.file, shown, 1000 * max(num_frames, 1) / fps / shown)
        return cls(pixels, num_frames, fps, width, height)

    def strip(self) -> np.ndarray:
        """[h', w', 3] uint8: up to STRIP_FRAMES frames from the first to the last, side by side."""
        count = min(STRIP_FRAMES, len(self.pixels))
        chosen = [round(place * (len(self.pixels) - 1) / max(count - 1, 1)) for place in range(count)]
        frames = [_framed(self.pixels[number]) for number in chosen]
        gap = np.full((len(frames[0]), STRIP_GAP, 3), BACKGROUND, np.uint8)
        return np.concatenate([frames[0], *(part for frame in frames[1:] for part in (gap, frame))], axis=1)

    def write(self, name: str, folder: Path) -> str:
        """Writes `name`.webp, `name`-strip.png and, if PyAV is installed, `name`.mp4. Returns the name of the WebP."""
        file = f"{name}.webp"
        write_webp(folder / file, self.pixels, self.frame_ms, lossless=max(self.pixels.shape[1:3]) <= LOSSLESS_UP_TO)
        Image.fromarray(self.strip()).save(folder / f"{name}-strip.png")
        if can_write_mp4():
            write_mp4(folder / f"{name}.mp4", self.pixels, 1000 / self.frame_ms)
        return file


VideoT = TypeVar("VideoT", bound="VideoMedia")


@dataclass(frozen=True, eq=False)
class VideoMedia(TiledMedia):
    """Videos with one frame size and any number of frames."""

    videos: tuple[StoredVideo, ...]
    kind: ClassVar[str] = "video"

    def __post_init__(self) -> None:
        sizes = {video.pixels.shape[1:3] for video in self.videos}
        assert len(sizes) <= 1, f"frames of several sizes: {sizes}"

    @classmethod
    def of(cls, videos: VideoPreviews) -> VideoMedia:
        """Converts the previews of an engine."""
        pixels = videos.frames.permute(0, 2, 3, 1).contiguous().numpy()
        bounds = pairwise(videos.offsets.tolist())
        rows = zip(bounds, videos.num_frames.tolist(), strict=True)
        blank = np.full((1, *pixels.shape[1:]), BLANK, np.uint8)
        parts = [(pixels[a:b] if count else blank, count) for (a, b), count in rows]
        return cls(tuple(StoredVideo(part, count, videos.fps, videos.width, videos.height) for part, count in parts))

    def __len__(self) -> int:
        return len(self.videos)

    def measures(self) -> dict[str, float]:
        """The mean distance between the middle frames of the videos, and their fine detail."""
        frames = [video.pixels[len(video.pixels) // 2] for video in self.videos if video.num_frames]
        return image_measures(np.stack(frames)) if frames else {}

    @classmethod
    def read(cls, rows: Sequence[SampleRow], folder: Path) -> VideoMedia:
        """Reads the files that the rows name. A row without one gets a blank frame of the size of the others."""
        videos = [StoredVideo.read(row, folder) for row in rows]
        shape = next((video.pixels.shape[1:] for row, video in zip(rows, videos, strict=True) if row.file), None)
        if shape is not None:
            blank = np.full((1, *shape), BLANK, np.uint8)
            videos = [each if each.num_frames else replace(each, pixels=blank) for each in videos]
        return cls(tuple(videos))

    def write(self, rows: Sequence[SampleRow], names: Sequence[str], folder: Path) -> list[SampleRow]:
        """Writes an animated WebP, a strip of frames and, if PyAV is installed, an MP4 for each video with frames."""
        named = zip(names, self.videos, strict=True)
        files = [video.write(name, folder) if video.num_frames else "" for name, video in named]
        return [
            replace(row, file=file, text=row.text if file else NOT_DRAWN, facts={**row.facts, **video.facts()})
            for row, file, video in zip(rows, files, self.videos, strict=True)
        ]

    def compares_with(self, other: Media) -> bool:
        """Returns True for videos with the same frame size."""
        return isinstance(other, VideoMedia) and self._shape() == other._shape()

    def tiles(self) -> Tiles:
        """One strip per video. The strip of a short video leaves the rest of its tile empty."""
        strips = [video.strip() for video in self.videos]
        height, width = len(strips[0]), max(strip.shape[1] for strip in strips)
        across = min(max((PAGE - LABEL) // (width + GAP), FEWEST_ACROSS), MAX_PER_ROW)
        return Tiles([_padded(strip, width) for strip in strips], width, height, across, self._about())

    def page(self, table: SampleTable[Self], folder: Path, title: str) -> Path:
        """Writes a sheet of strips, and a Markdown page that plays the videos. Samples without a video are left out."""
        shown = chosen_rows(table, with_videos(table) or range(len(table.rows)))

        def shown_as(row: int, _: int) -> str:
            file, video = shown.rows[row].file, shown.media.videos[row]
            height, width = enlarged(video.pixels[0], STRIP_SIDE).shape[:2]
            moving = f'<img src="{file}" width="{width}" height="{height}" alt="sample {row}">'
            mp4 = Path(file).with_suffix(".mp4").name
            return f"{moving}\n\n[MP4]({mp4})\n\n" if (folder / mp4).exists() else f"{moving}\n\n"

        replace_text(folder / "samples.md", listing(shown, title, shown_as))
        return TiledMedia.page(shown.media, shown, folder, title)

    def comparison(self, before: SampleTable[Self], after: SampleTable[Self], sides: Sides, folder: Path) -> Path:
        """Writes a sheet of the samples that have a video in both evaluations."""
        both = sorted({*with_videos(before)} & {*with_videos(after)}) or range(len(after.rows))
        before, after = chosen_rows(before, both), chosen_rows(after, both)
        return TiledMedia.comparison(after.media, before, after, sides, folder)

    def gallery(self, drawn: Gallery, folder: Path) -> Path:
        """Writes the files of every video, a manifest with prompts and seeds, and a labelled grid of strips."""
        for number, video in enumerate(self.videos):
            video.write(drawn.name(number), folder)
        names = [f"{drawn.name(number)}.webp" for number in range(len(self.videos))]
        drawn.write_manifest(folder / "manifest.jsonl", [{"file": name} for name in names])
        return saved(gallery_sheet(self.tiles(), drawn), folder / "grid.png")

    def remarks(self) -> list[str]:
        """A note if MP4 files cannot be written here."""
        if can_write_mp4():
            return []
        return ["videos are stored as animated WebP without MP4. To get both: pip install 'unirl[video]'"]

    def mirror(self, mirrors: Mirrors, page: MirroredPage, rows: Sequence[SampleRow]) -> None:
        """Sends the sheet and the first videos."""
        mirrors.each(lambda mirror: mirror.images(page.step, page.key, [Preview(page.path, page.title)]))
        first = [row for row in rows if row.file][:MAX_MIRRORED_VIDEOS]
        previews = [Preview(page.path.parent / row.file, f"{row.reward:.3f}  {row.prompt}") for row in first]
        mirrors.each(lambda mirror: mirror.videos(page.step, page.key, previews))

    def _shape(self) -> set[tuple[int, ...]]:
        return {video.pixels.shape[1:] for video in self.videos}

    def _about(self) -> str:
        """One phrase that describes the strips."""
        first = self.videos[0]
        fewest, most = (pick(video.num_frames for video in self.videos) for pick in (min, max))
        frames = f"{fewest} to {most} frames" if fewest < most else f"{most} frames" if most > 1 else "1 frame"
        strip = f"{STRIP_FRAMES} of {frames}" if most > STRIP_FRAMES else frames
        return f"{strip} of {first.width} x {first.height}, {first.fps:g} per second"


def with_videos(table: SampleTable[VideoMedia]) -> list[int]:
    """The numbers of the rows that have a video."""
    return [row for row, video in enumerate(table.media.videos) if video.num_frames]


def chosen_rows(table: SampleTable[VideoT], rows: Sequence[int]) -> SampleTable[VideoT]:
    """Some rows of a table of videos, which says how many there are in all."""
    if len(rows) == len(table.rows):
        return table
    whole = table.step or StepRewards(len(table.rows), table.mean_reward)
    videos = tuple(table.media.videos[row] for row in rows)
    return replace(
        table, rows=tuple(table.rows[row] for row in rows), media=replace(table.media, videos=videos), step=whole
    )


def _framed(frame: np.ndarray) -> np.ndarray:
    """The frame [h, w, 3] in its size on a strip."""
    height, width = frame.shape[:2]
    if max(height, width) <= STRIP_SIDE:
        return enlarged(frame, STRIP_SIDE)
    scale = STRIP_SIDE / max(height, width)
    return np.asarray(fit(frame, max(1, round(width * scale)), max(1, round(height * scale))))


def _padded(image: np.ndarray, width: int, below: int = 0) -> np.ndarray:
    """The image with empty space to its right and below it."""
    return np.asarray(ImageOps.expand(Image.fromarray(image), (0, 0, width - image.shape[1], below), BACKGROUND))


PLAYED_SIDE = 256
"""Videos whose sides are all shorter are enlarged to about this many pixels for MP4 and GIF, by repeating pixels."""
ENCODER = "libx264"
QUALITY = {"crf": "16", "preset": "veryfast"}
"""Encoder settings of MP4: nearly lossless to the eye."""


def write_webp(path: Path, frames: np.ndarray, frame_ms: float, lossless: bool) -> None:
    """Writes frames [F, H, W, 3] uint8 as an endless animation with `frame_ms` per frame."""
    first, *others = [Image.fromarray(frame) for frame in frames]
    durations = [max(b - a, 1) for a, b in pairwise(_starts(len(frames) + 1, frame_ms))]
    first.save(
        path, save_all=True, append_images=others, duration=durations, loop=0, lossless=lossless, quality=90, method=0
    )


def read_webp(path: Path, num_frames: int, frame_ms: float) -> np.ndarray:
    """[F, H, W, 3] uint8, the frames that `write_webp` wrote. A file stores equal adjacent frames only once."""
    frames, durations = _webp_frames(path)
    ends = np.cumsum(durations)[:-1]
    return np.stack([frames[number] for number in np.searchsorted(ends, _starts(num_frames, frame_ms), side="right")])


def _webp_frames(path: Path) -> tuple[list[np.ndarray], list[int]]:
    """The stored frames [H, W, 3] of a file, and the milliseconds for which each is shown."""
    frames, durations = [], []
    with Image.open(path, formats=["WEBP"]) as file:
        for frame in ImageSequence.Iterator(file):
            frames.append(np.asarray(frame.convert("RGB")))
            durations.append(frame.info.get("duration", 0))  # PIL sets it when the pixels are read
    return frames, durations


def _starts(count: int, frame_ms: float) -> list[int]:
    """Start time of each frame in whole milliseconds, at least 1 ms apart."""
    return [round(number * max(frame_ms, 1.0)) for number in range(count)]


def can_write_mp4() -> bool:
    """Returns True if PyAV is installed and has an H.264 encoder."""
    try:
        import av
    except ImportError:
        return False  # not installed, or built for another system
    return ENCODER in av.codecs_available


def write_mp4(path: Path, frames: np.ndarray, fps: float) -> None:
    """Writes frames [F, H, W, 3] uint8 as H.264 that any player shows. The last line of an odd side is repeated."""
    import av

    large = np.stack([enlarged(frame, PLAYED_SIDE) for frame in frames])
    height, width = large.shape[1:3]
    images = np.pad(large, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    # With the index at the front, a browser can play the file while it loads.
    with av.open(str(path), mode="w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream: Any = container.add_stream(ENCODER, rate=Fraction(fps).limit_denominator(1000), options=QUALITY)
        stream.height, stream.width, stream.pix_fmt = images.shape[1], images.shape[2], "yuv420p"
        stream.thread_count = 1
        for frame in [*(av.VideoFrame.from_ndarray(image, format="rgb24") for image in images), None]:
            container.mux(stream.encode(frame))


def gif_of(webp: Path) -> bytes:
    """The animation of a WebP file as GIF, with 256 colours per frame."""
    frames, durations = _webp_frames(webp)
    first, *others = [Image.fromarray(enlarged(frame, PLAYED_SIDE)) for frame in frames]
    file = io.BytesIO()
    first.save(file, format="GIF", save_all=True, append_images=others, duration=durations, loop=0)
    return file.getvalue()


def enlarged(image: np.ndarray, side: int) -> np.ndarray:
    """The image [H, W, 3] with every pixel repeated as often as the image stays within `side`."""
    times = max(1, side // max(image.shape[:2]))
    return np.repeat(np.repeat(image, times, axis=0), times, axis=1)
