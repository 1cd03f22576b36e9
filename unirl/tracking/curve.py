"""Reward curves with axes, lines and bands, drawn with PIL at twice the size and then reduced."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from PIL import Image, ImageDraw

from unirl.tracking.lettering import Colour, draw_text, width_of
from unirl.tracking.sheets import BACKGROUND, HIGH, INK, MARGIN, MUTED, RULE, SMALL_SIZE, TEXT_SIZE, TITLE_SIZE

SCALE = 2
"""Curves are drawn this many times larger and averaged down, which smooths the lines."""
BAND_OPACITY = 0.18
COLOURS: tuple[Colour, ...] = ((72, 98, 148), (150, 92, 150), (201, 132, 60))
"""Colours of the series, in order."""
QUARTER, FEWEST_JUDGED, MIN_ERRORS = 4, 8, 2.0
"""A series of at least FEWEST_JUDGED points has risen if the mean of its last quarter exceeds that of its first by more
than MIN_ERRORS standard errors."""


@dataclass(frozen=True)
class Series:
    """A line through points with a band of +- `spreads` around it (none if empty). Few points also get dots.

    The band is cut where it leaves `possible`, the smallest and largest value that one sample can have.
    """

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    spreads: Sequence[float] = ()
    possible: tuple[float, float] = (-math.inf, math.inf)

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values) or (self.spreads and len(self.spreads) != len(self.values)):
            raise ValueError(f"series {self.label!r}: steps, values and spreads must be of one length")

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and largest value that must be visible."""
        band = self.band()
        return min(low for low, _ in band), max(high for _, high in band)

    def band(self) -> list[tuple[float, float]]:
        """The lower and the upper end of the band at each point."""
        low, high = self.possible
        spreads = self.spreads or [0.0] * len(self.values)
        return [
            (min(value, max(value - spread, low)), max(value, min(value + spread, high)))
            for value, spread in zip(self.values, spreads, strict=True)
        ]

    def has_risen(self) -> bool:
        """Returns True if the values rose by more than the noise of the curve, which is that between its neighbours."""
        values, count = self.values, len(self.values) // QUARTER
        if len(values) < FEWEST_JUDGED:
            return False
        variance = sum((b - a) ** 2 for a, b in pairwise(values)) / 2 / (len(values) - 1)
        rise = (sum(values[-count:]) - sum(values[:count])) / count
        return rise > MIN_ERRORS * math.sqrt(2 * variance / count)


def training_curve(rows: Sequence[Mapping[str, Any]]) -> Series | None:
    """The mean reward of the samples of each step, with a band of their standard deviation."""
    points = [row for row in rows if "rollout/reward_mean" in row]
    means = [float(row["rollout/reward_mean"]) for row in points]
    spreads = [float(row.get("rollout/reward_std", 0.0)) for row in points]
    if not any(map(math.isfinite, means)):
        return None
    rewards = [
        float(row[name]) for row in points for name in ("rollout/reward_min", "rollout/reward_max") if name in row
    ]
    finite = [value for value in rewards if math.isfinite(value)]
    possible = (min(finite), max(finite)) if finite else (-math.inf, math.inf)
    label = "training: mean +- std, within the range of samples"
    return Series(label, [row["step"] for row in points], means, spreads, possible)


def held_out_curve(evaluations: Sequence[Mapping[str, float]]) -> Series | None:
    """The mean reward of each evaluation, with a band of its standard error. None if there were not two."""
    points = [row for row in evaluations if "eval/reward_mean" in row]
    means = [row["eval/reward_mean"] for row in points]
    errors = [row.get("eval/reward_stderr", 0.0) for row in points]
    if len(points) < 2 or not any(map(math.isfinite, means)):
        return None
    return Series("held out: mean +- standard error", [row["step"] for row in points], means, errors)


@dataclass(frozen=True)
class Axes:
    """Maps a rectangle of steps and values to a rectangle of pixels."""

    left: float
    top: float
    right: float
    bottom: float
    steps: tuple[float, float]
    ticks: Sequence[float]
    """Values with a line, from the bottom to the top."""

    def x(self, step: float) -> float:
        low, high = self.steps
        return self.left + (step - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)


def reward_curve(
    series: Sequence[Series],
    title: str,
    *,
    width: int = 720,
    height: int = 420,
    remark: str = "",
    across: str = "step",
) -> Image.Image:
    """A diagram of up to three series over steps. Points that are not finite are left out.

    A single series is green if it has risen by more than its noise.

    Args:
        remark: a line below the diagram.
        across: what the steps are.
    """
    drawn = [finite for one in series if (finite := finite_points(one)).values]
    if not drawn or len(drawn) > len(COLOURS):
        raise ValueError(f"a curve needs 1 to {len(COLOURS)} series with a finite point, got {len(drawn)}")
    canvas = Image.new("RGB", (width * SCALE, height * SCALE), BACKGROUND)
    axes = _axes(drawn, width, height)
    _grid(canvas, axes, remark, across)
    colours = (HIGH,) if len(drawn) == 1 and drawn[0].has_risen() else COLOURS
    for one, colour in zip(drawn, colours, strict=False):
        _band(canvas, axes, one, colour)
        _line(canvas, axes, one, colour)
    _words(canvas, drawn, colours, title)
    return canvas.resize((width, height), Image.Resampling.LANCZOS)


def beside(*images: Image.Image) -> Image.Image:
    """Images side by side on one page, centred vertically."""
    page = Image.new("RGB", (sum(each.width for each in images), max(each.height for each in images)), BACKGROUND)
    left = 0
    for each in images:
        page.paste(each, (left, (page.height - each.height) // 2))
        left += each.width
    return page


def below(*images: Image.Image) -> Image.Image:
    """Images below each other on one page."""
    page = Image.new("RGB", (max(each.width for each in images), sum(each.height for each in images)), BACKGROUND)
    top = 0
    for each in images:
        page.paste(each, (0, top))
        top += each.height
    return page


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) from at most `low` to at least `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def finite_points(series: Series) -> Series:
    """The series without points whose value or spread is not finite."""
    spreads = series.spreads or [0.0] * len(series.values)
    points = zip(series.steps, series.values, spreads, strict=True)
    finite = [point for point in points if all(map(math.isfinite, point))]
    steps, values, bands = ([point[i] for point in finite] for i in range(3))
    return replace(series, steps=steps, values=values, spreads=bands if series.spreads else ())


def _axes(series: Sequence[Series], width: int, height: int) -> Axes:
    low, high = min(one.bounds[0] for one in series), max(one.bounds[1] for one in series)
    ticks = nice_ticks(low, high if high > low else low + 1.0)
    steps = [step for one in series for step in one.steps]
    last = max(steps) if max(steps) > min(steps) else min(steps) + 1
    left, top = MARGIN + 40, MARGIN + 66
    box = (left * SCALE, top * SCALE, (width - MARGIN) * SCALE, (height - MARGIN - 34) * SCALE)
    return Axes(*box, steps=(min(steps), last), ticks=ticks)


def _grid(canvas: Image.Image, axes: Axes, remark: str, across: str) -> None:
    draw = ImageDraw.Draw(canvas)
    small = SMALL_SIZE * SCALE
    digits = max(0, -math.floor(math.log10(axes.ticks[1] - axes.ticks[0]) + 1e-9))
    for value in axes.ticks:
        y = axes.y(value)
        draw.line([(axes.left, y), (axes.right, y)], fill=RULE, width=SCALE)
        draw_text(draw, (axes.left - 10 * SCALE, y), f"{value:.{digits}f}", small, MUTED, "rm")
    for step in nice_ticks(*axes.steps, count=6):
        if axes.steps[0] <= step <= axes.steps[1]:
            draw_text(draw, (axes.x(step), axes.bottom + 10 * SCALE), f"{step:g}", small, MUTED, "ma")
    draw_text(draw, (axes.right, axes.bottom + 30 * SCALE), across, small, MUTED, "ra")
    draw_text(draw, (axes.left, axes.bottom + 30 * SCALE), remark, small, INK, "la")


def _band(canvas: Image.Image, axes: Axes, series: Series, colour: Colour) -> None:
    if not series.spreads or len(series.values) < 2:
        return
    points = list(zip(series.steps, series.band(), strict=True))
    upper = [(axes.x(step), axes.y(high)) for step, (_, high) in points]
    lower = [(axes.x(step), axes.y(low)) for step, (low, _) in reversed(points)]
    mask = Image.new("L", canvas.size, 0)
    ImageDraw.Draw(mask).polygon([*upper, *lower], fill=round(255 * BAND_OPACITY))
    canvas.paste(Image.new("RGB", canvas.size, colour), (0, 0), mask)


def _line(canvas: Image.Image, axes: Axes, series: Series, colour: Colour) -> None:
    draw = ImageDraw.Draw(canvas)
    points = [(axes.x(step), axes.y(value)) for step, value in zip(series.steps, series.values, strict=True)]
    if len(points) > 1:
        draw.line(points, fill=colour, width=2 * SCALE + 1, joint="curve")
    radius = 4 * SCALE if len(points) <= 12 else 0
    for x, y in points if radius else []:
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour)


def _words(canvas: Image.Image, series: Sequence[Series], colours: Sequence[Colour], title: str) -> None:
    draw = ImageDraw.Draw(canvas)
    draw_text(draw, (MARGIN * SCALE, (MARGIN - 6) * SCALE), title, TITLE_SIZE * SCALE, INK, "la")
    x = MARGIN * SCALE
    for one, colour in zip(series, colours, strict=False):
        y = (MARGIN + 38) * SCALE
        draw.ellipse([x, y - 5 * SCALE, x + 10 * SCALE, y + 5 * SCALE], fill=colour)
        draw_text(draw, (x + 18 * SCALE, y), one.label, TEXT_SIZE * SCALE, MUTED, "lm")
        x += round(width_of(one.label, TEXT_SIZE * SCALE)) + 46 * SCALE
