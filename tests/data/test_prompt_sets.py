"""The prompt sets that the project makes: the same to the byte, right, and without overlap between train and test."""

from __future__ import annotations

import ast
import operator
import re
import subprocess
import sys

import pytest

from tests.source_tree import ROOT
from unirl.data.datasets import load_prompts
from unirl.reward.local.gsm8k_exact_match import NUMBER
from unirl.reward.local.ocr import OCRRewardScorer, comparable

SETS = ("ocr", "compositional", "arithmetic")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def prompts(name, split):
    return load_prompts(ROOT / "datasets" / name / f"{split}.jsonl")


def every(name):
    return [prompt for split in ("train", "test") for prompt in prompts(name, split)]


def calculated(node):
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](calculated(node.left), calculated(node.right))
    return node.value


def test_the_script_writes_the_committed_files_to_the_byte(tmp_path):
    script = ROOT / "scripts" / "write_prompt_sets.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True, capture_output=True)
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.jsonl"))
    assert [str(path) for path in written] == sorted(
        f"{name}/{split}.jsonl" for name in SETS for split in ("train", "test")
    )
    for path in written:
        assert (tmp_path / path).read_bytes() == (ROOT / "datasets" / path).read_bytes(), path


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_some_hundred_different_prompts(name):
    train, test = prompts(name, "train"), prompts(name, "test")
    assert (len(train), len(test)) == (300, 60)
    assert len({prompt.text for prompt in (*train, *test)}) == 360


def what(name, prompt):
    """What a prompt asks for, however it is worded."""
    match name:
        case "ocr":
            return comparable(prompt.metadata["text"])
        case "compositional":
            return tuple(sorted(map(tuple, prompt.metadata["vqa_list"])))
        case "arithmetic":
            return prompt.metadata["expression"]


@pytest.mark.parametrize("name", SETS)
def test_nothing_that_is_tested_is_trained(name):
    train, test = ({what(name, prompt) for prompt in prompts(name, split)} for split in ("train", "test"))
    assert len(train) == 300 and len(test) == 60 and not train & test


def test_every_text_to_draw_is_the_one_that_is_quoted():
    scorer = OCRRewardScorer()
    for prompt in every("ocr"):
        assert scorer.target(prompt.text, {}) == comparable(prompt.metadata["text"])
        assert prompt.text.count('"') == 2


def test_every_right_answer_is_what_its_expression_gives_and_its_numbers_stand_in_the_prompt():
    for prompt in every("arithmetic"):
        expression = prompt.metadata["expression"]
        assert calculated(ast.parse(expression, mode="eval").body) == int(prompt.metadata["answer"])
        assert set(NUMBER.findall(expression)) <= set(NUMBER.findall(prompt.text)), prompt.text
        assert prompt.text.endswith(r"\boxed{}.")


def test_every_question_about_a_scene_is_answered_by_its_prompt():
    for prompt in every("compositional"):
        questions, skills = prompt.metadata["vqa_list"], prompt.metadata["skills"]
        assert prompt.metadata["atom_count"] == len(questions) == len(skills) >= 2
        for question, answer in questions:
            if answer != "yes":
                thing = re.search(r"How many (\w+)|is the (\w+)|are the (\w+)", question)
                named = next(filter(None, thing.groups()))
                assert re.search(rf"\b{answer} (\w+ )?{named}\b", prompt.text), (prompt.text, question)
            elif question.startswith("Is there"):
                assert re.search(rf"\b{question.split()[3]}\b", prompt.text)
            else:
                first, relation, second = re.fullmatch(r"Is the (\w+) (.*) the (\w+)\?", question).groups()
                assert re.search(rf"{first} {relation} an? (\w+ )?{second}$", prompt.text), (prompt.text, question)
