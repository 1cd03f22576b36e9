"""The shipped model is small, complete, and reads every prompt that the quick start asks of it."""

import json

import pytest

from scripts.pretrain_quickstart import ALL, MAX_TOKENS, SIZE, build_tokenizer, held_out, write_prompts
from tests.source_tree import ROOT
from unirl.models.sd3.architecture import SHIPPED


def prompts() -> list[str]:
    files = [ROOT / f"datasets/shapes/{name}.jsonl" for name in ("train", "eval")]
    return [json.loads(line)["prompt"] for file in files for line in file.read_text().splitlines()]


def test_the_shipped_files_take_at_most_six_megabytes():
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) <= 6_000_000


@pytest.mark.parametrize("fresh", [True, False], ids=["built", "shipped"])
def test_every_word_of_every_prompt_is_one_token(fresh):
    from transformers import CLIPTokenizer

    tokenizer = build_tokenizer() if fresh else CLIPTokenizer.from_pretrained(SHIPPED / "tokenizer")
    for prompt in prompts():
        assert len(tokenizer(prompt).input_ids) == len(prompt.split()) + 2 <= MAX_TOKENS


def test_the_model_paints_pictures_of_the_size_that_the_recipe_asks_for():
    config = json.loads((SHIPPED / "transformer/config.json").read_text())
    assert (config["sample_size"], config["in_channels"]) == (SIZE, 3)


def test_every_color_and_shape_is_trained_and_the_held_out_combinations_are_not():
    out = set(held_out())
    trained = set(ALL) - out
    assert out and out < set(ALL)
    for axis in range(len(ALL[0])):
        assert {drawing[axis] for drawing in trained} == {drawing[axis] for drawing in ALL}


def test_the_prompt_files_are_those_that_the_script_writes(tmp_path):
    write_prompts(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_text() == (ROOT / "datasets/shapes" / name).read_text()
