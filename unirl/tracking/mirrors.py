"""All mirrors of a run behind one face: started when first needed, and dropped with one loud word when they fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from unirl.tracking.backends.base import Mirror, MovingPreview, Preview, RunAbout
from unirl.tracking.redact import redact_tree


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
