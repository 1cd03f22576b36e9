"""The public Python interface: the same runs as the command line's, and errors before anything is loaded."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

import unirl
from tests.run_files import metrics_of
from tests.source_tree import ROOT
from unirl.api import spell
from unirl.cli.main import main
from unirl.config.errors import UnknownKeyError, UsageError
from unirl.config.load import load

TOY = ("diffusion/sd3_trainside", "scale=toy", "num_rollouts=1", "evaluation.eval_steps=0")


def test_a_run_from_python_equals_the_run_of_the_command_line(tmp_path) -> None:
    assert main(["train", *TOY, f"run.dir={tmp_path / 'cli'}"]) == 0
    result = unirl.Run(TOY[0], *TOY[1:], **{"run.dir": tmp_path / "python", "tracking.sample_steps": 1}).train()
    assert metrics_of(result.directory) == metrics_of(tmp_path / "cli")
    assert len(result.metrics) == 1 and result.metrics[0]["step"] == 1
    assert len(result.samples) == 8 and all(sample["file"].is_file() for sample in result.samples)


def test_a_wrong_setting_is_answered_when_the_run_is_made() -> None:
    with pytest.raises(UnknownKeyError, match="Did you mean 'batch_size'"):
        unirl.Run("diffusion/sd3_trainside", batch_siz=3)


def test_an_export_before_training_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"call train\(\) first"):
        unirl.Run("diffusion/sd3_trainside", scale="toy").export()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_rollouts", 7),
        ("sampling.guidance_scale", 4.5),
        ("run.name", "it's {odd}: [a, b] null"),
        ("run.name", "null"),
        ("data_source.data_path", "datasets/pickscore/train.txt"),
        ("tracking.mirrors", ["tensorboard"]),
        ("placement", {"train": "0-3", "rollout": "0-3"}),
        ("backend.lora_cfg", None),
    ],
)
def test_a_python_value_arrives_as_it_is(key, value) -> None:
    recipe = load("diffusion/sd3_trainside", ["num_devices=4", f"{key}={spell(value)}"])
    assert recipe.value(key) == value


def test_importing_the_package_loads_nothing_of_it() -> None:
    script = "import sys, unirl; print([name for name in sys.modules if name.startswith(('unirl.', 'torch'))])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.slow
def test_the_example_runs(capsys) -> None:
    runpy.run_path(str(ROOT / "examples/python/first_run.py"))
    assert "diffusers-lora" in capsys.readouterr().out
