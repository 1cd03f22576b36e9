"""The base of reward models on Qwen2-VL: an instruction with the prompt, image patches, and heads on one token."""

from __future__ import annotations

import ast
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from unirl.config.errors import RewardError
from unirl.models.chunks import map_chunks, round_up
from unirl.models.loading.hub import ModelSource
from unirl.reward.base import LocalRewardBackend
from unirl.reward.local.shared.images import ROWS, ImageScorerSpec, as_pil
from unirl.reward.local.shared.pretrained import assemble, fill, fixed_seed, load, read_weights
from unirl.types.protocols import TORCH_DTYPES, Capabilities
from unirl.types.reward import RewardRequest

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

REWARD_TOKEN, IMAGE_TOKEN, PROMPT_PLACE = "<|Reward|>", "<|image_pad|>", "{text_prompt}"
SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")
"""Matches the special tokens of Qwen2-VL's tokenizer."""
AREA = 256 * 28 * 28
"""Every image is scaled to about this many pixels, which are 256 tokens."""
TOKEN_MULTIPLE = 64
"""Texts are padded to a multiple of this, and a batch holds texts of one length, so that no text depends on another."""


class PreferenceNetwork(nn.Module):
    """Qwen2-VL or Qwen2.5-VL, and published heads that read the hidden state of one token of the text."""

    def __init__(self, backbone: PreTrainedModel, num_heads: int) -> None:
        super().__init__()
        self.backbone = backbone
        width = backbone.config.text_config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
            )
            for _ in range(num_heads)
        )

    def forward(self, tokens: Tensor, patches: Tensor, grids: Tensor, token_id: int, head: int) -> Tensor:
        """Returns mean and spread [B, 2] by one head for texts [B, L], each of which contains `token_id` once."""
        # The published classes number the tokens of an image one by one, where Qwen2-VL counts rows and columns.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, len(tokens), -1)
        states: Tensor = self.backbone(
            input_ids=tokens, position_ids=positions, pixel_values=patches, image_grid_thw=grids, use_cache=False
        ).last_hidden_state
        prediction: Tensor = self.heads[head](states[tokens == token_id].float())
        return prediction


@dataclass(frozen=True, kw_only=True)
class VisionLanguageSpec(ImageScorerSpec):
    """The checkpoint, its instructions and its batch size."""

    processor: ModelSource
    """Hub id or local directory of the architecture, tokenizer and image processor; `toy` does not read it."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Data type of the backbone. The heads are float32."""
    batch_size: int = 4
    """Samples per forward pass."""

    toy: ClassVar[dict[str, object]] = {"path": "toy", "dtype": "fp32"}


class VisionLanguageScorer(LocalRewardBackend[PreferenceNetwork]):
    """Asks a network one question for each of its heads, about the prompt and the images of a row."""

    reads: tuple[str, ...] = ("prompts", "images")
    reads_levels = True
    capabilities = Capabilities(modalities=("image",))
    config: VisionLanguageSpec
    toy_instructions: ClassVar[Sequence[str]]
    weights_file: ClassVar[str]
    """The published checkpoint in a directory or hub repository."""
    toy_vision: ClassVar[Mapping[str, object]]
    """The toy's configuration of the vision model."""

    def __init__(self, config: VisionLanguageSpec) -> None:
        super().__init__(device=config.device)
        self.config = config

    @abstractmethod
    def classes(self) -> tuple[type[PreTrainedModel], type[PretrainedConfig]]:
        """Returns the classes of the backbone and of its configuration."""

    @abstractmethod
    def instructions(self) -> Sequence[str]:
        """Returns the authors' instruction for each head. Raises DataError when it cannot be read."""

    @abstractmethod
    def parts_of(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """Returns the weights of the backbone and of each head in a published checkpoint."""

    def load_model(self) -> PreferenceNetwork:
        cls, config_class = self.classes()
        if self.config.path == "toy":
            with fixed_seed():
                toy = cls(toy_vl_config(config_class, self.processors[0], self.toy_vision))
                return PreferenceNetwork(toy, len(self.processors))
        weights, heads = self.parts_of(read_weights(self.config.path, self.weights_file, "config.path"))
        architecture = load(config_class, self.config.processor, "config.processor")
        # The published classes add one token and have no lm_head.
        architecture.text_config.vocab_size = len(weights["language_model.embed_tokens.weight"])
        backbone = assemble(cls, architecture, weights, "config.path", TORCH_DTYPES[self.config.dtype])
        network = PreferenceNetwork(backbone, len(heads))
        for head, head_weights in zip(network.heads, heads, strict=True):
            fill(head, head_weights, "config.path")
        return network

    @cached_property
    def processors(self) -> list[VisionLanguageProcessor]:
        """The tokenizer and image processor with the instruction of each head, loaded on first use."""
        if self.config.path == "toy":
            return [toy_processor(instruction) for instruction in self.toy_instructions]
        from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

        instructions, where = self.instructions(), self.config.processor
        tokenizer, images = (load(cls, where, "config.processor") for cls in (AutoTokenizer, Qwen2VLImageProcessorPil))
        return [VisionLanguageProcessor(tokenizer, images, instruction) for instruction in instructions]

    def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
        check_special_tokens(prompt)

    def means(self, request: RewardRequest, images: Sequence[Sequence[Tensor]]) -> Tensor:
        """Returns the mean of the preference [H, B] that each of the H heads predicts.

        Args:
            images: for each row, the images [3, H, W], uint8 or in [0, 1], that the questions are about.
        """
        assert request.prompts is not None
        for sample, prompt in zip(request.sample_ids, request.prompts, strict=True):
            check_special_tokens(prompt, f" of sample {sample!r}")
        return torch.stack([self._means(head, request.prompts, images) for head in range(len(self.processors))])

    @torch.no_grad()
    def _means(self, head: int, prompts: Sequence[str], images: Sequence[Sequence[Tensor]]) -> Tensor:
        """Returns the means [B] of one head. A batch has texts of one padded length, and images of the same sizes."""
        processor = self.processors[head]
        texts = [processor.tokenize(prompt, len(images[0])) for prompt in prompts]
        groups: dict[object, list[int]] = {}
        for row, text in enumerate(texts):
            groups.setdefault((padded_length(text), *(image.shape for image in images[row])), []).append(row)

        def predict(rows: Tensor) -> Tensor:
            inputs = processor.inputs([texts[row] for row in rows.tolist()], [images[row] for row in rows.tolist()])
            return self.model(*(x.to(self.device) for x in inputs), processor.reward_id, head)[:, 0].cpu()

        means = torch.empty(len(texts))
        for group in groups.values():
            means[group] = map_chunks(predict, torch.tensor(group), self.config.batch_size, ROWS)
        return means


class VisionLanguageProcessor:
    """Turns prompts and images into inputs of the network, with the tokenizer and image processor of Qwen2-VL."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, image_processor: BaseImageProcessor, instruction: str
    ) -> None:
        """
        Args:
            instruction: a text with {text_prompt} and <|Reward|>. <|Reward|> is added to the tokenizer.
        """
        tokenizer.add_tokens([REWARD_TOKEN], special_tokens=True)
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.instruction = instruction
        self.reward_id, self.image_id = tokenizer.convert_tokens_to_ids([REWARD_TOKEN, IMAGE_TOKEN])

    def tokenize(self, prompt: str, num_images: int = 1) -> list[int]:
        """Returns the tokens of the instruction with the prompt. One token stands for each image."""
        instruction = {"type": "text", "text": self.instruction.replace(PROMPT_PLACE, prompt)}
        content = [{"type": "image"}] * num_images + [instruction]
        turns = [{"role": "user", "content": content}]
        chat = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        tokens: list[int] = self.tokenizer(chat)["input_ids"]
        return tokens

    def inputs(self, texts: Sequence[list[int]], images: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the network's inputs for texts that have one padded length: tokens, patches and grids.

        They are tokens [B, L], padded on the right, which changes nothing under causal attention; patches [patches of
        all images, values of a patch]; and the number of frames, rows and columns of patches [images, 3].

        Args:
            texts: B texts as `tokenize` returns them.
            images: for each text, its images [3, H, W], uint8 or in [0, 1]. The first images of all texts have one
                size, and so on.
        """
        size = {"shortest_edge": AREA, "longest_edge": AREA}
        row_by_row = as_pil(image for row in images for image in row)
        processed = self.image_processor(row_by_row, size=size, return_tensors="pt")
        grids = processed["image_grid_thw"]
        counts = [int(grid.prod()) // self.image_processor.merge_size**2 for grid in grids[: len(images[0])]]
        length = padded_length(texts[0]) + sum(counts) - len(counts)
        tokens = torch.full((len(texts), length), self.tokenizer.pad_token_id)
        for row, text in enumerate(texts):
            widths = iter(counts)
            expanded = [token for token in text for _ in range(next(widths) if token == self.image_id else 1)]
            tokens[row, : len(expanded)] = torch.tensor(expanded)
        return tokens, processed["pixel_values"], grids


def padded_length(text: Sequence[int]) -> int:
    """Returns the number of tokens of a text with its padding."""
    return round_up(len(text), TOKEN_MULTIPLE)


def check_special_tokens(prompt: str, of_sample: str = "") -> None:
    """Raises RewardError (6002) when a prompt contains a special token of the model."""
    if tokens := SPECIAL_TOKEN.findall(prompt):
        raise RewardError(
            f"the prompt {prompt!r}{of_sample} contains {', '.join(tokens)}, which the model reads as a special token "
            "and not as text: remove it from the data"
        )


def text_constants(source: str) -> dict[str, str]:
    """Returns the string constants that the source of a module assigns, by name."""
    constants: dict[str, str] = {}
    for line in ast.parse(source).body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            constants |= {ast.unparse(target): line.value.value for target in line.targets}
    return constants


TOY_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_processor(instruction: str) -> VisionLanguageProcessor:
    """Returns the toy's tokenizer with Qwen2-VL's image processor."""
    from transformers import Qwen2VLImageProcessorPil

    return VisionLanguageProcessor(toy_tokenizer(), Qwen2VLImageProcessorPil(), instruction)


def toy_tokenizer() -> PreTrainedTokenizerBase:
    """Returns Qwen2's tokenizer over bytes with its chat template."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    special_tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN]
    vocabulary = {piece: i for i, piece in enumerate([*sorted(ByteLevel.alphabet()), *special_tokens])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token=special_tokens[0],
        eos_token=special_tokens[2],
        extra_special_tokens=special_tokens,
    )
    tokenizer.chat_template = TOY_CHAT
    return tokenizer


def toy_vl_config(
    kind: type[PretrainedConfig], processor: VisionLanguageProcessor, vision: Mapping[str, object]
) -> PretrainedConfig:
    """Returns a configuration of `kind` (Qwen2-VL or Qwen2.5-VL) with 2 layers, width 32 and the processor's tokens."""
    names = {"image": IMAGE_TOKEN, "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    ids = {f"{name}_token_id": processor.tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    text = {
        "vocab_size": len(processor.tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    }
    return kind(text_config=text, vision_config={"depth": 2, "hidden_size": 32, "num_heads": 2, **vision}, **ids)
