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

With `asynchronous.order=free` the engine does not wait for the end of a step: it gets the weights of each step as soon
as they exist, between two parts of a request (`FreeEngine`), so the ages of samples depend on who is faster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import cast

from unirl.config.errors import SyncError, WeightsLostError
from unirl.config.recipe import RefillConfig
from unirl.data.datasets import Prompt
from unirl.distributed.group.base import Pool
from unirl.distributed.weight_sync.base import SyncReport
from unirl.trainer.channel import Channel, ChannelClosed
from unirl.trainer.engine_turns import EngineTurns, Published
from unirl.trainer.learner import Learner
from unirl.trainer.overlap import OverlappedScoring, ScoringUnderWay
from unirl.trainer.refill import StepSamples
from unirl.trainer.requests import RequestMaker
from unirl.trainer.residency import Phases
from unirl.types.protocols import DataSource, State, Stateful
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp


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
    engine: EngineTurns
    """Who may use the engine."""

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
            generated.unscored = (req, self._sample(step, req))
            if self.refill is None or self.scored(generated).is_complete:
                return generated

    def scored(self, generated: GeneratedStep) -> StepSamples:
        """The samples of a step, after the scores that are missing have arrived."""
        if generated.unscored is not None:
            req, scoring = generated.unscored
            with self.phase("reward"):
                resp, waits = scoring.scores()
            generated.samples.add(req, resp, waits)
            generated.unscored = None
        return generated.samples

    def sample_again(self, step: int, req: RolloutReq) -> RolloutResp:
        """The scored samples of a request that was generated before, from the weights that the engine has."""
        self.phase.pool.step = step
        scoring = self._sample(step, req)
        with self.phase("reward"):
            return scoring.scores()[0]

    def _sample(self, step: int, req: RolloutReq) -> ScoringUnderWay:
        """Sample a request. If a server lost its weights meanwhile, send them again, and repeat all of it."""
        while True:  # an engine restarts its server only a few times, and then raises another error
            try:
                return self.scoring.generate(req, self._turn)
            except WeightsLostError as error:
                self.note(f"step {step + 1} samples again: {str(error).splitlines()[0]}")
                self.engine.send_again(req)

    @contextmanager
    def _turn(self, part: RolloutReq, timer: str) -> Iterator[RolloutReq]:
        """Has the engine for the block. Yields the part of a request with the weights that the engine has."""
        # In a phase of generation, the engine calls `Phases.turn`.
        with self.engine.sampling(part) as sourced, self.phase("generate", self.learners[0].track, timer):
            yield sourced


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
    """Generates steps one after another: at once, or in a thread beside the loop, which learns meanwhile."""

    sampler: StepSampler
    pool: Pool
    is_concurrent: bool
    """False: `begin` returns when the step is generated."""
    num_steps: int
    """Steps of the run."""
    steps_ahead: int
    """Steps that are begun before the weights learn from the present one."""
    orders: Channel[tuple[int, Published]] = field(default_factory=lambda: Channel("orders"))
    """The steps that are to be generated."""
    generated: Channel[GeneratedStep] = field(default_factory=lambda: Channel("samples"))
    """The steps that are generated and not taken."""
    is_started: bool = False
    next_step: int = 0
    """The step that is begun next."""
    ahead: int = 0
    """The number of steps that were begun and not taken."""
    oldest: dict[str, int] = field(default_factory=dict)
    """By track, updates behind the oldest weights that the samples of the present step may come from."""

    def samples(self, step: int, publish: Callable[[int], Published]) -> GeneratedStep:
        """The samples of a step, after later steps were begun.

        Args:
            publish: brings the weights at the beginning of a step to the engine.
        """
        self.take_engine()
        self.remember_weights(step)
        begun = range(self.next_step, min(step + self.steps_ahead + 1, self.num_steps))
        if self.needs_weights(begun):
            self.give_engine(publish(step), begun)
        generated = self.take()
        self.sampler.scored(generated)
        self.check_age(generated)
        return generated

    def take_engine(self) -> None:
        """Keep the engine for the loop: here, wait until all steps that were begun are generated."""
        with self.waiting(), self.sampler.scoring.sampling.lent():
            self.generated.wait_for(self.ahead)

    def remember_weights(self, step: int) -> None:
        """Note the weights at the beginning of a step, from which later steps are sampled."""
        for learner in self.sampler.learners:
            self.oldest[learner.track] = learner.publisher.oldest(learner.version)
            learner.publisher.keep(step, learner.version)

    def needs_weights(self, begun: Sequence[int]) -> bool:
        """The engine needs weights for the steps that are begun."""
        return bool(begun)

    def give_engine(self, published: Published, begun: Sequence[int]) -> None:
        """Let the engine generate these steps from these weights, which it has got."""
        for step in begun:
            self.begin(step, published)

    def check_age(self, generated: GeneratedStep) -> None:
        """Check that the samples are not older than the bound. Raises SyncError (10002)."""
        for learner in self.sampler.learners:
            check_staleness(generated.published[learner.track], self.oldest[learner.track], learner.version)

    def generate_again(self, first: int, publish: Callable[[int], Published]) -> None:
        """Generate the steps that were under way at a checkpoint before step `first`, from the weights they had."""
        self.next_step = first
        for step in range(first, min(first + self.steps_ahead, self.num_steps) if first else 0):
            self.begin(step, publish(max(step - self.steps_ahead, 0)))
            self.take_engine()

    def learning(self) -> AbstractContextManager[None]:
        """The weights change in the block."""
        return self.sampler.engine.learning()

    def begin(self, step: int, published: Published) -> None:
        """Begin to generate a step, after those that were begun before it."""
        self.ahead += 1
        self.next_step = step + 1
        if not self.is_concurrent:
            self.generated.put(self.sampler.generate(step, published))
            return
        self.orders.put((step, published))
        if not self.is_started:
            self.is_started = True
            self.pool.start_thread("generation of steps", self._work, ())

    def _work(self) -> None:
        try:
            while True:
                step, published = self.orders.take()
                self.generated.put(self.sampler.generate(step, published), version=step)
        except ChannelClosed:
            self.generated.close()
        except BaseException as error:  # raised again where the loop waits for the step
            self.generated.fail(error)

    def take(self) -> GeneratedStep:
        """The step after the one that was taken last, once it is generated. Raises the error of its generation."""
        lent = nullcontext() if len(self.generated) else self.sampler.scoring.sampling.lent()
        with self.waiting(), lent:
            generated = self.generated.take()
        self.ahead -= 1
        return generated

    def stop(self) -> None:
        """Generate no further step than the one that is being generated."""
        self.orders.close(discard=True)

    def waiting(self) -> AbstractContextManager[None]:
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
