"""The toy checkpoint: the same classes, tiny, with fixed random weights, and a tokenizer of bytes without files."""

from __future__ import annotations

from typing import Any

PRINTABLE = range(33, 127)
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, START, END)
THINK = ("<think>", "</think>")
VOCAB_SIZE = 256 + len(SPECIALS) + len(THINK)

TOY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "initializer_range": 0.1,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def toy_tokenizer() -> Any:
    """One token per byte, and Qwen's own special tokens and chat."""
    from transformers import Qwen2Tokenizer

    pieces = [*byte_letters(), *SPECIALS, *THINK]
    tokenizer = Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[],
        pad_token=END_OF_TEXT,
        eos_token=END,
        extra_special_tokens=list(SPECIALS),
    )
    tokenizer.add_tokens(list(THINK))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def byte_letters() -> list[str]:
    """The letters that byte-level BPE spells the bytes 0 to 255 with: printable ones as they are, others above 255."""
    printable = {*PRINTABLE, *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
