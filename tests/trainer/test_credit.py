"""Credit in the loop: schedules see the run's progress, histories survive a stop, unselected rows stay scored."""

from __future__ import annotations

import json
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.run_files import metrics_of
from tests.source_tree import ROOT
from unirl.algorithms.shared.advantages import GroupAdvantage
from unirl.algorithms.shared.groups import Selection
from unirl.config.errors import Preempted
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.tracking.run_directory import RunDirectory, RunIdentity
from unirl.tracking.tracker import Tracker
from unirl.trainer.assemble import build_trainer
from unirl.trainer.loop import Trainer
from unirl.trainer.monitoring import Monitor
from unirl.types.primitives import Texts
from unirl.types.rollout_resp import AdvantageResult, RolloutResp, RolloutTrack, Scores

COMMON = (
    "scale=toy",
    "num_rollouts=3",
    "tracking.sample_steps=0",
    "evaluation.eval_steps=0",
    "reward.backend={_target_: unirl.reward.local.image_statistics.BrightnessRewardScorer}",
)
RUNNING = ("advantage={_target_: unirl.algorithms.shared.advantages.RunningAdvantage, buffer_size: 8, min_count: 5}",)


def trainer_of(folder: Path, *overrides: str) -> AbstractContextManager[Trainer]:
    """The quickstart at toy scale on two prompts, which every step draws again."""
    data = folder.parent / "two.jsonl"
    data.write_text("".join((ROOT / "datasets/shapes/train.jsonl").read_text().splitlines(keepends=True)[:2]))
    recipe = load("diffusion/quickstart", [*COMMON, f"run.dir={folder}", f"data_source.data_path={data}", *overrides])
    preflight(recipe)
    return build_trainer(recipe)


def run(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of every step that are the same in every run."""
    with trainer_of(folder, *overrides) as trainer:
        trainer.train()
    return metrics_of(folder)


def weights_of(folder: Path) -> bytes:
    return (folder / "checkpoints/checkpoint-000003/policy/weights.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_that_remembers_rewards_resumes_exactly(tmp_path) -> None:
    unbroken = run(tmp_path / "unbroken", *RUNNING)
    assert [row["rollout/own_history_ratio"] for row in unbroken] == [0.0, 1.0, 1.0]
    assert all(row["rollout/adv_abs_mean"] > 0 for row in unbroken)
    with trainer_of(tmp_path / "stopped", *RUNNING) as trainer:
        trainer.request_stop(signal.SIGTERM)
        with pytest.raises(Preempted):
            trainer.train()
    assert run(tmp_path / "stopped", *RUNNING) == unbroken
    assert weights_of(tmp_path / "stopped") == weights_of(tmp_path / "unbroken")


def test_rows_that_are_not_selected_are_scored_and_change_no_statistic_but_the_update(tmp_path) -> None:
    plain = run(tmp_path / "plain")
    chosen = run(tmp_path / "chosen", "advantage.select.keep=2")
    assert [row["rollout/selected_ratio"] for row in chosen] == [0.5, 0.5, 0.5]
    assert [(row["samples/scored"], row["samples/dropped"]) for row in chosen] == [(8, 0)] * 3
    first = {k: v for k, v in plain[0].items() if k.startswith(("rollout/", "reward/", "samples/"))}
    assert {name: chosen[0][name] for name in first} == first
    assert weights_of(tmp_path / "chosen") != weights_of(tmp_path / "plain")


def test_a_step_without_a_selected_row_makes_no_update(tmp_path) -> None:
    with trainer_of(tmp_path / "run", "advantage.select.mean_range=[5e8, 6e8]", "num_rollouts=1") as trainer:
        before = dict(trainer.policy.roles.backend.gather())
        trainer.train()
        row = json.loads((tmp_path / "run/metrics.jsonl").read_text())
        assert row["rollout/filtered_group_ratio"] == 1.0 and row["train/skipped_updates"] == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.policy.roles.backend.gather().items())


# On a tree of tracks


class Credit(Trainer):
    """The loop's credit alone."""

    track = "image"
    credit_rule = "mean"

    def __init__(self, tracker: Tracker, advantage, num_rollouts: int = 5) -> None:
        self.config = SimpleNamespace(num_rollouts=num_rollouts)
        self.monitor = Monitor(tracker, self.config, self.track, has_several=True, learns_from_advantages=True)
        self.advantage = advantage


def track(ids: list[str], groups: list[str], **fields) -> RolloutTrack:
    return RolloutTrack(
        sample_ids=ids,
        group_ids=groups,
        conditions={},
        segment=Texts(texts=ids),
        weight=torch.ones(len(ids)),
        weight_version=torch.zeros(len(ids), dtype=torch.int64),
        **fields,
    )


def tree(scored: str, rewards: list[float]) -> RolloutResp:
    """Two rewrites of one prompt, two images of each; the child comes first."""
    text = track(["p@0:0", "p@0:1"], ["p@0"] * 2)
    parents = ["p@0:0", "p@0:1", "p@0:0", "p@0:1"]
    image = track([f"{parent}/image{i // 2}" for i, parent in enumerate(parents)], parents)
    tracks = {"image": image.replace(parent_track="text", parent_ids=parents), "text": text}
    given = torch.tensor(rewards)
    tracks[scored] = tracks[scored].replace(rewards=given, component_rewards={"hps": given})
    return RolloutResp(tracks)


@pytest.fixture
def tracker(tmp_path):
    run = RunDirectory(tmp_path, RunIdentity(project="demo", recipe="pe"))
    with Tracker(run, tracks=("text", "image")) as tracker:
        yield tracker


def test_rewards_of_images_credit_their_rewrites_too(tracker) -> None:
    """Image z-scores within a rewrite are +-1; rewrites have means 2 and 6, so theirs are -1 and 1."""
    resp = Credit(tracker, GroupAdvantage(eps=1e-12)).credit(0, tree("image", [1.0, 8.0, 3.0, 4.0]))
    assert resp.tracks["image"].advantages.tolist() == pytest.approx([-1.0, 1.0, 1.0, -1.0])
    assert resp.tracks["text"].advantages.tolist() == pytest.approx([-1.0, 1.0])
    metrics = tracker.log_step(1)
    assert metrics["text/rollout/reward_mean"] == metrics["image/rollout/reward_mean"] == 4.0
    assert (metrics["text/rollout/reward_std"], metrics["image/rollout/reward_max"]) == (2.0, 8.0)
    assert metrics["text/reward/hps_mean"] == 4.0


def test_images_without_rewards_inherit_from_their_rewrites(tracker) -> None:
    resp = Credit(tracker, GroupAdvantage(std="none")).credit(0, tree("text", [1.0, 4.0]))
    assert resp.tracks["text"].advantages.tolist() == [-1.5, 1.5]
    assert resp.tracks["image"].advantages.tolist() == [-1.5, 1.5, -1.5, 1.5]
    assert not any(name.startswith("image/") for name in tracker.log_step(1))


def test_images_of_a_rewrite_that_is_left_out_are_not_trained(tracker) -> None:
    resp = tree("text", [1.0, 4.0])
    apart = resp.with_track("text", resp.tracks["text"].replace(group_ids=["p@0", "q@0"]))
    estimator = GroupAdvantage(std="none", scope="global", select=Selection(mean_range=(2.0, 9.0)))
    credited = Credit(tracker, estimator).credit(0, apart)
    assert credited.tracks["text"].weight.tolist() == [0.0, 1.0]
    assert credited.tracks["image"].weight.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert credited.tracks["image"].advantages.tolist() == [0.0, 1.5, 0.0, 1.5]


def test_the_estimator_learns_the_track_and_how_far_the_run_is(tracker) -> None:
    seen: list[tuple[str, float]] = []

    def estimator(scores: Scores) -> AdvantageResult:
        seen.append((scores.track, scores.progress))
        return AdvantageResult(advantages=scores.total, weight=scores.weight, metrics={})

    for step in (0, 1, 4):
        Credit(tracker, estimator, num_rollouts=5).credit(step, tree("image", [1.0, 8.0, 3.0, 4.0]))
    assert seen == [(name, progress) for progress in (0.0, 0.25, 1.0) for name in ("text", "image")]
