"""One day on one GPU: correctness, where the time goes, large models, a real run. Random weights of the real sizes.

    python benchmarks/gpu_day.py --json day.jsonl                 every part, at most 40 minutes on 80 GB
    python benchmarks/gpu_day.py copies parity --json day.jsonl   some parts; their rows are appended
    python benchmarks/gpu_day.py --toy                            every part with the smallest models, on any machine
    python benchmarks/gpu_day.py --table day.jsonl                a record as a table

No hub is needed. Each part runs in a process of its own with a time limit, so that one that fails leaves the others. A
row is one measured quantity beside what was expected of it: figures for one H200, by docs/gpu.md's arithmetic.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.families import RANDOM, measure, pipeline_of
from benchmarks.families import parser as family_parser
from benchmarks.harness import machine, seconds, synchronise
from tests.models.family_cases import CASES, FamilyCase

GIB = 2**30
SD3 = "stabilityai/stable-diffusion-3.5-medium"
CLIP_RANGE = 1e-4
"""The usual `clip_range` of Flow-GRPO, in nats."""
MEMORY_RATE = {"H200": 4.3e12, "H100": 3.0e12, "A100": 1.7e12, "B200": 7.0e12}
"""Bytes per second that a copy reaches, by a part of the device's name."""

Rule = Literal["at most", "at least", "about", "equal"]


@dataclass(frozen=True)
class Row:
    """One measured quantity."""

    part: str
    case: str
    quantity: str
    value: float | int | bool | str | None
    """None: this machine cannot measure it."""
    unit: str = ""
    expected: float | int | bool | None = None
    rule: Rule = "about"

    @property
    def holds(self) -> bool | None:
        """True if the value is as expected ("about": within a quarter); None if nothing was expected or measured."""
        if self.expected is None or self.value is None or isinstance(self.value, str):
            return None
        verdicts: dict[Rule, bool] = {
            "at most": self.value <= self.expected,
            "at least": self.value >= self.expected,
            "about": abs(self.value - self.expected) <= 0.25 * abs(self.expected),
            "equal": self.value == self.expected,
        }
        return verdicts[self.rule]


@dataclass(frozen=True)
class Day:
    """The device that the parts measure, and whether they use the smallest models."""

    toy: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def pipeline(self, name: str, model: str, dtype: str = "bf16") -> Any:
        """A family's pipeline with random weights: of the size of `model`, or the toy."""
        return pipeline_of(case_of(name), None if self.toy else model, self.device, dtype)

    def median(self, work: Callable[[], object], runs: int = 5) -> float:
        """Seconds of one run, after a warm-up."""
        work()
        return statistics.median(seconds(work) for _ in range(1 if self.toy else runs))

    def peak(self, work: Callable[[], object]) -> float | None:
        """GiB that one run allocates above what was there."""
        if not self.on_gpu:
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        synchronise()
        return (torch.cuda.max_memory_allocated() - before) / GIB

    def expect(self, value: float) -> float | None:
        """An expected figure, which holds at real size on a GPU only."""
        return value if self.on_gpu and not self.toy else None


def case_of(name: str) -> FamilyCase:
    return next(case for case in CASES if case.name == name)


def the_machine(day: Day) -> Iterator[Row]:
    """The device and the versions of libraries."""
    for name, value in machine().items():
        yield Row("machine", "", name, value)
    yield Row("machine", "", "TF32 in matrix products", torch.backends.cuda.matmul.allow_tf32)
    yield Row("machine", "", "cuDNN", torch.backends.cudnn.version() if day.on_gpu else None)
    if day.on_gpu:
        free, total = torch.cuda.mem_get_info()
        yield Row("machine", "", "memory", total / GIB, "GiB")
        yield Row("machine", "", "free memory", free / GIB, "GiB")
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        yield Row("machine", "", "driver", subprocess.run(query, capture_output=True, text=True).stdout.strip())


def copies(day: Day) -> Iterator[Row]:
    """Embeddings that the pipeline gives, against those of the encoder: equal unless a copy is read too early."""
    pipeline, length = day.pipeline("sd3", SD3), 16 if day.toy else 256
    for turn in range(3):
        texts = [f"turn {turn}, prompt {i}" + " word" * i for i in range(8)]
        with torch.no_grad():
            own = pipeline.embed.encoder.encode(texts, length).embeds
        synchronise()
        result = pipeline.embed(texts, length).embeds
        wrong = (own.float().cpu() - result.float().cpu()).abs().flatten(1).amax(1) > 0
        yield Row("copies", f"turn {turn}", "rows with other embeddings", int(wrong.sum()), "", 0, "equal")


def parity(day: Day) -> Iterator[Row]:
    """The log-probs of the engine, in chunks of 8 rows, against the trainer's with other micro-batches, in bf16."""
    from unirl.algorithms.diffusion_grpo import DiffusionGRPO
    from unirl.sde.kernels import FlowSDEStrategy
    from unirl.sde.steps import FractionSteps
    from unirl.testing.bundle import rollout_of
    from unirl.train.backend.base import OptimizerConfig
    from unirl.train.backend.fsdp import FSDPBackend
    from unirl.train.configs import LoraConfig
    from unirl.train.parity import parity_table
    from unirl.train.stack import TrainStack
    from unirl.types.sampling import DiffusionSamplingParams

    names = ["sd3"] if not day.toy and day.on_gpu else [case.name for case in CASES if case.path == "toy"]
    for name in names:
        for scale in (1.0, 4.5) if name == "sd3" else (case_of(name).scales[0],):
            pipeline = day.pipeline(name, SD3)
            height, width, frames = case_of(name).sizes[0] if day.toy else (512, 512, 1)
            params = DiffusionSamplingParams(
                kernel=FlowSDEStrategy(),
                sde_steps=FractionSteps(),
                num_inference_steps=10,
                height=height,
                width=width,
                num_frames=frames,
                guidance_scale=scale,
                trajectory_dtype="bf16",
                max_sequence_length=case_of(name).max_sequence_length if day.toy else 256,
            )
            optimizer = OptimizerConfig(learning_rate=1e-4)
            backend = FSDPBackend(pipeline.bundle, optimizer_cfg=optimizer, lora_cfg=LoraConfig())
            with backend.sampling():
                track = rollout_of(pipeline, params)
            rows = len(track)
            track = track.replace(
                rewards=torch.ones(rows), component_rewards={}, advantages=torch.linspace(-1, 1, rows)
            )
            for micro in (1, rows):
                stack = TrainStack(backend, DiffusionGRPO(), pipeline.stage, micro_batch_size=micro)
                worst = max(step.absdiff_max for step in parity_table(stack.measure_parity(track)))
                case = f"{name}, guidance {scale:g}, micro-batch {micro}"
                yield Row(
                    "parity", case, "largest gap in clip ranges", worst / CLIP_RANGE, "", day.expect(1), "at most"
                )


RUNS = (
    *("diffusion/sd3_trainside", "diffusion/sd3_nft", "diffusion/sd3_refl", "diffusion/sd3_ppo"),
    *("diffusion/qwen_image_trainside", "diffusion/flux1_dev_trainside", "diffusion/wan21_t2v"),
    *("diffusion/z_image_trainside", "llm/qwen3_grpo_4b_base_dapo", "vlm/quickstart"),
)
"""Recipes whose toy runs are resumed: several losses, families with other attention masks, tokens."""


def resume(day: Day) -> Iterator[Row]:
    """The last two of four toy steps, trained again from the checkpoint after two: equal metrics, bit for bit."""
    for recipe in RUNS[:: len(RUNS) - 1] if day.toy else RUNS:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            settings = ("scale=toy", "num_rollouts=4", "save_interval=2")
            begin = time.perf_counter()
            train(recipe, run, *settings)
            took, whole = time.perf_counter() - begin, metrics_of(run)
            train(recipe, run, *settings, f"resume={run}/checkpoints/checkpoint-000002")
            again = metrics_of(run)
        differing = [key for a, b in zip(whole, again, strict=True) for key in a if a[key] != b.get(key)]
        yield Row("resume", recipe, "metrics that differ after resuming", len(differing), "", 0, "equal")
        yield Row("resume", recipe, "four toy steps", took, "s")


def train(recipe: str, run: Path, *overrides: str) -> None:
    """Run `unirl train` in this process, with its output in a file. Raises RuntimeError with its end if it fails."""
    from unirl.cli.main import main as unirl

    output = run.with_suffix(".txt")
    with output.open("w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        status = unirl(["train", recipe, *overrides, "tracking.mirrors=[]", f"run.dir={run}"])
    if status:
        raise RuntimeError(f"{recipe} ended with {status}: {output.read_text()[-1500:]}")


def metrics_of(run: Path) -> list[dict[str, str]]:
    """The metrics of each step without those that measure the machine, as exact texts."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = ("time/", "mem/", "throughput/", "queue/")
    return [{key: repr(value) for key, value in row.items() if not key.startswith(measured)} for row in rows]


def launches(day: Day) -> Iterator[Row]:
    """Kernels of a forward and of a train step of SD3.5-M at 512 px, and the share of time in which the GPU works."""
    from torch.profiler import ProfilerActivity, profile

    from unirl.models.loading.lora import LoraSpec, inject_lora
    from unirl.types.conditions import TextEmbedCondition

    pipeline = day.pipeline("sd3", SD3)
    network = pipeline.bundle.trainable()
    inject_lora(network, LoraSpec(32, 64, pipeline.facts.lora_targets), 0)
    side, length = (8, 20) if day.toy else (64, 333)
    width = pipeline.bundle.configs.components["transformer"]["joint_attention_dim"]
    for autocast in (True, False):
        if not autocast:
            network.to(torch.bfloat16)
        for rows in (1, 2, 8):
            x = torch.randn(rows, pipeline.facts.latent_channels, side, side, device=day.device)
            sigma = torch.rand(rows, device=day.device)
            text = TextEmbedCondition(
                embeds=torch.randn(rows, length, width, device=day.device, dtype=torch.bfloat16),
                pooled=torch.randn(rows, pipeline.facts.text_width, device=day.device, dtype=torch.bfloat16),
            )

            def forward(x=x, sigma=sigma, text=text, autocast=autocast) -> torch.Tensor:
                with torch.autocast(day.device.type, torch.bfloat16, enabled=autocast):
                    velocity: torch.Tensor = pipeline.stage.denoiser.velocity(x, sigma, {"text": text})
                    return velocity

            def step(forward=forward) -> None:
                forward().sum().backward()
                network.zero_grad(set_to_none=True)

            for name, work in (("forward", torch.no_grad()(forward)), ("train step", step)):
                case = f"{name}, {rows} rows{', autocast' if autocast else ''}"
                took = day.median(work)
                yield Row("launches", case, "time", took * 1e3, "ms")
                yield Row("launches", case, "peak memory", day.peak(work), "GiB")
                if not day.on_gpu:
                    continue
                with profile(activities=[ProfilerActivity.CUDA]) as run:
                    work()
                    synchronise()
                kernels = [e for e in run.events() if e.device_type == torch.autograd.DeviceType.CUDA]
                most = day.expect(3100) if name == "forward" and not autocast else None
                yield Row("launches", case, "kernels", len(kernels), "", most, "at most")
                yield Row("launches", case, "GPU busy", sum(e.device_time for e in kernels) / 1e6 / took)


ATTENTION = {
    "SD3.5-M 512 px": (16, 24, 1357, 64),
    "Qwen-Image 384 px": (8, 24, 1088, 128),
    "Wan 1.3B, 33 frames": (1, 12, 14040, 128),
    "HunyuanVideo, 33 frames": (1, 24, 14296, 128),
}
"""Rows, heads, tokens and width of a head."""


def attention(day: Day) -> Iterator[Row]:
    """Rates of the attention back ends at the sizes of four models, with and without a mask of keys."""
    backends = (None, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    for name, shape in ATTENTION.items():
        rows, heads, tokens, width = (1, 2, 64, shape[3]) if day.toy else shape
        query, key, value = (
            torch.randn(rows, heads, tokens, width, device=day.device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        mask = torch.ones(rows, 1, 1, tokens, dtype=torch.bool, device=day.device)
        mask[..., -tokens // 8 :] = False
        operations = 4 * rows * heads * tokens**2 * width / 1e12
        for backend in backends:
            for keys in (None, mask):
                kind = "default" if backend is None else backend.name.lower()
                case = f"{name}, {kind}{', mask' if keys is not None else ''}"
                work = partial(F.scaled_dot_product_attention, query, key, value, attn_mask=keys)
                try:
                    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
                        forward = day.median(work)
                        both = day.median(lambda work=work: work().sum().backward())
                except RuntimeError as error:
                    yield Row("attention", case, "refused", str(error).splitlines()[0][:80])
                    continue
                yield Row("attention", case, "forward", operations / forward, "TFLOP/s")
                yield Row("attention", case, "forward and backward", 3.5 * operations / both, "TFLOP/s")


DECODING = {
    "sd3": (SD3, (8, 16, 128, 128), 24),
    "qwen_image": ("Qwen/Qwen-Image", (8, 16, 1, 128, 128), 54),
    "wan21": ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", (1, 16, 9, 90, 160), 17),
    "hunyuan_video": ("hunyuanvideo-community/HunyuanVideo", (1, 16, 9, 60, 104), 29),
}
"""Family -> model, shape of the latents, expected peak in GiB in fp32."""


def decoding(day: Day) -> Iterator[Row]:
    """Time and peak memory of the VAEs: 1024 px x 8 images, 720p and 480p videos, in fp32 and bf16."""
    for name, (model, shape, gib) in DECODING.items():
        family = case_of(name).classes()[0].family
        configs = family.toys["toy"] if day.toy else family.published[model]
        with torch.device(day.device):
            vae = family.build(configs, "vae").eval().requires_grad_(False)
        channels = vae.config.get("latent_channels") or vae.config["z_dim"]
        shape = (1, channels, *(1 if size == 1 else 4 for size in shape[2:])) if day.toy else shape
        for dtype in (torch.float32, torch.bfloat16):
            vae.to(dtype)
            latents = torch.randn(shape, device=day.device, dtype=dtype)
            work = torch.no_grad()(partial(vae.decode, latents, return_dict=False))
            case = f"{name}, {dtype}".replace("torch.", "")
            yield Row("decoding", case, "time", day.median(work, 3), "s")
            expected = day.expect(gib if dtype is torch.float32 else gib / 2)
            yield Row("decoding", case, "peak memory", day.peak(work), "GiB", expected)


def tokens(day: Day) -> Iterator[Row]:
    """Decoding and replay of Qwen3-4B with 8, 64 and 256 slots, over the time of reading its weights once per token."""
    from unirl.models.language.packing import prompt_tokens
    from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline
    from unirl.sde.noise import NoiseSource
    from unirl.types.sampling import ARSamplingParams

    config = Qwen3Bundle.toys["toy"] if day.toy else Qwen3Bundle.published["Qwen/Qwen3-4B-Base"]
    Qwen3Bundle.toys = {**Qwen3Bundle.toys, RANDOM: {**Qwen3Bundle.toys["toy"], **config}}
    with torch.device(day.device):
        bundle = Qwen3Bundle(day.device, path=RANDOM, dtype="bf16")
    pipeline, network, count = Qwen3Pipeline(bundle, chat=False), bundle.trainable(), 8 if day.toy else 96
    device = torch.cuda.get_device_name() if day.on_gpu else "CPU"
    rate = next((rate for name, rate in MEMORY_RATE.items() if name in device), None)
    read = None if rate is None else 2 * sum(p.numel() for p in network.parameters()) / rate
    for masters in (False, True):
        if masters:
            for parameter in network.parameters():
                parameter.data = parameter.data.float()
        network.requires_grad_(masters)  # trained weights are cast once in a rollout
        for slots in (8,) if day.toy else (8, 64, 256):
            prompts = prompt_tokens([list(range(5, 15 if day.toy else 205))] * slots).to(day.device)
            for top_p, top_k, graphs in ((1.0, 0, False), (1.0, 0, True), (0.9, 64 if day.toy else 1024, False)):
                params = ARSamplingParams(max_new_tokens=count, min_new_tokens=count, top_p=top_p, top_k=top_k)
                ids = [str(i) for i in range(slots)]
                pipeline.stage.use_cuda_graphs = graphs
                work = partial(pipeline.stage.sample, {"prompt": prompts}, params, NoiseSource(1, "r", 0), ids, slots)
                names = {", top-k": top_k, ", CUDA graphs": graphs, ", fp32 weights": masters}
                case = f"{slots} slots{''.join(name for name, is_on in names.items() if is_on)}"
                per_token = seconds(work) / count
                yield Row("tokens", case, "time of a step", per_token * 1e3, "ms")
                yield Row("tokens", case, "rate", slots / per_token, "tokens/s")
                most = day.expect(1.5) if slots == 64 and graphs and not masters else None
                ratio = None if read is None else per_token / read
                yield Row("tokens", case, "time over reading the weights", ratio, "", most, "at most")
        pipeline.stage.use_cuda_graphs = False
        segment = pipeline.stage.sample({"prompt": prompts}, params, NoiseSource(1, "r", 0), ids, slots)
        few = list(range(8))
        conditions, segment = {"prompt": prompts.select(few)}, segment.select(few)
        network.requires_grad_(True)

        def replay(conditions=conditions, segment=segment) -> None:
            pipeline.stage.replay(conditions, segment).logp.sum().backward()
            network.zero_grad(set_to_none=True)

        case = f"replay of 8 responses{', fp32 weights' if masters else ''}"
        yield Row("tokens", case, "time", day.median(replay, 2), "s")
        yield Row("tokens", case, "peak memory", day.peak(replay), "GiB")
        network.requires_grad_(False)


def offload(day: Day) -> Iterator[Row]:
    """The rate at which weights leave the device and come back."""
    layers = torch.nn.ModuleList(
        torch.nn.Linear(4096, 4096, device=day.device, dtype=torch.bfloat16) for _ in range(2 if day.toy else 256)
    )
    gib = sum(parameter.nbytes for parameter in layers.parameters()) / GIB
    for name, target in (("to the host", "cpu"), ("to the device", day.device)):
        yield Row("offload", f"{gib:.3g} GiB", name, gib / max(seconds(lambda to=target: layers.to(to)), 1e-9), "GiB/s")


def mixed_precision(day: Day) -> Iterator[Row]:
    """Wan as diffusers loads it in bf16, with the modules that it keeps in fp32, against the same weights in fp32."""
    from diffusers import WanTransformer3DModel

    pipeline = day.pipeline("wan21", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "fp32")
    inputs = pipeline.canary_inputs()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        exact = pipeline.stage.canary(inputs).values.double()
        pipeline.bundle.trainable().save_pretrained(folder)
        network = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16).to(day.device).eval()
        pipeline.stage.denoiser.transformer = network
        for dtype in (torch.bfloat16, torch.float32):
            pipeline.stage.autocast_dtype = dtype
            result = pipeline.stage.canary(inputs).values.double()
            error = float(((result - exact).square().mean() / exact.square().mean()).sqrt())
            case = f"Wan 2.1 in bf16, computing in {dtype}".replace("torch.", "")
            yield Row("mixed_precision", case, "relative error of a forward", error, "", 0.02, "at most")


MODELS: dict[str, tuple[str, str, tuple[str, ...], float | None]] = {
    "SD3.5-M 512 px, 1 row": ("sd3", SD3, ("--sequence=256", "--batch=1"), None),
    "SD3.5-M 512 px, 8 rows": ("sd3", SD3, ("--sequence=256", "--batch=8"), 0.45),
    "SD3.5-M 512 px, 8 rows, compiled": ("sd3", SD3, ("--sequence=256", "--batch=8", "--compile"), 0.45),
    "Qwen-Image 384 px, 8 rows, 512 tokens": ("qwen_image", "Qwen/Qwen-Image", ("--sequence=512", "--batch=8"), 0.4),
    "Qwen-Image 384 px, 8 rows, 64 tokens": ("qwen_image", "Qwen/Qwen-Image", ("--sequence=64", "--batch=8"), 0.4),
    "FLUX.1 512 px, 4 rows": ("flux1", "black-forest-labs/FLUX.1-dev", ("--sequence=256", "--batch=4"), 0.4),
    "Wan 1.3B 480p, 33 frames": (
        "wan21",
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        ("--height=480", "--width=832", "--frames=33", "--batch=1"),
        0.4,
    ),
}
"""Case -> family, model, options of families.py, least utilisation of a rollout at real size."""


def models(day: Day) -> Iterator[Row]:
    """Rollout, decoding and train step of large models at real size: time, memory, utilisation."""
    for name, (family, model, options, least) in MODELS.items():
        if day.toy and "--compile" in options:
            continue
        size = [] if any(option.startswith("--height") for option in options) else square(name)
        real = ["--model", model, "--dtype=bf16", "--checkpointing", *size, *options]
        arguments = family_parser().parse_args([family, *(["--steps=6", "--batch=2"] if day.toy else real)])
        for phase, measured in measure(case_of(family), arguments)["phases"].items():
            yield Row("models", f"{name}: {phase}", "time", measured["seconds"], "s")
            yield Row("models", f"{name}: {phase}", "rate", measured["samples_per_second"], "rows/s")
            yield Row("models", f"{name}: {phase}", "peak memory", measured["peak_gb"], "GiB")
            if phase in ("sample", "train"):
                wanted = None if least is None else day.expect(least if phase == "sample" else least - 0.05)
                yield Row("models", f"{name}: {phase}", "utilisation", measured["utilisation"], "", wanted, "at least")


def square(name: str) -> list[str]:
    """The options of a square image, from a name such as `SD3.5-M 512 px, 8 rows`."""
    side = name.split(" px")[0].split()[-1]
    return [f"--height={side}", f"--width={side}"]


def real_run(day: Day) -> Iterator[Row]:
    """Two steps of SD3.5-M from a directory that diffusers wrote, with all three text encoders."""
    from unirl.models.denoising.diffusers_pipeline import plain_pipeline

    bundle = day.pipeline("sd3", SD3).bundle
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        plain_pipeline(bundle, bundle.trainable()).save_pretrained(model)
        del bundle
        size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file()) / GIB
        yield Row("real_run", "SD3.5-M", "size of the directory", size, "GiB")
        for micro in (1, 2) if day.toy else (1, 8):
            case, run = f"SD3.5-M, micro-batch {micro}", Path(folder, f"run{micro}")
            settings = ["scale=toy"] if day.toy else ["batch_size=4", "reward.backend.config.path=toy"]
            settings += [f"bundle.path={model}", f"stack.micro_batch_size={micro}", "num_rollouts=2"]
            train("diffusion/sd3_trainside", run, *settings)
            last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
            for name, value in last.items():
                if name.startswith(("time/", "mem/device")):
                    yield Row("real_run", case, name, value, "s" if name.startswith("time/") else "GiB")
            finite = all(math.isfinite(value) for value in last.values())
            yield Row("real_run", case, "all metrics are finite", finite, "", True, "equal")


PARTS: dict[str, tuple[Callable[[Day], Iterator[Row]], int]] = {
    "machine": (the_machine, 60),
    "copies": (copies, 180),
    "parity": (parity, 300),
    "mixed_precision": (mixed_precision, 180),
    "resume": (resume, 420),
    "launches": (launches, 240),
    "attention": (attention, 180),
    "decoding": (decoding, 240),
    "offload": (offload, 60),
    "tokens": (tokens, 420),
    "models": (models, 900),
    "real_run": (real_run, 600),
}
"""Name -> function, and the seconds that it may take."""


def run_part(name: str, toy: bool, path: str | None) -> None:
    """Run one part in this process. Rows are printed and appended as they come."""
    for row in PARTS[name][0](Day(toy)):
        write(row, path)


def write(row: Row, path: str | None) -> None:
    """Print a row as a JSON line, and append it to the file."""
    line = json.dumps({**asdict(row), "holds": row.holds})
    print(line, flush=True)
    if path:
        with Path(path).open("a") as file:
            file.write(line + "\n")


def run_all(names: list[str], toy: bool, path: str | None) -> int:
    """Run each part in a process of its own. Returns the number of parts that failed."""
    failed = 0
    for name in names:
        begin, limit = time.perf_counter(), PARTS[name][1]
        options = [*(["--toy"] if toy else []), *(["--json", path] if path else [])]
        try:
            status = subprocess.run([sys.executable, __file__, name, "--inside", *options], timeout=limit).returncode
            failure = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            failure = f"stopped after {limit} s"
        failed += bool(failure)
        write(Row(name, "", "failure", failure or "none"), path)
        write(Row(name, "", "duration", time.perf_counter() - begin, "s", limit, "at most"), path)
    return failed


def table(path: str) -> str:
    """A record as a Markdown table, with a mark at rows that are not as expected."""
    signs = {"at most": "<= ", "at least": ">= ", "about": "about ", "equal": ""}
    lines = ["| part | case | quantity | value | expected | |", "|---|---|---|---|---|---|"]
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        value = "not measured" if row["value"] is None else shown(row["value"], row["unit"])
        wanted = "" if row["expected"] is None else signs[row["rule"]] + shown(row["expected"], row["unit"])
        mark = {None: "", True: "as expected", False: "**deviates**"}[row["holds"]]
        lines.append(f"| {row['part']} | {row['case']} | {row['quantity']} | {value} | {wanted} | {mark} |")
    return "\n".join(lines)


def shown(value: float | int | bool | str, unit: str) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{text} {unit}".strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--toy", action="store_true", help="the smallest models, on any machine")
    parser.add_argument("--json", metavar="FILE", help="append the rows to a file of JSON lines")
    parser.add_argument("--table", metavar="FILE", help="print a record as a table, and measure nothing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.parts) - PARTS.keys())
    if unknown:
        parser.error(f"no part {', '.join(unknown)}: choose among {', '.join(PARTS)}")
    if arguments.table:
        print(table(arguments.table))
        return 0
    if arguments.inside:
        run_part(arguments.parts[0], arguments.toy, arguments.json)
        return 0
    return run_all(arguments.parts or list(PARTS), arguments.toy, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
