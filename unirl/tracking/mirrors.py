"""All mirrors of a run: started when first needed, and dropped with a warning when they fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Protocol

from unirl.types.secrets import redacted


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
    config: Mapping[str, object] = field(default_factory=dict)
    resumed_step: int | None = None
    """The step after which a resumed run continues. Later steps in the mirror are superseded."""


@dataclass(frozen=True)
class Preview:
    """An image file, or a video as an animated WebP, to show in a mirror."""

    path: Path
    caption: str

    @property
    def mp4(self) -> Path | None:
        """The MP4 of a video, if one was written beside the WebP."""
        path = self.path.with_suffix(".mp4")
        return path if path.exists() else None


class Mirror(Protocol):
    """Copies what a run records to a service. Methods may raise any error: the tracker then drops the mirror."""

    name: ClassVar[str]

    def start(self, about: RunInfo) -> None:
        """Imports the library of the service and opens a run."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step."""
        ...

    def images(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        """Images of a step, all of one size, under a key such as `samples` (a page of them) or `samples_images`."""
        ...

    def videos(self, step: int, key: str, previews: Sequence[Preview]) -> None:
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
        self._mirrors = list(mirrors)
        self._have_started = False
        self._about = replace(about, config={key: redacted(value, key) for key, value in about.config.items()})
        self._report = report

    def resume_after(self, step: int) -> None:
        """Sets the step after which the run continues, for mirrors that have not started."""
        self._about = replace(self._about, resumed_step=step)

    def each(self, call: Callable[[Mirror], None]) -> None:
        """Calls `call` with every mirror, after starting it if needed."""
        if not self._have_started:
            self._have_started = True
            self._try_each(lambda mirror: mirror.start(self._about))
        self._try_each(call)

    def finish(self, code: int) -> None:
        """Closes the mirrors that have started."""
        if self._have_started:
            self._try_each(lambda mirror: mirror.finish(code))

    def _try_each(self, call: Callable[[Mirror], None]) -> None:
        for mirror in tuple(self._mirrors):
            try:
                call(mirror)
            except Exception as error:  # the library of a service may raise any error, and training must not stop
                self._mirrors.remove(mirror)
                self._report(mirror.name, error)
