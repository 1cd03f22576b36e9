"""Makes the weights of the shapes classifier: colour and shape of drawn pictures, grain and blur included.

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

GRAIN = 0.15
"""Largest standard deviation of the noise on a picture."""


def batch(size: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures [B, 3, 24, 24] with grain, some half faded into another one; colours [B] and shapes [B]."""
    chosen = [ALL[int(i)] for i in rng.integers(len(ALL), size=size)]
    clean = torch.from_numpy(np.stack([draw(drawing, SIZE, rng) for drawing in chosen]))
    others = clean.roll(1, dims=0)
    fade = torch.from_numpy(np.where(rng.random(size) < 0.5, rng.uniform(0, 0.4, size), 0.0)).float()[
        :, None, None, None
    ]
    grain = torch.from_numpy(rng.uniform(0, GRAIN, size)).float()[:, None, None, None]
    noise = torch.from_numpy(rng.standard_normal(clean.shape)).float()
    pictures = ((1 - fade) * clean + fade * others + grain * noise).clamp(0, 1)
    color = torch.tensor([COLORS.index(color) for color, _ in chosen])
    shape = torch.tensor([KINDS.index(shape) for _, shape in chosen])
    return pictures, color, shape


def accuracy(model: ShapesClassifier, rng: np.random.Generator) -> float:
    """The share of 2000 new pictures of which colour and shape are right."""
    pictures, color, shape = batch(2000, rng)
    with torch.no_grad():
        colors, shapes = model(pictures)
    return float(((colors.argmax(1) == color) & (shapes.argmax(1) == shape)).float().mean())


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
        pictures, color, shape = batch(options.batch_size, rng)
        colors, shapes = model(pictures)
        # Smoothed labels leave a gradient where the answer is already right.
        loss = sum(
            nn.functional.nll_loss(said, truth) * 0.9 - 0.1 * said.mean()
            for said, truth in ((colors, color), (shapes, shape))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            print(f"{step:5d} {time.monotonic() - start:5.0f} s  loss {loss.item():.3f}", flush=True)
    print(f"colour and shape right of new pictures: {accuracy(model, np.random.default_rng(options.seed + 1)):.4f}")
    save_file(model.state_dict(), WEIGHTS)


if __name__ == "__main__":
    main()
