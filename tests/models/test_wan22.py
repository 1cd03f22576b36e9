"""Experts by sigma, first frames, sizes and adapter files of Wan 2.2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.family_cases import CASES, built
from unirl.config.errors import DataError
from unirl.models.chunks import select_conditions
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, difference, plain_pipeline, sample_with_euler
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.wan22.family import LORA_FILES, WAN22, Wan22Bundle, Wan22Pipeline, facts
from unirl.sde.guidance import ExpertGuidance
from unirl.sde.kernels import EulerODE, FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.bundle import rollout_of
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig
from unirl.trainer.export import Exporter
from unirl.types.sampling import DiffusionSamplingParams

TEXTS = ("a red circle", "two blue squares", "x")
PARAMS = DiffusionSamplingParams(
    kernel=EulerODE(),
    num_inference_steps=4,
    height=32,
    width=64,
    num_frames=9,
    max_sequence_length=16,
    guidance_scale=4.0,
)

TOY, TOY_TI2V = WAN22.toys["toy"], WAN22.toys["toy-ti2v"]
LEVELS = torch.tensor([0.95, 0.2, 0.875, 0.874, 0.5, 1.0, 0.9, 0.1])
HIGH = LEVELS >= 0.875


def of(name: str) -> DiffusersPipeline[Any]:
    return built(next(case for case in CASES if case.name == name))


def apart(pipeline: DiffusersPipeline[Any], params: DiffusionSamplingParams, pictures: Any = None) -> float:
    return difference(
        pipeline, plain_pipeline(pipeline.bundle, pipeline.bundle.untrained()), TEXTS, params, images=pictures
    )


# Two experts


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """Eight rows of the toy at levels on both sides of its boundary, and what each expert says of all of them."""
    pipeline = of("wan22")
    ids = [f"r{i}" for i in range(len(LEVELS))]
    x = NoiseSource(0, "r", 0).normal(ids, "x", pipeline.facts.latent_shape(PARAMS))
    conditions = pipeline.encode([TEXTS[i % 3] for i in range(8)], replace(PARAMS, guidance_scale=1.0))
    denoiser, module = pipeline.stage.denoiser, pipeline.bundle.trainable()
    with torch.no_grad():
        inputs = denoiser.inputs(x, LEVELS, conditions)  # type: ignore[attr-defined]
        alone = {name: module.get_submodule(name)(**inputs)[0] for name in ("transformer", "transformer_2")}
    return {"pipeline": pipeline, "x": x, "conditions": conditions, **alone}


def test_each_row_is_run_by_the_expert_of_its_level(rows: dict[str, Any]) -> None:
    stage = rows["pipeline"].stage
    assert (rows["transformer"] - rows["transformer_2"]).abs().max() > 0.1
    expected = torch.where(HIGH.view(-1, 1, 1, 1, 1), rows["transformer"], rows["transformer_2"])
    with torch.no_grad():
        for velocity in (stage.denoiser.velocity, stage.denoiser.velocity_by_all):
            assert torch.equal(velocity(rows["x"], LEVELS, rows["conditions"]), expected)


def test_the_bits_of_a_row_do_not_depend_on_the_levels_of_its_neighbours(rows: dict[str, Any]) -> None:
    denoiser = rows["pipeline"].stage.denoiser
    with torch.no_grad():
        together = denoiser.velocity(rows["x"], LEVELS, rows["conditions"])
        for chosen in ([0, 1, 2, 3], [7, 6, 5, 4], [1, 3, 4, 7], [0, 2, 5, 6]):
            conditions = select_conditions(rows["conditions"], chosen)
            assert torch.equal(denoiser.velocity(rows["x"][chosen], LEVELS[chosen], conditions), together[chosen])


def runs_of(module: Any, act: Callable[[], object]) -> dict[str, list[int]]:
    """How many rows each expert was run on, call by call."""
    result: dict[str, list[int]] = {"transformer": [], "transformer_2": []}
    handles = [
        module.get_submodule(name).register_forward_pre_hook(
            lambda _, args, named, name=name: result[name].append(len(named["hidden_states"])), with_kwargs=True
        )
        for name in result
    ]
    act()
    for handle in handles:
        handle.remove()
    return result


def test_one_sigma_for_all_rows_runs_one_expert_and_several_run_both(rows: dict[str, Any]) -> None:
    pipeline = rows["pipeline"]
    module, off = pipeline.bundle.trainable(), pipeline.facts.guidance
    track = rollout_of(pipeline, replace(PARAMS, kernel=FlowSDEStrategy(), guidance_scale=1.0))
    first, last = (
        runs_of(module, lambda step=step: pipeline.stage.replay(track.conditions, track.segment, [step]))  # type: ignore[misc]
        for step in (0, 2)
    )
    assert first == {"transformer": [8], "transformer_2": []} and last == {"transformer": [], "transformer_2": [8]}
    with torch.no_grad():
        low = torch.full((8,), 0.3)
        own = runs_of(module, lambda: pipeline.stage.velocity(rows["x"], low, rows["conditions"], off))
    assert own == {"transformer": [4], "transformer_2": [8]}


def test_an_expert_without_rows_gets_a_gradient_of_zero_with_run_all(rows: dict[str, Any]) -> None:
    module = rows["pipeline"].bundle.trainable()
    denoiser = rows["pipeline"].stage.denoiser
    high, low = (list(module.get_submodule(name).parameters()) for name in ("transformer", "transformer_2"))

    def gradients(velocity: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
        v = velocity(rows["x"], torch.full((8,), 0.3), rows["conditions"])
        return torch.autograd.grad(v.square().mean(), [*high, *low], allow_unused=True)

    one, both = gradients(denoiser.velocity), gradients(denoiser.velocity_by_all)
    assert all(grad is None for grad in one[: len(high)])
    assert all(grad is not None and not grad.any() for grad in both[: len(high)])
    for a, b in zip(one[len(high) :], both[len(high) :], strict=True):
        assert a is not None and b is not None and torch.allclose(a, b, atol=1e-7) and a.any()


@pytest.mark.parametrize("scales", [(4.0, 2.0), (1.0, 3.0), (3.0, 1.0)])
def test_each_expert_is_guided_by_its_own_scale_as_in_diffusers(scales: tuple[float, float]) -> None:
    pipeline = of("wan22")
    params = replace(PARAMS, guidance_scale=scales[0], guidance_scale_2=scales[1])
    assert apart(pipeline, params) < 1e-4
    same = replace(params, guidance_scale_2=scales[0])
    one, other = (sample_with_euler(pipeline, TEXTS, each).latents for each in (params, same))
    assert (one - other).abs().max() > 1e-3


def test_adapters_are_written_as_two_files_that_diffusers_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pipeline = Wan22Pipeline(Wan22Bundle(path="toy", dtype="fp32"))
    lora = LoraConfig(rank=4)
    backend = FSDPBackend(pipeline.bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-3), lora_cfg=lora)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in backend.trainable.values():
            parameter.normal_(std=0.1, generator=generator)
    exporter = Exporter(pipeline, backend, lora)
    assert exporter.usual_formats == ("diffusers-lora",)
    exporter.write(tmp_path, "diffusers-lora")
    params = replace(PARAMS, guidance_scale_2=2.0)
    difference_to_ours = exporter.verify(tmp_path, "diffusers-lora", TEXTS, params)
    assert difference_to_ours is not None and difference_to_ours < 1e-4
    assert apart(pipeline, params) > 1e-3
    files = [load_file(tmp_path / name) for name in LORA_FILES.values()]
    assert files[0].keys() == files[1].keys() and len(files[0]) == len(backend.trainable) // 2
    assert all(name.startswith("transformer.blocks.") for name in files[0])


# A first frame within the video


def pictures(params: DiffusionSamplingParams) -> list[ConditionImages]:
    generator = torch.Generator().manual_seed(3)
    shape = (1, 3, params.height, params.width)
    return [ConditionImages.of(torch.randint(256, shape, generator=generator) / 255) for _ in TEXTS]


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("size", [(32, 64, 5), (64, 32, 9)])
def test_a_video_with_a_first_frame_is_that_of_diffusers(scale: float, size: tuple[int, int, int]) -> None:
    height, width, frames = size
    params = replace(PARAMS, height=height, width=width, num_frames=frames, guidance_scale=scale)
    assert apart(of("wan22-ti2v"), params, pictures(params)) < 1e-4


def test_the_sample_begins_with_the_first_frame_for_any_steps() -> None:
    pipeline = of("wan22-ti2v")
    shown = pictures(PARAMS)
    conditions: Any = pipeline.encode(TEXTS, PARAMS, shown)
    params = replace(PARAMS, kernel=FlowSDEStrategy())
    params = params.pinned(0, tuple(pipeline.sigmas(params).tolist()))
    ids = list(TEXTS)
    noise = NoiseSource(0, "r", 0)
    with torch.no_grad():
        segment = pipeline.stage.sample(conditions, pipeline.initial_noise(noise, ids, params), params, noise, ids)
    frame = conditions["image"].latents
    assert (segment.final[:, :, :1] - frame).abs().max() < 1e-5
    assert (segment.final[:, :, 1:] - frame).abs().max() > 0.1
    unshown: Any = pipeline.encode(TEXTS, PARAMS)
    with torch.no_grad():
        free = pipeline.stage.sample(unshown, pipeline.initial_noise(noise, ids, params), params, noise, ids)
    assert (segment.final - free.final)[:, :, 1:].abs().max() > 0.1


def test_a_forward_process_loss_is_zero_at_the_first_frame() -> None:
    pipeline = of("wan22-ti2v")
    conditions: Any = pipeline.encode(TEXTS, PARAMS, pictures(PARAMS))
    shape = pipeline.facts.latent_shape(PARAMS)
    eps, x0 = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0))
    x0[:, :, :1] = conditions["image"].latents
    t = torch.tensor([0.05, 0.5, 1.0])
    at = t.view(-1, 1, 1, 1, 1)
    with torch.no_grad():
        v = pipeline.stage.velocity((1 - at) * x0 + at * eps, t, conditions, pipeline.facts.guidance.at(4.0))
    assert (v - (eps - x0))[:, :, :1].abs().max() < 1e-4


# Public checkpoints and bad input


@pytest.mark.parametrize(
    ("name", "transformer", "vae", "shape", "boundary"),
    [
        ("T2V-A14B", 28.58, 0.127, (16, 21, 60, 104), 0.875),
        ("I2V-A14B", 28.58, 0.127, (16, 21, 60, 104), 0.9),
        ("TI2V-5B", 5.00, 0.705, (48, 21, 30, 52), None),
    ],
)
def test_the_public_checkpoints_are_known_without_a_connection(
    name: str, transformer: float, vae: float, shape: tuple[int, ...], boundary: float | None
) -> None:
    path = f"Wan-AI/Wan2.2-{name}-Diffusers"
    known, estimate = Wan22Bundle.facts_of(path), Wan22Bundle.estimate(path)
    billions = {part: count / 1e9 for part, count in estimate.parameters.items()}
    assert billions == pytest.approx({"transformer": transformer, "text_encoder": 5.68, "vae": vae}, rel=0.01)
    assert known.latent_shape(replace(PARAMS, height=480, width=832, num_frames=81)) == shape
    assert known.condition_images == {"T2V-A14B": (0, 0), "I2V-A14B": (1, 1), "TI2V-5B": (0, 1)}[name]
    if boundary is not None:
        assert known.guidance == ExpertGuidance(boundary=boundary)


def test_the_public_experts_have_twice_the_blocks_of_one() -> None:
    estimate = Wan22Bundle.estimate("Wan-AI/Wan2.2-T2V-A14B-Diffusers")
    assert estimate.num_blocks == 80
    assert {name.partition(".")[0] for name in estimate.linears} == {"transformer", "transformer_2"}


def test_checkpoints_that_are_not_wan22_are_refused_by_name() -> None:
    without = {name: config for name, config in TOY.components.items() if name != "transformer_2"}
    for configs, match in (
        (replace(TOY, components=without), r"boundary_ratio=0.875 and no transformer_2: two experts need both"),
        (replace(TOY, settings={"boundary_ratio": None}), r"boundary_ratio=None and a transformer_2"),
        (replace(TOY_TI2V, settings={}), r"a Wan 2.1 checkpoint .*Use unirl.models.wan21.family.Wan21Bundle"),
    ):
        with pytest.raises(DataError, match=match):
            facts(configs, 1)
    with pytest.raises(ValueError, match=r"height=48 is not a positive multiple of 32"):
        facts(TOY_TI2V, 1).check(replace(PARAMS, height=48))
