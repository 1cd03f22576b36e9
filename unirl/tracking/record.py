"""Reads the records of a run from its files: the one reader for everything that shows a run.

It works while the run writes, after it was killed, and on a copy of its folder elsewhere. Nothing is written.

    run = RunRecord("runs/unirl/first")
    run.status.state, run.metrics.last, run.evaluations, run.settings, run.problems

Every text comes from files that somebody else may have written, so code that shows it must escape it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from unirl.tracking.folded_table import FoldedTable, FoldT, RunTables
from unirl.tracking.owner import RunDirectoryError
from unirl.tracking.run_directory import REMARKS, SCHEMA_VERSION, STEP_FOLDER, RunStatus, status_of
from unirl.tracking.run_files import DAMAGED, RunFiles
from unirl.tracking.samples import SampleRow, row_of
from unirl.tracking.step_tables import Events, Ledger, Metrics, mapping

MAX_SETTINGS = 10_000
"""Keys of the settings that are read. A file with more is damaged: an alias of YAML can repeat without end."""


@dataclass(frozen=True, kw_only=True)
class WriterSession:
    """One process that wrote to the run: the first start, a continuation, or a restart."""

    started: str
    host: str = ""
    pid: int = 0
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunExit:
    """The end of the run."""

    code: int
    reason: str = ""
    time: str = ""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The state of the code."""

    commit: str
    changed: bool = False
    """True if files differed from the commit."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The content of run.json."""

    schema_version: int
    id: str
    created: str
    recipe: str
    sessions: Annotated[tuple[WriterSession, ...], msgspec.Meta(min_length=1)]
    project: str = ""
    scale: str = "full"
    seed: int | None = None
    determinism: str = ""
    exit: RunExit | None = None
    git: Commit | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The choices of the run for settings `auto`: key to `value` and `why`."""

    @property
    def remark(self) -> str:
        """The remark about the scale of the run, or an empty text."""
        return REMARKS.get(self.scale, "")


@dataclass(frozen=True)
class Setting:
    """One key of the resolved recipe."""

    key: str
    value: object
    source: str
    """The source of the value: `default`, `recipe`, `environment`, `command line`, `scale=toy`."""
    place: str = ""
    """File and line, if the run recorded them."""

    @property
    def shown(self) -> str:
        """The value as in YAML, on one line."""
        if self.value is None or isinstance(self.value, bool):
            return {None: "null", True: "true", False: "false"}[self.value]
        return str(self.value)


@dataclass(frozen=True)
class StoredSamples:
    """The samples of one evaluation or of one training step, without their media."""

    step: int
    folder: str
    """Relative to the folder of the run; the `file` of a row is in it."""
    rows: tuple[SampleRow, ...]


class RunRecord:
    """The files of one run. Each part is read when it is first asked for."""

    def __init__(self, root: str | Path, tables: RunTables | None = None) -> None:
        """Opens the folder of a run.

        Args:
            tables: what somebody who keeps on reading has read of the tables until now. By default they are read here.
        """
        self.files = RunFiles(root)
        self.root = self.files.root
        self._tables = RunTables() if tables is None else tables
        self._reads_tables = tables is None

    @property
    def exists(self) -> bool:
        """Returns True if the folder has a record or metrics of a run."""
        return self.files.exists("run.json") or self.files.exists("metrics.jsonl")

    @property
    def problems(self) -> tuple[str, ...]:
        """What is absent or damaged among the parts that were read, each as `file: reason`."""
        return self.files.problems

    # The run

    @cached_property
    def facts(self) -> RunFacts | None:
        """The content of run.json. None if it is absent, damaged, or of another version."""
        facts = self.files.json("run.json", RunFacts)
        if facts is None or facts.schema_version == SCHEMA_VERSION:
            return facts
        self.files.problem(
            "run.json", f"it has schema {facts.schema_version}, and this version of UniRL reads {SCHEMA_VERSION}"
        )
        return None

    @property
    def status(self) -> RunStatus:
        """The state of the run at this moment; `unknown` without a readable run.json."""
        if self.facts is None:
            return RunStatus("unknown")
        try:
            return status_of(self.root)
        except (*DAMAGED, OSError, RunDirectoryError) as error:  # the folder changed or vanished in between
            return RunStatus("unknown", reason=str(error))

    @cached_property
    def environment(self) -> Mapping[str, Mapping[str, str]]:
        """The content of env.json as text: `machine`, `variables` and `versions`."""
        content = self.files.json("env.json", dict) or {}
        blocks = {name: block for name, block in content.items() if isinstance(block, dict)}
        return {str(name): {str(key): str(value) for key, value in block.items()} for name, block in blocks.items()}

    # Settings

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Every key of the resolved recipe, in its order, with its origin as far as the run recorded it."""
        written = dict(self._leaves("config/recipe.yaml"))
        origins = self.files.json("config/origins.json", dict) if self.files.exists("config/origins.json") else None
        return tuple(
            _setting(key, value, key in written, origins) for key, value in self._leaves("config/resolved.yaml")
        )

    def setting(self, key: str) -> object:
        """The value of a key. None if there is no such key."""
        return next((setting.value for setting in self.settings if setting.key == key), None)

    @property
    def total_steps(self) -> int | None:
        """The number of steps that the run is to take."""
        total = self.setting("num_rollouts")
        return total if isinstance(total, int) else None

    def _leaves(self, name: str) -> list[tuple[str, object]]:
        """The keys and values of a file of settings. Empty if an alias in it repeats without end."""
        try:
            found = list(islice(_leaves(self.files.yaml(name)), MAX_SETTINGS + 1))
        except RecursionError:
            found = []
            self.files.problem(name, "an alias in it contains itself")
        if len(found) > MAX_SETTINGS:
            self.files.problem(name, f"it has more than {MAX_SETTINGS} settings")
            return []
        return found

    # Numbers by step

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics of the steps. Of very many steps, evenly spaced ones."""
        return self._read(self._tables.metrics).result

    @cached_property
    def evaluations(self) -> tuple[Mapping[str, float], ...]:
        """The metrics of the evaluations with their `step`, in order.

        They are also in the table when their samples were removed to save space.
        """
        return tuple(self.files.table("eval_metrics.csv")) if self.files.exists("eval_metrics.csv") else ()

    # Samples

    @cached_property
    def evaluated(self) -> tuple[int, ...]:
        """The steps after which an evaluation stored its samples, in order."""
        return tuple(self._steps("eval"))

    @cached_property
    def sampled(self) -> tuple[int, ...]:
        """The steps of which training samples are stored, in order."""
        return tuple(self._steps("samples"))

    def evaluation(self, step: int) -> StoredSamples:
        """The samples of the evaluation after a step."""
        folder = f"eval/step-{step:06d}"
        name = f"{folder}/scores.json"
        content = self.files.json(name, dict) or {}
        entries = content.get("samples", [])
        return self._stored(step, folder, name, entries if isinstance(entries, list) else [])

    def samples(self, step: int) -> StoredSamples:
        """The stored samples of a training step."""
        folder = f"samples/step-{step:06d}"
        name = f"{folder}/manifest.jsonl"
        return self._stored(step, folder, name, list(self.files.rows(name)))

    def _steps(self, kind: str) -> Iterator[int]:
        for folder in self.files.folders(kind, "step-*"):
            match = STEP_FOLDER.fullmatch(folder.rpartition("/")[2])
            file = "scores.json" if kind == "eval" else "manifest.jsonl"
            if match and self.files.exists(f"{folder}/{file}"):  # It is written after the media.
                yield int(match[1])

    def _stored(self, step: int, folder: str, name: str, entries: Sequence[object]) -> StoredSamples:
        rows, reasons = [], []
        for entry in entries:
            try:
                rows.append(row_of(entry))
            except ValueError as error:
                reasons.append(error)
        if reasons:
            self.files.problem(name, f"{len(reasons)} of {len(entries)} samples are damaged ({reasons[0]})")
        return StoredSamples(step, folder, tuple(rows))

    # What happened

    @cached_property
    def ledger(self) -> Ledger:
        """What became of the samples."""
        return self._read(self._tables.ledger).result

    @cached_property
    def events(self) -> Events:
        """The events, also those of steps that were cut back after a restart."""
        return self._read(self._tables.events).result

    def _read(self, table: FoldedTable[FoldT]) -> FoldT:
        if self._reads_tables:
            table.advance(self.files)
        table.report(self.files)
        return table.fold


def _setting(key: str, value: object, is_written: bool, origins: Mapping[str, object] | None) -> Setting:
    """A setting with its origin. Without a record of it, the written recipe at least tells it from a default."""
    if origins is None:
        return Setting(key, value, "recipe or command line" if is_written else "default")
    origin = mapping(origins.get(key))
    return Setting(key, value, str(origin.get("source", "default")), str(origin.get("place", "")))


def _leaves(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every key path of a file of settings that holds a scalar, a list or an empty mapping, with its value."""
    if not isinstance(tree, dict) or not tree:
        if path:
            yield path, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{path}.{key}" if path else str(key))
