"""EditReward: the quality of an image edit, by Qwen2.5-VL and two small heads. Wu et al. 2025, arXiv:2509.26346.

The model gets the source image, the edited image and the edit instruction, with one of two questions: how well the
instruction was followed, and how good the result looks. The head of a question predicts the mean and the spread of a
preference. The score is the average of the two means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from unirl.config.errors import NotFoundError, RewardError
from unirl.models.chunks import padded_chunks
from unirl.reward.base import Device, LocalRewardBackend
from unirl.reward.local.shared.images import ROWS
from unirl.reward.local.shared.pretrained import assemble, fill, fixed_seed, load, part, read_weights
from unirl.reward.local.shared.vision_language import (
    PROMPT_PLACE,
    REWARD_TOKEN,
    VisionLanguageProcessor,
    check_special_tokens,
    padded_length,
    preference_head,
    states_at,
    text_constants,
    toy_tokenizer,
    toy_vl_config,
)
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

ASPECTS = {"edit_following": "INSTRUCTION_EDIT_FOLLOWING", "edit_quality": "INSTRUCTION_EDIT_QUALITY"}
"""The aspects in the order of the heads, with the names of their questions in the authors' files."""
ENDING = "prompt_with_special_token"
SOURCES = ("prompts.py", "data_collator_qwen_edit.py")
"""The authors' files that contain the questions and the ending."""


@dataclass(frozen=True, kw_only=True)
class EditRewardSpec:
    """The checkpoint, its questions and its batch size."""

    path: str = "TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508"
    """The checkpoint file, or a hub id or local directory that holds model.safetensors; `toy` is a tiny Qwen2.5-VL."""
    processor: str = "XiaomiMiMo/MiMo-VL-7B-SFT-2508"
    """Hub id or local directory of the architecture, tokenizer and image processor; `toy` does not read it."""
    questions: str | None = None
    """The directory EditReward/dataset of a copy of github.com/TIGER-AI-Lab/EditReward. Its files contain the questions
    that the model was trained with, and are parsed and not run. Required, except for `toy`."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Data type of the backbone. The heads are float32."""
    batch_size: int = 4
    device: Device = "auto"

    toy: ClassVar[dict[str, object]] = {"path": "toy", "dtype": "fp32"}

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"EditRewardSpec.batch_size must be >= 1, got {self.batch_size}")


class EditRewardNetwork(nn.Module):
    """Qwen2.5-VL, and the heads on the hidden state of one token of the text."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        width = backbone.config.text_config.hidden_size
        self.heads = nn.ModuleList(preference_head(width) for _ in ASPECTS)

    def forward(self, tokens: Tensor, patches: Tensor, grids: Tensor, token_id: int, head: int) -> Tensor:
        """Returns mean and spread [B, 2] for texts [B, L] with two images each, which contain token `token_id` once."""
        prediction: Tensor = self.heads[head](states_at(self.backbone, tokens, patches, grids, token_id))
        return prediction


class EditRewardRewardScorer(LocalRewardBackend):
    """The average of the components `edit_following` and `edit_quality`, about -3 to 3."""

    reads = ("prompts", "images", "sources")
    capabilities = Capabilities(modalities=("image",))

    def __init__(self, *, config: EditRewardSpec = EditRewardSpec()) -> None:
        super().__init__(device=config.device)
        self.config = config
        self._processors: list[VisionLanguageProcessor] = []

    @property
    def processors(self) -> list[VisionLanguageProcessor]:
        """The tokenizer, image processor and question of each aspect, loaded on first use."""
        if not self._processors:
            self._processors = toy_processors() if self.config.path == "toy" else published_processors(self.config)
        return self._processors

    def load_model(self) -> nn.Module:
        if self.config.path == "toy":
            return toy_network(self.processors[0])
        from transformers import Qwen2_5_VLConfig

        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.config.dtype]
        architecture = load(Qwen2_5_VLConfig, self.config.processor, "config.processor")
        return network_of(read_weights(self.config.path, "model.safetensors", "config.path"), architecture, dtype)

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Raises RewardError when the prompt contains a special token of the model."""
        check_special_tokens(prompt)

    def score(self, request: RewardRequest) -> RewardResponse:
        sources, images = sources_of(request), request.images
        assert images is not None and request.prompts is not None
        for sample, prompt in zip(request.sample_ids, request.prompts, strict=True):
            check_special_tokens(prompt, f" of sample {sample!r}")
        means: dict[str, Tensor] = {}
        for head, name in enumerate(ASPECTS):
            texts = [self.processors[head].tokenize(prompt, num_images=2) for prompt in request.prompts]
            shapes = [(padded_length(text), source.shape) for text, source in zip(texts, sources, strict=True)]
            means[name] = torch.empty(len(texts))
            for shape in dict.fromkeys(shapes):
                same = [row for row, row_shape in enumerate(shapes) if row_shape == shape]
                for chunk in padded_chunks(len(same), self.config.batch_size, ROWS):
                    rows = [same[i] for i in chunk.rows]
                    before = torch.stack([sources[row] for row in rows])
                    chunk_means = self._means(head, [texts[row] for row in rows], before, images[rows])
                    means[name][rows[: chunk.num_real]] = chunk_means[: chunk.num_real]
        total = torch.stack(list(means.values())).mean(0)
        return RewardResponse(total=total, components={"editreward": total, **means})

    @torch.no_grad()
    def _means(self, head: int, texts: Sequence[list[int]], before: Tensor, after: Tensor) -> Tensor:
        """Returns the means [B] of a head for texts that have one padded length, and images [B, 3, H, W]."""
        processor = self.processors[head]
        inputs = processor.inputs(texts, before, after)
        tensors = (x.to(self.device) for x in (inputs.tokens, inputs.patches, inputs.grids))
        means: Tensor = self.model(*tensors, processor.reward_id, head)[:, 0].cpu()
        return means


def sources_of(request: RewardRequest) -> list[Tensor]:
    """Returns the source image of each row. Raises RewardError (6002) when a row has several or none."""
    assert request.sources is not None
    for sample, sources in zip(request.sample_ids, request.sources, strict=True):
        if len(sources) != 1:
            raise RewardError(
                f"EditReward compares with one source image, and the prompt of sample {sample!r} has {len(sources)}"
            )
    return [sources[0] for sources in request.sources]


def published_processors(config: EditRewardSpec) -> list[VisionLanguageProcessor]:
    """Returns a processor for each aspect, with the authors' question."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

    processors = []
    for question in read_questions(config.questions):
        tokenizer = load(AutoTokenizer, config.processor, "config.processor")
        images = load(Qwen2VLImageProcessorPil, config.processor, "config.processor")
        processors.append(VisionLanguageProcessor(tokenizer, images, question))
    return processors


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


def network_of(weights: Mapping[str, Tensor], architecture: Any, dtype: torch.dtype) -> EditRewardNetwork:
    """Returns the network of a published checkpoint: Qwen2.5-VL with one more token, and the heads, without lm_head."""
    from transformers import Qwen2_5_VLModel

    backbone = part(weights, "model.")
    architecture.text_config.vocab_size = len(backbone["language_model.embed_tokens.weight"])
    network = EditRewardNetwork(assemble(Qwen2_5_VLModel, architecture, backbone, "config.path", dtype))
    for number, head in enumerate(network.heads):
        fill(head, part(weights, f"rm_heads.head_{number}."), "config.path")
    return network


def toy_processors() -> list[VisionLanguageProcessor]:
    """Returns the processors of the toy, with two different questions."""
    from transformers import Qwen2VLImageProcessorPil

    asked = ("Was this done", "Is it good")
    questions = [f"{words}: {PROMPT_PLACE}? {REWARD_TOKEN}\n" for words in asked]
    return [VisionLanguageProcessor(toy_tokenizer(), Qwen2VLImageProcessorPil(), question) for question in questions]


def toy_network(processor: VisionLanguageProcessor) -> EditRewardNetwork:
    """Returns a network of about 150,000 parameters with fixed random weights for the tokens of a toy processor."""
    from transformers import Qwen2_5_VLModel

    with fixed_seed():
        return EditRewardNetwork(Qwen2_5_VLModel(toy_config(processor)))


def toy_config(processor: VisionLanguageProcessor) -> Any:
    """Returns the configuration of a tiny Qwen2.5-VL."""
    from transformers import Qwen2_5_VLConfig

    vision = {"intermediate_size": 64, "out_hidden_size": 32, "fullatt_block_indexes": [1]}
    return toy_vl_config(Qwen2_5_VLConfig, processor, **vision)
