"""Trains the shapes classifier on the detector's measures of drawn, noisy and adversarial images.

The network first learns from drawings. Then, in several rounds, gradient ascent on the reward turns drawings into
adversarial images. The detector measures them, and the network is trained on them as well.

    python scripts/pretrain_shapes_classifier.py      # about five minutes on two cores
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
from quickstart_tasks import SIZE
from safetensors.torch import save_file
from torch import Tensor, nn

from unirl.reward.local.shapes import (
    GROUND,
    MAX_ASPECT,
    box,
    coverage,
    defects,
    flat_cover,
    largest_blob,
)
from unirl.reward.local.shapes_classifier import (
    COLORS,
    KINDS,
    PALETTE,
    SPEC,
    WEIGHTS,
    ShapesClassifier,
    mean_log_prob,
)

DARK = np.array(GROUND)
ENTRIES = np.array([PALETTE[name] for name in COLORS])


# Images


def paint(rng: np.random.Generator) -> np.ndarray:
    """Returns a color [3]: a palette entry, a mixture of two, or any color."""
    entry, other = ENTRIES[rng.integers(len(ENTRIES), size=2)]
    kind = rng.choice(3, p=(0.4, 0.35, 0.25))
    mixed = (entry, entry + (other - entry) * rng.random(), rng.random(3))[kind]
    return np.clip(mixed + rng.normal(0, 0.04, 3), 0, 1)


def silhouette(rng: np.random.Generator) -> np.ndarray:
    """Returns the coverage [SIZE, SIZE] of a slightly stretched shape near the center."""
    center, half = (0.5 + rng.uniform(-0.12, 0.12, 2)) * SIZE, SIZE * rng.uniform(0.18, 0.42)
    width, height = half * np.exp(rng.normal(0, 0.12, 2))
    return coverage(KINDS[rng.integers(len(KINDS))], SIZE, (center[0], center[1]), (width, height))


def drawing(rng: np.random.Generator) -> np.ndarray:
    """Returns an image [3, SIZE, SIZE] of one shape or a combination of two, flat or with noise."""
    cover = silhouette(rng)
    if rng.random() < 0.5:
        other, share = silhouette(rng), rng.random()
        ways = (np.maximum(cover, other), np.minimum(cover, other), cover + (other - cover) * share)
        cover = (*ways, np.clip(cover - share * other, 0, 1))[rng.integers(4)]
    image = DARK[:, None, None] + (paint(rng) - DARK)[:, None, None] * cover
    if rng.random() < 0.5:
        image = image + rng.exponential(0.08) * noise(rng)
    return image.clip(0, 1).astype(np.float32)


def noise(rng: np.random.Generator) -> np.ndarray:
    """Returns normal noise [3, SIZE, SIZE] with a width of one to eight pixels, colored or grey."""
    side, channels = int(rng.choice((3, 6, 12, 24))), int(rng.choice((1, 3)))
    noise = torch.from_numpy(rng.standard_normal((1, channels, side, side)))
    return nn.functional.interpolate(noise, (SIZE, SIZE), mode="bilinear").expand(1, 3, -1, -1)[0].numpy()


def drawings(count: int, rng: np.random.Generator) -> Tensor:
    """Returns drawings [count, 3, SIZE, SIZE], a quarter of them blended with another one."""
    images = torch.from_numpy(np.stack([drawing(rng) for _ in range(count)]))
    fade = torch.from_numpy(rng.uniform(0, 0.5, count) * (rng.random(count) < 0.25)).float()[:, None, None, None]
    return (1 - fade) * images + fade * images.roll(1, dims=0)


def ascend(model: ShapesClassifier, images: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Returns images with a higher reward for a color and shape, and these colors and shapes [B, 2].

    It takes 4 to 40 steps of 0.01 to 0.06 per pixel along the gradient, which is blurred to blocks of 1 to 4 pixels.
    """
    x, count = images.clone(), len(images)
    drawn = np.stack([rng.integers(len(COLORS), size=count), rng.integers(len(KINDS), size=count)], axis=1)
    wanted, block = torch.from_numpy(drawn), int(rng.choice((1, 1, 2, 4)))
    length = float(np.exp(rng.uniform(np.log(0.01), np.log(0.06))))
    for _ in range(int(rng.integers(4, 40))):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(mean_log_prob(model(x), wanted).sum(), x)
        slope = nn.functional.interpolate(nn.functional.avg_pool2d(slope, block), (SIZE, SIZE), mode="bilinear")
        scale = slope.square().mean((1, 2, 3), keepdim=True).sqrt() + 1e-6
        x = (x + length * slope / scale).detach().clamp(0, 1)
    return x, wanted


# Measures of the detector


def measured(image: Tensor) -> np.ndarray:
    """Returns the detector's measures [11] of an image [3, SIZE, SIZE], in the network's order.

    If the blob is too small, too large or too long for the detector, the defects are moved towards 1 by the excess over
    the limit, so that they have a slope there, too.
    """
    pixels = image.permute(1, 2, 0).double().numpy()
    blob = largest_blob(np.linalg.norm(pixels - DARK, axis=-1) > SPEC.min_contrast)
    if blob.sum() < 4:
        rest = np.sqrt(np.square(pixels - DARK).mean())
        return np.concatenate([np.linalg.norm(ENTRIES - DARK, axis=1), np.ones(len(KINDS)), [rest]])
    median = np.median(pixels[blob], axis=0)
    cover = flat_cover(pixels, blob, median)
    residual = np.sqrt(np.square(pixels - DARK - cover[..., None] * (median - DARK)).mean())
    b, area = box(cover), blob.mean()
    stretch = MAX_ASPECT * min(b.width, b.height) / max(b.width, b.height)
    share = min(1, stretch) * min(1, area / SPEC.min_area) * min(1, SPEC.max_area / area)
    flaws = [1 - share * (1 - defect) for defect in defects(cover, b).values()]
    return np.concatenate([np.linalg.norm(ENTRIES - median, axis=1), flaws, [residual]])


@dataclass(frozen=True)
class TrainingSet:
    """Images and their measures."""

    images: Tensor  # [n, 3, SIZE, SIZE]
    measures: Tensor  # [n, 11]

    @staticmethod
    def of(images: Tensor) -> TrainingSet:
        return TrainingSet(images, torch.from_numpy(np.stack([measured(image) for image in images])).float())

    def __add__(self, other: TrainingSet) -> TrainingSet:
        return TrainingSet(torch.cat([self.images, other.images]), torch.cat([self.measures, other.measures]))


# Training


def fit(
    model: ShapesClassifier, training_set: TrainingSet, steps: int, learning_rate: float, rng: np.random.Generator
) -> None:
    """Trains by least squares, with mirrored images and a little noise."""
    weights = torch.tensor([1.0] * len(COLORS) + [2.0] * len(KINDS) + [4.0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    for _ in range(steps):
        rows = torch.from_numpy(rng.integers(len(training_set.images), size=192))
        images = training_set.images[rows]
        if rng.random() < 0.5:
            images = images.flip(3)
        predicted = torch.cat(model(images + 0.01 * torch.randn_like(images)), dim=1)
        loss = (weights * (predicted - training_set.measures[rows])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drawings", type=int, default=10000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--adversarial", type=int, default=1500, help="adversarial images per round")
    parser.add_argument("--steps", type=int, default=1200, help="steps in the first and last round; half in the others")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    rng, start = np.random.default_rng(options.seed), time.monotonic()
    model = ShapesClassifier()
    first = training_set = TrainingSet.of(drawings(options.drawings, rng))
    fit(model, training_set, options.steps, 2e-3, rng)
    for number in range(1, options.rounds + 1):
        starts = [
            torch.from_numpy(rng.integers(len(first.images), size=100)) for _ in range(options.adversarial // 100)
        ]
        adversarial = TrainingSet.of(torch.cat([ascend(model, first.images[rows], rng)[0] for rows in starts]))
        with torch.no_grad():
            error = (torch.cat(model(adversarial.images), dim=1) - adversarial.measures).abs()
        means = [float(part.mean()) for part in error.split((len(COLORS), len(KINDS), 1), dim=1)]
        seconds = time.monotonic() - start
        print(f"round {number} {seconds:4.0f} s, mean error " + ", ".join(f"{mean:.3f}" for mean in means), flush=True)
        training_set = training_set + adversarial
        last = number == options.rounds
        fit(model, training_set, options.steps if last else options.steps // 2, 2e-3 if last else 1e-3, rng)
    save_file(model.state_dict(), WEIGHTS)


if __name__ == "__main__":
    main()
