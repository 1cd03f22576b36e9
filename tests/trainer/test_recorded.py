"""Preference pairs of a data set in the loop: what is trained, from where, what it learns, and that it resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.run_files import metrics_of
from unirl.config.errors import ConfigError, DataError
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.rollout.engine.recorded.engine import read_images
from unirl.sde.guidance import Guidance
from unirl.trainer.assemble import build_trainer
from unirl.trainer.loop import Trainer
from unirl.types.protocols import TrainingProgress
from unirl.types.results import TrainStepResult
from unirl.types.rollout_resp import RolloutTrack

RECIPE = "diffusion/sd3_dpo_offline"
COMMON = (
    "scale=toy",
    "evaluation.eval_steps=0",
    "tracking.sample_steps=0",
    "batch_size=9",
    "stack.micro_batch_size=18",
    "backend.optimizer_cfg.learning_rate=2e-3",
    "backend.scheduler_cfg.warmup_updates=0",
)
DPO = ("algorithm.beta=100",)
RWR = ("algorithm._target_=unirl.algorithms.diffusion_rwr.DiffusionRWR", "algorithm.weighting=reward")


def trainer_of(folder: Path, *overrides: str, loss: tuple[str, ...] = DPO) -> AbstractContextManager[Trainer]:
    loaded = load(RECIPE, [*COMMON, *loss, f"run.dir={folder}", *overrides])
    preflight(loaded)
    return build_trainer(loaded)


def run(folder: Path, *overrides: str, **loss: tuple[str, ...]) -> Trainer:
    with trainer_of(folder, *overrides, **loss) as trainer:
        trainer.train()
    return trainer


def write_pairs(folder: Path, count: int, side: int = 32) -> Path:
    """Pairs of flat images: the chosen ones are dark, the rejected ones bright."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        refs = []
        for role, level in (("chosen", 10 + i), ("rejected", 250 - i)):
            Image.fromarray(np.full((side, side, 3), level, dtype=np.uint8)).save(folder / f"{role}{i}.png")
            refs.append({"modality": "image", "role": role, "uri": f"{role}{i}.png"})
        lines.append(json.dumps({"prompt": f"prompt {i}", "media_refs": refs}) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines))
    return folder / "pairs.jsonl"


def watched(trainer: Trainer) -> list[tuple[RolloutTrack, torch.Tensor]]:
    """The tracks that the stack is given as the trainer trains, and their images."""
    trained: list[tuple[RolloutTrack, torch.Tensor]] = []
    learn = trainer.policy.roles.stack.train_track

    def watch(track: RolloutTrack, now: TrainingProgress, shown: Collection[str]) -> TrainStepResult:
        trained.append((track, trainer.rollout.preview(track.decoded).pixels))
        return learn(track, now, shown)

    trainer.policy.roles.stack.methods["train_track"] = watch
    return trained


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, "num_rollouts=10", "save_interval=5")
    return folder


def test_the_first_loss_is_log_two_and_no_pair_is_told_apart(finished: Path) -> None:
    first = metrics_of(finished)[0]
    assert first["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["train/preference_margin"] == 0.0 and first["train/preference_accuracy"] == 0.0


def test_pairs_are_learned(finished: Path) -> None:
    """The margin is how much likelier than the reference the chosen image became against the rejected one."""
    rows = metrics_of(finished)
    margins = [row["train/preference_margin"] for row in rows]
    assert np.mean(margins[-3:]) > 0.8 and np.mean(margins[-3:]) > 2 * np.mean(margins[1:4]) > 0
    assert np.mean([row["train/preference_accuracy"] for row in rows[-3:]]) > 0.85
    assert np.mean([row["train/loss"] for row in rows[-3:]]) < 0.65 * math.log(2)


def test_every_step_accounts_for_every_image_and_its_reward_is_what_was_recorded(finished: Path) -> None:
    for row in metrics_of(finished):
        assert (row["rollout/reward_mean"], row["rollout/reward_std"]) == (0.5, 0.5)
        assert row["reward/preference_mean"] == 0.5 and row["rollout/zero_std_group_ratio"] == 0.0
    ledger = [json.loads(line) for line in (finished / "ledger.jsonl").read_text().splitlines()]
    assert {(row["generated"], row["scored"], row["dropped"]) for row in ledger} == {(18, 18, 0)}


@pytest.mark.slow
def test_a_run_that_stops_resumes_exactly(finished: Path, tmp_path: Path) -> None:
    # Steps of 9 draws out of 18 pairs: it stops in the middle of an epoch.
    run(tmp_path, "num_rollouts=3", "save_interval=5")
    run(tmp_path, "num_rollouts=10", "save_interval=5")
    assert metrics_of(tmp_path) == metrics_of(finished)
    for name in ("weights", "optimizer", "snapshots"):
        file = f"checkpoints/checkpoint-000010/policy/{name}.safetensors"
        assert (tmp_path / file).read_bytes() == (finished / file).read_bytes()


def first_pairs(folder: Path, *overrides: str) -> tuple[RolloutTrack, torch.Tensor]:
    """What a run's first step trains on three pairs of a dark image, which was chosen, and a bright one."""
    data = f"data_source.data_path={write_pairs(folder / 'data', 3)}"
    with trainer_of(folder / "run", data, "batch_size=3", "num_rollouts=1", *overrides) as trainer:
        trained = watched(trainer)
        trainer.train()
    (result,) = trained
    return result


@pytest.mark.parametrize("roles", ["[chosen,rejected]", "[rejected,chosen]"])
def test_the_chosen_image_is_the_winner_whatever_the_order_of_the_roles(roles: str, tmp_path: Path) -> None:
    track, pixels = first_pairs(tmp_path, f"data_source.recorded={roles}")
    assert (pixels[0::2] < 20).all() and (pixels[1::2] > 240).all()
    assert track.group_ids[0::2] == track.group_ids[1::2] and track.rewards.tolist() == [1.0, 0.0] * 3


def test_another_reward_of_the_same_images_makes_its_own_pairs(tmp_path: Path) -> None:
    bright = "reward.backend._target_=unirl.reward.local.image_statistics.BrightnessRewardScorer"
    track, pixels = first_pairs(tmp_path, bright)
    assert (pixels[0::2] > 240).all() and (pixels[1::2] < 20).all()
    assert (track.rewards[0::2] > track.rewards[1::2]).all()


def errors_of(trainer: Trainer, weights: str) -> torch.Tensor:
    """[P, N] mean squared velocity errors of the images of all prompts, straight from the files.

    Pictures of a prompt share noise and levels, which are not those of any training step.
    """
    group = trainer.policy.roles.stack.train_track.group
    pipeline, backend = group.role_here("pipeline"), group.role_here("backend")
    prompts = trainer.data.prompts
    refs = [ref for prompt in prompts for ref in prompt.recorded]
    texts = [prompt.text for prompt in prompts for _ in prompt.recorded]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad(), backend.weights(weights):
        x0 = pipeline.latents_of(read_images(refs, 32, 32))
        conditions = pipeline.encode(texts, trainer.requests.tracks["image"].training)
        total = torch.zeros(len(refs))
        for level in (0.3, 0.5, 0.7):
            noise = torch.randn(len(prompts), *x0.shape[1:], generator=generator)
            eps = noise.repeat_interleave(len(refs) // len(prompts), 0)
            sigma = torch.full((len(refs),), level)
            v = pipeline.stage.velocity((1 - level) * x0 + level * eps, sigma, conditions, Guidance())
            total += (v - (eps - x0)).square().flatten(1).mean(1) / 3
    return total.view(len(prompts), -1)


def test_the_policy_moves_from_the_rejected_to_the_chosen_images(finished: Path) -> None:
    with trainer_of(finished, "num_rollouts=10") as trainer:
        trainer.state.restore()
        gained = errors_of(trainer, "reference") - errors_of(trainer, "live")
    preferred = gained[:, 0] - gained[:, 1]
    assert (preferred > 0).double().mean() > 0.8 and preferred.mean() > 0.003


def test_fine_tuning_on_the_chosen_needs_nothing_new(tmp_path: Path) -> None:
    data = f"data_source.data_path={write_pairs(tmp_path / 'data', 4)}"
    size = ("batch_size=4", "stack.micro_batch_size=4", "num_rollouts=10", "tracking.sample_steps=5")
    alone = ("data_source.recorded=[chosen]", "sampling.samples_per_prompt=1")
    with trainer_of(tmp_path / "run", data, *size, *alone, loss=RWR) as trainer:
        before = errors_of(trainer, "live").mean()
        trainer.train()
        assert errors_of(trainer, "live").mean() < 0.9 * before
    assert {row["train/sample_weight"] for row in metrics_of(tmp_path / "run")} == {1.0}
    assert len(list(tmp_path.glob("run/samples/step-*/contact_sheet.png"))) == 2


@pytest.mark.slow
def test_evaluation_draws_from_the_trained_weights_and_leaves_training_alone(tmp_path: Path) -> None:
    steps = ("num_rollouts=2", "evaluation.eval_steps=1")
    run(tmp_path / "quiet", "num_rollouts=2")
    with trainer_of(tmp_path / "judged", *steps) as trainer:
        trainer.train()
        first, second = trainer.evaluate(), trainer.evaluate()
    assert torch.equal(first.media.pixels, second.media.pixels) and "pickscore" in first.components
    assert metrics_of(tmp_path / "judged") == metrics_of(tmp_path / "quiet")
    result = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("judged/eval/step-*/scores.json"))]
    assert len({entry["metrics"]["eval/pickscore_mean"] for entry in result}) == 3


# Errors


def test_an_evaluation_that_nobody_can_score_is_refused_before_the_first_update(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no preference. Set evaluation.eval_steps=0, or set reward"):
        run(tmp_path, "evaluation.eval_steps=1", "reward.backend.drawn=null")
    assert metrics_of(tmp_path) == []


def test_a_line_that_is_no_pair_is_refused_before_a_run_directory_is_made(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "data", 2)
    path.write_text(path.read_text().replace("chosen1.png", "gone.png"))
    with (
        pytest.raises(DataError, match=r"pairs.jsonl:2: the chosen image .*gone\.png is not a file"),
        trainer_of(tmp_path / "run", f"data_source.data_path={path}"),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_an_image_smaller_than_the_size_stops_the_run_by_its_name(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "data", 2, side=16)
    with pytest.raises(DataError, match=r"(chosen|rejected)\d\.png has 16 x 16 pixels.*32 x 32 would enlarge it"):
        run(tmp_path / "run", f"data_source.data_path={path}", "batch_size=2", "num_rollouts=1")
