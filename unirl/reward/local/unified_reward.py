"""UnifiedReward: alignment, coherence and style of a picture, by a model tuned to grade. arXiv:2503.05236."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unirl.reward.judges.endpoint import JudgeSpec
from unirl.reward.judges.judge import JudgeScorer, read_scores

LABELS = {"alignment": "Alignment Score", "coherence": "Coherence Score", "style": "Style Score"}
LOW, HIGH = 1, 5
INSTRUCTION = """\
Grade this generated picture by its caption. Caption: {prompt}
Give three scores from 1 (worst) to 5 (best):
Alignment Score: how far the objects, their attributes, relations and surroundings are those of the caption.
Coherence Score: how far the picture is free of distortions, impossible parts and wrong anatomy.
Style Score: how good it looks, whatever the caption says.
Answer in this form and with nothing else:
Alignment Score (1-5): X
Coherence Score (1-5): Y
Style Score (1-5): Z"""


@dataclass(frozen=True, kw_only=True)
class UnifiedRewardSpec(JudgeSpec):
    """The judge, and what it is told."""

    instruction: str = INSTRUCTION
    """What the judge is asked; {prompt} is filled in. A published model grades best with the words of its training."""


class UnifiedRewardRewardScorer(JudgeScorer):
    """The mean of the three scores, 1 to 5, brought to [0, 1]; the components are the scores themselves."""

    names = ("unified_reward", *LABELS)
    config: UnifiedRewardSpec

    def __init__(self, *, config: UnifiedRewardSpec) -> None:
        super().__init__(config)

    def score_image(self, picture: bytes, prompt: str, metadata: Mapping[str, Any]) -> Mapping[str, float]:
        reply = self.judge.ask(picture, self.config.instruction.format(prompt=prompt), max_tokens=128)
        scores = read_scores(reply.text, LABELS, LOW, HIGH)
        mean = sum(scores.values()) / len(scores)
        return {"unified_reward": (mean - LOW) / (HIGH - LOW), **scores}
