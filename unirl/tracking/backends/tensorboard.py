"""TensorBoard: event files in the run directory, readable by `tensorboard --logdir`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from unirl.tracking.backends.base import MovingPreview, Preview, RunAbout
from unirl.tracking.clips import gif_of


class TensorBoardMirror:
    """Writes `<run.dir>/tensorboard`; after a resume, points of later steps are purged by TensorBoard itself."""

    name: ClassVar[str] = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, about: RunAbout) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if about.resumed_step is None else about.resumed_step + 1
        self._writer = SummaryWriter(str(about.root / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def images(self, step: int, key: str, previews: Sequence[Preview]) -> None:
        for number, preview in enumerate(previews):
            with Image.open(preview.path) as picture:
                self._writer.add_image(f"{key}/{number}", np.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def videos(self, step: int, key: str, previews: Sequence[MovingPreview]) -> None:
        """As GIF among the images: TensorBoard has no videos of its own."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for number, preview in enumerate(previews):
            gif = gif_of(preview.webp)
            with Image.open(io.BytesIO(gif)) as picture:
                width, height = picture.size
            image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=gif)
            value = Summary.Value(tag=f"{key}_videos/{number}", image=image)
            self._writer.file_writer.add_summary(Summary(value=[value]), step)

    def text(self, step: int, key: str, page: str) -> None:
        self._writer.add_text(key, page, step)

    def finish(self, code: int) -> None:
        self._writer.close()
