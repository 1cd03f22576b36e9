"""The engine for vLLM-Omni over HTTP, with a fake server that can be told to make mistakes."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.fake_servers import vllm_omni as fake
from tests.served_latents import SD3, TOY, Served, asking
from tests.served_latents import serving as serving_kind
from unirl.config.errors import (
    DependencyError,
    IncompatibleError,
)
from unirl.models.hunyuan_video15.family import HunyuanVideo15Bundle, HunyuanVideo15Pipeline
from unirl.models.lumina2.family import Lumina2Bundle, Lumina2Pipeline
from unirl.models.qwen_image.family import QwenImageBundle, QwenImagePipeline
from unirl.models.wan21.family import Wan21Bundle, Wan21Pipeline
from unirl.models.wan22.family import Wan22Bundle, Wan22Pipeline
from unirl.rollout.engine.serving.latent_server import LatentRequest
from unirl.rollout.engine.vllm_omni.engine import VLLMOmniRolloutEngine
from unirl.rollout.engine.vllm_omni.messages import step_weights
from unirl.rollout.engine.vllm_omni.program.trajectory import RecordingScheduler, Schedule, seeded_draws
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, EulerODE, FlowDDIM, FlowSDEStrategy
from unirl.types.sampling import DiffusionSamplingParams

ATOL = 2e-6
"""Largest difference of log-probs: the server computes them from the stored latents, as the trainer does."""
VIDEO = (HunyuanVideo15Bundle, HunyuanVideo15Pipeline)
QWEN = (QwenImageBundle, QwenImagePipeline)
WAN21, WAN22 = (Wan21Bundle, Wan21Pipeline), (Wan22Bundle, Wan22Pipeline)
at = partial(Served.at, VLLMOmniRolloutEngine)
serving = partial(serving_kind, VLLMOmniRolloutEngine)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it running."""
    with fake() as url, serving(tmp_path_factory.mktemp("run"), url=url) as each:
        yield each


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": DanceSDEStrategy()},
        {"trajectory_dtype": "bf16"},
    ],
    ids=["dance", "bf16 trajectory"],
)
def test_sampling_settings_reach_the_server(served, changes) -> None:
    """The replay uses the settings of the request, so that equal log-probs say that the server used them."""
    served.push()
    assert served.log_prob_gap(served.asking(**changes)) < ATOL


@pytest.mark.parametrize(
    ("family", "recipe", "changes"),
    [
        (QWEN, "diffusion/qwen_image_trainside", {"guidance_scale": 4.0}),
        (VIDEO, "diffusion/hunyuan_video15_t2v_dancegrpo_trainside", {"num_frames": 5, "max_sequence_length": 32}),
        (WAN21, "diffusion/wan21_t2v", {"num_frames": 5, "guidance_scale": 4.0}),
        (WAN22, "diffusion/wan22_t2v_14b", {"num_frames": 5, "guidance_scale": 4.0, "guidance_scale_2": 3.0}),
        (WAN22, "diffusion/wan22_t2v_14b", {"num_frames": 5, "guidance_scale": 1.0, "guidance_scale_2": 3.0}),
    ],
    ids=["qwen_image", "hunyuan_video15", "wan21", "wan22", "wan22, second expert alone guided"],
)
def test_other_families_are_sampled_as_sd3_is(tmp_path, family, recipe, changes) -> None:
    """Qwen-Image rescales guided velocities; the second of four noise levels of Wan 2.2 is that of its first expert."""
    bundle, pipeline = family
    pipeline(bundle(**TOY)).write_model({}, tmp_path / "model")
    with (
        fake(path=str(tmp_path / "model"), recipe=recipe) as url,
        serving(tmp_path, url=url, family=family) as served,
    ):
        served.train()
        served.push()
        req = served.asking(sde_indices=(1, 2), **changes)
        assert served.sampled(req).latents.dim() == (6 if "num_frames" in changes else 5)  # [B, K, C, (F,) H, W]
        assert served.log_prob_gap(req) < ATOL


def test_the_boundary_of_two_experts_is_that_of_the_checkpoint(tmp_path) -> None:
    assert at(tmp_path, family=WAN22).engine.server.engine_settings()["boundary_ratio"] == 0.875
    assert "boundary_ratio" not in at(tmp_path, family=WAN21).engine.server.engine_settings()


def test_an_empty_prompt_is_the_text_that_the_family_has_for_it(tmp_path) -> None:
    """diffusers gives Qwen-Image a space in place of an empty text, and vLLM-Omni does not."""
    for family, text in ((QWEN, " "), (SD3, "")):
        engine = at(tmp_path, family=family).engine
        _, params = asking(engine).only_track(DiffusionSamplingParams)
        order = engine.server.order(LatentRequest("r0:0", "", 0), params, (0,))
        assert order["prompt"] == text and order["negative_prompt"] == text


# Steps


@pytest.mark.parametrize(
    "kernel",
    [
        FlowSDEStrategy(eta=0.7),
        DanceSDEStrategy(eta=0.3),
        CPSSDEStrategy(eta=0.5),
        FlowDDIM(eta=0.8),
        EulerODE(),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_a_step_as_weights_of_x_and_v_is_that_of_the_kernel(kernel) -> None:
    x, v = torch.randn(2, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    weights, wanted = step_weights(kernel, 0.8, 0.6), kernel.transition(x, v, 0.8, 0.6)
    assert torch.allclose(weights.on_x * x + weights.on_v * v, wanted.mean, atol=1e-6)
    assert weights.std == pytest.approx(float(wanted.std), abs=1e-7)


def test_the_recorder_makes_the_steps_of_the_request_from_the_noise_of_the_seed() -> None:
    """Two steps by hand in float64, the first with noise: x1 = a x0 + b v + s e, logp of e, x2 = x1 - 0.5 v."""
    order = {"steps": [[0.9, -0.4, 0.3], [1.0, -0.5, 0.0]], "sigmas": [1.0, 0.5, 0.0], "positions": [0, 1, 2]}
    order["timestep_scale"] = 1000.0
    schedule = Schedule.of(order | {"trajectory_dtype": "float32"})
    draws = seeded_draws(7, (2, 2), 2)
    recorder = RecordingScheduler({}, schedule, draws[None], torch.device("cpu"))
    v = torch.full((1, 2, 2), 0.25, dtype=torch.bfloat16)
    shown = recorder.x.to(torch.bfloat16)
    for timestep in (1000.0, 500.0):
        recorder.exact_timestep(torch.tensor([timestep], dtype=torch.bfloat16))
        recorder.note_guidance(1.0)
        (shown,) = recorder.step(v, timestep, shown)
    recording, (x0, e) = recorder.recording(), draws.double()
    x1 = 0.9 * x0 - 0.4 * 0.25 + 0.3 * e
    assert shown.dtype == torch.bfloat16 and recording.timesteps.tolist() == [1000.0, 500.0]
    assert torch.allclose(recording.latents[0].double(), torch.stack([x0, x1, x1 - 0.5 * 0.25]), atol=1e-6)
    logp = (-0.5 * e.square()).mean() - math.log(0.3) - 0.5 * math.log(2 * math.pi)
    assert float(recording.logp) == pytest.approx(float(logp), abs=1e-6)


def test_a_pipeline_that_gives_its_network_other_timesteps_is_caught() -> None:
    order = {"steps": [[1.0, -1.0, 0.0]], "sigmas": [1.0, 0.0], "positions": [1], "trajectory_dtype": "float32"}
    order["timestep_scale"] = 1000.0
    recorder = RecordingScheduler({}, Schedule.of(order), seeded_draws(0, (2,), 1)[None], torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"gives its network the timesteps \[900\.0\] at step 0.* is 1000"):
        recorder.exact_timestep(torch.tensor([900.0]))


# Settings


def test_the_real_program_needs_its_package_and_finds_nothing_but_unirl(tmp_path) -> None:
    with pytest.raises(DependencyError, match=r"unirl engines install vllm_omni\."):
        at(tmp_path, program="vllm_omni")
    server = at(
        tmp_path, program="vllm_omni", python_executable="python", engine_args={"enforce_eager": True}
    ).engine.server
    words = server.words("python", 30000)
    assert words[:3] == ["python", "-m", "unirl.rollout.engine.vllm_omni.program.serve"]
    assert '"enforce_eager": true' in words[-1] and '"dtype": "float32"' in words[-1]
    assert [each.name for each in Path(server.env()["PYTHONPATH"]).iterdir()] == ["unirl"]


def test_a_server_of_another_model_is_refused(tmp_path) -> None:
    refusal = pytest.raises(IncompatibleError, match=r"has pipeline StableDiffusion3Pipeline .* needs HunyuanVideo15")
    with fake() as url, serving(tmp_path, url=url, family=VIDEO) as served, refusal:
        served.push()


def test_a_family_without_a_pipeline_there_is_refused(tmp_path) -> None:
    with pytest.raises(IncompatibleError, match="has no family lumina2: it knows sd3, qwen_image, hunyuan_video15"):
        at(tmp_path, family=(Lumina2Bundle, Lumina2Pipeline))


def test_the_program_needs_torch_and_safetensors_alone() -> None:
    """It runs in an environment without UniRL's own dependencies; msgspec is one of vllm's."""
    script = """
import importlib, sys
for name in ("wire", "trajectory", "weights", "worker", "serve"):
    importlib.import_module(f"unirl.rollout.engine.vllm_omni.program.{name}")
print(sorted(set(sys.argv[1].split()) & set(sys.modules)))
"""
    foreign = "hydra omegaconf diffusers transformers peft accelerate ray httpx2 yaml rich PIL jaxtyping"
    words = [sys.executable, "-c", script, foreign]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
