"""The planner on paper: every candidate uses every device, the best one is best, and 1,024 devices take seconds."""

import time
from dataclasses import replace

import pytest

from unirl.cli.auto_plan import seconds_of
from unirl.config.errors import UniRLError
from unirl.config.load import load
from unirl.plan.auto_placement import MeasuredStep, best_placements, candidates, measured_on
from unirl.plan.devices import device_named
from unirl.plan.placement import plan_of
from unirl.plan.simulate import PhaseSeconds

SEPARATE = "diffusion/sd3_replica_lora_separate"
SECONDS = PhaseSeconds(generate=4.0, score=1.0, train=2.0, sync=0.1)


def test_an_older_sample_is_proposed_only_where_it_saves_time():
    config = load(SEPARATE).config
    measured = replace(measured_on(config, SECONDS), seconds=replace(SECONDS, train=40.0))
    ages = {each.words[2]: each.prediction.step_seconds for each in candidates(config, measured, 2)}
    assert list(ages) == ["asynchronous.max_staleness=0", "asynchronous.max_staleness=1"]


def test_seconds_scale_with_the_rows_of_the_fullest_device():
    measured = MeasuredStep(seconds=SECONDS, num_rows=10, num_train=1, num_rollout=2, num_reward=1)
    scaled = measured.on(4, 4, 1)
    assert (scaled.generate, scaled.train, scaled.score, scaled.sync) == (4.0 * 3 / 5, 2.0 * 3 / 10, 1.0, 0.1)


def test_the_measured_placement_itself_is_predicted_from_its_own_seconds():
    config = load(SEPARATE).config
    measured = measured_on(config, SECONDS)
    own = plan_of(config)
    again = measured.on(len(own.train), len(own.rollout), len(own.reward))
    assert again == SECONDS


def test_every_candidate_gives_every_device_a_role():
    config = load(SEPARATE).config
    found = list(candidates(config, measured_on(config, SECONDS), 6))
    assert len(found) > 20
    for candidate in found[:: len(found) // 8]:
        placed = load(SEPARATE, candidate.words).config
        assert plan_of(placed) and placed.num_devices == 6


def test_without_scaling_losses_nothing_beats_all_devices_in_turns():
    """The work of a step is fixed, so a layout that never rests is a lower bound, less what does not scale."""
    config = load(SEPARATE).config
    measured = replace(measured_on(config, SECONDS), seconds=replace(SECONDS, sync=0.0))
    work = 4.0 * 4 + 1.0 * 4 + 2.0 * 4
    steps = [each.prediction.step_seconds for each in candidates(config, measured, 8)]
    assert min(steps) == pytest.approx(work / 8)


def test_a_thousand_devices_are_planned_in_seconds():
    recipe = load(SEPARATE, ["batch_size=1024"])
    device, _ = device_named("h100")
    measured = measured_on(recipe.config, SECONDS)
    begin = time.process_time()
    found = best_placements(recipe, ["batch_size=1024"], measured, 1024, device)
    assert len(found) == 5 and time.process_time() - begin < 20
    steps = [each.prediction.step_seconds for each in found]
    assert steps == sorted(steps)
    assert all("num_devices=1024" in each.words and (each.peak_gib or 0) > 1 for each in found)


@pytest.mark.parametrize("text", ["generate", "generate=fast", "sleep=1", "generate=-1", "generate=nan"])
def test_seconds_that_cannot_be_read_are_refused(text):
    with pytest.raises(UniRLError, match="PHASE=SECONDS"):
        seconds_of(text)


def test_a_device_without_room_is_refused_with_the_size():
    recipe = load(SEPARATE)
    small = replace(device_named("4090")[0], memory_gib=1.0)
    with pytest.raises(UniRLError, match=r"no placement on 4 devices: \d+\.\d GiB do not fit"):
        best_placements(recipe, [], measured_on(recipe.config, SECONDS), 4, small)
