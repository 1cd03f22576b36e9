"""The manifest of a checkpoint folder. It reveals damage before anything is loaded.

MANIFEST.json lists every file with its size and SHA-256, and contains a SHA-256 of its own canonical text. A flipped
bit in a file or in the list is therefore detected and described in a sentence.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path, PurePosixPath

import msgspec

import unirl
from unirl.train.backend.signing import SIGNATURE, signature_of, signature_problems

MANIFEST = "MANIFEST.json"
SCHEMA_VERSION = 1
DROPPINGS = (".DS_Store", "Thumbs.db", "desktop.ini", ".nfs")
"""Prefixes of the names of files that operating systems create in folders. No loader reads them."""
RECEIPT = ".written"
"""The suffix of a file beside another one, which says that the other one is whole. No checkpoint contains any."""
UNLINKABLE = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Errors of file systems that have no hard links, or no further one for a file."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint. `name` is its path relative to the checkpoint folder, with forward slashes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The list of a checkpoint's files, with the training step and the versions of the software that wrote it."""

    step: int
    files: tuple[FileEntry, ...]
    versions: dict[str, str]
    schema_version: int = SCHEMA_VERSION

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(entry.size for entry in self.files)


class DamagedManifest(ValueError):
    """The manifest is missing or damaged."""


def seal(folder: Path, step: int, key: bytes | None = None) -> Manifest:
    """Flush every file of `folder` to the disk, then write the manifest and flush it, too.

    A file with a receipt is flushed and hashed already. Its receipt is removed.

    Args:
        key: signs the manifest.
    """
    entries = []
    for path in (path for path in files_of(folder) if path.suffix != RECEIPT):
        if path.is_symlink() or not path.is_file():
            raise ValueError(f"{path} is a link or a special file, and a checkpoint may contain only plain files")
        name = path.relative_to(folder).as_posix()
        if has_receipt(path):
            entries.append(replace(_take_receipt(path), name=name))
        else:
            fsync(path)
            entries.append(FileEntry(name, path.stat().st_size, _sha256(path)))
    manifest = Manifest(step, tuple(entries), _versions())
    text = _with_digest(manifest)
    content = {MANIFEST: text} | ({} if key is None else {SIGNATURE: signature_of(text, key).encode()})
    for name, data in content.items():
        with open(folder / name, "wb") as file:
            file.write(data)
        fsync(folder / name)
    _fsync_folders(folder)
    return manifest


def record_written(path: Path, entry: FileEntry) -> None:
    """Create the receipt of a file that is written and flushed. It appears as a whole."""
    new = path.with_name(f".{path.name}{RECEIPT}.tmp")
    new.write_text(json.dumps(asdict(entry)))
    os.replace(new, _receipt(path))


def has_receipt(path: Path) -> bool:
    """True if the file is written and flushed, as `record_written` said."""
    return _receipt(path).exists()


def _take_receipt(path: Path) -> FileEntry:
    entry = FileEntry(**json.loads(_receipt(path).read_text()))
    size = path.stat().st_size
    if size != entry.size:
        raise OSError(errno.EIO, f"{path.name} has {size} bytes after {entry.size} were written")
    _receipt(path).unlink()
    return entry


def _receipt(path: Path) -> Path:
    return path.with_name(path.name + RECEIPT)


def link_sealed(source: Path, folder: Path) -> None:
    """Fill `folder` with the files of a sealed folder as hard links, or as copies if the file system has no links."""
    for path in sealed_files(source):
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except OSError as error:
            if error.errno not in UNLINKABLE:
                raise
            shutil.copyfile(path, target)
            fsync(target)
    _fsync_folders(folder)


def _fsync_folders(folder: Path) -> None:
    for directory in sorted({path.parent for path in files_of(folder)} | {folder}):
        fsync(directory)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of `folder` and verify its checksum. Raises DamagedManifest if it is missing or damaged."""
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise DamagedManifest(f"{MANIFEST} is missing: writing the folder did not finish") from error
    except OSError as error:
        raise DamagedManifest(f"{MANIFEST} cannot be read: {error.strerror}") from error
    try:
        data = json.loads(text)
        schema, digest = data["schema_version"], data.pop("sha256")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedManifest(f"{MANIFEST} is damaged: it is not valid JSON of a manifest") from error
    if schema != SCHEMA_VERSION and digest == _digest(data):
        raise DamagedManifest(
            f"{MANIFEST} has schema {schema}, but this version of UniRL reads schema {SCHEMA_VERSION}"
        )
    if digest != _digest(data) or text != _canonical({**data, "sha256": digest}):
        raise DamagedManifest(f"{MANIFEST} is damaged: its own checksum does not match")
    try:
        return msgspec.convert(data, Manifest)
    except msgspec.ValidationError as error:
        raise DamagedManifest(f"{MANIFEST} is damaged: {error}") from error


def problems(folder: Path, key: bytes | None = None) -> list[str]:
    """The differences between `folder` and the checkpoint that was written, one sentence each. Empty if none.

    Args:
        key: the manifest must be signed with it.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedManifest as error:
        return [str(error)]
    if key is not None and (unsigned := signature_problems(folder, _with_digest(manifest), key)):
        return unsigned
    names = [entry.name for entry in manifest.files]
    listed = set(names)
    if len(listed) < len(names):
        return [f"{MANIFEST} lists {next(name for name in names if names.count(name) > 1)!a} twice"]
    extra = sorted({path.relative_to(folder).as_posix() for path in files_of(folder)} - listed)
    damage = [problem for entry in manifest.files for problem in _file_problems(folder, entry)]
    return damage + [f"{name} is not listed in {MANIFEST}: it was added after the save. Remove it" for name in extra]


def _file_problems(folder: Path, entry: FileEntry) -> Iterator[str]:
    if not _is_inside(entry.name):
        yield f"{entry.name!a} is not the path of a file inside the folder"
        return
    path = folder / entry.name
    try:
        mode, size = (status := path.lstat()).st_mode, status.st_size
        if not stat.S_ISREG(mode):
            yield f"{entry.name} is not a plain file"
        elif size != entry.size:
            yield f"{entry.name} has {size} bytes instead of {entry.size}"
        elif _sha256(path) != entry.sha256:
            yield f"{entry.name} is damaged (checksum differs)"
    except FileNotFoundError:
        yield f"{entry.name} is missing"
    except OSError as error:
        yield f"{entry.name} cannot be read ({error.strerror})"


def _is_inside(name: str) -> bool:
    """True for the relative path of a file, as `files_of` gives it. The name may hold what no path can."""
    path = PurePosixPath(name)
    is_text = name.encode(errors="replace").decode() == name and "\0" not in name
    return is_text and str(path) == name != "." and not path.is_absolute() and ".." not in path.parts


def files_of(folder: Path) -> Iterator[Path]:
    """All files and links below `folder`, sorted by name in each folder, without the manifest and its signature."""
    for directory, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
        for name in sorted([*names, *links]):
            path = Path(directory, name)
            if path not in (folder / MANIFEST, folder / SIGNATURE) and not name.startswith(DROPPINGS):
                yield path


def sealed_files(folder: Path) -> list[Path]:
    """All files of a sealed folder, the manifest last."""
    signature = folder / SIGNATURE
    return [*files_of(folder), *([signature] if signature.exists() else []), folder / MANIFEST]


def fsync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": version("torch"), "unirl": unirl.__version__}


def _with_digest(manifest: Manifest) -> bytes:
    data = asdict(manifest)
    return _canonical({**data, "sha256": _digest(data)})


def _digest(data: dict[str, object]) -> str:
    return hashlib.sha256(_canonical(data)).hexdigest()


def _canonical(data: dict[str, object]) -> bytes:
    return (json.dumps(data, sort_keys=True, indent=1) + "\n").encode()
