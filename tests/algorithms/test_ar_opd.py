"""On-policy distillation: its gradient is that of a KL, and a student becomes its teacher."""

import pytest
import torch

from tests.algorithms.ragged import LeafStage, assert_same_gradient, looped, ragged, value
from tests.tokens import TableStage, TokenSampling, token_stage, token_table, token_track
from unirl.algorithms.ar_opd import AROPD
from unirl.config.errors import ConfigError
from unirl.testing.algorithm import check_algorithm
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack import TrainStack
from unirl.types.protocols import Anchor
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack


def judged(seed: int = 0) -> tuple[LeafStage, RolloutTrack]:
    """Ragged rows whose teacher is the column ref_logp of the looped ones."""
    stage, track = ragged(seed)
    anchors = track.segment.anchors
    taught = track.segment.replace(anchors=anchors | {"teacher_logp": anchors["ref_logp"]})
    return stage, track.replace(segment=taught, advantages=None)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_gap_to_the_teacher_is_the_advantage_of_a_token(mode: str) -> None:
    stage, track = judged()
    result = value(AROPD(loss_agg_mode=mode, gap_clip=0.3), stage, track)  # type: ignore[arg-type]
    scored = track.replace(advantages=torch.zeros(len(track)))
    want = looped(stage, scored, lambda row: -(row.ref - row.old).clamp(-0.3, 0.3) * row.new, mode)
    assert_same_gradient(stage, result, want)
    unbounded = value(AROPD(gap_clip=None), stage, track)
    want = looped(stage, scored, lambda row: -(row.ref - row.old) * row.new, "token-mean")
    assert_same_gradient(stage, unbounded, want)
    kl = looped(stage, scored, lambda row: row.old - row.ref, "token-mean").item()
    metrics = values(AROPD(gap_clip=0.3).loss(stage, track, (0,)).metrics)
    assert metrics["train/kl_teacher"] == pytest.approx(kl, rel=1e-9)


def test_needs_are_the_teacher_snapshot_and_one_update_per_rollout() -> None:
    algorithm = AROPD(teacher="ema")
    assert algorithm.anchors()["teacher_logp"] == Anchor("ema", "logp")
    assert algorithm.needs.snapshots == ("ema",) and not algorithm.needs.multi_update
    with pytest.raises(ConfigError, match="gap_clip"):
        AROPD(gap_clip=0.0)


def test_it_keeps_the_contract_of_losses() -> None:
    track = token_track(token_stage(seed=1)).replace(advantages=None)
    check_algorithm(AROPD(old_logp_source="rollout"), token_stage(seed=0), track)


def test_the_student_converges_to_the_teacher() -> None:
    table = token_table(seed=1, vocabulary=4, prompts=2)
    teacher = table.table.detach().clone()
    backend = FSDPBackend(table, optimizer_cfg=OptimizerConfig(learning_rate=0.1, weight_decay=0.0))
    backend.snapshot("teacher")
    with torch.no_grad():
        table.table.zero_()
    stage = TableStage(table)
    stack = TrainStack(backend, AROPD(), stage, micro_batch_size=128)
    gaps = []
    for step in range(40):
        track = token_track(
            stage, prompts=2, siblings=64, params=TokenSampling(max_new_tokens=2, ends=False), step=step, context=None
        )
        gaps.append(values(stack.train_track(track).updates[0])["train/kl_teacher"])
    first = table.vocabulary  # the state before the first token, which every sample visits
    distance = (table.table.detach().softmax(2) - teacher.softmax(2))[:, first].abs().sum(1) / 2
    assert gaps[0] > 0.25 and abs(sum(gaps[-5:]) / 5) < 0.1
    assert float(distance.max()) < 0.1
