"""The loop with a server of vLLM-Omni: a restart changes no number, a run resumes, exchanged rows are caught."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import fake_servers
from tests.run_files import metrics_of
from unirl.config.errors import EngineError, Preempted
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.rollout.engine.vllm_omni.server import VLLMOmniServer
from unirl.trainer.assemble import build_trainer

TOY = ("scale=toy", "tracking.sample_steps=0", "evaluation.eval_steps=0")


def run(folder: Path, *overrides: str, recipe: str = "diffusion/sd3_vllmomni") -> None:
    loaded = load(recipe, [*TOY, f"run.dir={folder}", *overrides])
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        trainer.train()


def test_a_server_that_is_killed_within_a_step_changes_no_number_of_the_run(tmp_path, monkeypatch, capsys) -> None:
    with fake_servers.vllm_omni() as url:
        run(tmp_path / "unbroken", "num_rollouts=2", f"rollout.url={url}")
    sample, asked = VLLMOmniServer.sample, []

    def killing(server, request, params, positions):
        asked.append(request.id)
        if len(asked) == 18:  # in the second step of 8 samples, after two pushes with 4 samples of the canary
            os.killpg(server.process._process.pid, signal.SIGKILL)
        return sample(server, request, params, positions)

    monkeypatch.setattr(VLLMOmniServer, "sample", killing)
    run(tmp_path / "killed", "num_rollouts=2")
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "unbroken")
    assert "step 2 samples again: vLLM-Omni ended and was restarted" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_stops_resumes_exactly(tmp_path) -> None:
    run(tmp_path / "whole", "num_rollouts=2")
    loaded = load("diffusion/sd3_vllmomni", [*TOY, "num_rollouts=2", f"run.dir={tmp_path / 'parts'}"])
    with build_trainer(loaded) as trainer:
        trainer.request_stop(signal.SIGTERM)
        with pytest.raises(Preempted):
            trainer.train()
    assert len(metrics_of(tmp_path / "parts")) == 1
    run(tmp_path / "parts", "num_rollouts=2")
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "engine"),
    [
        ("diffusion/qwen_image_trainside", "vllm_omni"),
        ("diffusion/wan21_t2v", "vllm_omni"),
        ("diffusion/wan22_t2v_14b", "vllm_omni"),
        ("diffusion/wan22_ti2v_5b", "vllm_omni"),
        ("diffusion/qwen_image_trainside", "sglang_diffusion"),
    ],
)
def test_a_recipe_of_another_engine_trains_with_a_server(tmp_path, recipe, engine) -> None:
    run(tmp_path, f"rollout={engine}", "num_rollouts=1", recipe=recipe)
    [metrics] = metrics_of(tmp_path)
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_exchanged_latents_stop_the_run_before_its_first_update(tmp_path) -> None:
    """The server exchanges samples of two prompts, so requests of both must be under way at once."""
    with fake_servers.vllm_omni("swap-rows") as url, pytest.raises(EngineError, match="noise of its seed"):
        run(tmp_path, "num_rollouts=1", f"rollout.url={url}", "rollout.concurrency=8")
    assert not (tmp_path / "metrics.jsonl").exists() or metrics_of(tmp_path) == []
