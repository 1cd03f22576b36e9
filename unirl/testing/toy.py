"""A complete denoising model with a few hundred weights that needs no other library, for tests.

stage = toy_stage()                        an MLP velocity field on [B, 3, 4, 4] latents
track = toy_track(stage, prompts=2)        a rollout of it: 4 samples per prompt, conditions, segment, log-probs
ToyPipeline(ToyBundle())                   prompts in, 4 x 4 images out
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import ClassVar

import torch
from torch import Tensor, nn

from unirl.models.base import components_to_load
from unirl.models.denoising.bundle import DiffusionBundle
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.models.denoising.stage import DiffusionStage
from unirl.models.loading.saved_weights import ModuleWeights, SavedWeights
from unirl.sde.guidance import NEGATIVE, Guidance
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.primitives import Texts
from unirl.types.protocols import Kernel
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

CHANNELS = 3
SIDE = 4
TEXT_WIDTH = 4


class ToyBlock(nn.Module):
    """One residual layer. It is sharded and checkpointed like the block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.proj(hidden))


class ToyDenoiser(nn.Module):
    """v(x, sigma, text) by a small MLP on the flattened latent."""

    def __init__(self, latent_size: int = CHANNELS * SIDE**2, width: int = 16, blocks: int = 1) -> None:
        super().__init__()
        self.input_layer = nn.Linear(latent_size + 1 + TEXT_WIDTH, width)
        self.blocks = nn.ModuleList(ToyBlock(width) for _ in range(blocks))
        self.output_layer = nn.Linear(width, latent_size)

    def forward(self, x: Tensor, sigma: Tensor, pooled: Tensor) -> Tensor:
        """[B, *latent]"""
        hidden = self.input_layer(torch.cat([x.flatten(1), sigma[:, None], pooled], dim=1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.output_layer(hidden).view_as(x).clone()  # FSDP2 hooks the root's output and warns about views

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Implements `Denoiser.velocity`."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.pooled is not None
        return self(x, sigma, text.pooled).float()


def toy_facts(batch_multiple: int = 4) -> LatentFacts:
    """Facts of the toy: its latents are images of 3 x 4 x 4."""
    return LatentFacts(
        family="toy",
        trainable_attr="denoiser",
        block_class_names=("ToyBlock",),
        lora_targets=("proj",),
        latent_channels=CHANNELS,
        vae_scale=1,
        patch_size=1,
        schedule=SigmaSchedule(shift=3.0),
        timestep_scale=1.0,
        guidance=Guidance(),
        batch_multiple=batch_multiple,
        text_width=TEXT_WIDTH,
    )


def toy_denoiser(seed: int = 0, **shape: int) -> ToyDenoiser:
    """A denoiser with weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ToyDenoiser(**shape)


def toy_stage(seed: int = 0, **shape: int) -> DiffusionStage:
    """A stage over a new denoiser, which is `stage.denoiser`."""
    return DiffusionStage(toy_denoiser(seed, **shape), toy_facts())


def toy_text(texts: Sequence[str]) -> TextEmbedCondition:
    """Embeddings in [-1, 1], computed from a hash of each text."""
    digests = [blake2b(text.encode(), digest_size=TEXT_WIDTH).digest() for text in texts]
    pooled = torch.tensor([[byte / 127.5 - 1 for byte in digest] for digest in digests])
    return TextEmbedCondition(embeds=pooled[:, None], pooled=pooled)


def toy_conditions(texts: Sequence[str], guidance_scale: float = 1.0) -> Conditions:
    """The conditions of the toy for `texts`."""
    conditions: Conditions = {"text": toy_text(texts)}
    if guidance_scale != 1.0:
        conditions[NEGATIVE + "text"] = toy_text([""] * len(texts))
    return conditions


def toy_params(kernel: Kernel | None = None, **changes: object) -> DiffusionSamplingParams:
    """Pinned settings: 5 denoising steps, of which 0, 1 and 3 are stochastic, and 4 samples per prompt."""
    values: dict[str, object] = {
        "kernel": kernel or FlowSDEStrategy(),
        "num_inference_steps": 5,
        "samples_per_prompt": 4,
        "height": SIDE,
        "width": SIDE,
        "sde_indices": (0, 1, 3),
    }
    params = DiffusionSamplingParams(**(values | changes))  # type: ignore[arg-type]
    if params.sigmas is not None:
        return params.pinned(0, params.sigmas)
    return params.pinned(0, tuple(toy_facts().schedule.sigmas(params.num_inference_steps, SIDE**2).tolist()))


def toy_request(prompts: int = 2, params: DiffusionSamplingParams | None = None, step: int = 0) -> RolloutReq:
    """A training request for `prompts` prompts."""
    params = params or toy_params()
    groups = [f"p{i}@0" for i in range(prompts)]
    return RolloutReq(
        sample_ids=groups,
        group_ids=groups,
        primitives={"text": Texts(texts=[f"prompt {i}" for i in range(prompts)])},
        metadata=[{"index": i} for i in range(prompts)],
        tracks={"image": TrackSpec(sampling=params)},
        purpose="r",
        step=step,
        weights="live",
        weight_version=0,
    ).expand(params.samples_per_prompt)


def toy_track(
    stage: DiffusionStage, prompts: int = 2, params: DiffusionSamplingParams | None = None, step: int = 0
) -> RolloutTrack[LatentSegment]:
    """A rollout of `stage`. The reward is minus the mean square of the sample, the advantage is it minus its mean."""
    params = params or toy_params()
    req = toy_request(prompts, params, step)
    texts = req.primitives["text"]
    assert isinstance(texts, Texts)
    conditions = toy_conditions(texts.texts, params.guidance_scale)
    noise = NoiseSource(params.seed, req.purpose, step)
    start_ids = req.group_ids if params.init_same_noise else req.sample_ids
    x_T = noise.normal(start_ids, "x", stage.facts.latent_shape(params))  # noqa: N806
    with torch.no_grad():
        segment = stage.sample(conditions, x_T, params, noise, req.sample_ids)
    rewards = -segment.final.float().square().flatten(1).mean(1)
    return RolloutTrack(
        sample_ids=req.sample_ids,
        group_ids=req.group_ids,
        prompts=texts.texts,
        conditions=conditions,
        segment=segment,
        rewards=rewards,
        component_rewards={"small": rewards},
        advantages=rewards - rewards.mean(),
        weight=torch.ones(len(req)),
        weight_version=torch.zeros(len(req), dtype=torch.int64),
    )


class _HashEncoder:
    components: tuple[str, ...] = ()

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        return toy_text(texts)


class _ImageDecoder:
    components: tuple[str, ...] = ()

    def decode(self, latents: Tensor) -> Tensor:
        return (latents / 2 + 0.5).clamp(0, 1)


class _ImageEncoder:
    components: tuple[str, ...] = ()

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels * 2 - 1


class ToyBundle(DiffusionBundle):
    """The toy as a bundle. Recipes in tests use it as a target."""

    toy: ClassVar[Mapping[str, object]] = {}

    def __init__(
        self,
        components: Sequence[str] | None = None,
        *,
        init_seed: int = 0,
        width: int = 16,
        blocks: int = 1,
        meta_init: bool = False,
    ) -> None:
        components_to_load(components, ("denoiser",), "denoiser")
        self.fresh = partial(toy_denoiser, init_seed, width=width, blocks=blocks)
        denoiser = self.fresh().to("meta") if meta_init else self.fresh()
        super().__init__({"denoiser": denoiser}, toy_facts(), dtype=torch.float32, device=torch.device("cpu"))

    def saved(self) -> SavedWeights:
        return ModuleWeights(self.fresh())

    def denoiser(self) -> ToyDenoiser:
        denoiser = self.trainable()
        assert isinstance(denoiser, ToyDenoiser)
        return denoiser

    def text_encoder(self) -> _HashEncoder:
        return _HashEncoder()

    def decoder(self) -> _ImageDecoder:
        return _ImageDecoder()

    def encoder(self) -> _ImageEncoder:
        return _ImageEncoder()


class ToyPipeline(DiffusionPipeline[ToyBundle]):
    """The general pipeline with the toy bundle."""
