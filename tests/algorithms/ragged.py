"""Random ragged rows whose log-probs are leaves, and every loss over tokens once more: as a loop over sequences.

A token is an index into the leaves, so any selection of rows reads and differentiates its own entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.algorithms.shared.tokens import TokenLoss
from unirl.models.language.stage import TokenReplay, ValueGradient
from unirl.types.conditions import Conditions
from unirl.types.protocols import TrainingProgress
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import TextSegment

LENGTHS = (5, 1, 0, 7, 3, 4, 12)
ALL_CONTEXT, DROPPED = 5, 4
"""The row without a token that counts, and the row of weight 0."""
AGGREGATIONS: list[dict[str, Any]] = [
    {"loss_agg_mode": "token-mean"},
    {"loss_agg_mode": "seq-mean-token-mean"},
    {"loss_agg_mode": "seq-mean-token-sum"},
    {"loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 9},
]


class LeafStage:
    """A `TokenStage` whose every log-prob, entropy and value is a parameter."""

    def __init__(self, logp: Tensor, entropy: Tensor, value: Tensor | None = None) -> None:
        self.logp = logp.requires_grad_()
        self.entropy = entropy.requires_grad_()
        self.value = (torch.zeros_like(logp) if value is None else value).detach().requires_grad_()

    def replay(
        self,
        conditions: Conditions,
        segment: TextSegment,
        *,
        entropy: bool = False,
        values: ValueGradient | None = None,
    ) -> TokenReplay:
        return TokenReplay(
            self.logp[segment.tokens],
            self.entropy[segment.tokens] if entropy else None,
            self.value[segment.tokens] if values else None,
        )

    def gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the log-probs and of the entropies; zeros where the loss does not read them."""
        result = torch.autograd.grad(loss, [self.logp, self.entropy], allow_unused=True)
        return tuple(torch.zeros_like(self.logp) if g is None else g for g in result)  # type: ignore[return-value]


@dataclass
class Sequence:
    """The tokens of one row that count."""

    new: Tensor
    old: Tensor
    ref: Tensor
    engine: Tensor
    entropy: Tensor
    advantage: Tensor  # [] of the row
    weight: float

    @property
    def ratio(self) -> Tensor:
        return (self.new - self.old).exp()


def ragged(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> tuple[LeafStage, RolloutTrack]:
    """Rows of weights 0 to 2 with context tokens, log-ratios of about 0.5, and anchors old_logp and ref_logp."""
    generator = torch.Generator().manual_seed(seed)
    total, count = sum(lengths), len(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -(0.7 * normal(total) - 0.5).exp() - 1e-3
    stage = LeafStage((old + 0.5 * normal(total)).clamp(max=-1e-4), normal(total).abs())
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    mask = torch.rand(total, generator=generator) < 0.8
    if count > ALL_CONTEXT:
        mask[offsets[ALL_CONTEXT] : offsets[ALL_CONTEXT + 1]] = False
    weight = 0.5 + 1.5 * torch.rand(count, generator=generator, dtype=torch.float64)
    weight[DROPPED:][:1] = 0.0
    segment = TextSegment(
        tokens=torch.arange(total),
        logp=old + 0.1 * normal(total),
        loss_mask=mask,
        offsets=offsets,
        finished=torch.ones(count, dtype=torch.bool),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        anchors={"old_logp": old, "ref_logp": old + 0.4 * normal(total)},
    )
    track = RolloutTrack(
        sample_ids=[f"p{i}@0:0" for i in range(count)],
        group_ids=[f"p{i}@0" for i in range(count)],
        conditions={},
        segment=segment,
        advantages=1.5 * normal(count),
        weight=weight,
        weight_version=torch.zeros(count, dtype=torch.int64),
    )
    return stage, track


def value(algorithm: TokenLoss, stage: Any, track: RolloutTrack, now: TrainingProgress | None = None) -> Tensor:
    """The loss as the stack divides it."""
    return algorithm.loss(stage, track, (0,), now or TrainingProgress()).loss / algorithm.count(track)


def sequences(stage: LeafStage, track: RolloutTrack) -> list[Sequence]:
    result = []
    for i, (start, stop) in enumerate(zip(track.segment.offsets[:-1], track.segment.offsets[1:], strict=True)):
        at = [t for t in range(int(start), int(stop)) if track.segment.loss_mask[t]]
        leaf = track.segment.tokens[at]
        anchors = track.segment.anchors
        result.append(
            Sequence(
                stage.logp[leaf],
                anchors["old_logp"][at],
                anchors["ref_logp"][at],
                track.segment.logp[at],
                stage.entropy[leaf],
                track.advantages[i],
                float(track.weight[i]),
            )
        )
    return result


def looped(
    stage: LeafStage,
    track: RolloutTrack,
    per_token: Callable[[Sequence], Tensor],
    loss_agg_mode: str,
    horizon: int | None = None,
) -> Tensor:
    """The aggregated loss by its definition: `per_token` gives [n] of one sequence."""
    rows = sequences(stage, track)
    losses = [per_token(row) if len(row.new) else torch.zeros(1, dtype=torch.float64) for row in rows]
    weights = [row.weight for row in rows]
    sums = [loss.sum() for loss in losses]
    if loss_agg_mode == "token-mean":
        tokens = sum(w * len(row.new) for w, row in zip(weights, rows, strict=True))
        return sum(w * total for w, total in zip(weights, sums, strict=True)) / tokens  # type: ignore[return-value]
    if loss_agg_mode == "seq-mean-token-mean":
        sums = [total / max(len(row.new), 1) for total, row in zip(sums, rows, strict=True)]
    if loss_agg_mode == "seq-mean-token-sum-norm":
        sums = [total / horizon for total in sums]
    return sum(w * total for w, total in zip(weights, sums, strict=True)) / sum(weights)  # type: ignore[return-value]


def assert_same_gradient(stage: LeafStage, have: Tensor, want: Tensor) -> None:
    """Value and gradient to log-probs and entropies, in float64."""
    assert torch.allclose(have, want, rtol=1e-9, atol=1e-12)
    for a, b in zip(stage.gradients(have), stage.gradients(want), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
