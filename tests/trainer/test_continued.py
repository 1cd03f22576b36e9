"""A continued run takes from its checkpoint what it had from its start: adapters of a file, and the choice of tiles."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.run_files import metrics_of
from unirl.cli.main import main
from unirl.config.errors import ResumeError
from unirl.config.load import load
from unirl.distributed.group.pool import LocalGroup
from unirl.models.sd3.family import SD3Bundle
from unirl.plan import sizes
from unirl.plan.sizes import RecipeSizes, RunSizes
from unirl.trainer.assemble import build_trainer, tiling_of
from unirl.trainer.run_folder import saved_run
from unirl.types.device import DeviceKind

RECIPE = "diffusion/sd3_trainside"
SMALL = DeviceKind(name="a small GPU", memory_gib=1e-6)
LARGE = DeviceKind(name="a large GPU", memory_gib=80.0)


def recipe_of(folder, *overrides):
    words = ["scale=toy", "num_rollouts=2", "tracking.sample_steps=0", "evaluation.eval_steps=0", f"run.dir={folder}"]
    return load(RECIPE, [*words, *overrides])


def run(folder, *overrides):
    with build_trainer(recipe_of(folder, *overrides)) as trainer:
        trainer.train()


def chosen(folder):
    return json.loads((folder / "run.json").read_text())["chosen"]["pipeline.vae_tiling"]


@pytest.fixture
def adapter(tmp_path):
    """A LoRA of another tool."""
    name, width = "transformer.transformer_blocks.0.attn.to_q", SD3Bundle.estimate("toy").width
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, width, generator=draw), torch.randn(width, 2, generator=draw)
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, tmp_path / "start.safetensors")
    return tmp_path / "start.safetensors"


def test_a_run_that_started_from_an_adapter_continues_and_is_exported_without_the_file(adapter, tmp_path):
    start = f"backend.lora_cfg.path={adapter}"
    run(tmp_path / "whole", start)
    run(tmp_path / "cut", start, "num_rollouts=1")
    assert saved_run(str(tmp_path / "cut")).recipe.config.lora.get("path", str) is None
    began = saved_run(str(tmp_path / "cut"), from_start=True).recipe.config
    assert began.lora.get("path", str) == str(adapter), "eval --baseline scores what the run began with"
    adapter.unlink()
    run(tmp_path / "cut", start)
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")
    assert main(["export", str(tmp_path / "cut"), "--out", str(tmp_path / "exported")]) == 0
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    words = ["--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "images")]
    assert main(["sample", str(tmp_path / "cut"), *words]) == 0


def test_a_branch_that_names_an_adapter_file_is_refused(adapter, tmp_path):
    run(tmp_path / "run", "num_rollouts=1")
    words = (f"backend.lora_cfg.path={adapter}", f"resume={tmp_path / 'run'}")
    refusal = pytest.raises(ResumeError, match=r"lora_cfg\.path=.* would have no effect: the run begins from .*Remove")
    with refusal, build_trainer(recipe_of(tmp_path / "branch", *words)):
        raise AssertionError("the run began")


def test_a_continued_run_decodes_in_tiles_if_it_began_so(tmp_path, monkeypatch):
    size = ("sampling.height=64", "sampling.width=64", "num_rollouts=1")
    monkeypatch.setattr(LocalGroup, "device_kind", lambda group: SMALL)
    run(tmp_path / "run", *size)
    assert chosen(tmp_path / "run")["value"] is True
    monkeypatch.setattr(LocalGroup, "device_kind", lambda group: LARGE)
    with build_trainer(recipe_of(tmp_path / "run", *size, "num_rollouts=2")) as trainer:
        assert trainer.state.chosen["pipeline.vae_tiling"] is True
    assert chosen(tmp_path / "run") == {"value": True, "why": "on, as in the checkpoint"}
    assert saved_run(str(tmp_path / "run")).recipe.config.pipeline.values["vae_tiling"] is True
    with build_trainer(recipe_of(tmp_path / "other", *size)) as trainer:
        assert trainer.state.chosen["pipeline.vae_tiling"] is False


@pytest.mark.parametrize(("kind", "reports"), [(DeviceKind(name="cpu"), 0), (LARGE, 1)])
def test_the_devices_of_the_workers_decide(kind, reports, tmp_path):
    class Engine(LocalGroup):
        def __init__(self):
            pass

        def device_kind(self):
            return kind

    reported = []
    result = tiling_of(RecipeSizes(recipe_of(tmp_path).config), Engine(), None, lambda *words: reported.append(words))
    assert result is False and len(reported) == reports


def test_a_run_works_out_its_sizes_once(tmp_path, monkeypatch):
    """For the check of its memory, the tiles, and the rows of a micro-batch."""
    counted = []
    work_out = RunSizes.of
    monkeypatch.setattr(sizes.RunSizes, "of", lambda *given: counted.append(given) or work_out(*given))
    monkeypatch.setattr(LocalGroup, "device_kind", lambda group: LARGE)
    run(tmp_path / "run", "stack.micro_batch_size=auto", "num_rollouts=1")
    assert len(counted) == 1
