"""W&B, TensorBoard and SwanLab as mirrors: a recipe names them in `tracking.mirrors`."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import ClassVar

import numpy as np
from PIL import Image

from unirl.tracking.mirrors import Mirror, Preview, RunInfo
from unirl.tracking.videos import gif_of


class WandbMirror(Mirror):
    """One W&B run with the id of ours. WANDB_MODE=offline, or `offline`, keeps it on disk for `wandb sync`."""

    name: ClassVar[str] = "wandb"

    def start(self, about: RunInfo) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=about.project,
            entity=about.entity,
            name=about.run_id,
            id=about.run_id,
            resume="allow",
            dir=str(about.root),
            config=dict(about.config),
            mode="offline" if about.offline else None,
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True),
        )
        # W&B's own step can only grow; ours goes back when a run resumes from an earlier checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def images(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        media = [self._wandb.Image(str(preview.path), caption=preview.caption) for preview in previews]
        self._run.log({"step": step, f"media/{key}": media})

    def videos(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        """As MP4 where there is one, else as GIF: W&B takes no WebP."""
        media = []
        for preview in previews:
            mp4 = preview.mp4
            source = str(mp4) if mp4 else io.BytesIO(gif_of(preview.path))
            media.append(self._wandb.Video(source, caption=preview.caption, format="mp4" if mp4 else "gif"))
        self._run.log({"step": step, f"media/{key}_videos": media})

    def text(self, step: int, key: str, page: str) -> None:
        self._run.log({"step": step, f"media/{key}": self._wandb.Html(f"<pre>{html.escape(page)}</pre>", inject=False)})

    def finish(self, code: int) -> None:
        self._run.finish(exit_code=code)


class TensorBoardMirror(Mirror):
    """Writes `<run.dir>/tensorboard`; after a resume, points of later steps are purged by TensorBoard itself."""

    name: ClassVar[str] = "tensorboard"

    def start(self, about: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if about.resumed_step is None else about.resumed_step + 1
        self._writer = SummaryWriter(str(about.root / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def images(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        for number, preview in enumerate(previews):
            with Image.open(preview.path) as image:
                self._writer.add_image(f"{key}/{number}", np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def videos(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        """As GIF among the images: TensorBoard has no videos of its own."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for number, preview in enumerate(previews):
            gif = gif_of(preview.path)
            with Image.open(io.BytesIO(gif)) as image:
                width, height = image.size
            image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=gif)
            value = Summary.Value(tag=f"{key}_videos/{number}", image=image)
            self._writer.file_writer.add_summary(Summary(value=[value]), step)

    def text(self, step: int, key: str, page: str) -> None:
        self._writer.add_text(key, page, step)

    def finish(self, code: int) -> None:
        self._writer.close()


class SwanLabMirror(Mirror):
    """One SwanLab run. SWANLAB_MODE decides where it lives unless `offline` does."""

    name: ClassVar[str] = "swanlab"

    def start(self, about: RunInfo) -> None:
        import swanlab

        self._swanlab = swanlab
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
        media = [self._swanlab.Image(str(preview.path), caption=preview.caption) for preview in previews]
        self._run.log({f"media/{key}": media}, step=step)

    def videos(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        """As GIF, the one format that SwanLab takes."""
        media = [self._swanlab.Video(gif_of(preview.path), caption=preview.caption) for preview in previews]
        self._run.log({f"media/{key}_videos": media}, step=step)

    def text(self, step: int, key: str, page: str) -> None:
        self._run.log({f"media/{key}": self._swanlab.Text(page)}, step=step)

    def finish(self, code: int) -> None:
        self._run.finish() if code == 0 else self._run.finish(state="crashed", error=f"exit status {code}")


MIRRORS: dict[str, type[Mirror]] = {"wandb": WandbMirror, "tensorboard": TensorBoardMirror, "swanlab": SwanLabMirror}


class MirrorUnavailable(ValueError):
    """A mirror was asked for whose library is not installed."""


def make_mirrors(names: Sequence[str]) -> tuple[Mirror, ...]:
    """The mirrors of these names; their libraries are found but not imported. Raises MirrorUnavailable, ValueError."""
    for name in names:
        if name not in MIRRORS:
            raise ValueError(f"tracking.mirrors: unknown mirror {name!r}; there are {', '.join(sorted(MIRRORS))}")
        check_library(name, name, f"tracking.mirrors names {name!r}", "remove it from tracking.mirrors")
    return tuple(MIRRORS[name]() for name in names)


def check_library(module: str, extra: str, who: str, way_out: str) -> None:
    """Raises MirrorUnavailable if a library is not installed. It is not imported."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # a parent package is absent
        spec = None
    if spec is None or spec.origin is None:  # no code: W&B leaves a folder of runs with its name
        raise MirrorUnavailable(
            f"{who}, but the package {module} is not installed. Install it with pip install 'unirl[{extra}]', or "
            f"{way_out}"
        )
