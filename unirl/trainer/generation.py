"""The samples of a step, generated and scored: at once, or while the weights learn from earlier steps.

In step s of the loop the engine gets the weights W_s and begins to generate step s + k, where k is
`asynchronous.max_staleness`; then the weights learn from step s. With k = 0, step s waits for these samples.

    k = 1       | step 0                 | step 1                 | step 2
    engine      | 0 by W_0   1 by W_0    |            2 by W_1    |            3 by W_2
    weights     |            learn 0     |            learn 1     |            learn 2

The samples of a step are a function of its weights, prompts and keys, so overlap changes no sample. A step always comes
from the weights of k steps before, which the backend keeps as snapshots (`Publisher`), and from the prompts that follow
those of the step before (`PromptsAhead`). A run that is continued therefore generates the steps that were under way
again, with the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import cast

from unirl.config.errors import SyncError, WeightsLostError
from unirl.config.recipe import RefillConfig
from unirl.data.datasets import Prompt
from unirl.distributed.group.base import Pool
from unirl.distributed.weight_sync.base import SyncReport
from unirl.trainer.learner import Learner
from unirl.trainer.overlap import OverlappedScoring, ScoringUnderWay
from unirl.trainer.refill import StepSamples
from unirl.trainer.requests import RequestMaker, check_versions
from unirl.trainer.residency import Phases
from unirl.types.protocols import DataSource, State, Stateful
from unirl.types.rollout_req import RolloutReq

Published = Mapping[str, SyncReport]
"""The weights that samples come from, by track."""


@dataclass
class GeneratedStep:
    """The samples of one step, of which nothing but the scores of the last batch may be missing."""

    step: int
    published: Published
    samples: StepSamples
    unscored: tuple[RolloutReq, ScoringUnderWay] | None = None


@dataclass(frozen=True, kw_only=True)
class StepSampler:
    """Generates and scores the samples of a step: one batch of prompts, or as many as `refill` asks for."""

    prompts: PromptsAhead
    requests: RequestMaker
    scoring: OverlappedScoring
    phase: Phases
    learners: Sequence[Learner]
    """The policies, that of the first track first."""
    refill: RefillConfig | None
    batch_size: int
    note: Callable[[str], None]
    """Tells the user."""

    def generate(self, step: int, published: Published) -> GeneratedStep:
        """Generate until nothing but scores is missing. With `refill`, scores decide whether samples are missing."""
        self.phase.pool.step = step
        self.prompts.begin(step)
        generated = GeneratedStep(step, published, StepSamples(self.refill, self.batch_size))
        size = None
        while True:
            prompts = self.prompts.take(self.batch_size, size)
            size = prompts[0].size
            req = self.requests.training(prompts, step, published)
            generated.unscored = (req, self._sample(generated, req))
            if self.refill is None or self.scored(generated).is_complete:
                return generated

    def scored(self, generated: GeneratedStep) -> StepSamples:
        """The samples of a step, after the scores that are missing have arrived."""
        if generated.unscored is not None:
            req, scoring = generated.unscored
            with self.phase("reward"):
                resp, waits = scoring.scores()
            check_versions(req, resp)
            generated.samples.add(req, resp, waits)
            generated.unscored = None
        return generated.samples

    def _sample(self, generated: GeneratedStep, req: RolloutReq) -> ScoringUnderWay:
        """Sample a request. If a server lost its weights meanwhile, send them again, and repeat all of it."""
        while True:  # an engine restarts its server only a few times, and then raises another error
            try:
                with self.phase("generate", self.learners[0].track):  # the engine then calls `Phases.turn`
                    return self.scoring.generate(req)
            except WeightsLostError as error:
                self.note(f"step {generated.step + 1} samples again: {str(error).splitlines()[0]}")
                self._send_again(generated.published)

    def _send_again(self, published: Published) -> None:
        for learner in self.learners:
            with self.phase("sync", learner.track):
                report = published[learner.track]
                learner.roles.sync.push(report.version, report.weights)


@dataclass
class PromptsAhead:
    """The prompts of a run, and the state of their source before each step that is begun and not learned.

    A checkpoint has the state before the earliest of these steps, whose prompts are taken again.
    """

    source: DataSource[Prompt]
    before: dict[int, State] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a step begins and while the state is read."""

    def begin(self, step: int) -> None:
        """The prompts that are taken from now on belong to `step`."""
        with self.lock:
            if isinstance(self.source, Stateful):
                self.before[step] = deepcopy(self.source.state_dict())

    def take(self, count: int, size: tuple[int, int] | None) -> Sequence[Prompt]:
        """The next `count` prompts, of the size of the step's earlier ones."""
        return self.source.take(count, size)

    def learned(self, step: int) -> None:
        """The prompts of a step are not needed again."""
        with self.lock:
            self.before.pop(step, None)

    def state_dict(self) -> State:
        """The state of the source before the earliest step that is not learned."""
        with self.lock:
            if self.before:
                return self.before[min(self.before)]
            return cast(Stateful, self.source).state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue with the first step that was not learned."""
        self.before.clear()
        cast(Stateful, self.source).load_state_dict(state)


@dataclass
class GenerationAhead:
    """Generates steps one after another: at once, or in threads beside the loop, which learns meanwhile."""

    sampler: StepSampler
    pool: Pool
    is_concurrent: bool
    """False: `begin` returns when the step is generated."""
    begun: dict[int, Future[GeneratedStep]] = field(default_factory=dict)
    """The steps that were begun and not taken."""
    last: Future[GeneratedStep] | None = None
    """The step that was begun last in a thread."""
    is_stopped: bool = False
    """True: no further step is generated."""

    def begin(self, step: int, published: Published) -> None:
        """Begin to generate a step, after those that were begun before it."""
        future: Future[GeneratedStep] = Future()
        self.begun[step] = future
        if self.is_concurrent:
            arguments = (future, self.last, step, published)
            self.last = future
            self.pool.start_thread(f"generation of step {step + 1}", self._work, arguments)
        else:
            future.set_result(self.sampler.generate(step, published))

    def _work(
        self, future: Future[GeneratedStep], previous: Future[GeneratedStep] | None, step: int, published: Published
    ) -> None:
        try:
            if previous is not None:
                previous.result()  # a step that failed ends the run, so none is generated after it
            if self.is_stopped:
                future.cancel()
            else:
                future.set_result(self.sampler.generate(step, published))
        except BaseException as error:  # raised again where the loop waits for the step
            future.set_exception(error)

    def wait(self) -> None:
        """Wait until all steps that were begun are generated. Raises the error of the first one that failed."""
        with self._waiting():
            for future in list(self.begun.values()):
                future.result()

    def take(self, step: int) -> GeneratedStep:
        """The generated step, once it is there. Raises the error of its generation."""
        with self._waiting():
            return self.begun.pop(step).result()

    def _waiting(self) -> AbstractContextManager[None]:
        """Times the block as the phase `wait`, in which the loop has nothing to learn from."""
        return self.sampler.phase.timers.phase("wait") if self.is_concurrent else nullcontext()


def check_staleness(report: SyncReport, oldest: int, newest: int) -> None:
    """Check that samples come from weights that the bound allows. Raises SyncError (10002).

    Args:
        report: the weights that the samples come from.
        oldest, newest: optimizer updates behind the oldest weights that the bound allows, and behind the live ones.
    """
    if not oldest <= report.version <= newest:
        raise SyncError(
            f"the samples come from weights after {report.version} updates, and asynchronous.max_staleness allows "
            f"those after {oldest} to {newest}: the engine did not take over a sync"
        )
