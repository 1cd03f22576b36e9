"""Checkpoints that a crash, a full disk or a flipped bit cannot lose.

    stage into a hidden sibling -> fsync every file -> MANIFEST.json -> one rename -> LATEST by rename -> prune

A reader sees a checkpoint whole or not at all; a damaged one is recognised before anything in it is deserialised.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unirl.config.errors import CheckpointError, StorageError
from unirl.train.backend.manifest import DamagedManifest, fsync, problems, read_manifest, seal

FINAL = "checkpoint-final"
LATEST = "LATEST"
LOCK = ".lock-"
NUMBERED = re.compile(r"(?:checkpoint-|global_step_)(\d+)")
OWN = re.compile(r"checkpoint-\d+")
REPLACED = re.compile(r"(?P<name>checkpoint-.+)\.replaced-(?P<id>[0-9a-f]+)")
STAGING = re.compile(r"\.staging-.+-(?P<id>[0-9a-f]+)")
UNLOCKABLE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
LEFTOVER_AGE_S = 3600.0
"""Where a file system knows no locks, a leftover is collected at this age."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder that holds the state after `step` steps of the loop."""

    path: Path
    step: int


@dataclass(frozen=True)
class Skipped:
    """A newer checkpoint that was not used, and why."""

    path: Path
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path.name} was skipped: {'; '.join(self.problems)}"


@dataclass(frozen=True)
class LatestValid:
    """The newest checkpoint that verifies (None if there is none), and every newer one that does not."""

    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...]


class CheckpointStore:
    """The `checkpoints` folder of one run. One process saves at a time; any number may read."""

    def __init__(self, directory: str | Path, *, keep: int = 3) -> None:
        """`keep`: how many numbered checkpoints remain after a save (0: all); `checkpoint-final` is not counted."""
        if keep < 0:
            raise ValueError(f"keep must be >= 0 (0 keeps all), got {keep}")
        self.directory = Path(directory)
        self.keep = keep

    @contextmanager
    def stage(self, step: int, *, final: bool = False) -> Iterator[Path]:
        """A folder to write into; leaving the block publishes it as `checkpoint-<step>` (or `checkpoint-final`).

        An error inside the block, or while publishing, leaves every published checkpoint as it was.
        """
        name = FINAL if final else checkpoint_name(step)
        published = False
        try:
            self._prepare()
            with self._staging_folder(name) as (folder, token):
                yield folder
                seal(folder, step)
                replaced = self._publish(folder, name, token)
                published = True
                fsync(self.directory)
                self._point_latest(name)
            for path in replaced:
                self._remove(path)
            self.prune(self.directory / name)
        except OSError as error:
            raise self._storage_error(name, published, error) from error
        except Exception as error:
            # Libraries that write tensors report a full disk by exception types of their own.
            if os.strerror(errno.ENOSPC) not in str(error):
                raise
            raise self._storage_error(name, published, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) from error

    def latest_valid(self) -> LatestValid:
        """The newest checkpoint whose files are exactly those that were written; reads only, loads nothing."""
        skipped: list[Skipped] = []
        for candidate in self.checkpoints():
            found = verify(candidate.path)
            if not found:
                return LatestValid(candidate, tuple(skipped))
            skipped.append(Skipped(candidate.path, tuple(found)))
        return LatestValid(None, tuple(skipped))

    def checkpoints(self) -> list[Checkpoint]:
        """Everything that looks like a checkpoint, newest step first, valid or not."""
        if not self.directory.is_dir():
            return []
        found = [checkpoint for path in self.directory.iterdir() if (checkpoint := _recognise(path))]
        return sorted(found, key=lambda checkpoint: (-checkpoint.step, len(checkpoint.path.name), checkpoint.path.name))

    def verify(self, path: str | Path) -> list[str]:
        """See the function of the same name."""
        return verify(path)

    def discard_after(self, step: int) -> list[Path]:
        """Removes valid checkpoints of later steps: a run that resumes from `step` has another future.

        Damaged ones stay as they are: nothing resumes from them, and the run replaces them when it gets there again.
        """
        later = [checkpoint for checkpoint in self.checkpoints() if checkpoint.step > step]
        doomed = [checkpoint.path for checkpoint in later if self._is_own(checkpoint.path) and _is_valid(checkpoint)]
        for path in doomed:
            self._remove(path)
        remaining = [checkpoint for checkpoint in self.checkpoints() if checkpoint not in later]
        if doomed and remaining:
            self._point_latest(remaining[0].path.name)
        return doomed

    def prune(self, published: Path | None = None) -> list[Checkpoint]:
        """Removes what `beyond_keep` names, and gives it back."""
        doomed = self.beyond_keep(published)
        for checkpoint in doomed:
            self._remove(checkpoint.path)
        return doomed

    def beyond_keep(self, published: Path | None = None) -> list[Checkpoint]:
        """The oldest numbered checkpoints beyond `keep`, sparing the newest valid one and the one just `published`."""
        everything = self.checkpoints()
        numbered = [checkpoint for checkpoint in everything if OWN.fullmatch(checkpoint.path.name)]
        kept_count = self.keep or len(numbered)
        doomed = [checkpoint for checkpoint in numbered[kept_count:] if checkpoint.path != published]
        kept = [checkpoint for checkpoint in everything if checkpoint not in doomed]
        if doomed and not any(_is_valid(checkpoint) for checkpoint in kept):
            spared = next((checkpoint for checkpoint in doomed if _is_valid(checkpoint)), None)
            doomed = [checkpoint for checkpoint in doomed if checkpoint is not spared]
        return doomed

    def collect(self) -> list[Path]:
        """Clears what dead processes left half done; never touches what a live one is writing."""
        if not self.directory.is_dir():
            return []
        leftovers = [path for path in sorted(self.directory.iterdir()) if self._is_leftover(path)]
        for path in leftovers:
            self._settle(path)
        return leftovers

    def _prepare(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True)
            fsync(self.directory.parent)
        self.collect()
        if shutil.disk_usage(self.directory).free < self._last_size():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def _staging_folder(self, name: str) -> Iterator[tuple[Path, str]]:
        descriptor, lock = self._new_lock()
        token = lock.name.removeprefix(LOCK)
        folder = self.directory / f".staging-{name}-{token}"
        try:
            os.mkdir(folder)
            yield folder, token
        finally:
            # What cannot be removed now is collected by the next save.
            shutil.rmtree(folder, ignore_errors=True)
            try:
                lock.unlink(missing_ok=True)
            finally:
                os.close(descriptor)

    def _new_lock(self) -> tuple[int, Path]:
        """A file that is locked for as long as this process lives."""
        while True:
            lock = self.directory / f"{LOCK}{uuid.uuid4().hex[:12]}"
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in UNLOCKABLE:
                    os.close(descriptor)
                    raise
            # Between the two calls a collector may have taken it for a dead process's file.
            if lock.exists():
                return descriptor, lock
            os.close(descriptor)

    def _publish(self, folder: Path, name: str, token: str) -> list[Path]:
        """Renames `folder` to `name`; gives back the older folder of that name, moved aside, if there was one."""
        target = self.directory / name
        aside = self.directory / f"{name}.replaced-{token}"
        replaced = [aside] if target.exists() else []
        if replaced:
            os.rename(target, aside)
        try:
            os.rename(folder, target)
        except OSError:
            if replaced:
                os.rename(aside, target)
            raise
        return replaced

    def _point_latest(self, name: str) -> None:
        pointer = self.directory / f".{LATEST}.tmp"
        with open(pointer, "w", encoding="ascii") as file:
            file.write(name + "\n")
        fsync(pointer)
        os.replace(pointer, self.directory / LATEST)
        fsync(self.directory)

    def _remove(self, path: Path) -> None:
        # Renamed first: a crash halfway through leaves no folder that looks like a damaged checkpoint.
        doomed = self.directory / f".removing-{path.name}-{uuid.uuid4().hex[:12]}"
        os.rename(path, doomed)
        shutil.rmtree(doomed)

    def _is_own(self, path: Path) -> bool:
        """Whether this store wrote it: a checkpoint, or one that a dead save moved aside."""
        return path.name == FINAL or bool(OWN.fullmatch(path.name)) or self._is_leftover(path)

    def _is_leftover(self, path: Path) -> bool:
        match = STAGING.fullmatch(path.name) or REPLACED.fullmatch(path.name)
        if match:
            return _is_abandoned(self.directory / f"{LOCK}{match['id']}")
        if path.name.startswith(LOCK):
            return _is_abandoned(path)
        return path.name.startswith(".removing-")

    def _settle(self, path: Path) -> None:
        replaced = REPLACED.fullmatch(path.name)
        successor = self.directory / replaced["name"] if replaced else None
        if successor is not None and (not successor.exists() or (verify(successor) and not verify(path))):
            # The save that moved it aside died before its successor was published, or the successor is damaged.
            if successor.exists():
                self._remove(successor)
            os.rename(path, successor)
        elif path.name.startswith(LOCK):
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)

    def _last_size(self) -> int:
        """Bytes of the newest checkpoint with a readable manifest: the best guess of what the next one needs."""
        for checkpoint in self.checkpoints():
            try:
                return read_manifest(checkpoint.path).size
            except DamagedManifest:
                continue
        return 0

    def _storage_error(self, name: str, published: bool, error: OSError) -> CheckpointError:
        if published:
            return StorageError(
                f"{name} is saved and valid in {self.directory}, but finishing the save failed: {error}. "
                "Fix the disk, then continue with resume=auto"
            )
        others = [checkpoint for checkpoint in self.checkpoints() if checkpoint.path.name != name]
        kept = f"{others[0].path.name} is untouched" if others else "there was no earlier checkpoint"
        return StorageError(
            f"{name} could not be saved in {self.directory}: {error.strerror or error}. {self._space()}. "
            f"Nothing half-written was left and {kept}. Free space there or set run.dir to another disk, "
            "then continue with resume=auto"
        )

    def _space(self) -> str:
        place = next(folder for folder in (self.directory, *self.directory.absolute().parents) if folder.exists())
        free, needed = shutil.disk_usage(place).free, self._last_size()
        wanted = f"about {_megabytes(needed)} (as the last checkpoint)" if needed else "unknown (the first checkpoint)"
        return f"Needed: {wanted}; free: {_megabytes(free)}"


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint after `step` steps."""
    return f"checkpoint-{step:06d}"


def verify(path: str | Path) -> list[str]:
    """What is wrong with the checkpoint folder `path`, in plain words; empty when every byte is as written."""
    folder = Path(path)
    if not folder.is_dir():
        return ["it is not a folder"]
    found = problems(folder)
    numbered = NUMBERED.match(folder.name)
    if not found and numbered and int(numbered[1]) != (step := read_manifest(folder).step):
        found = [f"the folder's name says step {int(numbered[1])} but its manifest says step {step}: was it renamed?"]
    return found


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint that `resume=<path>` means: a checkpoint folder, a run folder, or a folder of checkpoints.

    Folders named `global_step_<N>` are ordered like our own. Raises CheckpointError (7001) when nothing there verifies.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"resume={path}: there is no such folder. Give a checkpoint, or the folder of a run")
    named = _recognise(folder)
    if named:
        return _valid_or_explain(named)
    store = CheckpointStore(folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder)
    latest = store.latest_valid()
    if latest.checkpoint:
        return latest.checkpoint
    reasons = "".join(f"\n  {skipped}" for skipped in latest.skipped) or " (no checkpoint-<N> or global_step_<N> in it)"
    raise CheckpointError(f"resume={path}: no valid checkpoint there{reasons}")


def _valid_or_explain(checkpoint: Checkpoint) -> Checkpoint:
    found = verify(checkpoint.path)
    if not found:
        return checkpoint
    other = CheckpointStore(checkpoint.path.parent).latest_valid().checkpoint
    way_out = f"The newest valid one beside it is {other.path}" if other else "No other checkpoint beside it is valid"
    listed = "".join(f"\n  {problem}" for problem in found)
    raise CheckpointError(f"resume={checkpoint.path}: the checkpoint is damaged or incomplete:{listed}\n  {way_out}")


def _recognise(path: Path) -> Checkpoint | None:
    replaced = REPLACED.fullmatch(path.name)
    name = replaced["name"] if replaced else path.name
    numbered = NUMBERED.fullmatch(name)
    if not path.is_dir() or not (numbered or name == FINAL):
        return None
    return Checkpoint(path, int(numbered[1]) if numbered else _final_step(path))


def _final_step(path: Path) -> int:
    """The step of `checkpoint-final`; one that cannot be read sorts first, so that it is reported."""
    try:
        return read_manifest(path).step
    except DamagedManifest:
        return 2**63


def _is_valid(checkpoint: Checkpoint) -> bool:
    return not verify(checkpoint.path)


def _is_abandoned(lock: Path) -> bool:
    """True when the process that made `lock` is gone: the system releases the lock of a dead process at once."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNLOCKABLE:
            raise
        return time.time() - os.fstat(descriptor).st_mtime > LEFTOVER_AGE_S
    finally:
        os.close(descriptor)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
