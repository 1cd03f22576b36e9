"""On-policy distillation from a recipe: the teacher is a checkpoint, and the student approaches it."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch

from tests.run_files import metrics_of
from tests.source_tree import ROOT
from unirl.cli.main import main
from unirl.config.errors import ConfigError, NotFoundError
from unirl.config.load import load
from unirl.models.loading.toy_tokenizers import qwen3_tokenizer
from unirl.models.qwen3.family import Qwen3Bundle
from unirl.plan.preflight import preflight

RECIPE = str(ROOT / "tests/trainer/text_loop.yaml")
DISTIL = ["plugins=[tests]", "~algorithm", "algorithm={_target_: unirl.algorithms.ar_opd.AROPD}"]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """The student's checkpoint, every weight moved a little: it prefers other tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    network = Qwen3Bundle(path="toy", dtype="fp32").untrained()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(std=0.08, generator=generator))
    network.save_pretrained(folder)
    qwen3_tokenizer().save_pretrained(folder)
    return folder


def checked(*overrides: str) -> None:
    preflight(load(RECIPE, [*DISTIL, *overrides]))


def test_a_tiny_teacher_is_another_model_than_the_student() -> None:
    student = Qwen3Bundle(path="toy", dtype="fp32")
    name = next(name for name, shape in student.saved().shapes().items() if name.endswith("q_proj.weight"))
    own, other = (weights.read(name, slice(None)) for weights in (student.saved(), student.saved_at("toy")))
    assert not torch.equal(own, other)


def test_a_recipe_without_a_teacher_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"'teacher'.* Write backend.snapshots=\{teacher: \{path: ...\}\}") as raised:
        checked()
    assert raised.value.code == 2020


def test_a_teacher_that_is_not_there_is_refused_before_anything_starts(tmp_path) -> None:
    with pytest.raises(NotFoundError, match=r"backend.snapshots.teacher.path=.*: there is no such directory"):
        checked(f"backend.snapshots.teacher.path={tmp_path / 'nowhere'}")


@pytest.mark.slow
def test_the_reverse_kl_to_the_teacher_falls_by_a_third(teacher: Path, tmp_path: Path) -> None:
    settings = ["num_rollouts=25", "batch_size=8", "sampling.samples_per_prompt=8", "sampling.max_new_tokens=2"]
    settings += [
        "backend.optimizer_cfg.learning_rate=6e-3",
        "backend.scheduler_cfg={type: linear}",
        "stack.micro_batch_size=64",
        "rollout.forward_batch_size=64",
    ]
    source = f"backend.snapshots.teacher.path={teacher}"
    assert main(["train", RECIPE, *DISTIL, *settings, source, f"run.dir={tmp_path / 'run'}"]) == 0
    kl = [row["train/kl_teacher"] for row in metrics_of(tmp_path / "run")]
    assert mean(kl[-5:]) < 0.65 * mean(kl[:3]), kl
