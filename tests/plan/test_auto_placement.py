"""The planner on paper: every candidate uses every device, the best one is best, and 1,024 devices take seconds."""

import json
import time
from dataclasses import replace

import pytest
import yaml

from unirl.cli.auto_plan import line_of, measured_in_run, seconds_of
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


CPU = "placement.reward=cpu"
RATIO = "algorithm.old_logp_source=rollout"
"""The loss reads the log-probs of the weights that sampled."""


def proposed(words, seconds, num_devices=2, lengths=(1.0,)):
    """Candidates of a recipe that was measured on equally many devices for each role, by what they add to the words."""
    config = load(SEPARATE, [CPU, *words]).config
    own = MeasuredStep(seconds=seconds, num_rows=32, num_train=1, num_rollout=1, num_reward=1, lengths=lengths)
    return {each.words[2:]: each for each in candidates(config, own, num_devices) if "train: 0," in each.words[0]}


def key(staleness, parts, *more):
    return (f"asynchronous.max_staleness={staleness}", f"reward_parts={parts}", *more)


ELASTIC, FREE = "asynchronous.elastic=true", "asynchronous.order=free"


def test_training_devices_that_join_are_proposed_where_generation_is_the_longer_phase():
    found = proposed([], PhaseSeconds(generate=6.0, score=0.0, train=2.0))
    elastic = found[key(1, 8, ELASTIC)]
    # A part takes 0.75 s. The engine ends parts at 0.75, 1.5, 2.25, 3 and 3.75 s, and the training devices, which train
    # until 2 s, at 2.75, 3.5 and 4.25 s. These are eight parts.
    assert elastic.prediction.step_seconds == pytest.approx(4.25)
    assert elastic.determinism == "bitwise"
    short = proposed([], PhaseSeconds(generate=2.0, score=0.0, train=6.0))
    assert short[key(0, 8, ELASTIC)].prediction.step_seconds == pytest.approx(2.0 / 2 + 6.0)  # in turns both sample
    assert short[key(1, 1)].prediction.step_seconds == pytest.approx(6.0)  # ahead nobody waits
    assert not any(ELASTIC in words for words in short if words[0] != "asynchronous.max_staleness=0")


def test_a_free_order_is_proposed_where_generation_varies_and_the_loss_reads_the_engines_log_probs():
    seconds, varies = PhaseSeconds(generate=4.0, score=0.0, train=4.0), (1.5, 0.5)
    free = key(2, 8, FREE)
    found = proposed([RATIO], seconds, lengths=varies)
    assert found[free].prediction.step_seconds == pytest.approx(4.0)  # the queue hides what a fixed order waits for
    assert found[key(1, 1)].prediction.step_seconds == pytest.approx((6.0 + 4.0) / 2)
    assert (found[free].determinism, found[key(1, 1)].determinism) == ("statistical", "bitwise")
    assert free not in proposed([RATIO], seconds)
    assert free not in proposed(["algorithm.old_logp_source=replay"], seconds, lengths=varies)


@pytest.mark.parametrize(
    "words",
    [["rollout=sglang"], ["row_transport=collective"]],
)
def test_devices_that_cannot_join_are_not_proposed(words):
    assert not any(ELASTIC in each for each in proposed(words, PhaseSeconds(generate=6.0, score=0.0, train=2.0)))


def test_a_proposal_undoes_the_order_of_the_recipe():
    own = ["asynchronous={order: free, max_staleness: 2, steps_ahead: 4, too_old: drop}", RATIO, "reward_parts=8"]
    for words in proposed(own, PhaseSeconds(generate=6.0, score=0.0, train=2.0), lengths=(1.5, 0.5)):
        placed = load(SEPARATE, [CPU, *own, *words]).config.asynchronous
        assert placed.order == ("free" if FREE in words else "fixed")
        assert (placed.steps_ahead, placed.too_old) == (None, "redraw")


def test_proposals_that_change_the_order_of_events_are_legal_recipes():
    lengths = (1.6, 0.4)
    device, _ = device_named("h100")
    for reward in ("cpu", "in rollout"):
        words = [f"placement={{train: 0-3, rollout: 4-7, reward: {reward}}}", RATIO]
        measured = measured_on(load(SEPARATE, words).config, replace(SECONDS, train=4.0), lengths)
        found = best_placements(load(SEPARATE, words), words, measured, 8, device, count=40)
        assert any(ELASTIC in each.words for each in found)
        assert any(FREE in each.words for each in found)


def test_the_times_of_generation_in_turns_are_read():
    seconds, lengths = seconds_of("generate=6/2/1,train=2.5")
    assert (seconds.generate, seconds.train, seconds.score) == (3.0, 2.5, 0.0)
    assert lengths == pytest.approx([2.0, 2 / 3, 1 / 3])


@pytest.mark.parametrize(
    "text", ["generate", "generate=4/", "train=4/2", "generate=fast", "sleep=1", "generate=-1", "generate=nan"]
)
def test_seconds_that_cannot_be_read_are_refused(text):
    with pytest.raises(UniRLError, match="PHASE=SECONDS"):
        seconds_of(text)


def test_a_device_without_room_is_refused_with_the_size():
    recipe = load(SEPARATE)
    small = replace(device_named("4090")[0], memory_gib=1.0)
    with pytest.raises(UniRLError, match=r"no placement on 4 devices: \d+\.\d GiB do not fit"):
        best_placements(recipe, [], measured_on(recipe.config, SECONDS), 4, small)


def test_a_run_whose_steps_vary_leads_to_a_free_order(tmp_path):
    loaded = load(SEPARATE, [CPU, RATIO, "num_devices=2", "placement.train=0", "placement.rollout=1"])
    tree = loaded.public()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "resolved.yaml").write_text(yaml.safe_dump(tree))
    times = [{"time/generate": 9.0}] + [{"time/generate": each, "time/train": 4.0} for each in [6.0, 2.0] * 15]
    lines = [json.dumps(row | {"step": number, "time/step": 1.0}) for number, row in enumerate(times, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    measured = measured_in_run(loaded.config, tree, tmp_path)
    assert (measured.seconds.generate, measured.seconds.train) == (4.0, 4.0)  # the first step of a run is left out
    best = min(candidates(loaded.config, measured, 2), key=lambda each: each.prediction.step_seconds)
    assert best.prediction.step_seconds == pytest.approx(4.0)
    first, second = line_of(best).splitlines()
    assert first.endswith("determinism class statistical") and FREE in second.split()
