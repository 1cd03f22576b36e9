"""Steps that are generated while the weights learn from earlier ones: which weights they come from, and resuming."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.run_files import metrics_of
from unirl.config.errors import IncompatibleError
from unirl.config.load import load
from unirl.distributed.group.pool import LocalPool
from unirl.plan.preflight import preflight
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.trainer.assemble import build_trainer
from unirl.trainer.generation import GenerationAhead

COMMON = ("scale=toy", "tracking.sample_steps=0", "evaluation.eval_steps=0", "backend.optimizer_cfg.learning_rate=3e-3")
SEPARATE = "diffusion/sd3_replica_lora_separate"


def run(folder: Path, *overrides: str):
    loaded = load(SEPARATE, [*COMMON, f"run.dir={folder}", *overrides])
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        trainer.train()
    return trainer


def final_weights(folder: Path, step: int) -> bytes:
    return (folder / f"checkpoints/checkpoint-{step:06d}/policy/weights.safetensors").read_bytes()


@pytest.mark.parametrize("staleness", [1, 4])
def test_a_step_samples_from_the_weights_of_so_many_steps_before(staleness, tmp_path) -> None:
    run(tmp_path, "num_rollouts=6", f"asynchronous.max_staleness={staleness}")
    rows = metrics_of(tmp_path)
    versions = [2 * max(step - staleness, 0) for step in range(6)]  # two updates a step
    assert [row["sync/version"] for row in rows] == versions
    assert [row["rollout/staleness_max"] for row in rows] == [2 * step - versions[step] for step in range(6)]


SAVED = ("save_interval=1", "evaluation.eval_steps=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[int], Path]:
    """The folder of a run of five steps without a stop, by its staleness."""

    @cache
    def made(staleness: int) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        run(folder, "num_rollouts=5", f"asynchronous.max_staleness={staleness}", *SAVED)
        return folder

    return made


@pytest.mark.parametrize(
    ("staleness", "stop"),
    [(1, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1), (3, 1), (3, 2), (3, 4)))],
)
def test_a_stopped_run_resumes_exactly(staleness, stop, whole, tmp_path) -> None:
    for steps in (stop, 5):
        run(tmp_path, f"num_rollouts={steps}", f"asynchronous.max_staleness={staleness}", *SAVED)
    assert metrics_of(tmp_path) == metrics_of(whole(staleness))
    assert final_weights(tmp_path, 5) == final_weights(whole(staleness), 5)


def test_a_run_that_ends_while_later_steps_are_under_way_resumes_exactly(tmp_path, monkeypatch) -> None:
    settings = ("num_rollouts=6", "asynchronous.max_staleness=3", "save_interval=1")
    sample = ReplicaRolloutEngine.sample

    def failing(engine, req):
        if req.step == 4:
            raise OverflowError("out of sorts")
        return sample(engine, req)

    run(tmp_path / "whole", *settings)
    with monkeypatch.context() as patch, pytest.raises(OverflowError):
        patch.setattr(ReplicaRolloutEngine, "sample", failing)
        run(tmp_path / "broken", *settings)
    assert [row["step"] for row in metrics_of(tmp_path / "broken")] == [1, 2]  # two more were generated
    run(tmp_path / "broken", *settings)
    assert metrics_of(tmp_path / "broken") == metrics_of(tmp_path / "whole")
    assert final_weights(tmp_path / "broken", 6) == final_weights(tmp_path / "whole", 6)


def test_an_error_of_the_engine_ends_the_run_at_the_step_that_needs_the_samples(tmp_path, monkeypatch) -> None:
    sample = ReplicaRolloutEngine.sample

    def failing(engine, req):
        if req.step == 2:
            raise OverflowError("out of sorts")
        return sample(engine, req)

    monkeypatch.setattr(ReplicaRolloutEngine, "sample", failing)
    with pytest.raises(OverflowError, match="out of sorts"):
        run(tmp_path, "num_rollouts=6", "asynchronous.max_staleness=1", "save_interval=1")
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2]  # the second one trains while the engine fails
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("generation of steps")]


def test_steps_that_are_not_generated_when_a_run_ends_leave_no_thread() -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Sampler:
        def generate(self, step, published):
            begun.set()
            assert may_end.wait(10)
            return step

    pool = LocalPool(1, 1, 10.0)
    generation = GenerationAhead(Sampler(), pool, True, 3, 2)
    for step in range(3):
        generation.begin(step, {})
    assert begun.wait(10)
    generation.stop()
    may_end.set()
    pool.join_threads(10.0)
    assert not any(thread.is_alive() for thread in pool.threads)
    assert generation.generated.take() == 0


@pytest.mark.slow
def test_ray_and_one_process_train_the_same_weights(tmp_path) -> None:
    settings = ("num_rollouts=4", "asynchronous.max_staleness=2", "reward_parts=2", "placement.reward=cpu")
    run(tmp_path / "ray", "runtime=ray", *settings)
    run(tmp_path / "local", "runtime=local", *settings)
    assert final_weights(tmp_path / "ray", 4) == final_weights(tmp_path / "local", 4)


@pytest.mark.slow
def test_every_prompt_is_trained_once_and_in_the_order_of_a_run_in_turns(tmp_path) -> None:
    settings = ("num_rollouts=12", "tracking.sample_steps=1", "tracking.max_samples=64")
    trained = {}
    for name, overrides in {"ahead": ["asynchronous.max_staleness=3"], "in_turns": []}.items():
        run(tmp_path / name, *settings, *overrides)
        manifests = sorted((tmp_path / name).glob("samples/step-*/manifest.jsonl"))
        rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in manifests]
        trained[name] = [[row["sample_id"] for row in step] for step in rows]
        ledger = [json.loads(line) for line in (tmp_path / name / "ledger.jsonl").read_text().splitlines()]
        assert [line["generated"] for line in ledger] == [len(step) for step in trained[name]] == [8] * 12
    assert trained["ahead"] == trained["in_turns"]
    everything = [sample for step in trained["ahead"] for sample in step]
    assert len(everything) == len(set(everything))


@pytest.mark.slow
def test_dynamic_sampling_draws_the_same_prompts_as_in_turns(tmp_path) -> None:
    settings = ("num_rollouts=3", "refill.max_draws=2", "backend.optimizer_cfg.learning_rate=1e-12")
    run(tmp_path / "ahead", "asynchronous.max_staleness=2", *settings)
    run(tmp_path / "in_turns", *settings)
    rewards = [[row["rollout/reward_mean"] for row in metrics_of(tmp_path / name)] for name in ("ahead", "in_turns")]
    assert rewards[0] == rewards[1]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout=trainside", "~sync", "~placement"], "samples with the trained weights themselves"),
        (["placement.rollout=0", "placement.train=0"], "shares the devices of the trainer"),
        (["weight_sync_interval=2"], "both let samples be older"),
        (["row_transport=collective"], "Set row_transport=object_store"),
    ],
)
def test_what_cannot_be_generated_ahead_is_refused_with_the_way_out(overrides, says) -> None:
    with pytest.raises(IncompatibleError, match=says) as error:
        preflight(load(SEPARATE, ["scale=toy", "asynchronous.max_staleness=1", *overrides]))
    assert "max_staleness" in str(error.value)
