"""Every model keeps what all models promise, and the check of it can fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.toy import ToyBundle, ToyPipeline
from unirl.models.sd3.family import SD3Pipeline
from unirl.testing.bundle import check_bundle
from unirl.testing.toy import SIDE, TEXT_WIDTH
from unirl.types.conditions import TextEmbedCondition


def test_sd3_keeps_the_promises(toy: SD3Pipeline) -> None:
    check_bundle(toy, 32, 32)


def test_sd3_on_pixels_keeps_the_promises(pixel: SD3Pipeline) -> None:
    check_bundle(pixel, 16, 16)


def test_the_library_free_toy_keeps_the_promises() -> None:
    check_bundle(ToyPipeline(ToyBundle()), SIDE, SIDE)


def wrong_block(pipeline: ToyPipeline) -> None:
    pipeline.facts = dataclasses.replace(pipeline.facts, block_class_names=("Block",))


def wrong_target(pipeline: ToyPipeline) -> None:
    pipeline.facts = dataclasses.replace(pipeline.facts, lora_targets=("to_q",))


def in_train_mode(pipeline: ToyPipeline) -> None:
    pipeline.bundle.trainable().train()


def wrong_text_width(pipeline: ToyPipeline) -> None:
    pipeline.facts = dataclasses.replace(pipeline.facts, text_width=TEXT_WIDTH + 1)


def pads_to_the_longest(pipeline: ToyPipeline) -> None:
    def encode(texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        return TextEmbedCondition(embeds=torch.zeros(len(texts), max(map(len, texts)), TEXT_WIDTH))

    pipeline.embed.encoder.encode = encode  # type: ignore[method-assign]


def masks_by_numbers(pipeline: ToyPipeline) -> None:
    encode = pipeline.embed.encoder.encode

    def masked(texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        text = encode(texts, max_sequence_length)
        return text.replace(mask=torch.ones(text.embeds.shape[:2], dtype=torch.int64))

    pipeline.embed.encoder.encode = masked  # type: ignore[method-assign]


def reads_its_neighbours(pipeline: ToyPipeline) -> None:
    velocity = pipeline.stage.denoiser.velocity
    pipeline.stage.denoiser.velocity = lambda x, s, c: velocity(x, s, c) + 1e-3 * x.mean()  # type: ignore[method-assign]


def forgets_its_gradient(pipeline: ToyPipeline) -> None:
    velocity = pipeline.stage.denoiser.velocity
    pipeline.stage.denoiser.velocity = lambda x, s, c: velocity(x, s, c).detach().requires_grad_()  # type: ignore[method-assign]


def draws_anew(pipeline: ToyPipeline) -> None:
    velocity = pipeline.stage.denoiser.velocity
    pipeline.stage.denoiser.velocity = lambda x, s, c: velocity(x, s, c) + torch.rand(())  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("broken", "claim"),
    [
        (wrong_block, "no Block"),
        (wrong_target, "no linear layer named to_q"),
        (wrong_text_width, r"facts.text_width is \d+, but pooled embeddings have the width \d+"),
        (pads_to_the_longest, "must pad all of them to one length"),
        (masks_by_numbers, "must be bool"),
        (in_train_mode, "not in eval mode"),
        (reads_its_neighbours, "bits"),
        (forgets_its_gradient, "no gradient reaches block"),
        (draws_anew, "other bits"),
    ],
)
def test_a_broken_model_is_named_by_what_it_breaks(broken: Callable[[ToyPipeline], None], claim: str) -> None:
    pipeline = ToyPipeline(ToyBundle())
    broken(pipeline)
    with pytest.raises(AssertionError, match=claim):
        check_bundle(pipeline, SIDE, SIDE)
