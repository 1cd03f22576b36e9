"""The check of a diffusers family: schedule, samples and exports must equal those of the diffusers pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from unirl.models.denoising.bundle import DiffusersBundle
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

FamilyPipeline = DiffusersPipeline[DiffusersBundle]
Size = tuple[int, int, int]
"""Height, width, frames."""
TOLERANCE = 1e-4
"""Largest difference that float32 round-off may cause, in latent or pixel units."""
SEEN = 3 * TOLERANCE
"""Smallest difference that counts as a real one."""
RANK, ALPHA = 4, 6.0
WHERE_TO_LOOK = (
    "If samples differ at guidance 1, compare encode() with encode_prompt of diffusers, then sign and time of the "
    "velocity; if only at another scale, compare the kind of guidance and the negative prompt embeddings"
)


def check_family(
    pipeline: FamilyPipeline,
    sizes: Sequence[Size] = ((32, 32, 1), (32, 48, 1)),
    scales: Sequence[float] = (1.0, 4.5),
    max_sequence_length: int = 16,
) -> None:
    """Raises AssertionError, in a sentence, unless a float32 pipeline generates the samples of diffusers.

    Runs `check_bundle`, then compares with the diffusers pipeline of the family: the sigmas of the schedule, samples of
    several prompts at every size and guidance scale, and exported adapters and models that diffusers loads. The check
    changes the weights of `pipeline`.
    """
    height, width, frames = sizes[0]
    check_bundle(pipeline, height, width, scales[-1], num_frames=frames)
    settings = [euler(size, scale, max_sequence_length) for size in sizes for scale in scales]
    check_levels(pipeline, settings[-1])
    for params in settings:
        check_samples(pipeline, params)
    check_sensitivity(pipeline, settings[len(scales) - 1])
    for check_export in (check_model_export, check_lora_export):
        with TemporaryDirectory() as folder:
            check_export(pipeline, settings[len(scales) - 1], Path(folder))


def euler(size: Size, scale: float, max_sequence_length: int, steps: int = 4) -> DiffusionSamplingParams:
    """Settings of a small sample with Euler steps."""
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


def untrained(pipeline: FamilyPipeline) -> PlainPipeline:
    """The diffusers pipeline with the weights of the checkpoint."""
    return plain_pipeline(pipeline.bundle, pipeline.bundle.untrained())


def check_levels(pipeline: FamilyPipeline, params: DiffusionSamplingParams) -> None:
    """The sigmas equal those of diffusers up to 1e-6 and float32 rounding (the first one of UniPC is 1 - 1e-6)."""
    for steps in (2, params.num_inference_steps + 1):
        asked, plain = replace(params, num_inference_steps=steps), untrained(pipeline)
        difference(pipeline, plain, PROMPTS[:1], asked, own_schedule=True)  # leaves the levels in the scheduler
        apart = (pipeline.sigmas(asked) - torch.as_tensor(plain.scheduler.sigmas).float()).abs().max()
        expect(
            bool(apart < 1.1e-6),
            f"{steps} steps: sigmas of facts.schedule differ by {apart:.2g} from those of diffusers",
        )


def check_samples(pipeline: FamilyPipeline, params: DiffusionSamplingParams) -> None:
    """Samples from the same noise are equal, with the schedule of diffusers if its scheduler takes Euler steps."""
    plain = untrained(pipeline)
    is_euler = type(plain.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    apart = difference(pipeline, plain, PROMPTS, params, own_schedule=is_euler)
    about = f"{params.height} x {params.width}, guidance {params.guidance_scale:g}"
    expect(apart < TOLERANCE, f"{about}: our samples differ by {apart:.2g} from those of diffusers. {WHERE_TO_LOOK}")


def check_sensitivity(pipeline: FamilyPipeline, params: DiffusionSamplingParams) -> None:
    """Samples depend on weights, prompts and guidance. Otherwise equal samples would prove nothing."""
    wrong = untrained(pipeline)
    with torch.no_grad():
        for part in pipeline.bundle.trained_parts(pipeline.bundle.trainable()):
            for parameter in getattr(wrong, part).parameters():
                parameter.mul_(1.05)
    expect(difference(pipeline, wrong, PROMPTS, params) > SEEN, "weights that are 5 % larger give the same samples")
    drawn = sample_with_euler(pipeline, PROMPTS, params).latents
    others = sample_with_euler(pipeline, PROMPTS[::-1], params).latents
    expect(bool((drawn - others).abs().max() > SEEN), "other prompts give the same samples")
    unguided = sample_with_euler(pipeline, PROMPTS, replace(params, guidance_scale=1.0)).latents
    guided = params.guidance_scale == 1.0 or bool((drawn - unguided).abs().max() > SEEN)
    expect(guided, f"guidance {params.guidance_scale:g} gives the same samples as 1")


def check_model_export(pipeline: FamilyPipeline, params: DiffusionSamplingParams, folder: Path) -> None:
    """An exported model with other weights is read by diffusers and by us. Changes the weights of the pipeline."""
    bundle, generator = pipeline.bundle, torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in bundle.trainable().parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    pipeline.write_model(dict(bundle.trainable().named_parameters()), folder)
    apart = pipeline.verify_model(folder, PROMPTS, params)
    expect(apart < TOLERANCE, f"samples of diffusers with the exported model differ by {apart:.2g}")
    again = type(bundle)(path=str(folder), dtype="fp32")
    expect(again.facts == bundle.facts, f"the exported model has other facts: {again.facts}")
    ours, read, saved = bundle.trainable().state_dict(), again.trainable().state_dict(), again.saved()
    expect(ours.keys() == read.keys(), "the exported model has other parameters")
    for name, tensor in ours.items():
        expect(torch.equal(read[name], tensor), f"{name} differs after the export")
        expect(saved.shapes().get(name) == tuple(tensor.shape), f"bundle.saved() has no {name} of the right shape")
        expect(torch.equal(saved.read(name), tensor), f"bundle.saved() reads other values of {name}")


def check_lora_export(pipeline: FamilyPipeline, params: DiffusionSamplingParams, folder: Path) -> None:
    """Exported adapters with random weights are read by diffusers. Adds adapters to the pipeline."""
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
    expect(apart < TOLERANCE, f"samples of diffusers with the exported adapter differ by {apart:.2g}")
    changed = difference(pipeline, untrained(pipeline), PROMPTS, params)
    expect(changed > SEEN, "the exported adapter changes nothing")
