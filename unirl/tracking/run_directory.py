"""The run directory: paths of the files of a run, the record of who writes it, and how it ended.

<root>/  run.json  heartbeat  writers/  env.json  config/{recipe,resolved}.yaml  config/origins.json  logs/
         events.jsonl  metrics.jsonl  metrics.csv  eval_metrics.csv  ledger.jsonl  samples/  eval/  checkpoints/
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

import unirl
from unirl.tracking.owner import (
    STALLED_AFTER_S,
    Fence,
    Ownership,
    RunDirectoryError,
    is_locked,
    now,
    process_exists,
)
from unirl.tracking.tables import Row, replace_text
from unirl.types.secrets import redact, redacted

SCHEMA_VERSION = 1
REMARKS: Mapping[str, str] = {"toy": "toy scale: random weights, rewards mean nothing"}
"""What every page about a run says, by the scale of the run."""
STEP_FOLDER = re.compile(r"step-(\d+)")
NAME = re.compile(r"[\w][\w.+-]*")
RECORDED_PACKAGES = ("torch", "numpy", "diffusers", "transformers", "peft", "safetensors")


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Project, recipe and settings that identify a run."""

    project: str
    recipe: str
    argv: Sequence[str] = ()
    seed: int | None = None
    scale: str = "full"
    """`toy` = small values and models with random weights."""
    determinism: str = "bitwise"
    """`bitwise` = a second run is equal bit for bit; `statistical` = only in distribution."""


@dataclass(frozen=True)
class RunStatus:
    """State of a run, derived from its files, so it is right even if a process died."""

    state: str
    """running, stalled (alive without progress), finished, stopped (on request), failed, or lost (died unrecorded)."""
    code: int | None = None
    reason: str = ""


class RunDirectory:
    """The folder of one run, opened for writing by this process."""

    def __init__(self, root: str | Path, identity: RunIdentity) -> None:
        """Creates the folder, or continues the run in it."""
        self.root = Path(root)
        self.identity = identity
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._owner = Ownership.take(self.root)  # nothing else is written before
            for folder in ("config", "logs", "samples", "eval", "checkpoints"):
                (self.root / folder).mkdir(exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"run.dir={self.root} cannot be created: {error.strerror} ({error.filename}). Set run.dir or "
                "OUTPUT_DIR to a writable folder"
            ) from error
        try:
            self._write_start()
        except BaseException:
            self._owner.release()
            raise

    @property
    def fence(self) -> Fence:
        """The number under which this process writes. `fence.check()` comes before everything that is published."""
        return self._owner.fence

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def id(self) -> str:
        """Id of the run: the name of its folder when it was created."""
        return str(read_record(self.root)["id"])

    def write_config(
        self, recipe: str, resolved: str, origins: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    ) -> None:
        """Writes the recipe as it was given, and all keys with their final values, both as YAML.

        Args:
            origins: key to the `source` and `place` of its value, without defaults; written as JSON.
        """
        self.fence.check()
        if origins:
            _write_json(self.root / "config" / "origins.json", {key: dict(value) for key, value in origins.items()})
        replace_text(self.root / "config" / "recipe.yaml", redact(recipe))
        replace_text(self.root / "config" / "resolved.yaml", redact(resolved))

    def fresh_step_folder(self, kind: str, step: int) -> Path:
        """Creates an empty `samples/step-000010` or `eval/step-000010`."""
        self.fence.check()
        folder = self.root / kind / f"step-{step:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def prune_step_folders(self, kind: str, keep: int) -> None:
        """Removes the oldest step folders beyond `keep` (0 = none). The first evaluation stays, since pages show it."""
        folders = sorted(path for path in (self.root / kind).iterdir() if STEP_FOLDER.fullmatch(path.name))
        self.fence.check()
        for folder in folders[kind == "eval" : -keep] if keep else ():
            shutil.rmtree(folder)

    def cut_step_folders(self, step: int) -> None:
        """Removes sample and evaluation folders of steps after `step`."""
        self.fence.check()
        for kind in ("samples", "eval"):
            for folder in (self.root / kind).iterdir():
                match = STEP_FOLDER.fullmatch(folder.name)
                if match and int(match[1]) > step:
                    shutil.rmtree(folder)

    def note(self, **entries: object) -> None:
        """Adds entries to run.json, such as a mirror's address."""
        self.fence.check()
        _write_json(self.root / "run.json", read_record(self.root) | entries)

    def close(self, code: int, reason: str = "") -> None:
        """Records how the run ended and gives the folder up. A process that lost the folder records nothing there."""
        try:
            self.note(exit={"code": code, "reason": redact(reason), "time": now()})
        finally:
            self._owner.release()

    def _write_start(self) -> None:
        argv = [redact(word) for word in self.identity.argv]
        session = {"started": now(), "pid": os.getpid(), "host": socket.gethostname(), "argv": argv}
        session |= {"writer": self.fence.number}
        try:
            record = read_record(self.root)
        except RunDirectoryError:
            made = {"id": self.root.resolve().name, "created": now(), "sessions": []}
            known = {key: value for key, value in vars(self.identity).items() if key != "argv"}
            record = {"schema_version": SCHEMA_VERSION} | made | known
        record |= {"exit": None, "sessions": [*record["sessions"], session], "versions": _versions(), "git": _git()}
        machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "python": sys.executable}
        environment = {"variables": allowed_environment(os.environ), "machine": machine, "versions": _versions()}
        _write_json(self.root / "env.json", environment)
        _write_json(self.root / "run.json", record)  # last: from here on the caller records how the run ended


def remark_of(root: Path) -> str:
    """The remark about the scale of a run, or an empty text. A run without a record has none."""
    try:
        return REMARKS.get(read_record(root).get("scale", "full"), "")
    except RunDirectoryError:
        return ""


def default_root(project: str, recipe: str, name: str | None = None, base: str | Path = "runs") -> Path:
    """`runs/<project>/<name>`. A missing name is composed of time, recipe and four letters."""
    for key, value in (("run.project", project), ("run.name", name)):
        if value is not None and not NAME.fullmatch(value):
            raise RunDirectoryError(f"{key}={value!r} is not a plain name: use letters, digits, '.', '_', '+' and '-'")
    made = f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.replace('/', '-')}-{_four_letters()}"
    return Path(base) / project / (name or made)


def latest_run(project: str, recipe: str, base: str | Path = "runs") -> Path | None:
    """The run of a recipe that was created last."""
    records = []
    for path in (Path(base) / project).glob("*/run.json"):
        try:
            record = read_record(path.parent)
        except RunDirectoryError:
            continue  # not a run directory, or its process died while creating it
        if record["recipe"] == recipe:
            records.append((record["created"], path.parent))
    return max(records)[1] if records else None


def read_record(root: str | Path) -> Row:
    """Content of run.json. Raises RunDirectoryError if it is absent or damaged."""
    path = Path(root) / "run.json"
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path} cannot be read ({error}): is {root} a run directory?") from error
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        raise RunDirectoryError(f"{path} is not a run record of schema {SCHEMA_VERSION}")
    return record


def status_of(root: str | Path) -> RunStatus:
    """State of the run in `root`. A folder without a run counts as lost."""
    try:
        record = read_record(root)
    except RunDirectoryError as error:
        return RunStatus("lost", reason=str(error))
    if record["exit"]:
        code = record["exit"]["code"]
        state = {0: "finished", 75: "stopped", 130: "stopped", 143: "stopped"}.get(code, "failed")
        return RunStatus(state, code, record["exit"]["reason"])
    if not _is_alive(Path(root) / "heartbeat", record["sessions"][-1]):
        return RunStatus("lost")
    silent = time.time() - (Path(root) / "heartbeat").stat().st_mtime
    return RunStatus("stalled" if silent > STALLED_AFTER_S else "running")


def _is_alive(heartbeat: Path, session: Row) -> bool:
    """Returns True if the last writer is alive. On other hosts only the age of the file shows it."""
    if session["host"] == socket.gethostname():
        return process_exists(session["pid"]) and is_locked(heartbeat)
    return heartbeat.exists() and time.time() - heartbeat.stat().st_mtime < STALLED_AFTER_S


def _write_json(path: Path, content: Row) -> None:
    replace_text(path, json.dumps(redacted(content), indent=1, sort_keys=True) + "\n")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "unirl": unirl.__version__}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _git() -> Row | None:
    """The commit of the code, and whether files differ from it. None outside a repository or without git."""
    where = ["git", "-C", str(Path(unirl.__file__).parent)]
    try:
        commit = subprocess.run([*where, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
        changes = subprocess.run([*where, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(changes.stdout.strip())}


def _four_letters() -> str:
    """A random pronounceable word. No seed decides it, because two runs of the same second must differ."""
    system_random = random.SystemRandom()
    return "".join(system_random.choice(letters) for letters in ("bdfgklmnprstvz", "aeiou") * 2)


ALLOWED = (
    "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR",
    "PYTHONHASHSEED", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "PRETRAINED_MODEL", "DATA_PATH",
    "EVAL_DATA_PATH", "OUTPUT_DIR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "RAY_ADDRESS", "WANDB_PROJECT",
    "WANDB_ENTITY", "WANDB_MODE", "WANDB_RUN_NAME", "SWANLAB_MODE", "CI", "SLURM_JOB_ID", "SLURM_NNODES",
)  # fmt: skip
"""Environment variables that are recorded. No others are."""
ALLOWED_STARTS = ("NCCL_", "TORCH_", "PYTORCH_", "GLOO_")


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The recorded environment variables, sorted by name."""
    names = [name for name in environment if name in ALLOWED or name.startswith(ALLOWED_STARTS)]
    return {name: redact(environment[name]) for name in sorted(names)}
