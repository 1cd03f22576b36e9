"""Trains one backend with a loss for each of several tracks: in one joint update, or in an update for each track.

    joint         for each update: sum over tracks of w_t / n_t times the gradient of the loss of track t -> step
    alternating   for each update: for each track: w_t / n_t times the gradient of its loss -> step

n_t is the number of elements of track t in the update, over all ranks, and w_t its loss weight. The anchors of all
tracks are measured before the first update of a step, so every ratio is one to the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta

from unirl.config.errors import InvalidValueError
from unirl.distributed.group.dispatch import broadcast, rank0, scatter
from unirl.train.backend.base import TrainBackend
from unirl.train.loss_balance import LossBalance, NormBalance, TrackGradient, UncertaintyBalance
from unirl.train.stack import PreparedStep, TrainStack, Update, loss_metric, merge_ranks
from unirl.types.protocols import State, TrainingProgress
from unirl.types.results import Metric, Metrics, TrainStepResult, merge
from unirl.types.rollout_resp import RolloutResp

SHARED = ""
"""The name under which a step reports the metrics of the weights, which the tracks share."""
OF_TRACKS = ("micro_batch_size", "max_grad_norm", "num_updates_per_batch", "max_nonfinite_updates")
"""The settings that the stack of each track has as well."""

BALANCE_DECAY = 0.99
"""The default of `balance_decay`: an average over about 100 updates."""

Gradients = dict[str, tuple[torch.Tensor, Metrics]]
"""By track whose gradient was added: its part of the loss of the update on this rank, [] float64, and its metrics."""

TrackResults = dict[str, TrainStepResult]


def merge_tracks(results: Sequence[TrackResults]) -> TrackResults:
    """Merge the results of all ranks, track by track."""
    return {name: merge_ranks([rank[name] for rank in results]) for name in results[0]}


@dataclass(eq=False)
class UnifiedModelStack:
    """Trains the tracks of a response whose rows are divided by the rows of the first track."""

    toy: ClassVar[Mapping[str, object]] = {"micro_batch_size": 2}

    backend: TrainBackend
    stacks: Mapping[str, TrainStack]
    """The loss and the policy of each trained track, on this backend."""
    _: KW_ONLY
    schedule: Literal["joint", "alternating"] = "joint"
    """joint = one optimizer update for all tracks; alternating = one for each track, in the order of the tracks."""
    loss_weights: dict[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)
    """The factor of the loss of each track. A track without an entry has the factor 1."""
    balance: Literal["fixed", "gradient_norm", "uncertainty"] = "fixed"
    """gradient_norm and uncertainty scale the gradients of a joint update, by norms or by the sizes of the losses.

    gradient_norm makes the gradient g_t of track t w_t g_t / |g_t|, times the weighted mean of the norms |g_t|.
    uncertainty makes it w_t g_t / s_t; s_t is the running root mean square of the loss over its elements. Both hold one
    gradient of the trained weights for each track.
    """
    balance_decay: Annotated[float, Meta(ge=0, lt=1)] = BALANCE_DECAY
    """Decay per update of the mean square of the loss. Only `balance: uncertainty` reads it; 0 = this update alone."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Rows of one track per forward and backward pass. The word "auto" lets the plan choose for each track."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """The gradient is clipped to this norm before each update."""
    num_updates_per_batch: int = 1
    """Updates of each track per rollout. Each one uses different rows."""
    max_nonfinite_updates: int = 3
    """Stop the run after this many consecutive updates whose loss or gradient is not finite."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.loss_weights if name not in self.stacks]
        if unknown:
            raise InvalidValueError(
                f"stack.loss_weights names the track {unknown[0]!r}, which has no loss. The trained tracks are "
                f"{', '.join(self.stacks)}"
            )
        check_balance(self.schedule, self.balance, self.balance_decay)
        self.rule = balance_rule(self.balance, self.stacks, self.balance_decay)

    @rank0
    def state_dict(self) -> State:
        """The state of the balance; empty unless it depends on earlier updates."""
        return {} if self.rule is None else self.rule.state_dict()

    @broadcast
    def load_state_dict(self, state: State) -> None:
        if self.rule is not None:
            self.rule.load_state_dict(state)

    @scatter(merge_tracks, unread=("decoded",))
    def train_tracks(
        self, resp: RolloutResp, now: Mapping[str, TrainingProgress], shown: Collection[str] = ()
    ) -> TrackResults:
        """Train on all rows of the tracks that have a stack. The metrics of the weights have the name "".

        Args:
            now: the progress of each track.
            shown: the ids of the samples whose values along the sample are returned, too.
        """
        is_joint = self.schedule == "joint"
        first = next(iter(self.stacks))
        work = {
            name: stack.prepare(resp.tracks[name], now[name], is_first=is_joint or name == first, shown=shown)
            for name, stack in self.stacks.items()
        }
        update = self._joint if is_joint else self._alternating
        results = [update(work, u) for u in range(self.num_updates_per_batch)]
        for name, prepared in work.items():
            results[0][name] = merge([results[0][name], prepared.parity])
        self.backend.finish_step()
        series = {name: prepared.values.by_sample() for name, prepared in work.items()}
        return {
            name: TrainStepResult(tuple(result[name] for result in results), series.get(name, {}))
            for name in results[0]
        }

    def _weight(self, track: str) -> float:
        return self.loss_weights.get(track, 1.0)

    def _joint(self, work: Mapping[str, PreparedStep], number: int) -> dict[str, Metrics]:
        """One update by the weighted sum of the gradients of all tracks."""
        counts = {name: self.stacks[name].count(prepared.updates[number]) for name, prepared in work.items()}
        # Every rank sees the same counts, so all ranks leave out the same tracks.
        trained = [name for name, count in counts.items() if count]
        metrics: dict[str, Metrics] = {name: {} for name in work}
        if not trained:
            return metrics | {SHARED: {"train/skipped_updates": Metric.sum(1.0)}}
        scales = {name: 1.0 / counts[name] for name in trained}
        add = self._weighted if self.rule is None else partial(self._balanced, self.rule)
        results = add(scales, work, number)
        loss = torch.stack([total for total, _ in results.values()]).sum()
        step = self.stacks[trained[-1]].step(loss, {})
        return metrics | {name: own for name, (_, own) in results.items()} | {SHARED: step}

    def _weighted(self, scales: Mapping[str, float], work: Mapping[str, PreparedStep], number: int) -> Gradients:
        """Add the gradient of each track, times its loss weight."""
        *_, last = scales
        results: Gradients = {}
        for name, scale in scales.items():
            scale *= self._weight(name)
            total, own = self._accumulate(name, work[name], number, scale, is_last=name == last, first=number == 0)
            results[name] = total, loss_metric(total) | own
        return results

    def _balanced(
        self, rule: LossBalance, scales: Mapping[str, float], work: Mapping[str, PreparedStep], number: int
    ) -> Gradients:
        """Add the gradient of each track, times the factor that `rule` gives it when all of them are known."""
        results: Gradients = {}
        apart: dict[str, TrackGradient] = {}
        for name, scale in scales.items():
            results[name] = self._accumulate(name, work[name], number, scale, is_last=True, first=number == 0)
            apart[name] = TrackGradient(self._weight(name), self.backend.set_gradient_aside(), results[name][1])
        factors = rule.factors(apart)
        self.backend.join_gradients([factors[name] for name in apart])
        for name, (total, own) in results.items():
            values = {"train/grad_norm": apart[name].norm, "train/loss_weight": factors[name]}
            balanced = {key: Metric.mean(value) for key, value in values.items()}
            results[name] = factors[name] * total, loss_metric(total) | own | balanced
        return results

    def _alternating(self, work: Mapping[str, PreparedStep], number: int) -> dict[str, Metrics]:
        """One update for each track, in the order of the tracks."""
        metrics: dict[str, Metrics] = {SHARED: {}}
        for i, (name, prepared) in enumerate(work.items()):
            stack, count = self.stacks[name], self.stacks[name].count(prepared.updates[number])
            if not count:
                metrics[name] = {"train/skipped_updates": Metric.sum(1.0)}
                continue
            is_first = number == 0 and i == 0
            scale = self._weight(name) / count
            total, own = self._accumulate(name, prepared, number, scale, is_last=True, first=is_first)
            metrics[name] = stack.step(total, own)
        return metrics

    def _accumulate(
        self, track: str, prepared: PreparedStep, number: int, scale: float, is_last: bool, first: bool
    ) -> tuple[torch.Tensor, Metrics]:
        micros: Update = prepared.updates[number]
        return self.stacks[track].accumulate(micros, prepared.now, first, scale, is_last, prepared.values.watch)


def balance_rule(name: str, tracks: Iterable[str], decay: float) -> LossBalance | None:
    """The rule that scales the gradients of a joint update. None: `loss_weights` scale the losses themselves."""
    if name == "fixed":
        return None
    return NormBalance() if name == "gradient_norm" else UncertaintyBalance(tracks, decay)


def check_balance(schedule: str, balance: str, decay: float) -> None:
    """Raises InvalidValueError unless the settings of a `UnifiedModelStack` fit each other."""
    if balance != "fixed" and schedule == "alternating":
        raise InvalidValueError(
            f"stack.balance={balance} balances the gradients that one joint update adds up, and "
            "stack.schedule=alternating makes an update of each. Use schedule=joint, or balance=fixed"
        )
    if balance != "uncertainty" and decay != BALANCE_DECAY:
        raise InvalidValueError(
            f"stack.balance_decay={decay:g} has no effect: stack.balance={balance} keeps no average. Remove it, or use "
            "balance=uncertainty"
        )
