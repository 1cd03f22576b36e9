"""Makes the weights of the quick start and of its variant with letters: a small SD3 that often ignores its prompt.

The images are drawn here, so nothing is downloaded. Like captions on the web, some captions are wrong: with
probability `--wrong`, a caption names another color, shape or letter than the image shows. The model thus learns to
render all shapes, but to follow its prompt only as often as the captions are right. RL then teaches it to follow them.

    python scripts/pretrain_quickstart.py shapes --out unirl/models/sd3/quickstart      # about ten minutes on two cores
    python scripts/pretrain_quickstart.py letters --out unirl/models/sd3/quickstart_letters --steps 2000 --batch-size 32
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.quickstart_tasks import SIZE, TASKS, Drawing, Task


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the training run."""

    steps: int = 3000
    batch_size: int = 64
    learning_rate: float = 2e-3
    pictures: int = 9600
    """Number of images, which are drawn once. Batches are taken from them."""
    ema_decay: float = 0.999
    seed: int = 0


# The model


def merged(pieces: list[str], merges: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the pieces of a word after byte-pair merging. Merges are applied in the order of their ranks."""
    while True:
        pairs = [pair for pair in itertools.pairwise(pieces) if pair in merges]
        if not pairs:
            return pieces
        best = min(pairs, key=merges.index)
        i = list(itertools.pairwise(pieces)).index(best)
        pieces = [*pieces[:i], best[0] + best[1], *pieces[i + 2 :]]


def build_tokenizer(task: Task) -> Any:
    """Returns a CLIP tokenizer. Each word of the task is one token, and any other word is split into letters."""
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(33, 127)]
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    captions = [task.caption(drawing, style) for drawing in task.drawings for style in range(len(task.captions))]
    merges: list[tuple[str, str]] = []
    for word in sorted({word for text in captions for word in text.split() if word.isalpha()}):
        parts = merged([*word[:-1], word[-1] + "</w>"], merges)
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            pieces.append(parts[0] + parts[1])
            parts = merged(parts, merges)
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=task.max_tokens)


def build_text_encoder(tokenizer: Any, width: int = 64) -> Any:
    """Returns a CLIP text model of two layers, which is trained together with the transformer."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        projection_dim=width,
        hidden_act="gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def build_transformer(text_width: int = 64, heads: int = 4, layers: int = 4, patch: int = 4) -> Any:
    """Returns an MMDiT with 2.3 million parameters that works on pixels: 36 image tokens of 4 x 4 pixels."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=SIZE,
        patch_size=patch,
        in_channels=3,
        out_channels=3,
        num_layers=layers,
        attention_head_dim=32,
        num_attention_heads=heads,
        joint_attention_dim=text_width,
        caption_projection_dim=32 * heads,
        pooled_projection_dim=text_width,
        pos_embed_max_size=SIZE // patch,
        qk_norm="rms_norm",
    )


@dataclass(frozen=True)
class Model:
    """The parts of the model that are saved."""

    tokenizer: Any
    text_encoder: Any
    transformer: Any

    @staticmethod
    def build(task: Task, seed: int) -> Model:
        """Builds a model with random weights."""
        torch.manual_seed(seed)
        tokenizer = build_tokenizer(task)
        return Model(tokenizer, build_text_encoder(tokenizer), build_transformer())

    def parameters(self) -> list[Tensor]:
        return [*self.transformer.parameters(), *self.text_encoder.parameters()]

    def velocity(self, x: Tensor, sigma: Tensor, tokens: Tensor) -> Tensor:
        """Predicts noise minus image, [B, 3, H, W]. The text is the next to last layer of CLIP, as in SD3."""
        out = self.text_encoder(tokens, output_hidden_states=True)
        return self.transformer(
            hidden_states=x,
            encoder_hidden_states=out.hidden_states[-2],
            pooled_projections=out.text_embeds,
            timestep=1000 * sigma,
            return_dict=False,
        )[0]

    def save(self, folder: Path) -> None:
        """Saves in the folder layout of diffusers, in bfloat16."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        self.transformer.to(torch.bfloat16).save_pretrained(folder / "transformer")
        self.text_encoder.to(torch.bfloat16).save_pretrained(folder / "text_encoder")
        self.tokenizer.save_pretrained(folder / "tokenizer")
        FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")
        absent = (
            "vae",
            "text_encoder_2",
            "text_encoder_3",
            "tokenizer_2",
            "tokenizer_3",
            "image_encoder",
            "feature_extractor",
        )
        index: dict[str, Any] = {
            "_class_name": "StableDiffusion3Pipeline",
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "transformer": ["diffusers", "SD3Transformer2DModel"],
        } | {name: [None, None] for name in absent}
        (folder / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


# Training


@dataclass(frozen=True)
class Stock:
    """Images from which batches are taken."""

    task: Task
    drawings: list[Drawing]
    pictures: Tensor  # [n, 3, H, W] in [-1, 1]

    @staticmethod
    def make(task: Task, number: int, rng: np.random.Generator) -> Stock:
        """Draws `number` images, the same number for each drawing."""
        drawings = [drawing for drawing in task.drawings for _ in range(number // len(task.drawings))]
        pixels = torch.from_numpy(np.stack([task.draw(drawing, SIZE, rng) for drawing in drawings]))
        return Stock(task, drawings, 2 * pixels - 1)


def learning_rate(step: int, settings: Settings) -> float:
    """Warms up for 50 steps, then decays to 1/50 along a cosine."""
    decay = 0.51 + 0.49 * math.cos(math.pi * step / settings.steps)
    return settings.learning_rate * min(1.0, (step + 1) / 50) * decay


def train(model: Model, task: Task, settings: Settings, wrong: float) -> None:
    """Trains by flow matching at logit-normal sigmas. The model gets the moving average of the weights."""
    rng = np.random.default_rng(settings.seed)
    stock = Stock.make(task, settings.pictures, rng)
    parameters = model.parameters()
    average = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    start = time.time()
    for step in range(settings.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, settings)
        loss = flow_matching_loss(model, stock, settings.batch_size, wrong, rng)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay = min(settings.ema_decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - decay)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{settings.steps}  loss {loss.item():.4f}  {time.time() - start:.0f} s", flush=True)
    torch._foreach_copy_([p.detach() for p in parameters], average)


def flow_matching_loss(model: Model, stock: Stock, rows: int, wrong: float, rng: np.random.Generator) -> Tensor:
    """Returns the mean squared error of the velocity on a batch with random noise, sigmas and captions."""
    chosen = rng.integers(len(stock.drawings), size=rows)
    captions = [stock.task.noisy_caption(stock.drawings[row], wrong, rng) for row in chosen]
    tokens = model.tokenizer(captions, padding="max_length", return_tensors="pt").input_ids
    x0 = stock.pictures[chosen]
    noise = torch.randn_like(x0)
    sigma = torch.sigmoid(torch.randn(rows))
    s = sigma[:, None, None, None]
    return (model.velocity((1 - s) * x0 + s * noise, sigma, tokens) - (noise - x0)).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--wrong", type=float, help="share of wrong captions (default: the task's)")
    for name, default in vars(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    args = vars(parser.parse_args())
    task, out, wrong = TASKS[args.pop("task")], args.pop("out"), args.pop("wrong")
    settings = Settings(**args)
    model = Model.build(task, settings.seed)
    train(model, task, settings, task.wrong if wrong is None else wrong)
    model.save(out)


if __name__ == "__main__":
    main()
