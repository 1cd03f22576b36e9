"""Human Preference Score v3: a prediction of human preference for an image and its prompt, by Qwen2-VL and a head.

Ma et al. 2025, arXiv:2508.03789. The head predicts the mean and the spread of the preference. The mean is the score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from unirl.config.dependencies import need
from unirl.config.errors import NotFoundError
from unirl.models.loading.hub import ModelSource
from unirl.reward.base import single
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
    from transformers import Qwen2VLConfig, Qwen2VLModel

SCALE = 15.0
"""The means of good images are about 10 to 15."""
TOY_INSTRUCTION = f"How good is this picture of the following: {PROMPT_PLACE}\nAnswer: {REWARD_TOKEN}\n"


@dataclass(frozen=True, kw_only=True)
class HPSv3Spec(VisionLanguageSpec):
    path: ModelSource = "MizzenAI/HPSv3"
    """The checkpoint file, or the hub id or local directory that holds HPSv3.safetensors; `toy` is a tiny Qwen2-VL."""
    processor: ModelSource = "Qwen/Qwen2-VL-7B-Instruct"
    instruction: str | None = None
    """A text file with the instruction, which contains {text_prompt} and <|Reward|>; `toy` does not read it.
    None: the instruction in the authors' package (pip install --no-deps hpsv3)."""


class HPSv3RewardScorer(VisionLanguageScorer):
    """mean / 15, where the mean is the first of the two outputs of the published head."""

    config: HPSv3Spec
    toy_instructions = (TOY_INSTRUCTION,)
    weights_file = "HPSv3.safetensors"
    toy_vision = {"embed_dim": 32}  # noqa: RUF012

    def __init__(self, *, config: HPSv3Spec = HPSv3Spec()) -> None:
        super().__init__(config)

    def instructions(self) -> Sequence[str]:
        return [read_instruction(self.config.instruction)]

    def classes(self) -> tuple[type[Qwen2VLModel], type[Qwen2VLConfig]]:
        from transformers import Qwen2VLConfig, Qwen2VLModel

        return Qwen2VLModel, Qwen2VLConfig

    def parts_of(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        backbone = {f"language_model.{name}": tensor for name, tensor in part(weights, "model.").items()}
        backbone |= {name: tensor for name, tensor in weights.items() if name.startswith("visual.")}
        return backbone, [part(weights, "rm_head.")]

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.images is not None
        return single("hpsv3", self.means(request, [[image] for image in request.images])[0] / SCALE)


def read_instruction(path: str | None) -> str:
    """Returns the instruction in a text file, or (None) in the authors' package, whose source is parsed and not run.

    Raises:
        DependencyError: 3001 when the package is not installed.
        DataError: 4001 when the file is missing, or lacks {text_prompt} or <|Reward|>.
    """
    where = Path(path).expanduser() if path is not None else _published_source()
    try:
        text = where.read_text(encoding="utf-8")
    except OSError as error:
        raise NotFoundError(f"config.instruction={path!r}: {where} cannot be read ({error.strerror})") from error
    if path is None:
        constants = text_constants(text)
        text = constants.get("INSTRUCTION", "") + constants.get("prompt_with_special_token", "")
    for place in (PROMPT_PLACE, REWARD_TOKEN):
        if text.count(place) != 1:
            raise NotFoundError(
                f"config.instruction={path!r}: the text of {where} has {place} {text.count(place)} times, and must "
                "have it once"
            )
    return text


def _published_source() -> Path:
    need(
        "hpsv3",
        by="reward 'hpsv3', for the instruction that it was trained with,",
        install="pip install --no-deps hpsv3, or give that instruction in a file as config.instruction",
    )
    package = find_spec("hpsv3")
    assert package is not None and package.submodule_search_locations, "hpsv3 is a package"
    return Path(package.submodule_search_locations[0]) / "dataset" / "data_collator_qwen.py"
