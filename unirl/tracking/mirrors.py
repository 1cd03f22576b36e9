"""All mirrors of a run behind one face: started when first needed, and dropped with one loud word when they fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from unirl.tracking.run_directory import redact_tree


@dataclass(frozen=True, kw_only=True)
class RunAbout:
    """What a mirror is told of the run when it starts."""

    root: Path
    project: str
    run_id: str
    """The name of the run directory; the mirror's run has the same id, so that a resumed run continues it."""
    entity: str | None = None
    offline: bool = False
    """Write locally, use no network."""
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed_step: int | None = None
    """The step that a resumed run continues after; what a mirror holds of later steps is superseded."""

    @staticmethod
    def of(root: Path, run_id: str) -> RunAbout:
        """What is known of a run by its folder alone."""
        return RunAbout(root=root, project=root.resolve().parent.name, run_id=run_id)


@dataclass(frozen=True)
class Preview:
    """A picture worth mirroring."""

    path: Path
    caption: str


@dataclass(frozen=True)
class MovingPreview:
    """A video worth mirroring: as animated WebP, and as MP4 where there is one."""

    webp: Path
    mp4: Path | None
    caption: str

    @staticmethod
    def of(webp: Path, caption: str) -> MovingPreview:
        """With the MP4 that lies beside it."""
        mp4 = webp.with_suffix(".mp4")
        return MovingPreview(webp, mp4 if mp4.exists() else None, caption)


class Mirror(Protocol):
    """Any method may raise anything: the tracker reports the first failure and goes on without the mirror."""

    name: ClassVar[str]

    def start(self, about: RunAbout) -> None:
        """Opens the mirror's run; imports its library."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step."""
        ...

    def images(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        """Pictures of a step under a key such as `samples` or `eval`."""
        ...

    def videos(self, step: int, key: str, previews: Sequence[MovingPreview]) -> None:
        """Videos of a step under such a key."""
        ...

    def text(self, step: int, key: str, page: str) -> None:
        """Texts of a step under such a key: the beginning of a page of Markdown, whose words others wrote."""
        ...

    def finish(self, code: int) -> None:
        """Closes the mirror's run; `code` is the exit status of ours."""
        ...


class Mirrors:
    """Calls every mirror that still works; `report(mirror's name, error)` is called at the first failure of each."""

    def __init__(self, mirrors: Sequence[Mirror], about: RunAbout, report: Callable[[str, Exception], None]) -> None:
        self._waiting = list(mirrors)
        self._working: list[Mirror] = []
        self._about = replace(about, config=redact_tree(about.config))
        self._report = report

    def resume_after(self, step: int) -> None:
        """Tells mirrors that are not yet started that the run continues after `step`."""
        self._about = replace(self._about, resumed_step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._start()
        self._working = [mirror for mirror in self._working if self._try(mirror, partial(mirror.log, step, metrics))]

    def images(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        self._start()
        self._working = [m for m in self._working if self._try(m, partial(m.images, step, key, previews))]

    def videos(self, step: int, key: str, previews: Sequence[MovingPreview]) -> None:
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
        except Exception as error:  # a service's library may raise anything, and training must not stop for it
            self._report(mirror.name, error)
            return False
        return True
