"""Text in images: the share of a target text that an OCR engine reads, as in Flow-GRPO (arXiv:2505.05470, 4.1)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from unirl.config.dependencies import need
from unirl.config.errors import RewardError
from unirl.reward.base import RewardScorer
from unirl.reward.client.encoding import uint8_levels
from unirl.reward.scoring import score_rows
from unirl.types.reward import RewardRequest, RewardResponse

Levels = NDArray[np.uint8]

QUOTED = re.compile('"([^"]*)"|\u201c([^\u201d]*)\u201d')
EXTRAS = {"rapidocr": "ocr", "paddleocr": "paddleocr"}
"""The extra that installs each engine."""
SHIPPED = ("en", "ch")
"""Languages of the models in rapidocr's wheel."""


@dataclass(frozen=True, kw_only=True)
class OCRSpec:
    """The OCR engine and the place of the target text. Everything runs on the CPU."""

    engine: Literal["rapidocr", "paddleocr"] = "rapidocr"
    """The wheel of rapidocr contains its models. PaddleOCR downloads its models on first use."""
    lang: str = "en"
    """Language of the text, in PaddleOCR's spelling. The models of rapidocr read `en` and `ch`."""
    target_key: str | None = None
    """Metadata key of the target text. None: the first double-quoted span of the prompt."""
    detect: bool = True
    """Detect the places of text first. False: the whole image is one line (5 times faster)."""
    side: int = 256
    """Text is detected in the image enlarged to at least this many pixels along its shorter side."""
    text_score: float = 0.5
    """Lines with a confidence below this, in [0, 1], are ignored."""
    num_threads: int = 1
    """Number of images that are read at the same time, each by one thread."""

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
                "OCRSpec.engine=paddleocr detects text and reads one image at a time: remove detect, num_threads"
            )


@dataclass(frozen=True)
class Line:
    """A line of text and its place, in pixels from the top left."""

    text: str
    left: float
    top: float
    bottom: float

    @property
    def middle(self) -> float:
        """The vertical centre of the line."""
        return (self.top + self.bottom) / 2


Reader = Callable[[Levels], Sequence[Line]]
"""Returns the lines in an image [H, W, 3], channels blue, green, red, in any order."""


class OCRRewardScorer(RewardScorer):
    """1 - d / n in [0, 1], where d is the distance of the recognised text from the target text of n characters.

    The target text is the first double-quoted span of the prompt (straight or curly quotes), or the value of a metadata
    key. The recognised lines are joined from top to bottom, and pieces at one height from left to right. White space is
    removed from both texts, and case is ignored. d is 0 if the target text occurs in the recognised text. Otherwise it
    is their Levenshtein distance (an insertion, deletion or replacement costs 1), at most n. An image without text
    scores 0. An image on which the engine fails has no score.
    """

    reads_levels = True

    def __init__(self, *, config: OCRSpec = OCRSpec()) -> None:
        self.config = config
        self.reads = ("images", "metadata" if config.target_key else "prompts")
        self.check_start()

    def check_start(self) -> None:
        """Raises DependencyError if the engine is not installed: for a run, before it makes a folder."""
        need(self.config.engine, "rapidfuzz", extra=EXTRAS[self.config.engine], by="reward 'ocr'")

    @cached_property
    def read(self) -> Reader:
        """The engine, loaded on first use."""
        return rapidocr_reader(self.config) if self.config.engine == "rapidocr" else paddleocr_reader(self.config)

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.images is not None
        images = uint8_levels(request.images.flip(1))  # the readers take blue, green, red
        prompts, metadata = request.prompts or [""] * len(request), request.metadata or [{}] * len(request)

        def score_row(row: int) -> dict[str, float]:
            target = self.target(prompts[row], metadata[row])
            return {"ocr": similarity(in_reading_order(self.read(images[row])), target)}

        return score_rows(request, ("ocr",), score_row, self.config.num_threads)

    def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
        self.target(prompt, metadata)

    def target(self, prompt: str, metadata: Mapping[str, object]) -> str:
        """Returns the comparable text that the image should show. Raises RewardError when there is none."""
        key = self.config.target_key
        if key is not None:
            text, place = metadata.get(key), f"metadata {key!r}"
        else:
            quoted = QUOTED.search(prompt)
            text, place = quoted and (quoted[1] or quoted[2]), "double quotes"
        if not isinstance(text, str) or not comparable(text):
            raise RewardError(
                f"no text in {place} that the image should show (prompt {prompt!r}). "
                'Write it as in: a sign that says "Open", or name its metadata key in target_key'
            )
        return comparable(text)


def comparable(text: str) -> str:
    """Returns a text in lower case without white space."""
    return "".join(text.split()).lower()


def in_reading_order(lines: Sequence[Line]) -> str:
    """Returns the text of lines from top to bottom, and from left to right for pieces that overlap in height."""
    rows: list[list[Line]] = []
    for line in sorted(lines, key=lambda line: line.middle):
        if rows and rows[-1][0].top <= line.middle <= rows[-1][0].bottom:
            rows[-1].append(line)
        else:
            rows.append([line])
    return "".join(line.text for row in rows for line in sorted(row, key=lambda line: line.left))


def similarity(recognised: str, target: str) -> float:
    """Returns 1 - d / n in [0, 1]; `target` is comparable and not empty."""
    from rapidfuzz.distance import Levenshtein

    text = comparable(recognised)
    distance = 0 if target in text else min(Levenshtein.distance(text, target), len(target))
    return 1.0 - distance / len(target)


def rapidocr_reader(config: OCRSpec) -> Reader:
    """Returns PP-OCR by onnxruntime. Text that is upside down is not rotated."""
    from rapidocr import RapidOCR

    threads = "EngineConfig.onnxruntime"
    engine = RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.use_cls": False,
            "Global.text_score": config.text_score,
            "Det.limit_side_len": config.side,
            f"{threads}.intra_op_num_threads": 1,
            f"{threads}.inter_op_num_threads": 1,
        }
    )

    def read(image: Levels) -> list[Line]:
        result = engine(image, use_det=config.detect)
        texts = result.txts or ()
        if config.detect:
            return [_line(text, box) for text, box in zip(texts, result.boxes if texts else (), strict=True)]
        scored = zip(texts, result.scores or (), strict=True)
        return [Line(text, 0.0, 0.0, float(len(image))) for text, score in scored if score >= config.text_score]

    return read


def paddleocr_reader(config: OCRSpec) -> Reader:
    """Returns PaddleOCR 3 without its corrections of whole pages."""
    from paddleocr import PaddleOCR

    engine = PaddleOCR(
        lang=config.lang,
        device="cpu",
        text_det_limit_side_len=config.side,
        text_det_limit_type="min",
        text_rec_score_thresh=config.text_score,
        use_doc_orientation_classify=False,
        use_doc_unwarping=False,
        use_textline_orientation=False,
    )

    def read(image: Levels) -> list[Line]:
        (page,) = engine.predict(image)
        return [_line(text, box) for text, box in zip(page["rec_texts"], page["rec_polys"], strict=True)]

    return read


def _line(text: str, corners: Iterable[tuple[float, float]]) -> Line:
    """Returns a line of text with corners [4, 2] of (x, y)."""
    places, heights = zip(*corners, strict=True)
    return Line(text, float(min(places)), float(min(heights)), float(max(heights)))
