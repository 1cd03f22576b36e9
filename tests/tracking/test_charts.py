"""Charts: where a value is drawn, which points of a long line are kept, and when the scale is logarithmic."""

import math

import numpy as np
import pytest

from unirl.tracking.charts import chart, short, thinned
from unirl.tracking.curve import Series


def coordinates(text: str) -> np.ndarray:
    return np.array([[float(value) for value in pair.split(",")] for pair in text.split()])


def fitted_line(ticks: tuple[tuple[float, str], ...]) -> tuple[float, float]:
    """Slope and offset that turn a coordinate into a value, from the labels of the ticks."""
    return tuple(np.polyfit([place for place, _ in ticks], [float(label) for _, label in ticks], 1))


def test_the_labels_of_the_axes_and_the_points_say_the_same():
    steps, values = [3, 40, 77, 120], [-0.31, 0.05, 0.92, 0.4]
    drawn = chart("a", "", [Series("a", steps, values, [0.1] * 4)])
    x, y = coordinates(drawn.lines[0].points).T
    assert np.polyval(fitted_line(drawn.x_ticks), x) == pytest.approx(steps, abs=0.3)
    assert np.polyval(fitted_line(drawn.y_ticks), y) == pytest.approx(values, abs=0.01)
    upper = coordinates(drawn.lines[0].band)[:4, 1]
    assert np.polyval(fitted_line(drawn.y_ticks), upper) == pytest.approx(np.array(values) + 0.1, abs=0.01)
    left, top, right, bottom = drawn.box
    assert (x >= left).all() and (x <= right).all() and (y >= top).all() and (y <= bottom).all()


def test_a_scale_is_logarithmic_only_if_one_value_would_hide_all_others():
    spike = [1000.0, 2.0, 1.0, 3.0, 2.0]
    drawn = chart("a", "", [Series("a", range(5), spike)])
    assert drawn.is_logarithmic
    y = coordinates(drawn.lines[0].points)[:, 1]
    logarithms = [(place, math.log10(float(label))) for place, label in drawn.y_ticks]
    slope = np.polyfit(*zip(*logarithms, strict=True), 1)
    assert 10 ** np.polyval(slope, y) == pytest.approx(spike, rel=0.02)
    for values in ([1000.0, 0.0, 1.0, 3.0], [10.0, 2.0, 1.0, 3.0]):
        assert not chart("a", "", [Series("a", range(4), values)]).is_logarithmic


def test_a_long_line_keeps_its_ends_and_every_peak():
    values = list(np.random.default_rng(0).normal(size=50_000))
    values[12_345], values[40_001] = 99.0, -99.0
    kept = thinned(Series("a", range(50_000), values), 600)
    assert len(kept.values) <= 600
    assert (kept.steps[0], kept.steps[-1]) == (0, 49_999)
    assert (max(kept.values), min(kept.values)) == (99.0, -99.0)
    assert all(values[step] == value for step, value in zip(kept.steps, kept.values, strict=True))
    assert kept.steps == sorted(kept.steps)


@pytest.mark.parametrize("values", [[0.5], [7.0, 7.0], [0.0, 0.0], [1e12, 1e12 + 1], [1e-9, 2e-9], [math.nan, 1.0]])
def test_odd_values_have_a_chart(values):
    drawn = chart("a", "", [Series("a", range(len(values)), values)])
    labels = [label for _, label in drawn.y_ticks]
    assert len(set(labels)) == len(labels) >= 2
    assert "nan" not in drawn.lines[0].points


def test_without_a_finite_value_there_is_no_chart():
    assert chart("a", "", [Series("a", [1, 2], [math.nan, math.inf])]) is None


def test_labels_have_the_digits_that_tell_them_apart():
    assert [short(value, 0.02) for value in (0.98, 1.0)] == ["0.98", "1.00"]
    assert short(2e-8, 1e-8) == "2e-08"
