"""What Qwen2-VL with a head is asked about pictures: a published text, the prompt within it, and their patches."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.config.dependencies import need
from unirl.config.errors import NotFoundError, RewardError
from unirl.models.chunks import round_up
from unirl.reward.local.shared.images import as_pil
from unirl.reward.local.shared.pretrained import load

REWARD_TOKEN, IMAGE_TOKEN, PROMPT_PLACE = "<|Reward|>", "<|image_pad|>", "{text_prompt}"
MARK = re.compile(r"<\|\w+\|>")
"""What Qwen2-VL's tokenizer takes for a mark of the chat."""
AREA = 256 * 28 * 28
"""Every picture is scaled to about this many pixels: 256 tokens."""
TOKEN_MULTIPLE = 64
"""Texts are filled up to a multiple of this, and only texts of one length are batched: none depends on another."""


@dataclass(frozen=True)
class ModelInputs:
    """What the network is asked about some pictures; the fields are its arguments."""

    tokens: Tensor  # [B, L]; what fills a text up stands behind all that is read, and attention looks back only
    patches: Tensor  # [all patches, values of a patch]
    grids: Tensor  # [B, 3] frames, rows and columns of patches


class VisionLanguageProcessor:
    """Turns prompts and pictures into questions, with the tokenizer and the image processor of Qwen2-VL."""

    def __init__(self, tokenizer: Any, image_processor: Any, instruction: str) -> None:
        """`instruction` holds {text_prompt} and <|Reward|>; the latter is added to the tokenizer."""
        tokenizer.add_tokens([REWARD_TOKEN], special_tokens=True)
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.instruction = instruction
        self.reward_id, self.image_id = tokenizer.convert_tokens_to_ids([REWARD_TOKEN, IMAGE_TOKEN])

    def text(self, prompt: str, num_pictures: int = 1) -> list[int]:
        """The tokens of a question, with one token in place of each picture."""
        question = {"type": "text", "text": self.instruction.replace(PROMPT_PLACE, prompt)}
        content = [{"type": "image"}] * num_pictures + [question]
        turns = [{"role": "user", "content": content}]
        chat = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        tokens: list[int] = self.tokenizer(chat)["input_ids"]
        return tokens

    def questions(self, texts: Sequence[list[int]], *pictures: Tensor) -> ModelInputs:
        """Texts of one filled length and, for each of a text's pictures in turn, those [B, 3, H, W] in [0, 1]."""
        size = {"shortest_edge": AREA, "longest_edge": AREA}
        row_by_row = [image for row in zip(*map(as_pil, pictures), strict=True) for image in row]
        seen = self.image_processor(row_by_row, size=size, return_tensors="pt")
        grids = seen["image_grid_thw"]
        counts = [int(grid.prod()) // self.image_processor.merge_size**2 for grid in grids[: len(pictures)]]
        length = padded_length(texts[0]) + sum(counts) - len(counts)
        tokens = torch.full((len(texts), length), self.tokenizer.pad_token_id)
        for row, text in enumerate(texts):
            widths = iter(counts)
            whole = [token for token in text for _ in range(next(widths) if token == self.image_id else 1)]
            tokens[row, : len(whole)] = torch.tensor(whole)
        return ModelInputs(tokens, seen["pixel_values"], grids)


def padded_length(text: Sequence[int]) -> int:
    """The number of tokens of a text with the filling."""
    return round_up(len(text), TOKEN_MULTIPLE)


def check_special_tokens(prompt: str, whose: str = "") -> None:
    """Raises RewardError (6002) when a prompt holds what the model would take for a mark of its own."""
    if found := MARK.findall(prompt):
        raise RewardError(
            f"the prompt {prompt!r}{whose} holds {', '.join(found)}, which the model reads as a mark of the chat and "
            "not as text: take it out of the data"
        )


def published_processor(where: str, instruction: str | None) -> VisionLanguageProcessor:
    """The reader of the hub id or local directory `where` of Qwen2-VL."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

    tokenizer, images = (load(cls, where, "config.processor") for cls in (AutoTokenizer, Qwen2VLImageProcessorPil))
    return VisionLanguageProcessor(tokenizer, images, read_instruction(instruction))


def read_instruction(path: str | None) -> str:
    """What the model is asked: of a text file or (None) of the authors' package, whose source is read and not run.

    Raises:
        DependencyError: 3001 when the package is not installed.
        DataError: 4001 when the file is missing, or lacks the place of the prompt or the reward token.
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
                f"config.instruction={path!r}: the text of {where} holds {place} {text.count(place)} times, and needs "
                "it once"
            )
    return text


def _published_source() -> Path:
    need(
        "hpsv3",
        by="reward 'hpsv3', for the text that it was trained to answer,",
        install="pip install --no-deps hpsv3, or give that text in a file as config.instruction",
    )
    package = find_spec("hpsv3")
    assert package is not None and package.submodule_search_locations, "hpsv3 is a package"
    return Path(package.submodule_search_locations[0]) / "dataset" / "data_collator_qwen.py"


def text_constants(source: str) -> dict[str, str]:
    """The strings that a module's source assigns to names, by name."""
    found: dict[str, str] = {}
    for line in ast.parse(source).body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            found |= {ast.unparse(target): line.value.value for target in line.targets}
    return found


TOY_INSTRUCTION = f"How good is this picture of the following: {PROMPT_PLACE}\nAnswer: {REWARD_TOKEN}\n"
TOY_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_processor() -> VisionLanguageProcessor:
    """The toy's tokenizer, with Qwen2-VL's image processor."""
    from transformers import Qwen2VLImageProcessorPil

    return VisionLanguageProcessor(toy_tokenizer(), Qwen2VLImageProcessorPil(), TOY_INSTRUCTION)


def toy_tokenizer() -> Any:
    """Qwen2's tokenizer over bytes, with the format of its chats."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN]
    vocabulary = {piece: i for i, piece in enumerate([*sorted(ByteLevel.alphabet()), *marks])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], pad_token=marks[0], eos_token=marks[2], extra_special_tokens=marks
    )
    tokenizer.chat_template = TOY_CHAT
    return tokenizer


def toy_vl_config(kind: Any, reader: VisionLanguageProcessor, **vision: object) -> Any:
    """A configuration of `kind` (that of Qwen2-VL or Qwen2.5-VL): 2 layers, 32 wide, for the reader's tokens."""
    names = {"image": IMAGE_TOKEN, "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    ids = {f"{name}_token_id": reader.tokenizer.convert_tokens_to_ids(mark) for name, mark in names.items()}
    text = {
        "vocab_size": len(reader.tokenizer),
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
