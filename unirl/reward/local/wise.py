"""WiScore: a judge grades whether an image shows what its prompt implies. Niu et al. 2025, arXiv:2503.07265.

score = (0.7 consistency + 0.2 realism + 0.1 aesthetic quality) / 2, where each grade is 0, 1 or 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    explanation_key: str | None = None
    """Metadata key of an explicit description of what the image must show. None: the judge gets the prompt alone."""
    instruction: str = INSTRUCTION
    """The question for the judge, with {prompt} and {explanation}."""


class WiseRewardScorer(JudgeScorer):
    """WiScore in [0, 1]. The components are its three grades, 0 to 2. A reply without these grades is a failure."""

    names = ("wise", *LABELS)
    config: WiseSpec

    def __init__(self, *, config: WiseSpec) -> None:
        super().__init__(config)
        self.reads = (*self.reads, "metadata") if config.explanation_key else self.reads

    def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
        self._explanation(metadata)

    def score_image(self, image: bytes, prompt: str, metadata: Mapping[str, object]) -> Mapping[str, float]:
        question = self.config.instruction.format(prompt=prompt, explanation=self._explanation(metadata))
        grades = read_scores(self.judge.ask(image, question, max_tokens=64).text, LABELS, 0, BEST)
        invalid = [name for name, grade in grades.items() if grade != int(grade)]
        if invalid:
            raise RewardError(f"the judge gave {invalid[0]} {grades[invalid[0]]:g}, which is not 0, 1 or 2")
        return {"wise": sum(WEIGHTS[name] * grade for name, grade in grades.items()) / BEST, **grades}

    def _explanation(self, metadata: Mapping[str, object]) -> str:
        key = self.config.explanation_key
        if key is None:
            return ""
        text = metadata.get(key)
        if not isinstance(text, str) or not text.strip():
            raise RewardError(f"no explanation for the judge in metadata {key!r} (keys: {sorted(metadata)})")
        return f"What it has to show: {text.strip()}\n"
