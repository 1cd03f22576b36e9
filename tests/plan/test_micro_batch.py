"""`stack.micro_batch_size=auto` takes the smallest micro-batch at full speed among those that fit into memory."""

from dataclasses import replace
from functools import cache

import pytest

from unirl.cli.main import main
from unirl.config.load import load
from unirl.plan.devices import device_like, device_named
from unirl.plan.fit import usable
from unirl.plan.micro_batch import FULL_SPEED, choose_micro_batch, train_peak_gib, with_auto_micro
from unirl.plan.sizes import RunSizes
from unirl.plan.times import train_seconds, train_work

H100, _ = device_named("h100")


@cache
def sized(recipe, *words):
    return RunSizes.of(load(recipe, list(words)).config)


def at(run, rows):
    return replace(run, settings=replace(run.settings, micro_rows=rows))


@pytest.mark.parametrize(
    "recipe", ["diffusion/sd3_trainside", "diffusion/qwen_image_trainside", "diffusion/sd3_online_dpo"]
)
@pytest.mark.parametrize("gib", [20.0, 24.0, 60.0, 70.0, 140.0])
def test_the_choice_agrees_with_trying_every_number_of_rows(recipe, gib):
    run = sized(recipe)
    together, share = run.geometry.rows_together, run.geometry.rows_per_device
    every = [at(run, rows) for rows in range(together, share + 1, together)]
    fitting = [each for each in every if train_peak_gib(each) <= usable(gib)]
    choice = choose_micro_batch(run, H100, gib)
    assert choice.fits == bool(fitting)
    if not fitting:
        assert choice.rows == together
        assert "Not even this fits" in choice.describe("a device")
        return
    fastest = min(train_seconds(each.sizes, each.settings, H100) for each in fitting)
    enough = [
        each.settings.micro_rows
        for each in fitting
        if train_seconds(each.sizes, each.settings, H100) <= FULL_SPEED * fastest
    ]
    assert choice.rows == min(enough)
    assert choice.peak_gib == train_peak_gib(at(run, choice.rows))


def test_what_was_measured_to_fit_is_a_bound():
    run = sized("diffusion/sd3_trainside")
    free = choose_micro_batch(run, H100, 79.6).rows
    assert free > 2
    assert choose_micro_batch(run, H100, 79.6, most=free + 1).rows == free
    assert choose_micro_batch(run, H100, 79.6, most=2).rows == 2
    assert choose_micro_batch(run, H100, 79.6, most=0).rows == 1


def test_equal_micro_batches_take_the_time_of_their_number():
    """100 rows in pieces of 64 are two micro-batches, as fast as two of 50."""
    run = sized("diffusion/sd3_trainside", "batch_size=25", "sampling.samples_per_prompt=8")
    ragged, even = (train_work(run.sizes, at(run, rows).settings) for rows in (64, 50))
    assert ragged == even


def test_a_recipe_that_sets_the_rows_keeps_them():
    run = sized("diffusion/sd3_trainside", "stack.micro_batch_size=3")
    assert with_auto_micro(run, H100, 79.6) is run
    tokens = sized("llm/quickstart", "stack.micro_batch_tokens=64", "stack.micro_batch_size=auto")
    assert with_auto_micro(tokens, H100, 79.6) is tokens


def test_the_plan_shows_the_choice_for_its_device(capsys):
    assert main(["plan", "diffusion/sd3_trainside", "--device", "h100"]) == 0
    rows = choose_micro_batch(sized("diffusion/sd3_trainside"), H100, H100.memory_gib).rows
    shown = capsys.readouterr().out
    assert f"{rows} rows in a micro-batch (stack.micro_batch_size, chosen for h100)" in shown
    assert "384 rows, cut into micro-batches for the device" in shown
    assert main(["plan", "diffusion/sd3_trainside", "stack.micro_batch_size=3"]) == 0
    assert "3 rows in a micro-batch (stack.micro_batch_size)" in capsys.readouterr().out


def test_the_names_that_drivers_give_find_their_device():
    assert device_like("NVIDIA H100 80GB HBM3") is H100
    assert device_like("cpu") is None
