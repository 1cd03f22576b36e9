"""The gate before the first update sees an engine that disagrees, says where, and stops a run that it would ruin."""

import math

import pytest
import torch

from tests.tokens import token_stage, token_track
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.config.errors import DivergenceError
from unirl.config.recipe import ParityConfig
from unirl.testing.toy import toy_stage, toy_track
from unirl.train.parity import Parity, ParityGate, parity_of, parity_table
from unirl.types.results import merge

LOSS = DiffusionGRPO(clip_range=1e-3)


def table_of(track, stage, sizes, loss=LOSS):
    rows, start = [], 0
    for size in sizes:
        rows.append(parity_of(loss, stage, track.slice(start, start + size)))
        start += size
    return parity_table(merge(rows))


def shifted(track, by: float, column: int):
    logp = track.segment.logp.clone()
    logp[:, column] -= by
    return track.replace(segment=track.segment.replace(logp=logp))


def test_equal_weights_have_ratio_one_at_every_step() -> None:
    stage = toy_stage()
    for line in table_of(toy_track(stage), stage, [8]):
        assert (line.ratio_mean, line.ratio_std, line.absdiff_max) == (1.0, 0.0, 0.0)


def test_a_shift_of_one_step_is_found_there_and_nowhere_else() -> None:
    stage = toy_stage()
    track = shifted(toy_track(stage), 0.25, 1)
    first, second, third = table_of(track, stage, [8])
    steps = [f"denoising step {i}" for i in track.segment.sde_indices]
    assert [first.place, second.place, third.place] == steps
    assert first.absdiff_max == third.absdiff_max == 0.0
    assert second.ratio_mean == pytest.approx(math.exp(0.25), rel=1e-5)
    assert second.ratio_std == pytest.approx(0.0, abs=1e-4) and second.absdiff_max == pytest.approx(0.25, rel=1e-5)


def test_statistics_do_not_depend_on_how_rows_are_cut() -> None:
    sampler, trainer = toy_stage(0), toy_stage(1)
    track = toy_track(sampler)
    whole, cut = table_of(track, trainer, [8]), table_of(track, trainer, [1, 3, 4])
    for a, b in zip(whole, cut, strict=True):
        assert (a.place, a.absdiff_max) == (b.place, pytest.approx(b.absdiff_max, rel=1e-5))
        assert a.ratio_mean == pytest.approx(b.ratio_mean, rel=1e-5)
        assert a.ratio_std == pytest.approx(b.ratio_std, rel=1e-4)


def test_rows_of_weight_zero_do_not_count() -> None:
    stage = toy_stage()
    track = toy_track(stage)
    logp = track.segment.logp.clone()
    logp[0] = 7.0
    weight = track.weight.clone()
    weight[0] = 0.0
    track = track.replace(segment=track.segment.replace(logp=logp), weight=weight)
    assert all(line.absdiff_max == 0.0 and line.ratio_mean == 1.0 for line in table_of(track, stage, [1, 7]))


def test_tokens_are_one_place_and_context_and_dropped_rows_do_not_count() -> None:
    stage = token_stage()
    track = token_track(stage)
    context, dropped = ~track.segment.loss_mask, torch.zeros(len(track.segment.tokens), dtype=torch.bool)
    dropped[: int(track.segment.lengths[0])] = True
    nothing = torch.where(context | dropped, math.nan, track.segment.logp)
    track = track.replace(
        segment=track.segment.replace(logp=nothing), weight=track.weight.index_fill(0, torch.tensor([0]), 0.0)
    )
    assert table_of(track, stage, [8], ARGRPO()) == [Parity("tokens", 1.0, 0.0, 0.0)]


def test_a_shift_of_one_token_is_found_and_weighed_as_one_of_all() -> None:
    stage = token_stage()
    track = token_track(stage, context=None)
    logp = track.segment.logp.clone()
    logp[3] -= math.log(2.0)
    track = track.replace(segment=track.segment.replace(logp=logp))
    for sizes in ([8], [1, 3, 4]):
        [line] = table_of(track, stage, sizes, ARGRPO())
        assert line.absdiff_max == pytest.approx(math.log(2.0), rel=1e-5)
        assert line.ratio_mean == pytest.approx(1.0 + 1.0 / len(logp), rel=1e-5)


def line(gap: float, step: int = 3) -> Parity:
    return Parity(f"denoising step {step}", math.exp(gap), 0.0, gap)


@pytest.mark.parametrize(("gap", "warns"), [(0.0, False), (0.9e-4, False), (1.1e-4, True)])
def test_the_gate_warns_from_a_share_of_the_clip_range_on(gap, warns) -> None:
    gate = ParityGate(ParityConfig(warn=0.1, stop=1.0), clip_range=1e-3)
    warning = gate.judge([line(0.0, 1), line(gap)])
    assert (warning is not None) == warns
    if warning is not None:
        assert "at denoising step 3" in warning and "0.11 clip ranges" in warning and "other weights" in warning


@pytest.mark.parametrize("gap", [1e-3, 5.0, math.nan])
def test_the_gate_stops_a_run_whose_first_ratio_is_outside_the_trust_region(gap) -> None:
    gate = ParityGate(ParityConfig(warn=0.1, stop=1.0), clip_range=1e-3)
    with pytest.raises(DivergenceError, match=r"parity\.stop=0") as error:
        gate.judge([line(gap)])
    assert error.value.code == 9002


def test_the_gate_can_be_told_to_warn_only() -> None:
    gate = ParityGate(ParityConfig(warn=0.1, stop=0.0), clip_range=1e-3)
    assert gate.judge([line(5.0)]) is not None


def test_nothing_is_judged_without_stochastic_steps() -> None:
    assert ParityGate(ParityConfig(), clip_range=1e-3).judge([]) is None
