"""A run of text, however it is placed: the same tokens from the first rollout on, the same weights at its end."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.source_tree import ROOT
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer import assemble

STEPS = 2
RECIPE = str(ROOT / "tests/trainer/text_loop.yaml")
COMMON = (
    "plugins=[tests]",
    f"num_rollouts={STEPS}",
    "save_interval=0",
    "tracking.sample_steps=1",
    "evaluation.eval_steps=0",
    "stack.num_updates_per_batch=2",
    "stack.micro_batch_size=1",
)
LORA = "backend.lora_cfg={rank: 4, alpha: 8}"
REPLICA = (
    "rollout={_target_: unirl.rollout.engine.replica.engine.ReplicaRolloutEngine, forward_batch_size: 6}",
    "sync={_target_: unirl.distributed.weight_sync.sync.EngineSync}",
)
SERVER = ("rollout=sglang", "rollout.program=fake", "rollout.concurrency=4")
SEPARATE = (*REPLICA, "placement={train: 0, rollout: 1}", "num_devices=2")
LOCAL = {"colocate": (*REPLICA, "runtime=local"), "separate": (*SEPARATE, "runtime=local")}
ON_RAY = {
    "trainside": ("num_devices=2",),
    "colocate": (*REPLICA, "num_devices=2"),
    "shared_buffer": (*REPLICA, "num_devices=1", "sync.transport=cuda_ipc"),
    "broadcast": (*SEPARATE, "sync.transport=broadcast"),
    "object_store": (*SEPARATE, "sync.transport=ray"),
}


@dataclass
class Outcome:
    """What a run made: of every step the responses, their log-probs and rewards; the stored values along samples of
    the first step, by sample; and the final weights."""

    texts: list[list[str]]
    logp: list[Tensor]
    rewards: list[Tensor]
    series: dict[str, dict[str, list[float]]]
    weights: dict[str, Tensor]


def run(folder: Path, *overrides: str) -> Outcome:
    loaded = load(RECIPE, [*COMMON, f"run.dir={folder}", *overrides])
    preflight(loaded)
    with assemble.build_trainer(loaded) as trainer:
        made = Outcome([], [], [], {}, {})
        produce = trainer.produce

        def watched(step: int):
            resp = produce(step)
            track = resp.tracks["text"]
            made.texts.append(list(track.decoded.texts))
            made.logp.append(track.segment.logp)
            made.rewards.append(track.rewards)
            return resp

        trainer.produce = watched
        trainer.train()
        made.weights = dict(trainer.policy.roles.backend.gather())
    rows = (folder / "samples/step-000001/manifest.jsonl").read_text().splitlines()
    made.series = {row["sample_id"]: row["series"] for row in map(json.loads, rows)}
    return made


def assert_same(found: Outcome, expected: Outcome) -> None:
    for step in range(STEPS):
        assert found.texts[step] == expected.texts[step], f"responses of step {step}"
        assert torch.equal(found.rewards[step], expected.rewards[step]), f"rewards of step {step}"
    assert torch.equal(found.logp[0], expected.logp[0])
    assert found.series.keys() == expected.series.keys()
    for sample_id, series in expected.series.items():
        assert found.series[sample_id]["log_ratio"] == pytest.approx(series["log_ratio"], abs=1e-4)
    assert torch.allclose(found.logp[-1], expected.logp[-1], atol=1e-4, rtol=0)
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        gap = (found.weights[name] - weight).abs().max() / weight.abs().max().clamp(min=1e-12)
        assert gap <= 1e-4, f"{name}: {gap:.2g}"


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trainside(tmp_path_factory) -> dict[str, Outcome]:
    """The runs in this process on the trained weights themselves, which all others must equal."""
    folder = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        torch.set_num_threads(1)
        return {"lora": run(folder / "lora", LORA), "full": run(folder / "full")}


@pytest.mark.slow
@pytest.mark.parametrize("tune", ["lora", "full"])
@pytest.mark.parametrize("layout", LOCAL)
def test_an_engine_of_its_own_changes_no_token_in_one_process(layout, tune, trainside, tmp_path) -> None:
    assert_same(run(tmp_path, *LOCAL[layout], *([LORA] if tune == "lora" else [])), trainside[tune])


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "tune"), list(zip(ON_RAY, itertools.cycle(["lora", "full"]), strict=False)))
def test_workers_and_the_way_that_weights_take_change_no_token(layout, tune, trainside, workers, tmp_path) -> None:
    settings = (*ON_RAY[layout], "runtime=ray", *([LORA] if tune == "lora" else []))
    assert_same(run(tmp_path, *settings), trainside[tune])


@pytest.mark.slow
def test_servers_of_two_devices_sample_what_one_server_samples(workers, tmp_path) -> None:
    """Seeds belong to samples, and each rank of the engine has a server of its own."""
    one = run(tmp_path / "one", *SERVER, "runtime=local")
    devices = ("placement={train: 0, rollout: 1-2}", "num_devices=3", "runtime=ray")
    assert_same(run(tmp_path / "two", *SERVER, *devices), one)
    assert {file.name for file in (tmp_path / "two/logs").glob("sglang-*")} == {"sglang-0.log", "sglang-1.log"}


def test_training_moved_the_weights(trainside) -> None:
    for made in trainside.values():
        largest = [max(map(abs, series["log_ratio"])) for series in made.series.values()]
        # Without siblings in both halves of the batch, the samples of the first update have weights as they were.
        assert len(largest) == 16 and largest[:8] == [0.0] * 8 and min(largest[8:]) > 1e-3
        assert made.texts[0] != made.texts[-1]
        assert not torch.equal(made.logp[0][:4], made.logp[-1][:4])
