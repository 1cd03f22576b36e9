"""Vision language models as judges: a scorer asks an OpenAI-compatible endpoint one question about one image."""

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
    """Answers questions about images."""

    def ask(self, image: bytes, question: str, max_tokens: int, alternatives: bool = False) -> JudgeReply:
        """Returns the answer to a question about a PNG file. Raises RewardError."""
        ...


class JudgeScorer(RewardScorer):
    """Scores one image at a time by a judge. A reply that does not have the requested form is a failure."""

    names: tuple[str, ...]
    """The components; the first one is the total."""
    reads: tuple[str, ...] = ("prompts", "images")
    capabilities = Capabilities(modalities=("image",))
    config: JudgeSpec

    def __init__(self, config: JudgeSpec) -> None:
        self.config = config
        self.key = api_key(config)

    @cached_property
    def judge(self) -> Judge:
        """The endpoint, opened on first use. At toy scale it is an endpoint in this process."""
        return Endpoint(self.config if self.config.base_url != TOY else with_toy_endpoint(self.config), self.key)

    def check_start(self) -> None:
        """Raises RewardError when no server answers at the address, it refuses the key or does not serve the model."""
        if self.config.base_url != TOY:
            Endpoint(self.config, self.key).check_model()

    @abstractmethod
    def score_image(self, image: bytes, prompt: str, metadata: Mapping[str, Any]) -> Mapping[str, float]:
        """Returns the scores of a PNG file by name."""

    def score(self, request: RewardRequest) -> RewardResponse:
        images, prompts = request.images, request.prompts or [""] * len(request)
        metadata = request.metadata or [{}] * len(request)
        assert images is not None

        def score_row(row: int) -> Mapping[str, float]:
            return self.score_image(png(images[row]), prompts[row], metadata[row])

        return score_rows(request, self.names, score_row, self.config.concurrency)


def with_toy_endpoint(config: JudgeSpec) -> JudgeSpec:
    """Returns the config with the address of the toy endpoint of this process."""
    from unirl.reward.judges.toy_endpoint import toy_endpoint

    return replace(config, base_url=toy_endpoint())


def png(pixels: Tensor) -> bytes:
    """Returns an image [3, H, W] in [0, 1] as a PNG file."""
    return encode_image(pixels, "png", 0).data


def read_scores(text: str, labels: Mapping[str, str], low: float, high: float) -> dict[str, float]:
    """Returns the number after each label, by name. A label begins a line: `**Realism:** 2`, `Style (1-5): 4.5`.

    Raises:
        RewardError: a label is missing, has two different numbers, or has a number outside [low, high].
    """
    return {name: _score_after(label, text, low, high) for name, label in labels.items()}


def _score_after(label: str, text: str, low: float, high: float) -> float:
    line = rf"^[^\w\n]*{re.escape(label)}(?:[ \t]*\([^)\n]*\))?[*_ \t]*[:=][*_ \t]*(-?\d+(?:\.\d+)?)[*_ \t\r.]*$"
    numbers = {float(number) for number in re.findall(line, text, re.MULTILINE | re.IGNORECASE)}
    if len(numbers) != 1:
        reply = f"says {sorted(numbers)}" if numbers else "does not say it in the asked form"
        raise RewardError(f"the judge was asked for one line '{label}: number' and {reply}: {text[:SHOWN]!r}")
    (score,) = numbers
    if not low <= score <= high:
        raise RewardError(f"the judge gave {label} {score:g}, which lies outside {low:g} to {high:g}: {text[:SHOWN]!r}")
    return score
