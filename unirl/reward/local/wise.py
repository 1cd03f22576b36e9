"""WiScore: does a picture show what its prompt implies about the world? By a judge. Niu et al. 2025, arXiv:2503.07265.

score = (0.7 consistency + 0.2 realism + 0.1 aesthetic quality) / 2, each a whole number from 0 to 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unirl.config.errors import RewardError
from unirl.reward.judges.endpoint import JudgeSpec
from unirl.reward.judges.judge import JudgeScorer, read_scores

WEIGHTS = {"consistency": 0.7, "realism": 0.2, "aesthetic": 0.1}
LABELS = {"consistency": "Consistency", "realism": "Realism", "aesthetic": "Aesthetic Quality"}
BEST = 2
INSTRUCTION = """\
You grade a generated picture. The prompt may name what is meant only by what one has to know about the world.
Prompt: {prompt}
{explanation}Give three grades, each 0, 1 or 2, strictly: 0 = failed, 1 = in part, 2 = without a fault.
Consistency: does the picture show what the prompt means, with everything that follows from it?
Realism: could it exist so, with right light, material, shape and number?
Aesthetic Quality: is it well composed, clear and pleasant to look at?
Answer with exactly these three lines and nothing else:
Consistency: <grade>
Realism: <grade>
Aesthetic Quality: <grade>"""


@dataclass(frozen=True, kw_only=True)
class WiseSpec(JudgeSpec):
    """The judge, and what it is told."""

    explanation_key: str | None = None
    """Metadata key of what the picture has to show, in words that need no knowledge; None: the judge has to know."""
    instruction: str = INSTRUCTION
    """What the judge is asked; {prompt} and {explanation} are filled in."""


class WiseRewardScorer(JudgeScorer):
    """WiScore in [0, 1]; the components are its three grades, 0 to 2. A judge that gives no such grade is a failure."""

    names = ("wise", *LABELS)
    config: WiseSpec

    def __init__(self, *, config: WiseSpec) -> None:
        super().__init__(config)
        self.reads = (*self.reads, "metadata") if config.explanation_key else self.reads

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        self._explanation(metadata)

    def score_image(self, picture: bytes, prompt: str, metadata: Mapping[str, Any]) -> Mapping[str, float]:
        question = self.config.instruction.format(prompt=prompt, explanation=self._explanation(metadata))
        grades = read_scores(self.judge.ask(picture, question, max_tokens=64).text, LABELS, 0, BEST)
        broken = [name for name, grade in grades.items() if grade != int(grade)]
        if broken:
            raise RewardError(f"the judge gave {broken[0]} {grades[broken[0]]:g}, which is not 0, 1 or 2")
        return {"wise": sum(WEIGHTS[name] * grade for name, grade in grades.items()) / BEST, **grades}

    def _explanation(self, metadata: Mapping[str, Any]) -> str:
        key = self.config.explanation_key
        if key is None:
            return ""
        text = metadata.get(key)
        if not isinstance(text, str) or not text.strip():
            raise RewardError(f"no explanation for the judge in metadata {key!r} (keys: {sorted(metadata)})")
        return f"What it has to show: {text.strip()}\n"
