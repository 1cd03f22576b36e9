"""The command that starts a fake server of an engine, which takes the place of the real one at scale=toy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from unirl.models.base import Pipeline


def fake_command(engine: str, pipeline: Pipeline, root: Path, port: int) -> list[str]:
    """`unirl engines fake` with the classes and the dtype of a pipeline, and the model in `root`."""
    kinds: dict[str, type[Any]] = {"--bundle": type(pipeline.bundle), "--pipeline": type(pipeline)}
    classes = [word for option, kind in kinds.items() for word in (option, f"{kind.__module__}.{kind.__qualname__}")]
    dtype = str(pipeline.bundle.dtype).removeprefix("torch.")
    words = [sys.executable, "-m", "unirl.cli", "engines", "fake", "--engine", engine, *classes]
    return [*words, "--path", str(root), "--port", str(port), "--dtype", dtype]
