"""Runs: starting one in its directory, and finding the recipe and weights behind one that exists."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import unirl
from unirl.cli.failures import Session, failure_of
from unirl.config.errors import CheckpointError, ConfigError, DependencyError, UsageError

if TYPE_CHECKING:
    from unirl.config.load import Recipe
    from unirl.config.recipe import RecipeConfig
    from unirl.tracking.run import RunDirectory
    from unirl.tracking.tracker import Tracker
    from unirl.train.backend.checkpoint import Checkpoint
    from unirl.trainer.base import Trainer


@contextmanager
def open_run(recipe: Recipe, session: Session) -> Iterator[Trainer]:
    """The trainer of a recipe, in its run directory. However the block ends, the directory says so."""
    from unirl.train.backend.checkpoint import CheckpointStore
    from unirl.trainer.build import build_diffusion_trainer

    config = recipe.config
    with open_tracker(recipe, run_root(config, recipe.file.name), session) as tracker:
        checkpoints = CheckpointStore(tracker.run.checkpoints, keep=config.keep_checkpoints)
        yield build_diffusion_trainer(recipe, tracker, checkpoints)


def run_root(config: RecipeConfig, recipe: str) -> Path:
    """Where a run of `recipe` lives. `resume=latest` is its newest run, an error if there is none."""
    from unirl.tracking.run import RunDirectoryError, default_root, latest_run

    run = config.run
    if run.dir is not None:
        return Path(run.dir).expanduser()
    if config.resume == "latest" and run.name is None:
        found = latest_run(run.project, recipe)
        if found is None:
            raise CheckpointError(
                f"resume=latest: there is no run of {recipe} in runs/{run.project}. Start one with resume=auto",
                code=7001,
            )
        return found
    try:
        return default_root(run.project, recipe, run.name)
    except RunDirectoryError as error:
        raise ConfigError(str(error), code=2004) from error


@contextmanager
def open_tracker(recipe: Recipe, root: Path, session: Session) -> Iterator[Tracker]:
    """The run directory with its files, console and mirrors."""
    from unirl.tracking.backends import MirrorUnavailable, make_mirrors
    from unirl.tracking.backends.base import RunAbout
    from unirl.tracking.console import Console
    from unirl.tracking.tracker import Tracker

    config = recipe.config
    try:
        mirrors = make_mirrors(config.tracking.mirrors)
    except MirrorUnavailable as error:
        raise DependencyError(str(error), code=3001) from error
    run = _run_directory(recipe, root, session)
    session.run_dir = run.root
    about = RunAbout(
        root=run.root,
        project=config.run.project,
        run_id=run.id,
        entity=config.tracking.entity,
        offline=config.tracking.offline,
        config=recipe.resolved(),
    )
    tracker = Tracker(run, console=Console(config.num_rollouts), mirrors=mirrors, about=about)
    with ExitStack() as stack:
        stack.push(_Ending(tracker))
        tracker.banner(_banner(recipe, run))
        yield tracker
        tracker.finish()


@dataclass
class _Ending:
    """Writes into run.json how a run ended that did not end well."""

    tracker: Tracker

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            failure = failure_of(error)
            # A full disk may be what ended the run; it must not hide the error that is on its way.
            with suppress(OSError):
                self.tracker.finish(failure.status, failure.message)


def _run_directory(recipe: Recipe, root: Path, session: Session) -> RunDirectory:
    from unirl.tracking.run import RunDirectory, RunDirectoryError, RunIdentity

    identity = RunIdentity(
        project=recipe.config.run.project,
        recipe=recipe.file.name,
        argv=session.argv,
        seed=recipe.value("sampling.seed"),
    )
    try:
        run = RunDirectory(root, identity)
    except RunDirectoryError as error:
        raise ConfigError(str(error), code=2004) from error
    run.write_config(recipe.composed.text(resolve_all=True), recipe.resolved_text())
    return run


def _banner(recipe: Recipe, run: RunDirectory):
    from unirl.config.geometry import geometry_table
    from unirl.tracking.console import Banner

    geometry = [line.strip() for line in geometry_table(recipe.config).removeprefix("geometry").splitlines()]
    mirrors = ", ".join(recipe.config.tracking.mirrors)
    return Banner(
        title=f"unirl {unirl.__version__}  {recipe.file.name}  ->  {run.root}",
        lines=[
            *zip(("geometry", ""), geometry, strict=False),
            ("tracking", f"files{', ' + mirrors if mirrors else ''}"),
            ("stop", "Ctrl-C (finishes the step and saves)"),
            ("resume", f"unirl train {recipe.file.name} run.dir={run.root}"),
        ],
    )


# Runs that exist


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, and the recipe that wrote it."""

    checkpoint: Checkpoint
    recipe: Recipe

    @property
    def root(self) -> Path:
        """The run directory that the checkpoint lies in, or the checkpoint itself when it was moved out of one."""
        folder = self.checkpoint.path.parent
        return folder.parent if folder.name == "checkpoints" else self.checkpoint.path


def saved_run(path: str, overrides: Sequence[str] = ()) -> SavedRun:
    """The valid checkpoint at `path` (a checkpoint, or a run: its newest), with the recipe that is saved in it."""
    from unirl.config.compose import ComposedConfig
    from unirl.config.layers import Layer
    from unirl.config.load import check
    from unirl.config.overrides import command_line_layer
    from unirl.config.recipes import RecipeFile
    from unirl.train.backend.checkpoint import open_checkpoint

    if not Path(path).is_dir():
        raise UsageError(
            f"{path}: there is no such folder. Give a run (runs/<project>/<name>) or a checkpoint", code=2001
        )
    found = open_checkpoint(path)
    file = found.path / "trainer.json"
    tree = json.loads(file.read_text())["recipe"] | {"resume": "none", "scale": "full"}
    layers = (Layer("recipe", tree), command_line_layer(overrides, tree))
    return SavedRun(found, check(ComposedConfig(RecipeFile(f"saved/{found.path.name}", file), layers)))


def output_folder(saved: SavedRun, kind: str, out: str | None) -> Path:
    """Where a command puts what it makes of a checkpoint: `--out`, else `<run>/<kind>/<checkpoint>`."""
    return Path(out) if out else saved.root / kind / saved.checkpoint.path.name
