"""A trained SD3 as a plain diffusers pipeline, and the proof that it draws what our sampler draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.hub import components
from unirl.models.pipeline import DiffusionPipeline
from unirl.models.quiet import quiet_libraries
from unirl.models.sd3.architecture import ENCODERS
from unirl.models.sd3.bundle import SD3Bundle
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import TextEmbedCondition
from unirl.types.sampling import DiffusionSamplingParams

PlainPipeline = Any
"""diffusers' StableDiffusion3Pipeline, which has no types."""


TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")


def plain_pipeline(bundle: SD3Bundle, transformer: nn.Module) -> PlainPipeline:
    """diffusers' own pipeline around `transformer` and the bundle's frozen components; absent ones are None."""
    import diffusers

    frozen = {name: bundle.modules.get(name) for name in (*ENCODERS, "vae")}
    tokenizers = {name: bundle.tokenizers.get(name) for name in TOKENIZERS}
    with quiet_libraries():
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(dict(bundle.architecture.scheduler))
        plain = diffusers.StableDiffusion3Pipeline(transformer=transformer, scheduler=scheduler, **frozen, **tokenizers)
    return without_bar(plain)


def without_bar(plain: PlainPipeline) -> PlainPipeline:
    """The same pipeline without a progress bar."""
    plain.set_progress_bar_config(disable=True)
    return plain


def write_model(bundle: SD3Bundle, tensors: Mapping[str, Tensor], folder: Path) -> Path:
    """A diffusers directory of the whole model whose transformer has `tensors` in place of its own.

    `tensors` are parameters of the transformer by name: all that were trained, or a merged state.
    """
    transformer = bundle.untrained()
    unexpected = transformer.load_state_dict(dict(tensors), strict=False).unexpected_keys
    if unexpected:
        raise ValueError(f"the transformer has no parameter {unexpected[0]!r} ({len(unexpected)} unknown names)")
    with quiet_libraries():
        plain_pipeline(bundle, transformer).save_pretrained(folder)
    return folder


def verify_lora(
    pipeline: DiffusionPipeline[SD3Bundle], folder: Path, texts: Sequence[str], params: DiffusionSamplingParams
) -> float:
    """Max abs difference between our sampler with the weights of now and diffusers with the adapter in `folder`."""
    bundle = pipeline.bundle
    plain = plain_pipeline(bundle, bundle.untrained().to(bundle.device))
    with quiet_libraries():
        plain.load_lora_weights(str(folder))
    return difference(pipeline, plain, texts, params)


def verify_model(
    pipeline: DiffusionPipeline[SD3Bundle], folder: Path, texts: Sequence[str], params: DiffusionSamplingParams
) -> float:
    """Max abs difference between our sampler with the weights of now and diffusers with the model in `folder`."""
    import diffusers

    bundle = pipeline.bundle
    # diffusers wants to be told what a directory leaves out.
    absent = {name: None for name in (*ENCODERS, *TOKENIZERS, "vae") if name not in components(folder)}
    with quiet_libraries():
        plain = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, dtype=bundle.dtype, **absent)
    return difference(pipeline, without_bar(plain).to(bundle.device), texts, params)


@torch.no_grad()
def difference(
    pipeline: DiffusionPipeline[SD3Bundle],
    plain: PlainPipeline,
    texts: Sequence[str],
    params: DiffusionSamplingParams,
) -> float:
    """Max abs difference of what both draw from one noise with Euler's steps.

    Of pixels in [0, 1] when the model has all encoders and a VAE; else of latents, diffusers given our embeddings.
    """
    params = dataclasses.replace(params, solver=None, sde_indices=(), sde_steps=None, trajectory_dtype="fp32")
    params = params.pinned(0, tuple(pipeline.sigmas(params).tolist()))
    noise = NoiseSource(params.seed, "eval", 0)
    ids = [f"verify:{i}" for i in range(len(texts))]
    x_T = pipeline.initial_noise(noise, ids, params)  # noqa: N806
    ours = pipeline.stage.sample(pipeline.encode(texts, params), x_T, params, noise, ids).final
    bundle = pipeline.bundle
    if all(name in bundle.modules for name in (*ENCODERS, "vae")):
        with bundle.resident(bundle.frozen), quiet_libraries():
            theirs = _drawn_from_prompts(plain, texts, x_T, params)
            return _max_abs(pipeline.decoder.decode(ours), theirs)
    with quiet_libraries():
        return _max_abs(ours, _drawn_from_embeddings(pipeline, plain, texts, x_T, params))


def _drawn_from_prompts(
    plain: PlainPipeline,
    texts: Sequence[str],
    x_T: Tensor,  # noqa: N803
    params: DiffusionSamplingParams,
) -> Tensor:
    """Pixels [B, 3, H, W] of diffusers' whole pipeline."""
    images: Tensor = plain(
        prompt=list(texts),
        negative_prompt=[params.negative_prompt] * len(texts),
        height=params.height,
        width=params.width,
        guidance_scale=params.guidance_scale,
        num_inference_steps=params.num_inference_steps,
        sigmas=base_grid(params.num_inference_steps),
        latents=x_T.clone(),
        max_sequence_length=params.max_sequence_length,
        output_type="pt",
    ).images
    return images


def _drawn_from_embeddings(
    pipeline: DiffusionPipeline[SD3Bundle],
    plain: PlainPipeline,
    texts: Sequence[str],
    x_T: Tensor,  # noqa: N803
    params: DiffusionSamplingParams,
) -> Tensor:
    """Latents [B, C, H, W] of diffusers' pipeline, given our text embeddings."""
    positive = pipeline.embed(texts, params.max_sequence_length)
    negative = pipeline.embed([params.negative_prompt] * len(texts), params.max_sequence_length)
    latents: Tensor = plain(
        **_embedding_arguments("", positive),
        **_embedding_arguments("negative_", negative),
        # Only checked, since the latents are given; diffusers assumes 8 pixels per latent element.
        height=x_T.shape[-2] * plain.vae_scale_factor,
        width=x_T.shape[-1] * plain.vae_scale_factor,
        guidance_scale=params.guidance_scale,
        num_inference_steps=params.num_inference_steps,
        sigmas=base_grid(params.num_inference_steps),
        latents=x_T.clone(),
        output_type="latent",
    ).images
    return latents


def _embedding_arguments(prefix: str, condition: TextEmbedCondition) -> dict[str, Tensor | None]:
    return {f"{prefix}prompt_embeds": condition.embeds, f"{prefix}pooled_prompt_embeds": condition.pooled}


def base_grid(num_inference_steps: int) -> list[float]:
    """The unshifted levels 1 - i / T that diffusers' scheduler shifts to our schedule."""
    return [1.0 - i / num_inference_steps for i in range(num_inference_steps)]


def _max_abs(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).abs().max())
