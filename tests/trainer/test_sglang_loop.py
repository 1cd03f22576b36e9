"""The loop with a server: a restart changes nothing, a run resumes, and a server that mixes up rows is caught."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import fake_servers
from tests.run_files import metrics_of
from tests.source_tree import ROOT
from tests.trainer.killing import Run, newest_checkpoint
from unirl.config.errors import EngineError, ParityError
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.rollout.engine.openai.server import OpenAIServer
from unirl.rollout.engine.sglang.server import SGLangDiffusionServer
from unirl.rollout.engine.sglang_llm.server import SGLangServer
from unirl.trainer.assemble import build_trainer

TOY = ("scale=toy", "num_rollouts=2", "tracking.sample_steps=0", "evaluation.eval_steps=0")
TOKENS = ("llm/quickstart", "rollout=sglang")
OPENAI = ("llm/quickstart", "rollout=openai")
IMAGES = ("vlm/qwen_vl_argrpo_geo3k_mc_sglang_4x8_lora",)
LATENTS = ("diffusion/sd3_sglang_native_colocate",)
OMNI = ("diffusion/sd3_vllmomni",)


def run(folder: Path, *overrides: str, recipe: tuple[str, ...] = TOKENS) -> None:
    name, *own = recipe
    loaded = load(name, [*own, *TOY, f"run.dir={folder}", *overrides])
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        trainer.train()


@pytest.mark.parametrize(
    ("recipe", "server_class"),
    [
        (TOKENS, SGLangServer),
        pytest.param(IMAGES, SGLangServer, marks=pytest.mark.slow),
        pytest.param(OPENAI, OpenAIServer, marks=pytest.mark.slow),
    ],
    ids=["texts", "images", "openai"],
)
def test_a_server_that_is_killed_within_a_step_changes_no_number_of_the_run(
    tmp_path, monkeypatch, capsys, recipe, server_class
) -> None:
    """The weights are sent to the new server, and the step's samples are made again with the same seeds."""
    run(tmp_path / "unbroken", recipe=recipe)
    complete, asked, probes = server_class.complete, [], {"seed"}  # a new server is asked first whether it obeys seeds

    def killing(server, request, params):
        if request.id in probes:
            return complete(server, request, params)
        asked.append(request.id)
        if len(asked) == 11:  # in the second step of 8 samples
            os.killpg(server.process._process.pid, signal.SIGKILL)
        return complete(server, request, params)

    monkeypatch.setattr(server_class, "complete", killing)
    run(tmp_path / "killed", recipe=recipe)
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "unbroken")
    assert len(set(asked)) == 16 < len(asked)
    assert f"step 2 samples again: {server_class.name} ended and was restarted" in capsys.readouterr().err


def test_exchanged_rows_stop_the_run_before_its_first_update(tmp_path) -> None:
    with fake_servers.sglang("swap-rows") as url, pytest.raises(ParityError):
        run(tmp_path, f"rollout.url={url}", "parity.stop=1")
    assert not (tmp_path / "metrics.jsonl").exists() or metrics_of(tmp_path) == []


def test_a_diffusion_server_that_is_killed_within_a_step_changes_no_number_of_the_run(
    tmp_path, monkeypatch, capsys
) -> None:
    with fake_servers.sglang_diffusion() as url:
        run(tmp_path / "unbroken", f"rollout.url={url}", recipe=LATENTS)
    sample, asked = SGLangDiffusionServer.sample, []

    def killing(server, request, params, positions):
        asked.append(request.id)
        if len(asked) == 18:  # in the second step of 8 samples, after two pushes with 4 samples of the canary
            os.killpg(server.process._process.pid, signal.SIGKILL)
        return sample(server, request, params, positions)

    monkeypatch.setattr(SGLangDiffusionServer, "sample", killing)
    run(tmp_path / "killed", recipe=LATENTS)
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "unbroken")
    assert "step 2 samples again: SGLang ended and was restarted" in capsys.readouterr().err


def test_exchanged_latents_stop_the_run_before_its_first_update(tmp_path) -> None:
    """The server exchanges samples of two prompts, so requests of both must be under way at once."""
    with fake_servers.sglang_diffusion("swap-rows") as url, pytest.raises(EngineError, match="noise of its seed"):
        run(tmp_path, f"rollout.url={url}", "rollout.concurrency=8", recipe=LATENTS)
    assert not (tmp_path / "metrics.jsonl").exists() or metrics_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [LATENTS, IMAGES, OPENAI, OMNI], ids=["latents", "images", "openai", "omni"])
def test_a_run_with_a_server_that_is_killed_resumes_exactly(tmp_path, monkeypatch, recipe) -> None:
    """kill -9 of the trainer after its first checkpoint. Its server ends with it, and the next run starts another."""
    monkeypatch.chdir(ROOT)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    name, *own = recipe
    settings = (*own, "scale=toy", "save_interval=1", "tracking.sample_steps=0", "evaluation.eval_steps=0")
    training = Run(name, 3, settings)
    wanted = training.finish(whole)
    assert training.kill_once(broken, lambda: newest_checkpoint(broken) >= 1)
    assert training.finish(broken) == wanted
