"""Saves and finds checkpoints so that a crash, a full disk or a flipped bit cannot lose them.

    write into a hidden folder -> fsync every file -> MANIFEST.json -> one rename -> LATEST by rename -> prune

A reader sees a whole checkpoint or none. A damaged checkpoint is detected before anything in it is deserialised.
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
"""On a file system without locks, an unfinished file or folder is removed when it is older than this."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder that holds the state after `step` training steps."""

    path: Path
    step: int


@dataclass(frozen=True)
class Skipped:
    """A newer checkpoint that was not used, and the reasons."""

    path: Path
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path.name} was skipped: {'; '.join(self.problems)}"


@dataclass(frozen=True)
class LatestValid:
    """The newest valid checkpoint (None if there is none), and the newer ones that are damaged."""

    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...]


class CheckpointStore:
    """The `checkpoints` folder of one run. Only one process may save at a time. Any number of processes may read."""

    def __init__(self, directory: str | Path, *, keep: int = 3) -> None:
        """
        Args:
            keep: number of numbered checkpoints that remain after a save (0 keeps all). `checkpoint-final` does not
                count.
        """
        if keep < 0:
            raise ValueError(f"keep must be >= 0 (0 keeps all), got {keep}")
        self.directory = Path(directory)
        self.keep = keep

    @contextmanager
    def stage(self, step: int, *, final: bool = False) -> Iterator[Path]:
        """Yield a folder to write into, and publish it as `checkpoint-<step>` (or `checkpoint-final`) afterwards.

        An error inside the block or during publication leaves every published checkpoint unchanged.
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
            # Libraries that write tensors report a full disk with their own exception types.
            if os.strerror(errno.ENOSPC) not in str(error):
                raise
            raise self._storage_error(name, published, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) from error

    def latest_valid(self) -> LatestValid:
        """The newest checkpoint whose files are exactly those that were written. This changes nothing on disk."""
        skipped: list[Skipped] = []
        for candidate in self.checkpoints():
            damage = verify(candidate.path)
            if not damage:
                return LatestValid(candidate, tuple(skipped))
            skipped.append(Skipped(candidate.path, tuple(damage)))
        return LatestValid(None, tuple(skipped))

    def checkpoints(self) -> list[Checkpoint]:
        """All folders that are named like a checkpoint, valid or damaged, newest step first."""
        if not self.directory.is_dir():
            return []
        all_checkpoints = [checkpoint for path in self.directory.iterdir() if (checkpoint := _recognise(path))]
        return sorted(all_checkpoints, key=lambda each: (-each.step, len(each.path.name), each.path.name))

    def verify(self, path: str | Path) -> list[str]:
        """The problems of the checkpoint folder `path`, as the function `verify` returns them."""
        return verify(path)

    def discard_after(self, step: int) -> list[Path]:
        """Remove the valid checkpoints of later steps, because a run that resumes from `step` will write its own.

        Damaged ones stay: nothing resumes from them, and the run replaces them when it reaches their step again.
        Returns the removed paths.
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
        """Remove the checkpoints that `beyond_keep` returns, and return them."""
        doomed = self.beyond_keep(published)
        for checkpoint in doomed:
            self._remove(checkpoint.path)
        return doomed

    def beyond_keep(self, published: Path | None = None) -> list[Checkpoint]:
        """The oldest numbered checkpoints beyond `keep`.

        The checkpoint that was just `published` is never among them. If all others are damaged, the newest valid
        checkpoint is not among them either.
        """
        everything = self.checkpoints()
        numbered = [checkpoint for checkpoint in everything if OWN.fullmatch(checkpoint.path.name)]
        num_kept = self.keep or len(numbered)
        doomed = [checkpoint for checkpoint in numbered[num_kept:] if checkpoint.path != published]
        remaining = [checkpoint for checkpoint in everything if checkpoint not in doomed]
        if doomed and not any(_is_valid(checkpoint) for checkpoint in remaining):
            spared = next((checkpoint for checkpoint in doomed if _is_valid(checkpoint)), None)
            doomed = [checkpoint for checkpoint in doomed if checkpoint is not spared]
        return doomed

    def collect(self) -> list[Path]:
        """Remove or restore the unfinished work of dead processes. The files of live processes stay untouched.

        Returns the paths that were handled.
        """
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
            # The next save removes everything that cannot be removed now.
            shutil.rmtree(folder, ignore_errors=True)
            try:
                lock.unlink(missing_ok=True)
            finally:
                os.close(descriptor)

    def _new_lock(self) -> tuple[int, Path]:
        """Create a file that stays locked as long as this process lives. Returns its descriptor and path."""
        while True:
            lock = self.directory / f"{LOCK}{uuid.uuid4().hex[:12]}"
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in UNLOCKABLE:
                    os.close(descriptor)
                    raise
            # Between the two calls, `collect` of another process may have removed the file as that of a dead process.
            if lock.exists():
                return descriptor, lock
            os.close(descriptor)

    def _publish(self, folder: Path, name: str, token: str) -> list[Path]:
        """Rename `folder` to `name`. An older folder of that name is moved aside first, and its new path returned."""
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
        # Rename first, so that a crash during the removal leaves no folder that looks like a damaged checkpoint.
        doomed = self.directory / f".removing-{path.name}-{uuid.uuid4().hex[:12]}"
        os.rename(path, doomed)
        shutil.rmtree(doomed)

    def _is_own(self, path: Path) -> bool:
        """True if a store wrote `path`: a checkpoint, or one that an unfinished save moved aside."""
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
        """Size in bytes of the newest checkpoint with a readable manifest. It estimates the size of the next one."""
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
        previous = f"{others[0].path.name} is untouched" if others else "there was no earlier checkpoint"
        return StorageError(
            f"{name} could not be saved in {self.directory}: {error.strerror or error}. {self._space()}. "
            f"No partly written checkpoint was left, and {previous}. Free space there or set run.dir to another disk, "
            "then continue with resume=auto"
        )

    def _space(self) -> str:
        place = next(folder for folder in (self.directory, *self.directory.absolute().parents) if folder.exists())
        free, needed = shutil.disk_usage(place).free, self._last_size()
        size = f"about {_megabytes(needed)} (like the last checkpoint)" if needed else "unknown (the first checkpoint)"
        return f"Needed: {size}; free: {_megabytes(free)}"


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint after `step` steps."""
    return f"checkpoint-{step:06d}"


def verify(path: str | Path) -> list[str]:
    """The problems of the checkpoint folder `path`, one sentence each. Empty if every byte is as it was written."""
    folder = Path(path)
    if not folder.is_dir():
        return ["it is not a folder"]
    damage = problems(folder)
    numbered = NUMBERED.match(folder.name)
    if not damage and numbered and int(numbered[1]) != (step := read_manifest(folder).step):
        damage = [f"the folder's name says step {int(numbered[1])} but its manifest says step {step}: was it renamed?"]
    return damage


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint that `resume=<path>` selects. `path` is a checkpoint, a run folder, or a folder of checkpoints.

    Folders named `global_step_<N>` are ordered by step, too. Raises CheckpointError (7001) if no checkpoint is valid.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"resume={path}: there is no such folder. Name a checkpoint, or the folder of a run")
    named = _recognise(folder)
    if named:
        return _valid_or_explain(named)
    store = CheckpointStore(folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder)
    latest = store.latest_valid()
    if latest.checkpoint:
        return latest.checkpoint
    reasons = "".join(f"\n  {skipped}" for skipped in latest.skipped) or " (no checkpoint-<N> or global_step_<N> in it)"
    raise CheckpointError(f"resume={path}: there is no valid checkpoint in this folder{reasons}")


def _valid_or_explain(checkpoint: Checkpoint) -> Checkpoint:
    damage = verify(checkpoint.path)
    if not damage:
        return checkpoint
    other = CheckpointStore(checkpoint.path.parent).latest_valid().checkpoint
    way_out = (
        f"The newest valid checkpoint in the same folder is {other.path}"
        if other
        else "No other checkpoint in the same folder is valid"
    )
    listed = "".join(f"\n  {problem}" for problem in damage)
    raise CheckpointError(f"resume={checkpoint.path}: the checkpoint is damaged or incomplete:{listed}\n  {way_out}")


def _recognise(path: Path) -> Checkpoint | None:
    replaced = REPLACED.fullmatch(path.name)
    name = replaced["name"] if replaced else path.name
    numbered = NUMBERED.fullmatch(name)
    if not path.is_dir() or not (numbered or name == FINAL):
        return None
    return Checkpoint(path, int(numbered[1]) if numbered else _final_step(path))


def _final_step(path: Path) -> int:
    """The step of `checkpoint-final`. If its manifest is damaged, a huge step sorts it first, so it is reported."""
    try:
        return read_manifest(path).step
    except DamagedManifest:
        return 2**63


def _is_valid(checkpoint: Checkpoint) -> bool:
    return not verify(checkpoint.path)


def _is_abandoned(lock: Path) -> bool:
    """True if the process that made `lock` has ended. The system releases the lock of a process when it ends."""
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
