"""The loop on the toy Stable Diffusion 3: what it promises at every step, at stops, at resumes and at failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.run_files import metrics_of
from unirl.config.errors import CheckpointError, ConfigError, DataError, Interrupted, Preempted, RewardError
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.train.backend.checkpoint import open_checkpoint
from unirl.trainer.assemble import build_trainer
from unirl.trainer.resume import changed_keys
from unirl.types.progress import Counted, Heartbeat
from unirl.types.rows import spread_rows

COMMON = ("scale=toy", "num_rollouts=2", "tracking.sample_steps=0", "evaluation.eval_steps=0")


def trainer_of(folder: Path, *overrides: str, recipe: str = "diffusion/sd3_trainside"):
    loaded = load(recipe, [*COMMON, f"run.dir={folder}", *overrides])
    preflight(loaded)
    return build_trainer(loaded)


def run(folder: Path, *overrides: str):
    with trainer_of(folder, *overrides) as trainer:
        trainer.train()
    return trainer


def weights_of(folder: Path, step: int) -> bytes:
    return (folder / f"checkpoints/checkpoint-{step:06d}/policy/weights.safetensors").read_bytes()


def checkpoints_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("checkpoint-*"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, "save_interval=1")
    return folder


@pytest.mark.parametrize("size", [1, 3])
def test_the_forward_batch_size_changes_no_bit_of_a_run(size, finished, tmp_path) -> None:
    run(tmp_path, f"rollout.forward_batch_size={size}")
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert weights_of(tmp_path, 2) == weights_of(finished, 2)


def test_an_embedding_cache_that_is_refilled_changes_no_bit_of_a_run(finished, tmp_path) -> None:
    run(tmp_path, "pipeline.embedding_cache_gb=0")
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert weights_of(tmp_path, 2) == weights_of(finished, 2)


def test_rollout_and_replay_agree_to_the_bit(finished) -> None:
    assert [row["rollout/parity_absdiff_max"] for row in metrics_of(finished)] == [0.0, 0.0]


def test_the_first_update_has_ratio_exactly_one(tmp_path) -> None:
    run(tmp_path, "stack.num_updates_per_batch=1")
    for row in metrics_of(tmp_path):
        assert row["train/ratio_mean"] == 1.0 and row["train/ratio_std"] == 0.0
        assert row["train/clip_fraction"] == 0.0 and row["train/approx_kl"] == 0.0


def test_training_changes_the_weights(finished) -> None:
    assert weights_of(finished, 1) != weights_of(finished, 2)


def test_every_step_accounts_for_every_sample(finished) -> None:
    rows = [json.loads(line) for line in (finished / "ledger.jsonl").read_text().splitlines()]
    assert [(row["step"], row["generated"], row["scored"]) for row in rows] == [(1, 8, 8), (2, 8, 8)]


def test_every_phase_counts_what_it_has_done_up_to_all_of_it(tmp_path, monkeypatch) -> None:
    counted: dict[str, dict[str, Counted]] = {}
    with trainer_of(tmp_path, "num_rollouts=1") as trainer:
        beat = Heartbeat.beat

        def noted(heartbeat: Heartbeat, *args: object, **named: object) -> None:
            beat(heartbeat, *args, **named)
            counted.setdefault(trainer.pool.phase, {}).update(heartbeat.counted)

        monkeypatch.setattr(Heartbeat, "beat", noted)
        trainer.train()
    assert all(each.done == each.total for phase in counted.values() for each in phase.values())
    totals = {phase: {what: each.total for what, each in counts.items()} for phase, counts in counted.items()}
    assert totals["generate"].items() >= {"sample": 8, "denoising step": 4}.items()
    assert totals["train"]["micro-batch"] == 2 and "part of the loss" in totals["train"]


def test_an_evaluation_repeats_to_the_bit_and_does_not_disturb_training(finished, tmp_path) -> None:
    with trainer_of(tmp_path, "evaluation.eval_steps=1") as trainer:
        first, second = trainer.evaluate(), trainer.evaluate()
        assert torch.equal(first.rewards, second.rewards) and torch.equal(first.media.pixels, second.media.pixels)
        trainer.train()
    assert metrics_of(tmp_path) == metrics_of(finished)


@pytest.mark.slow
def test_an_evaluation_of_the_average_uses_its_weights(tmp_path) -> None:
    with trainer_of(
        tmp_path, "evaluation.eval_steps=1", "evaluation.weights=ema", "backend.ema_cfg={every: 1, target_decay: 0.0}"
    ) as trainer:
        trainer.train()
        from_average = trainer.evaluate()
        assert torch.equal(from_average.rewards, trainer.evaluate().rewards)
    # With decay 0 the average is the live weights.
    with trainer_of(tmp_path / "live", "evaluation.eval_steps=1") as live:
        live.train()
        assert torch.equal(live.evaluate().rewards, from_average.rewards)


@pytest.mark.parametrize(("signum", "error"), [(signal.SIGTERM, Preempted), (signal.SIGINT, Interrupted)])
def test_a_signal_stops_after_the_step_with_a_checkpoint_that_continues_exactly(
    signum, error, finished, tmp_path
) -> None:
    with trainer_of(tmp_path) as trainer:
        trainer.request_stop(signum)
        with pytest.raises(error, match="checkpoint saved"):
            trainer.train()
    assert (tmp_path / "checkpoints" / "LATEST").read_text().strip() == "checkpoint-000001"
    run(tmp_path)
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert weights_of(tmp_path, 2) == weights_of(finished, 2)


def test_a_resumed_run_says_where_it_continues_and_keeps_its_threads_whatever_else_is_asked_for(
    tmp_path, monkeypatch, capsys
) -> None:
    before = torch.get_num_threads()
    shown = []
    for requested, rollouts in (("2", 1), ("1", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", requested)
        # Too small a model for several threads, which would wait for each other beside other tests.
        with trainer_of(tmp_path, f"num_rollouts={rollouts}", recipe="embodied/pendulum_sac") as trainer:
            assert torch.get_num_threads() == 2
            trainer.train()
        assert torch.get_num_threads() == before
        printed = capsys.readouterr().err
        assert printed.count("resumed from checkpoint-000001 (step 1)\n") == rollouts - 1
        shown += [line for line in printed.splitlines() if line.startswith("threads ")]
    because = "recorded in checkpoint-000001; OMP_NUM_THREADS=1 is ignored, since it would change the bits of the run"
    assert [line.split(maxsplit=1)[1] for line in shown] == [
        "2 per process (OMP_NUM_THREADS)",
        f"2 per process ({because})",
    ]
    assert json.loads((tmp_path / "run.json").read_text())["threads"] == {"per_process": 2, "why": because}


def test_a_run_without_steps_left_says_so_and_how_to_train_on(tmp_path, capsys) -> None:
    for times in (0, 1):
        with trainer_of(tmp_path, "num_rollouts=1") as trainer:
            trainer.train()
        printed = capsys.readouterr().err
        assert printed.count("nothing is left to train; set a larger num_rollouts to train on") == times
        assert ": 1 step\n" in printed


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(finished, tmp_path) -> None:
    run(tmp_path, "save_interval=1")
    weights = tmp_path / "checkpoints/checkpoint-000002/policy/weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    run(tmp_path, "save_interval=1")
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert weights_of(tmp_path, 2) == weights_of(finished, 2)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_silently_restarted(tmp_path) -> None:
    run(tmp_path)
    for name in ("checkpoint-000002", "checkpoint-final"):
        (tmp_path / "checkpoints" / name / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is valid .*trainer.json"):
        run(tmp_path)


def test_a_completed_run_names_its_last_checkpoint_and_continues_when_more_steps_are_asked(finished, tmp_path) -> None:
    run(tmp_path, "num_rollouts=1", "save_interval=1")
    assert checkpoints_of(tmp_path) == ["checkpoint-000001", "checkpoint-final"]
    run(tmp_path, "save_interval=1")
    assert checkpoints_of(tmp_path) == ["checkpoint-000001", "checkpoint-000002", "checkpoint-final"]
    assert open_checkpoint(tmp_path / "checkpoints/checkpoint-final").step == 2
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert weights_of(tmp_path, 2) == weights_of(finished, 2)


def test_a_completed_run_is_resumed_by_the_name_of_its_final_checkpoint(finished, tmp_path) -> None:
    run(tmp_path, "num_rollouts=1")
    run(tmp_path, f"resume={tmp_path / 'checkpoints/checkpoint-final'}")
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert weights_of(tmp_path, 2) == weights_of(finished, 2)


def test_a_stopped_run_has_no_final_checkpoint(tmp_path) -> None:
    with trainer_of(tmp_path) as trainer:
        trainer.request_stop(signal.SIGTERM)
        with pytest.raises(Preempted):
            trainer.train()
    assert checkpoints_of(tmp_path) == ["checkpoint-000001"]


def test_a_run_that_dies_while_it_names_the_final_checkpoint_names_it_when_it_is_started_again(
    finished, tmp_path, monkeypatch
) -> None:
    class Killed(BaseException):
        """The process is gone."""

    def die(source: Path, target: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "link", die)
        run(tmp_path)
    assert checkpoints_of(tmp_path) == ["checkpoint-000002"]
    run(tmp_path)
    assert checkpoints_of(tmp_path) == ["checkpoint-000002", "checkpoint-final"]
    assert metrics_of(tmp_path) == metrics_of(finished)


def test_starting_anew_over_a_run_is_refused(finished) -> None:
    with pytest.raises(ConfigError, match=r"resume=none, but .* holds checkpoint-000002"):
        run(finished, "resume=none")


def test_continuing_with_another_recipe_is_refused_and_names_the_key(finished) -> None:
    with pytest.raises(CheckpointError, match=r"algorithm.clip_range: 0.0001 -> 0.01.*resume=.*run.dir="):
        run(finished, "algorithm.clip_range=0.01", "num_rollouts=3")


def test_a_branch_from_another_runs_checkpoint_may_change_the_recipe(finished, tmp_path) -> None:
    branch = run(tmp_path, "algorithm.clip_range=0.01", f"resume={finished / 'checkpoints/checkpoint-000001'}")
    assert branch.state.step == 2 and [row["step"] for row in metrics_of(tmp_path)] == [2]


@pytest.mark.parametrize("change", ["backend.lora_cfg.rank=8", "backend.lora_cfg=null"])
def test_a_branch_with_other_trained_weights_is_refused_before_a_model_is_loaded(
    change, finished, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("unirl.trainer.assemble.place_trainside", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(CheckpointError, match=r"trained weights are 'rank=4, .*' *, this recipe's are") as error:
        run(tmp_path, change, f"resume={finished / 'checkpoints/checkpoint-000001'}")
    assert error.value.code == 7002


def test_only_keys_that_change_results_count_as_changed() -> None:
    before = {"num_rollouts": 2, "rollout": {"forward_batch_size": 8}, "batch_size": 4, "run": {"dir": "a"}}
    after = {"num_rollouts": 9, "rollout": {"forward_batch_size": 1}, "batch_size": 8, "run": {"dir": "b"}}
    assert changed_keys(before, after) == ["batch_size: 4 -> 8"]


def test_a_block_that_came_or_went_is_named_by_its_keys():
    assert changed_keys({"sync": {}, "a": 1}, {"sync": {"wait": True}, "a": None}) == [
        "a: 1 -> null",
        "sync.wait: absent -> true",
    ]
    assert changed_keys({"sync": {"wait": True}}, {"sync": None}) == ["sync.wait: true -> absent"]
    assert changed_keys({"weights": {}, "a": 1}, {"a": 1}) == ["weights: an empty block -> absent"]


def test_a_reward_that_is_not_finite_stops_the_run_and_loses_nothing(tmp_path, monkeypatch) -> None:
    run(tmp_path, "num_rollouts=1")
    from unirl.reward.local.pickscore import PickScoreRewardScorer

    score = PickScoreRewardScorer.score

    def poisoned(self, request):
        answer = score(self, request)
        answer.total[1] = float("nan")
        answer.components["pickscore"][1] = float("nan")
        return answer

    monkeypatch.setattr(PickScoreRewardScorer, "score", poisoned)
    with pytest.raises(RewardError, match=r"PickScoreRewardScorer.*nan.*:1'"):
        run(tmp_path, "num_rollouts=2")
    assert [row["step"] for row in metrics_of(tmp_path)] == [1]
    assert (tmp_path / "checkpoints" / "LATEST").read_text().strip() == "checkpoint-000001"
    assert json.loads((tmp_path / "run.json").read_text())["exit"]["code"] == RewardError.exit_status


def test_kept_samples_are_spread_over_the_groups() -> None:
    groups = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    assert spread_rows(groups, 6) == [0, 1, 4, 5, 8, 9]
    assert spread_rows(groups, 2) == [0, 4]
    assert spread_rows(groups, 99) == list(range(12))


def test_going_back_to_an_earlier_checkpoint_of_a_run_forgets_its_later_ones(finished, tmp_path) -> None:
    run(tmp_path, "save_interval=1")
    first = tmp_path / "checkpoints/checkpoint-000001"
    with trainer_of(tmp_path, f"resume={first}") as trainer:
        trainer.state.restore()
        assert trainer.state.step == 1
    assert checkpoints_of(tmp_path) == ["checkpoint-000001"]
    run(tmp_path, "save_interval=1")
    assert weights_of(tmp_path, 2) == weights_of(finished, 2)


def test_a_disk_too_small_for_the_checkpoints_is_refused_before_the_first_step(tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("unirl.plan.preflight.shutil.disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"checkpoints needs .* Free some, set run.dir"), trainer_of(tmp_path):
        pass


def test_the_size_of_a_checkpoint_is_known_before_it_is_written(finished) -> None:
    with trainer_of(finished) as trainer:
        expected = trainer.policy.roles.backend.checkpoint_bytes()
    written = sum(p.stat().st_size for p in (finished / "checkpoints/checkpoint-000002/policy").iterdir())
    assert expected <= written <= 1.5 * expected


def test_a_refused_continuation_leaves_the_runs_own_recipe_in_place(finished) -> None:
    resolved = finished / "config/resolved.yaml"
    before = resolved.read_text()
    with pytest.raises(CheckpointError, match="clip_range"):
        run(finished, "algorithm.clip_range=0.01", "num_rollouts=3")
    assert resolved.read_text() == before


def test_a_bad_data_line_is_refused_before_a_run_directory_is_made(tmp_path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    with (
        pytest.raises(DataError, match=r"bad.jsonl:2: the entry has no key 'prompt'"),
        trainer_of(tmp_path / "run", f"data_source.data_path={tmp_path / 'bad.jsonl'}"),
    ):
        pass
    assert not (tmp_path / "run").exists()
