"""Text in pictures: how much of a wanted text an OCR engine reads, as in Flow-GRPO (arXiv:2505.05470, section 4.1)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from unirl.config.dependencies import need
from unirl.config.errors import RewardError
from unirl.reward.base import RewardScorer
from unirl.reward.scoring import score_rows
from unirl.types.reward import RewardRequest, RewardResponse

QUOTED = re.compile('"([^"]*)"|\u201c([^\u201d]*)\u201d')
EXTRAS = {"rapidocr": "ocr", "paddleocr": "paddleocr"}
"""Which extra installs an engine."""
SHIPPED = ("en", "ch")
"""Languages of the models within rapidocr's wheel."""


@dataclass(frozen=True, kw_only=True)
class OCRSpec:
    """Which engine reads, and what it should find. Everything runs on the CPU."""

    engine: Literal["rapidocr", "paddleocr"] = "rapidocr"
    """rapidocr carries its models in its wheel; PaddleOCR downloads its own on first use."""
    lang: str = "en"
    """Language of the text, in PaddleOCR's spelling; rapidocr's models read `en` and `ch`."""
    target_key: str | None = None
    """Metadata key of the wanted text; None: it is the first double-quoted span of the prompt."""
    detect: bool = True
    """Look for text in the picture first; False: the whole picture is one line (5 times faster)."""
    side: int = 256
    """Text is looked for in the picture enlarged to at least this many pixels along its shorter side."""
    text_score: float = 0.5
    """Lines that the engine is less sure of, in [0, 1], are not read."""
    num_threads: int = 1
    """Pictures read at once, each by one thread."""

    toy: ClassVar[dict[str, object]] = {"side": 64}

    def __post_init__(self) -> None:
        if self.side < 32:
            raise ValueError(f"OCRSpec.side must be >= 32, got {self.side}")
        if not 0.0 <= self.text_score <= 1.0:
            raise ValueError(f"OCRSpec.text_score must lie in [0, 1], got {self.text_score}")
        if self.num_threads < 1:
            raise ValueError(f"OCRSpec.num_threads must be >= 1, got {self.num_threads}")
        if self.engine == "rapidocr" and self.lang not in SHIPPED:
            raise ValueError(f"OCRSpec.lang={self.lang!r} needs engine=paddleocr; rapidocr reads {', '.join(SHIPPED)}")
        if self.engine == "paddleocr" and (not self.detect or self.num_threads > 1):
            raise ValueError(
                "OCRSpec.engine=paddleocr always detects, one picture at a time: leave detect, num_threads"
            )


@dataclass(frozen=True)
class Line:
    """Text that was read at one place; pixels from the top left."""

    text: str
    left: float
    top: float
    bottom: float

    @property
    def middle(self) -> float:
        """Of its height."""
        return (self.top + self.bottom) / 2


class OcrEngine(Protocol):
    """An OCR engine."""

    def read(self, picture: Any) -> Sequence[Line]:
        """The lines in a picture [H, W, 3] of uint8, channels blue, green, red, in any order."""
        ...


class OCRRewardScorer(RewardScorer):
    """1 - d / n of the wanted text, n characters, and the text that is read in the picture; in [0, 1].

    The wanted text is the first double-quoted span of the prompt (straight or curly quotes), or a metadata key. What is
    read are the lines from top to bottom, pieces at one height from left to right, joined. Both lose all white space
    and become lower case. d = 0 if the wanted text occurs in what is read; else their Levenshtein distance (insert,
    delete, replace: 1 each), at most n. A picture without text scores 0; one that the engine fails on has no score.
    """

    def __init__(self, *, config: OCRSpec = OCRSpec()) -> None:
        need(config.engine, "rapidfuzz", extra=EXTRAS[config.engine], by="reward 'ocr'")
        self.config = config
        self.reads = ("images", "metadata" if config.target_key else "prompts")

    @cached_property
    def reader(self) -> OcrEngine:
        """The engine, loaded on first use."""
        return RapidOcrEngine(self.config) if self.config.engine == "rapidocr" else PaddleOcrEngine(self.config)

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.images is not None
        images = as_bgr(request.images)
        prompts, metadata = request.prompts or [""] * len(request), request.metadata or [{}] * len(request)

        def score_row(row: int) -> dict[str, float]:
            wanted = self.wanted(prompts[row], metadata[row])
            return {"ocr": similarity(in_order(self.reader.read(images[row])), wanted)}

        return score_rows(request, ("ocr",), score_row, self.config.num_threads)

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        self.wanted(prompt, metadata)

    def wanted(self, prompt: str, metadata: Mapping[str, Any]) -> str:
        """The text that the picture should show, comparable. Raises RewardError when there is none."""
        key = self.config.target_key
        if key is not None:
            text, place = metadata.get(key), f"metadata {key!r}"
        else:
            quoted = QUOTED.search(prompt)
            text, place = quoted and (quoted[1] or quoted[2]), "double quotes"
        if not isinstance(text, str) or not comparable(text):
            raise RewardError(
                f"no text in {place} that the picture should show (prompt {prompt!r}). "
                'Write it as in: a sign that says "Open", or name its metadata key in target_key'
            )
        return comparable(text)


def comparable(text: str) -> str:
    """Without white space, in lower case."""
    return "".join(text.split()).lower()


def in_order(lines: Sequence[Line]) -> str:
    """The text of lines from top to bottom, pieces whose middle lies within the height of the first from the left."""
    rows: list[list[Line]] = []
    for line in sorted(lines, key=lambda line: line.middle):
        if rows and rows[-1][0].top <= line.middle <= rows[-1][0].bottom:
            rows[-1].append(line)
        else:
            rows.append([line])
    return "".join(line.text for row in rows for line in sorted(row, key=lambda line: line.left))


def similarity(read: str, wanted: str) -> float:
    """1 - d / n in [0, 1]; `wanted` is comparable and not empty."""
    from rapidfuzz.distance import Levenshtein

    found = comparable(read)
    distance = 0 if wanted in found else min(Levenshtein.distance(found, wanted), len(wanted))
    return 1.0 - distance / len(wanted)


def as_bgr(pixels: Tensor) -> Any:
    """[B, H, W, 3] uint8 array, channels blue, green, red, of pictures [B, 3, H, W] in [0, 1]."""
    levels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
    return levels.flip(1).permute(0, 2, 3, 1).contiguous().cpu().numpy()


class RapidOcrEngine:
    """PP-OCR by onnxruntime. Text that stands on its head is not turned round."""

    def __init__(self, config: OCRSpec) -> None:
        from rapidocr import RapidOCR

        self.config = config
        threads = "EngineConfig.onnxruntime"
        self.engine: Any = RapidOCR(
            params={
                "Global.log_level": "critical",
                "Global.use_cls": False,
                "Global.text_score": config.text_score,
                "Det.limit_side_len": config.side,
                f"{threads}.intra_op_num_threads": 1,
                f"{threads}.inter_op_num_threads": 1,
            }
        )

    def read(self, picture: Any) -> list[Line]:
        found = self.engine(picture, use_det=self.config.detect)
        texts = found.txts or ()
        if self.config.detect:
            return [_line(text, box) for text, box in zip(texts, found.boxes if texts else (), strict=True)]
        height = float(len(picture))
        sure = zip(texts, found.scores or (), strict=True)
        return [Line(text, 0.0, 0.0, height) for text, score in sure if score >= self.config.text_score]


class PaddleOcrEngine:
    """PaddleOCR 3, without its corrections of whole pages."""

    def __init__(self, config: OCRSpec) -> None:
        from paddleocr import PaddleOCR

        self.engine: Any = PaddleOCR(
            lang=config.lang,
            device="cpu",
            text_det_limit_side_len=config.side,
            text_det_limit_type="min",
            text_rec_score_thresh=config.text_score,
            use_doc_orientation_classify=False,
            use_doc_unwarping=False,
            use_textline_orientation=False,
        )

    def read(self, picture: Any) -> list[Line]:
        (page,) = self.engine.predict(picture)
        return [_line(text, box) for text, box in zip(page["rec_texts"], page["rec_polys"], strict=True)]


def _line(text: str, corners: Any) -> Line:
    """A line and its corners [4, 2] of (x, y)."""
    heights = [float(y) for _, y in corners]
    return Line(text, min(float(x) for x, _ in corners), min(heights), max(heights))
