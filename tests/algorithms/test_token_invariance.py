"""Every loss over tokens has one gradient, however rows are ordered, packed, cut and spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tokens import TableStage, token_table, token_track
from tests.toy import ToyBundle
from tests.train.ranks import plain, run_ranks
from unirl.algorithms.ar_grpo import ARGRPO, GSPO
from unirl.algorithms.ar_opd import AROPD
from unirl.algorithms.ar_ppo import ARPPO
from unirl.algorithms.ar_trust_regions import CISPO, CPPO, DPPO, DRPO, GMPO, SAPO
from unirl.algorithms.shared.mismatch import TokenTIS
from unirl.algorithms.shared.tokens import TokenLoss
from unirl.config.errors import ConfigError
from unirl.distributed import current
from unirl.distributed.group.dispatch import rank_rows
from unirl.testing.toy import toy_track
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, ValueConfig
from unirl.train.stack import TrainStack
from unirl.trainer.balance import balanced_track
from unirl.types.results import Metric, merge, values
from unirl.types.rollout_resp import RolloutTrack

ALGORITHMS: dict[str, TokenLoss] = {
    "grpo": ARGRPO(kl_coef=0.1, entropy_coef=0.1, dual_clip=1.5, old_logp_source="rollout"),
    "grpo corrected": ARGRPO(mismatch=TokenTIS(cap=1.1), loss_agg_mode="seq-mean-token-mean"),
    "grpo of finished": ARGRPO(mask_truncated=True, old_logp_source="rollout"),
    "gspo": GSPO(old_logp_source="rollout", clip_range=0.05, clip_range_high=0.1),
    "cispo": CISPO(old_logp_source="rollout", clip_range_high=0.2),
    "drpo": DRPO(old_logp_source="rollout"),
    "spo": DRPO(old_logp_source="rollout", drpo_epsilon=0.2, penalty_mu_weighted=False),
    "dppo": DPPO(old_logp_source="rollout", delta=0.05),
    "dppo kl": DPPO(old_logp_source="rollout", divergence="kl", delta=0.01),
    "cppo": CPPO(old_logp_source="rollout", delta=0.1),
    "sapo": SAPO(old_logp_source="rollout"),
    "gmpo": GMPO(old_logp_source="rollout", clip_range=0.1),
    "opd": AROPD(old_logp_source="rollout", teacher="reference"),
    "ppo": ARPPO(value_gradient="policy", whiten=True, kl_coef=0.1, kl_in="reward", kl_estimator="k1"),
    "ppo of cut responses": ARPPO(value_gradient="policy", bootstrap_truncated=True, gamma=0.9),
}
EVERY_ONE = pytest.mark.parametrize("name", ALGORITHMS)
NUM_ROWS = 16
Change = Callable[[RolloutTrack], RolloutTrack]


def own_share(track: RolloutTrack) -> RolloutTrack:
    """The rows of this rank, dealt by length."""
    rank = current()
    track = balanced_track(track, 1, rank.dp_size)
    return track.select(rank_rows(len(track), 1, rank.dp_size)[rank.dp_rank])


def gradients(name: str, change: Change = own_share, **options: Any) -> dict[str, Tensor]:
    """Gradients of all trained weights, after sampling and a change of the weights; caught on their way into `step`."""
    table = token_table(0)
    stage = TableStage(table)
    track = token_track(stage, prompts=4)
    with torch.no_grad():  # the reference is neither what sampled nor what is trained
        table.table += 0.2 * torch.cos(table.table * 30.0)
    weight = torch.ones(NUM_ROWS)
    weight[[2, 11]] = torch.tensor([0.0, 0.5])
    backend = FSDPBackend(
        table,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-30),
        value_cfg=ValueConfig(learning_rate=1e-30, width=6),
        fsdp_cfg=FSDPConfig(reduce_dtype="fp64"),
    )
    stack = TrainStack(backend, ALGORITHMS[name], stage, **options)
    with torch.no_grad():
        for number, shard in enumerate(p for layout in backend.layouts for p in layout.shards.values()):
            shard += 0.3 if number else 0.2 * torch.sin(shard * 40.0)
    caught: dict[str, Tensor] = {}
    step = backend.step

    def catching(max_grad_norm: float, loss: Tensor) -> Any:
        for layout in backend.layouts:
            for key, shard in layout.shards.items():
                caught[key] = layout.whole(layout.trainable[key], shard.grad).clone()
        return step(max_grad_norm, loss)

    backend.step = catching  # type: ignore[method-assign]
    stack.train_track(change(track.replace(weight=weight)))
    return caught


@cache
def undivided(name: str) -> dict[str, Tensor]:
    """All rows at once."""
    return gradients(name, micro_batch_size=NUM_ROWS)


def assert_equal(have: dict[str, Any], want: dict[str, Any]) -> None:
    assert have.keys() == want.keys()
    for key, gradient in want.items():
        scale = float(np.abs(np.asarray(gradient)).max())
        assert scale > 1e-4
        assert np.allclose(np.asarray(have[key]), np.asarray(gradient), rtol=1e-5, atol=2e-6 * scale), key


@EVERY_ONE
def test_micro_batches_and_token_budgets_change_no_gradient(name: str) -> None:
    for options in ({"micro_batch_size": 3}, {"micro_batch_tokens": 1}, {"micro_batch_tokens": 11}):
        assert_equal(gradients(name, **options), undivided(name))


@EVERY_ONE
def test_the_order_of_samples_changes_no_gradient(name: str) -> None:
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(1)).tolist()
    assert_equal(gradients(name, lambda track: track.select(order), micro_batch_tokens=9), undivided(name))


def test_only_a_single_row_may_exceed_the_token_budget() -> None:
    seen: list[int] = []
    algorithm = ARGRPO(old_logp_source="rollout")
    table = token_table(0)
    stack = TrainStack(
        FSDPBackend(table, optimizer_cfg=OptimizerConfig(learning_rate=1e-3)),
        algorithm,
        TableStage(table),
        micro_batch_tokens=5,
    )
    replay = stack.stage.replay

    def counting(conditions: Any, segment: Any, **options: Any) -> Any:
        seen.append(len(segment.tokens))
        assert len(segment) == 1 or len(segment.tokens) <= 5
        return replay(conditions, segment, **options)

    stack.stage.replay = counting
    track = token_track(stack.stage, prompts=4)
    stack.train_track(track)
    assert sum(seen) == len(track.segment.tokens) and max(seen) == 6


def on_ranks() -> dict[str, dict[str, Tensor]]:
    """Two ranks of unequal work, cut by tokens: what an update of each loss differentiates."""
    return {name: gradients(name, micro_batch_tokens=7) for name in ALGORITHMS}


def one_sided() -> dict[str, Any]:
    """All that counts stands on rank 0, and rank 1 has fewer and shorter rows."""

    def share(track: RolloutTrack) -> RolloutTrack:
        track = track.select(torch.argsort(track.segment.lengths, descending=True, stable=True).tolist())
        track = track.replace(weight=torch.tensor([1.0] * 8 + [0.0] * 8))
        return own_share_as_it_stands(track)

    return {name: gradients(name, share, micro_batch_tokens=6) for name in ("grpo", "ppo")}


def own_share_as_it_stands(track: RolloutTrack) -> RolloutTrack:
    rank = current()
    return track.select(rank_rows(len(track), 1, rank.dp_size)[rank.dp_rank])


def metrics() -> list[dict[str, Any]]:
    """Total, weight, kind and squares of each metric of one rank."""
    table = token_table(0)
    stage = TableStage(table)
    track = token_track(stage, prompts=4)
    backend = FSDPBackend(table, optimizer_cfg=OptimizerConfig(learning_rate=1e-30))
    stack = TrainStack(backend, ARGRPO(kl_coef=0.1), stage, micro_batch_tokens=6)
    result = stack.train_track(own_share_as_it_stands(track))
    return [
        {name: [float(m.total), float(m.weight), m.kind, float(m.squares)] for name, m in update.items()}
        for update in result.updates
    ]


def both() -> list[Any]:
    return [on_ranks(), one_sided(), metrics()]


def test_two_ranks_have_the_gradient_of_one_even_if_one_has_no_rows() -> None:
    *alone, told_alone = plain(both())
    ranks = run_ranks(2, both)
    for *rank, _ in ranks:
        for have, want in zip(rank, alone, strict=True):
            for name in want:
                assert_equal(have[name], want[name])
    told = values(merge({name: Metric(*m) for name, m in rank[-1][0].items()} for rank in ranks))
    for name, metric in told_alone[0].items():  # of fill nothing is told
        assert told[name] == pytest.approx(Metric(*metric).value, rel=1e-5, abs=1e-6), name


def test_rows_without_tokens_are_not_cut_by_tokens() -> None:
    from unirl.algorithms.diffusion_grpo import DiffusionGRPO

    bundle = ToyBundle()
    stack = TrainStack(
        FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-3)),
        DiffusionGRPO(),
        bundle.stage(),
        micro_batch_tokens=100,
    )
    with pytest.raises(ConfigError, match=r"micro_batch_tokens=100: LatentSegment holds no tokens.*micro_batch_size"):
        stack.train_track(toy_track(stack.stage))
