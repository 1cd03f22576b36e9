"""Every language model keeps what all of them promise, and the check of it can fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline
from unirl.testing.language import check_language_model


def pipeline_of_toy() -> Qwen3Pipeline:
    return Qwen3Pipeline(Qwen3Bundle(path="toy", dtype="fp32"))


def test_qwen3_keeps_the_promises() -> None:
    check_language_model(pipeline_of_toy())


def wrong_block(pipeline: Qwen3Pipeline) -> None:
    pipeline.facts = dataclasses.replace(pipeline.facts, block_class_names=("Block",))


def wrong_vocabulary(pipeline: Qwen3Pipeline) -> None:
    pipeline.facts = dataclasses.replace(pipeline.facts, vocab_size=7)


def in_train_mode(pipeline: Qwen3Pipeline) -> None:
    pipeline.bundle.trainable().train()


def reads_its_neighbours(pipeline: Qwen3Pipeline) -> None:
    replay = pipeline.stage.replay
    pipeline.stage.replay = lambda conditions, segment, **asked: dataclasses.replace(  # type: ignore[method-assign]
        replay(conditions, segment, **asked), logp=replay(conditions, segment).logp + 1e-6 * (len(segment) - 1)
    )


def renormalises(pipeline: Qwen3Pipeline) -> None:
    sample = pipeline.stage.sample

    def renormalised(*given):
        segment = sample(*given)
        return segment.replace(logp=torch.zeros_like(segment.logp)) if segment.top_k == 1 else segment

    pipeline.stage.sample = renormalised  # type: ignore[method-assign]


def another_policy(pipeline: Qwen3Pipeline) -> None:
    sample = pipeline.stage.sample

    def shifted(*given):
        segment = sample(*given)
        return segment.replace(logp=segment.logp - 1e-3)

    pipeline.stage.sample = shifted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("broken", "claim"),
    [
        (wrong_block, "no Block"),
        (wrong_vocabulary, "facts.vocab_size=7"),
        (in_train_mode, "not in eval mode"),
        (reads_its_neighbours, "packed rows differs"),
        (renormalises, "with top_k=1, log-probs are not those"),
        (another_policy, "replay differs from the log-probs of sampling by 0.001"),
    ],
)
def test_a_broken_promise_is_named(broken: Callable[[Qwen3Pipeline], None], claim: str) -> None:
    pipeline = pipeline_of_toy()
    broken(pipeline)
    with pytest.raises(AssertionError, match=claim):
        check_language_model(pipeline)
