"""Copies of a run's checkpoints at a URL that fsspec reads: an object store (s3, gs), a second disk (file), memory.

    <url>/checkpoint-000010/<files>, MANIFEST.hmac if it is signed, then MANIFEST.json

A copy counts only with its manifest, which is written last and removed first, so a reader sees a whole one or none.
The manifest is that of the checkpoint on the disk. A copy that is fetched is compared with it, file by file.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from unirl.config.dependencies import need
from unirl.config.errors import CheckpointError, InvalidValueError, StorageError, did_you_mean
from unirl.train.backend.checkpoint import NUMBERED, OWN, Checkpoint, beyond, verify
from unirl.train.backend.manifest import MANIFEST, sealed_files

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""The package with which fsspec reads a scheme."""
TRIES = 3
PAUSE_S = 1.0
"""Pause before the second try. It doubles before the third."""
Result = TypeVar("Result")


def is_url(place: str) -> bool:
    """True for a URL, and False for a path."""
    return "://" in place


def check_url(url: str, setting: str) -> str:
    """The scheme of a URL. Raises ConfigError (2004) if no file system of fsspec has it, or if no place follows it."""
    import fsspec

    scheme, separator, place = url.partition("://")
    known = fsspec.available_protocols()
    is_known = scheme.lower() in known
    if not is_known or not place:
        hint = did_you_mean(scheme.lower(), known) if separator and not is_known else ""
        raise InvalidValueError(
            f"{setting}={url} is not a URL of fsspec.{hint} Write SCHEME://PLACE, such as s3://bucket/run or "
            "file:///disk2/run"
        )
    return scheme.lower()


class RemoteCheckpoints:
    """The checkpoints of one run at a URL. Only the run itself writes there."""

    def __init__(self, url: str, *, keep: int = 0, keep_every: int = 0, setting: str = "checkpoint.copy_to") -> None:
        """
        Args:
            keep: number of copies that remain, as for checkpoints on the disk. 0 keeps all.
            keep_every: copies of steps that this divides remain, too.
            setting: the setting that names the URL, for messages.

        Raises:
            ConfigError: 2004 when no file system of fsspec has the scheme.
            DependencyError: 3001 when its package is missing.
            CheckpointError: 7003 when the place cannot be used.
        """
        import fsspec

        scheme = check_url(url, setting)
        if scheme in PACKAGES:
            need(PACKAGES[scheme], by=f"{setting}={url}", install=f"pip install {PACKAGES[scheme]}")
        self.url, self.keep, self.keep_every, self.setting = url, keep, keep_every, setting
        files: tuple[Any, str] = self._attempt("opened", lambda: fsspec.core.url_to_fs(url))
        self.files, self.root = files[0], files[1].rstrip("/")

    def check(self) -> None:
        """Raises CheckpointError (7003) if nothing can be written there."""
        probe = f"{self.root}/.unirl-probe"

        def write() -> None:
            self.files.makedirs(self.root, exist_ok=True)
            self.files.pipe_file(probe, b"")
            self.files.rm_file(probe)

        self._attempt("written to", write)

    def copy(self, folder: Path) -> None:
        """Copy a published checkpoint, and remove the copies beyond `keep`."""
        self._attempt("written to", lambda: self._copy(folder))
        self._attempt("pruned", lambda: self._prune(folder.name))

    def checkpoints(self) -> list[Checkpoint]:
        """The whole copies, newest step first. Their paths are those of the remote file system."""
        return self._attempt("read", self._listed)

    def fetch_newest(self, cache: Path) -> Path:
        """Fetch the newest valid copy, or the one that the URL itself names, into a folder below `cache`.

        Raises:
            CheckpointError: 7001 if there is none.
        """
        target = cache / hashlib.sha256(self.url.encode()).hexdigest()[:16]
        damaged: list[str] = []
        for copy in self.checkpoints():
            folder = target / copy.path.name
            if not folder.is_dir() or verify(folder):
                self._attempt("read", partial(self._fetch, copy, folder))
            if not (wrong := verify(folder)):
                return folder
            damaged.append(f"\n  {copy.path.name}: {'; '.join(wrong)}")
        raise CheckpointError(
            f"{self.setting}={self.url}: there is no valid checkpoint at this URL{''.join(damaged)}. Give the URL that "
            "checkpoint.copy_to of the other run names, or that of one checkpoint below it"
        )

    def _copy(self, folder: Path) -> None:
        target = f"{self.root}/{folder.name}"
        self._remove(target)
        self.files.makedirs(target, exist_ok=True)
        for path in sealed_files(folder):
            place = f"{target}/{path.relative_to(folder).as_posix()}"
            self.files.makedirs(place.rpartition("/")[0], exist_ok=True)
            self.files.put_file(str(path), place)

    def _listed(self) -> list[Checkpoint]:
        self.files.invalidate_cache()
        if NUMBERED.fullmatch(self.root.rpartition("/")[2]):
            names = [self.root]
        else:
            names = [str(name).rstrip("/") for name in self.files.ls(self.root, detail=False)]
        numbered = [(name, NUMBERED.fullmatch(name.rpartition("/")[2])) for name in names]
        whole = [(name, match) for name, match in numbered if match and self.files.exists(f"{name}/{MANIFEST}")]
        return sorted((Checkpoint(Path(name), int(match[1])) for name, match in whole), key=lambda each: -each.step)

    def _fetch(self, copy: Checkpoint, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        start = f"{self._place(copy)}/"
        for name in self.files.find(self._place(copy)):
            own = str(name).partition(start)[2]
            if ".." in own.split("/"):
                raise CheckpointError(f"{self.url}: the name {name} leads out of its folder")
            (folder / own).parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(name, str(folder / own))

    def _place(self, copy: Checkpoint) -> str:
        return self.root if self.root.endswith(copy.path.name) else f"{self.root}/{copy.path.name}"

    def _prune(self, newest: str) -> None:
        own = [each for each in self._listed() if OWN.fullmatch(each.path.name)]
        for each in beyond(own, self.keep, self.keep_every):
            if each.path.name != newest:
                self._remove(self._place(each))

    def _remove(self, place: str) -> None:
        if self.files.exists(f"{place}/{MANIFEST}"):
            self.files.rm_file(f"{place}/{MANIFEST}")
        if self.files.exists(place):
            self.files.rm(place, recursive=True)

    def _attempt(self, what: str, work: Callable[[], Result]) -> Result:
        """The result of `work`, which is repeated after an error of the connection or the store."""
        for number in range(TRIES):
            try:
                return work()
            except CheckpointError:
                raise
            except Exception as error:  # each store has exceptions of its own
                last = error
                if number + 1 < TRIES:
                    time.sleep(PAUSE_S * 2**number)
        raise StorageError(
            f"{self.setting}={self.url} cannot be {what}: {type(last).__name__}: {last} ({TRIES} tries). Checkpoints "
            "in the run directory are intact. Correct the URL or the access to it, or leave it out"
        ) from last
