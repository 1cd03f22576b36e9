"""A run with stack.micro_batch_size=auto: what it chooses, where it writes it, and what a continued run takes."""

import json

import pytest

from tests.run_files import metrics_of
from unirl.config.load import load
from unirl.distributed.group.dispatch import broadcast, collect, scatter
from unirl.plan import micro_batch as planned
from unirl.plan.devices import device_named
from unirl.plan.fit import RUNGS
from unirl.plan.sizes import RunSizes
from unirl.train.memory import DeviceMemory, MicroBatchMemory
from unirl.train.stack import TrainStack, joined
from unirl.trainer import micro_batch
from unirl.trainer.assemble import build_trainer
from unirl.trainer.resume import RESULT_NEUTRAL

RECIPE = "diffusion/sd3_trainside"
COMMON = ("scale=toy", "stack.micro_batch_size=auto", "tracking.sample_steps=0", "evaluation.eval_steps=0")
GIB = 2**30


def recipe_of(folder, *overrides):
    return load(RECIPE, [*COMMON, "num_rollouts=2", f"run.dir={folder}", *overrides])


def run(folder, *overrides):
    with build_trainer(recipe_of(folder, *overrides)) as trainer:
        trainer.train()


def chosen(folder):
    return json.loads((folder / "run.json").read_text())["chosen"]["stack.micro_batch_size"]


def test_on_a_cpu_the_plan_alone_decides_and_the_run_says_what(tmp_path, capsys):
    run(tmp_path / "run")
    sizes = RunSizes.of(recipe_of(tmp_path).config)
    expected = planned.choose_micro_batch(sizes, device_named("h100")[0], planned.CPU_GIB)
    assert chosen(tmp_path / "run")["value"] == expected.rows
    assert f"stack.micro_batch_size=auto: {expected.rows} rows; training peaks at" in capsys.readouterr().err


def test_a_continued_run_keeps_the_rows_of_the_first_and_its_bits(tmp_path, monkeypatch):
    """The device of the continuation has room for one row only."""
    run(tmp_path / "whole")
    run(tmp_path / "cut", "num_rollouts=1")
    before = chosen(tmp_path / "cut")["value"]
    assert before > 1
    monkeypatch.setattr(micro_batch, "CPU_GIB", 1e-6)
    used = []

    def use(self, rows):
        used.append(rows)
        self.micro_rows = rows

    monkeypatch.setattr(TrainStack, "use_micro_rows", broadcast(use))
    run(tmp_path / "cut")
    assert used == [before]
    assert chosen(tmp_path / "cut") == {"value": before, "why": f"{before} rows, as in the checkpoint"}
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")
    run(tmp_path / "small")
    assert chosen(tmp_path / "small")["value"] == 1


def test_a_continued_run_may_replace_auto_by_a_number(tmp_path):
    """As the advice after a shortage of memory says."""
    run(tmp_path / "run", "num_rollouts=1")
    recipe = load(
        RECIPE, [*COMMON[:1], *COMMON[2:], "stack.micro_batch_size=1", "num_rollouts=2", f"run.dir={tmp_path}/run"]
    )
    with build_trainer(recipe) as trainer:
        trainer.train()
        assert trainer.state.step == 2
        assert "stack.micro_batch_size" not in trainer.state.chosen


def test_every_setting_of_the_ladder_may_change_in_a_continued_run():
    assert {rung.key for rung in RUNGS} <= set(RESULT_NEUTRAL)


@pytest.mark.parametrize(("growth", "rows"), [(3.0, 2), (0.01, None), (0.0, None)])
def test_a_measurement_on_a_gpu_lowers_the_rows_once_and_never_raises_them(growth, rows, tmp_path, monkeypatch):
    """Of 8 GiB 8 % stay free: 7.36 GiB hold three rows that take 1 GiB for the first and 3 GiB for each further one.

    Four rows in micro-batches of at most three are two micro-batches of two.
    """
    measured = []

    def measure(self, track, now):
        measured.append(len(track))
        return [MicroBatchMemory((1, 2), (GIB, int((1 + growth) * GIB)))]

    gpu = DeviceMemory("NVIDIA H100", 8 * GIB)
    monkeypatch.setattr(TrainStack, "device_memory", collect(lambda self: gpu))
    monkeypatch.setattr(TrainStack, "measure_memory", scatter(joined)(measure))
    run(tmp_path / "run")
    sizes = RunSizes.of(recipe_of(tmp_path).config)
    plan = planned.choose_micro_batch(sizes, device_named("h100")[0], 8.0).rows
    result = chosen(tmp_path / "run")
    assert plan > 3
    assert result["value"] == (plan if rows is None else rows)
    assert ("by measurement" in result["why"]) == (growth > 0)
    assert len(measured) == 1
