"""Vision language models as judges: a scorer asks an OpenAI-compatible endpoint one question about one image."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property

from unirl.config.errors import RewardError
from unirl.reward.base import RewardScorer
from unirl.reward.client.encoding import encode_image
from unirl.reward.judges.endpoint import SHOWN, TOY, Endpoint, JudgeSpec, api_key
from unirl.reward.scoring import score_rows
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse


class JudgeScorer(RewardScorer):
    """Scores one image at a time by a judge. A reply that does not have the requested form is a failure."""

    cost = None
    names: tuple[str, ...]
    """The components; the first one is the total."""
    reads: tuple[str, ...] = ("prompts", "images")
    reads_levels = True
    capabilities = Capabilities(modalities=("image",))
    config: JudgeSpec

    def __init__(self, config: JudgeSpec) -> None:
        self.config = config
        self.key = api_key(config)

    @cached_property
    def judge(self) -> Endpoint:
        """The endpoint, opened on first use."""
        return Endpoint(self.config, self.key)

    def check_start(self) -> None:
        if self.config.base_url != TOY:
            Endpoint(self.config, self.key).check_model()

    @abstractmethod
    def score_image(self, image: bytes, prompt: str, metadata: Mapping[str, object]) -> Mapping[str, float]:
        """Returns the scores of a PNG file by name."""

    def score(self, request: RewardRequest) -> RewardResponse:
        images, prompts = request.images, request.prompts or [""] * len(request)
        metadata = request.metadata or [{}] * len(request)
        assert images is not None

        def score_row(row: int) -> Mapping[str, float]:
            return self.score_image(encode_image(images[row], "png", 0).data, prompts[row], metadata[row])

        return score_rows(request, self.names, score_row, self.config.concurrency)


def read_scores(text: str, labels: Mapping[str, str], low: float, high: float) -> dict[str, float]:
    """Returns the number after each label, by name. A label begins a line: `**Realism:** 2`, `Style (1-5): 4.5`.

    Raises:
        RewardError: a label is missing, has two different numbers, or has a number outside [low, high].
    """
    scores = {}
    for name, label in labels.items():
        line = rf"^[^\w\n]*{re.escape(label)}(?:[ \t]*\([^)\n]*\))?[*_ \t]*[:=][*_ \t]*(-?\d+(?:\.\d+)?)[*_ \t\r.]*$"
        numbers = {float(number) for number in re.findall(line, text, re.MULTILINE | re.IGNORECASE)}
        if len(numbers) != 1:
            reply = f"says {sorted(numbers)}" if numbers else "does not say it in the asked form"
            raise RewardError(f"the judge was asked for one line '{label}: number' and {reply}: {text[:SHOWN]!r}")
        (scores[name],) = numbers
        if not low <= scores[name] <= high:
            raise RewardError(
                f"the judge gave {label} {scores[name]:g}, which lies outside {low:g} to {high:g}: {text[:SHOWN]!r}"
            )
    return scores
