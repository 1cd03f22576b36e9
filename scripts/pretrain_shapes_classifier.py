"""Makes the weights of the shapes classifier: the detector's measures of drawn, spoiled and misleading pictures.

The network first learns from drawings. Then, in rounds, the reward's gradient is followed from those pictures to others
that the network likes; the detector measures them, and they are learned from as well. So what still fools the network
is what no round has found.

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
    flat_cover,
    largest_blob,
    overlaps,
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


# Pictures


def paint(rng: np.random.Generator) -> np.ndarray:
    """[3] a palette entry, a mixture of two, or any color."""
    entry, other = ENTRIES[rng.integers(len(ENTRIES), size=2)]
    kind = rng.choice(3, p=(0.4, 0.35, 0.25))
    mixed = (entry, entry + (other - entry) * rng.random(), rng.random(3))[kind]
    return np.clip(mixed + rng.normal(0, 0.04, 3), 0, 1)


def silhouette(rng: np.random.Generator) -> np.ndarray:
    """[SIZE, SIZE] coverage of a shape somewhere near the middle, a little stretched."""
    center, half = (0.5 + rng.uniform(-0.12, 0.12, 2)) * SIZE, SIZE * rng.uniform(0.18, 0.42)
    width, height = half * np.exp(rng.normal(0, 0.12, 2))
    return coverage(KINDS[rng.integers(len(KINDS))], SIZE, (center[0], center[1]), (width, height))


def drawing(rng: np.random.Generator) -> np.ndarray:
    """[3, SIZE, SIZE] one shape, or one made of two, flat or with stains."""
    cover = silhouette(rng)
    if rng.random() < 0.5:
        other, share = silhouette(rng), rng.random()
        ways = (np.maximum(cover, other), np.minimum(cover, other), cover + (other - cover) * share)
        cover = (*ways, np.clip(cover - share * other, 0, 1))[rng.integers(4)]
    picture = DARK[:, None, None] + (paint(rng) - DARK)[:, None, None] * cover
    if rng.random() < 0.5:
        picture = picture + rng.exponential(0.08) * stains(rng)
    return picture.clip(0, 1).astype(np.float32)


def stains(rng: np.random.Generator) -> np.ndarray:
    """[3, SIZE, SIZE] normal noise, one to eight pixels wide, of any color or grey."""
    side, channels = int(rng.choice((3, 6, 12, 24))), int(rng.choice((1, 3)))
    noise = torch.from_numpy(rng.standard_normal((1, channels, side, side)))
    return nn.functional.interpolate(noise, (SIZE, SIZE), mode="bilinear").expand(1, 3, -1, -1)[0].numpy()


def drawings(count: int, rng: np.random.Generator) -> Tensor:
    """[count, 3, SIZE, SIZE], a quarter of them faded into another."""
    pictures = torch.from_numpy(np.stack([drawing(rng) for _ in range(count)]))
    fade = torch.from_numpy(rng.uniform(0, 0.5, count) * (rng.random(count) < 0.25)).float()[:, None, None, None]
    return (1 - fade) * pictures + fade * pictures.roll(1, dims=0)


def climb(model: ShapesClassifier, pictures: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Pictures that the network likes better, and the color and shape [B, 2] that it likes them for.

    The way is the reward's gradient, blurred to blocks of one to four pixels, in 4 to 40 steps of 0.01 to 0.06 a pixel.
    """
    x, count = pictures.clone(), len(pictures)
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


# What the detector measures


def measured(picture: Tensor) -> np.ndarray:
    """[11] the detector's measures of a picture [3, SIZE, SIZE], in the network's order.

    Where the detector would not look for a shape, as the blob is too small, too large or too long, the overlaps shrink
    by as much as the limit is passed, so that they have a slope there, too.
    """
    pixels = picture.permute(1, 2, 0).double().numpy()
    blob = largest_blob(np.linalg.norm(pixels - DARK, axis=-1) > SPEC.min_contrast)
    if blob.sum() < 4:
        rest = np.sqrt(np.square(pixels - DARK).mean())
        return np.concatenate([np.linalg.norm(ENTRIES - DARK, axis=1), np.zeros(len(KINDS)), [rest]])
    median = np.median(pixels[blob], axis=0)
    cover = flat_cover(pixels, blob, median)
    residual = np.sqrt(np.square(pixels - DARK - cover[..., None] * (median - DARK)).mean())
    b, area = box(cover), blob.mean()
    stretch = MAX_ASPECT * min(b.width, b.height) / max(b.width, b.height)
    share = min(1, stretch) * min(1, area / SPEC.min_area) * min(1, SPEC.max_area / area)
    fits = [share * overlap for overlap in overlaps(cover, b).values()]
    return np.concatenate([np.linalg.norm(ENTRIES - median, axis=1), fits, [residual]])


@dataclass(frozen=True)
class Lesson:
    """Pictures and their measures."""

    pictures: Tensor  # [n, 3, SIZE, SIZE]
    measures: Tensor  # [n, 11]

    @staticmethod
    def of(pictures: Tensor) -> Lesson:
        return Lesson(pictures, torch.from_numpy(np.stack([measured(picture) for picture in pictures])).float())

    def __add__(self, other: Lesson) -> Lesson:
        return Lesson(torch.cat([self.pictures, other.pictures]), torch.cat([self.measures, other.measures]))


# Training


def fit(model: ShapesClassifier, lesson: Lesson, steps: int, learning_rate: float, rng: np.random.Generator) -> None:
    """Least squares, with mirrored pictures and a little grain."""
    weights = torch.tensor([1.0] * len(COLORS) + [2.0] * len(KINDS) + [4.0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    for _ in range(steps):
        rows = torch.from_numpy(rng.integers(len(lesson.pictures), size=192))
        pictures = lesson.pictures[rows]
        if rng.random() < 0.5:
            pictures = pictures.flip(3)
        said = torch.cat(model(pictures + 0.01 * torch.randn_like(pictures)), dim=1)
        loss = (weights * (said - lesson.measures[rows])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drawings", type=int, default=10000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--found", type=int, default=1500, help="misleading pictures per round")
    parser.add_argument("--steps", type=int, default=1200, help="at the beginning and the end; half of it in between")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    rng, start = np.random.default_rng(options.seed), time.monotonic()
    model = ShapesClassifier()
    first = lesson = Lesson.of(drawings(options.drawings, rng))
    fit(model, lesson, options.steps, 2e-3, rng)
    for number in range(1, options.rounds + 1):
        starts = [torch.from_numpy(rng.integers(len(first.pictures), size=100)) for _ in range(options.found // 100)]
        found = Lesson.of(torch.cat([climb(model, first.pictures[rows], rng)[0] for rows in starts]))
        with torch.no_grad():
            error = (torch.cat(model(found.pictures), dim=1) - found.measures).abs()
        means = [float(part.mean()) for part in error.split((len(COLORS), len(KINDS), 1), dim=1)]
        seconds = time.monotonic() - start
        print(f"round {number} {seconds:4.0f} s, off by " + ", ".join(f"{mean:.3f}" for mean in means), flush=True)
        lesson = lesson + found
        last = number == options.rounds
        fit(model, lesson, options.steps if last else options.steps // 2, 2e-3 if last else 1e-3, rng)
    save_file(model.state_dict(), WEIGHTS)


if __name__ == "__main__":
    main()
