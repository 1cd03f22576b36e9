"""One policy of a run: the track that it samples, the weights behind it, and the loss that trains them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unirl.algorithms.shared.critic import explained_variance
from unirl.algorithms.shared.groups import in_pairs
from unirl.algorithms.shared.kl import KLController
from unirl.config.recipe import RecipeConfig
from unirl.distributed.weight_sync.base import SyncReport
from unirl.train.backend.base import TrainBackend
from unirl.train.parity import ParityGate
from unirl.trainer.balance import balanced_track
from unirl.trainer.micro_batch import MicroBatch
from unirl.trainer.monitoring import Monitor
from unirl.trainer.publishing import Publisher
from unirl.trainer.residency import Roles
from unirl.types.facts import ModelFacts
from unirl.types.protocols import Needs, TrainingProgress
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack


@dataclass(eq=False, kw_only=True)
class Learner:
    """Trains one policy on its track. A run has one for each policy of its recipe."""

    track: str
    """The name of the track that the policy samples and learns from."""
    is_trained: bool = True
    """False for a policy that only samples."""
    config: RecipeConfig
    """The recipe as this policy sees it: the settings of the run, and the blocks of the policy."""
    roles: Roles
    facts: ModelFacts
    needs: Needs
    publisher: Publisher
    kl: KLController | None
    """Feedback on the loss's KL coefficient; None for a loss that asks for none."""
    parity: ParityGate | None
    """None for a loss without log-probs, and for an engine that records none."""
    micro_batch: MicroBatch | None
    """Chooses the micro-batch; None for a recipe that sets it."""
    chosen: dict[str, Any]
    """Values that the run chose for settings that its recipe leaves open, by key. Checkpoints save them."""
    version: int = 0
    """Optimizer updates done."""
    parity_is_checked: bool = False

    @property
    def backend(self) -> TrainBackend:
        """Keeps the weights and the optimizer."""
        return self.roles.backend

    def is_unchanged(self) -> bool:
        """True if no update was made since the last finished step."""
        return self.roles.backend.version() == self.version

    def choose_micro_batch(self) -> None:
        """Choose the rows of a micro-batch for the device, or take those of the checkpoint."""
        if self.micro_batch is not None:
            key = self.micro_batch.key
            self.chosen[key] = self.micro_batch.choose(self.chosen[key])

    def publish(self, step: int) -> SyncReport:
        """Bring the weights that `step` samples from to the engine."""
        return self.publisher.publish(step, self.version)

    def progress(self, step: int) -> TrainingProgress:
        """The progress of the run in step `step`, from which a loss computes its schedules."""
        kl_scale = self.kl.scale if self.kl is not None else 1.0
        return TrainingProgress(progress=fraction_done(step, self.config.num_rollouts), kl_scale=kl_scale)

    def learn(self, step: int, track: RolloutTrack, monitor: Monitor) -> dict[str, float]:
        """Update the policy on the credited samples of one step. Returns the metrics."""
        now = self.progress(step)
        if self.needs.pairs:
            track = in_pairs(track, self.needs.pairs)
        track = balanced_track(track, self.config.num_updates, self.roles.train_ranks, self.needs.rows_together)
        if self.micro_batch is not None:
            self.chosen[self.micro_batch.key] = self.micro_batch.measure(track, now)
        if self.parity is not None and not self.parity_is_checked:
            monitor.judge_parity(self.parity, self.roles.stack.measure_parity(track))
            self.parity_is_checked = True
        metrics = values(self.roles.stack.train_track(track, now).metrics)
        self.version = self.roles.backend.version()
        if self.parity is not None and self.publisher.interval == 1:
            monitor.watch_parity(self.parity, metrics)
        if self.kl is not None and "train/kl" in metrics:  # absent if all updates of the step were skipped
            self.kl.observe(metrics["train/kl"], int((track.weight > 0).sum()))
        return metrics | explained_variance(metrics)


def fraction_done(step: int, num_rollouts: int) -> float:
    """The progress of a run in step `step`, from 0 in the first step to 1 in the last."""
    return step / max(num_rollouts - 1, 1)
