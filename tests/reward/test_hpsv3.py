"""HPSv3 is Qwen2-VL with a head on one token, numbered as in its published class; its checkpoint is read as it is."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2VLConfig, Qwen2VLImageProcessorPil

from unirl.config.errors import DataError, DependencyError, RewardError
from unirl.reward.local.hpsv3 import (
    TOY_INSTRUCTION,
    HPSv3RewardScorer,
    HPSv3Spec,
    read_instruction,
)
from unirl.reward.local.shared.images import as_pil
from unirl.reward.local.shared.vision_language import padded_length, toy_processor, toy_vl_config
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest

PROMPTS = ["a red circle", "two dogs, at night, and what they saw when the moon came up", "x"]


@pytest.fixture(scope="module")
def scorer() -> HPSv3RewardScorer:
    made = HPSv3RewardScorer(config=HPSv3Spec(path="toy", dtype="fp32", device="cpu"))
    generator = torch.Generator().manual_seed(5)
    for weight in made.model.parameters():  # away from 0 and 1, so that nothing can be mixed up unseen
        weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return made


def request(height: int = 60, width: int = 90) -> RewardRequest:
    images = torch.rand(len(PROMPTS), 3, height, width, generator=torch.Generator().manual_seed(0))
    return RewardRequest(sample_ids=list("abc"), prompts=PROMPTS, images=(images * 255).round() / 255)


def published_size(height: int, width: int) -> tuple[int, int]:
    """Multiples of 28 whose product is about 256 x 28 x 28, as the authors' own preprocessing chooses them."""
    area, factor = 256 * 28 * 28, 28
    near = [max(factor, round(length / factor) * factor) for length in (height, width)]
    scale = math.sqrt(height * width / area)
    if near[0] * near[1] > area:
        return tuple(math.floor(length / scale / factor) * factor for length in (height, width))
    if near[0] * near[1] < area:
        return tuple(math.ceil(length / scale / factor) * factor for length in (height, width))
    return near[0], near[1]


def patches_of(image: Image.Image) -> tuple[Tensor, Tensor]:
    """PIL scales the picture to the published size, and Qwen2-VL's processor then leaves its size alone."""
    height, width = published_size(image.height, image.width)
    scaled = image.resize((width, height), Image.Resampling.BICUBIC)
    seen = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 12845056})(scaled, return_tensors="pt")
    return seen["pixel_values"], seen["image_grid_thw"]


@torch.no_grad()
def published_mean(network, image: Image.Image, prompt: str) -> Tensor:
    """The published class, step by step: the picture's states in place of its tokens, then a text model like any."""
    processor = toy_processor(TOY_INSTRUCTION)
    patches, grid = patches_of(image)
    count = int(grid.prod()) // 4
    text = (
        f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"
        f"{TOY_INSTRUCTION.format(text_prompt=prompt)}<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = processor.tokenizer(text, return_tensors="pt")["input_ids"]
    states = network.backbone.language_model.embed_tokens(tokens)
    seen = network.backbone.visual(patches, grid_thw=grid).pooler_output
    states = states.masked_scatter((tokens == processor.image_id)[..., None].expand_as(states), seen)
    states = network.backbone.language_model(inputs_embeds=states).last_hidden_state
    return network.heads[0](states)[tokens == processor.reward_id][0, 0]


@pytest.mark.parametrize("size", [(60, 90), (448, 448), (700, 520)], ids=str)
def test_scores_are_the_means_of_the_published_class_over_15(scorer, size):
    asked = request(*size)
    result = scorer.score(asked).total
    for row, image in enumerate(as_pil(asked.images)[:1] if size != (60, 90) else as_pil(asked.images)):
        expected = published_mean(scorer.model, image, PROMPTS[row]) / 15
        torch.testing.assert_close(result[row], expected, atol=1e-6, rtol=1e-5)
    assert result.std() > 1e-4


def test_image_tokens_are_numbered_one_by_one_and_not_by_rows_and_columns(scorer):
    """With the positions that Qwen2-VL gives pictures itself, the mean is another one."""
    processor, asked = scorer.processors[0], request()
    tokens, patches, grids = processor.inputs([processor.tokenize(PROMPTS[0])], [[asked.images[0]]])
    kinds = (tokens == processor.image_id).int()
    with torch.no_grad():
        states = scorer.model.backbone(
            input_ids=tokens,
            pixel_values=patches,
            image_grid_thw=grids,
            mm_token_type_ids=kinds,
        ).last_hidden_state
        other = scorer.model.heads[0](states[tokens == processor.reward_id])[0, 0] / 15
    assert abs(float(other - scorer.score(asked).total[0])) > 1e-5


def test_scores_do_not_depend_on_order_batch_size_or_the_length_of_other_prompts(scorer):
    assert len({padded_length(scorer.processors[0].tokenize(prompt)) for prompt in PROMPTS}) == 2
    answer = check_reward(scorer, request(), atol=1e-6)
    assert list(answer.components) == ["hpsv3"]


def published(folder, network, **changes) -> HPSv3Spec:
    """A spec of a checkpoint with the names that it is published with, beside Qwen2-VL's own files."""
    names = {"backbone.language_model.": "model.", "backbone.visual.": "visual.", "heads.0.": "rm_head."}
    weights = {}
    for name, tensor in network.state_dict().items():
        old = next(prefix for prefix in names if name.startswith(prefix))
        weights[names[old] + name.removeprefix(old)] = tensor.clone()
    processor = toy_processor(TOY_INSTRUCTION)
    weights["lm_head.weight"] = torch.zeros(len(processor.tokenizer), 32)
    save_file(weights, folder / "HPSv3.safetensors")
    (folder / "asked.txt").write_text(TOY_INSTRUCTION)
    config = toy_vl_config(Qwen2VLConfig, processor, HPSv3RewardScorer.toy_vision)
    config.text_config.vocab_size -= 1
    for part in (config, processor.tokenizer, processor.image_processor):
        part.save_pretrained(folder / "qwen")
    fields = {"path": str(folder), "processor": str(folder / "qwen"), "instruction": str(folder / "asked.txt")}
    return HPSv3Spec(**({**fields, "dtype": "fp32", "device": "cpu"} | changes))


def test_a_published_checkpoint_is_loaded_with_its_vocabulary_of_one_token_more(scorer, tmp_path):
    loaded = HPSv3RewardScorer(config=published(tmp_path, scorer.model))
    state = loaded.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in scorer.model.state_dict().items())
    assert torch.equal(loaded.score(request()).total, scorer.score(request()).total)


def test_the_backbone_is_bfloat16_and_the_head_float32(scorer, tmp_path):
    loaded = HPSv3RewardScorer(config=published(tmp_path, scorer.model, dtype="bf16"))
    assert {p.dtype for p in loaded.model.backbone.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in loaded.model.heads.parameters()} == {torch.float32}
    torch.testing.assert_close(loaded.score(request()).total, scorer.score(request()).total, atol=5e-3, rtol=0)


def test_the_toy_is_the_same_every_time_and_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()
    first, second = (HPSv3RewardScorer(config=HPSv3Spec(path="toy")).model.state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("mark", ["<|Reward|>", "<|image_pad|>", "<|im_end|>"])
def test_a_prompt_with_a_special_token_is_refused_at_the_start_and_when_scored(scorer, mark):
    prompts = ["fine", f"a sign that says {mark}", "fine"]
    with pytest.raises(RewardError, match=r"a sign that says .* a special token"):
        scorer.check_prompt(prompts[1], {})
    with pytest.raises(RewardError, match=r"a sign that says .* of sample 'b' contains"):
        scorer.score(RewardRequest(sample_ids=list("abc"), prompts=prompts, images=request().images))
    scorer.check_prompt("a < b | c > d", {})


def test_the_instruction_is_parsed_from_the_authors_package_without_running_it(tmp_path, monkeypatch):
    with monkeypatch.context() as absent, pytest.raises(DependencyError, match="pip install --no-deps hpsv3"):
        absent.setattr("unirl.config.dependencies.find_spec", lambda name: None)
        read_instruction(None)
    source = tmp_path / "hpsv3" / "dataset" / "data_collator_qwen.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        'import a_package_that_is_not_there\nINSTRUCTION = """Rate {text_prompt}\n"""\n'
        'other = 3\nprompt_with_special_token = """So: <|Reward|>\n"""\n'
    )
    (tmp_path / "hpsv3" / "__init__.py").write_text("raise RuntimeError('this package must not be run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert read_instruction(None) == "Rate {text_prompt}\nSo: <|Reward|>\n"


@pytest.mark.parametrize(("text", "words"), [("{text_prompt}", "<.Reward.> 0 times"), ("<|Reward|>", "text_prompt. 0")])
def test_a_text_without_a_place_for_the_prompt_or_the_answer_is_refused(tmp_path, text, words):
    file = tmp_path / "asked.txt"
    file.write_text(text)
    with pytest.raises(DataError, match=words):
        read_instruction(str(file))
    with pytest.raises(DataError, match="cannot be read"):
        read_instruction(str(tmp_path / "none.txt"))
