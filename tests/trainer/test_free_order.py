"""Generation that does not wait for the loop: which weights samples come from, and what becomes of old ones."""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.run_files import metrics_of
from unirl.config.errors import IncompatibleError, InvalidValueError, WeightsLostError
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.trainer.assemble import build_trainer
from unirl.trainer.free_generation import FreeGeneration, too_old
from unirl.trainer.generation import GenerationAhead
from unirl.trainer.loop import Trainer

COMMON = (
    "scale=toy",
    "tracking.sample_steps=1",
    "tracking.max_samples=64",
    "evaluation.eval_steps=0",
    "reward_parts=4",
    "placement.reward=cpu",
)
FREE = ("asynchronous.order=free", "asynchronous.max_staleness=1", "batch_size=4", "sampling.samples_per_prompt=2")
SEPARATE = "diffusion/sd3_replica_lora_separate"
UPDATES = 2
"""Updates of a step of the recipe."""


@pytest.fixture(autouse=True)
def _threads_end():
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name == "generation of steps"]


def run(folder: Path, *overrides: str):
    loaded = load(SEPARATE, [*COMMON, *FREE, f"run.dir={folder}", *overrides])
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        trainer.train()
    return trainer


def samples_of(folder: Path) -> list[list[dict]]:
    manifests = sorted(folder.glob("samples/step-*/manifest.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in manifests]


def ledger_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


@contextmanager
def in_lockstep(monkeypatch, parts: int):
    """The engine stops as soon as the step is there that the loop waits for, and samples `parts` parts more before the
    loop learns, or all that may be begun.

    The order of events is then known, however fast the threads are.
    """
    sample, learn = ReplicaRolloutEngine.sample, Trainer.learn
    left, generations = [math.inf], []

    def counted(engine, req):
        resp = sample(engine, req)
        left[0] -= 1
        if left[0] == 0:
            generations[0].engine.is_reserved = True  # the thread that samples has the engine: nobody else looks at it
        return resp

    def given(generation, published, begun):
        if not generations:
            generations.append(generation)
            put = generation.generated.put

            def put_and_stop(item, **about):
                put(item, **about)
                if left[0] == math.inf:
                    generation.engine.is_reserved = True

            generation.generated.put = put_and_stop
        if len(generation.generated):  # nothing is waited for
            generation.engine.published = published
        else:
            generation.engine.give(published)
        GenerationAhead.give_engine(generation, published, begun)

    def checked(generation, generated):
        old = too_old(generated.samples.everything()[1], generation.oldest)
        if old:  # the loop may need the engine
            generation.engine.give(generation.engine.published)
        check(generation, generated)
        generation.engine.reserve()

    def learned(trainer, step, resp):
        generation, left[0] = trainer.generation, parts
        generation.engine.give(generation.engine.published)
        deadline = time.monotonic() + 60
        while left[0] > 0 and len(generation.generated) < generation.ahead and time.monotonic() < deadline:
            time.sleep(0.005)
        generation.engine.reserve()
        left[0] = math.inf
        learn(trainer, step, resp)

    check = FreeGeneration.check_age
    with monkeypatch.context() as patch:
        patch.setattr(ReplicaRolloutEngine, "sample", counted)
        patch.setattr(FreeGeneration, "give_engine", given)
        patch.setattr(FreeGeneration, "check_age", checked)
        patch.setattr(Trainer, "learn", learned)
        yield


def test_a_step_may_come_from_several_weights_none_older_than_the_bound(tmp_path, monkeypatch) -> None:
    with in_lockstep(monkeypatch, parts=2):
        run(tmp_path, "num_rollouts=5")
    rows = metrics_of(tmp_path)
    assert all(row["rollout/staleness_max"] <= UPDATES for row in rows)
    versions = [sorted({sample["weight_version"] for sample in step}) for step in samples_of(tmp_path)]
    assert versions[0] == [0]
    for step, found in enumerate(versions):
        assert min(found) >= UPDATES * max(step - 1, 0)
        assert max(found) <= UPDATES * step
    assert any(len(found) == 2 for found in versions)  # two parts by one step's weights, two by the next one's
    assert "rollout/too_old" not in rows[-1]


@pytest.mark.slow
def test_every_prompt_is_trained_once_and_in_the_order_of_a_run_in_turns(tmp_path) -> None:
    run(tmp_path / "free", "num_rollouts=6", "asynchronous.steps_ahead=3", "asynchronous.max_staleness=3")
    run(tmp_path / "turns", "num_rollouts=6", "asynchronous.max_staleness=0", "asynchronous.order=fixed")
    free, turns = [[[s["sample_id"] for s in step] for step in samples_of(tmp_path / n)] for n in ("free", "turns")]
    assert free == turns
    assert sum(map(len, free)) == len({sample for step in free for sample in step}) == 6 * 4 * 2


@pytest.mark.slow
def test_the_first_step_has_the_samples_of_a_run_in_turns(tmp_path) -> None:
    run(tmp_path / "free", "num_rollouts=2")
    run(tmp_path / "turns", "num_rollouts=2", "asynchronous.max_staleness=0", "asynchronous.order=fixed")
    first = [metrics_of(tmp_path / name)[0] for name in ("free", "turns")]
    assert first[0]["rollout/reward_mean"] == first[1]["rollout/reward_mean"]
    assert first[0]["train/loss"] == first[1]["train/loss"]


@pytest.mark.parametrize(
    "rule", ["redraw", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("drop", "correct"))]
)
def test_samples_that_are_too_old_are_treated_as_the_recipe_says(rule, tmp_path, monkeypatch) -> None:
    settings = ("asynchronous.steps_ahead=4", f"asynchronous.too_old={rule}", "algorithm.old_logp_source=rollout")
    with in_lockstep(monkeypatch, parts=40):  # all steps that may be begun come from the first weights
        run(tmp_path, "num_rollouts=5", *settings)
    rows, ledger = metrics_of(tmp_path), ledger_of(tmp_path)
    old = [row.get("rollout/too_old", 0) for row in rows]
    assert old == [0, 0, 8, 8, 8]  # steps 2 to 4 came from W_0, and one step of age is allowed
    dropped = [line["dropped"] for line in ledger]
    generated = [line["generated"] for line in ledger]
    skipped = [row["train/skipped_updates"] for row in rows]
    ages = [row["rollout/staleness_max"] for row in rows]
    match rule:
        case "redraw":
            assert (dropped, generated) == ([0, 0, 8, 8, 8], [8, 8, 16, 16, 16])
            assert ledger[2]["reasons"] == {"too_old": 8}
            assert skipped == [0] * 5
            assert ages == [0, 2, 0, 0, 0]
        case "drop":
            assert (dropped, generated) == ([0, 0, 8, 8, 8], [8] * 5)
            assert skipped == [0, 0, 2, 2, 2]
        case "correct":
            assert (dropped, generated) == ([0] * 5, [8] * 5)
            assert skipped == [0] * 5
            assert ages == [0, 2, 4, 6, 8]


@pytest.mark.slow
def test_redrawn_samples_are_those_of_the_new_weights(tmp_path, monkeypatch) -> None:
    """With a learning rate near 0 all weights are equal, so a step that is sampled again has the same samples."""
    frozen = ("num_rollouts=3", "asynchronous.steps_ahead=2", "backend.optimizer_cfg.learning_rate=1e-14")
    with in_lockstep(monkeypatch, parts=40):
        run(tmp_path / "redrawn", *frozen)
    run(tmp_path / "turns", *frozen[::2], "asynchronous.max_staleness=0", "asynchronous.order=fixed")
    assert metrics_of(tmp_path / "redrawn")[2]["rollout/too_old"] == 8
    again, turns = [samples_of(tmp_path / name)[2] for name in ("redrawn", "turns")]
    assert [(s["sample_id"], s["reward"]) for s in again] == [(s["sample_id"], s["reward"]) for s in turns]
    assert {s["weight_version"] for s in again} == {2 * UPDATES}


@pytest.mark.slow
def test_a_stopped_run_trains_every_prompt_once(tmp_path) -> None:
    settings = ("save_interval=1", "asynchronous.steps_ahead=2", "asynchronous.max_staleness=2")
    run(tmp_path / "broken", "num_rollouts=2", *settings)
    run(tmp_path / "broken", "num_rollouts=5", *settings)
    run(tmp_path / "turns", "num_rollouts=5", "asynchronous.max_staleness=0", "asynchronous.order=fixed")
    broken, turns = [[[s["sample_id"] for s in step] for step in samples_of(tmp_path / n)] for n in ("broken", "turns")]
    assert broken == turns


@pytest.mark.slow
def test_evaluations_have_the_engine_for_themselves(tmp_path, monkeypatch) -> None:
    """Samples of training never come from the weights of an evaluation, and none is made during one."""
    busy, sample, evaluate = [], ReplicaRolloutEngine.sample, Trainer.evaluate
    is_evaluating = threading.Event()

    def noting(engine, req):
        busy.append((req.purpose, is_evaluating.is_set()))
        resp = sample(engine, req)
        if req.purpose == "r":
            time.sleep(0.1)  # so that one is under way when an evaluation begins
        busy.append((req.purpose, is_evaluating.is_set()))
        return resp

    def evaluating(trainer):
        trainer.generation.take_engine()
        is_evaluating.set()
        try:
            return evaluate(trainer)
        finally:
            is_evaluating.clear()

    monkeypatch.setattr(ReplicaRolloutEngine, "sample", noting)
    monkeypatch.setattr(Trainer, "evaluate", evaluating)
    run(tmp_path, "num_rollouts=4", "evaluation.eval_steps=1", "evaluation.max_prompts=2")
    assert {purpose for purpose, during in busy if during} == {"eval"}
    assert {purpose for purpose, during in busy if not during} == {"r"}


@pytest.mark.slow
def test_an_engine_that_loses_its_weights_gets_them_again(tmp_path, monkeypatch) -> None:
    sample, losses = ReplicaRolloutEngine.sample, iter([False, False, True, False, False, True])

    def losing(engine, req):
        if next(losses, False):
            raise WeightsLostError("the server was restarted")
        return sample(engine, req)

    monkeypatch.setattr(ReplicaRolloutEngine, "sample", losing)
    run(tmp_path, "num_rollouts=4")
    assert [line["generated"] for line in ledger_of(tmp_path)] == [8] * 4
    assert all(row["rollout/staleness_max"] <= UPDATES for row in metrics_of(tmp_path))


def test_an_error_of_the_engine_ends_the_run(tmp_path, monkeypatch) -> None:
    sample = ReplicaRolloutEngine.sample

    def failing(engine, req):
        if req.step == 2:
            raise OverflowError("out of sorts")
        return sample(engine, req)

    monkeypatch.setattr(ReplicaRolloutEngine, "sample", failing)
    with pytest.raises(OverflowError, match="out of sorts"):
        run(tmp_path, "num_rollouts=6")
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2]


def test_the_run_says_that_it_cannot_be_repeated(tmp_path, capsys) -> None:
    loaded = load(SEPARATE, [*COMMON, *FREE])
    assert any("Determinism class of the run: statistical" in notice for notice in preflight(loaded).notices)
    run(tmp_path, "num_rollouts=1")
    assert json.loads((tmp_path / "run.json").read_text())["determinism"] == "statistical"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["refill.max_draws=2"], "Leave refill out, or set asynchronous.order=fixed"),
        (["asynchronous.too_old=correct", "algorithm.old_logp_source=replay"], "does not read these"),
    ],
)
def test_what_cannot_run_freely_is_refused_with_the_way_out(overrides, says) -> None:
    with pytest.raises(IncompatibleError, match=says):
        preflight(load(SEPARATE, [*COMMON, *FREE, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["asynchronous={order: free}"], "max_staleness must be >= 1, got 0"),
        (["asynchronous={max_staleness: 1, steps_ahead: 2}"], "steps_ahead belongs to order=free"),
        (["asynchronous={max_staleness: 1, too_old: drop}"], "too_old belongs to order=free"),
        (["asynchronous={order: free, max_staleness: 1, steps_ahead: 0}"], "steps_ahead"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides, says) -> None:
    with pytest.raises(InvalidValueError, match=says):
        load(SEPARATE, [*COMMON, *overrides])


@pytest.mark.slow
def test_a_free_run_learns_on_ray(tmp_path) -> None:
    run(tmp_path, "num_rollouts=4", "runtime=ray", "asynchronous.steps_ahead=2")
    rows = metrics_of(tmp_path)
    assert len(rows) == 4
    assert rows[-1]["sync/version"] > 0


TEXT = "llm/quickstart_async"
TOOLS = "{_target_: unirl.models.language.tools.Calculator}"
LONG = (
    "scale=toy",
    "sampling.max_new_tokens=24",
    "sampling.min_new_tokens=24",
    "batch_size=4",
    "asynchronous={order: free, max_staleness: 2, slice_tokens: 8}",
    "evaluation.eval_steps=0",
    "backend.optimizer_cfg.learning_rate=1e-2",
)


def run_text(folder: Path, *overrides: str):
    loaded = load(TEXT, [*LONG, f"run.dir={folder}", *overrides])
    preflight(loaded)
    segments = []
    with build_trainer(loaded) as trainer:
        produce = trainer.produce

        def noted(step):
            resp = produce(step)
            segments.append(resp.tracks["text"].segment)
            return resp

        trainer.produce = noted
        trainer.train()
    return segments


def test_a_response_can_come_from_the_weights_of_several_steps(tmp_path, monkeypatch) -> None:
    """In each step the engine samples two of the three slices of the next step before the weights change."""
    with in_lockstep(monkeypatch, parts=2):
        segments = run_text(tmp_path, "num_rollouts=4")
    rows, mixed = metrics_of(tmp_path), []
    for segment in segments:
        assert segment.lengths.tolist() == [24] * len(segment)
        versions = segment.versions.reshape(len(segment), 24)
        assert all((row[:8] == row[0]).all() and (row[8:16] == row[8]).all() for row in versions)
        assert (versions.diff(dim=1) >= 0).all()
        mixed.append(float((versions[:, 0] != versions[:, -1]).double().mean()))
    assert mixed[0] == 0.0 and max(mixed) > 0.0
    assert [row["rollout/mixed_versions"] for row in rows] == pytest.approx(mixed)
    # The age of a response is that of its oldest token.
    oldest = [segment.versions.reshape(-1, 24)[:, 0] for segment in segments]
    assert all(row["rollout/staleness_max"] <= 2 * row["sync/version"] + 2 for row in rows)
    assert oldest[0].tolist() == [0] * len(oldest[0])


@pytest.mark.slow
def test_slices_without_new_weights_are_whole_responses(tmp_path) -> None:
    frozen = ("num_rollouts=3", "backend.optimizer_cfg.learning_rate=1e-14")
    sliced = run_text(tmp_path / "sliced", *frozen)
    whole = run_text(tmp_path / "whole", *frozen, "asynchronous.slice_tokens=null")
    for ours, theirs in zip(sliced, whole, strict=True):
        assert (ours.tokens == theirs.tokens).all()
        assert (ours.logp == theirs.logp).all()


@pytest.mark.parametrize(
    ("recipe", "overrides", "says"),
    [
        (SEPARATE, [*COMMON, *FREE, "asynchronous.slice_tokens=4"], "cannot go on with a response that paused"),
        (
            TEXT,
            ["asynchronous={order: free, max_staleness: 1, slice_tokens: 4}", f"pipeline.tools={TOOLS}"],
            "answer of a tool",
        ),
    ],
)
def test_what_cannot_pause_is_refused(recipe, overrides, says) -> None:
    with pytest.raises((IncompatibleError, InvalidValueError), match=says):
        preflight(load(recipe, ["scale=toy", *(word for word in overrides if word != "scale=toy")]))
