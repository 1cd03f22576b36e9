"""The engine for SGLang's diffusion server over HTTP, with a fake server that can be told to make mistakes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.fake_servers import sglang_diffusion as fake
from tests.served_latents import TOY, Served, asking
from tests.served_latents import serving as serving_kind
from unirl.config.errors import (
    DependencyError,
    IncompatibleError,
)
from unirl.models.flux2_klein.family import Flux2KleinBundle, Flux2KleinPipeline
from unirl.models.qwen_image.family import QwenImageBundle, QwenImagePipeline
from unirl.rollout.engine.sglang.engine import SGLangRolloutEngine
from unirl.rollout.engine.sglang.families import FAMILIES
from unirl.sde.kernels import DanceSDEStrategy, FlowSDEStrategy
from unirl.types.sampling import DiffusionSamplingParams

ATOL = 1e-4
"""Largest difference of log-probs: the replay computes the noise of fp32 latents, the server has it."""
KLEIN, QWEN = (Flux2KleinBundle, Flux2KleinPipeline), (QwenImageBundle, QwenImagePipeline)


at = partial(Served.at, SGLangRolloutEngine)
serving = partial(serving_kind, SGLangRolloutEngine)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it running."""
    with fake() as url, serving(tmp_path_factory.mktemp("run"), url=url) as each:
        yield each


def test_an_evaluation_is_the_trainers_own_euler_path_from_the_noise_of_the_seed(served) -> None:
    """Without stochastic steps the whole path follows from x_T, which the seed gives."""
    served.push()
    req = served.asking(sde_indices=())
    ours = served.engine.generate(req).tracks["image"]
    _, params = req.only_track(DiffusionSamplingParams)
    from unirl.rollout.engine.serving.engine import seeds_of
    from unirl.sde.noise import NoiseSource

    shape = served.trained.facts.latent_shape(params)
    draws = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds_of(req, params, "x")]
    conditions = served.trained.conditions_of(req, params)
    with torch.no_grad():
        theirs = served.trained.stage.sample(
            conditions, torch.stack(draws), params, NoiseSource(params.seed, "r", 0), req.sample_ids
        )
    assert torch.allclose(ours.segment.final, theirs.final, atol=1e-5)
    assert torch.equal(ours.decoded.pixels, served.trained.decode(ours.segment.final).pixels)


@pytest.mark.parametrize(
    ("family", "recipe", "changes"),
    [
        (KLEIN, "diffusion/flux2_klein_trainside", {}),
        (QWEN, "diffusion/qwen_image_trainside", {"guidance_scale": 4.0}),
    ],
    ids=["flux2_klein", "qwen_image"],
)
def test_a_family_may_send_its_latents_as_tokens(tmp_path, family, recipe, changes) -> None:
    """The fake draws the noise of steps in the packed form, packs trajectories, and joins layers of Qwen-Image."""
    bundle, pipeline = family
    pipeline(bundle(**TOY)).write_model({}, tmp_path / "model")
    with (
        fake(path=str(tmp_path / "model"), recipe=recipe) as url,
        serving(tmp_path, url=url, family=family) as served,
    ):
        served.train()
        served.push()
        assert served.log_prob_gap(served.asking(**changes)) < ATOL


def test_parts_of_a_fused_layer_are_joined_when_all_have_arrived() -> None:
    """In the order of SGLang, whatever that of the transfer is."""
    parts = {f"block.attn.add_{name}_proj.bias": torch.full((2,), float(i)) for i, name in enumerate("qkv")}
    names = list(parts)
    family, waiting = FAMILIES["qwen_image"], {}
    for name in (names[2], names[0]):
        whole, waiting = family.joined(waiting | {name: parts[name]})
        assert whole == {}
    whole, waiting = family.joined(waiting | {names[1]: parts[names[1]], "proj_out.bias": torch.zeros(1)})
    assert whole["block.attn.to_added_qkv.bias"].tolist() == [0, 0, 1, 1, 2, 2] and waiting == {}
    assert set(whole) == {"block.attn.to_added_qkv.bias", "proj_out.bias"}


def test_the_noise_levels_of_sd3_are_those_that_the_real_server_reported(served) -> None:
    """Recorded from sglang 0.5.23 with four steps and shift 3: the last training level is shifted twice."""
    levels = asking(served.engine).only_track(DiffusionSamplingParams)[1].sigmas
    assert levels == pytest.approx([1.0, 0.857692301273346, 0.602150559425354, 0.008928571827709675, 0.0], abs=1e-6)


def test_packing_is_undone() -> None:
    latents = torch.arange(24.0).reshape(4, 2, 3)
    packed = FAMILIES["flux2_klein"].packed(latents)
    assert packed.shape == (6, 4) and torch.equal(packed[4], latents[:, 1, 1])  # token 4 is row 1, column 1
    assert torch.equal(FAMILIES["flux2_klein"].unpacked(packed, (4, 2, 3)), latents)
    qwen, latents = FAMILIES["qwen_image"], latents.reshape(1, 4, 6)
    packed = qwen.packed(latents)
    assert packed.shape == qwen.packed_shape((1, 4, 6)) and packed[4].tolist() == [14, 15, 20, 21]
    assert torch.equal(qwen.unpacked(packed, (1, 4, 6)), latents)


# Settings


def test_a_kernel_that_the_server_does_not_have_is_refused(served) -> None:
    served.push()
    with pytest.raises(IncompatibleError, match=r"has no DanceSDEStrategy\. Use FlowSDEStrategy or CPSSDEStrategy"):
        served.sampled(served.asking(kernel=DanceSDEStrategy()))


def test_a_length_of_text_that_the_real_server_does_not_take_is_refused(tmp_path) -> None:
    """SD3 always gets 256 tokens of T5 there; a fake server takes any length."""
    engine = at(tmp_path, program="sglang", url="http://127.0.0.1:9").engine
    req = asking(engine)
    with pytest.raises(IncompatibleError, match=r"Set sampling\.max_sequence_length=256"):
        engine.respond(req)


def test_the_real_program_needs_its_package_and_a_name_of_the_model(tmp_path) -> None:
    with pytest.raises(DependencyError, match=r"unirl engines install sglang\."):
        at(tmp_path, program="sglang")
    served = at(tmp_path, program="sglang", python_executable="python", tp_size=2)
    words = served.engine.server.words("python", 30000)
    assert words[:3] == ["python", "-m", "sglang.multimodal_gen.runtime.launch_server"]
    for option in ("--model-id stable-diffusion-3.5-medium", "--dit-precision fp32", "--tp-size 2"):
        assert option in " ".join(words)


def test_a_server_of_another_model_is_refused(tmp_path) -> None:
    refusal = pytest.raises(IncompatibleError, match=r"serves StableDiffusion3Pipeline .* trains Flux2KleinPipeline")
    with fake() as url, serving(tmp_path, url=url, family=KLEIN) as served, refusal:
        served.push()


def test_the_log_prob_of_noise_is_that_of_a_standard_normal_over_the_standard_deviation() -> None:
    """-z^2 / 2 - log(std) - log(2 pi) / 2, by hand: eta = 0.7 in the step from 0.5 to 0.4, std = 0.7 sqrt(0.1)."""
    from unirl.rollout.engine.serving.latents import log_prob_of

    params = DiffusionSamplingParams(kernel=FlowSDEStrategy(eta=0.7), num_inference_steps=2, sigmas=(0.5, 0.4, 0.0))
    wanted = -0.5 * 4.0 - math.log(0.7 * math.sqrt(0.1)) - 0.5 * math.log(2 * math.pi)
    assert log_prob_of(params, 0, torch.full((2, 3, 3), 2.0)) == pytest.approx(wanted, abs=1e-6)
