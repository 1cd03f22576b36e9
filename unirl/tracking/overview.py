"""`overview.png` of a run: its reward curve, beside what the newest samples look like or say.

Everything is read from the files of the run, so the page can be drawn while it runs, after its end, or elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from PIL import Image, ImageOps

from unirl.media.files import ImageLimits, UnreadableMedia, read_regular
from unirl.media.images import PLAIN_PIXELS, decode_upright, is_plain, open_header
from unirl.tracking.curve import beside, held_out_curve, reward_curve, training_curve
from unirl.tracking.lettering import wrap
from unirl.tracking.media import read_samples
from unirl.tracking.record import RunRecord
from unirl.tracking.run_directory import remark_of
from unirl.tracking.samples import Media, SampleGroup, SampleRow, SampleTable, pairs_of
from unirl.tracking.sheets import (
    BACKGROUND,
    BELOW,
    GAP,
    MARGIN,
    MUTED,
    SMALL_SIZE,
    TEXT_SIZE,
    TOP,
    Rectangle,
    Sheet,
)  # fmt: skip
from unirl.tracking.tables import read_rows

WIDTH = 900
"""Pixels of a page of texts."""
MAX_PROMPTS = 4
MAX_LINES = 6
"""Lines that are shown of a text."""
THUMBNAIL = 96
MAX_BYTES = 2**26
"""Largest file of a prompt's image that is shown."""
LARGEST_SHEET = 2400
"""Longer side of the sheet on the page in pixels. Larger sheets are reduced; the file of the step is not."""


def draw_overview(root: Path) -> Path | None:
    """Writes `overview.png` of the run in `root`. Returns None, and writes nothing, if no step has a finite reward."""
    rows = list(read_rows(root / "metrics.jsonl"))
    found = training_curve(rows), held_out_curve(RunRecord(root).evaluations)
    curves = [series for series in found if series is not None]
    if not curves:
        return None
    page = reward_curve(curves, "Reward", remark=remark_of(root))
    samples = newest_samples(root)
    if samples is not None:
        page = beside(samples, page)
    path = root / "overview.png"
    temporary = path.with_name(f".{path.name}.tmp")
    page.save(temporary, format="PNG")
    temporary.replace(path)
    return path


def newest_samples(root: Path) -> Image.Image | None:
    """The before/after sheet of the newest evaluation, else its samples, else the newest samples of training."""
    for pattern in ("eval/step-*", "samples/step-*"):
        folder = max(root.glob(pattern), default=None)
        if folder is None:
            continue
        for name in ("before_after.png", "contact_sheet.png"):
            if (folder / name).is_file():
                with Image.open(folder / name) as sheet:
                    return _reduced(sheet.convert("RGB"))
        shown = list(exchanges(root, folder))[:MAX_PROMPTS]
        if shown:
            return text_sheet(shown)
    return None


@dataclass(frozen=True)
class Exchange:
    """A prompt, and the responses to it that a page shows side by side, each with a heading."""

    prompt: SampleRow
    responses: tuple[tuple[str, str], ...]


def text_sheet(exchanges: Sequence[Exchange]) -> Image.Image:
    """Prompts, each with the images that it is about, and the responses to it in columns."""
    columns = len(exchanges[0].responses)
    width = (WIDTH - 2 * MARGIN - (columns - 1) * GAP * 2) // columns
    heights = [_height(exchange, width) for exchange in exchanges]
    about = "prompts whose reward changed most, before and after" if columns > 1 else "newest prompts and responses"
    sheet = Sheet(WIDTH, TOP + sum(heights) + MARGIN, "Responses", about)
    y = TOP
    for exchange, height in zip(exchanges, heights, strict=True):
        image = thumbnail(exchange.prompt.images)
        left = MARGIN + (THUMBNAIL + GAP if image is not None else 0)
        if image is not None:
            sheet.image.paste(image, (MARGIN, y))
        below = y
        for line in wrap(exchange.prompt.prompt, WIDTH - MARGIN - left, TEXT_SIZE, 3):
            sheet.text(left, below, line, TEXT_SIZE)
            below += TEXT_SIZE + 5
        below = max(below, y + (THUMBNAIL if image is not None else 0)) + GAP
        for number, (heading, text) in enumerate(exchange.responses):
            x = MARGIN + number * (width + 2 * GAP)
            sheet.text(x, below, heading, SMALL_SIZE, MUTED)
            box = Rectangle(x, below + SMALL_SIZE + 6, width, MAX_LINES * (SMALL_SIZE + 5))
            sheet.wrapped(box, text or "(empty)", SMALL_SIZE)
        y += height
    return sheet.image


def thumbnail(images: Sequence[str]) -> Image.Image | None:
    """The first image of a prompt within a small square. None if there is none that can be read quickly."""
    for uri in images[:1]:
        with suppress(OSError, UnreadableMedia):
            data = read_regular(urlparse(uri).path, MAX_BYTES)
            image = open_header(data, ImageLimits(pixels=PLAIN_PIXELS))
            if is_plain(image, data):
                resample = Image.Resampling.LANCZOS if max(image.size) > THUMBNAIL else Image.Resampling.NEAREST
                return ImageOps.pad(decode_upright(image), (THUMBNAIL, THUMBNAIL), resample, color=BACKGROUND)
    return None


def _height(exchange: Exchange, width: int) -> int:
    """Pixels that a prompt and its responses take, with the space below them."""
    has_image = thumbnail(exchange.prompt.images) is not None
    room = WIDTH - 2 * MARGIN - (THUMBNAIL + GAP if has_image else 0)
    top = len(wrap(exchange.prompt.prompt, room, TEXT_SIZE, 3)) * (TEXT_SIZE + 5)
    most = max(len(wrap(text or "(empty)", width, SMALL_SIZE, MAX_LINES)) for _, text in exchange.responses)
    return max(top, THUMBNAIL if has_image else 0) + GAP + SMALL_SIZE + 6 + most * (SMALL_SIZE + 5) + BELOW


def exchanges(root: Path, folder: Path) -> Iterator[Exchange]:
    """The prompts of a step with their first response; for two evaluations, those that changed most come first."""
    after = _table(folder)
    first = min(root.glob("eval/step-*/scores.json"), default=None)
    if after is None or not after.media.console_lines():  # Images have a sheet.
        return
    if folder.parent.name == "eval" and first is not None and first.parent != folder:
        before = _table(first.parent)
        with suppress(ValueError):  # Other prompts were evaluated in between.
            pairs = pairs_of(before, after) if before is not None else []
            for old, new in sorted(pairs, key=lambda pair: -abs(pair[1].mean_reward - pair[0].mean_reward)):
                yield _compared(before or after, after, old, new)
            return
    for group in after.groups():
        row = after.rows[group.rows[0]]
        yield Exchange(row, ((f"reward {row.reward:.2f}", row.text),))


def _compared(before: SampleTable[Media], after: SampleTable[Media], old: SampleGroup, new: SampleGroup) -> Exchange:
    """The sample of a prompt whose reward changed most."""
    rows = [(before.rows[a], after.rows[b]) for a, b in zip(old.rows, new.rows, strict=False)]
    was, now = max(rows, key=lambda pair: abs(pair[1].reward - pair[0].reward))
    return Exchange(
        now, ((f"before: reward {was.reward:.2f}", was.text), (f"after: reward {now.reward:.2f}", now.text))
    )


def _table(folder: Path) -> SampleTable[Media] | None:
    """The samples of an evaluation or of a training step."""
    scores, manifest = folder / "scores.json", folder / "manifest.jsonl"
    rows = json.loads(scores.read_text())["samples"] if scores.is_file() else list(read_rows(manifest))
    return read_samples(rows, folder) if rows else None


def _reduced(sheet: Image.Image) -> Image.Image:
    scale = LARGEST_SHEET / max(sheet.size)
    if scale >= 1:
        return sheet
    return sheet.resize((round(sheet.width * scale), round(sheet.height * scale)), Image.Resampling.LANCZOS)
