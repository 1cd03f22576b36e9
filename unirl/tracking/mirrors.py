"""All mirrors of a run: started when first needed, and dropped with a warning when they fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from unirl.types.secrets import redacted

if TYPE_CHECKING:
    from unirl.tracking.timing import Span  # it imports torch, which readers of runs do without


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
    tracks: tuple[str, ...] = ()
    """The tracks whose names may stand before those of metrics, if there are several."""
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


class Mirror:
    """Copies what a run records to a service. Methods may raise any error: the tracker then drops the mirror.

    A subclass overrides the methods for what its service takes.
    """

    name: ClassVar[str]
    starts_with_run: ClassVar[bool] = False
    """Starts when the tracker opens, so that it also gets the first events. Others start at the first metrics, when it
    is known where a resumed run continues."""
    url: str | None = None
    """The address at which this process serves the run."""
    wants_spans: ClassVar[bool] = False
    """Gets the spans of each step. Without such a mirror, none are recorded."""

    def start(self, about: RunInfo) -> None:
        """Imports the library of the service and opens a run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step or of an evaluation."""

    def images(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        """Images of a step, all of one size, under a key such as `samples` (a page of them) or `samples_images`."""

    def videos(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        """Videos of a step under such a key."""

    def text(self, step: int, key: str, page: str) -> None:
        """Texts of a step under such a key: the beginning of a Markdown page. It contains untrusted text."""

    def event(self, name: str, fields: Mapping[str, object]) -> None:
        """An event of `metrics.EVENTS`, without secrets. Only for mirrors that have started."""

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        """The phases and calls that ended since the previous step. A parent follows its children."""

    def probe(self, state: Callable[[], Mapping[str, float]]) -> None:
        """A function that any thread may call for the present state of the run (`metrics.STATE`)."""

    def finish(self, code: int) -> None:
        """Closes the run of the service. `code` is our exit status."""


class Mirrors:
    """Calls every mirror that works. A mirror starts when it is first needed and is dropped at its first error.

    `report(name, error)` is called for each dropped mirror.
    """

    def __init__(self, mirrors: Sequence[Mirror], about: RunInfo, report: Callable[[str, Exception], None]) -> None:
        self._waiting = list(mirrors)
        self._running: list[Mirror] = []
        self._about = replace(about, config={key: redacted(value, key) for key, value in about.config.items()})
        self._report = report

    def open(self) -> None:
        """Starts the mirrors that start with the run."""
        self._start([mirror for mirror in self._waiting if mirror.starts_with_run])

    def resume_after(self, step: int) -> None:
        """Sets the step after which the run continues, for mirrors that have not started."""
        self._about = replace(self._about, resumed_step=step)

    def each(self, call: Callable[[Mirror], None]) -> None:
        """Calls `call` with every mirror, after starting it if needed."""
        self._start(self._waiting)
        self.tell(call)

    def tell(self, call: Callable[[Mirror], None]) -> None:
        """Calls `call` with the mirrors that have started."""
        for mirror in tuple(self._running):
            try:
                call(mirror)
            except Exception as error:  # the library of a service may raise any error, and training must not stop
                self._running.remove(mirror)
                self._report(mirror.name, error)

    def finish(self, code: int) -> None:
        """Closes the mirrors that have started."""
        self.tell(lambda mirror: mirror.finish(code))

    def _start(self, mirrors: Sequence[Mirror]) -> None:
        for mirror in tuple(mirrors):
            self._waiting.remove(mirror)
            try:
                mirror.start(self._about)
            except Exception as error:  # as above
                self._report(mirror.name, error)
            else:
                self._running.append(mirror)
