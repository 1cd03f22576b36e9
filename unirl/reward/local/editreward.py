"""EditReward: the quality of an image edit, by Qwen2.5-VL and two small heads. Wu et al. 2025, arXiv:2509.26346.

The model gets the source image, the edited image and the edit instruction, with one of two questions: how well the
instruction was followed, and how good the result looks. The head of a question predicts the mean and the spread of a
preference. The score is the average of the two means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from unirl.config.errors import NotFoundError, RewardError
from unirl.models.loading.hub import ModelSource
from unirl.reward.local.shared.pretrained import part
from unirl.reward.local.shared.vision_language import (
    PROMPT_PLACE,
    REWARD_TOKEN,
    VisionLanguageScorer,
    VisionLanguageSpec,
    text_constants,
)
from unirl.types.reward import RewardRequest, RewardResponse

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

ASPECTS = {"edit_following": "INSTRUCTION_EDIT_FOLLOWING", "edit_quality": "INSTRUCTION_EDIT_QUALITY"}
"""The aspects in the order of the heads, with the names of their questions in the authors' files."""
ENDING = "prompt_with_special_token"
SOURCES = ("prompts.py", "data_collator_qwen_edit.py")
"""The authors' files that contain the questions and the ending."""
TOY_INSTRUCTIONS = tuple(f"{words}: {PROMPT_PLACE}? {REWARD_TOKEN}\n" for words in ("Was this done", "Is it good"))


@dataclass(frozen=True, kw_only=True)
class EditRewardSpec(VisionLanguageSpec):
    path: ModelSource = "TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508"
    """The checkpoint file, or a hub id or local directory that holds model.safetensors; `toy` is a tiny Qwen2.5-VL."""
    processor: ModelSource = "XiaomiMiMo/MiMo-VL-7B-SFT-2508"
    questions: str | None = None
    """The directory EditReward/dataset of a copy of github.com/TIGER-AI-Lab/EditReward. Its files contain the questions
    that the model was trained with, and are parsed and not run. Required, except for `toy`."""


class EditRewardRewardScorer(VisionLanguageScorer):
    """The average of the components `edit_following` and `edit_quality`, about -3 to 3."""

    reads = ("prompts", "images", "sources")
    config: EditRewardSpec
    toy_instructions = TOY_INSTRUCTIONS
    weights_file = "model.safetensors"
    toy_vision = {"intermediate_size": 64, "out_hidden_size": 32, "fullatt_block_indexes": [1]}  # noqa: RUF012

    def __init__(self, *, config: EditRewardSpec = EditRewardSpec()) -> None:
        super().__init__(config)

    def instructions(self) -> Sequence[str]:
        return read_questions(self.config.questions)

    def classes(self) -> tuple[type[Qwen2_5_VLModel], type[Qwen2_5_VLConfig]]:
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

        return Qwen2_5_VLModel, Qwen2_5_VLConfig

    def parts_of(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        return part(weights, "model."), [part(weights, f"rm_heads.head_{head}.") for head in range(len(ASPECTS))]

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.images is not None and request.sources is not None
        for sample, sources in zip(request.sample_ids, request.sources, strict=True):
            if len(sources) != 1:
                raise RewardError(
                    f"EditReward compares with one source image, and the prompt of sample {sample!r} has {len(sources)}"
                )
        pairs = [(source, image) for (source,), image in zip(request.sources, request.images, strict=True)]
        means = self.means(request, pairs)
        total = means.mean(0)
        return RewardResponse(total=total, components={"editreward": total, **dict(zip(ASPECTS, means, strict=True))})


def read_questions(path: str | None) -> list[str]:
    """Returns the question of each aspect from the authors' files. Raises DataError (4001) when one is missing."""
    if path is None:
        raise NotFoundError(
            "config.questions is needed: the directory EditReward/dataset of a copy of "
            "github.com/TIGER-AI-Lab/EditReward, which contains the questions that the model was trained with"
        )
    constants: dict[str, str] = {}
    for name in SOURCES:
        try:
            constants |= text_constants((Path(path).expanduser() / name).read_text(encoding="utf-8"))
        except OSError as error:
            raise NotFoundError(f"config.questions={path!r}: {name} cannot be read ({error.strerror})") from error
    questions = [constants.get(name, "") + constants.get(ENDING, "") for name in ASPECTS.values()]
    for name, question in zip(ASPECTS.values(), questions, strict=True):
        if question.count(PROMPT_PLACE) != 1 or question.count(REWARD_TOKEN) != 1:
            raise NotFoundError(
                f"config.questions={path!r}: {name} and {ENDING} together must contain {PROMPT_PLACE} and "
                f"{REWARD_TOKEN} once each"
            )
    return questions
