"""The errors a user can fix: each has a code of the catalogue and the exit status of the process.

    UniRLError
      UsageError 2 (ConfigError)  DependencyError 3   DataError 4        ResourceError 5    RewardError 6
      CheckpointError 7            StallError 8        DivergenceError 9  WorkerError 10 (SyncError)
      Preempted 75
      Interrupted 130

A message names the thing, its value, the rule and the way out; the command line prints
`report(error)` and no traceback.
"""

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import ClassVar


class UniRLError(ValueError):
    """What a user can fix. `str(error)` is the message; `error.code` and `error.exit_status` classify it."""

    default_code: ClassVar[int] = 1001
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = self.default_code if code is None else code


class UsageError(UniRLError):
    """The command line asks for something that does not exist (unknown recipe, command or option)."""

    default_code = 2001
    exit_status = 2


class ConfigError(UsageError):
    """The recipe, with its overrides, breaks a rule."""

    default_code = 2003


class UnknownKeyError(ConfigError):
    """A key that the class at its place does not have."""

    def __init__(self, message: str, path: str = "", hinted: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.hinted = hinted
        """Whether the message already says what to write instead."""


class DependencyError(UniRLError):
    """A package, extra or device that this run needs is missing."""

    default_code = 3001
    exit_status = 3


class DataError(UniRLError):
    """Data or a model is not found or invalid."""

    default_code = 4002
    exit_status = 4


class ResourceError(UniRLError):
    """Not enough memory, devices or disk."""

    default_code = 5001
    exit_status = 5


class RewardError(UniRLError):
    """A reward failed, and its budget is spent."""

    default_code = 6002
    exit_status = 6


class CheckpointError(UniRLError):
    """A checkpoint or its storage is unusable."""

    default_code = 7001
    exit_status = 7


class StallError(UniRLError):
    """Something that was waited for did not come before its deadline."""

    default_code = 8001
    exit_status = 8


class DivergenceError(UniRLError):
    """Training is no longer finite."""

    default_code = 9001
    exit_status = 9


class WorkerError(UniRLError):
    """A worker was lost."""

    default_code = 10001
    exit_status = 10


class SyncError(WorkerError):
    """Weights that an engine should sample from did not arrive as they were sent."""

    default_code = 10002


class Preempted(UniRLError):
    """Stopped early with a checkpoint saved: please requeue."""

    default_code = 75
    exit_status = 75


class Interrupted(UniRLError):
    """Stopped by the user (Ctrl-C) with a checkpoint saved."""

    default_code = 130
    exit_status = 130


def report(error: UniRLError) -> str:
    """What the command line prints: `error[2010]: <message>`."""
    return f"error[{error.code}]: {error}"


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """The `count` choices that look most like `word`, best first (case and separators do not matter)."""

    def likeness(choice: str) -> float:
        a, b = word.lower().replace("-", "_"), choice.lower().replace("-", "_")
        return SequenceMatcher(None, a, b).ratio() + (0.3 if sorted(a) == sorted(b) else 0.0)

    return sorted(dict.fromkeys(choices), key=lambda choice: (-likeness(choice), choice))[:count]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'learning_rate'?"` (with a leading blank), or "" when no choice looks like `word`."""
    best = nearest(word, choices, 1)
    close = best and SequenceMatcher(None, word.lower(), best[0].lower()).ratio() >= 0.6
    return f" Did you mean '{best[0]}'?" if close else ""
