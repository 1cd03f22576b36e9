"""The contract of environments: what a policy observes, how it acts, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Observations = dict[str, Tensor]
"""Observations by key, such as `state`: [B, *shape] float32 numbers, or [B, C, H, W] uint8 images, on the CPU."""

STATE = "state"
"""The key of the observations of an environment whose observation is one array."""
NOT_REPORTED = -1
"""The success of a step about which an environment says nothing."""
INSTRUCTION = "instruction"
"""The key of the tokens of a task's text: [B, L] int64. The policy makes them; no environment shows them."""


@dataclass(frozen=True)
class DiscreteActions:
    """Actions 0 to count - 1. A policy acts with one int64 number per environment."""

    count: int

    def describe(self) -> str:
        """For example `2 discrete actions`."""
        return f"{self.count} discrete actions"


@dataclass(frozen=True)
class ContinuousActions:
    """Vectors of `size` numbers in [-1, 1], A. The environment scales them to its own bounds."""

    size: int

    def describe(self) -> str:
        """For example `6 continuous actions`."""
        return f"{self.size} continuous actions"


ActionSpace = DiscreteActions | ContinuousActions


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpaces:
    """What an environment shows, and what it takes."""

    observations: Mapping[str, tuple[int, ...]]
    """The shape of an observation, by key."""
    actions: ActionSpace
    most_steps: int | None = None
    """The action after which the environment truncates an episode. None: it does not."""
    chunk: int = 1
    """Actions that one call of `step` takes in a slot, C. A simulator that predicts several frames at once has more
    than 1; it then gets [B, C, ...] in place of [B, ...], and a decision of the policy is a multiple of C actions."""

    @property
    def step_shape(self) -> tuple[int, ...]:
        """The shape of what one call of `step` takes in a slot: [A] numbers or [] for an index, after [C] if C > 1."""
        one = () if isinstance(self.actions, DiscreteActions) else (self.actions.size,)
        return one if self.chunk == 1 else (self.chunk, *one)


@dataclass(frozen=True, kw_only=True)
class EpisodeStart:
    """Everything that decides how an episode begins."""

    seed: int
    """Equal seeds start equal episodes, if the environment is keyed."""
    task: str = ""
    """The instruction in words, for environments and policies with several tasks. Empty: there is none."""
    options: Mapping[str, object] = field(default_factory=dict)
    """What the environment itself knows by name, such as the number of a recorded initial state."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentStep:
    """What B environments returned for one action each. No environment starts another episode by itself."""

    observations: Observations  # [B, ...] the state that the action led to, also where the episode ended
    rewards: Tensor  # [B] float32
    terminated: Tensor  # [B] bool, True = the episode reached an end of the task: no reward can follow
    truncated: Tensor  # [B] bool, True = the episode was cut off, such as at a step limit
    success: Tensor  # [B] bool; int8 with NOT_REPORTED where an environment says nothing about success
    faults: Mapping[int, str] = field(default_factory=dict)
    """The reason by entry of the batch, where the environment failed. Such an episode is over and must not count."""


class Expert(Protocol):
    """Says what to do in any state: a scripted policy of a task, or a trained one."""

    def label(self, observations: Observations) -> Tensor:
        """[B] int64, or [B, A] float32 in [-1, 1]: the expert's action for each observation of the environment."""


class FrameReward(Protocol):
    """Says what frames are worth, and which of them show success.

    A class that reads frames of one size alone has an attribute `size`, their height and width.
    """

    def score(self, before: Tensor, frames: Tensor, tasks: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Rewards [B, C] float32 and success [B, C] bool. A row depends on its own frames and task alone.

        Args:
            before: [B, 3, H, W] uint8, the frame before the first action.
            frames: [B, C, 3, H, W] uint8, the frame after each action.
            tasks: [B] the instructions; "" where there is none.
        """


class Environment(Protocol):
    """A set of environments of one kind. A slot holds one of them, which is made when the slot is first reset.

    `unirl.testing.check_environment` checks an implementation.
    """

    spaces: EnvironmentSpaces
    is_keyed: bool
    """True: a start and the actions decide an episode. False: runs cannot repeat, and are compared statistically."""

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> Observations:
        """Start one episode in each slot, and return the first observations [B, ...].

        Raises:
            EpisodeError: a slot cannot start an episode, even after it was made anew.
        """

    def step(self, slots: Sequence[int], actions: Tensor) -> EnvironmentStep:
        """Take one action in each slot: [B] int64, or [B, A] float32 in [-1, 1]. Numbers outside are clipped.

        With `spaces.chunk` C > 1, it takes C actions in each slot, [B, C] or [B, C, A]. Rewards are their sum, until
        the episode ends; the actions after its end do nothing.
        """

    def render(self, slots: Sequence[int]) -> Tensor | None:
        """[B, 3, H, W] uint8 images of the slots. None if the environment draws none."""

    def close(self) -> None:
        """Free all slots and their processes."""
