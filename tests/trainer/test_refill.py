"""Dynamic sampling: which groups a step keeps, what becomes of the others, and a loop that counts them all."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.source_tree import ROOT
from tests.trainer.child import begin, said
from tests.trainer.tied_reward import TiedRewardScorer
from unirl.config.errors import ConfigError, Preempted
from unirl.config.load import load
from unirl.config.recipe import RefillConfig
from unirl.data.data_source import MultimodalRLDataSource
from unirl.plan.preflight import preflight
from unirl.testing.toy import toy_params, toy_request, toy_stage, toy_track
from unirl.trainer.assemble import build_trainer
from unirl.trainer.refill import StepSamples, informative_groups
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp

PARAMS = toy_params(samples_per_prompt=2)


def draw(rewards: list[list[float]], first: int = 0) -> tuple[RolloutReq, RolloutResp]:
    """One draw of as many prompts, two samples each."""
    req, track = toy_request(len(rewards), PARAMS), toy_track(toy_stage(), len(rewards), PARAMS)
    groups = [f"p{first + i}@0" for i in range(len(rewards)) for _ in range(2)]
    ids = [f"{group}:{i % 2}" for i, group in enumerate(groups)]
    flat = torch.tensor(rewards).flatten()
    track = track.replace(
        sample_ids=ids,
        group_ids=groups,
        rewards=flat,
        component_rewards={"toy": flat},
        advantages=None,
        failures=[() for _ in ids],
        logged_rewards={},
        reward_seconds=torch.zeros(len(ids)),
    )
    return req.replace(sample_ids=ids, group_ids=groups), RolloutResp({"image": track})


DIFFER, EQUAL, LOST = [0.0, 1.0], [1.0, 1.0], [float("nan"), 1.0]


def drawn(*rewards: list[list[float]], max_draws: int = 3, batch_size: int = 3) -> StepSamples:
    draws, first = StepSamples(RefillConfig(max_draws=max_draws), batch_size), 0
    for each in rewards:
        assert not draws.is_complete
        draws.add(*draw(each, first), {"queue/reward_wait": float(first)})
        first += len(each)
    return draws


def test_informative_groups_have_different_rewards_and_no_missing_one() -> None:
    assert informative_groups(draw([EQUAL, DIFFER, LOST, [0.0, 0.0], [-1.0, 0.0]])[1]) == ["p1@0", "p4@0"]


def test_a_step_draws_until_its_groups_are_there_and_leaves_the_surplus() -> None:
    draws = drawn([DIFFER, EQUAL, EQUAL], [EQUAL, DIFFER, EQUAL], [DIFFER, DIFFER, DIFFER])
    assert draws.is_complete
    req, resp = draws.everything()
    selected = draws.select(req, resp, "image")
    track = selected.resp.tracks["image"]
    assert (
        list(dict.fromkeys(track.group_ids)) == ["p0@0", "p4@0", "p6@0"] and selected.req.group_ids == track.group_ids
    )
    assert track.weight.tolist() == [1.0] * 6 and selected.missing == 0
    assert selected.reasons == {"equal_rewards": 8, "surplus": 4}
    assert selected.metrics == {"samples/draws": 3.0, "samples/padding": 0.0, "rollout/informative_group_ratio": 5 / 9}


def test_a_step_that_may_draw_no_more_is_filled_with_rows_that_count_nowhere() -> None:
    draws = drawn([EQUAL, LOST, EQUAL], [EQUAL, DIFFER, EQUAL], max_draws=2)
    assert draws.is_complete
    req, resp = draws.everything()
    selected = draws.select(req, resp.drop(["p1@0"]), "image")
    track = selected.resp.tracks["image"]
    assert list(dict.fromkeys(track.group_ids)) == ["p4@0", "p0@0", "p1@0"]
    assert track.weight.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert selected.missing == 2 and selected.metrics["samples/padding"] == 4.0
    assert selected.reasons == {"equal_rewards": 8}  # the group that lost a reward has its own reason


def test_without_refill_a_step_is_its_one_draw() -> None:
    draws = StepSamples(None, 3)
    req, resp = draw([EQUAL, DIFFER, EQUAL])
    draws.add(req, resp, {})
    assert draws.is_complete
    selected = draws.select(*draws.everything(), "image")
    assert selected.resp is resp and selected.req is req and not selected.reasons and not selected.metrics


def test_the_longest_wait_of_the_draws_is_told() -> None:
    assert drawn([EQUAL] * 3, [EQUAL] * 3).waits == {"queue/reward_wait": 3.0}


# The loop

RECIPE = str(ROOT / "tests/trainer/text_loop.yaml")
REFILL = (
    "plugins=[tests]",
    "refill={max_draws: 6}",
    "reward.backend={_target_: tests.trainer.tied_reward.TiedRewardScorer}",
    "sampling.max_new_tokens=4",
    "tracking.sample_steps=2",
    "save_interval=1",
)


def trainer_of(folder: Path, *overrides: str):
    recipe = load(RECIPE, [*REFILL, f"run.dir={folder}", *overrides])
    preflight(recipe)
    return build_trainer(recipe)


def run(folder: Path, *overrides: str):
    with trainer_of(folder, *overrides) as trainer:
        trainer.train()
    return trainer


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        run(folder)
    return folder


def lines(file: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "mem/", "throughput/"))} for row in rows]


def test_the_loop_trains_groups_that_differ_and_accounts_for_every_sample(finished) -> None:
    metrics, ledger = lines(finished / "metrics.jsonl"), lines(finished / "ledger.jsonl")
    for row, account in zip(metrics, ledger, strict=True):
        assert account["generated"] == row["samples/draws"] * 16 == row["samples/generated"]
        assert account["generated"] == account["scored"] + account["dropped"] + account["pending"]
        assert sum(account["reasons"].values()) == account["dropped"] == row["samples/dropped"]
        assert account["scored"] == 16 - row["samples/padding"] and account["pending"] == 0
        assert row["rollout/zero_std_group_ratio"] == 0.0 and row["train/grad_norm"] > 0.0
    assert sum(row["samples/draws"] for row in metrics) > 3
    assert {"equal_rewards", "surplus"} == {reason for account in ledger for reason in account["reasons"]}


def test_every_prompt_that_was_drawn_has_moved_the_cursor(finished) -> None:
    state = json.loads((finished / "checkpoints/checkpoint-000003/trainer.json").read_text())
    draws = sum(row["samples/draws"] for row in lines(finished / "metrics.jsonl"))
    assert state["stateful"]["data"]["cursors"] == [draws * 4]


def test_rewards_are_those_of_all_samples_and_not_only_of_trained_ones(finished) -> None:
    state = json.loads((finished / "checkpoints/checkpoint-000003/trainer.json").read_text())
    data = MultimodalRLDataSource(data_path="datasets/arithmetic/train.jsonl", seed=42)
    assert data.fingerprint == state["stateful"]["data"]["fingerprint"]
    for row in lines(finished / "metrics.jsonl"):
        prompts = data.take(int(row["samples/draws"]) * 4)
        scores = [TiedRewardScorer().score_of(f"{prompt.group_id}:{i}") for prompt in prompts for i in range(4)]
        assert row["rollout/reward_mean"] == pytest.approx(sum(scores) / len(scores))


def test_a_run_stopped_after_a_step_goes_on_to_the_same_bits(finished, tmp_path) -> None:
    with trainer_of(tmp_path / "run") as trainer:
        trainer.request_stop(signal.SIGTERM)
        with pytest.raises(Preempted):
            trainer.train()
    run(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(finished)


def outcome(folder: Path) -> dict[str, object]:
    final = folder / "checkpoints/checkpoint-000003/policy"
    return {
        "metrics": lines(folder / "metrics.jsonl"),
        "ledger": (folder / "ledger.jsonl").read_text(),
        "policy": {file.name: file.read_bytes() for file in sorted(final.iterdir())},
    }


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_its_draws_goes_on_to_the_same_bits(finished, tmp_path) -> None:
    folder = tmp_path / "run"
    for step in (0, 1, 2):
        child = begin(RECIPE, folder, *REFILL)
        while child.is_alive() and not _has_finished(folder, step):
            time.sleep(0.002)
        assert child.is_alive()
        time.sleep(0.05 * (1 + step))  # somewhere within the next step's draws
        child.kill()
        child.join(30)
    child = begin(RECIPE, folder, *REFILL)
    child.join(120)
    assert child.exitcode == 0, said(folder)
    assert outcome(folder) == outcome(finished)


def _has_finished(folder: Path, steps: int) -> bool:
    file = folder / "metrics.jsonl"
    return file.exists() and len(file.read_text().splitlines()) >= steps


ENGINE = (
    "rollout={_target_: unirl.rollout.engine.replica.engine.ReplicaRolloutEngine, forward_batch_size: 6}",
    "sync={_target_: unirl.distributed.weight_sync.sync.EngineSync}",
)


@pytest.mark.slow
def test_an_engine_that_takes_turns_with_the_trainer_draws_the_same(finished, tmp_path) -> None:
    run(tmp_path, *ENGINE, "runtime=local")
    assert (tmp_path / "ledger.jsonl").read_text() == (finished / "ledger.jsonl").read_text()


@pytest.mark.slow
def test_two_ranks_draw_and_train_the_same_with_rows_dealt_by_length(finished, workers, tmp_path) -> None:
    run(tmp_path, "num_devices=2", "stack={micro_batch_tokens: 150}")
    assert (tmp_path / "ledger.jsonl").read_text() == (finished / "ledger.jsonl").read_text()
    for row, alone in zip(lines(tmp_path / "metrics.jsonl"), lines(finished / "metrics.jsonl"), strict=True):
        for name in ("rollout/reward_mean", "train/loss", "train/grad_norm", "samples/draws"):
            assert row[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), name


def test_prompts_that_never_differ_are_said_loudly_and_change_no_weight(tmp_path) -> None:
    run(tmp_path, "num_rollouts=2", "refill.max_draws=2", "reward.backend.ties=3")
    for row in lines(tmp_path / "metrics.jsonl"):
        assert row["samples/draws"] == 2.0 and row["samples/padding"] == row["samples/generated"] / 2
        assert row["train/skipped_updates"] == 1.0 and row["rollout/informative_group_ratio"] == 0.0
        assert row["rollout/reward_mean"] == 1.0
    events = (tmp_path / "events.jsonl").read_text().splitlines()
    assert sum('"refill.short"' in line for line in events) == 2
    assert (
        sum("4 of the 4 groups of a step have equal rewards after refill.max_draws=2" in line for line in events) == 1
    )
    first, second = (
        (tmp_path / f"checkpoints/checkpoint-00000{step}/policy/weights.safetensors").read_bytes() for step in (1, 2)
    )
    assert first == second


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("refill={max_draws: 1}",), "max_draws must be >= 2"),
        (("sampling.samples_per_prompt=1", "stack.micro_batch_size=1"), "groups of one"),
        (("stack.micro_batch_tokens=100",), "does not train tokens.*micro_batch_size"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_start(overrides, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(load("diffusion/sd3_trainside", ["refill={}", f"run.dir={tmp_path}", *overrides]))


def test_recorded_samples_cannot_be_drawn_again(tmp_path) -> None:
    recipe = load("diffusion/quickstart_dpo_offline", ["refill={}", f"run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"returns the same recorded samples at every draw.*~refill"):
        preflight(recipe)
