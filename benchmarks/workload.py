"""The workload of benchmarks of the loop: a network like that of SD3 in a stage, its train stack, and sampled rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unirl.algorithms.base import StageAlgorithm
from unirl.models.denoising.stage import DiffusionStage
from unirl.models.sd3.family import SD3Denoiser
from unirl.sde.guidance import Guidance
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.sde.schedule import SigmaSchedule
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import EmaLoraConfig
from unirl.train.stack import TrainStack
from unirl.types.conditions import TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.protocols import Kernel
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

POOLED_WIDTH = 64


@dataclass(frozen=True)
class Workload:
    """Sizes of the network and of the work."""

    num_layers: int
    num_heads: int
    head_dim: int
    latent_side: int
    rows: int
    micro: int
    steps: int
    num_tokens: int = 16

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


WORKLOADS = {
    "30m": Workload(num_layers=3, num_heads=8, head_dim=64, latent_side=16, rows=8, micro=8, steps=6),
    "toy": Workload(num_layers=2, num_heads=4, head_dim=16, latent_side=8, rows=8, micro=8, steps=6),
}


class BareBundle:
    """The smallest bundle that the backend accepts: a network and its facts."""

    def __init__(self, work: Workload) -> None:
        from diffusers import SD3Transformer2DModel

        torch.manual_seed(0)
        self.transformer = SD3Transformer2DModel(
            sample_size=work.latent_side,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=work.num_layers,
            attention_head_dim=work.head_dim,
            num_attention_heads=work.num_heads,
            joint_attention_dim=work.width,
            caption_projection_dim=work.width,
            pooled_projection_dim=POOLED_WIDTH,
            pos_embed_max_size=work.latent_side,
            qk_norm="rms_norm",
        ).eval()
        self.facts = LatentFacts(
            family="sd3",
            block_class_names=("JointTransformerBlock",),
            lora_targets=(),
            latent_channels=16,
            vae_scale=1,
            patch_size=2,
            schedule=SigmaSchedule(shift=3.0),
            guidance=Guidance(),
            batch_multiple=4,
            text_width=POOLED_WIDTH,
        )

    def trainable(self) -> torch.nn.Module:
        """The network."""
        return self.transformer


class Bench:
    """A network with its stage and backend, and a method that samples rows to train on."""

    def __init__(self, work: Workload, kernel: Kernel | None = None, ema_lora_cfg: EmaLoraConfig | None = None) -> None:
        """
        Args:
            kernel: the SDE kernel of the rollout; None = Flow-SDE.
            ema_lora_cfg: settings of the snapshot `old`, for losses that read it.
        """
        self.work = work
        self.bundle = BareBundle(work)
        self.net = self.bundle.transformer
        self.stage = DiffusionStage(SD3Denoiser(self.net, self.bundle.facts), self.bundle.facts)
        self.backend = FSDPBackend(
            self.bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-6), ema_lora_cfg=ema_lora_cfg
        )
        sigmas = tuple(self.bundle.facts.schedule.sigmas(work.steps, 64).tolist())
        params = DiffusionSamplingParams(kernel=kernel or FlowSDEStrategy(), num_inference_steps=work.steps)
        self.params = params.pinned(0, sigmas)
        self.shape = (16, work.latent_side, work.latent_side)
        self.noise = NoiseSource(0, "r", 0)

    # Each loss needs its own kind of stage, so the type of `stage` is Any.
    def stack(self, algorithm: StageAlgorithm[Any], num_updates: int, stage: Any = None) -> TrainStack:
        """Returns a train stack for `algorithm`. `stage` replaces the stage of this bench."""
        return TrainStack(
            self.backend,
            algorithm,
            stage or self.stage,
            micro_batch_size=self.work.micro,
            num_updates_per_batch=num_updates,
        )

    def ids(self, count: int) -> list[str]:
        return [f"p{i}" for i in range(count)]

    def conditions(self, count: int) -> dict[str, TextEmbedCondition]:
        embeds = torch.randn(count, self.work.num_tokens, self.work.width)
        return {"text": TextEmbedCondition(embeds=embeds, pooled=torch.randn(count, POOLED_WIDTH))}

    @torch.no_grad()
    def track(self, count: int) -> RolloutTrack:
        """Returns a sampled track of `count` rows with advantages, two rows per prompt."""
        conditions, ids = self.conditions(count), self.ids(count)
        segment = self.stage.sample(conditions, self.noise.normal(ids, "x", self.shape), self.params, self.noise, ids)
        return RolloutTrack(
            sample_ids=ids,
            group_ids=[f"g{i // 2}" for i in range(count)],
            prompts=count * [""],
            conditions=dict(conditions),
            segment=segment,
            advantages=torch.randn(count),
            weight=torch.ones(count),
            weight_version=torch.zeros(count, dtype=torch.int64),
        )

    def shapes(self, rows: int, trained: int) -> dict[str, int | float | str]:
        """Returns the sizes of a measurement with `rows` rows and `trained` trained steps or noise levels per row."""
        parameters = sum(p.numel() for p in self.net.parameters())
        return {
            "parameters_m": round(parameters / 1e6, 2),
            "rows": rows,
            "micro": self.work.micro,
            "denoising_steps": self.work.steps,
            "trained_steps": trained,
            "image_tokens": (self.work.latent_side // 2) ** 2,
        }


@dataclass(frozen=True)
class Passes:
    """Network passes of a train step in addition to one forward and backward per trained step of each row."""

    forwards: int = 0
    """Forwards without gradient per trained step, for other policies or for steps that are only sampled."""
    later_forwards: int = 0
    """Such forwards after the first update, for the policy that sampled. Until then it is the trained policy."""
    value: bool = False
    """True adds forward and backward of the value head, and a forward for the values in the advantages."""
    follower: bool = False
    """True adds one update of a moving average of the weights."""


def bare_step(bench: Bench, track: RolloutTrack, num_updates: int, trained: int, passes: Passes) -> Callable[[], None]:
    """Returns a function with only the network calls, gradient clips and optimizer steps of a train step."""
    net, micro = bench.net, bench.work.micro
    text = track.conditions["text"]
    x, t = torch.randn(micro, *bench.shape), torch.full((micro,), 500.0)
    modules = [net, bench.stage.value_head] if passes.value else [net]
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-6, fused=True)
    shadow = [p.detach().clone() for p in net.parameters()] if passes.follower else []
    micros = [slice(i, i + micro) for i in range(0, len(track), micro)]
    per_update = len(micros) // num_updates

    def forward(rows: slice) -> torch.Tensor:
        return net(x, text.embeds[rows], text.pooled[rows], t, return_dict=False)[0].square().mean()

    def value(rows: slice) -> torch.Tensor:
        return bench.stage.value_head(x, t / 1000.0, text.pooled[rows]).square().mean()

    @torch.no_grad()
    def anchors() -> None:
        for m, rows in enumerate(micros):
            count = passes.forwards + passes.later_forwards * (m >= per_update)
            for _ in range(trained):
                for _ in range(count):
                    forward(rows)
                if passes.value:
                    value(rows)

    def step() -> None:
        anchors()
        for m, rows in enumerate(micros):
            for _ in range(trained):
                loss = forward(rows) + value(rows) if passes.value else forward(rows)
                loss.backward()
            if (m + 1) % per_update == 0:
                for module in modules:
                    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if shadow:
            torch._foreach_lerp_(shadow, [p.detach() for p in net.parameters()], 0.5)

    return step
