"""A complete denoising model with a few hundred weights that needs no other library, for tests.

stage = toy_stage()                        an MLP velocity field on [B, 3, 4, 4] latents
track = toy_track(stage, prompts=2)        a rollout of it: 4 samples per prompt, conditions, segment, log-probs
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor, nn

from unirl.models.denoising.stage import DiffusionStage
from unirl.sde.guidance import NEGATIVE, Guidance
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.sde.schedule import SigmaSchedule
from unirl.testing.bundle import request_of
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.primitives import Texts
from unirl.types.protocols import Kernel
from unirl.types.rollout_req import RolloutReq
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

    def block_chains(self) -> list[list[nn.Module]]:
        """Implements `BlockwiseDenoiser.block_chains`."""
        return [list(self.blocks)]

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
    schedule = toy_facts().schedule.sigmas(params.num_inference_steps, SIDE**2)
    return params.pinned(0, tuple(schedule.tolist()) if params.sigmas is None else params.sigmas)


def toy_request(prompts: int = 2, params: DiffusionSamplingParams | None = None, step: int = 0) -> RolloutReq:
    """A training request for `prompts` prompts."""
    params = params or toy_params()
    req = request_of([f"prompt {i}" for i in range(prompts)], "image", params, step)
    return req.expand(params.samples_per_prompt)


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
