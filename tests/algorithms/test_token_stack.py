"""The train stack on packed rows: its arithmetic for every aggregation, its anchors, its metrics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import AGGREGATIONS
from tests.tokens import TableStage, TokenTable, token_table, token_track
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.shared.tokens import TokenLoss
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack import TrainStack
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack


def setup(
    algorithm: TokenLoss, table: TokenTable, learning_rate: float = 1e-2, **options: Any
) -> tuple[TrainStack, TableStage]:
    backend = FSDPBackend(table, optimizer_cfg=OptimizerConfig(learning_rate=learning_rate))
    stage = TableStage(table)
    return TrainStack(backend, algorithm, stage, **options), stage


def gradients(
    algorithm: TokenLoss, change: Callable[[RolloutTrack], RolloutTrack] = lambda track: track, **options: Any
) -> list[Tensor]:
    """Gradients of every update, recorded by an optimizer that does not change the weights."""
    table = token_table(0)
    stack, stage = setup(algorithm, table, 1e-30, **options)
    caught: list[Tensor] = []
    step = stack.backend.step

    def catching(max_grad_norm: float, loss: Tensor) -> Any:
        assert table.table.grad is not None
        caught.append(table.table.grad.clone())
        return step(max_grad_norm, loss)

    stack.backend.step = catching  # type: ignore[method-assign]
    stack.train_track(change(token_track(stage, prompts=3)))
    return caught


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a["loss_agg_mode"])
@pytest.mark.parametrize("micro_batch_size", [1, 5, 7])
def test_gradients_do_not_depend_on_micro_batches(aggregation: dict[str, Any], micro_batch_size: int) -> None:
    algorithm = ARGRPO(kl_coef=0.1, entropy_coef=0.1, **aggregation)
    want = gradients(algorithm, micro_batch_size=12)[0]
    have = gradients(algorithm, micro_batch_size=micro_batch_size)[0]
    assert torch.allclose(have, want, rtol=1e-5, atol=1e-7 * float(want.abs().max()))


def test_rows_of_weight_zero_change_no_gradient() -> None:
    def filled(track: RolloutTrack) -> RolloutTrack:
        copies = track.select([0, 3]).replace(weight=torch.zeros(2), advantages=torch.full((2,), torch.nan))
        return RolloutTrack.concat([track, copies])

    algorithm = ARGRPO(kl_coef=0.1, loss_agg_mode="seq-mean-token-mean")
    plain, more = gradients(algorithm), gradients(algorithm, filled)
    assert torch.allclose(more[0], plain[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_a_later_update_is_anchored_by_the_weights_of_the_rollout(micro_batch_size: int) -> None:
    stack, stage = setup(
        ARGRPO(kl_coef=0.1), token_table(0), 0.05, micro_batch_size=micro_batch_size, num_updates_per_batch=2
    )
    track = token_track(stage)
    track = track.select([*range(0, len(track), 2), *range(1, len(track), 2)])  # prompts share no weight of a table
    recorded = track.segment.logp.clone()
    first, second = (values(update) for update in stack.train_track(track).updates)
    assert (first["train/ratio_std"], first["train/kl"]) == (0.0, 0.0)
    assert second["train/ratio_std"] > 1e-3 and second["train/kl"] > 0.0
    assert first["rollout/parity_absdiff_max"] == 0.0  # of all rows: the anchors are what was recorded
    assert torch.equal(track.segment.logp, recorded)


def test_the_loss_of_an_update_is_the_sum_of_its_parts() -> None:
    stack, stage = setup(ARGRPO(kl_coef=0.1, entropy_coef=0.1), token_table(0), micro_batch_size=3)
    result = values(stack.train_track(token_track(stage)).updates[0])
    parts = result["train/policy_loss"] + result["train/kl_loss"] + result["train/entropy_loss"]
    assert result["train/loss"] == pytest.approx(parts, rel=1e-6)
