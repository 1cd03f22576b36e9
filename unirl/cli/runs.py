"""Runs: opening one in its directory, and finding the recipe and weights behind one that exists."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from unirl.cli.failures import Session, failure_of
from unirl.config.errors import InvalidValueError, UsageError

if TYPE_CHECKING:
    from unirl.config.load import Recipe
    from unirl.config.merge import Tree
    from unirl.tracking.tracker import Tracker
    from unirl.train.backend.checkpoint import Checkpoint
    from unirl.trainer.base import Trainer
    from unirl.types.protocols import DataSource


@contextmanager
def open_run(recipe: Recipe, session: Session) -> Iterator[Trainer]:
    """The trainer of a recipe, in its run directory."""
    from unirl.trainer.build import check_reward, data_of
    from unirl.trainer.run import open_tracker

    data = data_of(recipe)
    check_reward(recipe.config)
    with _trainer(recipe, data, open_tracker(recipe, session.argv), session) as trainer:
        yield trainer


@contextmanager
def open_saved(saved: SavedRun, out: Path, session: Session) -> Iterator[Trainer]:
    """The trainer of a saved run, without its checkpoint yet; what it reports goes to `out`, and not to the console."""
    from unirl.tracking.run_directory import RunDirectory, RunDirectoryError, RunIdentity
    from unirl.tracking.tracker import Tracker
    from unirl.trainer.build import data_of

    data = data_of(saved.recipe)
    config = saved.recipe.config
    identity = RunIdentity(project=config.run.project, recipe=saved.recipe.file.name, argv=session.argv)
    try:
        run = RunDirectory(out, identity)
    except RunDirectoryError as error:
        raise InvalidValueError(str(error)) from error
    with _trainer(saved.recipe, data, Tracker(run), session) as trainer:
        yield trainer


@contextmanager
def _trainer(recipe: Recipe, data: DataSource, tracker: Tracker, session: Session) -> Iterator[Trainer]:
    """The trainer that reports to `tracker`. However the block ends, the run directory says so."""
    from unirl.trainer.build import join_parts

    session.run_dir = tracker.run.root
    with _Ending(tracker), closing(join_parts(recipe, data, tracker)) as trainer:
        yield trainer


@dataclass
class _Ending(AbstractContextManager[None]):
    """Writes into run.json how a run ended."""

    tracker: Tracker

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.tracker.finish()
            return
        # A full disk may be what ended the run; it must not hide the error that is on its way.
        with suppress(OSError):
            self.tracker.finish(failure_of(error).status, f"{type(error).__name__}: {error}")


# Runs that exist


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, and the recipe that wrote it."""

    checkpoint: Checkpoint
    recipe: Recipe


def saved_run(path: str, overrides: Sequence[str] = (), settings: Tree | None = None) -> SavedRun:
    """The valid checkpoint at `path` (a checkpoint, or a run: its newest), with the recipe that is saved in it.

    Args:
        overrides: `key=value` from the command line.
        settings: what the command itself sets, as a tree.
    """
    from unirl.config.compose import ComposedConfig
    from unirl.config.load import check
    from unirl.config.merge import Layer
    from unirl.config.overrides import command_line_layer
    from unirl.config.recipe_files import RecipeFile
    from unirl.train.backend.checkpoint import open_checkpoint

    if not Path(path).is_dir():
        raise UsageError(f"{path}: there is no such folder. Give a run (runs/<project>/<name>) or a checkpoint")
    found = open_checkpoint(path)
    file = found.path / "trainer.json"
    tree = json.loads(file.read_text())["recipe"] | {"resume": "none", "scale": "full"}
    layers = (Layer("recipe", tree), Layer("unirl", settings or {}), command_line_layer(overrides, tree))
    return SavedRun(found, check(ComposedConfig(RecipeFile(f"saved/{found.path.name}", file), layers)))


def output_folder(path: str, kind: str, out: str | None) -> Path:
    """Where a command puts what it makes of a run or checkpoint: `out`, else a new folder in `<run>/<kind>`."""
    if out is not None:
        return Path(out)
    folder = Path(path).resolve()
    inside = folder.parent.name == "checkpoints"
    root, name = (folder.parent.parent, folder.name) if inside else (folder, "latest")
    return root / kind / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
