"""Our rollout and our train step over the bare network calls that they cannot avoid.

    python benchmarks/loop_overhead.py [--scale toy|30m] [--pairs 10] [--json out.json]

Rollout: `DiffusionStage.sample` of one chunk against T forwards of the same network on the same shapes.
Train: `TrainStack.train_track` against forward + backward of the same micro-batches and steps, the anchor forwards of
later updates, the gradient clip and the optimizer step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from harness import Ratio, paired, report

from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.models.diffusion import DiffusionStage
from unirl.models.sd3.denoiser import SD3Denoiser
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.sde.schedule import SigmaSchedule
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack import TrainStack
from unirl.types.conditions import TextEmbedCondition
from unirl.types.protocols import ModelFacts
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams


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
    """A network with its facts: what the backend asks of a bundle."""

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
            pooled_projection_dim=64,
            pos_embed_max_size=work.latent_side,
            qk_norm="rms_norm",
        ).eval()
        self.facts = ModelFacts(
            family="sd3",
            block_class_names=("JointTransformerBlock",),
            lora_targets=(),
            latent_channels=16,
            vae_scale=1,
            patch_size=2,
            schedule=SigmaSchedule(shift=3.0),
            batch_multiple=4,
        )

    def trainable(self) -> torch.nn.Module:
        """The network."""
        return self.transformer


class Bench:
    """One network, its stage, its stack, and the rows they work on."""

    def __init__(self, work: Workload, num_updates: int) -> None:
        self.work = work
        self.bundle = BareBundle(work)
        self.net = self.bundle.transformer
        self.stage = DiffusionStage(SD3Denoiser(self.net, 1000.0), self.bundle.facts)
        self.backend = FSDPBackend(self.bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-6))
        self.stack = TrainStack(
            self.backend,
            DiffusionGRPO(),
            self.stage,
            micro_batch_size=work.micro,
            num_updates_per_batch=num_updates,
        )
        sigmas = tuple(self.bundle.facts.schedule.sigmas(work.steps, 64).tolist())
        params = DiffusionSamplingParams(kernel=FlowSDEStrategy(), num_inference_steps=work.steps)
        self.params = params.pinned(0, sigmas)
        self.shape = (16, work.latent_side, work.latent_side)
        self.noise = NoiseSource(0, "r", 0)
        self.num_updates = num_updates

    def ids(self, count: int) -> list[str]:
        return [f"p{i}" for i in range(count)]

    def conditions(self, count: int) -> dict[str, TextEmbedCondition]:
        embeds = torch.randn(count, self.work.num_tokens, self.work.width)
        return {"text": TextEmbedCondition(embeds=embeds, pooled=torch.randn(count, 64))}

    def rollout(self) -> Ratio:
        """One chunk of rows, all steps."""
        count = self.work.rows
        conditions, ids = self.conditions(count), self.ids(count)
        text = conditions["text"]
        x, t = torch.randn(count, *self.shape), torch.full((count,), 500.0)

        @torch.no_grad()
        def ours() -> None:
            x_t = self.noise.normal(ids, "x", self.shape)
            self.stage.sample(conditions, x_t, self.params, self.noise, ids)

        @torch.no_grad()
        def bare() -> None:
            for _ in range(self.work.steps):
                self.net(x, text.embeds, text.pooled, t, return_dict=False)

        return paired("rollout", self.shapes(count), ours, bare, PAIRS)

    def train(self) -> Ratio:
        """All updates of one step of the loop."""
        count = self.work.rows * self.num_updates
        track = self.track(count)
        text = track.conditions["text"]
        x = torch.randn(self.work.micro, *self.shape)
        t = torch.full((self.work.micro,), 500.0)
        num_steps = len(self.params.sde_indices or ())
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-6, fused=True)

        def forward(rows: slice) -> torch.Tensor:
            return self.net(x, text.embeds[rows], text.pooled[rows], t, return_dict=False)[0]

        def bare() -> None:
            micros = [slice(i, i + self.work.micro) for i in range(0, count, self.work.micro)]
            per_update = len(micros) // self.num_updates
            with torch.no_grad():
                for rows in micros[per_update:]:
                    for _ in range(num_steps):
                        forward(rows)
            for u in range(self.num_updates):
                for rows in micros[u * per_update : (u + 1) * per_update]:
                    for _ in range(num_steps):
                        forward(rows).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return paired(
            f"train, {self.num_updates} updates", self.shapes(count), lambda: self.stack.train_track(track), bare, PAIRS
        )

    @torch.no_grad()
    def track(self, count: int) -> RolloutTrack:
        """A sampled track with advantages."""
        conditions, ids = self.conditions(count), self.ids(count)
        segment = self.stage.sample(conditions, self.noise.normal(ids, "x", self.shape), self.params, self.noise, ids)
        return RolloutTrack(
            sample_ids=ids,
            group_ids=ids,
            conditions=dict(conditions),
            segment=segment,
            advantages=torch.randn(count),
            weight=torch.ones(count),
            weight_version=torch.zeros(count, dtype=torch.int64),
        )

    def shapes(self, rows: int) -> dict[str, int | float | str]:
        """What was measured."""
        parameters = sum(p.numel() for p in self.net.parameters())
        return {
            "parameters_m": round(parameters / 1e6, 2),
            "rows": rows,
            "micro": self.work.micro,
            "denoising_steps": self.work.steps,
            "trained_steps": len(self.params.sde_indices or ()),
            "image_tokens": (self.work.latent_side // 2) ** 2,
        }


def main() -> None:
    """Measure and report."""
    results: list[Ratio] = []
    for num_updates in (1, 2):
        bench = Bench(WORKLOADS[ARGS.scale], num_updates)
        if num_updates == 1:
            results.append(bench.rollout())
        results.append(bench.train())
    report(results, ARGS.json)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--scale", choices=sorted(WORKLOADS), default="30m")
parser.add_argument("--pairs", type=int, default=10)
parser.add_argument("--json", default=None)

if __name__ == "__main__":
    ARGS = parser.parse_args()
    PAIRS = ARGS.pairs
    main()
