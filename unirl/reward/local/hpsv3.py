"""Human Preference Score v3: a prediction of human preference for an image and its prompt, by Qwen2-VL and a head.

Ma et al. 2025, arXiv:2508.03789. The head predicts the mean and the spread of the preference. The mean is the score.
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
    preference_head,
    published_processor,
    states_at,
    toy_processor,
    toy_vl_config,
)
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

SCALE = 15.0
"""The means of good images are about 10 to 15."""


@dataclass(frozen=True, kw_only=True)
class HPSv3Spec:
    """The checkpoint, its instruction and its batch size."""

    path: str = "MizzenAI/HPSv3"
    """The checkpoint file, or the hub id or local directory that holds HPSv3.safetensors; `toy` is a tiny Qwen2-VL."""
    processor: str = "Qwen/Qwen2-VL-7B-Instruct"
    """Hub id or local directory of the architecture, tokenizer and image processor; `toy` does not read it."""
    instruction: str | None = None
    """A text file with the instruction, which contains {text_prompt} and <|Reward|>; `toy` does not read it.
    None: the instruction in the authors' package (pip install --no-deps hpsv3)."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Data type of the backbone. The head is float32."""
    batch_size: int = 4
    device: Device = "auto"

    toy: ClassVar[dict[str, object]] = {"path": "toy", "dtype": "fp32"}

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"HPSv3Spec.batch_size must be >= 1, got {self.batch_size}")


class HPSv3Network(nn.Module):
    """Qwen2-VL, and a head on the hidden state of one token of the text."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = preference_head(backbone.config.text_config.hidden_size)

    def forward(self, tokens: Tensor, patches: Tensor, grids: Tensor, token_id: int) -> Tensor:
        """Returns mean and spread [B, 2] for texts [B, L] with one image each, which contain token `token_id` once."""
        prediction: Tensor = self.head(states_at(self.backbone, tokens, patches, grids, token_id))
        return prediction


class HPSv3RewardScorer(LocalRewardBackend):
    """mean / 15, where the mean is the first of the two outputs of the published head."""

    reads = ("prompts", "images")
    capabilities = Capabilities(modalities=("image",))

    def __init__(self, *, config: HPSv3Spec = HPSv3Spec()) -> None:
        super().__init__(device=config.device)
        self.config = config
        self._processor: VisionLanguageProcessor | None = None

    @property
    def processor(self) -> VisionLanguageProcessor:
        """The tokenizer, image processor and instruction, loaded on first use."""
        if self._processor is None:
            toy = self.config.path == "toy"
            self._processor = (
                toy_processor() if toy else published_processor(self.config.processor, self.config.instruction)
            )
        return self._processor

    def load_model(self) -> nn.Module:
        if self.config.path == "toy":
            return toy_network(self.processor)
        from transformers import Qwen2VLConfig

        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.config.dtype]
        architecture = load(Qwen2VLConfig, self.config.processor, "config.processor")
        return network_of(read_weights(self.config.path, "HPSv3.safetensors", "config.path"), architecture, dtype)

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Raises RewardError when the prompt contains a special token of the model."""
        check_special_tokens(prompt)

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.images is not None and request.prompts is not None
        for sample, prompt in zip(request.sample_ids, request.prompts, strict=True):
            check_special_tokens(prompt, f" of sample {sample!r}")
        texts = [self.processor.tokenize(prompt) for prompt in request.prompts]
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
        """Returns the means [B] for texts that have one padded length."""
        inputs = self.processor.inputs(texts, images)
        tensors = (x.to(self.device) for x in (inputs.tokens, inputs.patches, inputs.grids))
        means: Tensor = self.model(*tensors, self.processor.reward_id)[:, 0].cpu()
        return means


def network_of(weights: Mapping[str, Tensor], architecture: Any, dtype: torch.dtype) -> HPSv3Network:
    """Returns the network of a published checkpoint: Qwen2-VL with one more token, and the head, without lm_head."""
    from transformers import Qwen2VLModel

    language = part(weights, "model.")
    architecture.text_config.vocab_size = len(language["embed_tokens.weight"])
    backbone = {f"language_model.{name}": tensor for name, tensor in language.items()}
    backbone |= {name: tensor for name, tensor in weights.items() if name.startswith("visual.")}
    network = HPSv3Network(assemble(Qwen2VLModel, architecture, backbone, "config.path", dtype))
    fill(network.head, part(weights, "rm_head."), "config.path")
    return network


def toy_network(processor: VisionLanguageProcessor) -> HPSv3Network:
    """Returns a network of about 100,000 parameters with fixed random weights for the tokens of a toy processor."""
    from transformers import Qwen2VLModel

    with fixed_seed():
        return HPSv3Network(Qwen2VLModel(toy_config(processor)))


def toy_config(processor: VisionLanguageProcessor) -> Any:
    """Returns the configuration of a tiny Qwen2-VL."""
    from transformers import Qwen2VLConfig

    return toy_vl_config(Qwen2VLConfig, processor, embed_dim=32)
