"""Measures scorers that run on a CPU: rows per second on one core, and how many drawn texts the OCR reads.

    python benchmarks/rewards.py [--runs 3] [--fonts FILE.ttf ...] [--json out.json]

Times are CPU times of the process, so that other processes on the machine do not count. Mathematical answers are
compared in a separate process, so their times are wall times.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from harness import Clock, seconds, write

from scripts.lettering import FONTS, ink_of, lettered
from unirl.data.datasets import load_prompts
from unirl.reward.base import RewardScorer
from unirl.reward.local.gsm8k_exact_match import GSM8KExactMatchRewardScorer
from unirl.reward.local.math_boxed import MathBoxedRewardScorer
from unirl.reward.local.ocr import OCRRewardScorer, OCRSpec
from unirl.types.reward import RewardRequest

WORDS = ("Open Daily", "SALE 50%", "New York", "Fresh Bread", "Zebra", "Library", "Exit 7B", "Quantum 42", "jazz quiz")
DIGITS = tuple("0123456789")
PROBLEMS = Path(__file__).parent.parent / "datasets" / "arithmetic" / "train.jsonl"


@dataclass(frozen=True)
class Rate:
    """Rate and scores of one scorer on one core."""

    name: str
    shapes: dict[str, Any]
    clock: str
    rows_per_second: float
    exact: float
    """Fraction of rows with the score 1. It would be 1 for a perfect scorer."""
    mean_score: float

    def line(self) -> str:
        """Returns the result as a line of text."""
        rate = f"{self.rows_per_second:9.2f} rows/s by {self.clock}"
        return f"{self.name:24s} {rate}   exact {self.exact:.3f}   mean {self.mean_score:.3f}"


def rate(
    name: str, shapes: dict[str, Any], scorer: RewardScorer, request: RewardRequest, runs: int, clock: Clock
) -> Rate:
    """Measures the median of `runs` runs, after a warm-up that gives the scores."""
    scores = scorer.score(request).total
    each = statistics.median(seconds(lambda: scorer.score(request), clock) for _ in range(runs)) / len(request)
    exact, mean = float((scores == 1).float().mean()), float(scores.mean())
    return Rate(name, shapes | {"rows": len(request)}, clock.__name__, 1 / each, exact, mean)


def ocr(size: int, spec: OCRSpec, words: Sequence[str], runs: int) -> Rate:
    """Measures the OCR on words in all fonts. They fill a tenth of the image height with detection, else all of it."""
    rng = random.Random(0)
    height = size // 10 if spec.detect else size - 6
    drawn = [(word, font) for font in FONTS for word in words]
    request = RewardRequest(
        sample_ids=[f"{word} {font}" for word, font in drawn],
        prompts=[f'"{word}"' for word, _ in drawn],
        images=torch.stack([lettered([w], font=f, size=size, height=height, colors=colors(rng)) for w, f in drawn]),
    )
    name = f"ocr {size} px" + (f", side {spec.side}" if spec.detect else ", one line")
    return rate(name, asdict(spec), OCRRewardScorer(config=spec), request, runs, time.process_time)


def colors(rng: random.Random) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the colors of text and background, one dark and one light."""
    dark, light = ((rng.randrange(a, a + 90), rng.randrange(a, a + 90), rng.randrange(a, a + 90)) for a in (0, 165))
    return (dark, light) if rng.random() < 0.5 else (light, dark)


def answers(name: str, scorer: RewardScorer, say: Callable[[str], str], runs: int, clock: Clock) -> Rate:
    """Measures a reward on the right answers of the arithmetic set, in the form that it requires."""
    problems = load_prompts(PROBLEMS)
    request = RewardRequest(
        sample_ids=[problem.prompt_id for problem in problems],
        texts=[f"Let me think. {say(problem.metadata['answer'])}" for problem in problems],
        metadata=[problem.metadata for problem in problems],
    )
    return rate(name, {}, scorer, request, runs, clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fonts", nargs="*", default=[], help="font files to use in addition to the built-in fonts")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for path in options.fonts:
        FONTS[Path(path).stem] = ink_of(path)
    boxed, marked = MathBoxedRewardScorer(), GSM8KExactMatchRewardScorer()
    rates = []
    for measure in (
        lambda: ocr(256, OCRSpec(), WORDS, options.runs),
        lambda: ocr(256, OCRSpec(side=512), WORDS, options.runs),
        lambda: ocr(512, OCRSpec(), WORDS, options.runs),
        lambda: ocr(1024, OCRSpec(), WORDS, options.runs),
        lambda: ocr(32, OCRSpec(detect=False, text_score=0.0), DIGITS, options.runs),
        lambda: answers("math_boxed", boxed, r"\boxed{{{}}}".format, options.runs, time.perf_counter),
        lambda: answers("gsm8k_exact_match", marked, "#### {}".format, options.runs, time.process_time),
    ):
        rates.append(measure())
        print(rates[-1].line(), flush=True)
    if options.json:
        write(rates, options.json)


if __name__ == "__main__":
    main()
