"""Measures the phases of a family with random weights: encoding, sampling, decoding and a train step.

    python benchmarks/families.py sd3 wan21 [--json out.json]                                          toys, any machine
    python benchmarks/families.py sd3 --model stabilityai/stable-diffusion-3.5-medium --height 512 --width 512 \\
        --dtype bf16 --sequence 256 --batch 8                                     the sizes and the dtype of a real run
    ... --compile --no-checkpointing --guidance 4.5 --passes 2 --steps 10 --frames 33

Without --dtype it computes in fp32, and without --sequence on the few text tokens of the toys.

Utilisation is the rate of FLOPs in relation to the rate of a large square matrix product of the same dtype in the same
process. The FLOP counter of torch counts forward and backward, and recomputed activations are left out. Memory is the
allocator's peak in the phase, weights included. It is not measured on a CPU. The train step is Flow-GRPO on LoRA
adapters of rank 32: replay of every stochastic step, backward, clip, AdamW.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.harness import machine, seconds
from tests.models.family_cases import CASES, FamilyCase
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.bench.probe import matmul_rate
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, sample_with_euler
from unirl.models.loading.checkpoint import RANDOM, TOY
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.steps import FractionSteps
from unirl.testing.bundle import rollout_of
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.train.stack import TrainStack
from unirl.types.protocols import TORCH_DTYPES
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

REPEATS = 3
TRAINED_STEPS = 3
"""Stochastic steps in the first half of the trajectory, or as many as it has."""
GB = 1024**3


@dataclass
class Phase:
    """One phase: the median of `REPEATS` runs after a warm-up."""

    seconds: float
    samples_per_second: float
    teraflops: float | None = None
    """Counted operations of one run, in units of 1e12."""
    utilisation: float | None = None
    """Fraction of the measured rate of matrix products."""
    peak_gb: float | None = None


def pipeline_of(case: FamilyCase, model: str | None, device: torch.device, dtype: str) -> DiffusersPipeline[Any]:
    """Returns the toy of the case, or a model with the sizes of a public one and random weights."""
    bundle_class, pipeline_class = case.classes()
    path = case.path if model is None else f"{RANDOM}{model}"
    with torch.device(device):
        bundle = bundle_class(device, path=path, dtype=dtype)
    pipeline: DiffusersPipeline[Any] = pipeline_class(bundle)
    return pipeline


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *others: object, **further: object) -> int:
    """Returns the operations of a forward pass of attention, from the shapes of its inputs."""
    return int(sdpa_flop_count(query, key, value))


def attention_backward_flops(
    grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *others: object, **further: object
) -> int:
    """Returns the operations of a backward pass of attention, from the shapes of its inputs."""
    return int(sdpa_backward_flop_count(grad, query, key, value))


aten = torch.ops.aten
CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}
"""Operations of fused attention on a CPU, which torch's counter does not know."""


def counted(work: Callable[[], object]) -> float:
    """Returns the operations of one run, in units of 1e12."""
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        work()
    return float(counter.get_total_flops()) / 1e12


def timed(
    work: Callable[[], object], samples: int, ceiling: float | None = None, teraflops: float | None = None
) -> Phase:
    work()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    took = sorted(seconds(work) for _ in range(REPEATS))[REPEATS // 2]
    peak = torch.cuda.max_memory_allocated() / GB if torch.cuda.is_available() else None
    used = None if ceiling is None or teraflops is None else teraflops / took / ceiling
    return Phase(took, samples / took, teraflops, used, peak)


def settings(case: FamilyCase, arguments: argparse.Namespace) -> DiffusionSamplingParams:
    height, width, frames = case.sizes[0]
    return DiffusionSamplingParams(
        kernel=FlowSDEStrategy(),
        sde_steps=FractionSteps(num_steps=min(TRAINED_STEPS, arguments.steps // 2)),
        num_inference_steps=arguments.steps,
        height=arguments.height or height,
        width=arguments.width or width,
        num_frames=arguments.frames or frames,
        guidance_scale=arguments.guidance,
        guidance_passes=arguments.passes,
        max_sequence_length=arguments.sequence or case.max_sequence_length,
        trajectory_dtype=arguments.dtype,
    )


@torch.no_grad()
def replayed(pipeline: DiffusersPipeline[Any], track: RolloutTrack) -> None:
    """Runs the forwards that checkpointing repeats in the backward pass, whose operations are subtracted."""
    pipeline.stage.replay(track.conditions, track.segment, track.segment.sde_indices)


def measure(case: FamilyCase, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all phases of one family."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = pipeline_of(case, arguments.model, device, arguments.dtype)
    params, batch = settings(case, arguments), arguments.batch
    ceiling = matmul_rate(device, TORCH_DTYPES[arguments.dtype])
    texts = [f"a picture of {i} things" for i in range(batch)]
    backend = FSDPBackend(
        pipeline.bundle,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-4),
        lora_cfg=LoraConfig(rank=32, alpha=64.0),
        fsdp_cfg=FSDPConfig(activation_checkpointing=arguments.checkpointing, use_torch_compile=arguments.compile),
    )
    stack = TrainStack(backend, DiffusionGRPO(), pipeline.stage, micro_batch_size=batch)
    phases: dict[str, Phase] = {}

    def encode() -> None:
        pipeline.embed.cache.clear()
        pipeline.embed(texts, params.max_sequence_length)

    phases["encode"] = timed(encode, batch)
    with backend.sampling(), torch.no_grad():
        draw = partial(sample_with_euler, pipeline, texts, params)
        phases["sample"] = timed(draw, batch, ceiling, counted(draw))
        latents = draw().latents
        phases["decode"] = timed(lambda: pipeline.decode(latents), batch)
        track = rollout_of(pipeline, params).select([i % 6 for i in range(batch)])
    track = track.replace(rewards=torch.ones(batch), component_rewards={}, advantages=torch.linspace(-1, 1, batch))
    train = partial(stack.train_track, track)
    work = counted(train) - (counted(partial(replayed, pipeline, track)) if arguments.checkpointing else 0.0)
    phases["train"] = timed(train, batch * len(track.segment.sde_indices), ceiling, work)
    return {
        "family": case.name,
        "model": arguments.model or TOY,
        "parameters": sum(p.numel() for p in pipeline.bundle.trainable().parameters()),
        "shape": [batch, *pipeline.facts.latent_shape(params)],
        "tokens": pipeline.facts.image_seq_len(params),
        "steps": params.num_inference_steps,
        "trained_steps": len(track.segment.sde_indices),
        "options": {
            "dtype": arguments.dtype,
            "guidance": arguments.guidance,
            "passes": arguments.passes,
            "checkpointing": arguments.checkpointing,
            "compile": arguments.compile,
        },
        "matmul_teraflops": ceiling,
        "phases": {name: asdict(phase) for name, phase in phases.items()},
    }


def show(measured: dict[str, Any]) -> None:
    """Prints the phases of one family."""
    print(
        f"{measured['family']} ({measured['model']}): {measured['parameters']:,} parameters, "
        f"latents {measured['shape']}"
    )
    for name, phase in measured["phases"].items():
        parts = [f"{phase['seconds']:9.4f} s", f"{phase['samples_per_second']:9.2f} a second"]
        if phase["utilisation"] is not None:
            parts.append(f"{phase['teraflops']:.4g} TFLOP, utilisation {phase['utilisation']:.1%}")
        if phase["peak_gb"] is not None:
            parts.append(f"peak {phase['peak_gb']:.1f} GiB")
        print(f"  {name:8} {'   '.join(parts)}", flush=True)


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names from tests/models/family_cases.py (default: all)")
    parser.add_argument("--model", help="hub id of a model of the one family, whose sizes are used")
    for name, value in (("batch", 4), ("steps", 10), ("passes", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("height", "width", "frames", "sequence"):
        parser.add_argument(f"--{name}", type=int, help="default: that of the toy")
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--json")
    return parser


def main() -> None:
    arguments = parser().parse_args()
    if arguments.steps < 2:
        parser().error("--steps must be at least 2: the last step is never stochastic")
    cases = [case for case in CASES if not arguments.families or case.name in arguments.families]
    if arguments.model is not None and len(cases) != 1:
        parser().error(f"--model is of one family: name it beside, one of {', '.join(case.name for case in CASES)}")
    results = []
    for case in cases:
        results.append(measure(case, arguments))
        show(results[-1])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
