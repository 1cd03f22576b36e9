"""Trains a world model of `unirl.envs.pixel_reach`: a small Wan 2.2 that predicts the frames after four actions.

    python scripts/train_world_model.py --out worlds/pixel_reach
    python scripts/train_world_model.py --out worlds/pixel_reach --minutes 5    # the next call goes on from there
    python scripts/train_world_model.py --measure worlds/pixel_reach    # only the table of held-out errors

Eight minutes of a CPU core. Chunks of random actions from random places are recorded in the environment itself. First
the VAE learns to encode and decode their frames, then the transformer and the tokens of the actions learn flow matching
on its latents. The classes are those of the published 5B model; the text encoder keeps random weights, since no episode
has an instruction.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from unirl.envs.pixel_reach import PIXELS, PixelReachEnvironment  # noqa: E402
from unirl.models.denoising.vae import IMAGE  # noqa: E402
from unirl.models.wan22.family import Wan22Bundle, Wan22Pipeline  # noqa: E402
from unirl.models.world_model import ACTIONS_FILE, ActionTokens, WorldModel  # noqa: E402
from unirl.sde.kernels import EulerODE  # noqa: E402
from unirl.types.conditions import LatentCondition  # noqa: E402
from unirl.types.environments import EpisodeStart  # noqa: E402
from unirl.types.primitives import unit  # noqa: E402
from unirl.types.sampling import DiffusionSamplingParams  # noqa: E402

SIZE, ACTIONS, CHUNK, TOKENS = 24, 2, 4, 8
LATENT_CHANNELS, TEXT_WIDTH = 16, 32
BRIGHT = 10.0
"""Further weight of a bright pixel in the loss of the VAE."""
SIMULATED = "the environment"
SAMPLING = DiffusionSamplingParams(
    kernel=EulerODE(), num_inference_steps=4, height=SIZE, width=SIZE, max_sequence_length=TOKENS
)
CONFIGS: dict[str, dict[str, Any]] = {
    "transformer": {
        "patch_size": [1, 2, 2],
        "num_attention_heads": 4,
        "attention_head_dim": 24,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "text_dim": TEXT_WIDTH,
        "freq_dim": 64,
        "ffn_dim": 192,
        "num_layers": 4,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
    },
    "vae": {
        "base_dim": 8,
        "z_dim": LATENT_CHANNELS,
        "dim_mult": [1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": [0.0] * LATENT_CHANNELS,
        "latents_std": [1.0] * LATENT_CHANNELS,
        "scale_factor_spatial": 4,
        "scale_factor_temporal": 4,
    },
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the training run."""

    chunks: int = 8192
    """Recorded chunks."""
    vae_steps: int = 600
    vae_batch: int = 16
    vae_rate: float = 3e-3
    steps: int = 1200
    batch: int = 48
    rate: float = 2e-3
    seed: int = 0


# Data


@dataclass(frozen=True)
class Chunks:
    """Recorded chunks."""

    frames: Tensor  # [N, C + 1, 3, H, W] uint8: the frame before, and one after each action
    actions: Tensor  # [N, C, A] in [-1, 1]

    @staticmethod
    def record(count: int, seed: int) -> Chunks:
        """Random actions from random places. After the end of an episode, the frame stays as it is."""
        env = PixelReachEnvironment(size=SIZE, max_steps=CHUNK)
        slots = list(range(count))
        frames = [env.reset(slots, [EpisodeStart(seed=seed * 10**6 + slot) for slot in slots])[PIXELS]]
        generator = torch.Generator().manual_seed(seed)
        actions = torch.rand(count, CHUNK, ACTIONS, generator=generator) * 2 - 1
        alive = torch.arange(count)
        for place in range(CHUNK):
            step = env.step(alive.tolist(), actions[alive, place])
            frames.append(frames[-1].index_copy(0, alive, step.observations[PIXELS]))
            alive = alive[~(step.terminated | step.truncated)]
        return Chunks(torch.stack(frames, 1), actions)

    def videos(self, rows: Tensor | slice) -> Tensor:
        """[n, 3, C + 1, H, W] in [-1, 1]."""
        return unit(self.frames[rows]).transpose(1, 2) * 2 - 1


# Training


@dataclass(frozen=True)
class Phase:
    """A part of the training run, whose state is a file of the folder `out`. A later call goes on from there."""

    file: Path
    steps: int
    rate: float
    deadline: float
    """Time after which this call ends."""

    def run(self, parameters: Sequence[nn.Parameter], loss: Callable[[torch.Generator], Tensor], seed: int) -> None:
        """Minimise `loss`, which draws from the generator. At the end, the weights are their moving average."""
        live, average = [p.detach() for p in parameters], [p.detach().clone() for p in parameters]
        optimizer = torch.optim.AdamW(parameters, lr=self.rate, betas=(0.9, 0.99), weight_decay=0.0)
        generator, done, start = torch.Generator().manual_seed(seed), 0, time.time()
        if self.file.exists():
            saved = torch.load(self.file, weights_only=True)
            done = saved["done"]
            torch._foreach_copy_(live, saved["live"])
            torch._foreach_copy_(average, saved["average"])
            optimizer.load_state_dict(saved["optimizer"])
            generator.set_state(saved["generator"])
        first = done
        while done < self.steps and time.time() < self.deadline:
            warm = min(1.0, (done + 1) / 50)
            optimizer.param_groups[0]["lr"] = self.rate * warm * (0.51 + 0.49 * math.cos(math.pi * done / self.steps))
            optimizer.zero_grad()
            value = loss(generator)
            value.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            done += 1
            torch._foreach_lerp_(average, live, 1 - min(0.995, (1 + done) / (10 + done)))
            if done % 100 == 0:
                print(f"{self.file.stem} {done}/{self.steps}  loss {value.item():.5f}", flush=True)
        if done > first:
            state = {"done": done, "live": live, "average": average, "optimizer": optimizer.state_dict()}
            torch.save({**state, "generator": generator.get_state()}, self.file)
            print(f"{self.file.stem}: {done - first} steps in {time.time() - start:.0f} s", flush=True)
        if done < self.steps:
            raise SystemExit(f"{self.file.stem}: {done} of {self.steps} steps. The same command goes on from there")
        torch._foreach_copy_(live, average)


def train_vae(vae: Any, chunks: Chunks, settings: Settings, phase: Phase) -> None:
    """The VAE learns to reproduce frames; then the mean and std of each latent channel become part of it."""
    vae.requires_grad_(True)
    for name, parameter in vae.named_parameters():  # a network that begins as its skip connections learns sooner
        if "conv2" in name or "proj.weight" in name:
            nn.init.zeros_(parameter)

    def loss(generator: torch.Generator) -> Tensor:
        videos = chunks.videos(torch.randint(len(chunks.actions), (settings.vae_batch,), generator=generator))
        decoded = vae.decode(vae.encode(videos).latent_dist.mode(), return_dict=False)[0]
        # Most pixels are black: without weights, a black video would be a good one.
        return ((decoded - videos).square() * (1 + BRIGHT * (videos > 0))).mean()

    phase.run(list(vae.parameters()), loss, settings.seed)
    vae.requires_grad_(False)
    latents = encoded(vae, chunks.videos(slice(512)))
    vae.register_to_config(
        latents_mean=[round(v, 5) for v in latents.mean((0, 2, 3, 4)).tolist()],
        latents_std=[round(v, 5) for v in latents.std((0, 2, 3, 4)).tolist()],
    )


@torch.no_grad()
def encoded(vae: Any, videos: Tensor, rows: int = 64) -> Tensor:
    """[n, C, F, h, w] latents of videos, not yet of mean 0 and variance 1."""
    return torch.cat([vae.encode(part).latent_dist.mode() for part in videos.split(rows)])


def train_world(world: WorldModel, chunks: Chunks, settings: Settings, phase: Phase) -> None:
    """Transformer and action tokens learn flow matching: the velocity eps - x0 at x = (1 - sigma) x0 + sigma eps."""
    bundle = world.pipeline.bundle
    vae, network, tokens = bundle.vae(), bundle.trainable(), world.tokens
    with torch.no_grad():
        latents = torch.cat(
            [vae.encode_frames(chunks.videos(slice(i, i + 64))) for i in range(0, len(chunks.actions), 64)]
        )
        text = world.pipeline.encode([""] * settings.batch, world.sampling)
    network.requires_grad_(True).train()
    tokens.requires_grad_(True)

    def loss(generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(latents), (settings.batch,), generator=generator)
        x0, noise = latents[rows], torch.randn(latents[rows].shape, generator=generator)
        sigma = torch.rand(settings.batch, generator=generator)
        x = torch.lerp(x0, noise, sigma.view(-1, 1, 1, 1, 1))
        conditions = world.with_actions({**text, IMAGE: LatentCondition(latents=x0[:, :, :1])}, chunks.actions[rows])
        v = world.pipeline.stage.denoiser.velocity(x, sigma, conditions)
        return (v - (noise - x0))[:, :, 1:].square().mean()

    phase.run([*network.parameters(), *tokens.parameters()], loss, settings.seed)
    network.requires_grad_(False).eval()
    tokens.requires_grad_(False)


# The model and its files


def write_new(folder: Path, seed: int) -> None:
    """A checkpoint of Wan 2.2 with random weights."""
    import diffusers

    torch.manual_seed(seed)
    family = Wan22Bundle.family
    toy = family.toys["toy-ti2v"]
    configs = replace(toy, components={**toy.components, **CONFIGS})
    for name in configs.components:
        family.build(configs, name).save_pretrained(folder / name)
    family.toy_tokenizers()["tokenizer"].save_pretrained(folder / "tokenizer")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": family.pipeline,
        "expand_timesteps": True,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_trained(folder: Path, world: WorldModel) -> None:
    """The weights of a world model in bfloat16, beside the files of `write_new`."""
    modules = world.pipeline.bundle.modules
    for name in ("transformer", "vae", "text_encoder"):
        modules[name].to(torch.bfloat16).save_pretrained(folder / name)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in world.tokens.state_dict().items()}
    save_file(tensors, folder / ACTIONS_FILE)


def opened(folder: Path, tokens: ActionTokens | None = None) -> WorldModel:
    """The world model of a folder, on the CPU in float32. `tokens` stand for those that it does not have yet."""
    bundle = Wan22Bundle(path=str(folder), dtype="fp32")
    tokens = tokens or ActionTokens.read(folder, ACTIONS, CHUNK, TEXT_WIDTH)
    return WorldModel.of(Wan22Pipeline(bundle), tokens, SAMPLING)


# What it learned


def predictions(world: WorldModel, chunks: Chunks) -> dict[str, Tensor]:
    """Frames [N, C, 3, H, W] uint8 after each action: those of the environment, and three ways to predict them."""
    first = chunks.frames[:, 0]
    texts, rows = [""] * len(first), [(number, "held-out") for number in range(len(first))]
    return {
        SIMULATED: chunks.frames[:, 1:],
        "world model": world.predict(first, texts, chunks.actions, rows, 64),
        "the first frame again": first[:, None].expand_as(chunks.frames[:, 1:]),
        "world model, actions reversed": world.predict(first, texts, -chunks.actions, rows, 64),
    }


def errors(predicted: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Mean squared errors per pixel in [0, 1] of the frames after 1 ... C actions, by the kind of prediction."""
    wanted = unit(predicted[SIMULATED])
    return {
        name: (unit(frames) - wanted).square().mean((0, 2, 3, 4)).tolist()
        for name, frames in predicted.items()
        if name != SIMULATED
    }


def picture(chunks: Chunks, predicted: Mapping[str, Tensor], rows: int = 6) -> Image.Image:
    """A row for each of some chunks: the first frame, then those of the environment, of the model, and reversed."""
    first = chunks.frames[:rows, :1]
    shown = [predicted[name][:rows] for name in (SIMULATED, "world model", "world model, actions reversed")]
    frames = torch.cat([first, *shown], dim=1)  # [rows, 1 + 3 C, 3, H, W]
    gapped = nn.functional.pad(frames, (1, 1, 1, 1), value=90)
    canvas = gapped.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    return Image.fromarray(canvas.numpy()).resize((3 * canvas.shape[1], 3 * canvas.shape[0]), Image.Resampling.NEAREST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to write the model to")
    parser.add_argument("--measure", type=Path, help="folder of a trained model")
    parser.add_argument("--picture", type=Path, help="write some predicted frames to this PNG")
    for name, default in vars(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    parser.add_argument("--minutes", type=float, default=math.inf, help="limit of this call; the next one goes on")
    args = vars(parser.parse_args())
    out, folder, minutes = args.pop("out"), args.pop("measure"), args.pop("minutes")
    drawn = args.pop("picture")
    settings = Settings(**args)
    if out is not None:
        chunks = Chunks.record(settings.chunks, settings.seed + 1)
        write_new(out, settings.seed)
        torch.manual_seed(settings.seed)
        world = opened(out, ActionTokens(ACTIONS, CHUNK, TEXT_WIDTH))
        deadline = time.time() + 60 * minutes
        vae = world.pipeline.bundle.modules["vae"]
        train_vae(vae, chunks, settings, Phase(out / "vae.pt", settings.vae_steps, settings.vae_rate, deadline))
        train_world(world, chunks, settings, Phase(out / "world.pt", settings.steps, settings.rate, deadline))
        write_trained(out, world)
        folder = out
    if folder is not None:
        chunks = Chunks.record(256, settings.seed + 2)
        predicted = predictions(opened(folder), chunks)
        for name, values in errors(predicted).items():
            print(f"{name:32}", *[f"{value:.5f}" for value in values])
        if drawn is not None:
            picture(chunks, predicted).save(drawn, optimize=True)


if __name__ == "__main__":
    main()
