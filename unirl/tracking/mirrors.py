"""All mirrors of a run behind one face: started when first needed, and dropped with one loud word when they fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from unirl.tracking.run_directory import redact_tree


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts about the run that a mirror gets when it starts."""

    root: Path
    project: str
    run_id: str
    """Name of the run directory. The mirror uses the same id, so a resumed run continues in it."""
    entity: str | None = None
    offline: bool = False
    """Write locally without network access."""
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed_step: int | None = None
    """The step after which a resumed run continues. Later steps in the mirror are superseded."""

    @staticmethod
    def of(root: Path, run_id: str) -> RunInfo:
        """The facts that follow from the run directory."""
        return RunInfo(root=root, project=root.resolve().parent.name, run_id=run_id)


@dataclass(frozen=True)
class ImageFile:
    """An image to show in a mirror."""

    path: Path
    caption: str


@dataclass(frozen=True)
class VideoFile:
    """A video to show in a mirror: an animated WebP, and an MP4 if one was written."""

    webp: Path
    mp4: Path | None
    caption: str

    @staticmethod
    def of(webp: Path, caption: str) -> VideoFile:
        """Finds the MP4 beside the WebP."""
        mp4 = webp.with_suffix(".mp4")
        return VideoFile(webp, mp4 if mp4.exists() else None, caption)


class Mirror(Protocol):
    """Copies what a run records to a service. Methods may raise any error: the tracker then drops the mirror."""

    name: ClassVar[str]

    def start(self, about: RunInfo) -> None:
        """Imports the library of the service and opens a run."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step."""
        ...

    def images(self, step: int, key: str, previews: Sequence[ImageFile]) -> None:
        """Images of a step under a key such as `samples` or `eval`."""
        ...

    def videos(self, step: int, key: str, previews: Sequence[VideoFile]) -> None:
        """Videos of a step under such a key."""
        ...

    def text(self, step: int, key: str, page: str) -> None:
        """Texts of a step under such a key: the beginning of a Markdown page. It contains untrusted text."""
        ...

    def finish(self, code: int) -> None:
        """Closes the run of the service. `code` is our exit status."""
        ...


class Mirrors:
    """Calls every mirror that works. A mirror starts when it is first needed and is dropped at its first error.

    `report(name, error)` is called for each dropped mirror.
    """

    def __init__(self, mirrors: Sequence[Mirror], about: RunInfo, report: Callable[[str, Exception], None]) -> None:
        self._waiting = list(mirrors)
        self._working: list[Mirror] = []
        self._about = replace(about, config=redact_tree(about.config))
        self._report = report

    def resume_after(self, step: int) -> None:
        """Sets the step after which the run continues, for mirrors that have not started."""
        self._about = replace(self._about, resumed_step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._start()
        self._working = [mirror for mirror in self._working if self._try(mirror, partial(mirror.log, step, metrics))]

    def images(self, step: int, key: str, previews: Sequence[ImageFile]) -> None:
        self._start()
        self._working = [m for m in self._working if self._try(m, partial(m.images, step, key, previews))]

    def videos(self, step: int, key: str, previews: Sequence[VideoFile]) -> None:
        self._start()
        self._working = [m for m in self._working if self._try(m, partial(m.videos, step, key, previews))]

    def text(self, step: int, key: str, page: str) -> None:
        self._start()
        self._working = [m for m in self._working if self._try(m, partial(m.text, step, key, page))]

    def finish(self, code: int) -> None:
        for mirror in self._working:
            self._try(mirror, partial(mirror.finish, code))
        self._working = []

    def _start(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._working += [mirror for mirror in waiting if self._try(mirror, partial(mirror.start, self._about))]

    def _try(self, mirror: Mirror, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # the library of a service may raise any error, and training must not stop
            self._report(mirror.name, error)
            return False
        return True
