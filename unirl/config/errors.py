"""The errors that a user can fix: one class per code, grouped by the exit status of the process.

    2 UsageError, ConfigError    5 ResourceError      8 StallError             75 Preempted
    3 DependencyError            6 RewardError        9 DivergenceError        130 Interrupted
    4 DataError                  7 CheckpointError    10 WorkerError

A message names the thing, its value, the rule and the way out. The command line prints `report(error)` without a
traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import ClassVar, Self


class UniRLError(ValueError):
    """Something that a user can fix. `str(error)` is the message; each code has a subclass."""

    code: ClassVar[int] = 1001
    exit_status: ClassVar[int] = 1

    def __init_subclass__(cls, code: int | None = None, exit_status: int | None = None) -> None:
        super().__init_subclass__()
        cls.code = cls.code if code is None else code
        cls.exit_status = cls.exit_status if exit_status is None else exit_status

    @classmethod
    def of_code(cls, code: int) -> type[Self]:
        """The subclass with this code, for errors that arrive as data; this class where there is none."""
        if cls.code == code:
            return cls
        kinds = (child.of_code(code) for child in cls.__subclasses__())
        return next((kind for kind in kinds if kind.code == code), cls)


# 2: usage and configuration


class UsageError(UniRLError, code=2001, exit_status=2):
    """The command line names something that does not exist (a recipe, a command, an option)."""


class ArgumentError(UsageError, code=2002):
    """The arguments of a command are missing, unknown, or contradict each other."""


class ConfigError(UsageError, code=2003):
    """The recipe, with its overrides, breaks a rule: an unknown or a missing key, where no class below says more."""


class UnknownKeyError(ConfigError):
    """A key that the class of its block does not have."""

    def __init__(self, message: str, path: str = "", hinted: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.hinted = hinted
        """True if the message already says what to write instead."""


class InvalidValueError(ConfigError, code=2004):
    """A value of the wrong type or outside its range, or text that cannot be read as YAML."""


class BlockValueError(ConfigError, code=2005):
    """A single value in place of a block of keys."""


class GeometryError(ConfigError, code=2010):
    """Counts of prompts, samples, updates or devices that do not divide."""


class IncompatibleError(ConfigError, code=2020):
    """Settings or parts that cannot work together."""


class UnsafeTargetError(ConfigError, code=2030):
    """A `_target_` or a plugin that a recipe may not name."""


class PluginError(ConfigError, code=2031):
    """A class of a plugin raised an exception, or breaks its contract."""


class ExposedServerError(UsageError, code=2040):
    """A server that would listen beyond this machine without a token."""


# 3: environment


class DependencyError(UniRLError, code=3001, exit_status=3):
    """A package, extra or device that this run needs is missing."""


class UnsupportedEnvironmentError(DependencyError, code=3002):
    """A library is too old, or cannot work where it is installed."""


class AddressError(DependencyError, code=3003):
    """Nothing answers at an address, it is taken, or it refuses."""


# 4: data and models


class DataError(UniRLError, code=4002, exit_status=4):
    """Data or a model is invalid."""


class NotFoundError(DataError, code=4001):
    """Data or a model is not where it should be."""


class UnreadableFileError(DataError, code=4003):
    """A media file cannot be read."""


# 5: resources


class ResourceError(UniRLError, code=5001, exit_status=5):
    """Not enough memory, devices or disk."""


class MemoryShortageError(UniRLError, code=5002, exit_status=5):
    """A device or the host ran out of memory in a phase of a run."""


# 6: rewards


class RewardError(UniRLError, code=6002, exit_status=6):
    """A reward failed, and its failure budget is used up."""


class RewardUnreachableError(RewardError, code=6001):
    """A reward service or judge does not answer."""


class InvalidScoreError(RewardError, code=6003):
    """A score that is not finite, or scores from which nothing can be learned."""


# 7: checkpoints


class CheckpointError(UniRLError, code=7001, exit_status=7):
    """A checkpoint is damaged or unusable."""


class ResumeError(CheckpointError, code=7002):
    """A checkpoint that does not belong to the run that would continue it."""


class StorageError(CheckpointError, code=7003):
    """The storage of checkpoints cannot be used: no space, no lock, no right to write."""


# 8 to 10: while a run is under way


class StallError(UniRLError, code=8001, exit_status=8):
    """A wait went past its deadline."""


class DivergenceError(UniRLError, code=9001, exit_status=9):
    """Training is no longer finite."""


class RewriteError(DivergenceError, code=9004):
    """The responses of a prompt enhancer hold no rewrites."""


class ParityError(DivergenceError, code=9002):
    """The engine that sampled and the trainer that replays compute different log-probabilities."""


class NoImprovementError(DivergenceError, code=9003):
    """A quick start, as it is shipped, did not improve as it promises."""


class AlarmError(DivergenceError, code=9005):
    """An alarm about the run began, and the recipe ends it then (`watch.on_alarm`)."""


class ReplayError(DivergenceError, code=9006):
    """A step that was repeated has other samples or metrics than those that the run recorded."""


class BenchmarkError(DivergenceError, code=9007):
    """A run of a benchmark failed, or two reports cannot be compared."""


class WorkerError(UniRLError, code=10001, exit_status=10):
    """A worker was lost."""


class LostWorkerError(WorkerError):
    """The process of a worker, or its machine, is gone. A run may start again (`restarts`)."""


class RendezvousError(WorkerError, code=10003):
    """Ranks could not find each other or connect."""

    def __init__(self, message: str, is_consequence: bool = False) -> None:
        super().__init__(message)
        self.is_consequence = is_consequence
        """True if it only says that another rank did not come."""


class SyncError(WorkerError, code=10002):
    """Weights that an engine should sample from did not arrive as they were sent."""


class WeightsLostError(SyncError, code=10005):
    """A server was restarted without the weights that it had. The driver sends them again and repeats the samples."""


class EngineError(WorkerError, code=10004):
    """The server of an engine ended, or its answer breaks the contract of an engine."""


class SamplingMismatchError(EngineError, code=10006):
    """A server sampled with other settings than those of the request: noise levels, guidance, or stochastic steps."""


class EpisodeError(WorkerError, code=10007):
    """Environments fail so often that no episodes are left to train on."""


# Stopped early, with a checkpoint


class Preempted(UniRLError, code=75, exit_status=75):
    """Stopped early with a checkpoint saved: please requeue."""


class StoppedAtStart(BaseException):
    """A stop signal came while no step ran. As with KeyboardInterrupt, no library takes it for an error of its own."""

    def __init__(self, signal: str) -> None:
        super().__init__(f"{signal}: stopped while no step was running. Nothing is lost: start the same command again")


class Interrupted(UniRLError, code=130, exit_status=130):
    """Stopped by the user (Ctrl-C) with a checkpoint saved."""


def report(error: UniRLError) -> str:
    """The line that the command line prints: `error[2010]: <message>`."""
    return f"error[{error.code}]: {error}"


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """The `count` choices that look most like `word`, best first (case and separators do not matter)."""
    return sorted(dict.fromkeys(choices), key=lambda choice: (-likeness(word, choice), choice))[:count]


def likeness(word: str, choice: str) -> float:
    """Similarity of two words, from 0 to 1; 0.3 is added if they consist of the same letters in another order."""
    a, b = word.lower().replace("-", "_"), choice.lower().replace("-", "_")
    return SequenceMatcher(None, a, b).ratio() + (0.3 if sorted(a) == sorted(b) else 0.0)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'learning_rate'?"` with a leading blank, or "" if no choice looks like `word`."""
    best = nearest(word, choices, 1)
    close = best and SequenceMatcher(None, word.lower(), best[0].lower()).ratio() >= 0.6
    return f" Did you mean '{best[0]}'?" if close else ""
