"""Runs that exist: the recipe and the weights behind a run directory or a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.config.compose import ComposedConfig
from unirl.config.errors import InvalidValueError, UsageError
from unirl.config.load import Recipe, check
from unirl.config.merge import Layer, Tree
from unirl.config.overrides import command_line_layer
from unirl.config.recipe_files import RecipeFile
from unirl.tracking.run_directory import RunDirectory, RunDirectoryError, RunIdentity
from unirl.tracking.tracker import Tracker
from unirl.train.backend.checkpoint import Checkpoint, open_checkpoint
from unirl.trainer.run_state import STATE_FILE, read_state


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, and the recipe that wrote it."""

    checkpoint: Checkpoint
    recipe: Recipe


def saved_run(path: str, overrides: Sequence[str] = (), settings: Tree | None = None) -> SavedRun:
    """The valid checkpoint at `path` (a checkpoint, or a run: its newest), with the recipe that is saved in it.

    Args:
        overrides: `key=value` from the command line.
        settings: keys that the command itself sets, as a tree.
    """
    if not Path(path).is_dir():
        raise UsageError(f"{path}: there is no such folder. Give a run (runs/<project>/<name>) or a checkpoint")
    checkpoint = open_checkpoint(path)
    tree = read_state(checkpoint.path)["recipe"] | {"resume": "none", "scale": "full"}
    layers = (Layer("recipe", tree), Layer("unirl", settings or {}), command_line_layer(overrides, tree))
    file = RecipeFile(f"saved/{checkpoint.path.name}", checkpoint.path / STATE_FILE)
    return SavedRun(checkpoint, check(ComposedConfig(file, layers)))


def quiet_tracker(saved: SavedRun, folder: Path, argv: Sequence[str]) -> Tracker:
    """A tracker that reports to `folder`, and not to the console.

    Raises:
        ConfigError: 2004 when the folder cannot be used.
    """
    identity = RunIdentity(project=saved.recipe.config.run.project, recipe=saved.recipe.file.name, argv=argv)
    try:
        return Tracker(RunDirectory(folder, identity))
    except RunDirectoryError as error:
        raise InvalidValueError(str(error)) from error
