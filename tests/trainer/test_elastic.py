"""Training devices that sample while they wait: no bit changes, and they train with all of their memory."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.run_files import metrics_of
from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.config.load import load
from unirl.distributed.group.handle import Handle
from unirl.plan.fit import device_peaks
from unirl.plan.placement import plan_of
from unirl.plan.preflight import preflight
from unirl.plan.sizes import sizes_of_policies
from unirl.rollout.engine.base import DedicatedEngine
from unirl.trainer.assemble import build_trainer
from unirl.trainer.loop import Trainer
from unirl.trainer.part_sampling import JOINING_THREAD, PartQueue

SEPARATE = "diffusion/sd3_replica_lora_separate"
COMMON = ("scale=toy", "tracking.sample_steps=0", "evaluation.eval_steps=0", "backend.optimizer_cfg.learning_rate=3e-3")
PARTS = ("reward_parts=2", "placement.reward=cpu")
ELASTIC = "asynchronous.elastic=true"


def run(folder: Path, *overrides: str) -> Trainer:
    loaded = load(SEPARATE, [*COMMON, *PARTS, f"run.dir={folder}", *overrides])
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        trainer.train()
    return trainer


def final_weights(folder: Path, step: int) -> bytes:
    return (folder / f"checkpoints/checkpoint-{step:06d}/policy/weights.safetensors").read_bytes()


@pytest.fixture
def shared_out(monkeypatch) -> list[int]:
    """The joining engine samples every second part, however fast it is. Returns the parts that it sampled."""
    joined: list[int] = []

    def take(queue: PartQueue, joins: bool):
        def mine():
            return [each for each in queue.waiting if queue.joining is None or each[0] % 2 == joins]

        with queue.changed:
            queue.changed.wait_for(lambda: not joins or queue.joining.is_lent or not mine())
            if not mine():
                return None
            taken = mine()[0]
            queue.waiting.remove(taken)
            queue.changed.notify_all()
            if joins:
                queue.joining.is_busy = True
                joined.append(taken[0])
            return taken

    monkeypatch.setattr(PartQueue, "_take", take)
    yield joined
    assert not [thread.name for thread in threading.enumerate() if thread.name == JOINING_THREAD]


def engine_behind(trainer: Trainer) -> DedicatedEngine:
    """The joining engine itself, which lives in this process."""
    handle = trainer.learners[0].roles.joining
    assert isinstance(handle, Handle)
    engine = handle.group.role_here(handle.role_name)
    assert isinstance(engine, DedicatedEngine)
    return engine


def test_an_elastic_run_that_stops_and_resumes_has_the_bits_of_a_static_one(tmp_path, shared_out, monkeypatch) -> None:
    asleep: list[bool] = []
    learn = Trainer.learn

    def watched(trainer, step, resp):
        if trainer.learners[0].roles.joining is not None:
            asleep.append(engine_behind(trainer).is_asleep)
        learn(trainer, step, resp)

    monkeypatch.setattr(Trainer, "learn", watched)
    settings = ("asynchronous.max_staleness=1", "save_interval=1")
    run(tmp_path / "static", "num_rollouts=4", *settings)
    assert not shared_out
    run(tmp_path / "elastic", "num_rollouts=2", ELASTIC, *settings)
    run(tmp_path / "elastic", "num_rollouts=4", ELASTIC, *settings)
    assert shared_out == [1] * 4  # the second of two parts of each step
    assert asleep == [True] * 4
    assert metrics_of(tmp_path / "elastic") == metrics_of(tmp_path / "static")
    assert final_weights(tmp_path / "elastic", 4) == final_weights(tmp_path / "static", 4)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["refill.max_draws=2"]], ids=["", "refill"])
def test_in_turns_an_elastic_run_has_the_bits_of_a_static_one(overrides, tmp_path, shared_out) -> None:
    run(tmp_path / "static", "num_rollouts=3", *overrides)
    run(tmp_path / "elastic", "num_rollouts=3", ELASTIC, *overrides)
    assert shared_out
    assert metrics_of(tmp_path / "elastic") == metrics_of(tmp_path / "static")
    assert final_weights(tmp_path / "elastic", 3) == final_weights(tmp_path / "static", 3)


@pytest.mark.slow
def test_an_elastic_run_on_ray_has_the_bits_of_a_static_one(tmp_path, shared_out) -> None:
    """Two training devices join one of the engine, so the ranks that share a part differ in number."""
    settings = ("num_rollouts=3", "asynchronous.max_staleness=1", "batch_size=4")
    three = ("num_devices=3", "placement={train: 0-1, rollout: 2, reward: cpu}", "runtime=ray")
    run(tmp_path / "static", *settings, *three)
    run(tmp_path / "elastic", *settings, *three, ELASTIC)
    assert shared_out
    assert metrics_of(tmp_path / "elastic") == metrics_of(tmp_path / "static")  # among them losses and gradient norms


def test_an_error_of_the_joining_engine_ends_the_run(tmp_path, shared_out, monkeypatch) -> None:
    generate = DedicatedEngine.generate

    def failing(engine, req):
        if engine is joining and req.step == 1:
            raise OverflowError("out of sorts")
        return generate(engine, req)

    loaded = load(SEPARATE, [*COMMON, *PARTS, f"run.dir={tmp_path}", "num_rollouts=3", ELASTIC])
    preflight(loaded)
    with build_trainer(loaded) as trainer, pytest.raises(OverflowError, match="out of sorts"):
        joining = engine_behind(trainer)
        monkeypatch.setattr(DedicatedEngine, "generate", failing)
        trainer.train()
    assert [row["step"] for row in metrics_of(tmp_path)] == [1]


def test_the_plan_counts_a_second_engine_on_the_training_devices_which_sleeps_while_they_train() -> None:
    peaks = {}
    for words in ([], [ELASTIC, "reward_parts=8"]):
        (sizes,) = sizes_of_policies(load(SEPARATE, words)).values()
        peaks[len(words)] = device_peaks(sizes.run, sizes.run.settings)[sizes.run.placement.train]
    engine = device_peaks(sizes.run, sizes.run.settings)[sizes.run.placement.rollout]
    static, elastic = peaks[0], peaks[2]
    reward = next(row for _, row in sizes.run.memory if row.name == "reward models").gib
    for moment in ("sync", "encode", "sample", "decode"):
        assert elastic[moment] == pytest.approx(static[moment] + engine[moment] - reward[moment])
    assert elastic["resume"] == static["resume"]
    rows = sum(row.gib["train"] for _, row in sizes.run.memory if row.name.startswith("stored")) / 2
    assert elastic["train"] == pytest.approx(static["train"] + rows)  # the rows that it sampled


def test_the_plan_says_who_samples_while_the_training_devices_wait() -> None:
    rows = dict(plan_of(load(SEPARATE, [ELASTIC, "reward_parts=8"]).config).rows_of_devices())
    assert rows["devices 0-3"]["generate"] == "rollout, while train waits"
    assert dict(plan_of(load(SEPARATE, []).config).rows_of_devices())["devices 0-3"]["generate"] == "-"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout=trainside", "~sync", "~placement"], "samples with the trained weights themselves"),
        (["placement.rollout=0", "placement.train=0"], "shares the devices of the trainer"),
        (["reward_parts=1"], "a step has one. Set reward_parts"),
        (["row_transport=collective"], "Set row_transport=object_store"),
        (["rollout=sglang"], "Use rollout=replica"),
        (
            [
                "node_groups={big: {nodes: 0, hardware: h100}, small: {nodes: 1, hardware: a100}}",
                "placement={train: big, rollout: small, reward: cpu}",
            ],
            "big and small",
        ),
    ],
)
def test_what_cannot_be_elastic_is_refused_with_the_way_out(overrides, says) -> None:
    with pytest.raises(IncompatibleError, match=says) as error:
        preflight(load(SEPARATE, ["scale=toy", ELASTIC, "reward_parts=8", "placement.reward=cpu", *overrides]))
    assert "asynchronous.elastic=true" in str(error.value)


def test_free_order_and_elastic_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="elastic belongs to order=fixed"):
        load(SEPARATE, [ELASTIC, "asynchronous.order=free", "asynchronous.max_staleness=1"])
