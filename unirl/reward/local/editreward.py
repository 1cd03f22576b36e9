"""EditReward: how well a picture was edited, by Qwen2.5-VL and two small heads. Wu et al. 2025, arXiv:2509.26346.

The model sees the source, the edited picture and the instruction, and is asked twice: how well the instruction was
followed, and how good the result looks. A head for either gives mean and spread of a preference; the score is the mean
of the two means.
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
    text_constants,
    toy_tokenizer,
    toy_vl_config,
)
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

ASPECTS = {"edit_following": "INSTRUCTION_EDIT_FOLLOWING", "edit_quality": "INSTRUCTION_EDIT_QUALITY"}
"""What is asked, in the order of the heads, and what the authors call the question."""
ENDING = "prompt_with_special_token"
SOURCES = ("prompts.py", "data_collator_qwen_edit.py")
"""The authors' files that hold questions and ending."""


@dataclass(frozen=True, kw_only=True)
class EditRewardSpec:
    """Which checkpoint, and how many pictures at a time."""

    path: str = "TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508"
    """The checkpoint, or the hub id or local directory that holds model.safetensors; `toy` is a tiny Qwen2.5-VL."""
    processor: str = "XiaomiMiMo/MiMo-VL-7B-SFT-2508"
    """Hub id or local directory of the architecture, tokenizer and image processor; not read by `toy`."""
    questions: str | None = None
    """The directory EditReward/dataset of a copy of github.com/TIGER-AI-Lab/EditReward, whose files are read and not
    run: the words that the model was trained to answer. Needed, except by `toy`."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of the backbone; the heads are float32."""
    batch_size: int = 4
    device: Device = "auto"

    toy: ClassVar[dict[str, object]] = {"path": "toy", "dtype": "fp32"}

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"EditRewardSpec.batch_size must be >= 1, got {self.batch_size}")


class EditRewardNetwork(nn.Module):
    """Qwen2.5-VL, and the heads that read the state of one token of the text."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        width = backbone.config.text_config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 1024),
                nn.ReLU(),
                nn.Dropout(0.05),
                nn.Linear(1024, 16),
                nn.ReLU(),
                nn.Linear(16, 2),
            )
            for _ in ASPECTS
        )

    def forward(self, tokens: Tensor, patches: Tensor, grids: Tensor, token_id: int, head: int) -> Tensor:
        """[B, 2] mean and spread for texts [B, L], each with two pictures, that hold the token `token_id` once."""
        # The published class hands over embeddings without tokens, and so numbers all of them one by one.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, len(tokens), -1)
        states = self.backbone(
            input_ids=tokens,
            position_ids=positions,
            pixel_values=patches,
            image_grid_thw=grids,
            use_cache=False,
        ).last_hidden_state
        answer: Tensor = self.heads[head](states[tokens == token_id].float())
        return answer


class EditRewardRewardScorer(LocalRewardBackend):
    """The mean of what both heads say of following and quality, which are the components; near -3 to 3."""

    reads = ("prompts", "images", "sources")
    capabilities = Capabilities(modalities=("image",))

    def __init__(self, *, config: EditRewardSpec = EditRewardSpec()) -> None:
        super().__init__(device=config.device)
        self.config = config
        self._readers: list[VisionLanguageProcessor] = []

    @property
    def readers(self) -> list[VisionLanguageProcessor]:
        """Tokenizer, image processor and question of each aspect, loaded on first use."""
        if not self._readers:
            self._readers = toy_processors() if self.config.path == "toy" else published_processors(self.config)
        return self._readers

    def load_model(self) -> nn.Module:
        if self.config.path == "toy":
            return toy_network(self.readers[0])
        from transformers import Qwen2_5_VLConfig

        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.config.dtype]
        architecture = load(Qwen2_5_VLConfig, self.config.processor, "config.processor")
        return network_of(read_weights(self.config.path, "model.safetensors", "config.path"), architecture, dtype)

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Raises RewardError when the prompt holds a mark of the chat."""
        check_special_tokens(prompt)

    def score(self, request: RewardRequest) -> RewardResponse:
        sources, images = sources_of(request), request.images
        assert images is not None and request.prompts is not None
        for sample, prompt in zip(request.sample_ids, request.prompts, strict=True):
            check_special_tokens(prompt, f" of sample {sample!r}")
        said: dict[str, Tensor] = {}
        for head, name in enumerate(ASPECTS):
            texts = [self.readers[head].text(prompt, num_pictures=2) for prompt in request.prompts]
            kinds = [(padded_length(text), source.shape) for text, source in zip(texts, sources, strict=True)]
            said[name] = torch.empty(len(texts))
            for kind in dict.fromkeys(kinds):
                same = [row for row, found in enumerate(kinds) if found == kind]
                for chunk in padded_chunks(len(same), self.config.batch_size, ROWS):
                    rows = [same[i] for i in chunk.rows]
                    before = torch.stack([sources[row] for row in rows])
                    answer = self._means(head, [texts[row] for row in rows], before, images[rows])
                    said[name][rows[: chunk.num_real]] = answer[: chunk.num_real]
        total = torch.stack(list(said.values())).mean(0)
        return RewardResponse(total=total, components={"editreward": total, **said})

    @torch.no_grad()
    def _means(self, head: int, texts: Sequence[list[int]], before: Tensor, after: Tensor) -> Tensor:
        """[B] what a head says on average, for texts of one filled length and pictures [B, 3, H, W]."""
        reader = self.readers[head]
        asked = reader.questions(texts, before, after)
        inputs = (x.to(self.device) for x in (asked.tokens, asked.patches, asked.grids))
        answer: Tensor = self.model(*inputs, reader.reward_id, head)[:, 0].cpu()
        return answer


def sources_of(request: RewardRequest) -> list[Tensor]:
    """The one picture that each row was edited from. Raises RewardError (6002) where there are several or none."""
    assert request.sources is not None
    for sample, brought in zip(request.sample_ids, request.sources, strict=True):
        if len(brought) != 1:
            raise RewardError(
                f"EditReward compares with one picture, and the prompt of sample {sample!r} brought {len(brought)}"
            )
    return [brought[0] for brought in request.sources]


def published_processors(config: EditRewardSpec) -> list[VisionLanguageProcessor]:
    """A reader for each aspect, with the authors' words."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

    readers = []
    for question in read_questions(config.questions):
        tokenizer = load(AutoTokenizer, config.processor, "config.processor")
        images = load(Qwen2VLImageProcessorPil, config.processor, "config.processor")
        readers.append(VisionLanguageProcessor(tokenizer, images, question))
    return readers


def read_questions(path: str | None) -> list[str]:
    """The question of each aspect, from the authors' source. Raises DataError (4001) where it is not there."""
    if path is None:
        raise NotFoundError(
            "config.questions is needed: the directory EditReward/dataset of a copy of "
            "github.com/TIGER-AI-Lab/EditReward, which holds the words that the model was trained to answer"
        )
    found: dict[str, str] = {}
    for name in SOURCES:
        try:
            found |= text_constants((Path(path).expanduser() / name).read_text(encoding="utf-8"))
        except OSError as error:
            raise NotFoundError(f"config.questions={path!r}: {name} cannot be read ({error.strerror})") from error
    questions = [found.get(question, "") + found.get(ENDING, "") for question in ASPECTS.values()]
    for asked, question in zip(ASPECTS.values(), questions, strict=True):
        if question.count(PROMPT_PLACE) != 1 or question.count(REWARD_TOKEN) != 1:
            raise NotFoundError(
                f"config.questions={path!r}: {asked} and {ENDING} together must hold {PROMPT_PLACE} and {REWARD_TOKEN} "
                "once each"
            )
    return questions


def network_of(weights: Mapping[str, Tensor], architecture: Any, dtype: torch.dtype) -> EditRewardNetwork:
    """The network of a published checkpoint: Qwen2.5-VL with one token more, and the heads. lm_head is not used."""
    from transformers import Qwen2_5_VLModel

    backbone = part(weights, "model.")
    architecture.text_config.vocab_size = len(backbone["language_model.embed_tokens.weight"])
    network = EditRewardNetwork(assemble(Qwen2_5_VLModel, architecture, backbone, "config.path", dtype))
    for number, head in enumerate(network.heads):
        fill(head, part(weights, f"rm_heads.head_{number}."), "config.path")
    return network


def toy_processors() -> list[VisionLanguageProcessor]:
    """Readers of the toy, whose questions differ."""
    from transformers import Qwen2VLImageProcessorPil

    asked = ("Was this done", "Is it good")
    questions = [f"{words}: {PROMPT_PLACE}? {REWARD_TOKEN}\n" for words in asked]
    return [VisionLanguageProcessor(toy_tokenizer(), Qwen2VLImageProcessorPil(), question) for question in questions]


def toy_network(reader: VisionLanguageProcessor) -> EditRewardNetwork:
    """A network of about 150 thousand parameters with fixed random weights, for the tokens of a toy's reader."""
    from transformers import Qwen2_5_VLModel

    with fixed_seed():
        return EditRewardNetwork(Qwen2_5_VLModel(toy_config(reader)))


def toy_config(reader: VisionLanguageProcessor) -> Any:
    """Of a Qwen2.5-VL."""
    from transformers import Qwen2_5_VLConfig

    vision = {"intermediate_size": 64, "out_hidden_size": 32, "fullatt_block_indexes": [1]}
    return toy_vl_config(Qwen2_5_VLConfig, reader, **vision)
