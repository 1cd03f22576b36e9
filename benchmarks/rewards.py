"""Scorers that run on a CPU: rows per second of one core, and how much of what was drawn the OCR reads.

    python benchmarks/rewards.py [--runs 3] [--fonts FILE.ttf ...] [--json out.json]

Seconds are those of the process (one thread works), so that others on the machine do not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness import seconds, write

from unirl.reward.local.ocr import OCRRewardScorer, OCRSpec
from unirl.testing.lettering import FONTS, ink_of, lettered
from unirl.types.reward import RewardRequest

WORDS = ("Open Daily", "SALE 50%", "New York", "Fresh Bread", "Zebra", "Library", "Exit 7B", "Quantum 42", "jazz quiz")


@dataclass(frozen=True)
class Rate:
    """What one core does in a second."""

    name: str
    shapes: dict[str, int | str | bool]
    rows_per_second: float
    exact: float
    """Share of the words that were read without a fault."""
    mean_score: float


def ocr(size: int, spec: OCRSpec, words: Sequence[str], runs: int) -> Rate:
    """The OCR reward on words in all fonts and several colors, a tenth of the picture high (alone: all of it)."""
    scorer, rng = OCRRewardScorer(config=spec), random.Random(0)
    height = size // 10 if spec.detect else size - 6
    drawn = [(word, lettered([word], font=font, size=size, height=height, colors=colors(rng)))
             for font in FONTS for word in words]  # fmt: skip
    names = [word for word, _ in drawn]
    request = RewardRequest(
        sample_ids=[str(row) for row in range(len(drawn))],
        prompts=[f'"{word}"' for word in names],
        images=torch.stack([picture for _, picture in drawn]),
    )
    scores = scorer.score(request).total
    each = statistics.median(seconds(lambda: scorer.score(request), time.process_time) for _ in range(runs)) / len(
        drawn
    )
    shapes = {"size": size, "pictures": len(drawn), **asdict(spec)}
    return Rate("ocr", shapes, 1 / each, float((scores == 1).float().mean()), float(scores.mean()))


def colors(rng: random.Random) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Ink and ground, one dark and one light."""
    dark, light = ((rng.randrange(a, a + 90), rng.randrange(a, a + 90), rng.randrange(a, a + 90)) for a in (0, 165))
    return (dark, light) if rng.random() < 0.5 else (light, dark)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fonts", nargs="*", default=[], help="font files, read beside the built-in fonts")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for path in arguments.fonts:
        FONTS[Path(path).stem] = ink_of(path)
    cases = [
        (256, OCRSpec(side=256), WORDS),
        (256, OCRSpec(), WORDS),
        (512, OCRSpec(), WORDS),
        (1024, OCRSpec(), WORDS),
        (32, OCRSpec(detect=False, text_score=0.0), tuple("0123456789")),
    ]
    rates = []
    for size, spec, words in cases:
        rates.append(ocr(size, spec, words, arguments.runs))
        r = rates[-1]
        print(f"{r.name} {size:5d} px  detect={spec.detect} side={spec.side:4d}  {r.rows_per_second:6.2f} rows/s/core  "
              f"exact {r.exact:.3f}  mean {r.mean_score:.3f}", flush=True)  # fmt: skip
    if arguments.json:
        write(rates, arguments.json)


if __name__ == "__main__":
    main()
