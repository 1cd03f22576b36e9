"""Every family of diffusers here and in diffusers is the same model: levels, latents, pixels, adapters, whole models.

The oracle is the family's own pipeline of diffusers, on toy weights in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.family_cases import CASES, FamilyCase, Size, built
from unirl.models.export import Adapter
from unirl.models.plain import DiffusersPipeline, difference, draw_by_euler, plain_pipeline
from unirl.sde.kernels import EulerODE, FlowSDEStrategy
from unirl.testing.bundle import check_bundle, rollout_of
from unirl.types.sampling import DiffusionSamplingParams

PROMPTS = ("a red circle", "two blue squares on the left", "x")
RANK, ALPHA = 4, 6.0
TOLERANCE = 1e-4

each_family = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def params_of(
    case: FamilyCase, size: Size, scale: float = 1.0, steps: int = 4, **changes: Any
) -> DiffusionSamplingParams:
    """Euler's steps of a small sample."""
    height, width, frames = size
    values: dict[str, Any] = {
        "kernel": EulerODE(),
        "num_inference_steps": steps,
        "height": height,
        "width": width,
        "num_frames": frames,
        "guidance_scale": scale,
        "max_sequence_length": case.max_sequence_length,
    }
    return DiffusionSamplingParams(**(values | changes))


def untrained(pipeline: DiffusersPipeline[Any]) -> Any:
    return plain_pipeline(pipeline.bundle, pipeline.bundle.untrained())


def is_euler(plain: Any) -> bool:
    return type(plain.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"


@each_family
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("scale", [0, 1])
def test_our_sampler_draws_what_diffusers_draws(case: FamilyCase, size: int, scale: int) -> None:
    pipeline = built(case)
    plain = untrained(pipeline)
    params = params_of(case, case.sizes[size], case.scales[min(scale, len(case.scales) - 1)])
    assert difference(pipeline, plain, PROMPTS, params, own_schedule=is_euler(plain)) < TOLERANCE


@each_family
@pytest.mark.parametrize("steps", [2, 5])
def test_our_levels_are_those_that_diffusers_walks_down(case: FamilyCase, steps: int) -> None:
    pipeline = built(case)
    plain, params = untrained(pipeline), params_of(case, case.sizes[1], steps=steps)
    difference(pipeline, plain, PROMPTS[:1], params, own_schedule=True)  # draws, and leaves the levels in the scheduler
    levels = torch.as_tensor(plain.scheduler.sigmas).float()
    assert (pipeline.sigmas(params) - levels).abs().max() < 1e-6


def drawn_apart(
    pipeline: DiffusersPipeline[Any],
    texts: Sequence[str],
    params: DiffusionSamplingParams,
    others: Sequence[str],
    changed: DiffusionSamplingParams,
) -> float:
    """Max abs difference of the latents that we draw from one noise for other texts, or at another guidance."""
    one, other = draw_by_euler(pipeline, texts, params), draw_by_euler(pipeline, others, changed)
    return float((one.latents - other.latents).abs().max())


@each_family
def test_text_guidance_and_every_weight_matter(case: FamilyCase) -> None:
    """Otherwise an equality above would be no evidence."""
    pipeline = built(case)
    params = params_of(case, case.sizes[0], case.scales[-1])
    wrong = untrained(pipeline)
    for part in pipeline.bundle.trained_parts(pipeline.bundle.untrained()):
        with torch.no_grad():
            for parameter in getattr(wrong, part).parameters():
                parameter.mul_(1.05)
    assert difference(pipeline, wrong, PROMPTS, params) > 3 * TOLERANCE
    other = params_of(case, case.sizes[0], case.scales[0])
    texts = pipeline.embed(PROMPTS, case.max_sequence_length).embeds
    assert (texts[0] - texts[1]).abs().max() > 1e-3
    assert drawn_apart(pipeline, PROMPTS, params, PROMPTS[::-1], params) > 3 * TOLERANCE
    assert params == other or drawn_apart(pipeline, PROMPTS, params, PROMPTS, other) > 3 * TOLERANCE


@each_family
def test_the_promises_of_every_model_hold(case: FamilyCase) -> None:
    height, width, frames = case.sizes[0]
    check_bundle(built(case), height, width, case.scales[-1], num_frames=frames)


@each_family
def test_every_weight_that_the_output_depends_on_gets_a_gradient(case: FamilyCase) -> None:
    pipeline = case.build()
    params = params_of(case, case.sizes[0], kernel=FlowSDEStrategy())
    module, moved = pipeline.bundle.trainable(), set()
    with torch.no_grad():  # what is zero at first (gates, last layers) hides what stands behind it
        generator = torch.Generator().manual_seed(0)
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05, generator=generator)
    track = rollout_of(pipeline, params)
    replay = pipeline.stage.replay(track.conditions, track.segment, track.segment.sde_indices)
    replay.velocity.square().mean().backward()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and bool(parameter.grad.any()):
            moved.add(name)
    still = {name for name, _ in module.named_parameters()} - moved
    unexpected = [name for name in sorted(still) if not name.startswith(case.without_gradient or ("-",))]
    assert not unexpected
    assert all(any(name.startswith(prefix) for name in still) for prefix in case.without_gradient)


def with_adapters(case: FamilyCase) -> DiffusersPipeline[Any]:
    """A model whose adapters have learned something, as a backend would leave it."""
    from peft import LoraConfig, inject_adapter_in_model

    pipeline = case.build()
    module = pipeline.bundle.trainable()
    inject_adapter_in_model(
        LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(pipeline.facts.lora_targets)), module, "default"
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.2, generator=generator)
    return pipeline


@each_family
def test_diffusers_draws_the_same_with_the_exported_adapter(case: FamilyCase, tmp_path: Path) -> None:
    pipeline = with_adapters(case)
    params = params_of(case, case.sizes[0], case.scales[-1])
    named = {name: p.detach() for name, p in pipeline.bundle.trainable().named_parameters() if ".lora_" in name}
    adapter = Adapter.from_named(named, rank=RANK, alpha=ALPHA, target_modules=pipeline.facts.lora_targets)
    pipeline.write_lora(tmp_path, adapter)
    assert pipeline.verify_lora(tmp_path, PROMPTS, params) < TOLERANCE
    assert difference(pipeline, untrained(pipeline), PROMPTS, params) > 3 * TOLERANCE


@each_family
def test_diffusers_loads_the_exported_model_and_so_do_we(case: FamilyCase, tmp_path: Path) -> None:
    pipeline = case.build()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in pipeline.bundle.trainable().parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    params = params_of(case, case.sizes[0], case.scales[-1])
    folder = pipeline.write_model(dict(pipeline.bundle.trainable().named_parameters()), tmp_path / "model")
    assert pipeline.verify_model(folder, PROMPTS, params) < TOLERANCE
    again = type(pipeline)(type(pipeline.bundle)(path=str(folder), dtype="fp32"))
    assert again.facts == pipeline.facts
    ours, theirs = pipeline.bundle.trainable().state_dict(), again.bundle.trainable().state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    saved = again.bundle.saved()
    assert saved.shapes() == {name: tuple(tensor.shape) for name, tensor in ours.items()}
    assert all(torch.equal(saved.read(name), ours[name]) for name in list(ours)[::5])
