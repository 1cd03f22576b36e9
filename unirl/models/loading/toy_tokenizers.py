"""Tokenizers of toy models: the real classes over single characters and bytes, made without files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PRINTABLE = range(33, 127)
CLIP_VOCABULARY = 514
T5_VOCABULARY = 98
GEMMA_SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
GEMMA_VOCABULARY = len(GEMMA_SPECIALS) + 1 + len(PRINTABLE)
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
THINK = ("<think>", "</think>")
QWEN_SPECIALS = (END_OF_TEXT, START, END, *VISION)
QWEN_VOCABULARY = 256 + len(QWEN_SPECIALS) + len(THINK)
QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def clip_tokenizer() -> Any:
    """CLIP's, of 514 letters: ids 512 and 513 begin and end a text."""
    from transformers import CLIPTokenizer

    letters = sorted(byte_letters())
    pieces = letters + [letter + "</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer() -> Any:
    """T5's and UMT5's, of 98 letters."""
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    return T5Tokenizer(vocab=pieces + [(chr(c), -3.0) for c in PRINTABLE], extra_ids=0)


def gemma_tokenizer() -> Any:
    """Gemma's, of 100 letters; every text begins with <bos>."""
    from transformers import GemmaTokenizer

    pieces = [*GEMMA_SPECIALS, "\u2581", *map(chr, PRINTABLE)]
    return GemmaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], add_bos_token=True)


def byt5_tokenizer() -> Any:
    """ByT5's, which needs no files: 384 ids."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def qwen_tokenizer(chat_template: str = QWEN_CHAT, specials: Sequence[str] = QWEN_SPECIALS) -> Any:
    """Qwen's, one token per byte, with its own special tokens and chat."""
    from transformers import Qwen2Tokenizer

    pieces = [*byte_letters(), *specials, *THINK]
    tokenizer = Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[],
        pad_token=END_OF_TEXT,
        eos_token=END,
        extra_special_tokens=list(specials),
    )
    tokenizer.add_tokens(list(THINK))
    tokenizer.chat_template = chat_template
    return tokenizer


def with_pieces(tokenizer: Any, text: str, count: int) -> Any:
    """The same tokenizer, to which `text` is `count` tokens: what a long prompt template is to the real one."""
    size = len(text) // count  # all but the last are equally long, so that no other piece is the longest match
    starts = [i * size for i in range(count)]
    tokenizer.add_tokens([text[start : start + size] for start in starts[:-1]] + [text[starts[-1] :]])
    return tokenizer


def byte_letters() -> list[str]:
    """The letters that byte-level BPE spells the bytes 0 to 255 with: printable ones as they are, others above 255."""
    printable = {*PRINTABLE, *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
