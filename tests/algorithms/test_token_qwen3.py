"""Losses over tokens on a small Qwen3: the gradient of a textbook loss on transformers' own forward, however cut."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import LeafStage, looped, value
from tests.algorithms.test_token_invariance import ALGORITHMS
from tests.algorithms.test_token_losses import CASES
from tests.models.texts import networks, prompts_of_lengths, segment_of_lengths, stage_of, textbook_logp
from tests.train.ranks import run_ranks
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.shared.mismatch import SequenceTIS
from unirl.algorithms.shared.tokens import TokenLoss
from unirl.distributed import current
from unirl.models.qwen3.family import Qwen3Bundle
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, ValueConfig
from unirl.train.stack import TrainStack
from unirl.types.protocols import REFERENCE
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import ARSamplingParams

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


class Trainee:
    """A sampled toy Qwen3, whose weights have moved since; updates of it show their gradients and move nothing."""

    def __init__(self) -> None:
        bundle = Qwen3Bundle(path="toy", dtype="fp32")
        self.backend = FSDPBackend(
            bundle,
            optimizer_cfg=OptimizerConfig(learning_rate=1e-30),
            value_cfg=ValueConfig(learning_rate=1e-30, width=6),
            fsdp_cfg=FSDPConfig(reduce_dtype="fp64"),
        )
        self.stage = bundle.stage()
        self.backend.snapshot(REFERENCE)
        self.backend.provide_value_head(self.stage.build_value_head)
        with torch.no_grad():
            track = rollout(self.stage.replay(prompts_of_lengths(PROMPTS), segment_of_lengths(RESPONSES)).logp)
            for layout in self.backend.layouts:
                for shard in layout.shards.values():
                    shard += 0.01 * torch.sin(shard * 300.0) + (0.05 if shard.dim() == 1 else 0.0)
        self.track = track.replace(segment=track.segment.replace(anchors={}))

    def gradients(self, name: str, rows: list[int], **options: Any) -> dict[str, Tensor]:
        """Gradients of all weights in an update on some rows."""
        caught: dict[str, Tensor] = {}
        step = self.backend.step

        def catching(max_grad_norm: float, loss: Tensor) -> Any:
            for layout in self.backend.layouts:
                for key, shard in layout.shards.items():
                    if shard.grad is not None:  # the value head has one in a loss with a critic alone
                        caught[key] = layout.whole(layout.trainable[key], shard.grad).clone()
            return step(max_grad_norm, loss)

        self.backend.step = catching  # type: ignore[method-assign]
        try:
            TrainStack(self.backend, LOSSES[name], self.stage, **options).train_track(self.track.select(rows))
        finally:
            self.backend.step = step  # type: ignore[method-assign]
        return caught


LOSSES = ALGORITHMS | {
    "rloo": ARGRPO(loss_agg_mode="seq-mean-token-sum", old_logp_source="rollout"),
    "reinforce++": ARGRPO(kl_coef=0.1, kl_in="reward", kl_estimator="k1", old_logp_source="rollout"),
    "dr grpo": ARGRPO(loss_agg_mode="seq-mean-token-sum-norm", horizon=30, mismatch=SequenceTIS(cap=1.5)),
}
ALL_ROWS = list(range(NUM_ROWS))
OTHER_ORDER = [5, 2, 7, 0, 3, 6, 1, 4]
"""Its last row has weight 0."""


@cache
def alone() -> Trainee:
    return Trainee()


@cache
def undivided(name: str) -> dict[str, Tensor]:
    return alone().gradients(name, ALL_ROWS, micro_batch_size=NUM_ROWS)


def test_every_token_loss_is_compared() -> None:
    import unirl.algorithms as package

    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        result = vars(importlib.import_module(module.name)).values()
        for kind in result:
            if not isinstance(kind, type) or not issubclass(kind, TokenLoss) or inspect.isabstract(kind):
                continue
            if issubclass(kind.sampled_by, ARSamplingParams):  # those of decisions in environments replay no tokens
                assert any(type(loss) is kind for loss in LOSSES.values()), kind


@pytest.mark.parametrize("name", LOSSES)
def test_packing_budgets_and_order_change_no_gradient(name: str) -> None:
    assert_same(alone().gradients(name, ALL_ROWS, micro_batch_tokens=60), name)
    assert_same(alone().gradients(name, OTHER_ORDER, micro_batch_size=3), name)
    assert_same(alone().gradients(name, OTHER_ORDER, micro_batch_tokens=1), name)


def on_ranks() -> list[dict[str, dict[str, Tensor]]]:
    """Gradients of the updates of each loss: four rows on each rank, with all counted tokens on one of them."""
    trainee, rank = Trainee(), current().dp_rank
    even, uneven = [OTHER_ORDER[::2], OTHER_ORDER[1::2]][rank], [OTHER_ORDER[:7], OTHER_ORDER[7:]][rank]
    return [
        {name: trainee.gradients(name, even, micro_batch_size=3) for name in LOSSES},
        {name: trainee.gradients(name, uneven, micro_batch_tokens=60) for name in LOSSES},
    ]


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one() -> None:
    for rank in run_ranks(2, on_ranks):
        for result in rank:
            for name, gradients in result.items():
                assert_same({key: torch.as_tensor(gradient) for key, gradient in gradients.items()}, name)


def assert_same(have: dict[str, Tensor], name: str) -> None:
    want = undivided(name)
    largest = max(float(gradient.abs().max()) for gradient in want.values())
    assert largest > 1e-3 and have.keys() == want.keys()
    for key, gradient in want.items():
        assert float((have[key] - gradient).abs().max()) <= 1e-5 * largest, (name, key)
