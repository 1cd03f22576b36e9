"""Trains on transitions of a replay store: the decisions of a step go in, and updates draw from all that are kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import torch
from msgspec import Meta

from unirl.algorithms.base import START, StageAlgorithm
from unirl.algorithms.shared.transition_loss import TransitionLoss
from unirl.config.build import build
from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.config.node import Node
from unirl.data.demonstrations import DemonstrationsConfig, load_demonstrations
from unirl.distributed.group.dispatch import scatter
from unirl.sde.noise import key_seed
from unirl.train.replay_store import Draw, ReplayConfig, ReplayStore
from unirl.train.stack import TrainStack, loss_metric, merge_ranks, update_metrics
from unirl.types.facts import ActionFacts, ModelFacts
from unirl.types.progress import progress
from unirl.types.protocols import TrainingProgress
from unirl.types.results import Metric, Metrics, TrainStepResult, merge
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import ActionSamplingParams, Sampling
from unirl.types.segments import ActionSegment
from unirl.types.transitions import Transitions, num_decisions


@dataclass(eq=False)
class ReplayStack(TrainStack):
    """Keeps the transitions of all steps, and makes a number of updates for each new decision. One device trains.

    Decisions are the policy's own from the first step on. Updates begin in the step that fills the store to `warmup`.
    """

    toy: ClassVar[Mapping[str, object]] = {"minibatch_size": 16, "warmup": 8, "updates_per_decision": 0.25}
    trains: ClassVar[type] = TransitionLoss
    trains_rows: ClassVar[bool] = False

    _: KW_ONLY
    store: ReplayConfig = field(default_factory=ReplayConfig)
    """The replay store."""
    minibatch_size: Annotated[int, Meta(ge=2)] = 256
    """Transitions of an update."""
    updates_per_decision: Annotated[float, Meta(gt=0)] = 1.0
    """Updates for each decision that a step adds."""
    warmup: Annotated[int, Meta(ge=1)] = 1000
    """Transitions in the store before the first update."""
    offline: DemonstrationsConfig | None = None
    """Demonstrations, which a part of every minibatch is drawn from. null: none."""
    offline_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """The part that comes from `offline`: a half in RLPD (arXiv:2302.02948). 1: the own decisions are not kept."""

    @classmethod
    def check_recipe(cls, loss: type[StageAlgorithm[Any]], settings: Mapping[str, object], num_ranks: int) -> None:
        super().check_recipe(loss, settings, num_ranks)
        if settings["num_updates_per_batch"] != 1:
            raise InvalidValueError(
                f"stack.num_updates_per_batch={settings['num_updates_per_batch']}: the updates of a step follow from "
                "its decisions here. Leave it out, and set stack.updates_per_decision"
            )
        if num_ranks > 1:
            raise IncompatibleError(
                f"stack: ReplayStack trains on one device, and the placement gives it {num_ranks}, whose stores and "
                "critics would have to be shared. Set num_devices=1"
            )

    @classmethod
    def check_data(
        cls, loss: StageAlgorithm[Any], facts: ModelFacts, sampling: Sampling, settings: Mapping[str, object]
    ) -> None:
        trained, offline, store = cast(TransitionLoss, loss), settings["offline"], settings["store"]
        check_store(trained, build(store) if isinstance(store, Node) else cast(ReplayConfig, store))
        if offline is not None:
            found = load_demonstrations(build(cast(Node, offline)), cast(ActionFacts, facts))
            trained.check_demonstrations(found.has_rewards)
        if offline is None or settings["offline_share"] != 1:
            trained.check_own_rows(cast(ActionSamplingParams, sampling))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss = cast(TransitionLoss, self.algorithm)
        check_store(self.loss, self.store)
        self.replay = ReplayStore(self.store)
        self.demonstrations = None if self.offline is None else self._offline(self.offline)
        self.backend.keep("replay", self.replay)
        if self.loss.needs.value:
            self.backend.keep("critics", self.stage.value_head)

    def _offline(self, config: DemonstrationsConfig) -> ReplayStore:
        """A store of the demonstrations. Checkpoints have the digest of the data, not the data."""
        found = load_demonstrations(config, self.stage.facts)
        self.loss.check_demonstrations(found.has_rewards)
        transitions = self.loss.demonstrated(self.stage, found.segment, self.store.n_step)
        store = ReplayStore(ReplayConfig(capacity=len(transitions)))
        store.add(transitions)
        self.backend.keep("demonstrations", found)
        return store

    @property
    def num_offline(self) -> int:
        """Transitions of a minibatch that come from demonstrations."""
        return 0 if self.demonstrations is None else round(self.offline_share * self.minibatch_size)

    @scatter(merge_ranks, unread=("decoded",))
    def train_track(
        self, track: RolloutTrack, now: TrainingProgress = START, shown: Collection[str] = ()
    ) -> TrainStepResult:
        """Add the decisions of `track`, and make the updates that they pay for. No sample has values of its own."""
        before = self.replay.added
        segment = cast(ActionSegment, track.segment)
        if self.num_offline < self.minibatch_size:
            self.replay.add(self.loss.transitions(self.stage, segment, track.weight, self.store.n_step))
        else:
            self.replay.skip(num_decisions(segment, track.weight))
        count = num_updates(before, self.replay.added, self.updates_per_decision)
        if len(self.replay) < self.warmup:
            count = 0
        results = [self._update_once(count, now) for _ in range(count)]
        kept: Metrics = {
            "train/replay_size": Metric.mean(float(len(self.replay))),
            "train/replay_updates": Metric.mean(float(count)),
        }
        if not results:
            return TrainStepResult((kept,))
        self.backend.finish_step()
        return TrainStepResult((merge([results[0], kept]), *results[1:]))

    def _update_once(self, count: int, now: TrainingProgress) -> Metrics:
        """One update. Its draws are a function of the seed of the run and of the number of the update."""
        number = self.backend.updates
        generator = torch.Generator().manual_seed(key_seed(self.backend.seed, f"replay{number}"))
        own, batch = self._minibatch(generator, now.progress)
        found = self.loss.transition_loss(self.stage, batch.to(self.backend.device), generator)
        self.backend.backward(found.loss, last=True)
        total = found.loss.detach().double()
        stats = self.backend.step(self.max_grad_norm, total)
        self._check_finite(stats, total)
        progress("update on replayed transitions", count)
        if stats.skipped:
            return update_metrics(stats)
        self.loss.after_update(self.stage)
        if found.errors is not None and own is not None:
            self.replay.report(own.places, found.errors[: len(own.places)])
        return update_metrics(stats) | loss_metric(total) | self.loss.metrics(found.parts)

    def _minibatch(self, generator: torch.Generator, progress: float = 0.0) -> tuple[Draw | None, Transitions]:
        """What was drawn from the store, and with the demonstrations after it, the minibatch."""
        shown = self.num_offline
        own = (
            self.replay.draw(self.minibatch_size - shown, generator, progress) if shown < self.minibatch_size else None
        )
        if self.demonstrations is None or shown == 0:
            assert own is not None
            return own, own.transitions
        offline = self.demonstrations.sample(shown, generator).transitions
        return own, offline if own is None else Transitions.joined(own.transitions, offline)


def check_store(loss: TransitionLoss, store: ReplayConfig) -> None:
    """Refuses priorities that the loss does not measure (2020), and a folder that does not exist (2004)."""
    if store.priority is not None and not loss.has_errors:
        raise IncompatibleError(
            f"stack.store.priority: {type(loss).__name__} measures no error of a transition, so none can be drawn more "
            "often than others. Leave it out"
        )
    if store.folder is not None and not Path(store.folder).expanduser().is_dir():
        raise InvalidValueError(f"stack.store.folder={store.folder} is no folder. Make it, or name one on a local disk")


def num_updates(before: int, after: int, per_decision: float) -> int:
    """Updates that the decisions `before` + 1 to `after` pay for. Fractions add up over steps."""
    return math.floor(after * per_decision) - math.floor(before * per_decision)
