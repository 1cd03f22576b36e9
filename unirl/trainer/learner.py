"""Trains one set of weights of a run on the tracks that it samples, with the loss of each track."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unirl.algorithms.shared.critic import explained_variance
from unirl.algorithms.shared.groups import in_pairs
from unirl.algorithms.shared.kl import KLController
from unirl.config.recipe import RecipeConfig
from unirl.distributed.weight_sync.base import SyncReport
from unirl.train.backend.base import TrainBackend
from unirl.train.parity import ParityGate
from unirl.train.stack import TrainStack
from unirl.trainer.balance import balanced_track
from unirl.trainer.micro_batch import MicroBatch
from unirl.trainer.monitoring import Monitor
from unirl.trainer.publishing import Publisher
from unirl.trainer.residency import Roles
from unirl.types.facts import ModelFacts
from unirl.types.protocols import Needs, TrainingProgress
from unirl.types.results import TrainStepResult, values
from unirl.types.rollout_resp import RolloutResp, RolloutTrack


@dataclass(eq=False, kw_only=True)
class TrackLearner:
    """The training of a policy on one track: its loss, its settings, and the checks before the first update."""

    track: str
    is_trained: bool = True
    """False for a track that is only sampled."""
    config: RecipeConfig
    """The recipe as this track sees it: the settings of the run, and the blocks of the track."""
    stack: TrainStack
    """Trains the loss of the track, alone or as a part of the policy's `shared_stack`."""
    facts: ModelFacts
    needs: Needs
    kl: KLController | None
    """Feedback on the loss's KL coefficient; None for a loss that asks for none."""
    parity: ParityGate | None
    """None for a loss without log-probs, and for an engine that records none."""
    micro_batch: MicroBatch | None
    """Chooses the micro-batch; None for a recipe that sets it."""
    chosen: dict[str, Any]
    """Values that the run chose for settings that its recipe leaves open, by key. Checkpoints save them."""
    parity_is_checked: bool = False

    def choose_micro_batch(self) -> None:
        """Choose the rows of a micro-batch for the device, or take those of the checkpoint."""
        if self.micro_batch is not None:
            key = self.micro_batch.key
            self.chosen[key] = self.micro_batch.choose(self.chosen[key])

    def progress(self, step: int) -> TrainingProgress:
        """The progress of the run in step `step`, from which a loss computes its schedules."""
        kl_scale = self.kl.scale if self.kl is not None else 1.0
        return TrainingProgress(progress=fraction_done(step, self.config.num_rollouts), kl_scale=kl_scale)

    def check(self, track: RolloutTrack, now: TrainingProgress, monitor: Monitor) -> None:
        """Measure memory and the engine's log-probs before the first update of this process."""
        if self.micro_batch is not None:
            self.chosen[self.micro_batch.key] = self.micro_batch.measure(track, now)
        if self.parity is not None and not self.parity_is_checked:
            monitor.judge_parity(self.parity, self.stack.measure_parity(track))
            self.parity_is_checked = True

    def observe(self, track: RolloutTrack, metrics: dict[str, float]) -> dict[str, float]:
        """Adapt the KL coefficient to the metrics of a step, and return them with those that follow from them."""
        if self.kl is not None and "train/kl" in metrics:  # absent if all updates of the step were skipped
            self.kl.observe(metrics["train/kl"], int((track.weight > 0).sum()))
        return metrics | explained_variance(metrics)


@dataclass(eq=False, kw_only=True)
class Learner:
    """Trains one set of weights. A run has one for each policy of its recipe."""

    tracks: Mapping[str, TrackLearner]
    """The tracks that the policy samples, each one before those that continue it."""
    roles: Roles
    publisher: Publisher
    version: int = 0
    """Optimizer updates done."""

    @property
    def track(self) -> str:
        """The last track, by which phases call the policy."""
        return list(self.tracks)[-1]

    @property
    def label(self) -> str:
        """The name of metrics that are about the weights: that of the only track, or none if tracks share them."""
        return self.track if len(self.tracks) == 1 else ""

    @property
    def is_trained(self) -> bool:
        """False for a policy that only samples."""
        return any(each.is_trained for each in self.tracks.values())

    @property
    def backend(self) -> TrainBackend:
        """Keeps the weights and the optimizer."""
        return self.roles.backend

    def is_unchanged(self) -> bool:
        """True if no update was made since the last finished step."""
        return self.roles.backend.version() == self.version

    def publish(self, step: int) -> SyncReport:
        """Bring the weights at the beginning of `step` to the engine."""
        return self.publisher.push(step, self.version)

    def learn(self, step: int, resp: RolloutResp, monitor: Monitor) -> dict[str, dict[str, float]]:
        """Update the weights on the samples of one step, which have advantages. Returns the metrics by track."""
        learners = {name: each for name, each in self.tracks.items() if each.is_trained}
        now = {name: each.progress(step) for name, each in learners.items()}
        rows = self._rows(resp, learners)
        for name, each in learners.items():
            each.check(rows.tracks[name], now[name], monitor)
        results = self._train(rows, now, monitor.shown)
        metrics = {name: values(result.metrics) for name, result in results.items()}
        monitor.add_series({sample: series for result in results.values() for sample, series in result.series.items()})
        self.version = self.roles.backend.version()
        for name, each in learners.items():
            if each.parity is not None and self.publisher.samples_are_live:
                monitor.watch_parity(each.parity, metrics[name])
            metrics[name] = each.observe(rows.tracks[name], metrics[name])
        return metrics

    def _rows(self, resp: RolloutResp, learners: Mapping[str, TrackLearner]) -> RolloutResp:
        """The rows of the policy's tracks, in the order in which ranks divide them."""
        if self.roles.shared_stack is not None:
            return resp  # rows follow those of the first track, so a rank gets whole branches of the tree
        [(name, each)] = learners.items()
        track = resp.pick([name]).tracks[name]
        if each.needs.pairs:
            track = in_pairs(track, each.needs.pairs)
        num_updates, together = each.config.num_updates, each.needs.rows_together
        return RolloutResp({name: balanced_track(track, num_updates, self.roles.train_ranks, together)})

    def _train(
        self, rows: RolloutResp, now: Mapping[str, TrainingProgress], shown: tuple[str, ...]
    ) -> dict[str, TrainStepResult]:
        """The results of a step, by track. Metrics of weights that several tracks share have the name ""."""
        if self.roles.shared_stack is not None:
            return self.roles.shared_stack.train_tracks(rows, now, shown)
        [(name, track)] = rows.tracks.items()
        return {name: self.tracks[name].stack.train_track(track, now[name], shown)}


def fraction_done(step: int, num_rollouts: int) -> float:
    """The progress of a run in step `step`, from 0 in the first step to 1 in the last."""
    return step / max(num_rollouts - 1, 1)
