"""The loop of text on a toy Qwen3: the same promises as the loop of pictures, and readable texts at its end."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path

import pytest

from tests.run_files import metrics_of
from tests.source_tree import ROOT
from unirl.cli.main import main
from unirl.config.errors import ConfigError, DataError, Preempted
from unirl.config.load import load
from unirl.models.loading.toy_tokenizers import qwen3_tokenizer
from unirl.plan.preflight import preflight
from unirl.tracking.media import metrics_of_evaluation, read_samples, table_of_evaluation
from unirl.tracking.tables import read_rows
from unirl.trainer.assemble import build_trainer
from unirl.trainer.text import TextTrainer

RECIPE = str(ROOT / "tests/trainer/text_loop.yaml")


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def checked(*overrides: str, recipe: str = RECIPE):
    result = load(recipe, ["plugins=[tests]", *overrides])
    preflight(result)
    return result


def trainer_of(folder: Path, *overrides: str):
    return build_trainer(checked("num_rollouts=2", f"run.dir={folder}", *overrides))


def run(folder: Path, *overrides: str):
    with trainer_of(folder, *overrides) as trainer:
        trainer.train()
    return trainer


def scores_of(folder: Path, step: int) -> dict:
    return json.loads((folder / f"eval/step-{step:06d}/scores.json").read_text())


def weights_of(folder: Path) -> bytes:
    return (folder / "checkpoints/checkpoint-000002/policy/weights.safetensors").read_bytes()


@pytest.fixture
def allowed(monkeypatch):
    """Code of the tests is allowed by the user of a finished run."""
    monkeypatch.setenv("UNIRL_PLUGINS", "tests")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        run(folder, "evaluation.eval_steps=2", "save_interval=1")
    return folder


def test_the_first_update_has_ratio_exactly_one_and_every_number_is_finite(finished) -> None:
    for row in metrics_of(finished):
        assert row["train/ratio_mean"] == row["train/ratio_min"] == row["train/ratio_max"] == 1.0
        assert row["train/clip_fraction"] == row["train/approx_kl"] == 0.0
        assert all(math.isfinite(value) for value in row.values())


def test_replay_agrees_with_sampling_to_the_rounding_of_float32(finished) -> None:
    assert all(0 <= row["rollout/parity_absdiff_max"] < 1e-5 for row in metrics_of(finished))


def test_training_moves_the_policy_off_the_one_that_sampled(finished) -> None:
    assert all(row["train/grad_norm"] > 0 for row in metrics_of(finished))
    assert scores_of(finished, 0)["samples"] != scores_of(finished, 2)["samples"]


def test_every_step_accounts_for_every_sample_and_token(finished) -> None:
    ledger = [json.loads(line) for line in (finished / "ledger.jsonl").read_text().splitlines()]
    assert [(row["generated"], row["scored"], row["dropped"], row["pending"]) for row in ledger] == [(16, 16, 0, 0)] * 2
    for row in metrics_of(finished):
        assert row["samples/tokens"] == pytest.approx(16 * row["rollout/response_len_mean"])
        assert 1 <= row["rollout/response_len_min"] <= row["rollout/response_len_max"] <= 12
        assert 0 <= row["rollout/truncated_fraction"] <= 1
    timed = json.loads((finished / "metrics.jsonl").read_text().splitlines()[0])
    assert timed["throughput/tokens_per_s"] == pytest.approx(timed["samples/tokens"] / timed["time/step"])


def test_kept_samples_are_the_step_s_texts_with_their_facts(finished) -> None:
    folder = finished / "samples/step-000002"
    rows = list(read_rows(folder / "manifest.jsonl"))
    table = read_samples(rows, folder)
    specials = "|".join(map(re.escape, qwen3_tokenizer().all_special_tokens))
    assert len(rows) == 16 and {row.track for row in table.rows} == {"text"}
    for row, text in zip(table.rows, table.media.texts, strict=True):
        even = sum(ord(letter) % 2 == 0 for letter in text) / max(len(text), 1)
        assert row.reward == pytest.approx(even, abs=1e-6)
        assert row.facts["finished"] or row.facts["tokens"] == 12
        assert re.sub(specials, "", "".join(row.pieces)) == text
        assert len(row.pieces) == row.facts["tokens"] == len(row.series["logp"]) and row.context == ()
    page = (folder / "samples.md").read_text()
    assert all(f"`{row.sample_id}`" in page for row in table.rows)


def test_right_answers_of_an_evaluation_are_counted_as_by_hand(finished) -> None:
    scores = scores_of(finished, 2)
    right: dict[str, list[bool]] = {}
    for row in scores["samples"]:
        right.setdefault(row["group_id"], []).append(row["facts"]["right"])
    share = sum(map(sum, right.values())) / 12
    assert scores["metrics"]["eval/avg@4"] == scores["metrics"]["eval/pass@1"] == pytest.approx(share)
    assert scores["metrics"]["eval/pass@4"] == pytest.approx(sum(map(any, right.values())) / 3)
    assert {"eval/pass@2", "eval/maj@4"} <= scores["metrics"].keys()
    assert "eval/pass@4" in (finished / "eval_metrics.csv").read_text().splitlines()[0]
    assert "### After (step 2), sample 4" in (finished / "eval/step-000002/before_after.md").read_text()


def test_an_evaluation_repeats_at_equal_weights_and_training_does_not_see_it(finished, tmp_path) -> None:
    with trainer_of(tmp_path) as trainer:
        first, second = trainer.evaluate(), trainer.evaluate()
        assert first.track == "text" and {row.track for row in table_of_evaluation(first).rows} == {"text"}
        assert first.media.texts == second.media.texts and first.rewards.equal(second.rewards)
        assert metrics_of_evaluation(first) == scores_of(finished, 0)["metrics"]
        trainer.train()
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert weights_of(tmp_path) == weights_of(finished)


def test_a_stopped_run_continues_bit_for_bit(finished, tmp_path) -> None:
    with trainer_of(tmp_path) as trainer:
        trainer.request_stop(signal.SIGTERM)
        with pytest.raises(Preempted, match="checkpoint saved"):
            trainer.train()
    run(tmp_path)
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert weights_of(tmp_path) == weights_of(finished)


def test_evaluation_samples_by_its_own_settings(tmp_path) -> None:
    own = ("evaluation.temperature=0", "evaluation.max_new_tokens=3", "evaluation.samples_per_prompt=2")
    with trainer_of(tmp_path, *own) as trainer:
        assert isinstance(trainer, TextTrainer)
        texts = trainer.evaluate()
    assert texts.media.texts[::2] == texts.media.texts[1::2], "greedy siblings are equal"
    assert all(fact["tokens"] <= 3 for fact in texts.facts)
    assert set(texts.metrics()) >= {"eval/avg@2", "eval/pass@2"} and "eval/pass@4" not in texts.metrics()


def test_prompts_about_pictures_are_refused_before_the_first_step_by_a_model_that_does_not_see(tmp_path) -> None:
    with (
        pytest.raises(DataError, match=r"has 1 image of role .condition., and qwen3 is conditioned on text"),
        trainer_of(tmp_path, "data_source.data_path=datasets/shapes_qa/train_choices.jsonl"),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        (RECIPE, ("evaluation.eval_steps=1", "evaluation.guidance_scale=2"), "guidance_scale"),
        (RECIPE, ("evaluation.eval_steps=1", "evaluation.num_inference_steps=4"), "num_inference_steps"),
        (RECIPE, ("sampling.temperature=0",), r"temperature=0"),
        (
            "diffusion/sd3_trainside",
            ("scale=toy", "evaluation.eval_steps=1", "evaluation.temperature=0"),
            "temperature",
        ),
        ("diffusion/sd3_trainside", ("scale=toy", "evaluation.eval_steps=1", "evaluation.top_k=5"), "top_k"),
    ],
)
def test_settings_of_another_domain_are_refused_by_name(recipe, overrides, said) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(*overrides, recipe=recipe)


@pytest.mark.slow
def test_two_workers_say_the_same_and_learn_the_same_to_rounding(finished, tmp_path, workers) -> None:
    run(tmp_path, "runtime=ray", "num_devices=2", "evaluation.eval_steps=2")
    for step in (0, 2):
        ours, theirs = (
            [(row["sample_id"], row["text"]) for row in scores_of(folder, step)["samples"]]
            for folder in (finished, tmp_path)
        )
        assert ours == theirs
    for one, two in zip(metrics_of(finished), metrics_of(tmp_path), strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5)


# The commands


def test_eval_of_a_checkpoint_gives_the_scores_of_its_run(finished, allowed, tmp_path, capsys) -> None:
    assert main(["eval", str(finished), "--json", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result.items() >= scores_of(finished, 2)["metrics"].items()
    assert (tmp_path / "eval/step-000002/samples.md").is_file()


def test_sample_says_the_responses_and_keeps_them(finished, allowed, tmp_path, capsys) -> None:
    words = ["-p", "What is 1 + 1?", "-p", "# hello", "--count", "2", "--out", str(tmp_path)]
    assert main(["sample", str(finished), *words]) == 0
    rows = [json.loads(line) for line in (tmp_path / "responses.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["What is 1 + 1?"] * 2 + ["# hello"] * 2
    assert [(row["sample"], row["seed"]) for row in rows] == [(0, 42), (1, 42)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["responses.jsonl", "responses.md"]
    shown = capsys.readouterr().out
    assert f"4 texts   {tmp_path / 'responses.md'}" in shown
    assert len(shown.splitlines()) == 5


def test_export_writes_a_model_that_says_the_same_elsewhere(finished, allowed, tmp_path, capsys) -> None:
    assert main(["export", str(finished), "--out", str(tmp_path)]) == 0
    assert "max difference" in capsys.readouterr().out
    assert list((tmp_path / "full").glob("*.safetensors"))


def test_a_format_of_pictures_is_refused_with_those_that_there_are(finished, allowed, tmp_path, capsys) -> None:
    assert main(["export", str(finished), "--format", "diffusers-lora", "--out", str(tmp_path)]) == 2
    assert "choose one of peft, full" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_of_text_are_written_for_peft_and_compared_there(allowed, tmp_path, capsys) -> None:
    run(tmp_path / "run", "num_rollouts=1", "backend.lora_cfg={rank: 4}")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("peft") and "max difference" in shown
    assert (tmp_path / "peft/adapter_model.safetensors").is_file()
