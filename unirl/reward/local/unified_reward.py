"""UnifiedReward: alignment, coherence and style of an image, by a model trained to grade images. arXiv:2503.05236."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    instruction: str = INSTRUCTION
    """The question for the judge, with {prompt}. A published model grades best with the wording of its training."""


class UnifiedRewardRewardScorer(JudgeScorer):
    """The mean of the three scores, scaled from [1, 5] to [0, 1]. The components are the unscaled scores."""

    names = ("unified_reward", *LABELS)
    config: UnifiedRewardSpec

    def __init__(self, *, config: UnifiedRewardSpec) -> None:
        super().__init__(config)

    def score_image(self, image: bytes, prompt: str, metadata: Mapping[str, object]) -> Mapping[str, float]:
        reply = self.judge.ask(image, self.config.instruction.format(prompt=prompt), max_tokens=128)
        scores = read_scores(reply.text, LABELS, LOW, HIGH)
        mean = sum(scores.values()) / len(scores)
        return {"unified_reward": (mean - LOW) / (HIGH - LOW), **scores}
