"""The check of a family of diffusers: the same model here and there, on levels, samples, adapters and whole models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from unirl.models.denoising.diffusers_pipeline import (
    DiffusersPipeline,
    PlainPipeline,
    difference,
    plain_pipeline,
    sample_with_euler,
)
from unirl.models.loading.adapter_files import Adapter
from unirl.sde.kernels import EulerODE
from unirl.testing.bundle import PROMPTS, check_bundle, expect
from unirl.types.sampling import DiffusionSamplingParams

Size = tuple[int, int, int]
"""Height, width, frames."""
TOLERANCE = 1e-4
"""Most that float32 arithmetic may make of a difference, in latent or pixel units."""
SEEN = 3 * TOLERANCE
"""Least that a real difference must be."""
RANK, ALPHA = 4, 6.0
WHERE_TO_LOOK = (
    "At guidance 1 compare encode() with the pipeline's encode_prompt, then the velocity's sign and its time; at "
    "another scale only, the kind of guidance and the embeddings of the negative prompt"
)


def check_family(
    pipeline: DiffusersPipeline[Any],
    sizes: Sequence[Size] = ((32, 32, 1), (32, 48, 1)),
    scales: Sequence[float] = (1.0, 4.5),
    max_sequence_length: int = 16,
) -> None:
    """Raises AssertionError, in a sentence, unless a float32 pipeline draws what its own pipeline of diffusers draws.

    `check_bundle` comes first. Then: the levels of the schedule; samples of several prompts at every size and guidance
    scale; adapters and whole models as files that diffusers loads. The weights are changed: hand in a fresh pipeline.
    """
    height, width, frames = sizes[0]
    check_bundle(pipeline, height, width, scales[-1], num_frames=frames)
    settings = [euler(size, scale, max_sequence_length) for size in sizes for scale in scales]
    check_levels(pipeline, settings[-1])
    for params in settings:
        check_samples(pipeline, params)
    check_sensitivity(pipeline, settings[len(scales) - 1])
    with TemporaryDirectory() as folder:
        check_model_export(pipeline, settings[len(scales) - 1], Path(folder))
    with TemporaryDirectory() as folder:
        check_lora_export(pipeline, settings[len(scales) - 1], Path(folder))


def euler(size: Size, scale: float, max_sequence_length: int, steps: int = 4) -> DiffusionSamplingParams:
    """Euler's steps of a small sample."""
    height, width, frames = size
    return DiffusionSamplingParams(
        kernel=EulerODE(),
        num_inference_steps=steps,
        height=height,
        width=width,
        num_frames=frames,
        guidance_scale=scale,
        max_sequence_length=max_sequence_length,
    )


def untrained(pipeline: DiffusersPipeline[Any]) -> PlainPipeline:
    """diffusers' own pipeline with the checkpoint's own weights."""
    return plain_pipeline(pipeline.bundle, pipeline.bundle.untrained())


def check_levels(pipeline: DiffusersPipeline[Any], params: DiffusionSamplingParams) -> None:
    """The levels are those that diffusers walks down, to 1e-6 and what float32 adds (UniPC's first is 1 - 1e-6)."""
    for steps in (2, params.num_inference_steps + 1):
        asked, plain = replace(params, num_inference_steps=steps), untrained(pipeline)
        difference(pipeline, plain, PROMPTS[:1], asked, own_schedule=True)  # leaves the levels in the scheduler
        apart = (pipeline.sigmas(asked) - torch.as_tensor(plain.scheduler.sigmas).float()).abs().max()
        expect(
            bool(apart < 1.1e-6), f"{steps} steps: the levels of facts.schedule are {apart:.2g} from those of diffusers"
        )


def check_samples(pipeline: DiffusersPipeline[Any], params: DiffusionSamplingParams) -> None:
    """What both draw from one noise is equal, on diffusers' own levels where its scheduler takes Euler's steps."""
    plain = untrained(pipeline)
    is_euler = type(plain.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    apart = difference(pipeline, plain, PROMPTS, params, own_schedule=is_euler)
    about = f"{params.height} x {params.width}, guidance {params.guidance_scale:g}"
    expect(apart < TOLERANCE, f"{about}: our samples are {apart:.2g} from those of diffusers. {WHERE_TO_LOOK}")


def check_sensitivity(pipeline: DiffusersPipeline[Any], params: DiffusionSamplingParams) -> None:
    """Weights, texts and guidance change what is drawn: otherwise an equality is no evidence."""
    wrong = untrained(pipeline)
    with torch.no_grad():
        for part in pipeline.bundle.trained_parts(pipeline.bundle.trainable()):
            for parameter in getattr(wrong, part).parameters():
                parameter.mul_(1.05)
    expect(difference(pipeline, wrong, PROMPTS, params) > SEEN, "weights 5 % larger draw the same samples")
    drawn = sample_with_euler(pipeline, PROMPTS, params).latents
    others = sample_with_euler(pipeline, PROMPTS[::-1], params).latents
    expect(bool((drawn - others).abs().max() > SEEN), "other texts draw the same samples")
    unguided = sample_with_euler(pipeline, PROMPTS, replace(params, guidance_scale=1.0)).latents
    guided = params.guidance_scale == 1.0 or bool((drawn - unguided).abs().max() > SEEN)
    expect(guided, f"guidance {params.guidance_scale:g} draws the same samples as 1")


def check_model_export(pipeline: DiffusersPipeline[Any], params: DiffusionSamplingParams, folder: Path) -> None:
    """A changed model goes through files to diffusers and back to us. The pipeline's weights are changed."""
    bundle, generator = pipeline.bundle, torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in bundle.trainable().parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    pipeline.write_model(dict(bundle.trainable().named_parameters()), folder)
    apart = pipeline.verify_model(folder, PROMPTS, params)
    expect(apart < TOLERANCE, f"diffusers draws something else ({apart:.2g}) with the exported model")
    again = type(bundle)(path=str(folder), dtype="fp32")
    expect(again.facts == bundle.facts, f"the exported model has other facts: {again.facts}")
    ours, read, saved = bundle.trainable().state_dict(), again.trainable().state_dict(), again.saved()
    expect(ours.keys() == read.keys(), "the exported model has other parameters")
    for name, tensor in ours.items():
        expect(torch.equal(read[name], tensor), f"{name} is another after the export")
        expect(saved.shapes().get(name) == tuple(tensor.shape), f"bundle.saved() does not know {name}")
        expect(torch.equal(saved.read(name), tensor), f"bundle.saved() reads another {name}")


def check_lora_export(pipeline: DiffusersPipeline[Any], params: DiffusionSamplingParams, folder: Path) -> None:
    """Adapters that learned something go through files to diffusers. The pipeline gets adapters and other weights."""
    from peft import LoraConfig, inject_adapter_in_model

    bundle, facts = pipeline.bundle, pipeline.facts
    module = bundle.trainable()
    module.load_state_dict(bundle.untrained().state_dict())
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(facts.lora_targets))
    inject_adapter_in_model(config, module, "default")
    named = {name: parameter for name, parameter in module.named_parameters() if ".lora_" in name}
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in named.values():
            parameter.normal_(std=0.2, generator=generator)
    adapter = Adapter.from_named(named, rank=RANK, alpha=ALPHA, target_modules=facts.lora_targets)
    pipeline.write_lora(folder, adapter)
    apart = pipeline.verify_lora(folder, PROMPTS, params)
    expect(apart < TOLERANCE, f"diffusers draws something else ({apart:.2g}) with the exported adapter")
    changed = difference(pipeline, untrained(pipeline), PROMPTS, params)
    expect(changed > SEEN, "the exported adapter changes nothing")
