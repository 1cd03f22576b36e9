"""The commands about a recipe and its run, on a toy-scaled SD3: train, stop, continue, eval, sample, export."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.run_files import metrics_of
from tests.source_tree import ROOT
from unirl import train_diffusion, train_vlm
from unirl.cli.main import main
from unirl.trainer.loop import Trainer

RECIPE = "diffusion/sd3_trainside"
TOY = (RECIPE, "scale=toy", "num_rollouts=2", "evaluation.max_prompts=1", "save_interval=1")


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of two steps, in a folder with a blank in its name."""
    before = Path.cwd()
    os.chdir(ROOT)
    folder = tmp_path_factory.mktemp("runs") / "my run"
    assert main(["train", *TOY, "--out", str(folder)]) == 0
    os.chdir(before)
    return folder


def test_a_run_leaves_its_files_and_says_that_it_finished(run_dir):
    record = json.loads((run_dir / "run.json").read_text())
    assert (record["recipe"], record["exit"]["code"]) == (RECIPE, 0)
    assert (run_dir / "config" / "resolved.yaml").is_file()
    assert [row["step"] for row in metrics_of(run_dir)] == [1, 2]


def test_the_module_entrypoint_is_the_same_command(run_dir, tmp_path):
    words = [f"--config-name={RECIPE}", *TOY[1:], f"run.dir={tmp_path / 'other'}"]
    assert train_diffusion.main(words) == 0
    assert metrics_of(tmp_path / "other") == metrics_of(run_dir)


def test_an_entrypoint_refuses_the_recipe_of_another_domain(capsys):
    for bucket in ("vlm", "llm"):
        assert train_diffusion.main([f"--config-name={bucket}/some_recipe"]) == 2
        assert f"python -m unirl.train_vlm --config-name={bucket}/some_recipe" in capsys.readouterr().err
    assert train_vlm.main(["--config-name=diffusion/some_recipe"]) == 2
    assert "python -m unirl.train_diffusion" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["vlm/some_recipe", "llm/some_recipe", "mine/some_recipe"])
def test_an_entrypoint_takes_its_buckets_and_those_of_others(recipe, capsys):
    assert train_vlm.main([f"--config-name={recipe}"]) == 2
    assert f"no recipe '{recipe}'" in capsys.readouterr().err


def test_ctrl_c_saves_and_the_printed_command_continues_to_the_same_end(run_dir, tmp_path, monkeypatch, capsys):
    learn = Trainer.learn

    def learn_and_interrupt(self, step, resp):
        os.kill(os.getpid(), signal.SIGINT)
        learn(self, step, resp)

    monkeypatch.setattr(Trainer, "learn", learn_and_interrupt)
    assert main(["train", *TOY, "--out", str(tmp_path / "run")]) == 130
    shown = capsys.readouterr().err
    assert f"Continue with:\n  unirl train {' '.join(TOY)} run.dir={tmp_path / 'run'}" in shown
    assert len(metrics_of(tmp_path / "run")) == 1
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    assert main(["train", *TOY, f"run.dir={tmp_path / 'run'}"]) == 0
    assert metrics_of(tmp_path / "run") == metrics_of(run_dir)


@pytest.mark.usefixtures("signals_of_a_terminal")
def test_closing_the_terminal_saves_the_step_and_asks_for_a_requeue(run_dir, tmp_path, monkeypatch):
    learn = Trainer.learn

    def learn_and_hang_up(self, step, resp):
        terminal.close()
        os.kill(os.getpid(), signal.SIGHUP)
        learn(self, step, resp)

    monkeypatch.setattr(Trainer, "learn", learn_and_hang_up)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        terminal = os.fdopen(reader)
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(["train", *TOY, "--out", str(tmp_path / "run")]) == 75
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    assert (tmp_path / "run/checkpoints/checkpoint-000001").is_dir()
    assert "step 1/2 reward=" in (tmp_path / "run/logs/console.log").read_text()
    assert main(["train", *TOY, f"run.dir={tmp_path / 'run'}"]) == 0
    assert metrics_of(tmp_path / "run") == metrics_of(run_dir)


def test_eval_gives_the_scores_of_the_run(run_dir, tmp_path, capsys):
    scores = sorted(run_dir.glob("eval/step-*/scores.json"))[-1]
    assert main(["eval", str(run_dir), "--baseline", "--json", "--out", str(tmp_path / "scored")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 2
    assert result["eval/reward_mean"] == json.loads(scores.read_text())["metrics"]["eval/reward_mean"]
    first, *_ = sorted(run_dir.glob("eval/step-*/scores.json"))
    assert result["before"]["eval/reward_mean"] == json.loads(first.read_text())["metrics"]["eval/reward_mean"]
    assert (tmp_path / "scored/eval/step-000002/before_after.png").is_file()


def test_eval_with_baseline_prints_before_and_after(run_dir, tmp_path, capsys):
    assert main(["eval", str(run_dir), "--baseline", "--out", str(tmp_path / "scored")]) == 0
    before, after, page = capsys.readouterr().out.splitlines()[-3:]
    assert before.startswith("before   reward 0.") and before.endswith("(the untrained model)")
    assert after.startswith("after    reward 0.") and after.endswith("(checkpoint-000002)")
    assert page == f"pages    {tmp_path / 'scored/eval/step-000002/before_after.png'}"


def test_sample_draws_a_row_per_prompt(run_dir, tmp_path):
    out = tmp_path / "drawn"
    assert main(["sample", str(run_dir), "-p", "a cat", "-p", "a dog", "--count", "3", "--out", str(out)]) == 0
    assert len(list(out.glob("p0?-s0?.png"))) == 6
    rows = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert [(row["file"], row["prompt"], row["sample"]) for row in rows][2:4] == [
        ("p00-s02.png", "a cat", 2),
        ("p01-s00.png", "a dog", 0),
    ]
    with Image.open(out / "p01-s00.png") as image:
        assert image.text == {
            "prompt": "a dog",
            "sample": "0",
            "seed": "42",
            "run": run_dir.name,
            "checkpoint": "checkpoint-000002",
            "weights": "live",
        }
    assert {path.suffix for path in out.iterdir()} == {".png", ".jsonl"}
    assert (out / "grid.png").is_file()


@pytest.mark.slow
def test_a_run_continues_from_the_recipe_in_its_folder(run_dir, tmp_path):
    copy, whole = tmp_path / "copy", tmp_path / "whole"
    shutil.copytree(run_dir, copy)
    assert main(["train", str(copy / "config" / "resolved.yaml"), f"run.dir={copy}", "num_rollouts=3"]) == 0
    assert main(["train", *TOY, "num_rollouts=3", f"run.dir={whole}"]) == 0
    assert metrics_of(copy)[-1] == metrics_of(whole)[-1]


def test_export_writes_adapters_that_draw_the_same_elsewhere(run_dir, tmp_path, capsys):
    final = run_dir / "checkpoints" / "checkpoint-final"
    assert main(["export", str(final), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "diffusers-lora" / "pytorch_lora_weights.safetensors").is_file()
    assert (tmp_path / "peft" / "adapter_model.safetensors").is_file()
    assert "max difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["diffusion/sd3_trainsid"], 2, "diffusion/sd3_trainside"),
        ([RECIPE, "batch_siz=4"], 2, "batch_size"),
        ([RECIPE, "batch_size=many"], 2, "batch_size"),
        ([RECIPE, "scale=toy", "stack.num_updates_per_batch=5", "batch_size=3"], 2, "error[2010]"),
        ([RECIPE, "scale=toy", "data_source.data_path=nowhere.txt"], 4, "nowhere.txt"),
        ([RECIPE, "bundle.path=/no/such/model"], 4, "/no/such/model"),
        ([RECIPE, "scale=toy", "bundle=sd3"], 2, "error[2005]"),
    ],
    ids=lambda value: str(value)[-20:],
)
def test_mistakes_are_answered_before_a_model_is_loaded(capsys, tmp_path, words, status, said):
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == status
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err + shown.out
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_named_with_the_one_before(run_dir, tmp_path, capsys):
    import shutil

    copy = shutil.copytree(run_dir, tmp_path / "copy")
    newest = copy / "checkpoints" / "checkpoint-000002"
    (newest / "trainer.json").write_text("{}")
    assert main(["eval", str(newest)]) == 7
    shown = capsys.readouterr().err
    assert "trainer.json" in shown
    assert "checkpoint-final" in shown


def test_config_says_who_set_a_key(capsys):
    assert main(["config", "why", "batch_size", RECIPE, "batch_size=6"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("batch_size = 6\n")
    assert "-> command line" in shown


def test_cfg_job_prints_the_composed_recipe(capsys):
    assert main(["train", RECIPE, "batch_size=6", "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "batch_size: 6\n" in shown
    assert "${oc.env:PRETRAINED_MODEL" in shown
    assert main(["train", RECIPE, "--cfg", "job", "--resolve"]) == 0
    assert "${" not in capsys.readouterr().out


def test_plan_counts_the_parameters_that_are_trained(capsys):
    assert main(["plan", RECIPE, "scale=toy", "--json"]) == 0
    lora = json.loads(capsys.readouterr().out)
    assert main(["plan", RECIPE, "scale=toy", "backend.lora_cfg=null", "--json"]) == 0
    full = json.loads(capsys.readouterr().out)
    assert full["sizes"]["trainable_parameters"] == full["parameters"]["transformer"]
    assert lora["sizes"]["trainable_parameters"] < full["sizes"]["trainable_parameters"]
