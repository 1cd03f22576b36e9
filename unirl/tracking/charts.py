"""Line charts as the numbers of an SVG image, which a template writes. Colours and fonts are those of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from unirl.tracking.curve import Axes, Series, finite_points, nice_ticks

MAX_POINTS = 600
"""Points of a line. Of more, the smallest and the largest value of each of MAX_POINTS / 2 parts are drawn."""
FEW_POINTS = 30
"""Number of points up to which each is also drawn as a dot."""
SPIKE = 50.0
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 36
"""Margins around the diagram in pixels."""


@dataclass(frozen=True)
class ChartLine:
    """One series, as coordinates in pixels."""

    label: str
    points: str
    """`x,y x,y ...` of a polyline."""
    band: str
    """The outline of the band around it; empty if there is none."""
    dots: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Chart:
    """A diagram of lines over steps."""

    title: str
    about: str
    width: int
    height: int
    lines: tuple[ChartLine, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    is_logarithmic: bool
    summary: str
    """The first and the last value in words, for those who do not see the lines."""

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the diagram within the image."""
        return LEFT, TOP, self.width - RIGHT, self.height - BOTTOM


def chart(title: str, about: str, series: Sequence[Series], width: int = 340, height: int = 180) -> Chart | None:
    """The chart of some series. None if no point is finite.

    The scale is logarithmic if the largest value would hide all others: every value is positive, there is no band, and
    the largest is more than SPIKE times the median.
    """
    shown = [thinned(finite) for one in series if (finite := finite_points(one)).values]
    if not shown:
        return None
    is_logarithmic = _has_spike(shown)
    drawn = [_logarithm(one) for one in shown] if is_logarithmic else shown
    low, high = min(one.bounds[0] for one in drawn), max(one.bounds[1] for one in drawn)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # Ticks cannot tell values apart that are nearly equal.
        half = max(abs(high), 1.0) / 2
        low, high = low - half, high + half
    y_ticks = [float(power) for power in range(math.floor(low), math.ceil(high) + 1)] if is_logarithmic else []
    y_ticks = y_ticks or nice_ticks(low, high, 4)
    steps = [step for one in drawn for step in one.steps]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    axes = Axes(LEFT, TOP, width - RIGHT, height - BOTTOM, (first, last), (y_ticks[0], y_ticks[-1]))
    return Chart(
        title,
        about,
        width,
        height,
        tuple(_line(one, axes) for one in drawn),
        tuple((axes.x(step), f"{step:g}") for step in nice_ticks(first, last, 5) if _is_step(step, first, last)),
        tuple((axes.y(tick), _label(tick, y_ticks, is_logarithmic)) for tick in y_ticks),
        is_logarithmic,
        "; ".join(
            f"{one.label}: {one.values[0]:.4g} at step {one.steps[0]:g}, {one.values[-1]:.4g} at step {one.steps[-1]:g}"
            for one in shown
        ),
    )


def thinned(series: Series, most: int = MAX_POINTS) -> Series:
    """At most `most` points that keep every peak: the smallest and the largest of each part, and both ends."""
    count = len(series.values)
    if count <= most:
        return series
    parts = most // 2 - 1
    kept = {0, count - 1}
    for part in range(parts):
        numbers = range(count * part // parts, count * (part + 1) // parts)
        kept |= {min(numbers, key=series.values.__getitem__), max(numbers, key=series.values.__getitem__)}
    chosen = sorted(kept)
    return Series(
        series.label,
        [series.steps[i] for i in chosen],
        [series.values[i] for i in chosen],
        [series.spreads[i] for i in chosen] if series.spreads else (),
        series.possible,
    )


def short(value: float, step: float) -> str:
    """The label of a tick, with the digits that tell it from the next one."""
    if value != 0 and not 1e-4 <= abs(step) < 1e6:
        return f"{value:.3g}" if abs(value) > step / 2 else "0"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{digits}f}" if abs(value) > step / 2 else "0"


def _logarithm(series: Series) -> Series:
    return replace(series, values=[math.log10(value) for value in series.values])


def _has_spike(series: Sequence[Series]) -> bool:
    values = [value for one in series for value in one.values]
    return not any(one.spreads for one in series) and min(values) > 0 and max(values) > SPIKE * median(values)


def _label(tick: float, ticks: Sequence[float], is_logarithmic: bool) -> str:
    return f"{10**tick:g}" if is_logarithmic else short(tick, ticks[1] - ticks[0])


def _line(series: Series, axes: Axes) -> ChartLine:
    points = [(axes.x(step), axes.y(value)) for step, value in zip(series.steps, series.values, strict=True)]
    outline: list[tuple[float, float]] = []
    if series.spreads and len(points) > 1:
        ends = list(zip(series.steps, series.band(), strict=True))
        outline = [(axes.x(step), axes.y(high)) for step, (_, high) in ends]
        outline += [(axes.x(step), axes.y(low)) for step, (low, _) in reversed(ends)]
    dots = points if len(points) <= FEW_POINTS else []
    return ChartLine(series.label, _coordinates(points), _coordinates(outline), tuple(map(_pair, dots)))


def _is_step(step: float, first: float, last: float) -> bool:
    return first <= step <= last and step == round(step)


def _pair(point: tuple[float, float]) -> tuple[str, str]:
    return f"{point[0]:.1f}", f"{point[1]:.1f}"


def _coordinates(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(",".join(_pair(point)) for point in points)
