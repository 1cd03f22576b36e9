"""The right to write a run directory, which one process at a time has, also among the hosts of a shared file system.

heartbeat        locked (flock) by the owner as long as it lives; its time is updated every few seconds
writers/000003   one file for each process that has owned the directory; the highest number is that of the owner

The lock refuses a second process on this host, and on other hosts where the file system passes locks on. The number is
a fencing token (Kleppmann 2016, "How to do distributed locking"): the owner compares it with the highest one before it
publishes anything, so a process that was paused while another one took over is refused when it wakes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile

from unirl.tracking.tables import Row, replace_text

HEARTBEAT_S = 5.0
STALLED_AFTER_S = 60.0
LOCK_WAIT_S = 2.0
"""A reader that asks for the state of a run holds the lock for a moment, so the lock is tried for so long."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The errors of file systems without locks."""


class RunDirectoryError(ValueError):
    """The run directory cannot be used: bad name or place, or another process writes to it."""


class OwnershipLostError(RunDirectoryError):
    """Another process took the run over while this one was paused or cut off."""


@dataclass(frozen=True)
class Writer:
    """A process that owns a run directory, or owned it."""

    number: int
    pid: int | None
    """None while the process is writing its file."""
    host: str
    started: str
    has_ended: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started at {self.started}" if self.pid else "a process that starts"

    @property
    def is_here(self) -> bool:
        """The process belongs to this host."""
        return self.host == socket.gethostname()


@dataclass(frozen=True)
class Fence:
    """The number under which a process owns a run directory. It may be sent to other processes of the run."""

    root: Path
    number: int

    def check(self) -> None:
        """Raises OwnershipLostError if another process has taken the run over. Costs one listing of a small folder."""
        newest = newest_writer(self.root)
        if newest is None:
            raise OwnershipLostError(
                f"run.dir={self.root}: the folder `writers` of the run was removed, so this process can no longer "
                "know that it is the only one that writes. Start the command again"
            )
        if newest.number != self.number:
            raise OwnershipLostError(
                f"run.dir={self.root} was taken over by {newest} (writer {newest.number}), while this process "
                f"(writer {self.number}) was paused or cut off. It writes nothing more there. Follow the run there "
                "with unirl tail, or stop that process and start the command again"
            )


@dataclass
class Ownership:
    """The run directory belongs to this process until `release`."""

    fence: Fence
    descriptor: int
    _stop: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def take(cls, root: Path) -> Ownership:
        """Become the owner of an existing folder. Nothing else may be written there before.

        Raises:
            RunDirectoryError: another process owns it. The message names the process, its host and the way out.
        """
        descriptor = os.open(root / "heartbeat", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            is_locked = _lock_or_refuse(root, descriptor)
            number = _claim(root, is_locked)
            os.utime(root / "heartbeat")
        except BaseException:
            os.close(descriptor)
            raise
        ownership = cls(Fence(root, number), descriptor)
        threading.Thread(target=ownership._beat, name="heartbeat", daemon=True).start()
        return ownership

    def release(self) -> None:
        """Record that this process has ended its work, and stop the heartbeat. A second call does nothing."""
        self._stop.set()
        if self.descriptor >= 0:
            path = _writer_file(self.fence.root, self.fence.number)
            with suppress(OwnershipLostError):
                self.fence.check()
                replace_text(path, json.dumps(_read(path) | {"ended": now()}) + "\n")
            os.close(self.descriptor)
            self.descriptor = -1

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            try:
                self.fence.check()
                os.utime(self.fence.root / "heartbeat")
            except (OSError, OwnershipLostError):
                return  # the folder was removed or taken over; the next write of a metric fails with a clear error


def newest_writer(root: Path) -> Writer | None:
    """The process with the highest number. None if no process has owned the folder."""
    folder = root / "writers"
    numbers = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    if not numbers:
        return None
    number = max(numbers)
    record = _read(_writer_file(root, number))
    return Writer(number, record.get("pid"), record.get("host", ""), record.get("started", ""), "ended" in record)


def is_locked(path: Path) -> bool:
    """True if a process holds the lock of a file. Without locks in the file system, no process does."""
    if not path.exists():
        return False
    descriptor = os.open(path, os.O_RDWR)
    try:
        return _lock(descriptor) is False
    finally:
        os.close(descriptor)


def process_exists(pid: int) -> bool:
    """True if a process of this host has the id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    return True


def now() -> str:
    """The current time for records (UTC, ISO 8601)."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _lock_or_refuse(root: Path, descriptor: int) -> bool:
    """Take the lock of the heartbeat file. Returns False if the file system has no locks."""
    end = time.monotonic() + LOCK_WAIT_S
    while (lock := _lock(descriptor)) is False:
        last = newest_writer(root)
        holder = None if last is None or last.has_ended else last
        is_known = holder is not None and holder.is_here and holder.pid and process_exists(holder.pid)
        if is_known or time.monotonic() > end:
            raise _in_use(root, holder)
        time.sleep(0.02)
    return lock is True


def _claim(root: Path, is_locked: bool) -> int:
    """Take the next number. Of two processes that try at once, also on two hosts, one succeeds."""
    folder = root / "writers"
    folder.mkdir(exist_ok=True)
    last = newest_writer(root)
    if last is not None and not last.has_ended and _may_live(root, last, is_locked):
        raise _in_use(root, last)
    number = 1 if last is None else last.number + 1
    record = {"pid": os.getpid(), "host": socket.gethostname(), "started": now()}
    try:
        with open(_writer_file(root, number), "x", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise _in_use(root, newest_writer(root)) from None
    return number


def _may_live(root: Path, writer: Writer, is_locked: bool) -> bool:
    """True if a process that recorded no end may still write.

    On this host the lock tells, or without locks the process id. On another host only the age of the heartbeat does. It
    is measured by the clock of the file system, which all hosts share.
    """
    if writer.is_here:
        return not is_locked and (writer.pid is None or process_exists(writer.pid))
    with TemporaryFile(dir=root / "writers") as file:
        file.write(b"x")
        file.flush()
        age = os.fstat(file.fileno()).st_mtime - (root / "heartbeat").stat().st_mtime
    return age < STALLED_AFTER_S


def _in_use(root: Path, holder: Writer | None) -> RunDirectoryError:
    if holder is not None and not holder.is_here and holder.pid:
        waits = f" If it is dead, its run can be continued {STALLED_AFTER_S:.0f} s after its last heartbeat."
    else:
        waits = ""
    return RunDirectoryError(
        f"run.dir={root} is being written by {holder or 'a process that starts'}. Wait for it, stop it, or choose "
        f"another run.dir or run.name.{waits}"
    )


def _writer_file(root: Path, number: int) -> Path:
    return root / "writers" / f"{number:06d}"


def _read(path: Path) -> Row:
    """The record of a writer. Empty while its process is writing it."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _lock(descriptor: int) -> bool | None:
    """Take the lock. Returns False if another process has it, and None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        if error.errno != errno.EWOULDBLOCK:
            raise
        return False
    return True
