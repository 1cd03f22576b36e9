"""A whole run whose reward fails, and one whose reward works while the engine draws."""

from __future__ import annotations

import socket

import pytest
import torch

from tests.run_files import lines_of, metrics_of
from tests.trainer.test_loop import run, trainer_of, weights_of
from unirl.cli.main import main
from unirl.config.errors import ConfigError, DataError, RewardError
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer
from unirl.trainer.overlap import in_parts, queue_metrics

FAULTY = "tests.trainer.faulty"
BIG = ("plugins=[tests]", "batch_size=4", "sampling.samples_per_prompt=2")


def reward(name: str, **keys: object) -> list[str]:
    settings = "".join(f", {key}: {value}" for key, value in keys.items())
    return [f"reward.backend={{_target_: {FAULTY}.{name}{settings}}}"]


def policy(**keys: object) -> str:
    return f"+reward.on_failure={{{', '.join(f'{k}: {v}' for k, v in keys.items())}}}"


def test_dropped_groups_are_counted_at_every_step_and_train_nothing(tmp_path) -> None:
    run(tmp_path, *BIG, *reward("Poisoned", share=0.2), policy(max_dropped_fraction=0.9))
    ledger = lines_of(tmp_path / "ledger.jsonl")
    for row in ledger:
        assert row["generated"] == 8 == row["scored"] + row["dropped"] + row["pending"]
        assert sum(row["reasons"].values()) == row["dropped"]
    lost = sum(row["dropped"] for row in ledger)
    assert 0 < lost < 16
    events = lines_of(tmp_path / "events.jsonl")
    assert 2 * sum(event["ev"] == "group.drop" for event in events) == lost
    assert any(event["ev"] == "reward.error" and "gave nan" in event["why"] for event in events)
    assert all(0 < row["rollout/reward_mean"] < 1 for row in metrics_of(tmp_path))


def test_without_a_budget_the_first_lost_sample_ends_the_run(tmp_path) -> None:
    with pytest.raises(RewardError, match=r"gave nan to sample 'train\.txt:72@.* belongs to \S+train\.txt:73\."):
        run(tmp_path, *BIG, *reward("Poisoned", share=0.2))


def test_a_judge_that_hangs_up_now_and_then_changes_no_bit(tmp_path) -> None:
    run(tmp_path / "calm", *BIG, *reward("Explosive", share=0))
    run(tmp_path / "rough", *BIG, *reward("Explosive", share=0.3, failures=9), policy(retries=3))
    assert metrics_of(tmp_path / "rough") == metrics_of(tmp_path / "calm")
    assert weights_of(tmp_path / "rough", 2) == weights_of(tmp_path / "calm", 2)


def test_a_prompt_that_no_sample_of_could_be_scored_is_found_before_a_folder_is_made(tmp_path) -> None:
    data = tmp_path / "prompts.txt"
    data.write_text("a cat\na dog\n")
    with pytest.raises(DataError, match=r"prompts\.txt:2: reward 'Picky' cannot score .*no cat in 'a dog'"):
        run(tmp_path / "run", *BIG, *reward("Picky"), f"data_source.data_path={data}")
    assert not (tmp_path / "run").exists()


def test_a_service_that_is_not_there_ends_the_run_before_a_folder_is_made(tmp_path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    words = ["scale=toy", f"run.dir={tmp_path / 'run'}", f"reward.backend.config.base_url={url}"]
    words.append("reward.backend.config.startup_s=0.1")
    with (
        pytest.raises(RewardError, match=f"{url} cannot be reached.*Start the service or correct base_url"),
        build_trainer(load("diffusion/sd3_nft_reward_service", words)),
    ):
        pass
    assert main(["train", "diffusion/sd3_nft_reward_service", *words]) == RewardError.exit_status
    assert f"error[6001]: the reward service at {url} cannot be reached" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_equal_rewards_are_said_to_teach_nothing(tmp_path) -> None:
    run(tmp_path, *BIG, *reward("Constant", value=0.25))
    events = lines_of(tmp_path / "events.jsonl")
    alarms = [event for event in events if event["ev"] == "alarm.raise"]
    assert [(event["alarm"], event["value"]) for event in alarms] == [("reward.constant", 0.25)] * 2
    warned = [event["text"] for event in events if event["ev"] == "warning"]
    assert any("all 8 samples of the first step have the reward 0.25" in text for text in warned)


def test_equal_rewards_raise_no_alarm_for_a_loss_that_fits_samples_whatever_they_are_worth(tmp_path) -> None:
    fit = ("algorithm={_target_: unirl.algorithms.diffusion_rwr.DiffusionRWR}", "stack.num_updates_per_batch=1")
    ode = "sampling.kernel={_target_: unirl.sde.kernels.EulerODE}"
    trainer = run(tmp_path, *BIG, *reward("Constant", value=0.25), *fit, ode)
    assert trainer.policy.version == 2
    assert not [event for event in lines_of(tmp_path / "events.jsonl") if event["ev"] == "alarm.raise"]


# Overlap


def test_scoring_while_drawing_changes_no_number(tmp_path) -> None:
    run(tmp_path / "turns", *BIG, *reward("Slow", seconds=0))
    run(tmp_path / "overlap", *BIG, *reward("Slow", seconds=0.01), "reward_parts=3", "+placement.reward=cpu")
    assert metrics_of(tmp_path / "overlap") == metrics_of(tmp_path / "turns")
    assert weights_of(tmp_path / "overlap", 2) == weights_of(tmp_path / "turns", 2)
    rows = lines_of(tmp_path / "overlap" / "metrics.jsonl")
    assert all(row["queue/reward_latency"] >= 0.01 and 0 < row["queue/reward_busy"] <= 1.01 for row in rows)


@pytest.fixture
def one_thread():
    """As workers have it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_workers_that_score_in_turns_or_while_drawing_change_no_number(tmp_path, ray_session, one_thread) -> None:
    overlapped = ("reward_parts=3", "+placement.reward=cpu")
    ways = {"local": (), "turns": ("runtime=ray",), "overlap": ("runtime=ray", *overlapped)}
    for name, words in ways.items():
        run(tmp_path / name, *BIG, *reward("Slow", seconds=0.01), *words)
    for name in ("turns", "overlap"):
        assert metrics_of(tmp_path / name) == metrics_of(tmp_path / "local")
        assert weights_of(tmp_path / name, 2) == weights_of(tmp_path / "local", 2)
    rows = lines_of(tmp_path / "overlap" / "metrics.jsonl")
    assert all(row["queue/reward_latency"] >= 0.01 for row in rows)


def test_a_reward_that_takes_turns_with_the_engine_cannot_overlap() -> None:
    with pytest.raises(ConfigError, match=r"reward_parts=2.*shares device 0 with rollout.*placement\.reward=cpu"):
        preflight(load("diffusion/sd3_trainside", ["scale=toy", "reward_parts=2"]))


def test_parts_are_whole_groups_and_all_of_them(tmp_path) -> None:
    size = ("batch_size=5", "sampling.samples_per_prompt=4", "stack.num_updates_per_batch=1")
    with trainer_of(tmp_path, *size) as trainer:
        req = trainer.requests.training(trainer.data.take(5), 0, trainer.publish(0))
    for count in range(1, 8):
        parts = in_parts(req, count)
        assert [sample for part in parts for sample in part.sample_ids] == req.sample_ids
        assert len(parts) == min(count, 5)
        groups = [set(part.group_ids) for part in parts]
        assert sum(len(result) for result in groups) == len(set.union(*groups))


def test_the_queue_of_parts_that_come_every_second() -> None:
    """Three parts at 0, 1, 2 s; 1.5 s of work each: done at 1.5, 3.0, 4.5."""
    result = queue_metrics([0.0, 1.0, 2.0], [1.5, 1.5, 1.5], 2.5)
    assert result == pytest.approx(
        {
            "queue/reward_depth": 1.0,
            "queue/reward_wait": 2.5,
            "queue/reward_latency": (1.5 + 2.0 + 2.5) / 3,
            "queue/reward_busy": 1.0,
        }
    )
    assert queue_metrics([0.0, 1.0, 2.0], [0.5, 0.5, 0.5], 0.5)["queue/reward_busy"] == pytest.approx(1.5 / 2.5)
