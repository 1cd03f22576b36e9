"""Makes the weights of the vision quick start: a small Qwen3-VL that often ignores its images.

Images and short questions come from `draw_shapes_qa.py`, with scenes that no test image shows. First the vision tower
learns to name the shape at every place. Then the language model learns from right descriptions and answers. In the last
part of the training, an answer is a fixed one ("blue", "circle", "2", "center") with probability `--hurried`, whatever
the image shows. The model thus recognises the shapes, but its most likely answer is often the fixed one. RL then
teaches it to answer from the image.

    python scripts/pretrain_vlm_quickstart.py --out unirl/models/qwen_vl/quickstart     # ten minutes on a core
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from draw_shapes_qa import PLACES, SHORT, SIZE, Question, Scene, Thing, draw, is_held_out, questions, scene
from PIL import Image
from torch import Tensor

from unirl.reward.local.shapes import PALETTE, SHAPES

HABITS = {"color": "blue", "kind": "circle", "number": "2", "place": "center"}
DESCRIBE = "Describe the picture."
NOTHING = "no shape"
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the training run."""

    pictures: int = 2000
    tower_steps: int = 150
    steps: int = 800
    pictures_per_batch: int = 8
    questions_per_picture: int = 7
    """Number of questions in addition to the description."""
    learning_rate: float = 2e-3
    hurried: float = 0.6
    """Probability of a fixed answer in the last part of the training."""
    careful: float = 0.75
    """Fraction of the steps before the last part. All of their answers are right."""
    seed: int = 0


# Scenes and descriptions


def described(shown: Scene) -> Question:
    """The question for a description. Its answer lists every place, row by row, with its shape in two words."""
    names = {thing.place: thing.name for thing in shown}
    listed = " ".join(f"{place} {names.get(place, NOTHING)}" for place in PLACES)
    return Question(DESCRIBE, listed, "all", "description")


def fresh_scenes(first: int) -> Iterator[tuple[int, Scene]]:
    """Yields scenes that no test image shows, each with its number."""
    number = first
    while True:
        shown = scene("pretraining", number)
        if not is_held_out(shown):
            yield number, shown
        number += 1


# The model


def build_tokenizer() -> Any:
    """Returns a Qwen tokenizer. Each word of prompts and answers is one token, any other is split into bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    pieces = sorted(ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    tokenizer = Qwen2Tokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    for word in sorted({word for text in wordings() for word, _ in split(text)}):
        parts = merged(list(word), merges)
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            pieces.append(parts[0] + parts[1])
            parts = merged(parts, merges)
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, *SPECIAL]))}
    whole = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        extra_special_tokens=list(SPECIAL),
    )
    whole.chat_template = CHAT_TEMPLATE
    return whole


def merged(pieces: list[str], merges: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the pieces of a word after byte-pair merging. Merges are applied in the order of their ranks."""
    rank = {pair: i for i, pair in enumerate(merges)}
    while True:
        pairs = [(rank[pair], i) for i, pair in enumerate(itertools.pairwise(pieces)) if pair in rank]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces = [*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :]]


def wordings() -> Iterator[str]:
    """Returns texts that contain every word of prompts and answers, with its white space."""
    yield from (DESCRIBE, "user\n", "assistant\n", "system\n", *SHORT.values())
    for number, shown in (pair for pair, _ in zip(fresh_scenes(0), range(400), strict=False)):
        yield described(shown).answer
        for question in questions(shown, number):
            yield from (question.prompt, question.answer)


def build_model(tokenizer: Any, seed: int) -> Any:
    """Returns a Qwen3-VL with 1.2 million parameters. An image has nine tokens, one for each place."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    token = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "bos_token_id": token(SPECIAL[0]),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_heads": 4,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": (SIZE // 16) ** 2,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(config)


def build_image_processor() -> Any:
    """Returns the image processor of Qwen, which does not resize these images."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 32 * 32, "longest_edge": SIZE * SIZE},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Saves in the folder layout of transformers, in bfloat16."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    build_image_processor().save_pretrained(folder)


# Training


@dataclass(frozen=True)
class Example:
    """A question about an image, as token ids."""

    picture: int
    prompt: list[int]
    answer: list[int]
    habit: list[int]


@dataclass(frozen=True)
class Stock:
    """Images with questions and descriptions, from which batches are taken."""

    scenes: list[Scene]
    patches: Tensor  # [pictures, patches, D]
    asked: list[list[Example]]
    descriptions: list[Example]

    @staticmethod
    def make(pairs: Sequence[tuple[int, Scene]], tokenizer: Any) -> Stock:
        processor = build_image_processor()
        patches, asked, descriptions = [], [], []
        for i, (number, shown) in enumerate(pairs):
            picture = Image.fromarray(draw(shown, SIZE, number))
            patches.append(processor(images=[picture], return_tensors="pt")["pixel_values"])
            about = [question for copy in range(6) for question in questions(shown, number, copy)]
            asked.append([example(i, question, tokenizer) for question in about if question.form == "short"])
            descriptions.append(example(i, described(shown), tokenizer))
        return Stock([shown for _, shown in pairs], torch.stack(patches), asked, descriptions)

    def batch(
        self, settings: Settings, hurried: float, rng: np.random.Generator
    ) -> tuple[list[Example], list[list[int]]]:
        """Returns examples of random images, and their answers. A fraction `hurried` of these are fixed ones."""
        chosen = []
        for picture in rng.integers(len(self.asked), size=settings.pictures_per_batch):
            about = self.asked[picture]
            numbers = rng.integers(len(about), size=settings.questions_per_picture)
            chosen += [self.descriptions[picture], *(about[number] for number in numbers)]
        return chosen, [one.habit if rng.random() < hurried else one.answer for one in chosen]


def example(picture: int, question: Question, tokenizer: Any) -> Example:
    """Returns the token ids of a question in the chat template, with a placeholder per token of the image."""
    content = [{"type": "image"}, {"type": "text", "text": question.prompt}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * 9))["input_ids"]
    habit = HABITS.get(question.about, question.answer)
    ids = [tokenizer(answer + "<|im_end|>")["input_ids"] for answer in (question.answer, habit)]
    return Example(picture, prompt, *ids)


def answer_logp(model: Any, stock: Stock, chosen: Sequence[Example], answers: Sequence[list[int]]) -> list[Tensor]:
    """Returns the log-probs of the tokens of each answer. Each image runs through the vision tower once."""
    rows = [one.prompt + answer for one, answer in zip(chosen, answers, strict=True)]
    ids = torch.full((len(rows), max(map(len, rows))), model.config.text_config.pad_token_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    states = model.model(
        input_ids=ids,
        attention_mask=mask,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        mm_encoder_outputs={"image": seen(model, stock, [one.picture for one in chosen])},
        image_grid_thw=grids(stock, len(rows)),
    ).last_hidden_state
    spans = [(i, len(one.prompt) - 1, len(row) - 1) for i, (one, row) in enumerate(zip(chosen, rows, strict=True))]
    hidden = torch.cat([states[i, begin:end] for i, begin, end in spans])
    targets = torch.cat([ids[i, begin + 1 : end + 1] for i, begin, end in spans])
    logp = model.lm_head(hidden).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return list(logp.split([end - begin for _, begin, end in spans]))


def seen(model: Any, stock: Stock, pictures: Sequence[int]) -> Any:
    """Returns the output of the vision tower for the image of each row."""
    distinct = list(dict.fromkeys(pictures))
    out = look(model, stock, distinct)
    places = [distinct.index(picture) for picture in pictures]
    out.pooler_output = [out.pooler_output[place] for place in places]
    out.deepstack_features = [[layer[place] for place in places] for layer in out.deepstack_features]
    return out


def look(model: Any, stock: Stock, pictures: Sequence[int]) -> Any:
    """Runs images through the vision tower."""
    patches = stock.patches[list(pictures)].flatten(0, 1)
    return model.model.get_image_features(patches, grids(stock, len(pictures)), return_dict=True)


def grids(stock: Stock, count: int) -> Tensor:
    """Returns [count, 3]: the frames, rows and columns of patches of each image."""
    side = math.isqrt(stock.patches.shape[1])
    return torch.tensor([[1, side, side]] * count)


def teach_tower(model: Any, stock: Stock, settings: Settings) -> None:
    """Trains the vision tower alone: linear heads classify place, color and kind from its output at each place."""
    names = [list(PLACES), [*PALETTE, "no"], [*SHAPES, "shape"]]
    labels = torch.tensor([[cell_labels(shown, place, names) for place in PLACES] for shown in stock.scenes])
    width = model.config.text_config.hidden_size
    heads = torch.nn.ModuleList(torch.nn.Linear(width, len(each)) for each in names * 2)
    parameters = [*model.model.visual.parameters(), *heads.parameters()]
    rng = np.random.default_rng(settings.seed)
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    for step in range(settings.tower_steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, settings.tower_steps, settings)
        chosen = rng.integers(len(stock.scenes), size=64).tolist()
        out = look(model, stock, chosen)
        features = [torch.cat(list(layer)) for layer in (out.pooler_output, out.deepstack_features[0])]
        logits = [head(features[i // len(names)]) for i, head in enumerate(heads)]
        truth = labels[chosen].flatten(0, 1)
        losses = [F.cross_entropy(each, truth[:, i % len(names)]) for i, each in enumerate(logits)]
        update(optimizer, parameters, torch.stack(losses).sum())
        if (step + 1) % 50 == 0:
            print(f"tower {step + 1}  " + "  ".join(f"{loss.item():.3f}" for loss in losses), flush=True)


def cell_labels(shown: Scene, place: str, names: Sequence[list[str]]) -> list[int]:
    """Returns the labels of a place: the indices of its name, its color and its kind of shape."""
    there = next((thing for thing in shown if thing.place == place), Thing("no", "shape", place))
    return [each.index(word) for each, word in zip(names, (place, there.color, there.kind), strict=True)]


def train(model: Any, stock: Stock, held_out: Stock, settings: Settings) -> None:
    """Trains the language model to answer, and prints the probability of right answers on held-out scenes."""
    model.model.visual.requires_grad_(False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rng = np.random.default_rng(settings.seed)
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    start = time.time()
    for step in range(settings.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, settings.steps, settings)
        hurried = settings.hurried if step >= settings.careful * settings.steps else 0.0
        logps = answer_logp(model, stock, *stock.batch(settings, hurried, rng))
        loss = -torch.stack([logp.mean() for logp in logps]).mean()
        update(optimizer, parameters, loss)
        if (step + 1) % 50 == 0:
            scores = "  ".join(f"{name} {value:.2f}" for name, value in measured(model, held_out).items())
            print(f"step {step + 1}  loss {loss.item():.3f}  {time.time() - start:.0f} s  {scores}", flush=True)


def update(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], loss: Tensor) -> None:
    """Runs one optimizer step."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Warms up for 50 steps, then decays to 1/50 along a cosine."""
    decay = 0.51 + 0.49 * math.cos(math.pi * step / steps)
    return settings.learning_rate * min(1.0, (step + 1) / 50) * decay


@torch.no_grad()
def measured(model: Any, stock: Stock) -> dict[str, float]:
    """Returns mean probabilities: of right descriptions, and of right and fixed answers where these differ."""

    def probability(chosen: list[Example], answers: list[list[int]]) -> float:
        return float(torch.stack([logp.sum().exp() for logp in answer_logp(model, stock, chosen, answers)]).mean())

    wrong = [one for about in stock.asked[:48] for one in about[:4] if one.habit != one.answer]
    listed = stock.descriptions[:96]
    return {
        "described": probability(listed, [one.answer for one in listed]),
        "right": probability(wrong, [one.answer for one in wrong]),
        "habit": probability(wrong, [one.habit for one in wrong]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    for name, default in vars(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    args = vars(parser.parse_args())
    out = args.pop("out")
    settings = Settings(**args)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, settings.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    seen = [pair for pair, _ in zip(fresh_scenes(0), range(settings.pictures), strict=False)]
    unseen = [(number, shown) for number in range(2000) if is_held_out(shown := scene("unseen", number))]
    stock, held_out = Stock.make(seen, tokenizer), Stock.make(unseen[:128], tokenizer)
    teach_tower(model, stock, settings)
    train(model, stock, held_out, settings)
    save(model, tokenizer, out)


if __name__ == "__main__":
    main()
