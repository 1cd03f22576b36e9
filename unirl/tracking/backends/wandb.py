"""Weights & Biases: metrics on the axis of our own step, pictures and videos with captions."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from unirl.tracking.backends.base import MovingPreview, Preview, RunAbout
from unirl.tracking.clips import gif_of


class WandbMirror:
    """One W&B run with the id of ours. WANDB_MODE=offline, or `offline`, keeps it on disk for `wandb sync`."""

    name: ClassVar[str] = "wandb"

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, about: RunAbout) -> None:
        import wandb

        self._run = wandb.init(
            project=about.project,
            entity=about.entity,
            name=about.run_id,
            id=about.run_id,
            resume="allow",
            dir=str(about.root),
            config=dict(about.config),
            mode="offline" if about.offline else None,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # W&B's own step can only grow; ours goes back when a run resumes from an earlier checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def images(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        import wandb

        media = [wandb.Image(str(preview.path), caption=preview.caption) for preview in previews]
        self._run.log({"step": step, f"media/{key}": media})

    def videos(self, step: int, key: str, previews: Sequence[MovingPreview]) -> None:
        """As MP4 where there is one, else as GIF: W&B takes no WebP."""
        import wandb

        media = []
        for preview in previews:
            source = str(preview.mp4) if preview.mp4 else io.BytesIO(gif_of(preview.webp))
            media.append(wandb.Video(source, caption=preview.caption, format="mp4" if preview.mp4 else "gif"))
        self._run.log({"step": step, f"media/{key}_videos": media})

    def text(self, step: int, key: str, page: str) -> None:
        import wandb

        self._run.log({"step": step, f"media/{key}": wandb.Html(f"<pre>{html.escape(page)}</pre>", inject=False)})

    def finish(self, code: int) -> None:
        self._run.finish(exit_code=code)
