"""The shipped language model is small and complete, and its corpus, prompts and tokenizer match its script."""

import json
import random
import re

import pytest

from scripts.pretrain_llm_quickstart import WORDS, Sum, build_tokenizer, chat, worked_out, write_prompts
from tests.source_tree import ROOT
from unirl.models.qwen3.family import Qwen3Bundle

DATA = ROOT / "datasets/columns"


def rows(split):
    return [json.loads(line) for line in (DATA / f"{split}.jsonl").read_text().splitlines()]


def numbers(prompt):
    a, sign, b = re.search(r"(\d+) ([+-]) (\d+)", prompt).groups()
    return int(a), sign, int(b)


def without_ones(a, sign, b):
    """The sum without carries and borrows: each column by itself, the leftmost one in full."""
    columns = [int(x) + int(sign + y) for x, y in zip(f"{a:03}", f"{b:03}", strict=True)]
    size = max(len(str(a)), len(str(b)))
    first, rest = columns[3 - size], columns[4 - size :]
    return first * 10 ** (size - 1) + sum(column % 10 * 10**i for i, column in enumerate(reversed(rest)))


def sums(number=500):
    rng = random.Random(1)
    return [Sum.drawn(rng) for _ in range(number)]


def test_a_pupil_who_forgets_nothing_is_always_right_and_one_who_forgets_all_adds_columns_by_themselves():
    for sum_ in sums():
        a, sign, b = sum_.a, sum_.sign, sum_.b
        for forgets, answer in ((0.0, a + int(f"{sign}{b}")), (1.0, without_ones(a, sign, b))):
            assert worked_out(sum_, forgets, random.Random(0)).endswith(f"\n#### {answer}"), (sum_, forgets)


def test_every_line_of_a_pupil_who_forgets_nothing_is_true():
    for sum_ in sums():
        for line in worked_out(sum_, 0.0, random.Random(0)).splitlines()[:-1]:
            said, result = line.split("=")
            assert sum(int(term) for term in re.findall(r"[+-]?\d+", said)) == int(result)


def test_every_answer_is_right_and_no_pair_of_numbers_is_both_trained_and_tested():
    pairs = {}
    for split, size in (("train", 1200), ("test", 120)):
        result = rows(split)
        assert len({row["prompt"] for row in result}) == len(result) == size
        for row in result:
            a, sign, b = numbers(row["prompt"])
            assert int(row["metadata"]["answer"]) == a + int(f"{sign}{b}")
        pairs[split] = {tuple(sorted(numbers(row["prompt"])[::2])) for row in result}
    assert not pairs["train"] & pairs["test"]


def test_the_prompt_files_are_those_that_the_script_writes(tmp_path):
    write_prompts(tmp_path)
    for split in ("train", "test"):
        assert (tmp_path / f"{split}.jsonl").read_text() == (DATA / f"{split}.jsonl").read_text()


@pytest.mark.parametrize("shipped", [False, True], ids=["built", "shipped"])
def test_the_tokenizer_has_a_token_per_word_and_digit_and_reads_any_text(shipped):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Qwen3Bundle.shipped["quickstart"]) if shipped else build_tokenizer()
    words = ["<|im_start|>", "user", "\n", "What", " is", " ", "4", "7", "?", "<|im_end|>", "\n"]
    text = chat(tokenizer, "What is 47?")
    assert [tokenizer.decode([token]) for token in tokenizer(text).input_ids] == [
        *words,
        "<|im_start|>",
        "assistant",
        "\n",
    ]
    assert all(len(tokenizer(word).input_ids) == 1 for word in WORDS)
    assert tokenizer.decode(tokenizer("Grüße, 2 µm²\t").input_ids) == "Grüße, 2 µm²\t"


@pytest.mark.slow
def test_the_shipped_model_is_small_and_adds_well_where_nothing_is_carried_and_badly_where_something_is():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert sum(path.stat().st_size for path in Qwen3Bundle.shipped["quickstart"].iterdir()) <= 3_000_000
    tokenizer = AutoTokenizer.from_pretrained(Qwen3Bundle.shipped["quickstart"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(Qwen3Bundle.shipped["quickstart"], dtype=torch.float32).eval()
    result = rows("test")
    feed = tokenizer([chat(tokenizer, row["prompt"]) for row in result], padding=True, return_tensors="pt")
    said = model.generate(**feed, max_new_tokens=48, do_sample=False)[:, feed.input_ids.shape[1] :]
    right: dict[bool, list[bool]] = {True: [], False: []}
    for row, text in zip(result, tokenizer.batch_decode(said, skip_special_tokens=True), strict=True):
        answer = int(row["metadata"]["answer"])
        right[without_ones(*numbers(row["prompt"])) == answer].append(text.endswith(f"\n#### {answer}"))
    assert sum(right[True]) >= 0.9 * len(right[True]) and len(right[True]) >= 20
    assert sum(right[False]) <= 0.5 * len(right[False]) and len(right[False]) >= 60
