"""Saves and finds checkpoints so that a crash, a full disk or a flipped bit cannot lose them.

    write into a hidden folder -> fsync every file -> MANIFEST.json -> one rename -> LATEST by rename -> prune

The last checkpoint of a completed run is also published as `checkpoint-final`, whose files are hard links to it.

A reader sees a whole checkpoint or none. A damaged checkpoint is detected before anything in it is deserialised.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unirl.config.errors import CheckpointError, StorageError
from unirl.train.backend.manifest import MANIFEST, DamagedManifest, fsync, link_sealed, problems, read_manifest, seal

FINAL = "checkpoint-final"
LATEST = "LATEST"
OPTIMIZER = "policy/optimizer"
"""How the names of files begin that only a continued run reads."""
NUMBERED = re.compile(r"(?:checkpoint-|global_step_)(\d+)")
OWN = re.compile(r"checkpoint-\d+")
REPLACED = re.compile(r"(checkpoint-.+)\.replaced")
UNFINISHED = (".staging-", ".removing-")
"""Prefixes of folders that a save or a removal leaves when its process dies."""


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
class ResumePoint:
    """The newest valid checkpoint (None if there is none), and the newer ones that are damaged."""

    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...] = ()


class CheckpointStore:
    """The `checkpoints` folder of one run. Any number of processes may read.

    Only one process may save: `RunDirectory` refuses a second writer of a run. One that was paused while another
    process took the run over cannot publish either. It is refused by `check_writer`, or, if it was paused after that
    check, by the rename of its staging folder, which the other process has removed.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 3,
        keep_every: int = 0,
        key: bytes | None = None,
        check_writer: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            keep: number of numbered checkpoints that remain after a save (0 keeps all). `checkpoint-final` does not
                count. It is removed when a later checkpoint is saved, because the run then continues beyond it.
            keep_every: checkpoints of steps that this divides remain, too, and do not count. 0: there are none.
            key: signs the manifests that are written. Only checkpoints that it signed are valid to resume from.
            check_writer: raises if this process may no longer write. Called before anything is published or removed.
        """
        if keep < 0:
            raise ValueError(f"keep must be >= 0 (0 keeps all), got {keep}")
        self.directory = Path(directory)
        self.keep = keep
        self.keep_every = keep_every
        self.key = key
        self.check_writer = check_writer

    @contextmanager
    def stage(self, step: int) -> Iterator[Path]:
        """Yield a folder to write into, and publish it as `checkpoint-<step>` afterwards.

        An error inside the block or during publication leaves every published checkpoint unchanged.
        """
        with self._published_as(checkpoint_name(step)) as folder:
            if shutil.disk_usage(self.directory).free < self._last_size():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield folder
            seal(folder, step, self.key)

    def publish_final(self, step: int) -> None:
        """Publish `checkpoint-<step>` a second time, as `checkpoint-final`. The files are hard links and take no space.

        Nothing is done if `checkpoint-final` is already valid, or if this folder has no checkpoint of that step.
        """
        source, final = self.directory / checkpoint_name(step), Checkpoint(self.directory / FINAL, step)
        if not source.is_dir() or (final in self.checkpoints() and _is_valid(final)):
            return
        with self._published_as(FINAL) as folder:
            link_sealed(source, folder)

    @contextmanager
    def _published_as(self, name: str) -> Iterator[Path]:
        published = False
        self.check_writer()
        try:
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True)
                fsync(self.directory.parent)
            self.collect()
            with self._staging_folder(name) as folder:
                yield folder
                self.check_writer()
                replaced = self._publish(folder, name)
                published = True
                fsync(self.directory)
                if name != FINAL:
                    self._point_latest(name)
            for path in replaced:
                self._remove(path)
            self.prune(self.directory / name)
        except OSError as error:
            self.check_writer()  # a process that took the run over has removed the staging folder
            raise self._storage_error(name, published, error) from error
        except Exception as error:
            # Libraries that write tensors report a full disk with their own exception types.
            if os.strerror(errno.ENOSPC) not in str(error):
                raise
            raise self._storage_error(name, published, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) from error

    def latest_valid(self, unread: str | None = None, healthy: bool = False) -> ResumePoint:
        """The newest checkpoint whose files are exactly those that were written. This changes nothing on disk.

        Args:
            unread: as in `verify`.
            healthy: also skip those from which a run cannot continue, such as weights that are not finite.
        """
        skipped: list[Skipped] = []
        for candidate in self.checkpoints():
            damage = reasons_against(candidate.path, unread, healthy, self.key)
            if not damage:
                return ResumePoint(candidate, tuple(skipped))
            skipped.append(Skipped(candidate.path, tuple(damage)))
        return ResumePoint(None, tuple(skipped))

    def listing(self) -> list[tuple[str, int, int]]:
        """The name of each checkpoint, and the inode and time of its manifest: other ones if a process saved since."""
        found = [(each.path.name, each.path / MANIFEST) for each in self.checkpoints()]
        times = [(name, path.stat()) for name, path in found if path.is_file()]
        return [(name, stat.st_ino, stat.st_mtime_ns) for name, stat in times]

    def checkpoints(self) -> list[Checkpoint]:
        """All folders that are named like a checkpoint, valid or damaged, newest step first.

        `checkpoint-final` comes after the numbered checkpoint of the same step.
        """
        if not self.directory.is_dir():
            return []
        all_checkpoints = [checkpoint for path in self.directory.iterdir() if (checkpoint := _recognise(path))]
        return sorted(all_checkpoints, key=_newest_first)

    def discard_after(self, step: int) -> None:
        """Remove the valid checkpoints of later steps, because a run that resumes from `step` will write its own.

        Damaged ones stay: nothing resumes from them, and the run replaces them when it reaches their step again.
        """
        later = [checkpoint for checkpoint in self.checkpoints() if checkpoint.step > step]
        doomed = [c.path for c in later if c.path.name.startswith("checkpoint-") and _is_valid(c)]
        for path in doomed:
            self._remove(path)
        remaining = [checkpoint for checkpoint in self.checkpoints() if checkpoint not in later]
        if doomed and remaining:
            self._point_latest(remaining[0].path.name)

    def prune(self, published: Path | None = None) -> list[Checkpoint]:
        """Remove the checkpoints that `beyond_keep` returns, and return them."""
        doomed = self.beyond_keep(published)
        for checkpoint in doomed:
            self._remove(checkpoint.path)
        return doomed

    def beyond_keep(self, published: Path | None = None) -> list[Checkpoint]:
        """The oldest numbered checkpoints beyond `keep`, and a `checkpoint-final` that is older than the newest one.

        The checkpoint that was just `published` is never among them. If all others are damaged, the newest valid
        checkpoint is not among them either.
        """
        everything = self.checkpoints()
        numbered = [checkpoint for checkpoint in everything if OWN.fullmatch(checkpoint.path.name)]
        final = [checkpoint for checkpoint in everything if checkpoint.path.name == FINAL]
        outgrown = [checkpoint for checkpoint in final if numbered and checkpoint.step < numbered[0].step]
        old = [*beyond(numbered, self.keep, self.keep_every), *outgrown]
        doomed = [checkpoint for checkpoint in everything if checkpoint in old and checkpoint.path != published]
        remaining = [checkpoint for checkpoint in everything if checkpoint not in doomed]
        if doomed and not any(_is_valid(checkpoint) for checkpoint in remaining):
            spared = next((checkpoint for checkpoint in doomed if _is_valid(checkpoint)), None)
            doomed = [checkpoint for checkpoint in doomed if checkpoint is not spared]
        return doomed

    def collect(self) -> None:
        """Remove or restore the unfinished work of dead processes. Work of a paused one is removed like that."""
        self.check_writer()
        for path in sorted(self.directory.iterdir()):
            replaced = REPLACED.fullmatch(path.name)
            successor = self.directory / replaced[1] if replaced else None
            if successor is not None and (not successor.exists() or (verify(successor) and not verify(path))):
                # The save that moved it aside died before its successor was published, or the successor is damaged.
                if successor.exists():
                    self._remove(successor)
                os.rename(path, successor)
            elif replaced or path.name.startswith(UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _staging_folder(self, name: str) -> Iterator[Path]:
        folder = self.directory / f".staging-{name}-{uuid.uuid4().hex[:12]}"
        try:
            os.mkdir(folder)
            yield folder
        finally:
            # The next save removes everything that cannot be removed now.
            shutil.rmtree(folder, ignore_errors=True)

    def _publish(self, folder: Path, name: str) -> list[Path]:
        """Rename `folder` to `name`. An older folder of that name is moved aside first, and its new path returned."""
        target = self.directory / name
        aside = self.directory / f"{name}.replaced"
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
        self.check_writer()
        pointer = self.directory / f".{LATEST}.tmp"
        with open(pointer, "w", encoding="ascii") as file:
            file.write(name + "\n")
        fsync(pointer)
        os.replace(pointer, self.directory / LATEST)
        fsync(self.directory)

    def _remove(self, path: Path) -> None:
        self.check_writer()
        # Rename first, so that a crash during the removal leaves no folder that looks like a damaged checkpoint.
        doomed = self.directory / f".removing-{path.name}-{uuid.uuid4().hex[:12]}"
        os.rename(path, doomed)
        shutil.rmtree(doomed)

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


def beyond(newest_first: Sequence[Checkpoint], keep: int, keep_every: int) -> list[Checkpoint]:
    """The checkpoints that are neither among the newest `keep` (0: all) nor of a step that `keep_every` divides."""
    rest = [each for each in newest_first if not keep_every or each.step % keep_every]
    return rest[keep or len(rest) :]


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint after `step` steps."""
    return f"checkpoint-{step:06d}"


def verify(path: str | Path, unread: str | None = None, key: bytes | None = None) -> list[str]:
    """The problems of the checkpoint folder `path`, one sentence each. Empty if every byte is as it was written.

    Args:
        unread: files whose names begin so are not needed, and may be damaged.
        key: the manifest must be signed with it.
    """
    folder = Path(path)
    if not folder.is_dir():
        return ["it is not a folder"]
    damage = [problem for problem in problems(folder, key) if unread is None or not problem.startswith(unread)]
    numbered = NUMBERED.match(folder.name)
    if not damage and numbered and int(numbered[1]) != (step := read_manifest(folder).step):
        damage = [f"the folder's name says step {int(numbered[1])} but its manifest says step {step}: was it renamed?"]
    return damage


def reasons_against(
    path: Path, unread: str | None = None, healthy: bool = False, key: bytes | None = None
) -> list[str]:
    """The problems that `verify` finds; with `healthy`, if there are none, those that keep a run from continuing."""
    damage = verify(path, unread, key)
    if damage or not healthy:
        return damage
    from unirl.train.backend.health import SHOWN, unhealthy  # torch, which listing checkpoints does without

    return unhealthy(path)[:SHOWN]


def open_checkpoint(
    path: str | Path, unread: str | None = None, healthy: bool = False, key: bytes | None = None
) -> Checkpoint:
    """The checkpoint that `resume=<path>` selects. `path` is a checkpoint, a run folder, or a folder of checkpoints.

    Folders named `global_step_<N>` are ordered by step, too.

    Args:
        unread: as in `verify`.
        healthy: as in `CheckpointStore.latest_valid`.
        key: as in `verify`.

    Raises:
        CheckpointError: 7001 if there is no such folder, or no checkpoint in it is valid.
    """
    folder = existing(path)
    named = _recognise(folder)
    if named:
        return _valid_or_explain(named, unread, healthy, key)
    store = CheckpointStore(folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder, key=key)
    latest = store.latest_valid(unread, healthy)
    if latest.checkpoint:
        return latest.checkpoint
    reasons = "".join(f"\n  {skipped}" for skipped in latest.skipped) or " (no checkpoint-<N> or global_step_<N> in it)"
    raise CheckpointError(f"{path}: there is no valid checkpoint in this folder{reasons}")


def existing(path: str | Path) -> Path:
    """The folder of a run or checkpoint. Raises CheckpointError (7001) if there is none."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path}: there is no such folder. Give a run (runs/<project>/<name>) or a checkpoint")
    return folder


@contextmanager
def still_there(checkpoint: Checkpoint) -> Iterator[None]:
    """Within the block the checkpoint is read. The run that writes it may remove it meanwhile.

    Raises:
        CheckpointError: 7001 if an error came up and the checkpoint is gone.
    """
    try:
        yield
    except Exception as error:
        # Libraries that read tensors report a missing file with exception types of their own.
        if checkpoint.path.is_dir():
            raise
        raise CheckpointError(
            f"{checkpoint.path} was removed while it was read: its run keeps only its newest checkpoints "
            "(keep_checkpoints). Run the command again for the newest one"
        ) from error


def _valid_or_explain(checkpoint: Checkpoint, unread: str | None, healthy: bool, key: bytes | None) -> Checkpoint:
    damage = reasons_against(checkpoint.path, unread, healthy, key)
    if not damage:
        return checkpoint
    other = CheckpointStore(checkpoint.path.parent, key=key).latest_valid(healthy=healthy).checkpoint
    way_out = (
        f"The newest valid checkpoint in the same folder is {other.path}"
        if other
        else "No other checkpoint in the same folder is valid"
    )
    listed = "".join(f"\n  {problem}" for problem in damage)
    raise CheckpointError(f"resume={checkpoint.path}: the checkpoint cannot be used:{listed}\n  {way_out}")


def _recognise(path: Path) -> Checkpoint | None:
    replaced = REPLACED.fullmatch(path.name)
    name = replaced[1] if replaced else path.name
    numbered = NUMBERED.fullmatch(name)
    if not path.is_dir() or not (numbered or name == FINAL):
        return None
    return Checkpoint(path, int(numbered[1]) if numbered else _final_step(path))


def _newest_first(checkpoint: Checkpoint) -> tuple[int, bool, int, str]:
    name = checkpoint.path.name
    return -checkpoint.step, name.startswith(FINAL), len(name), name


def _final_step(path: Path) -> int:
    """The step of `checkpoint-final`. If its manifest is damaged, a huge step sorts it first, so it is reported."""
    try:
        return read_manifest(path).step
    except DamagedManifest:
        return 2**63


def _is_valid(checkpoint: Checkpoint) -> bool:
    return not verify(checkpoint.path)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
