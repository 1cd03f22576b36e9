"""Tokenizers of toy models: the real classes over single characters or bytes, built without files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PRINTABLE = range(33, 127)
GEMMA_SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEXT_SPECIALS = (END_OF_TEXT, START, END)
QWEN_SPECIALS = (*TEXT_SPECIALS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
THINK = ("<think>", "</think>")
JANUS_BOS, JANUS_EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
JANUS_PAD = "<\uff5c\u2581pad\u2581\uff5c>"
JANUS_IMAGE = {
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_placeholder>",
}
HUNYUAN_BOS, HUNYUAN_EOS, HUNYUAN_PAD = "<|startoftext|>", "<|endoftext|>", "<pad>"
HUNYUAN_MARKS = (
    *("<boi>", "<eoi>", "<img>", "<cfg>", "<timestep>", "<img_size_1024>"),
    *(f"<img_ratio_{i}>" for i in range(33)),
    *("<think>", "</think>", "<recaption>", "</recaption>", "<answer>", "</answer>"),
    *(f"<img_ratio_{i}>" for i in range(33, 37)),
    "<joint_img_sep>",
)

# Chat templates, in Jinja.
_TEXT_MESSAGES = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
_IMAGE_MESSAGES = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
_ANSWER = "{% if add_generation_prompt %}<|im_start|>assistant\n"
_NO_THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
_END = "{% endif %}"


def clip_tokenizer() -> PreTrainedTokenizerBase:
    """A CLIP tokenizer with 514 tokens. Ids 512 and 513 begin and end a text."""
    from transformers import CLIPTokenizer

    letters = sorted(byte_letters())
    pieces = letters + [letter + "</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer() -> PreTrainedTokenizerBase:
    """A T5 or UMT5 tokenizer with 98 tokens."""
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    return T5Tokenizer(vocab=pieces + [(chr(c), -3.0) for c in PRINTABLE], extra_ids=0)


def gemma_tokenizer() -> PreTrainedTokenizerBase:
    """A Gemma tokenizer with 100 tokens. Every text begins with <bos>."""
    from transformers import GemmaTokenizer

    pieces = [*GEMMA_SPECIALS, "\u2581", *map(chr, PRINTABLE)]
    return GemmaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], add_bos_token=True)


def byt5_tokenizer() -> PreTrainedTokenizerBase:
    """The ByT5 tokenizer with 384 tokens, which needs no files."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def qwen_tokenizer() -> PreTrainedTokenizerBase:
    """A Qwen tokenizer with 265 tokens, for the text encoders of image and video models."""
    return _qwen(QWEN_SPECIALS, THINK, _IMAGE_MESSAGES + _ANSWER + _NO_THINKING + _END)


def qwen3_tokenizer() -> PreTrainedTokenizerBase:
    """A Qwen3 tokenizer with 261 tokens."""
    return _qwen(TEXT_SPECIALS, THINK, _TEXT_MESSAGES + _ANSWER + _NO_THINKING + _END)


def qwen_vl_tokenizer() -> PreTrainedTokenizerBase:
    """A Qwen-VL tokenizer with 263 tokens."""
    return _qwen(QWEN_SPECIALS, (), _IMAGE_MESSAGES + _ANSWER + _END)


def _qwen(specials: Sequence[str], further: Sequence[str], chat_template: str) -> PreTrainedTokenizerBase:
    """A Qwen tokenizer with one token per byte, special token and further token."""
    from transformers import Qwen2Tokenizer

    pieces = [*byte_letters(), *specials, *further]
    tokenizer = Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[],
        pad_token=END_OF_TEXT,
        eos_token=END,
        extra_special_tokens=list(specials),
    )
    tokenizer.add_tokens(list(further))
    tokenizer.chat_template = chat_template
    return tokenizer


def janus_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of Janus with 264 tokens: one per byte, special token and role. It begins texts with bos."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    roles = ("<|User|>", "<|Assistant|>")
    specials = (JANUS_BOS, JANUS_EOS, JANUS_PAD, *JANUS_IMAGE.values(), *roles)
    pieces = {piece: i for i, piece in enumerate([*byte_letters(), *specials])}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    begins = processors.TemplateProcessing(f"{JANUS_BOS} $A", special_tokens=[(JANUS_BOS, pieces[JANUS_BOS])])
    tokenizer.post_processor = begins
    tokenizer.add_special_tokens(list(roles))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=JANUS_BOS,
        eos_token=JANUS_EOS,
        pad_token=JANUS_PAD,
        extra_special_tokens=JANUS_IMAGE,
    )


def hunyuan_image_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of HunyuanImage-3 with 309 tokens: one per byte and special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = (HUNYUAN_BOS, HUNYUAN_EOS, HUNYUAN_PAD, *HUNYUAN_MARKS)
    pieces = {piece: i for i, piece in enumerate([*byte_letters(), *specials])}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=HUNYUAN_BOS,
        eos_token=HUNYUAN_EOS,
        pad_token=HUNYUAN_PAD,
        extra_special_tokens=list(HUNYUAN_MARKS),
    )


def with_pieces(tokenizer: PreTrainedTokenizerBase, text: str, count: int) -> PreTrainedTokenizerBase:
    """`tokenizer` with more tokens, so that `text` is `count` tokens. Toys use it for long prompt templates."""
    size = len(text) // count  # all but the last are equally long, so that no other piece is the longest match
    starts = [i * size for i in range(count)]
    tokenizer.add_tokens([text[start : start + size] for start in starts[:-1]] + [text[starts[-1] :]])
    return tokenizer


def byte_letters() -> list[str]:
    """The letters of byte-level BPE for bytes 0 to 255: printable ones are themselves, others are above 255."""
    printable = {*PRINTABLE, *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def llama_tokenizer() -> PreTrainedTokenizerBase:
    """A Llama 2 tokenizer with 99 tokens. Every text begins with <s>."""
    from transformers import LlamaTokenizer

    pieces = ["<unk>", "<s>", "</s>", "\n", "\u2581", *map(chr, PRINTABLE)]
    return LlamaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], add_bos_token=True)
