"""The recipe of Janus-Pro at toy scale: training on guided image tokens, on both engines, stopped and continued."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest

from tests.run_files import metrics_of
from tests.source_tree import ROOT
from unirl.cli.main import main
from unirl.config.errors import ConfigError, Preempted
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.plan.sizes import RunSizes
from unirl.tracking.tables import read_rows
from unirl.trainer.assemble import build_trainer
from unirl.trainer.unified_model import UnifiedModelTrainer
from unirl.types.primitives import ImagePreviews

RECIPE = "unified_model/janus_pro_grpo"
TOY = ("scale=toy", "num_rollouts=2", "backend.optimizer_cfg.learning_rate=1e-2", "sampling.max_prompt_tokens=400")
REPLICA = (
    "rollout._target_=unirl.rollout.engine.replica.engine.ReplicaRolloutEngine",
    "sync._target_=unirl.distributed.weight_sync.sync.EngineSync",
)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def checked(*overrides: str):
    result = load(RECIPE, overrides)
    preflight(result)
    return result


def trainer_of(folder: Path, *overrides: str):
    return build_trainer(checked(*TOY, f"run.dir={folder}", *overrides))


def run(folder: Path, *overrides: str) -> None:
    with trainer_of(folder, *overrides) as trainer:
        assert isinstance(trainer, UnifiedModelTrainer)
        trainer.train()


def weights_of(folder: Path) -> bytes:
    return (folder / "checkpoints/checkpoint-000002/policy/weights.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        run(folder, "save_interval=1", "tracking.sample_steps=1")
    return folder


def test_the_first_update_has_ratio_exactly_one_and_parity_exactly_zero(finished) -> None:
    for row in metrics_of(finished):
        assert row["train/ratio_mean"] == row["train/ratio_min"] == row["train/ratio_max"] == 1.0
        assert row["rollout/parity_absdiff_max"] == 0.0 and row["train/grad_norm"] > 0
        assert row["samples/tokens"] == 8 * 16 and "rollout/response_len_mean" not in row
        assert all(math.isfinite(value) for value in row.values())
    assert metrics_of(finished)[1]["train/kl"] > 0, "the first update moved the policy"


def test_kept_samples_are_images(finished) -> None:
    rows = list(read_rows(finished / "samples/step-000002/manifest.jsonl"))
    assert len(rows) == 8
    assert len(list((finished / "samples/step-000002").glob("*.webp"))) == 8


def test_a_stopped_run_continues_bit_for_bit(finished, tmp_path) -> None:
    with trainer_of(tmp_path) as trainer:
        trainer.request_stop(signal.SIGTERM)
        with pytest.raises(Preempted, match="checkpoint saved"):
            trainer.train()
    run(tmp_path)
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert weights_of(tmp_path) == weights_of(finished)


def test_a_replica_draws_and_learns_the_same(finished, tmp_path) -> None:
    run(tmp_path, *REPLICA)
    assert weights_of(tmp_path) == weights_of(finished)


@pytest.mark.slow
def test_two_workers_draw_the_same_and_learn_the_same_to_rounding(finished, tmp_path, workers) -> None:
    run(tmp_path, "runtime=ray", "num_devices=2")
    for one, two in zip(metrics_of(finished), metrics_of(tmp_path), strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_an_evaluation_has_a_guidance_scale_and_a_temperature_of_its_own(tmp_path) -> None:
    own = ("evaluation.temperature=0", "evaluation.guidance_scale=1", "evaluation.samples_per_prompt=2")
    with trainer_of(tmp_path, *own) as trainer:
        media = trainer.evaluate().media
    assert isinstance(media, ImagePreviews)
    assert media.pixels[::2].equal(media.pixels[1::2]), "greedy siblings are equal"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampling.height=512", "draws images of 384 x 384 pixels alone"),
        ("data_source.sizes=[[512,512]]", "draws images of 384 x 384 pixels alone"),
        ("sampling.max_new_tokens=64", "an image of janus has 576 tokens"),
        ("sampling.guidance_scale=-1", "guidance_scale must be >= 0, got -1"),
        ("sampling.temperature=0", "always decodes the most likely token"),
        ("sampling={_target_: unirl.types.sampling.ARSamplingParams}", "janus samples with ImageTokenSamplingParams"),
        (
            "reward.backend={_target_: unirl.reward.local.exact_match.ExactMatchRewardScorer}",
            "scores text, and JanusProPipeline makes image",
        ),
        ("trainer._target_=unirl.trainer.text.TextTrainer", "TextTrainer is for text, and JanusProPipeline makes"),
        ("evaluation.num_inference_steps=4", "evaluation.num_inference_steps=4: ImageTokenSamplingParams has no such"),
        ("bundle.path=deepseek-ai/Janus-Pro-7B", "bundle.path=deepseek-community/Janus-Pro-7B"),
        ("algorithm={_target_: unirl.algorithms.diffusion_grpo.DiffusionGRPO}", "trains what is sampled by"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_anything_is_loaded(override, said) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(override)


def test_a_plan_counts_both_branches_of_guidance() -> None:
    guided, plain = (RunSizes.of(checked(f"sampling.guidance_scale={scale}").config).sizes for scale in ("5.0", "1.0"))
    assert (guided.network_rows, guided.trained_rows) == (2, 2) and (plain.network_rows, plain.trained_rows) == (1, 1)
    assert guided.vae_parameters == plain.vae_parameters > 0 and guided.num_steps == 576


def test_fit_offers_no_setting_that_the_recipe_does_not_have(capsys) -> None:
    assert main(["fit", RECIPE, "--device", "h100", "--json"]) == 0
    assert "guidance_passes" not in capsys.readouterr().out


# The commands


def test_export_writes_a_model_that_draws_the_same_tokens_elsewhere(finished, tmp_path, capsys) -> None:
    assert main(["export", str(finished), "--out", str(tmp_path)]) == 0
    assert "max difference" in capsys.readouterr().out
    assert list((tmp_path / "full").glob("*.safetensors"))


def test_sample_draws_images_of_a_prompt(finished, tmp_path) -> None:
    assert main(["sample", str(finished), "-p", "a red circle", "--count", "2", "--out", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.webp")) + list(tmp_path.glob("*.png"))) >= 2


def test_eval_of_a_checkpoint_gives_the_scores_of_its_run(finished, tmp_path, capsys) -> None:
    assert main(["eval", str(finished), "--json", "--out", str(tmp_path)]) == 0
    scores = json.loads((finished / "eval/step-000002/scores.json").read_text())["metrics"]
    assert json.loads(capsys.readouterr().out).items() >= scores.items()
