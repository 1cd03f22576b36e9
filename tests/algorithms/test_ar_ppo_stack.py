"""PPO with a critic on tokens through the train stack: its arithmetic, its anchors, its ranks, and what it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.test_ar_ppo import EVERY_OPTION, KL_IN_REWARD, credit_of
from tests.algorithms.test_token_learning import two_halves
from tests.tokens import TableStage, TokenSampling, TokenTable, token_table, token_track
from tests.train.ranks import run_ranks
from unirl.algorithms.ar_ppo import ARPPO
from unirl.distributed import current
from unirl.testing.algorithm import prepared_track
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, ValueConfig
from unirl.train.stack import TrainStack
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack


def setup(algorithm: ARPPO, table: TokenTable, nudge: float = 0.1, **options: Any) -> tuple[TrainStack, TableStage]:
    """A stack over a table; `nudge` is added to the weights of the head, which says zero when it is fresh."""
    backend = FSDPBackend(
        table,
        optimizer_cfg=OptimizerConfig(learning_rate=options.pop("learning_rate", 1e-2)),
        value_cfg=ValueConfig(learning_rate=options.pop("value_rate", 1e-2), width=6),
        fsdp_cfg=FSDPConfig(reduce_dtype="fp64"),
    )
    stage = TableStage(table)
    stack = TrainStack(backend, algorithm, stage, **options)
    with torch.no_grad():
        for shard in backend.layouts[1].shards.values():
            shard += nudge
    return stack, stage


def gradients(algorithm: ARPPO, micro_batch_size: int) -> list[Tensor]:
    """Gradients of policy and head in both updates, which do not change the weights."""
    stack, stage = setup(
        algorithm,
        token_table(0),
        learning_rate=1e-30,
        value_rate=1e-30,
        micro_batch_size=micro_batch_size,
        num_updates_per_batch=2,
    )
    caught: list[Tensor] = []
    step = stack.backend.step

    def catching(max_grad_norm: float, loss: Tensor) -> Any:
        caught.extend(p.grad.clone() for layout in stack.backend.layouts for p in layout.shards.values())
        return step(max_grad_norm, loss)

    stack.backend.step = catching  # type: ignore[method-assign]
    stack.train_track(two_halves(token_track(stage, prompts=3)))
    return caught


@EVERY_OPTION
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_gradients_do_not_depend_on_micro_batches(options: dict[str, Any], micro_batch_size: int) -> None:
    algorithm = ARPPO(**options, value_gradient="policy")
    for have, want in zip(gradients(algorithm, micro_batch_size), gradients(algorithm, 12), strict=True):
        assert torch.allclose(have, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


@pytest.mark.parametrize("options", [{}, {"whiten": True} | KL_IN_REWARD], ids=["default", "whitened"])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_anchors_are_those_of_the_weights_of_the_rollout(options: dict[str, Any], micro_batch_size: int) -> None:
    stack, stage = setup(
        ARPPO(**options, value_clip=0.05),
        token_table(0),
        learning_rate=0.05,
        value_rate=0.3,
        micro_batch_size=micro_batch_size,
        num_updates_per_batch=2,
    )
    first, second = (values(update) for update in stack.train_track(two_halves(token_track(stage))).updates)
    assert (first["train/ratio_min"], first["train/ratio_max"]) == (1.0, 1.0)
    assert first["train/value_clip_fraction"] == 0.0 and first["rollout/parity_absdiff_max"] == 0.0
    assert second["train/ratio_std"] > 1e-3 and second["train/value_clip_fraction"] > 0.5
    assert first["train/loss"] == pytest.approx(first["train/policy_loss"] + first["train/critic_loss"], rel=1e-6)


def test_advantages_are_whitened_over_the_step_and_not_over_an_update() -> None:
    """Two updates of one prompt each, of which one is paid much better: apart, each would have mean 0."""
    algorithm = ARPPO(outcome="rewards", whiten=True, lam=1.0, value_clip=None)
    stack, stage = setup(algorithm, token_table(0), micro_batch_size=4, num_updates_per_batch=2)
    track = token_track(stage)
    track = track.replace(rewards=track.rewards + torch.tensor([0.0] * 4 + [10.0] * 4))
    rows = prepared_track(algorithm, stage, track)
    credit, counts = credit_of(algorithm, rows)
    white = torch.zeros_like(credit.advantages)
    kept = credit.advantages[counts]
    white[counts] = (kept - kept.mean()) * torch.rsqrt(kept.var() + 1e-8)
    border = int(rows.segment.offsets[4])
    first, second = (float(white[part][counts[part]].mean()) for part in (slice(0, border), slice(border, None)))
    assert first < -0.5 and second > 0.5
    update, _ = (values(u) for u in stack.train_track(track).updates)
    assert update["train/policy_loss"] == pytest.approx(-first, rel=1e-4)


def trained_on_ranks(options: dict[str, Any]) -> dict[str, Any]:
    """Weights of table and head after two steps; each rank trains its share of the rows of every update."""
    stack, stage = setup(ARPPO(**options), token_table(0), micro_batch_size=2, num_updates_per_batch=2, value_rate=0.05)
    rank = current()
    for step in range(2):
        with stack.backend.sampling():
            track = two_halves(token_track(stage, prompts=4, siblings=4, step=step))
        size = 8 // rank.dp_size
        starts = [8 * update + rank.dp_rank * size for update in range(2)]
        stack.train_track(RolloutTrack.concat([track.slice(start, start + size) for start in starts]))
    layouts = stack.backend.layouts
    return {name: layout.whole(p).clone() for layout in layouts for name, p in layout.trainable.items()}


@pytest.mark.parametrize("options", [{"whiten": True, "value_gradient": "policy"} | KL_IN_REWARD], ids=["whitened"])
def test_two_ranks_train_as_one(options: dict[str, Any]) -> None:
    (alone_,) = run_ranks(1, trained_on_ranks, options)
    for rank in run_ranks(2, trained_on_ranks, options):
        for name, want in alone_.items():
            assert abs(rank[name] - want).max() <= 1e-6 * abs(want).max()
    start = token_table(0).table.detach().numpy()
    assert abs(alone_["table"] - start).max() > 1e-2


# What the critic learns


def two_tokens(stage: TableStage, step: int) -> RolloutTrack:
    """Responses of two tokens, paid for the first alone: 1 if it is the number of the prompt."""
    track = token_track(
        stage, prompts=3, siblings=32, params=TokenSampling(max_new_tokens=2, ends=False), step=step, context=None
    )
    number = track.conditions["prompt"].number  # type: ignore[attr-defined]
    rewards = (track.segment.tokens.view(-1, 2)[:, 0] == number).float()
    return track.replace(rewards=rewards, advantages=rewards)


def test_the_critic_learns_the_expected_reward_of_every_state_and_the_right_token_gets_the_advantage() -> None:
    """On a policy that stands still, expected rewards are known: p(right) before the first token, 0 or 1 after it."""
    stack, stage = setup(
        ARPPO(outcome="rewards", value_clip=None),
        token_table(3, vocabulary=4, prompts=3),
        learning_rate=1e-12,
        value_rate=2e-2,
        micro_batch_size=96,
    )
    for step in range(120):
        stack.train_track(two_tokens(stage, step))
    track = two_tokens(stage, 1000)
    with torch.no_grad():
        rows = prepared_track(stack.algorithm, stage, track)
        p = stage.table.table[:, 4].softmax(1).diagonal()  # of the right first token, by prompt
    number = track.conditions["prompt"].number  # type: ignore[attr-defined]
    state_values, truth = rows.segment.anchors["old_value"].view(-1, 2), torch.stack([p[number], track.rewards], dim=1)
    assert float((state_values - truth).var() / truth.var()) < 0.03
    first, second = credit_of(stack.algorithm, rows)[0].advantages.view(-1, 2).unbind(1)
    assert float((first - (track.rewards - p[number])).abs().mean()) < 0.05
    assert float(second.abs().mean()) < 0.05 < 0.3 < float(first.abs().mean())


def alone_with_its_reward(value_rate: float, seed: int) -> float:
    """One response per prompt, paid by its share of right tokens: the mean reward of the last 20 of 150 steps."""
    rates = {"learning_rate": 0.15, "value_rate": value_rate}
    stack, stage = setup(ARPPO(outcome="rewards", lam=1.0), TokenTable(4, 3), nudge=0.0, micro_batch_size=3, **rates)
    params, rewards = TokenSampling(max_new_tokens=3, ends=False), []
    for step in range(150):
        track = token_track(stage, prompts=3, siblings=1, params=params, seed=seed, step=step, context=None)
        number = track.conditions["prompt"].number.repeat_interleave(3)  # type: ignore[attr-defined]
        paid = (track.segment.tokens == number).float().view(-1, 3).mean(1)
        rewards.append(float(paid.mean()))
        stack.train_track(track.replace(rewards=paid, advantages=torch.zeros(3)))
    return sum(rewards[-20:]) / 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_with_one_sample_per_prompt_the_critic_is_the_baseline(seed: int) -> None:
    assert alone_with_its_reward(1e-2, seed) > 0.95  # at best 1, by chance 1 / 4
    assert alone_with_its_reward(1e-30, seed) < 0.85  # a head that stands still at 0
