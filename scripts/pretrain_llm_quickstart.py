"""Makes the weights of the language quick start: a small Qwen3 that adds in columns, and often forgets to carry.

The training texts are sums worked out column by column. They are generated here, so nothing is downloaded. Like pupils,
they often forget to carry or borrow a one, each time with probability `--forgets`. The model thus learns the form of a
solution together with the mistake. RL then teaches it to solve sums correctly.

    python scripts/pretrain_llm_quickstart.py --out unirl/models/qwen3/quickstart    # about two minutes on two cores
    python scripts/pretrain_llm_quickstart.py --prompts datasets/columns             # the prompt files, in a second
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.pretrain_quickstart import merged
from unirl.models.loading.toy_tokenizers import END, END_OF_TEXT, TEXT_SPECIALS, byte_letters

WORDINGS = {
    "+": ("What is {a} + {b}?", "Compute {a} + {b}.", "{a} + {b} = ?"),
    "-": ("What is {a} - {b}?", "Compute {a} - {b}.", "{a} - {b} = ?"),
}
SIZES = {"train": 1200, "test": 120}
TEST_SHARE = 6
"""One of this many pairs of numbers is in the test split."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("system", "user", "assistant", "What", " is", "Compute", "####")
"""Each of these is one token. Every digit is a token of its own."""
CONTEXT = 256
IGNORED = -100
"""The label of a token that does not count in the loss."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the training run."""

    steps: int = 900
    batch_size: int = 32
    learning_rate: float = 4e-3
    forgets: float = 0.6
    """Probability that a one that should be carried or borrowed is forgotten."""
    seed: int = 0


# Questions and solutions


@dataclass(frozen=True)
class Sum:
    """Two numbers of two or three digits to be added or subtracted."""

    a: int
    sign: str
    b: int

    @staticmethod
    def drawn(rng: random.Random) -> Sum:
        a, b = (rng.randrange(10, 100) if rng.random() < 0.3 else rng.randrange(100, 1000) for _ in range(2))
        sign = rng.choice("+-")
        return Sum(max(a, b), sign, min(a, b)) if sign == "-" else Sum(a, sign, b)

    @property
    def answer(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a - self.b

    @property
    def tested(self) -> bool:
        """True if the two numbers, in any order and with any sign, are held out for the test split."""
        pair = f"{min(self.a, self.b)} {max(self.a, self.b)}".encode()
        return hashlib.blake2b(pair, digest_size=8).digest()[0] % TEST_SHARE == 0

    def prompt(self, style: int) -> str:
        """Returns the prompt in the wording with the number `style`."""
        return WORDINGS[self.sign][style].format(a=self.a, b=self.b)


def worked_out(sum_: Sum, forgets: float, rng: random.Random) -> str:
    """Returns one line per column from the right, and the answer. Each carried one is dropped with `forgets`."""
    lines, digits, carried = [], "", False
    columns = list(itertools.zip_longest(str(sum_.a)[::-1], str(sum_.b)[::-1]))
    for place, (top, bottom) in enumerate(columns):
        line, result, carries = column(int(top or 0), sum_.sign, bottom, carried)
        last = place == len(columns) - 1
        digits = str(result if last else result % 10) + digits
        lines.append(line)
        carried = carries and rng.random() >= forgets
    return "\n".join([*lines, f"#### {int(digits)}"])


def column(top: int, sign: str, bottom: str | None, carried: bool) -> tuple[str, int, bool]:
    """Returns the line of a column, its result, and True if a one goes on to the next column."""
    terms = [int(bottom or 0), int(carried)]
    operands = "".join(f"{sign}{term}" for term, there in zip(terms, (bottom, carried), strict=True) if there)
    if sign == "+":
        result = top + sum(terms)
        return f"{top}{operands}={result}", result, result >= 10
    borrows = top < sum(terms)
    top += 10 * borrows
    result = top - sum(terms)
    return f"{top}{operands}={result}", result, borrows


def write_prompts(folder: Path) -> None:
    """Writes train.jsonl and test.jsonl with prompts and answers. No pair of numbers is in both."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    rows: dict[str, dict[Sum, str]] = {name: {} for name in SIZES}
    while any(len(rows[name]) < size for name, size in SIZES.items()):
        sum_ = Sum.drawn(rng)
        row = {"prompt": sum_.prompt(rng.randrange(3)), "metadata": {"answer": str(sum_.answer)}}
        split = rows["test" if sum_.tested else "train"]
        if len(split) < SIZES["test" if sum_.tested else "train"]:
            split.setdefault(sum_, json.dumps(row) + "\n")
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(lines.values()))


# The model


def build_tokenizer(words: Sequence[str] = WORDS) -> Any:
    """Returns a byte-level tokenizer like Qwen's, with merges that make one token of each of `words`."""
    from transformers import Qwen2Tokenizer

    letters = byte_letters()
    pieces, merges = list(letters), []
    for word in words:
        parts = merged([letters[byte] for byte in word.encode()], merges)
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            pieces.append(parts[0] + parts[1])
            parts = merged(parts, merges)
    vocab = {piece: i for i, piece in enumerate((*pieces, *TEXT_SPECIALS))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, pad_token=END_OF_TEXT, eos_token=END, extra_special_tokens=list(TEXT_SPECIALS)
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def build_model(tokenizer: Any, width: int = 128, layers: int = 2) -> Any:
    """Returns a Qwen3 with 0.4 million parameters and a tied head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Saves in the folder layout of transformers, in bfloat16."""
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# Training


@dataclass(frozen=True)
class Batch:
    """A batch of prompts and responses, padded on the right."""

    tokens: Tensor  # [B, L]
    labels: Tensor  # [B, L] the tokens of the response; IGNORED elsewhere

    @staticmethod
    def of(texts: Sequence[tuple[str, str]], tokenizer: Any) -> Batch:
        """Prompts and responses as a chat."""
        prompts = [chat(tokenizer, prompt) for prompt, _ in texts]
        read = tokenizer(prompts).input_ids
        responses = tokenizer([response + tokenizer.eos_token for _, response in texts]).input_ids
        longest = max(len(p) + len(r) for p, r in zip(read, responses, strict=True))
        tokens = torch.full((len(texts), longest), tokenizer.pad_token_id)
        labels = torch.full_like(tokens, IGNORED)
        for row, (p, r) in enumerate(zip(read, responses, strict=True)):
            tokens[row, : len(p) + len(r)] = torch.tensor(p + r)
            labels[row, len(p) : len(p) + len(r)] = torch.tensor(r)
        return Batch(tokens, labels)


def chat(tokenizer: Any, prompt: str) -> str:
    """Returns the prompt in the chat template, up to the begin of the response."""
    messages = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def homework(settings: Settings, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields prompts with solutions without end. No pair of numbers is in the test split."""
    while True:
        sum_ = Sum.drawn(rng)
        if not sum_.tested:
            yield sum_.prompt(rng.randrange(3)), worked_out(sum_, settings.forgets, rng)


def learning_rate(step: int, settings: Settings) -> float:
    """Warms up for 100 steps, then decays to 1/50 along a cosine."""
    decay = 0.51 + 0.49 * math.cos(math.pi * step / settings.steps)
    return settings.learning_rate * min(1.0, (step + 1) / 100) * decay


def train(model: Any, tokenizer: Any, settings: Settings, corpus: Iterator[tuple[str, str]]) -> None:
    """Trains by next-token prediction on the responses of a corpus of prompts and responses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    start = time.time()
    for step in range(settings.steps):
        batch = Batch.of(list(itertools.islice(corpus, settings.batch_size)), tokenizer)
        optimizer.param_groups[0]["lr"] = learning_rate(step, settings)
        loss = model(input_ids=batch.tokens, labels=batch.labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{settings.steps}  loss {loss.item():.4f}  {time.time() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to write the model to")
    parser.add_argument("--prompts", type=Path, help="folder to write train.jsonl and test.jsonl to")
    for name, default in vars(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    args = vars(parser.parse_args())
    out, prompts = args.pop("out"), args.pop("prompts")
    if prompts:
        write_prompts(prompts)
    if out:
        settings = Settings(**args)
        torch.manual_seed(settings.seed)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        train(model, tokenizer, settings, homework(settings, random.Random(settings.seed)))
        save(model, tokenizer, out)


if __name__ == "__main__":
    main()
