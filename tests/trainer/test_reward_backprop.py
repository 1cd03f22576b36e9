"""The loop with a loss on the reward's gradient: wired from the recipe alone, it raises the reward that people see."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from unirl.config.load import load
from unirl.models.denoising.differentiable import DifferentiableStage
from unirl.plan.preflight import preflight
from unirl.sde.kernels import EulerODE
from unirl.trainer.assemble import build_trainer
from unirl.trainer.loop import Trainer
from unirl.types.sampling import DiffusionSamplingParams

BRIGHT = (
    "bundle.path=quickstart",
    "reward.backend._target_=unirl.reward.local.image_statistics.BrightnessRewardScorer",
    "sampling.height=24",
    "sampling.width=24",
    "sampling.samples_per_prompt=2",
    "stack.micro_batch_size=4",
    "backend.optimizer_cfg.learning_rate=3e-3",
)
"""A small trained model that draws in pixels, and a reward with a simple gradient."""


def opened(folder: Path, *overrides: str) -> AbstractContextManager[Trainer]:
    """The trainer of a recipe that learns from the gradient of the reward."""
    quiet = ("scale=toy", "save_interval=0", "tracking.sample_steps=0", "evaluation.eval_steps=0")
    recipe = load("diffusion/sd3_drtune", [*quiet, f"run.dir={folder}", *overrides])
    preflight(recipe)
    return build_trainer(recipe)


def run(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of every step of a whole run."""
    with opened(folder, *overrides) as trainer:
        trainer.train()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_pictures_grow_brighter_by_the_gradient_of_brightness(tmp_path: Path) -> None:
    steps = run(tmp_path, *BRIGHT, "num_rollouts=8")
    rewards = [step["rollout/reward_mean"] for step in steps]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.02
    # The loss draws the rollout's own samples, and scores them before they are rounded to levels.
    assert all(step["train/reward_mean"] == pytest.approx(step["rollout/reward_mean"], abs=1e-3) for step in steps)


def test_the_stage_of_the_loss_joins_the_pipelines_policy_and_decoder_with_the_reward(tmp_path: Path) -> None:
    with opened(tmp_path, "num_rollouts=1", "pipeline.keep_resident=false") as trainer:
        trainer.train()
        group = trainer.policy.roles.stack.methods["train_track"].group
        stack, pipeline, reward = (group.role_here(role) for role in ("stack", "pipeline", "reward"))
    assert isinstance(stack.stage, DifferentiableStage)
    assert stack.stage.stage is pipeline.stage and stack.stage.score == reward.objective
    latents = torch.zeros(
        2, *pipeline.facts.latent_shape(DiffusionSamplingParams(kernel=EulerODE(), height=32, width=32))
    )
    assert torch.equal(stack.stage.decode(latents), pipeline.decoder.decode(latents))


@pytest.mark.parametrize("algorithm", ["ReFL", "DRaFT", "DRaFTLV", "AlignProp"])
def test_every_method_of_the_family_trains_by_the_same_recipe(algorithm: str, tmp_path: Path) -> None:
    target = f"algorithm._target_=unirl.algorithms.drtune.{algorithm}"
    steps = run(tmp_path, "num_rollouts=1", "sampling.samples_per_prompt=1", target)
    assert steps[0]["train/grad_norm"] > 0 and steps[0]["train/skipped_updates"] == 0
