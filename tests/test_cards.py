"""The cards of recipes are files that scripts/toy_cards.py wrote, and they name what is wrong with a run."""

import json

import pytest

from scripts.toy_cards import render, toy_card, trained_card
from unirl.config.recipe_files import CARD_SUFFIX, Card, list_recipes

RECIPES = list_recipes()


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])
def test_a_card_is_exactly_what_the_script_writes(recipe):
    assert recipe.path.with_suffix(CARD_SUFFIX).read_text() == render(recipe.card), "run scripts/toy_cards.py"


@pytest.fixture
def finished_run(tmp_path):
    """The files of a finished run that a card is made of."""
    for step, reward in ((0, 0.25), (2, 0.75)):
        folder = tmp_path / "eval" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "scores.json").write_text(json.dumps({"metrics": {"eval/reward_mean": reward}}))
    rows = [
        {"train/skipped_updates": 0.0, "rollout/reward_mean": 0.5, "rollout/reward_std": 0.1, "train/grad_norm": 0.25},
        {"train/skipped_updates": 2.0, "rollout/reward_mean": 0.625, "rollout/reward_std": 0.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint = tmp_path / "checkpoints" / "checkpoint-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text('{"versions": {"": 4}}')
    (checkpoint / "MANIFEST.json").write_text("{}")
    (tmp_path / "checkpoints" / "LATEST").write_text("checkpoint-000002\n")
    (tmp_path / "run.json").write_text('{"seed": 7}')
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "resolved.yaml").write_text(
        "reward: {base_url: toy}\nrollout: {_target_: unirl.rollout.engine.replica.engine.ReplicaRolloutEngine}\n"
    )
    return tmp_path


def test_the_card_of_a_toy_run_has_the_numbers_of_its_files(finished_run):
    card = toy_card("pe/pe_sglang_lora_pickscore", finished_run)
    assert (card.updates, card.skipped_updates) == ("4", "2")
    assert (card.gradient_norm, card.reward, card.ratio) == ("0.25, none", "0.500, 0.625", "none")
    assert "a local server stands in for reward.base_url" in card.result
    assert "the replica engine stands in for SGLang, also at full size" in card.result
    assert "SGLang" not in toy_card("diffusion/sd3_replica_lora_colocate", finished_run).result
    assert "2 evaluations, 0 pages of samples, 1 checkpoint." in card.result


def test_the_card_of_a_trained_recipe_has_the_held_out_rewards_of_each_seed(finished_run):
    assert trained_card([finished_run]).reward == "0.250 -> 0.750 (seed 7)"


def test_a_card_names_what_is_wrong_with_its_run():
    assert Card(status="toy", skipped_updates="0", gradient_norm="0.1, 0", reward_std="0.000, 0.1").remarks == ()
    two = "ar 0.1, 0.2; diffusion 0, 0"
    assert Card(status="toy", gradient_norm=two).remarks == ("gradient norm 0",)
    assert Card(status="toy", gradient_norm=two.replace("diffusion 0,", "diffusion 0.3,")).remarks == ()
    dead = Card(status="toy", skipped_updates="3", gradient_norm="0, 0", reward_std="0.000, 0.000")
    assert dead.remarks == ("gradient norm 0", "constant rewards", "3 skipped updates")
