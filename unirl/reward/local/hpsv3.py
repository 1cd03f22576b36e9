"""Human Preference Score v3: how well people would like a picture for its prompt, by Qwen2-VL and a small head.

Ma et al. 2025, arXiv:2508.03789. The head gives the mean and the spread of a preference; the mean is the score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from unirl.models.chunks import padded_chunks
from unirl.reward.base import Device, LocalRewardBackend, single
from unirl.reward.local.shared.images import ROWS
from unirl.reward.local.shared.pretrained import assemble, fill, fixed_seed, load, part, read_weights
from unirl.reward.local.shared.vision_language import (
    VisionLanguageProcessor,
    check_special_tokens,
    padded_length,
    published_processor,
    toy_processor,
    toy_vl_config,
)
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

SCALE = 15.0
"""Means of good pictures lie near 10 to 15."""


@dataclass(frozen=True, kw_only=True)
class HPSv3Spec:
    """Which checkpoint, and how many pictures at a time."""

    path: str = "MizzenAI/HPSv3"
    """The checkpoint, or the hub id or local directory that holds HPSv3.safetensors; `toy` is a tiny Qwen2-VL."""
    processor: str = "Qwen/Qwen2-VL-7B-Instruct"
    """Hub id or local directory of the architecture, tokenizer and image processor; not read by `toy`."""
    instruction: str | None = None
    """A text file of what the model is asked, with {text_prompt} and <|Reward|> in it; not read by `toy`.
    None: that of the authors' package (pip install --no-deps hpsv3)."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of the backbone; the head is float32."""
    batch_size: int = 4
    device: Device = "auto"

    toy: ClassVar[dict[str, object]] = {"path": "toy", "dtype": "fp32"}

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"HPSv3Spec.batch_size must be >= 1, got {self.batch_size}")


class HPSv3Network(nn.Module):
    """Qwen2-VL, and the head that reads the state of one token of the text."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Sequential(
            nn.Linear(backbone.config.text_config.hidden_size, 1024),
            nn.ReLU(),
            nn.Dropout(0.05),
            nn.Linear(1024, 16),
            nn.ReLU(),
            nn.Linear(16, 2),
        )

    def forward(self, tokens: Tensor, patches: Tensor, grids: Tensor, token_id: int) -> Tensor:
        """[B, 2] mean and spread for texts [B, L], each with a picture, that hold the token `token_id` once."""
        # The published class numbers all tokens one by one, a picture's too, where Qwen2-VL counts rows and columns.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, len(tokens), -1)
        states = self.backbone(
            input_ids=tokens,
            position_ids=positions,
            pixel_values=patches,
            image_grid_thw=grids,
            use_cache=False,
        ).last_hidden_state
        answer: Tensor = self.head(states[tokens == token_id].float())
        return answer


class HPSv3RewardScorer(LocalRewardBackend):
    """mean / 15, where the mean is the first of the two numbers that the published head gives."""

    reads = ("prompts", "images")
    capabilities = Capabilities(modalities=("image",))

    def __init__(self, *, config: HPSv3Spec = HPSv3Spec()) -> None:
        super().__init__(device=config.device)
        self.config = config
        self._reader: VisionLanguageProcessor | None = None

    @property
    def reader(self) -> VisionLanguageProcessor:
        """Tokenizer, image processor and instruction, loaded on first use."""
        if self._reader is None:
            toy = self.config.path == "toy"
            self._reader = (
                toy_processor() if toy else published_processor(self.config.processor, self.config.instruction)
            )
        return self._reader

    def load_model(self) -> nn.Module:
        if self.config.path == "toy":
            return toy_network(self.reader)
        from transformers import Qwen2VLConfig

        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.config.dtype]
        architecture = load(Qwen2VLConfig, self.config.processor, "config.processor")
        return network_of(read_weights(self.config.path, "HPSv3.safetensors", "config.path"), architecture, dtype)

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Raises RewardError when the prompt holds a mark of the chat."""
        check_special_tokens(prompt)

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.images is not None and request.prompts is not None
        for sample, prompt in zip(request.sample_ids, request.prompts, strict=True):
            check_special_tokens(prompt, f" of sample {sample!r}")
        texts = [self.reader.text(prompt) for prompt in request.prompts]
        means = torch.empty(len(texts))
        for length in sorted({padded_length(text) for text in texts}):
            same = [row for row, text in enumerate(texts) if padded_length(text) == length]
            for chunk in padded_chunks(len(same), self.config.batch_size, ROWS):
                rows = [same[i] for i in chunk.rows]
                answer = self._means([texts[row] for row in rows], request.images[rows])
                means[rows[: chunk.num_real]] = answer[: chunk.num_real]
        return single("hpsv3", means / SCALE)

    @torch.no_grad()
    def _means(self, texts: Sequence[list[int]], images: Tensor) -> Tensor:
        """[B] the head's means for texts of one filled length."""
        asked = self.reader.questions(texts, images)
        inputs = (x.to(self.device) for x in (asked.tokens, asked.patches, asked.grids))
        answer: Tensor = self.model(*inputs, self.reader.reward_id)[:, 0].cpu()
        return answer


def network_of(weights: Mapping[str, Tensor], architecture: Any, dtype: torch.dtype) -> HPSv3Network:
    """The network of a published checkpoint: Qwen2-VL with one token more, and the head. Its lm_head is not used."""
    from transformers import Qwen2VLModel

    language = part(weights, "model.")
    architecture.text_config.vocab_size = len(language["embed_tokens.weight"])
    backbone = {f"language_model.{name}": tensor for name, tensor in language.items()}
    backbone |= {name: tensor for name, tensor in weights.items() if name.startswith("visual.")}
    network = HPSv3Network(assemble(Qwen2VLModel, architecture, backbone, "config.path", dtype))
    fill(network.head, part(weights, "rm_head."), "config.path")
    return network


def toy_network(reader: VisionLanguageProcessor) -> HPSv3Network:
    """A network of about 100 thousand parameters with fixed random weights, for the tokens of a toy's reader."""
    from transformers import Qwen2VLModel

    with fixed_seed():
        return HPSv3Network(Qwen2VLModel(toy_config(reader)))


def toy_config(reader: VisionLanguageProcessor) -> Any:
    """Of a Qwen2-VL."""
    from transformers import Qwen2VLConfig

    return toy_vl_config(Qwen2VLConfig, reader, embed_dim=32)
