"""Pictures: what is on them, measured in pixels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from unirl.tracking.curve import Series, below, beside, nice_ticks, reward_curve
from unirl.tracking.images import ImageMedia, pixels
from unirl.tracking.lettering import lettering, width_of, wrap
from unirl.tracking.samples import REWRITE, SampleRow, SampleTable, StepRewards
from unirl.tracking.sheets import (
    BACKGROUND,
    CAPTION,
    HIGH,
    LINE,
    LOW,
    MARGIN,
    TILE,
    before_after_sheet,
    contact_sheet,
    fit,
    shade,
    tile_size,
)

EVIL = "[b]<script>\x1b[2J \u732b" + "verylongword" * 30


def table(rewards: list[list[float]], side: int = 16) -> SampleTable[ImageMedia]:
    """One flat colour per sample, so that it can be found on a sheet."""
    rows = [
        SampleRow(sample_id=f"{p}:{s}", group_id=f"g{p}", prompt=f"prompt {p}", reward=reward)
        for p, group in enumerate(rewards)
        for s, reward in enumerate(group)
    ]
    images = np.stack([np.full((side, side, 3), [250, 10 * i, 5], np.uint8) for i in range(len(rows))])
    return SampleTable(tuple(rows), ImageMedia(images))


def places(sheet: Image.Image, sample: int) -> tuple[int, int, int, int]:
    """The rectangle (left, top, right, bottom) of a sample's colour."""
    y, x = np.nonzero((np.asarray(sheet) == [250, 10 * sample, 5]).all(axis=2))
    return x.min(), y.min(), x.max() + 1, y.max() + 1


def test_every_sample_of_a_group_is_on_the_sheet_best_first():
    rewards = [[0.1, 0.9, 0.5], [0.4, 0.2, 0.3]]
    sheet = contact_sheet(table(rewards), "title")
    boxes = [places(sheet, sample) for sample in range(6)]
    assert all((right - left, bottom - top) == (TILE, TILE) for left, top, right, bottom in boxes)
    for group in (0, 1):
        order = sorted(range(3), key=lambda s: boxes[3 * group + s][0])
        assert order == sorted(range(3), key=lambda s: -rewards[group][s])
    assert boxes[0][1] < boxes[3][1]


def test_below_an_image_of_a_rewritten_prompt_stands_the_rewrite():
    """Also on the side of a comparison on which a prompt was drawn as it is."""
    plain = table([[0.5, 0.5]])
    rows = [replace(row, facts={REWRITE: "a red circle"}) for row in plain.rows]
    rewritten, half = replace(plain, rows=tuple(rows)), replace(plain, rows=(rows[0], plain.rows[1]))
    sheet, bare = contact_sheet(rewritten, "t"), contact_sheet(plain, "t")
    assert sheet.height == bare.height + LINE

    def below(image, sample):
        left, _, right, bottom = places(image, sample)
        return np.asarray(image)[bottom + CAPTION : bottom + CAPTION + LINE, left:right]

    for image in (sheet, contact_sheet(half, "t"), before_after_sheet(plain, rewritten, ("before", "after"), "t")):
        assert all((below(image, sample) != BACKGROUND).any() for sample in (0, 1))
    assert (below(bare, 0) == BACKGROUND).all()
    long = replace(plain, rows=tuple(replace(row, facts={REWRITE: "word " * 99}) for row in rows))
    assert contact_sheet(long, "t").size == sheet.size


def test_sheet_has_a_light_margin_all_around():
    for rewards in ([[0.1] * 20], [[0.5]] * 30, [[1.0, -4.0]]):
        for sheet in (contact_sheet(table(rewards), "t"), before_after(rewards)):
            image = np.asarray(sheet)
            for frame in (image[:20], image[-20:], image[:, :20], image[:, -20:]):
                assert (frame == BACKGROUND).all()


def test_a_comparison_of_many_prompts_shows_evenly_spaced_ones():
    """Prompt k has the colour k; 18 of 24 are 0, 1, 2, 4, 5, 6, 8, ..."""
    image = np.asarray(before_after([[0.5]] * 24))
    shown = [k for k in range(24) if (image == [250, 10 * k, 5]).all(axis=2).any()]
    assert shown == [24 * place // 18 for place in range(18)]
    few = np.asarray(before_after([[0.5]] * 18))
    assert all((few == [250, 10 * k, 5]).all(axis=2).any() for k in range(18))


def before_after(rewards: list[list[float]]) -> Image.Image:
    return before_after_sheet(table(rewards), table(rewards), ("before", "after"), "t")


def test_the_line_below_the_title_fits_on_the_narrowest_sheet():
    whole = replace(table([[0.25]]), step=StepRewards(7_680, 0.3125))
    image = np.asarray(contact_sheet(whole, "t"))
    assert (image[:, -20:] == BACKGROUND).all()


def test_prompts_are_on_the_sheet_best_first_by_their_mean():
    sheet = contact_sheet(table([[0.1, 0.4], [0.9, 0.2], [0.5, 0.7]]), "title")
    tops = [places(sheet, 2 * prompt)[1] for prompt in range(3)]
    assert tops[2] < tops[1] < tops[0]


def test_a_sheet_of_some_samples_says_of_how_many_and_their_mean():
    some = table([[0.25, 0.75]])
    assert some.reward_text() == "mean reward 0.500 of 2 samples"
    whole = replace(some, step=StepRewards(768, 0.3125))
    assert whole.reward_text() == "mean reward 0.500 of 2 of 768 samples (whole step: 0.312)"
    assert (some.count_text(), whole.count_text()) == ("2 samples", "2 of 768 samples")
    assert replace(some, step=StepRewards(2, 0.5)).reward_text() == some.reward_text()
    assert not np.array_equal(contact_sheet(some, "t"), contact_sheet(whole, "t"))


@pytest.mark.parametrize(
    ("after", "colour"),
    [
        ([0.0, 1.0, 0.0, 1.0], "no change"),
        ([1.0, 1.0, 0.0, 0.0], "noise"),
        ([0.0, 1.0, 1.0, 0.0], "noise"),
        ([0.6, 1.6, 0.5, 1.5], "rise"),
        ([-0.6, 0.4, -0.5, 0.5], "fall"),
    ],
)
def test_a_mean_is_coloured_only_if_it_changed_by_more_than_the_noise_of_its_samples(after, colour):
    before = table([[0.0, 1.0, 0.0, 1.0]])
    image = np.asarray(before_after_sheet(before, table([after]), ("before", "after"), "t"))
    words = image[:, : places(Image.fromarray(image), 0)[0]]
    shown = {name for name, ink in (("rise", HIGH), ("fall", LOW)) if (words == ink).all(axis=2).any()}
    assert shown == ({colour} if colour in ("rise", "fall") else set())


def test_before_is_left_of_after_in_the_same_row_and_order():
    before = table([[0.1, 0.9], [0.5, 0.6]])
    after = SampleTable(before.rows, ImageMedia(before.media.images.copy()))
    after.media.images[..., 2] = 200
    sheet = before_after_sheet(before, after, ("before", "after"), "t")
    for sample in range(4):
        _, top, right, _ = places(sheet, sample)
        y, x = np.nonzero((np.asarray(sheet) == [250, 10 * sample, 200]).all(axis=2))
        assert (x.min() > right, y.min()) == (True, top)
    assert places(sheet, 0)[0] < places(sheet, 1)[0]


def test_before_and_after_without_a_common_prompt_is_refused():
    other = table([[0.5]])
    row = SampleRow(sample_id="x", group_id="x", prompt="another", reward=1.0)
    with pytest.raises(ValueError, match="same prompts"):
        before_after_sheet(other, SampleTable((row,), other.media), ("a", "b"), "t")


def test_small_pictures_keep_their_pixels_and_large_ones_their_shape():
    checker = np.indices((16, 16)).sum(0)[..., None].repeat(3, 2).astype(np.uint8) % 2 * 255
    width, height = tile_size(checker[None])
    large = np.asarray(fit(checker, width, height))
    assert (large == checker.repeat(TILE // 16, 0).repeat(TILE // 16, 1)).all()
    assert tile_size(np.zeros((1, 384, 512, 3))) == (256, 192)
    assert tile_size(np.zeros((1, 48, 24, 3))) == (120, 240)


def test_wrapped_lines_fit_and_say_when_they_are_cut():
    lines = wrap(EVIL, 120, 16, max_lines=4)
    assert len(lines) == 4
    assert lines[-1].endswith(" ...")
    assert all(width_of(line, 16) <= 120 for line in lines)
    assert "\x1b" not in "".join(lines)
    assert wrap("a b", 500, 16, max_lines=4) == ["a b"]


def test_text_that_no_font_here_can_draw_loses_accents_and_is_never_a_box(monkeypatch):
    monkeypatch.setattr("unirl.tracking.lettering._wide_font", lambda size: None)
    assert lettering("caf\u00e9 \u732b a", 16)[0] == "cafe ? a"


def test_text_of_other_scripts_takes_a_font_of_this_machine_letter_by_letter():
    text, font = lettering("caf\u00e9 \u732b", 16)
    assert text in ("caf\u00e9 \u732b", "caf\u00e9 ?", "cafe ?")
    missing = bytes(font.getmask("\U0010ffff"))
    assert all(bytes(font.getmask(letter)) != missing for letter in text if letter != " ")


def test_any_prompt_can_be_drawn():
    rows = (SampleRow(sample_id="a", group_id="a", prompt=EVIL, reward=0.0),)
    assert contact_sheet(SampleTable(rows, ImageMedia(np.zeros((1, 8, 8, 3), np.uint8))), EVIL).width > 100


def test_colour_of_a_reward_runs_from_low_to_high():
    assert (shade(0.0), shade(1.0)) == (LOW, HIGH)
    assert shade(0.499) == pytest.approx(shade(0.501), abs=2)


def test_pixels_of_float_images_are_rounded_to_levels():
    image = torch.tensor([0.0, 0.5, 1.2]).view(1, 3, 1, 1)
    assert pixels(image).tolist() == [[[[0, 128, 255]]]]
    assert pixels((image.clamp(0, 1) * 255).round().byte()).tolist() == pixels(image).tolist()


def test_curve_goes_up_where_the_values_do_and_leaves_out_what_is_not_finite():
    series = Series("reward", list(range(30)), [i / 30 if i != 7 else float("nan") for i in range(30)], [0.05] * 30)
    image = np.asarray(reward_curve([series], "title")).astype(int)
    line = np.abs(image - np.array(HIGH)).sum(axis=2) < 150
    columns = [column for column in range(100, 680, 20) if line[100:350, column].any()]
    heights = [np.nonzero(line[100:350, column])[0].mean() for column in columns]
    assert len(columns) > 25
    assert all(a > b for a, b in pairwise(heights))


def test_the_band_of_a_reward_stays_where_a_sample_can_be():
    series = Series("x", [1, 2], [0.9, 0.1], [0.3, 0.3], (0.0, 1.0))
    assert np.allclose(series.band(), [(0.6, 1.0), (0.0, 0.4)])
    assert series.bounds == (0.0, 1.0)


@pytest.mark.parametrize(("rise", "is_green"), [(0.0, False), (0.02, False), (0.5, True), (-0.5, False)])
def test_a_curve_is_green_only_if_it_rose_by_more_than_its_noise(rise, is_green):
    noise = 0.1 * np.random.default_rng(0).standard_normal(40)
    series = Series("x", list(range(40)), (np.linspace(0, rise, 40) + noise).tolist())
    assert series.has_risen() == is_green
    image = np.asarray(reward_curve([series], "t")).astype(int)
    assert (np.abs(image - np.array(HIGH)).sum(axis=2) < 30).any() == is_green


def test_curve_without_a_point_and_with_ragged_series_is_refused():
    with pytest.raises(ValueError, match="finite point"):
        reward_curve([Series("x", [1], [float("nan")])], "t")
    with pytest.raises(ValueError, match="one length"):
        Series("x", [1, 2], [1.0])
    assert reward_curve([Series("x", [5], [0.5])], "one point").size == (720, 420)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.63, 0.88), (-3, 4000), (1e-7, 2e-7), (-0.2, -0.1)])
def test_ticks_are_round_few_and_enclose_the_data(low, high):
    ticks = nice_ticks(low, high)
    assert 3 <= len(ticks) <= 9
    assert ticks[0] <= low + 1e-12
    assert ticks[-1] >= high - 1e-12
    gaps = np.diff(ticks)
    assert np.allclose(gaps, gaps[0])
    mantissa = gaps[0] / 10 ** np.floor(np.log10(gaps[0]) + 1e-9)
    assert min(abs(mantissa - nice) for nice in (1, 2, 5)) < 1e-6


@pytest.mark.parametrize("values", [[147.0, 615.0], [0.0, 1.0], [-1411.0, -125.0]])
def test_lines_of_a_curve_are_those_of_its_ticks_and_lie_below_its_legend(values):
    image = np.asarray(reward_curve([Series("x", [0, 1], values)], "t", width=640, height=360)).astype(int)
    is_line = (np.abs(image[:, 100:500] - np.array(BACKGROUND)).sum(axis=2) > 10).mean(axis=1) > 0.9
    rows = np.flatnonzero(is_line & ~np.roll(is_line, 1))
    assert len(rows) == len(nice_ticks(*values))
    assert rows[0] >= MARGIN + 60 and rows[-1] <= 360 - MARGIN - 30


def test_pictures_stand_beside_and_below_each_other():
    page = beside(Image.new("RGB", (30, 10), "red"), Image.new("RGB", (20, 40), "blue"))
    assert page.size == (50, 40)
    assert page.getpixel((5, 20)) == (255, 0, 0)
    assert page.getpixel((45, 2)) == (0, 0, 255)
    page = below(Image.new("RGB", (30, 10), "red"), Image.new("RGB", (20, 40), "blue"))
    assert page.size == (30, 50)
    assert page.getpixel((25, 5)) == (255, 0, 0)
    assert page.getpixel((5, 45)) == (0, 0, 255)
