"""Run directories: opened for a recipe, with a banner and trackers, or read back with their recipe and weights."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType

import unirl
from unirl.config.compose import ComposedConfig
from unirl.config.errors import AddressError, DependencyError, IncompatibleError, InvalidValueError
from unirl.config.failures import failure_of
from unirl.config.live import TrackingConfig
from unirl.config.load import Recipe, check
from unirl.config.merge import ConfigLayer, Tree
from unirl.config.overrides import command_line_layer
from unirl.config.recipe_files import RecipeFile
from unirl.plan.compatibility import KEPT_BY
from unirl.plan.geometry import geometry_table
from unirl.plan.placement import plan_of
from unirl.plan.preflight import needs_of
from unirl.plan.threads import ThreadChoice
from unirl.plan.tiling import leaves_tiling_open, tiling_key, with_tiling
from unirl.tracking.backends import MirrorUnavailable, check_library, make_mirrors
from unirl.tracking.console import LEGEND, Console
from unirl.tracking.mirrors import Mirror, RunInfo
from unirl.tracking.owner import RunDirectoryError
from unirl.tracking.prometheus import PrometheusMirror
from unirl.tracking.run_directory import REMARKS, RunDirectory, RunIdentity, default_root, latest_run
from unirl.tracking.traces import OpenTelemetryMirror
from unirl.tracking.tracker import Tracker, Watcher
from unirl.train.backend.checkpoint import Checkpoint, open_checkpoint, still_there
from unirl.trainer.resume import continued
from unirl.trainer.run_state import STATE_FILE, policy_folder, read_state, saved_choices

LEGEND_WIDTH = 69
"""Columns of the text beside a label of the banner on a terminal of 80."""


def open_tracker(recipe: Recipe, root: Path, argv: Sequence[str], threads: ThreadChoice | None = None) -> Tracker:
    """The tracker of a new or continued run in the folder `root`, with its banner printed.

    Args:
        threads: the threads of each process, for the banner and run.json. None: not chosen by the run.

    Raises:
        ConfigError: 2004 when the run directory cannot be used.
        DependencyError: 3001 when a mirror's library is not installed.
        AddressError: 3003 when the port of the metrics cannot be used.
    """
    config = recipe.config
    with ExitStack() as undo:
        try:
            mirrors = make_mirrors(config.tracking.mirrors)
            live = live_mirrors(config.tracking, undo)
            identity = RunIdentity(
                project=config.run.project, recipe=recipe.file.name, argv=argv, seed=config.seed, scale=config.scale,
                determinism="statistical" if config.asynchronous.is_free else "bitwise",
            )  # fmt: skip
            run = RunDirectory(root, identity)
        except RunDirectoryError as error:
            raise InvalidValueError(str(error)) from error
        except MirrorUnavailable as error:
            raise DependencyError(str(error)) from error
        # Not a generator: one that `pop_all` drops is closed, and would record its own GeneratorExit.
        undo.push(partial(record_failure, run.close))
        about = RunInfo(
            root=root,
            project=config.run.project,
            run_id=run.id,
            entity=config.tracking.entity,
            offline=config.tracking.offline,
            config=recipe.public(),
            tracks=tracks_of(recipe),
        )
        if threads is not None:
            run.note(threads={"per_process": threads.count, "why": threads.why})
        console = Console(config.num_rollouts, log=root / "logs" / "console.log")
        tracker = Tracker(
            run,
            console=console,
            mirrors=(*mirrors, *live),
            about=about,
            tracks=tracks_of(recipe),
            keep_samples=config.tracking.keep_samples,
        )
        undo.pop_all()  # the tracker closes the folder and the mirrors
        undo.push(partial(record_failure, tracker.finish))
        banner = banner_lines(recipe, root, threads)
        watched = [("metrics", mirror.url) for mirror in live if mirror.url]
        console.banner(f"unirl {unirl.__version__}  {recipe.file.name}  ->  {root}", [*banner, *watched])
        undo.pop_all()
        return tracker


def live_mirrors(config: TrackingConfig, undo: ExitStack) -> list[Mirror]:
    """The mirrors that watch a run while it goes on.

    Args:
        undo: gets what closes them if the run does not start.

    Raises:
        MirrorUnavailable: when a library is not installed.
        AddressError: 3003.
    """
    mirrors: list[Mirror] = []
    if config.prometheus is not None:
        check_library("prometheus_client", "prometheus", "tracking.prometheus is set", "remove tracking.prometheus")
        port = config.prometheus.port
        try:
            mirror = PrometheusMirror(port)
        except OSError as error:
            raise AddressError(
                f"tracking.prometheus.port={port} cannot be used: {error.strerror}. Another run may serve its metrics "
                "there: set tracking.prometheus.port=0, which takes a free port, or another one"
            ) from error
        undo.callback(mirror.close)
        mirrors.append(mirror)
    if config.opentelemetry is not None:
        for module in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"):
            check_library(module, "otel", "tracking.opentelemetry is set", "remove tracking.opentelemetry")
        mirrors.append(OpenTelemetryMirror(config.opentelemetry.endpoint))
    return mirrors


def record_failure(
    end: Callable[[int, str], None],
    kind: type[BaseException] | None,
    error: BaseException | None,
    _: TracebackType | None,
) -> None:
    """Write into run.json that a run ended before its first step, by an error or a stop signal.

    Args:
        end: records the exit status and the reason, and closes what is open.
    """
    if error is not None:
        with suppress(OSError):
            end(failure_of(error).status, f"{type(error).__name__}: {error}")


def tracks_of(recipe: Recipe) -> tuple[str, ...]:
    """The names that may precede those of metrics: the tracks of a recipe of several policies."""
    return tuple(filter(None, recipe.policies))


def run_root(recipe: Recipe) -> Path:
    """The folder of the run: as set, the newest of this recipe for resume=latest, or a new one.

    Raises:
        ConfigError: 2004 when run.name or run.project is no name of a folder, or there is no newest run.
    """
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
    try:
        return default_root(run.project, recipe.file.name, run.name)
    except RunDirectoryError as error:
        raise InvalidValueError(str(error)) from error


def banner_lines(recipe: Recipe, root: Path, threads: ThreadChoice | None) -> list[tuple[str, str]]:
    """Label and text of the lines that are printed before the first step."""
    geometry, placement = [], []
    for name, policy in recipe.policies.items():
        about = f"{name}: " if name else ""
        first, *others = (line.strip() for line in geometry_table(policy).removeprefix("geometry").splitlines())
        geometry += [f"{about}{first}", *others]
        placement.append(f"{about}{plan_of(policy).describe()}")
    remark = REMARKS.get(recipe.config.scale)
    return [
        *([] if remark is None else [("note", remark)]),
        *_labelled("geometry", geometry),
        *_labelled("placement", placement),
        *([] if threads is None else [("threads", str(threads))]),
        ("tracking", ", ".join(("files", *recipe.config.tracking.mirrors))),
        *_labelled("columns", textwrap.wrap(LEGEND, LEGEND_WIDTH)),
        ("stop", "Ctrl-C (finishes the step and saves)"),
        ("resume", continuation(recipe, root)),
    ]


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """Lines of the banner, the first with the label."""
    return [("" if i else label, line) for i, line in enumerate(lines)]


SET_BY_TORCHRUN = ("runtime", "num_devices", "devices_per_node")


def continuation(recipe: Recipe, root: Path) -> str:
    """The command that continues the run in `root` with the same settings."""
    overrides = recipe.shown_overrides()
    settings = [setting for setting in overrides if not setting.lstrip("+").startswith(("run.", "resume="))]
    command = ["unirl"]
    if recipe.config.runtime_in_use == "torchrun":  # which says the devices
        settings = [setting for setting in settings if setting.lstrip("+").partition("=")[0] not in SET_BY_TORCHRUN]
        command = ["torchrun", f"--nproc_per_node={recipe.config.devices_on_node}", "-m", "unirl.cli"]
    return shlex.join([*command, "train", recipe.file.argument, *settings, f"run.dir={root}"])


# Runs that exist


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, and the recipe that wrote it."""

    checkpoint: Checkpoint
    recipe: Recipe
    policy: str = ""
    """The policy that this is about, in a run of several."""
    scale: str = "full"
    """The scale of the run. The recipe has its values already."""

    @property
    def weights_folder(self) -> Path:
        """The folder of the policy's weights."""
        return policy_folder(self.checkpoint.path, self.policy)

    def policies(self) -> list[SavedRun]:
        """The run as each of its policies sees it: by the last track that it samples."""
        return [
            replace(self, recipe=self.recipe.alone(tracks[-1]), policy=name)
            for name, tracks in self.recipe.weights.items()
        ]


def saved_run(
    path: str,
    overrides: Sequence[str] = (),
    settings: Tree | None = None,
    unread: str | None = None,
    from_start: bool = False,
) -> SavedRun:
    """The valid checkpoint at `path` (a checkpoint, or a run: its newest), with the recipe that is saved in it.

    The recipe decodes in tiles if the run did, and reads no adapter file of which the checkpoint has the content.

    Args:
        overrides: `key=value` from the command line.
        settings: keys that the command itself sets, as a tree.
        unread: files of the checkpoint whose names begin so are not needed, and may be damaged.
        from_start: read the adapter file, to have the weights with which the run began.
    """
    checkpoint = open_checkpoint(path, unread)
    with still_there(checkpoint):
        written = read_state(checkpoint.path)["recipe"]
        tree = written | {"resume": "none", "scale": "full"}
        chosen = saved_choices(checkpoint.path)
    layers = (ConfigLayer("recipe", tree), ConfigLayer("unirl", settings or {}), command_line_layer(overrides, tree))
    file = RecipeFile(f"saved/{checkpoint.path.name}", checkpoint.path / STATE_FILE)
    recipe = check(ComposedConfig(file, layers))
    policies = {}
    for name, config in recipe.policies.items():
        policies[name] = config if from_start else continued(config)
        tiles = chosen.get(tiling_key(config))
        if tiles is not None and leaves_tiling_open(config):
            policies[name] = with_tiling(policies[name], tiles)
    return SavedRun(checkpoint, replace(recipe, policies=policies), scale=written.get("scale", "full"))


def check_weights(saved: SavedRun, weights: str) -> None:
    """Refuses weights that a run does not keep, before its model is loaded.

    Raises:
        ConfigError: 2020.
    """
    for name in saved.recipe.trained:
        config = saved.recipe.policies[name]
        kept = [name for name, block in KEPT_BY.items() if config.backend.values.get(block) is not None]
        known = ["live", *kept, *config.loaded_snapshots, *needs_of(config).snapshots]
        if weights not in known:
            raise IncompatibleError(
                f"--weights {weights}: the run keeps no such weights. It has {', '.join(dict.fromkeys(known))}. A run "
                f"with {config.backend.path}.ema_cfg={{}} keeps ema"
            )


def check_folder(folder: Path) -> None:
    """Refuses (2004) a folder for the files that a command makes of a run, if it cannot be created or written."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    why = "" if nearest.is_dir() else "is a file, not a folder"
    try:
        if not why:
            TemporaryFile(dir=nearest).close()  # os.access allows root everything, also where the system refuses it
    except OSError as error:
        why = f"cannot be written to ({error.strerror})"
    if why:
        raise InvalidValueError(
            f"--out {folder}: {nearest} {why}. Name a folder that this user may write to with --out"
        )


def quiet_tracker(saved: SavedRun, folder: Path, argv: Sequence[str], watcher: Watcher) -> Tracker:
    """A tracker that reports to `folder`. `watcher` shows the progress, and nothing else gets to the console.

    Raises:
        ConfigError: 2004 when the folder cannot be used.
    """
    check_folder(folder)
    project, name = saved.recipe.config.run.project, saved.recipe.file.name
    identity = RunIdentity(project=project, recipe=name, argv=argv, scale=saved.scale)
    try:
        return Tracker(RunDirectory(folder, identity), tracks=tracks_of(saved.recipe), watcher=watcher)
    except RunDirectoryError as error:
        raise InvalidValueError(str(error)) from error
