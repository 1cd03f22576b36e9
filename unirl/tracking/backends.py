"""W&B, TensorBoard, SwanLab, trackio and MLflow as mirrors: a recipe names them in `tracking.mirrors`."""

from __future__ import annotations

import html
import io
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
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


class TrackioMirror(Mirror):
    """One trackio run. It is in the database of this user (TRACKIO_DIR), which `trackio show` opens.

    TRACKIO_SPACE_ID and TRACKIO_SERVER_URL name a Space or a server that gets it instead, unless `offline` is set.
    """

    name: ClassVar[str] = "trackio"
    remotes: ClassVar[tuple[str, ...]] = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")

    def start(self, about: RunInfo) -> None:
        remote = next((name for name in self.remotes if os.environ.get(name)), None)
        if about.offline and remote is not None:
            raise ValueError(f"tracking.offline=true, but {remote} is set, and trackio would send the run there")
        import trackio

        self._trackio = trackio
        with redirect_stdout(io.StringIO()):  # it prints where the run is, over our progress bar
            self._run = trackio.init(
                project=about.project,
                name=about.run_id,
                config=dict(about.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def images(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        """One key for each image: trackio takes no lists of them."""
        media = [self._trackio.Image(str(preview.path), caption=preview.caption) for preview in previews]
        self._run.log({f"media/{key}_{number}": image for number, image in enumerate(media)}, step=step)

    def videos(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        """As MP4 where there is one, else as GIF."""
        with tempfile.TemporaryDirectory() as folder:
            media = {
                f"media/{key}_videos_{number}": self._trackio.Video(str(path), caption=preview.caption)
                for number, (preview, path) in enumerate(_video_files(previews, Path(folder)))
            }
            self._run.log(media, step=step)  # copies the files

    def text(self, step: int, key: str, page: str) -> None:
        self._run.log({f"media/{key}": self._trackio.Markdown(page)}, step=step)

    def finish(self, code: int) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()


class MLflowMirror(Mirror):
    """One MLflow run, in the store that MLFLOW_TRACKING_URI names, or in `<run.dir>/mlflow` if `offline`.

    MLflow has its own ids. A resumed run is found by its tag `unirl.run`.
    """

    name: ClassVar[str] = "mlflow"
    tag: ClassVar[str] = "unirl.run"
    batch: ClassVar[int] = 100
    """Parameters that MLflow takes at once."""
    longest: ClassVar[int] = 6000
    """Characters of a parameter that MLflow takes."""

    def start(self, about: RunInfo) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it would report its use to its makers
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)  # they print how they make a database
        self._metric = Metric
        folder = (about.root / "mlflow").resolve()
        if about.offline:
            folder.mkdir(exist_ok=True)
        self._client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db" if about.offline else None)
        experiment = self._client.get_experiment_by_name(about.project)
        if experiment is not None:
            identifier = experiment.experiment_id
        else:
            place = (folder / "artifacts").as_uri() if about.offline else None
            identifier = self._client.create_experiment(about.project, artifact_location=place)
        runs = self._client.search_runs([identifier], filter_string=f"tags.`{self.tag}` = '{about.run_id}'")
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {self.tag: about.run_id}
        self._run = self._client.create_run(identifier, run_name=about.run_id, tags=tags).info.run_id
        params = [Param(key, str(value)[: self.longest]) for key, value in _leaves(about.config)]
        for start in range(0, len(params), self.batch):
            self._client.log_batch(self._run, params=params[start : start + self.batch])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(name.replace("@", "_at_"), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=values)

    def images(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        """As images with a slider over steps. The captions are in a file beside them."""
        for number, preview in enumerate(previews):
            with Image.open(preview.path) as image:
                pixels = image.convert("RGB")
            self._client.log_image(self._run, pixels, key=f"{key}/{number}", step=step, synchronous=True)
        captions = {f"{key}/{number}": preview.caption for number, preview in enumerate(previews)}
        self._client.log_dict(self._run, captions, f"captions/{key}/step-{step:06d}.json")

    def videos(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        """As MP4 where there is one, else as GIF."""
        with tempfile.TemporaryDirectory() as folder:
            for _, path in _video_files(previews, Path(folder)):
                self._client.log_artifact(self._run, str(path), f"videos/{key}/step-{step:06d}")

    def text(self, step: int, key: str, page: str) -> None:
        self._client.log_text(self._run, page, f"texts/{key}/step-{step:06d}.md")

    def finish(self, code: int) -> None:
        self._client.set_terminated(self._run, "FINISHED" if code == 0 else "FAILED")


def _video_files(previews: Sequence[Preview], folder: Path) -> Iterator[tuple[Preview, Path]]:
    """Each video with its MP4, or with a GIF that is written into `folder`."""
    for preview in previews:
        path = preview.mp4
        if path is None:
            path = folder / f"{preview.path.stem}.gif"
            path.write_bytes(gif_of(preview.path))
        yield preview, path


def _leaves(tree: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """The values of nested mappings, with their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


MIRRORS: dict[str, type[Mirror]] = {
    mirror.name: mirror for mirror in (WandbMirror, TensorBoardMirror, SwanLabMirror, TrackioMirror, MLflowMirror)
}


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
