"""Reads files of a run that somebody else may have written: within limits, and never outside of its folder.

A file that is absent, damaged or refused is no error. It is listed in `problems`, so that whoever shows the run can say
what is missing.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import yaml
from PIL import Image

from unirl.media.files import ImageLimits, UnreadableMedia
from unirl.media.images import PLAIN_PIXELS, damage_reported, is_plain, open_header
from unirl.tracking.tables import Row

MAX_DOCUMENT = 2**26
"""Bytes of the largest JSON, YAML, csv or image file that is read."""
MAX_LINE = 2**20
"""Bytes of the longest line of a table."""
TAIL_BYTES = 2**16
"""Bytes at the end of a table that are read to find its last row."""
DAMAGED = (ValueError, RecursionError, yaml.YAMLError, csv.Error)
"""The errors of parsing a damaged file. Values that are nested too deeply raise RecursionError."""
T = TypeVar("T")


class RunFiles:
    """The files below one folder, read-only."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._real = os.path.realpath(root)
        self._problems: dict[str, None] = {}

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be read until now, each as `file: reason`."""
        return tuple(self._problems)

    def problem(self, name: str, reason: object) -> None:
        """Lists a problem with a file. The same problem is listed once."""
        self._problems[f"{name}: {reason}"] = None

    def exists(self, name: str) -> bool:
        """Returns True if there is an entry of this name. It may be unreadable."""
        return os.path.lexists(self.root / name)

    def folders(self, name: str, pattern: str) -> list[str]:
        """The names, relative to the root, of the entries of a folder that match a glob pattern, sorted."""
        with suppress(OSError):
            return sorted(f"{name}/{path.name}" for path in (self.root / name).glob(pattern))
        return []

    def data(self, name: str) -> bytes | None:
        """The content of a file of at most MAX_DOCUMENT bytes. None if it cannot be read."""
        file = self.open(name)
        if file is None:
            return None
        with file:
            content = file.read(MAX_DOCUMENT + 1)
        if len(content) <= MAX_DOCUMENT:
            return content
        self.problem(name, f"it has more than {MAX_DOCUMENT} bytes")
        return None

    def json(self, name: str, kind: type[T]) -> T | None:
        """The content of a JSON file as `kind`, a dataclass or a type such as dict. None if it does not fit."""
        content = self.data(name)
        if content is None:
            return None
        try:
            return msgspec.convert(json.loads(content), kind)
        except DAMAGED as error:
            self.problem(name, f"it is damaged ({error})")
            return None

    def yaml(self, name: str) -> object:
        """The content of a YAML file. None if it cannot be read."""
        content = self.data(name)
        if content is None:
            return None
        try:
            return yaml.safe_load(content)
        except DAMAGED as error:
            self.problem(name, f"it is damaged ({' '.join(str(error).split())[:200]})")
            return None

    def rows(self, name: str) -> Iterator[Row]:
        """The rows of a JSON-lines file.

        Damaged lines are left out and counted. Half a line at the end is no damage.
        """
        file = self.open(name)
        if file is None:
            return
        damaged = []
        number = 0
        with file:
            for line in iter(lambda: file.readline(MAX_LINE), b""):
                number += 1
                if not line.endswith(b"\n") and len(line) < MAX_LINE:
                    break  # The run is writing this line, or was killed while it did.
                row = object_of(line)
                if row is None:
                    damaged.append(number)
                else:
                    yield row
        if damaged:
            self.problem(name, f"{len(damaged)} of {number} lines are damaged, the first is line {damaged[0]}")

    def ends(self, name: str) -> tuple[Row, Row]:
        """The first and the last row of a JSON-lines file, without reading those between. Empty if it has none."""
        file = self.open(name)
        if file is None:
            return {}, {}
        with file:
            first, size = file.readline(MAX_LINE), file.seek(0, os.SEEK_END)
            for length in (TAIL_BYTES, MAX_LINE + TAIL_BYTES):
                file.seek(max(size - length, 0))
                *complete, _ = file.read(length).split(b"\n")  # What follows the last line break is incomplete.
                if len(complete) > 1 or length >= size:
                    break
        if not first.endswith(b"\n"):
            return {}, {}
        return object_of(first) or {}, (object_of(complete[-1]) if complete else None) or {}

    def table(self, name: str) -> list[dict[str, float]]:
        """The rows of a csv file of numbers, each without its empty cells. Rows without a step are left out."""
        content = self.data(name)
        if content is None:
            return []
        complete = content.decode("utf-8", "replace").rpartition("\n")[0]
        try:
            cells = list(csv.DictReader(io.StringIO(complete)))
        except DAMAGED as error:
            self.problem(name, f"it is damaged ({error})")
            return []
        rows = [numbers(row) for row in cells]
        whole = [row for row in rows if "step" in row]
        if len(whole) < len(rows):
            self.problem(name, f"{len(rows) - len(whole)} of {len(rows)} rows have no step")
        return whole

    def frames(self, name: str, max_frames: int = 1) -> list[Image.Image]:
        """The first frames of an image file as RGB, of as many pixels together as one image may have.

        Empty if the file cannot be read.
        """
        content = self.data(name)
        if content is None:
            return []
        try:
            image = open_header(content, ImageLimits(pixels=PLAIN_PIXELS))
            if not is_plain(image, content):
                raise UnreadableMedia("it takes too long to decode")
            with damage_reported():
                frames = []
                for index in range(min(max_frames, PLAIN_PIXELS // (image.width * image.height))):
                    try:
                        image.seek(index)
                    except EOFError:
                        break
                    frames.append(image.convert("RGB"))
                return frames
        except UnreadableMedia as error:
            self.problem(name, error)
            return []

    def open(self, name: str) -> BinaryIO | None:
        """Opens a regular file inside of the folder. Links that lead out of it are refused.

        None if it cannot be opened; `problems` says why.
        """
        try:
            path = os.path.realpath(self.root / name)
            if os.path.commonpath([self._real, path]) != self._real:
                self.problem(name, "it is outside of the run's folder and was not read")
                return None
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:
            self.problem(name, "there is no such file")
            return None
        except (OSError, ValueError) as error:  # ValueError: the name has a null character
            self.problem(name, f"it cannot be opened ({error.strerror if isinstance(error, OSError) else error})")
            return None
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
        self.problem(name, "it is not a regular file")
        return None


def number(value: object) -> float | None:
    """A number of a file as float; `nan` and `inf` are stored as text. None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def numbers(row: Mapping[str, object]) -> dict[str, float]:
    """The entries of a row that are numbers. A step that is not finite is left out."""
    found = {name: value for name, value in row.items() if type(value) is float}  # nearly all are
    if len(found) < len(row):
        others = {name: number(value) for name, value in row.items() if name not in found}
        found |= {name: value for name, value in others.items() if value is not None}
    found.pop("", None)
    if not math.isfinite(found.get("step", 0.0)):
        del found["step"]
    return found


def object_of(line: bytes) -> Row | None:
    """The JSON object of a line. None if it is anything else."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, *DAMAGED):  # stricter than json about NaN and encodings
        try:
            row = json.loads(line)
        except DAMAGED:
            return None
    return row if isinstance(row, dict) else None
