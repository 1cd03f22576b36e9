"""SwanLab: metrics, pictures and videos with captions; offline runs are kept for `swanlab sync`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from unirl.tracking.backends.base import MovingPreview, Preview, RunAbout
from unirl.tracking.clips import gif_of


class SwanLabMirror:
    """One SwanLab run. SWANLAB_MODE decides where it lives unless `offline` does."""

    name: ClassVar[str] = "swanlab"

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, about: RunAbout) -> None:
        import swanlab

        log_dir = about.root / "swanlab"
        log_dir.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=about.project,
            workspace=about.entity,
            name=about.run_id,
            config=dict(about.config),
            log_dir=str(log_dir),
            mode="offline" if about.offline else None,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def images(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        import swanlab

        media = [swanlab.Image(str(preview.path), caption=preview.caption) for preview in previews]
        self._run.log({f"media/{key}": media}, step=step)

    def videos(self, step: int, key: str, previews: Sequence[MovingPreview]) -> None:
        """As GIF, the one format that SwanLab takes."""
        import swanlab

        media = [swanlab.Video(gif_of(preview.webp), caption=preview.caption) for preview in previews]
        self._run.log({f"media/{key}_videos": media}, step=step)

    def text(self, step: int, key: str, page: str) -> None:
        import swanlab

        self._run.log({f"media/{key}": swanlab.Text(page)}, step=step)

    def finish(self, code: int) -> None:
        self._run.finish() if code == 0 else self._run.finish(state="crashed", error=f"exit status {code}")
