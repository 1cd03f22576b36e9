"""The check of a denoising model: the properties that sampling, training and export need of every family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from unirl.models.base import Pipeline
from unirl.models.denoising.pipeline import DiffusionPipeline, LatentPipeline
from unirl.models.value_head import pooled_text
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.batch import tensors_of
from unirl.types.conditions import TextEmbedCondition
from unirl.types.primitives import Images, MediaRef, PromptImages, Texts, Videos
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams, Sampling
from unirl.types.segments import LatentSegment

PROMPTS = ("a red circle", "a blue square on the left", "")
TEXT_TOKENS = 16


def check_bundle(
    pipeline: DiffusionPipeline, height: int, width: int, guidance_scale: float = 3.0, num_frames: int = 1
) -> None:
    """Raises AssertionError, in a sentence, unless the model behind `pipeline` has the properties of every family.

    The facts name existing blocks and layers. Only the trained module requires gradients. Text embeddings have one
    length and the declared width; latents have the declared shape; pixels are in [0, 1] on uint8 levels. The bits of a
    sample do not depend on chunk size, order or other rows. Replay on unchanged weights equals the rollout bit for
    bit. Every trained block gets gradients. Embeddings do not depend on what is cached.
    """
    _texts(pipeline)
    check_latents(pipeline, height, width, guidance_scale, num_frames)
    _embeddings(pipeline)


def check_latents(
    pipeline: LatentPipeline, height: int, width: int, guidance_scale: float = 3.0, num_frames: int = 1
) -> None:
    """The part of `check_bundle` that does not depend on text encoders, for models whose network reads the prompts."""
    params = DiffusionSamplingParams(
        kernel=FlowSDEStrategy(),
        num_inference_steps=3,
        height=height,
        width=width,
        num_frames=num_frames,
        guidance_scale=guidance_scale,
        max_sequence_length=TEXT_TOKENS,
    )
    check_facts(pipeline)
    check_gradient_flags(pipeline)
    with TemporaryDirectory() as folder:
        rollout = _Rollouts(pipeline, params, Path(folder))
        for check in (_shapes, _pixels, _row_bits, _replay, _gradients):
            check(pipeline, rollout)


class _Rollouts:
    """Small rollouts of one pipeline."""

    def __init__(self, pipeline: LatentPipeline, params: DiffusionSamplingParams, folder: Path) -> None:
        self.pipeline = pipeline
        self.params = params.pinned(0, tuple(pipeline.sigmas(params).tolist()))
        self.prompt_images = self._prompt_images(pipeline.facts.condition_images[0], folder)

    def _prompt_images(self, count: int, folder: Path) -> list[tuple[MediaRef, ...]]:
        """Files with `count` images for each prompt."""
        from PIL import Image

        generator = torch.Generator().manual_seed(0)
        refs = []
        for i in range(len(PROMPTS)):
            paths = [folder / f"{i}-{j}.png" for j in range(count)]
            for path in paths:
                size = (self.params.height, self.params.width, 3)
                pixels = torch.randint(256, size, generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(path)
            refs.append(tuple(MediaRef("image", "condition", str(path)) for path in paths))
        return refs

    def __call__(
        self, chunk_size: int, order: Callable[[RolloutReq], RolloutReq] = lambda req: req
    ) -> RolloutTrack[LatentSegment]:
        req = request_of(PROMPTS, "image", self.params)
        if any(self.prompt_images):
            req = req.replace(primitives={**req.primitives, "images": PromptImages(per_prompt=self.prompt_images)})
        req = req.expand(2)
        with torch.no_grad():
            return self.pipeline.generate(order(req), chunk_size).tracks["image"].sampled_as(LatentSegment)


def request_of(texts: Sequence[str], track: str, sampling: Sampling, step: int = 0) -> RolloutReq:
    """A training request with one row per prompt."""
    groups = [f"p{i}@0" for i in range(len(texts))]
    return RolloutReq(
        sample_ids=groups,
        group_ids=groups,
        primitives={"text": Texts(texts=list(texts))},
        metadata=[{"index": i} for i in range(len(texts))],
        tracks={track: TrackSpec(sampling=sampling)},
        purpose="r",
        step=step,
    )


def rollout_of(pipeline: LatentPipeline, params: DiffusionSamplingParams) -> RolloutTrack[LatentSegment]:
    """Two samples of each prompt of the checks, with condition images if the model needs any."""
    with TemporaryDirectory() as folder:
        return _Rollouts(pipeline, params, Path(folder))(8)


def expect(holds: bool, claim: str) -> None:
    """Raises AssertionError with `claim` if it does not hold."""
    if not holds:
        raise AssertionError(claim)


def check_facts(pipeline: Pipeline) -> None:
    """Raises AssertionError unless the blocks and layers that the facts name exist."""
    facts, module = pipeline.facts, pipeline.bundle.trainable()
    classes = {type(child).__name__ for child in module.modules()}
    for name in facts.block_class_names:
        expect(name in classes, f"facts.block_class_names: the trained module has no {name}")
    linears = [name for name, child in module.named_modules() if isinstance(child, torch.nn.Linear)]
    for suffix in facts.lora_targets:
        exists = any(name == suffix or name.endswith("." + suffix) for name in linears)
        expect(exists, f"facts.lora_targets: the trained module has no linear layer named {suffix}")


def check_gradient_flags(pipeline: Pipeline) -> None:
    """Raises AssertionError unless only the trained module requires gradients and all modules are in eval mode."""
    for name, module in pipeline.bundle.modules.items():
        trained = name == pipeline.facts.trainable_attr
        requires_grad = any(parameter.requires_grad for parameter in module.parameters())
        expect(requires_grad == trained, f"component {name}: requires_grad is {requires_grad}, trained is {trained}")
        expect(not module.training, f"component {name} is not in eval mode")


def check_gradients(pipeline: Pipeline, logp: Tensor) -> None:
    """Raises AssertionError unless the gradient of the log-probs reaches every trained block."""
    parameters = {name: p for name, p in pipeline.bundle.trainable().named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(logp.sum(), list(parameters.values()), allow_unused=True)
    moved = {name for name, g in zip(parameters, gradients, strict=True) if g is not None and bool(g.abs().sum() > 0)}
    for block in blocks_of(pipeline):
        expect(any(name.startswith(block + ".") for name in moved), f"no gradient reaches block {block}")


def blocks_of(pipeline: Pipeline) -> list[str]:
    """Names of the blocks of the trained module."""
    names = pipeline.facts.block_class_names
    return [name for name, child in pipeline.bundle.trainable().named_modules() if type(child).__name__ in names]


def _texts(pipeline: DiffusionPipeline) -> None:
    encoded = [pipeline.embed([text], TEXT_TOKENS) for text in PROMPTS]
    rows = [row for row in encoded if isinstance(row, TextEmbedCondition)]
    if not rows:
        expect(pipeline.facts.text_width is None, "facts.text_width is set, but the network embeds the text itself")
        return
    lengths = sorted({row.embeds.shape[1] for row in rows})
    expect(
        len(lengths) == 1,
        f"prompts have embeddings of {lengths} tokens: the text encoder must pad all of them to one length",
    )
    for row in rows:
        for mask in (row.mask, row.mask_2):
            expect(
                mask is None or mask.dtype == torch.bool, "a text condition's mask must be bool, True at real tokens"
            )
        pooled = pooled_text({"text": row})
        width = None if pooled is None else pooled.shape[1]
        expect(
            width == pipeline.facts.text_width,
            f"facts.text_width is {pipeline.facts.text_width}, but pooled embeddings have the width {width}",
        )


def _shapes(pipeline: LatentPipeline, rollout: _Rollouts) -> None:
    shape = pipeline.facts.latent_shape(rollout.params)
    sampled = tuple(rollout(8).segment.final.shape[1:])
    expect(sampled == shape, f"facts.latent_shape is {shape}, but samples have {sampled}")


def _pixels(pipeline: LatentPipeline, rollout: _Rollouts) -> None:
    pixels, params = _pixels_of(rollout(8)), rollout.params
    frames = () if pipeline.facts.frame_scale is None else (params.num_frames,)
    size = (3, *frames, params.height, params.width)
    expect(tuple(pixels.shape[1:]) == size, f"decoded pixels have shape {tuple(pixels.shape[1:])} instead of {size}")
    expect(pixels.dtype is torch.uint8 and pixels.device.type == "cpu", "decoded pixels are not uint8 on the host")


def _row_bits(pipeline: LatentPipeline, rollout: _Rollouts) -> None:
    whole = rollout(6)
    for size in (1, 2, 3, 4, 5, 8):
        claim = f"chunks of {size} rows give other bits than one chunk: does the network pad rows to the longest text?"
        _expect_equal(rollout(size), whole, claim)
    order = [3, 0, 5, 1, 4, 2]
    _expect_equal(rollout(4, lambda req: req.select(order)), whole.select(order), "a permuted request gives other bits")
    _expect_equal(rollout(4, lambda req: req.slice(2, 3)), whole.slice(2, 3), "a row alone gives other bits")


def _expect_equal(actual: RolloutTrack[LatentSegment], expected: RolloutTrack[LatentSegment], claim: str) -> None:
    same = torch.equal(actual.segment.latents, expected.segment.latents)
    same = same and torch.equal(actual.segment.logp, expected.segment.logp)
    expect(same and torch.equal(_pixels_of(actual), _pixels_of(expected)), claim)


def _replay(pipeline: LatentPipeline, rollout: _Rollouts) -> None:
    track = rollout(8)
    segment = track.segment
    with torch.no_grad():
        together = pipeline.stage.replay(track.conditions, segment, segment.sde_indices)
        alone = [pipeline.stage.replay(track.conditions, segment, [step]) for step in segment.sde_indices]
    expect(torch.equal(together.logp, segment.logp), "replay of all steps differs from the rollout's log-prob")
    singly = torch.cat([replay.logp for replay in alone], dim=1)
    expect(torch.equal(singly, segment.logp), "replay step by step differs from the rollout's log-prob")


def _gradients(pipeline: LatentPipeline, rollout: _Rollouts) -> None:
    track = rollout(8)
    check_gradients(pipeline, pipeline.stage.replay(track.conditions, track.segment, track.segment.sde_indices).logp)


def _embeddings(pipeline: DiffusionPipeline) -> None:
    together = pipeline.embed(PROMPTS, TEXT_TOKENS)
    pipeline.embed.cache.clear()
    alone = [pipeline.embed([text], TEXT_TOKENS) for text in reversed(PROMPTS)]
    kind: Any = type(together)
    again = kind.concat(alone[::-1])
    same = all(torch.equal(a, b) for a, b in zip(tensors_of(together), tensors_of(again), strict=True))
    expect(same, "embeddings depend on the other texts that are encoded")


def _pixels_of(track: RolloutTrack) -> Tensor:
    """[B, 3, H, W] uint8 for images, [B, 3, F, H, W] for videos."""
    if isinstance(track.decoded, Videos):
        return track.decoded.stacked()
    assert isinstance(track.decoded, Images)
    return track.decoded.pixels
