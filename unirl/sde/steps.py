"""Step choices: which denoising steps are stochastic and trained, as pure functions of the step of the loop.

`choose` returns sorted step numbers within [0, T - 2]. The last step is never trained, since its noise would stay in
the image. The key of a random choice has no sample id, so all samples of a group and all ranks share the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from unirl.sde.noise import key_seed
from unirl.types.protocols import StepChoice


def choice_random(seed: int, step: int) -> Random:
    """The generator for the choice at one step of the loop."""
    return Random(key_seed(seed, f"r{step}:sde"))


def trainable_pool(owner: str, num_inference_steps: int, low: float, high: float, count: int) -> range:
    """The steps [int(T low), int(T high)) except the last, T - 1. Raises ValueError if fewer than `count`."""
    pool = range(int(num_inference_steps * low), min(int(num_inference_steps * high), num_inference_steps - 1))
    if len(pool) < count:
        raise ValueError(
            f"{owner} needs {count} of the steps in the range [{low:g}, {high:g}) of num_inference_steps="
            f"{num_inference_steps}, which has {len(pool)} (the last step is never trained). "
            "Use fewer steps, a wider range, or a larger num_inference_steps"
        )
    return pool


def check_at_least(minimum: int, choice: StepChoice, *fields: str) -> None:
    """Raises ValueError unless each of the `fields` of `choice` is >= minimum."""
    for name in fields:
        if vars(choice)[name] < minimum:
            raise ValueError(f"{type(choice).__name__}.{name}={vars(choice)[name]} must be >= {minimum}")


@dataclass(frozen=True, kw_only=True)
class AllSteps:
    """Every step except the last, as in Flow-GRPO, arXiv:2505.05470."""

    def choose(self, step: int, num_inference_steps: int, seed: int) -> tuple[int, ...]:
        """(0, ..., T - 2)."""
        return tuple(trainable_pool("AllSteps", num_inference_steps, 0.0, 1.0, 1))


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """Recipe keys of a choice from a range of the trajectory."""

    low: float = 0.0
    """Start of the range, as a fraction of T."""
    high: float = 0.5
    """End of the range (exclusive), as a fraction of T."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low < self.high <= 1.0:
            raise ValueError(
                f"{type(self).__name__}: low={self.low:g} and high={self.high:g} must satisfy 0 <= low < high <= 1 "
                "(fractions of T)"
            )

    def pool(self, num_inference_steps: int, count: int) -> range:
        """The steps of the range that may be trained. Raises ValueError if fewer than `count`."""
        return trainable_pool(type(self).__name__, num_inference_steps, self.low, self.high, count)


@dataclass(frozen=True, kw_only=True)
class FractionSteps(StepRange):
    """`num_steps` distinct random steps from a range of the trajectory, chosen again at each step of the loop."""

    toy: ClassVar[Mapping[str, object]] = {"num_steps": 2}

    num_steps: int | None = 3
    """Number of steps; null = all steps of the range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps is not None:
            check_at_least(1, self, "num_steps")

    def choose(self, step: int, num_inference_steps: int, seed: int) -> tuple[int, ...]:
        """Sorted steps within [int(T low), int(T high)) and [0, T - 2]."""
        pool = self.pool(num_inference_steps, self.num_steps or 1)
        if self.num_steps is None:
            return tuple(pool)
        return tuple(sorted(choice_random(seed, step).sample(pool, self.num_steps)))


@dataclass(frozen=True, kw_only=True)
class EquallySpacedSteps:
    """`num_steps` equally spaced steps with a random first one: DRTune, arXiv:2405.00760.

    The spacing is floor(n / num_steps), where n is the number of steps that may be trained. All of them are chosen
    equally often if `num_steps` divides n.
    """

    toy: ClassVar[Mapping[str, object]] = {"num_steps": 2}

    num_steps: int = 5
    """Number of steps."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_steps")

    def choose(self, step: int, num_inference_steps: int, seed: int) -> tuple[int, ...]:
        """(first, first + interval, ...) within [0, T - 2]."""
        pool = trainable_pool("EquallySpacedSteps", num_inference_steps, 0.0, 1.0, self.num_steps)
        interval = len(pool) // self.num_steps
        span = (self.num_steps - 1) * interval
        first = choice_random(seed, step).randrange(len(pool) - span)
        return tuple(range(first, first + span + 1, interval))


@dataclass(frozen=True, kw_only=True)
class LastSteps:
    """The last `num_steps` of the steps that may be trained."""

    toy: ClassVar[Mapping[str, object]] = {"num_steps": 1}

    num_steps: int = 1
    """Number of steps."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_steps")

    def choose(self, step: int, num_inference_steps: int, seed: int) -> tuple[int, ...]:
        """(T - 1 - num_steps, ..., T - 2), for any seed and step."""
        return tuple(trainable_pool("LastSteps", num_inference_steps, 0.0, 1.0, self.num_steps)[-self.num_steps :])


@dataclass(frozen=True, kw_only=True)
class ListedSteps:
    """The same steps in each step of the loop, at some fractions of the trajectory."""

    at: tuple[float, ...]
    """Fractions of T in order: 0.3 is step 3 of 10."""

    def __post_init__(self) -> None:
        if not self.at or list(self.at) != sorted(set(self.at)) or not 0.0 <= self.at[0] <= self.at[-1] < 1.0:
            raise ValueError(f"ListedSteps.at must be rising fractions of T within [0, 1), got {list(self.at)}")

    def choose(self, step: int, num_inference_steps: int, seed: int) -> tuple[int, ...]:
        """int(T f) of each fraction f. Raises ValueError if two of them are equal, or if one is the last step."""
        chosen = tuple(int(num_inference_steps * fraction + 1e-9) for fraction in self.at)  # 0.29 * 100 is below 29
        if len(set(chosen)) < len(chosen) or chosen[-1] > num_inference_steps - 2:
            raise ValueError(
                f"ListedSteps.at={list(self.at)} gives the steps {list(chosen)} of num_inference_steps="
                f"{num_inference_steps}, which must differ and come before the last. Use other fractions, or more steps"
            )
        return chosen


@dataclass(frozen=True, kw_only=True)
class RandomTail(StepRange):
    """All steps from a random first one, which lies in the range, to the end: AlignProp, arXiv:2310.03739."""

    high: float = 1.0

    def choose(self, step: int, num_inference_steps: int, seed: int) -> tuple[int, ...]:
        """(first, ..., T - 2), first within [int(T low), int(T high))."""
        pool = self.pool(num_inference_steps, 1)
        return tuple(range(choice_random(seed, step).choice(pool), num_inference_steps - 1))


@dataclass(frozen=True, kw_only=True)
class RandomWindow(StepRange):
    """`size` adjacent steps at a random position in a range of the trajectory: Flow-GRPO-Fast."""

    toy: ClassVar[Mapping[str, object]] = {"size": 2}

    size: int = 3
    """Number of steps in the window."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "size")

    def choose(self, step: int, num_inference_steps: int, seed: int) -> tuple[int, ...]:
        """(start, ..., start + size - 1) within [int(T low), int(T high)) and [0, T - 2]."""
        pool = self.pool(num_inference_steps, self.size)
        start = choice_random(seed, step).randrange(pool.start, pool.stop - self.size + 1)
        return tuple(range(start, start + self.size))


@dataclass(frozen=True, kw_only=True)
class ProgressiveWindow:
    """A window that moves from noise to image during training: MixGRPO, arXiv:2507.21802.

    Only full windows are used: the left edges are start, start + stride, ... up to T - size. A window that contains the
    last step T - 1 is trained without it, so it has size - 1 steps; a window of size 1 stops at T - 2.
    """

    toy: ClassVar[Mapping[str, object]] = {"size": 2, "iters_per_window": 1, "stride": 1}

    size: int = 4
    """Number of steps in the window."""
    iters_per_window: int = 25
    """Number of steps of the loop before the window moves."""
    stride: int = 1
    """Number of denoising steps that it moves by; `size` = no overlap, 0 = it does not move."""
    start: int = 0
    """Left edge of the first window."""
    roll_back: bool = True
    """After the last window, start again (true) or stay there (false)."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "size", "iters_per_window")
        check_at_least(0, self, "stride", "start")

    def choose(self, step: int, num_inference_steps: int, seed: int) -> tuple[int, ...]:
        """(left, ..., left + size - 1) within [0, T - 2], for any seed."""
        num_windows = self._num_windows(num_inference_steps)
        moves = step // self.iters_per_window
        moves = moves % num_windows if self.roll_back else min(moves, num_windows - 1)
        left = self.start + moves * self.stride
        return tuple(range(left, min(left + self.size, num_inference_steps - 1)))

    def _num_windows(self, num_inference_steps: int) -> int:
        last_left = min(num_inference_steps - self.size, num_inference_steps - 2)
        if last_left < self.start:
            raise ValueError(
                f"ProgressiveWindow: a window of size={self.size} from start={self.start} does not fit into "
                f"num_inference_steps={num_inference_steps} (the last step is never trained). "
                "Use a smaller window, an earlier start, or more inference steps"
            )
        return (last_left - self.start) // self.stride + 1 if self.stride else 1
