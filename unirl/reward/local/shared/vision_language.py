"""Prepares the inputs of reward models based on Qwen2-VL: an instruction with the prompt, and image patches."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.config.dependencies import need
from unirl.config.errors import NotFoundError, RewardError
from unirl.models.chunks import round_up
from unirl.reward.local.shared.images import as_pil
from unirl.reward.local.shared.pretrained import load

REWARD_TOKEN, IMAGE_TOKEN, PROMPT_PLACE = "<|Reward|>", "<|image_pad|>", "{text_prompt}"
SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")
"""Matches the special tokens of Qwen2-VL's tokenizer."""
AREA = 256 * 28 * 28
"""Every image is scaled to about this many pixels, which are 256 tokens."""
TOKEN_MULTIPLE = 64
"""Texts are padded to a multiple of this, and a batch holds texts of one length, so that no text depends on another."""


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of the network; the fields are its arguments."""

    tokens: Tensor  # [B, L]; padding is on the right, and attention is causal, so that padding changes nothing
    patches: Tensor  # [patches of all images, values of a patch]
    grids: Tensor  # [B, 3] frames, rows and columns of patches


class VisionLanguageProcessor:
    """Turns prompts and images into inputs of the network, with the tokenizer and image processor of Qwen2-VL."""

    def __init__(self, tokenizer: Any, image_processor: Any, instruction: str) -> None:
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

    def inputs(self, texts: Sequence[list[int]], *images: Tensor) -> ModelInputs:
        """Returns the network's inputs for texts that have one padded length.

        Args:
            texts: B texts as `tokenize` returns them.
            images: the first image of every text [B, 3, H, W] in [0, 1], then the second one, and so on.
        """
        size = {"shortest_edge": AREA, "longest_edge": AREA}
        row_by_row = [image for row in zip(*map(as_pil, images), strict=True) for image in row]
        processed = self.image_processor(row_by_row, size=size, return_tensors="pt")
        grids = processed["image_grid_thw"]
        counts = [int(grid.prod()) // self.image_processor.merge_size**2 for grid in grids[: len(images)]]
        length = padded_length(texts[0]) + sum(counts) - len(counts)
        tokens = torch.full((len(texts), length), self.tokenizer.pad_token_id)
        for row, text in enumerate(texts):
            widths = iter(counts)
            expanded = [token for token in text for _ in range(next(widths) if token == self.image_id else 1)]
            tokens[row, : len(expanded)] = torch.tensor(expanded)
        return ModelInputs(tokens, processed["pixel_values"], grids)


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


def preference_head(width: int) -> nn.Sequential:
    """Returns the published head, which maps hidden states [B, width] to the mean and spread [B, 2] of a preference."""
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.ReLU(),
        nn.Dropout(0.05),
        nn.Linear(1024, 16),
        nn.ReLU(),
        nn.Linear(16, 2),
    )


def states_at(backbone: Any, tokens: Tensor, patches: Tensor, grids: Tensor, token_id: int) -> Tensor:
    """Returns the float32 hidden states [B, D] of the token `token_id`, which every text [B, L] contains once."""
    # The published classes number the tokens of an image one by one, where Qwen2-VL counts rows and columns.
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, len(tokens), -1)
    states: Tensor = backbone(
        input_ids=tokens, position_ids=positions, pixel_values=patches, image_grid_thw=grids, use_cache=False
    ).last_hidden_state
    return states[tokens == token_id].float()


def published_processor(where: str, instruction: str | None) -> VisionLanguageProcessor:
    """Returns the processor for the hub id or local directory `where` of Qwen2-VL."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

    tokenizer, images = (load(cls, where, "config.processor") for cls in (AutoTokenizer, Qwen2VLImageProcessorPil))
    return VisionLanguageProcessor(tokenizer, images, read_instruction(instruction))


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


def text_constants(source: str) -> dict[str, str]:
    """Returns the string constants that the source of a module assigns, by name."""
    constants: dict[str, str] = {}
    for line in ast.parse(source).body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            constants |= {ast.unparse(target): line.value.value for target in line.targets}
    return constants


TOY_INSTRUCTION = f"How good is this picture of the following: {PROMPT_PLACE}\nAnswer: {REWARD_TOKEN}\n"
TOY_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_processor() -> VisionLanguageProcessor:
    """Returns the toy's tokenizer with Qwen2-VL's image processor."""
    from transformers import Qwen2VLImageProcessorPil

    return VisionLanguageProcessor(toy_tokenizer(), Qwen2VLImageProcessorPil(), TOY_INSTRUCTION)


def toy_tokenizer() -> Any:
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


def toy_vl_config(kind: Any, processor: VisionLanguageProcessor, **vision: object) -> Any:
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
