"""Vision language models as judges, behind an OpenAI-compatible endpoint: one question about one picture at a time."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from unirl.config.errors import RewardError
from unirl.reward.base import RewardScorer
from unirl.reward.client.encoding import encode_image
from unirl.reward.judges.endpoint import SHOWN, TOY, Endpoint, JudgeReply, JudgeSpec, api_key
from unirl.reward.scoring import score_rows
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse


class Judge(Protocol):
    """Something that looks at a picture and answers."""

    def ask(self, picture: bytes, question: str, max_tokens: int, alternatives: bool = False) -> JudgeReply:
        """The answer to a question about a PNG file. Raises RewardError."""
        ...


class JudgeScorer(RewardScorer):
    """Scores of one picture at a time by a judge. What the judge says must have the asked form, or is a failure."""

    names: tuple[str, ...]
    """The components; the first is the total."""
    reads: tuple[str, ...] = ("prompts", "images")
    capabilities = Capabilities(modalities=("image",))
    config: JudgeSpec

    def __init__(self, config: JudgeSpec) -> None:
        self.config = config
        self.key = api_key(config)

    @cached_property
    def judge(self) -> Judge:
        """The connection, opened on first use."""
        return Endpoint(self.config if self.config.base_url != TOY else on_this_machine(self.config), self.key)

    def check_start(self) -> None:
        """Raises RewardError when nobody is at the address, the key is refused, or the model is not served."""
        if self.config.base_url != TOY:
            Endpoint(self.config, self.key).check_model()

    @abstractmethod
    def score_image(self, picture: bytes, prompt: str, metadata: Mapping[str, Any]) -> Mapping[str, float]:
        """The scores by name of a PNG file."""

    def score(self, request: RewardRequest) -> RewardResponse:
        images, prompts = request.images, request.prompts or [""] * len(request)
        metadata = request.metadata or [{}] * len(request)
        assert images is not None

        def score_row(row: int) -> Mapping[str, float]:
            return self.score_image(png(images[row]), prompts[row], metadata[row])

        return score_rows(request, self.names, score_row, self.config.concurrency)


def on_this_machine(config: JudgeSpec) -> JudgeSpec:
    """The same, asked of a stand-in."""
    from unirl.reward.judges.toy_endpoint import toy_endpoint

    return replace(config, base_url=toy_endpoint())


def png(pixels: Tensor) -> bytes:
    """A picture [3, H, W] in [0, 1] as a PNG file."""
    return encode_image(pixels, "png", 0).data


def read_scores(text: str, labels: Mapping[str, str], low: float, high: float) -> dict[str, float]:
    """name -> the number after each label, which stands at the start of a line: `**Realism:** 2`, `Style (1-5): 4.5`.

    Raises:
        RewardError: a label is missing, stands before two numbers, or before one out of [low, high].
    """
    return {name: _score_after(label, text, low, high) for name, label in labels.items()}


def _score_after(label: str, text: str, low: float, high: float) -> float:
    line = rf"^[^\w\n]*{re.escape(label)}(?:[ \t]*\([^)\n]*\))?[*_ \t]*[:=][*_ \t]*(-?\d+(?:\.\d+)?)[*_ \t\r.]*$"
    found = {float(number) for number in re.findall(line, text, re.MULTILINE | re.IGNORECASE)}
    if len(found) != 1:
        said = f"says {sorted(found)}" if found else "does not say it in the asked form"
        raise RewardError(f"the judge was asked for one line '{label}: number' and {said}: {text[:SHOWN]!r}")
    (score,) = found
    if not low <= score <= high:
        raise RewardError(f"the judge gave {label} {score:g}, which lies outside {low:g} to {high:g}: {text[:SHOWN]!r}")
    return score
