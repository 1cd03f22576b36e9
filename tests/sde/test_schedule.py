"""Sigma schedules against their closed forms and against published tables."""

import math

import pytest
import torch

from unirl.sde.schedule import SigmaSchedule, flux2_mu

DYNAMIC = SigmaSchedule(dynamic="exponential")


def numbers(text):
    return [float(word) for word in text.split()]


@pytest.mark.parametrize(
    ("schedule", "num_steps", "table"),
    [
        (SigmaSchedule(shift=3.0), 10, "1 .96429 .92308 .875 .81818 .75 .66667 .5625 .42857 .25 0"),
        (
            SigmaSchedule(shift=3.0, grid="diffusers"),
            10,
            "1 .96013 .91335 .85769 .79037 .70728 .60215 .46488 .27805 .00893 0",
        ),
        (SigmaSchedule(shift=3.0), 16, "1 .97826 .95455 .92857 .9 ... .3 .16667 0"),
        (SigmaSchedule(shift=5.0), 16, "1 .98684 .97222 ... .41667 .25 0"),
        (SigmaSchedule(shift=3.0), 25, "1 .9863 .97183 ... .2069 .11111 0"),
        (DYNAMIC, 6, "1 .90374 .78970 .65249 .48422 .27300 0"),
    ],
)
def test_sigmas_are_the_published_tables(schedule, num_steps, table):
    start, _, end = table.partition("...")
    sigmas = schedule.sigmas(num_steps, 1024).tolist()
    assert len(sigmas) == num_steps + 1
    for expected, result in ((numbers(start), sigmas), (numbers(end)[::-1], sigmas[::-1])):
        assert result[: len(expected)] == pytest.approx(expected, abs=6e-6)
    assert "..." in table or len(numbers(start)) == num_steps + 1


SCHEDULES = [
    SigmaSchedule(),
    SigmaSchedule(shift=3.0),
    SigmaSchedule(shift=3.0, grid="diffusers"),
    DYNAMIC,
    SigmaSchedule(dynamic="exponential", grid="diffusers"),
    SigmaSchedule(shift=5.0, grid="unipc"),
    SigmaSchedule(dynamic="linear"),
    SigmaSchedule(dynamic="exponential", mu="flux2"),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("num_steps", [1, 2, 10, 50])
def test_sigmas_fall_from_exactly_one_to_exactly_zero(schedule, num_steps):
    sigmas = schedule.sigmas(num_steps, 1024)
    assert sigmas.dtype == torch.float32 and sigmas.shape == (num_steps + 1,)
    assert sigmas[0] == 1.0 and sigmas[-1] == 0.0
    assert (sigmas.diff() < 0).all()


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 50])
def test_the_levels_of_flow_sigmas_are_those_of_unipc(shift, num_steps):
    from diffusers import UniPCMultistepScheduler

    config = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
    scheduler = UniPCMultistepScheduler(**config)
    scheduler.set_timesteps(num_steps)
    ours = SigmaSchedule.from_diffusers(scheduler.config).sigmas(num_steps)
    assert (ours[1:] - scheduler.sigmas[1:]).abs().max() < 1e-7
    assert ours[0] == 1.0 and scheduler.sigmas[0] == torch.tensor(1.0 - 1e-6)


def test_without_a_shift_the_levels_are_even():
    assert SigmaSchedule().sigmas(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_an_exponential_shift_is_a_static_one_of_e_to_the_mu():
    static = SigmaSchedule(shift=math.exp(0.63))
    torch.testing.assert_close(DYNAMIC.sigmas(20, 1024), static.sigmas(20), rtol=0, atol=1e-7)


def test_a_linear_shift_is_a_static_one_of_mu():
    schedule = SigmaSchedule(dynamic="linear")
    torch.testing.assert_close(schedule.sigmas(20, 4096), SigmaSchedule(shift=1.15).sigmas(20), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("tokens", "mu"), [(256, 0.5), (1024, 0.63), (4096, 1.15)])
def test_mu_lies_on_the_line_of_flux(tokens, mu):
    assert DYNAMIC.mu_at(10, tokens) == pytest.approx(mu, abs=1e-12)


@pytest.mark.parametrize("tokens", [256, 1024, 4096])
def test_flux2_mu_goes_through_its_two_lines(tokens):
    assert flux2_mu(tokens, 10) == pytest.approx(8.73809524e-05 * tokens + 1.89833333)
    assert flux2_mu(tokens, 200) == pytest.approx(0.00016927 * tokens + 0.45666666)
    assert flux2_mu(tokens, 105) == pytest.approx((flux2_mu(tokens, 10) + flux2_mu(tokens, 200)) / 2)


def test_flux2_mu_of_a_large_picture_does_not_depend_on_the_steps():
    assert flux2_mu(4301, 4) == flux2_mu(4301, 50) == pytest.approx(0.00016927 * 4301 + 0.45666666)
    assert flux2_mu(4300, 4) != flux2_mu(4300, 50)


def test_the_terminal_stretch_reaches_its_level_and_keeps_proportions():
    plain = SigmaSchedule(shift=3.0).sigmas(10).double()
    stretched = SigmaSchedule(shift=3.0, shift_terminal=0.02).sigmas(10).double()
    assert stretched[0] == 1.0 and stretched[-1] == 0.0
    assert stretched[-2].item() == pytest.approx(0.02, abs=1e-8)
    ratio = (1 - stretched[1:-1]) / (1 - plain[1:-1])
    torch.testing.assert_close(ratio, ratio[:1].expand(9), rtol=1e-5, atol=0)


@pytest.mark.parametrize("off", [None, 0, 0.0])
def test_a_falsy_terminal_means_no_stretch(off):
    assert torch.equal(SigmaSchedule(shift=3.0, shift_terminal=off).sigmas(7), SigmaSchedule(shift=3.0).sigmas(7))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SigmaSchedule(shift=0.0), r"SigmaSchedule\.shift=0\.0 must be a positive"),
        (lambda: SigmaSchedule(shift=math.nan), r"SigmaSchedule\.shift=nan"),
        (lambda: SigmaSchedule(dynamic="cosine"), r"dynamic='cosine' must be one of: off, exponential, linear"),
        (lambda: SigmaSchedule(grid="karras"), r"grid='karras' must be one of: clean, diffusers, unipc"),
        (lambda: SigmaSchedule(mu="flux"), r"mu='flux' must be one of: line, flux2"),
        (lambda: SigmaSchedule(shift_terminal=1.0), r"shift_terminal=1\.0 must lie in \(0, 1\)"),
        (lambda: SigmaSchedule(base_image_seq_len=9, max_image_seq_len=9), "two different points"),
        (lambda: SigmaSchedule().sigmas(0), r"num_inference_steps=0 must be >= 1"),
        (lambda: DYNAMIC.sigmas(4), r"dynamic='exponential' needs image_seq_len"),
        (lambda: SigmaSchedule(shift_terminal=0.1).sigmas(1), r"is not possible with num_inference_steps=1"),
        (lambda: SigmaSchedule.from_diffusers({"use_karras_sigmas": True}), "use_karras_sigmas"),
        (lambda: SigmaSchedule.from_diffusers({"num_train_timesteps": 500}), r"num_train_timesteps=500; only 1000"),
        (lambda: SigmaSchedule.from_diffusers({"use_flow_sigmas": False}), r"use_flow_sigmas=False.*set it to True"),
        (
            lambda: SigmaSchedule.from_diffusers({"use_flow_sigmas": True, "final_sigmas_type": "sigma_min"}),
            r"final_sigmas_type='sigma_min'.*set it to 'zero'",
        ),
        (lambda: SigmaSchedule.from_diffusers({"use_dynamic_shifting": True, "time_shift_type": "?"}), r"dynamic='\?'"),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
