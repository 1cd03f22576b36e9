"""Makes the weights of the shapes classifier: colour and shape of drawn pictures, and whether they are clean.

python scripts/pretrain_shapes_classifier.py      # about two minutes on two cores
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from pretrain_quickstart import ALL, SIZE, draw
from safetensors.torch import save_file
from torch import Tensor, nn

from unirl.reward.local.shapes_classifier import COLORS, KINDS, WEIGHTS, ShapesClassifier

SPOILED = 0.25
"""Largest standard deviation of what spoils a picture; a clean one has at most a tenth of it."""


def batch(size: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pictures [B, 3, 24, 24], their colours [B] and shapes [B], and whether they are clean [B]; half of them are.

    The others have grain, stains several pixels wide, or are faded into the next picture.
    """
    chosen = [ALL[int(i)] for i in rng.integers(len(ALL), size=size)]
    drawn = torch.from_numpy(np.stack([draw(drawing, SIZE, rng) for drawing in chosen]))
    clean = rng.random(size) < 0.5
    kind = rng.integers(3, size=size)

    def amount(mine: np.ndarray, low: float, high: float) -> Tensor:
        """[B, 1, 1, 1] how much of one way to be spoiled each picture has."""
        drawn_amount = np.where(mine & ~clean, rng.uniform(low, high, size), 0.0)
        return torch.from_numpy(drawn_amount).float()[:, None, None, None]

    grain = torch.from_numpy(rng.standard_normal(drawn.shape)).float()
    coarse = torch.from_numpy(rng.standard_normal((size, 3, 6, 6))).float()
    stains = nn.functional.interpolate(coarse, (SIZE, SIZE), mode="bilinear")
    fade = amount(kind == 2, 0.15, 0.5)
    a_little = torch.from_numpy(rng.uniform(0, SPOILED / 10, size)).float()[:, None, None, None]
    pictures = (1 - fade) * drawn + fade * drawn.roll(1, dims=0)
    pictures += (a_little + amount(kind == 0, 0.05, SPOILED)) * grain + amount(kind == 1, 0.08, SPOILED) * stains
    color = torch.tensor([COLORS.index(color) for color, _ in chosen])
    shape = torch.tensor([KINDS.index(shape) for _, shape in chosen])
    return pictures.clamp(0, 1), color, shape, torch.from_numpy(clean).long()


def accuracy(model: ShapesClassifier, rng: np.random.Generator) -> list[float]:
    """The share of 2000 new pictures of which colour, shape, cleanness are right."""
    pictures, *truths = batch(2000, rng)
    with torch.no_grad():
        said = model(pictures)
    return [float((log_probs.argmax(1) == truth).float().mean()) for log_probs, truth in zip(said, truths, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    model = ShapesClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=options.steps)
    start = time.monotonic()
    for step in range(options.steps):
        pictures, *truths = batch(options.batch_size, rng)
        # Smoothed labels leave a gradient where the answer is already right.
        loss = sum(
            0.9 * nn.functional.nll_loss(said, truth) - 0.1 * said.mean()
            for said, truth in zip(model(pictures), truths, strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            print(f"{step:5d} {time.monotonic() - start:5.0f} s  loss {loss.item():.3f}", flush=True)
    shares = accuracy(model, np.random.default_rng(options.seed + 1))
    print("right of new pictures: " + ", ".join(f"{share:.4f}" for share in shares) + " (colour, shape, clean)")
    save_file(model.state_dict(), WEIGHTS)


if __name__ == "__main__":
    main()
