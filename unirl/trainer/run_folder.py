"""Opens the run directory of a recipe: where it is, what is printed first, and which trackers mirror it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import unirl
from unirl.config.errors import DependencyError, InvalidValueError
from unirl.config.load import Recipe
from unirl.plan.geometry import geometry_table
from unirl.plan.placement import plan_of
from unirl.tracking.backends import MirrorUnavailable, make_mirrors
from unirl.tracking.console import Banner, Console
from unirl.tracking.mirrors import RunInfo
from unirl.tracking.run_directory import RunDirectory, RunDirectoryError, RunIdentity, default_root, latest_run
from unirl.tracking.tracker import Tracker


def open_tracker(recipe: Recipe, argv: Sequence[str]) -> Tracker:
    """The tracker of a new or continued run, with its banner printed.

    Raises:
        ConfigError: 2004 when the run directory cannot be used.
        DependencyError: 3001 when a mirror's library is not installed.
    """
    config = recipe.config
    try:
        root = run_root(recipe)
        mirrors = make_mirrors(config.tracking.mirrors)
        identity = RunIdentity(project=config.run.project, recipe=recipe.file.name, argv=argv, seed=config.seed)
        run = RunDirectory(root, identity)
    except RunDirectoryError as error:
        raise InvalidValueError(str(error)) from error
    except MirrorUnavailable as error:
        raise DependencyError(str(error)) from error
    about = RunInfo(
        root=root,
        project=config.run.project,
        run_id=run.id,
        entity=config.tracking.entity,
        offline=config.tracking.offline,
        config=recipe.resolved(),
    )
    tracker = Tracker(run, console=Console(config.num_rollouts), mirrors=mirrors, about=about)
    tracker.banner(banner(recipe, root))
    return tracker


def run_root(recipe: Recipe) -> Path:
    """The folder of the run: as set, the newest of this recipe for resume=latest, or a new one."""
    run = recipe.config.run
    if run.dir is not None:
        return Path(run.dir).expanduser()
    if recipe.config.resume == "latest" and run.name is None:
        newest = latest_run(run.project, recipe.file.name)
        if newest is None:
            raise InvalidValueError(
                f"resume=latest, but runs/{run.project} holds no run of {recipe.file.name}: "
                "start one without resume, or name its folder with run.dir"
            )
        return newest
    return default_root(run.project, recipe.file.name, run.name)


def banner(recipe: Recipe, root: Path) -> Banner:
    """The lines that are printed before the first step."""
    geometry = [line.strip() for line in geometry_table(recipe.config).removeprefix("geometry").splitlines()]
    return Banner(
        title=f"unirl {unirl.__version__}  {recipe.file.name}  ->  {root}",
        lines=[
            *zip(("geometry", ""), geometry, strict=False),
            ("placement", plan_of(recipe.config).describe()),
            ("tracking", ", ".join(("files", *recipe.config.tracking.mirrors))),
            ("stop", "Ctrl-C (finishes the step and saves)"),
            ("resume", continuation(recipe, root)),
        ],
    )


def continuation(recipe: Recipe, root: Path) -> str:
    """The command that continues the run in `root` with the same settings."""
    overrides = recipe.composed.overrides
    settings = [setting for setting in overrides if not setting.lstrip("+").startswith(("run.", "resume="))]
    return shlex.join(["unirl", "train", recipe.file.name, *settings, f"run.dir={root}"])
