"""Losses over tokens on a small Qwen3: the gradient of a textbook loss on transformers' own forward, however cut."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import LeafStage, looped, value
from tests.algorithms.test_token_invariance import ALGORITHMS
from tests.algorithms.test_token_losses import CASES
from tests.models.texts import networks, prompts_of_lengths, segment_of_lengths, stage_of, textbook_logp
from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, ValueConfig
from unirl.train.stack import TrainStack
from unirl.types.rollout_resp import RolloutTrack

PROMPTS, RESPONSES = (5, 40, 3, 12, 7, 20, 9, 2), (9, 1, 30, 4, 2, 17, 6, 11)
NUM_ROWS = len(PROMPTS)


def rollout(logp: Tensor) -> RolloutTrack:
    """Ragged rows with context tokens, cut responses and weights; `logp` [sum L] is about what they had."""
    generator = torch.Generator().manual_seed(5)
    segment = segment_of_lengths(RESPONSES)
    noise = [0.3 * torch.randn(len(logp), generator=generator) for _ in range(3)]
    mask = torch.rand(len(logp), generator=generator) < 0.9
    mask[segment.offsets[:-1]] = True
    advantages = torch.randn(NUM_ROWS, generator=generator)
    return RolloutTrack(
        sample_ids=[f"p{i}@0:0" for i in range(NUM_ROWS)],
        group_ids=[f"p{i}@0" for i in range(NUM_ROWS)],
        conditions=prompts_of_lengths(PROMPTS),
        segment=segment.replace(
            logp=(logp + noise[0]).clamp(max=-1e-3),
            loss_mask=mask,
            finished=torch.arange(NUM_ROWS) % 3 > 0,
            anchors={"old_logp": (logp + noise[1]).clamp(max=-1e-3), "ref_logp": logp + noise[2]},
        ),
        rewards=advantages,
        advantages=advantages,
        weight=torch.tensor([1.0, 1.0, 0.5, 1.0, 0.0, 1.0, 1.0, 2.0]),
        weight_version=torch.zeros(NUM_ROWS, dtype=torch.int64),
    )


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in ("grpo", "gspo", "cppo")]


@pytest.mark.parametrize("name", ["grpo", "gspo", "cppo", *SLOW])
def test_the_gradient_is_that_of_a_textbook_loss_on_transformers_own_forward(name: str) -> None:
    case = CASES[name]
    policy, plain = networks()
    conditions, segment = prompts_of_lengths(PROMPTS), segment_of_lengths(RESPONSES)
    theirs = textbook_logp(plain, conditions, segment)
    track = rollout(theirs.detach())
    leaves = track.replace(segment=track.segment.replace(tokens=torch.arange(len(theirs))))
    algorithm = case.make(loss_agg_mode="token-mean")
    want = looped(LeafStage(theirs, torch.zeros_like(theirs)), leaves, case.per_token, "token-mean")
    have = value(algorithm, stage_of(policy), track)
    assert have.item() == pytest.approx(want.item(), rel=1e-5)
    have.backward()
    want.backward()
    wanted = dict(plain.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in wanted.values())
    assert largest > 1e-3
    for key, parameter in policy.named_parameters():
        assert float((parameter.grad - wanted[key].grad).abs().max()) <= 1e-5 * largest, key


def gradients(name: str, order: list[int] | None = None, **options: Any) -> dict[str, Tensor]:
    """Of all weights, in an update on rows that were sampled by slightly different ones."""
    bundle = Qwen3Bundle(path="toy", dtype="fp32")
    backend = FSDPBackend(
        bundle,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-30),
        value_cfg=ValueConfig(learning_rate=1e-30, width=6),
        fsdp_cfg=FSDPConfig(reduce_dtype="fp64"),
    )
    stage = bundle.stage()
    stack = TrainStack(backend, ALGORITHMS[name], stage, **options)
    with torch.no_grad():
        track = rollout(stage.replay(prompts_of_lengths(PROMPTS), segment_of_lengths(RESPONSES)).logp)
        track = track.replace(segment=track.segment.replace(anchors={}))
        for shard in (p for layout in backend.layouts for p in layout.shards.values()):
            shard += 0.01 * torch.sin(shard * 300.0) + (0.05 if shard.dim() == 1 else 0.0)
    caught: dict[str, Tensor] = {}
    step = backend.step

    def catching(max_grad_norm: float, loss: Tensor) -> Any:
        caught.update((k, p.grad.clone()) for layout in backend.layouts for k, p in layout.shards.items())
        return step(max_grad_norm, loss)

    backend.step = catching  # type: ignore[method-assign]
    stack.train_track(track if order is None else track.select(order))
    return caught


@cache
def undivided(name: str) -> dict[str, Tensor]:
    return gradients(name, micro_batch_size=NUM_ROWS)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_packing_budgets_and_order_change_no_gradient_of_a_language_model(name: str) -> None:
    assert_same(gradients(name, micro_batch_tokens=60), name)
    assert_same(gradients(name, [5, 2, 7, 0, 3, 6, 1, 4], micro_batch_size=3), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"grpo", "ppo"}))
def test_packing_budgets_and_order_change_no_gradient_of_any_loss(name: str) -> None:
    assert_same(gradients(name, micro_batch_tokens=60), name)
    assert_same(gradients(name, [5, 2, 7, 0, 3, 6, 1, 4], micro_batch_tokens=1), name)


def assert_same(have: dict[str, Tensor], name: str) -> None:
    want = undivided(name)
    largest = max(float(gradient.abs().max()) for gradient in want.values())
    assert largest > 1e-3 and have.keys() == want.keys()
    for key, gradient in want.items():
        assert float((have[key] - gradient).abs().max()) <= 1e-5 * largest, key
