"""The errors that a user can fix: one class per code, grouped by the exit status of the process.

    2 UsageError, ConfigError    5 ResourceError      8 StallError             75 Preempted
    3 DependencyError            6 RewardError        9 DivergenceError        130 Interrupted
    4 DataError                  7 CheckpointError    10 WorkerError

A message names the thing, its value, the rule and the way out. The command line prints `report(error)` without a
traceback.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import ClassVar, Self, TypeVar

ErrorT = TypeVar("ErrorT", bound="UniRLError")


class UniRLError(ValueError):
    """Something that a user can fix. `str(error)` is the message; each code has a subclass."""

    code: ClassVar[int] = 1001
    exit_status: ClassVar[int] = 1

    @classmethod
    def of_code(cls, code: int) -> type[Self]:
        """The subclass with this code, for errors that arrive as data; this class where there is none."""
        kinds = {kind.code: kind for kind in (*_below(cls), cls)}
        return kinds.get(code, cls)


def _below(kind: type[ErrorT]) -> Iterator[type[ErrorT]]:
    """Every class below `kind`, the deepest first."""
    for child in kind.__subclasses__():
        yield from _below(child)
        yield child


# 2: usage and configuration


class UsageError(UniRLError):
    """The command line names something that does not exist (a recipe, a command, an option)."""

    code = 2001
    exit_status = 2


class ArgumentError(UsageError):
    """The arguments of a command are missing, unknown, or contradict each other."""

    code = 2002


class ConfigError(UsageError):
    """The recipe, with its overrides, breaks a rule: an unknown or a missing key, where no class below says more."""

    code = 2003


class UnknownKeyError(ConfigError):
    """A key that the class of its block does not have."""

    def __init__(self, message: str, path: str = "", hinted: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.hinted = hinted
        """True if the message already says what to write instead."""


class InvalidValueError(ConfigError):
    """A value of the wrong type or outside its range, or text that cannot be read as YAML."""

    code = 2004


class BlockValueError(ConfigError):
    """A single value in place of a block of keys."""

    code = 2005


class GeometryError(ConfigError):
    """Counts of prompts, samples, updates or devices that do not divide."""

    code = 2010


class IncompatibleError(ConfigError):
    """Settings or parts that cannot work together."""

    code = 2020


class UnsafeTargetError(ConfigError):
    """A `_target_` or a plugin that a recipe may not name."""

    code = 2030


class ExposedServerError(UsageError):
    """A server that would listen beyond this machine without a token."""

    code = 2040


# 3: environment


class DependencyError(UniRLError):
    """A package, extra or device that this run needs is missing."""

    code = 3001
    exit_status = 3


class UnsupportedEnvironmentError(DependencyError):
    """A library is too old, or cannot work where it is installed."""

    code = 3002


class AddressError(DependencyError):
    """Nothing answers at an address, or it is taken."""

    code = 3003


# 4: data and models


class DataError(UniRLError):
    """Data or a model is invalid."""

    code = 4002
    exit_status = 4


class NotFoundError(DataError):
    """Data or a model is not where it should be."""

    code = 4001


class UnreadableFileError(DataError):
    """A media file cannot be read."""

    code = 4003


# 5: resources


class ResourceError(UniRLError):
    """Not enough memory, devices or disk."""

    code = 5001
    exit_status = 5


# 6: rewards


class RewardError(UniRLError):
    """A reward failed, and its failure budget is used up."""

    code = 6002
    exit_status = 6


class RewardUnreachableError(RewardError):
    """A reward service or judge does not answer."""

    code = 6001


class InvalidScoreError(RewardError):
    """A score that is not finite, or scores from which nothing can be learned."""

    code = 6003


# 7: checkpoints


class CheckpointError(UniRLError):
    """A checkpoint is damaged or unusable."""

    code = 7001
    exit_status = 7


class ResumeError(CheckpointError):
    """A checkpoint that does not belong to the run that would continue it."""

    code = 7002


class StorageError(CheckpointError):
    """The storage of checkpoints cannot be used: no space, no lock, no right to write."""

    code = 7003


# 8 to 10: while a run is under way


class StallError(UniRLError):
    """A wait went past its deadline."""

    code = 8001
    exit_status = 8


class DivergenceError(UniRLError):
    """Training is no longer finite."""

    code = 9001
    exit_status = 9


class ParityError(DivergenceError):
    """The engine that sampled and the trainer that replays compute different log-probabilities."""

    code = 9002


class NoImprovementError(DivergenceError):
    """A quick start, as it is shipped, did not improve as it promises."""

    code = 9003


class WorkerError(UniRLError):
    """A worker was lost."""

    code = 10001
    exit_status = 10


class SyncError(WorkerError):
    """Weights that an engine should sample from did not arrive as they were sent."""

    code = 10002


# Stopped early, with a checkpoint


class Preempted(UniRLError):
    """Stopped early with a checkpoint saved: please requeue."""

    code = 75
    exit_status = 75


class Interrupted(UniRLError):
    """Stopped by the user (Ctrl-C) with a checkpoint saved."""

    code = 130
    exit_status = 130


def report(error: UniRLError) -> str:
    """The line that the command line prints: `error[2010]: <message>`."""
    return f"error[{error.code}]: {error}"


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """The `count` choices that look most like `word`, best first (case and separators do not matter)."""

    def likeness(choice: str) -> float:
        a, b = word.lower().replace("-", "_"), choice.lower().replace("-", "_")
        return SequenceMatcher(None, a, b).ratio() + (0.3 if sorted(a) == sorted(b) else 0.0)

    return sorted(dict.fromkeys(choices), key=lambda choice: (-likeness(choice), choice))[:count]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'learning_rate'?"` with a leading blank, or "" if no choice looks like `word`."""
    best = nearest(word, choices, 1)
    close = best and SequenceMatcher(None, word.lower(), best[0].lower()).ratio() >= 0.6
    return f" Did you mean '{best[0]}'?" if close else ""
