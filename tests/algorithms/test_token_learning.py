"""Losses over tokens learn: a bandit of four tokens per prompt, through the train stack and its backend."""

import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.flows import Run
from tests.tokens import TableStage, TokenSampling, TokenTable, token_table, token_track
from unirl.algorithms.ar_grpo import ARGRPO, GSPO
from unirl.algorithms.ar_ppo import ARPPO
from unirl.algorithms.ar_trust_regions import CISPO, CPPO, DPPO, DRPO, GMPO, SAPO
from unirl.algorithms.shared.advantages import GroupAdvantage
from unirl.algorithms.shared.mismatch import TokenTIS
from unirl.algorithms.shared.tokens import TokenLoss
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import ValueConfig
from unirl.train.stack import TrainStack
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack

PROMPTS, SIBLINGS, ARMS = 3, 16, 4
SAMPLING = TokenSampling(max_new_tokens=3, ends=False)

METHODS: dict[str, TokenLoss] = {
    "grpo": ARGRPO(loss_agg_mode="seq-mean-token-mean"),
    "dapo": ARGRPO(clip_range_high=0.28, dual_clip=3.0),
    "dr.grpo": ARGRPO(loss_agg_mode="seq-mean-token-sum-norm", horizon=3),
    "grpo with kl and entropy": ARGRPO(kl_coef=1e-3, entropy_coef=1e-3),
    "reinforce++": ARGRPO(kl_coef=1e-3, kl_in="reward", kl_estimator="k1"),
    "decoupled": ARGRPO(mismatch=TokenTIS()),
    "gspo": GSPO(),
    "cispo": CISPO(),
    "drpo": DRPO(),
    "spo": DRPO(penalty_mu_weighted=False, drpo_epsilon=0.2),
    "dppo-tv": DPPO(),
    "dppo-kl": DPPO(divergence="kl", delta=0.05),
    "cppo": CPPO(),
    "sapo": SAPO(),
    "gmpo": GMPO(),
    "ppo": ARPPO(),
    "ppo, raw rewards": ARPPO(outcome="rewards"),
    "ppo, whitened": ARPPO(outcome="rewards", whiten=True, kl_coef=1e-3, kl_in="reward", kl_estimator="k1"),
}


def best_arm(track: RolloutTrack) -> Tensor:
    """[B] the share of a response's tokens that are the number of its prompt: 1 at best, 1 / 4 by chance."""
    right = track.conditions["prompt"].number.repeat_interleave(track.segment.lengths)  # type: ignore[attr-defined]
    hits = (track.segment.tokens == right).float().split(track.segment.lengths.tolist())
    return torch.stack([hit.mean() for hit in hits])


def two_halves(track: RolloutTrack) -> RolloutTrack:
    """Rows in an order that gives siblings of every prompt to both updates: prompts share no weight of a table."""
    return track.select([*range(0, len(track), 2), *range(1, len(track), 2)])


def learner(algorithm: TokenLoss, table: TokenTable) -> tuple[TrainStack, TableStage]:
    backend = FSDPBackend(
        table,
        optimizer_cfg=OptimizerConfig(learning_rate=0.15, weight_decay=0.0),
        value_cfg=ValueConfig(learning_rate=1e-2, width=16),
    )
    stage = TableStage(table)
    stack = TrainStack(backend, algorithm, stage, micro_batch_size=PROMPTS * SIBLINGS, num_updates_per_batch=2)
    return stack, stage


def bandit(algorithm: TokenLoss, seed: int = 42) -> Run:
    """30 steps of two updates from a table of zeros."""
    stack, stage = learner(algorithm, TokenTable(ARMS, PROMPTS))
    run = Run([], [])
    for step in range(30):
        track = token_track(stage, PROMPTS, SIBLINGS, SAMPLING, seed=seed, step=step, context=None)
        track = track.replace(rewards=best_arm(track))
        track, _ = track.compute_advantages(GroupAdvantage())
        run.updates += [values(update) for update in stack.train_track(two_halves(track)).updates]
        run.rewards.append(float(track.rewards.mean()))
    return run


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", METHODS.values(), ids=METHODS.keys())
def test_every_method_finds_the_best_arm_of_every_prompt(algorithm: TokenLoss) -> None:
    run = bandit(algorithm)
    for first, second, reward in zip(run.updates[0::2], run.updates[1::2], run.rewards, strict=True):
        assert (first["train/ratio_min"], first["train/ratio_max"]) == (1.0, 1.0)
        assert first["rollout/parity_absdiff_max"] == 0.0
        assert second["train/ratio_std"] > 0.0 or reward == 1.0
    assert run.rewards[0] == pytest.approx(1 / ARMS, abs=0.1)
    assert run.end > 0.95


@pytest.mark.slow
def test_a_large_entropy_bonus_keeps_the_table_uncertain_and_a_large_kl_keeps_it_where_it_was() -> None:
    plain, bonus, leash = (
        trained(ARGRPO(**options)) for options in ({}, {"entropy_coef": 2.0}, {"kl_coef": 5.0, "kl_estimator": "k2"})
    )
    start = token_table(3, ARMS, PROMPTS).table.detach()
    assert moved(leash, start) < 0.25 * moved(plain, start)
    assert entropy(bonus) > 0.9 * math.log(ARMS) > entropy(plain) + 0.3


def trained(algorithm: TokenLoss) -> Tensor:
    """The table after 30 steps on the bandit, from random logits; only what was trained: the first token's."""
    table = token_table(3, ARMS, PROMPTS)
    stack, stage = learner(algorithm, table)
    params = TokenSampling(max_new_tokens=1, ends=False)
    for step in range(30):
        track = token_track(stage, PROMPTS, SIBLINGS, params, step=step, context=None)
        track, _ = track.replace(rewards=best_arm(track)).compute_advantages(GroupAdvantage())
        stack.train_track(two_halves(track))
    return table.table.detach()


def moved(table: Tensor, start: Tensor) -> float:
    return float((table.softmax(2) - start.softmax(2))[:, ARMS].abs().sum(1).mean())


def entropy(table: Tensor) -> float:
    logp = table[:, ARMS].log_softmax(1)
    return float(-(logp.exp() * logp).sum(1).mean())
