"""The shipped models are small and complete, read every prompt of their data, and draw legible images."""

import json

import numpy as np
import pytest
import torch

from scripts.pretrain_quickstart import build_tokenizer
from scripts.quickstart_tasks import LETTERS, SIZE, TASKS, TWO_LETTERS, Task
from tests.models.rollouts import roll
from tests.source_tree import ROOT
from unirl.models.sd3.family import SD3, SD3Bundle, SD3Pipeline
from unirl.reward.client.encoding import uint8_levels
from unirl.reward.local.ocr import OCRRewardScorer, OCRSpec, comparable, in_reading_order
from unirl.sde.kernels import EulerODE
from unirl.types.reward import RewardRequest

LEARNED = {"quickstart": "shapes", "quickstart_letters": "letters"}
NUM_TOKENS = {"shapes": 3, "letters": 8}
"""Of the wording in the prompt files: its words, quotes and letters."""

every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def prompts(name: str) -> list[str]:
    files = [ROOT / f"datasets/{name}/{split}.jsonl" for split in ("train", "eval")]
    return [json.loads(line)["prompt"] for file in files for line in file.read_text().splitlines()]


def tokenizer_of(model: str, fresh: bool):
    from transformers import CLIPTokenizer

    return (
        build_tokenizer(TASKS[LEARNED[model]])
        if fresh
        else CLIPTokenizer.from_pretrained(SD3.shipped[model] / "tokenizer")
    )


@pytest.mark.parametrize("model", SD3.shipped)
def test_the_shipped_files_take_at_most_six_megabytes(model):
    assert sum(path.stat().st_size for path in SD3.shipped[model].rglob("*") if path.is_file()) <= 6_000_000


@pytest.mark.parametrize("fresh", [True, False], ids=["built", "shipped"])
@pytest.mark.parametrize("model", SD3.shipped)
def test_every_word_quote_and_letter_of_every_prompt_is_one_token(model, fresh):
    name, tokenizer = LEARNED[model], tokenizer_of(model, fresh)
    for prompt in prompts(name):
        assert len(tokenizer(prompt).input_ids) == NUM_TOKENS[name] + 2 <= TASKS[name].max_tokens


@pytest.mark.parametrize("model", SD3.shipped)
def test_captions_that_differ_have_different_tokens(model):
    task, tokenizer = TASKS[LEARNED[model]], tokenizer_of(model, fresh=False)
    said = [task.caption(drawing, style) for drawing in task.drawings for style in range(len(task.captions))]
    assert len({tuple(tokens) for tokens in tokenizer(said).input_ids}) == len(set(said)) == len(said)


@pytest.mark.parametrize("model", SD3.shipped)
def test_the_model_makes_images_of_the_size_in_the_recipe(model):
    config = json.loads((SD3.shipped[model] / "transformer/config.json").read_text())
    assert (config["sample_size"], config["in_channels"]) == (SIZE, 3)


@every_task
def test_every_value_is_trained_and_the_held_out_combinations_are_not(task: Task):
    trained = set(task.shown)
    assert task.held_out and trained == set(task.drawings) - task.held_out
    for axis, values in enumerate(task.attributes.values()):
        assert {drawing[axis] for drawing in trained} == {drawing[axis] for drawing in task.held_out} == set(values)


@every_task
def test_a_caption_is_wrong_as_often_as_asked_and_in_one_attribute(task: Task):
    rng, drawing = np.random.default_rng(0), task.drawings[5]
    by_caption = {task.caption(d, style): d for d in task.drawings for style in range(len(task.captions))}
    said = [by_caption[task.noisy_caption(drawing, task.wrong, rng)] for _ in range(2000)]
    differing = np.array([sum(a != b for a, b in zip(d, drawing, strict=True)) for d in said])
    assert set(differing) == {0, 1}
    assert abs(differing.mean() - task.wrong) < 4 * (0.25 / len(said)) ** 0.5


@pytest.mark.parametrize("name", TASKS)
def test_the_prompt_files_are_those_that_the_script_writes(name, tmp_path):
    TASKS[name].write_prompts(tmp_path)
    for file in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / file).read_text() == (ROOT / "datasets" / name / file).read_text()


@pytest.fixture(scope="module")
def reader() -> OCRRewardScorer:
    """As the recipe's reward reads."""
    return OCRRewardScorer(config=OCRSpec(detect=False, num_threads=2))


def scores(reader: OCRRewardScorer, prompts: list[str], pictures: torch.Tensor) -> torch.Tensor:
    ids = [f"s{i}" for i in range(len(prompts))]
    return reader.score(RewardRequest(sample_ids=ids, prompts=prompts, images=pictures)).total


def test_the_ocr_reward_reads_the_training_images_of_the_letters_model(reader):
    """Each letter in both places."""
    rng = np.random.default_rng(0)
    drawings = [(first, LETTERS[i - 1]) for i, first in enumerate(LETTERS)] * 3
    pictures = torch.from_numpy(np.stack([TWO_LETTERS.draw(drawing, SIZE, rng) for drawing in drawings]))
    read = scores(reader, [TWO_LETTERS.caption(drawing) for drawing in drawings], pictures)
    assert read.mean() >= 0.98 and (read == 1).float().mean() >= 0.96


def test_the_letters_model_writes_legibly_and_ignores_half_of_its_prompts(reader):
    """Before reinforcement learning, images are legible and the reward can still rise."""
    pipeline = SD3Pipeline(SD3Bundle(path="quickstart_letters", dtype="fp32"))
    asked = [TWO_LETTERS.caption(drawing) for drawing in sorted(TWO_LETTERS.held_out)]
    settings = {"num_inference_steps": 8, "height": SIZE, "width": SIZE, "max_sequence_length": TWO_LETTERS.max_tokens}
    track = roll(pipeline, 20, tuple(asked), per_prompt=1, kernel=EulerODE(), sde_indices=(), **settings)
    pictures = track.decoded.pixels
    read = [comparable(in_reading_order(reader.read(picture))) for picture in uint8_levels(pictures.flip(1))]
    legible = [len(text) == 2 and set(text.upper()) <= set(LETTERS) for text in read]
    assert sum(legible) >= 0.6 * len(legible)
    assert 0.2 <= scores(reader, asked, pictures).mean() <= 0.5
