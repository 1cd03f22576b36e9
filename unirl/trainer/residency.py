"""The roles of a run, and the moves of their parts between phases, by the table in unirl/plan/residency.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast, get_args

from unirl.config.errors import MemoryShortageError
from unirl.config.failures import is_out_of_memory
from unirl.distributed.group.base import Pool
from unirl.distributed.weight_sync.base import WeightSync
from unirl.plan.placement import PlacementPlan
from unirl.plan.residency import IDLE, PHASES, MemoryPart, memory_parts, resident
from unirl.reward.service import RewardService
from unirl.rollout.engine.base import DedicatedEngine, RolloutEngine
from unirl.tracking.timing import PhaseTimers
from unirl.train.backend.base import Offloadable, TrainBackend
from unirl.train.stack import TrainStack
from unirl.train.unified_model_stack import UnifiedModelStack

BACKEND_PARTS: tuple[Offloadable, ...] = get_args(Offloadable)
"""The parts that the train backend moves."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of a run. At run time each one is a handle, whose methods run where the role was placed."""

    rollout: RolloutEngine
    reward: RewardService
    stacks: Mapping[str, TrainStack]
    """The loss of each track."""
    shared_stack: UnifiedModelStack | None = None
    """Trains the losses of several tracks on the same weights. None for a policy of one track."""
    backend: TrainBackend
    sync: WeightSync
    train_ranks: int
    """Data-parallel ranks of the stack."""
    has_own_weights: bool = False
    """The engine samples from a copy of the weights, which `sync` carries to it."""
    joining: DedicatedEngine | None = None
    """A second engine, on the training devices, which samples while they wait (`asynchronous.elastic`)."""

    @property
    def stack(self) -> TrainStack:
        """The stack of the only track. Raises ValueError if there are several."""
        [stack] = self.stacks.values()
        return stack


class Residency:
    """Brings in what a phase needs, after sending away what it does not need."""

    def __init__(self, plan: PlacementPlan, roles: Roles, owns_reward: bool = True) -> None:
        """
        Args:
            roles: all of their parts are on their devices now.
            owns_reward: move the reward, which policies share. The policy whose track is scored moves it.
        """
        self.plan = plan
        self.roles = roles
        self.parts: set[MemoryPart] = set(memory_parts(plan)) - (set() if owns_reward else {"reward"})
        self.here: set[MemoryPart] = set(self.parts)
        """The parts that are on their devices."""

    def enter(self, phase: str) -> None:
        """Make exactly the parts of `phase` resident."""
        self.leave(phase)
        wanted = self._wanted(phase)
        self._move(wanted - self.here, away=False)
        self.here = wanted

    def leave(self, phase: str) -> None:
        """Send away what `phase` does not need."""
        wanted = self._wanted(phase)
        self._move(self.here - wanted, away=True)
        self.here &= wanted

    def _wanted(self, phase: str) -> set[MemoryPart]:
        assert phase in (*PHASES, IDLE), f"{phase!r} is no phase of the residency table"
        return set(resident(self.plan, phase)) & self.parts

    def _move(self, parts: set[MemoryPart], away: bool) -> None:
        reward, backend = self.roles.reward, self.roles.backend
        if "engine" in parts:  # only an engine with weights of its own has this part
            engine = cast(DedicatedEngine, self.roles.rollout)
            (engine.sleep if away else engine.wake_up)()
        if "reward" in parts:
            (reward.offload if away else reward.onload)(["reward"])
        if own := [name for name in BACKEND_PARTS if name in parts]:
            (backend.offload if away else backend.onload)(own)


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Opens the phases of a step: `with phases("generate"): ...`."""

    timers: PhaseTimers
    pool: Pool
    residencies: Mapping[str, Residency]
    """By track. Policies that share devices take turns."""
    shortage: Callable[[str], str]
    """What to tell the user when memory runs out in a phase: where it goes, and the next setting to turn down."""

    def turn(self, track: str) -> None:
        """In the present phase, bring in the parts of one policy, after sending away those of the others."""
        if self.pool.phase:  # between phases nothing moves
            self._enter(self.pool.phase, track)

    def _enter(self, phase: str, track: str | None) -> None:
        phases = {name: phase if track in (None, name) else IDLE for name in self.residencies}
        for name, residency in self.residencies.items():
            residency.leave(phases[name])
        for name, residency in self.residencies.items():
            residency.enter(phases[name])

    @contextmanager
    def __call__(self, name: str, track: str | None = None, timer: str | None = None) -> Iterator[None]:
        """Time the block, bring in the parts that it needs, and end it when it passes its deadline.

        Args:
            track: the only policy that works in this phase; None = all.
            timer: the name that the time gets. None: that of the phase.

        Raises:
            MemoryShortageError: 5002 if memory runs out in the block.
        """
        with self.timers.phase(timer or name), self.pool.watch(name):
            try:
                self._enter(name, track)
                yield
            except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
                if not is_out_of_memory(error):
                    raise
                first = next(iter(str(error).splitlines()), "") or "no more memory"
                raise MemoryShortageError(f"out of memory: {first}\n  {self.shortage(name)}") from error
