"""Where a run continues, and whether the recipe that continues it is the one that began."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.config.errors import CheckpointError, InvalidValueError, ResumeError
from unirl.train.backend.checkpoint import Checkpoint, CheckpointStore, open_checkpoint
from unirl.train.backend.state import check_trained_weights, read_counters
from unirl.train.configs import LoraConfig

RESULT_NEUTRAL = (
    "num_rollouts",
    "save_interval",
    "keep_checkpoints",
    "resume",
    "run",
    "tracking",
    "evaluation",
    "pipeline.keep_resident",
    "plugins",
    "data_source.data_path",  # the data source compares its own fingerprint
    "rollout.forward_batch_size",
    "runtime",
    "num_devices",
    "devices_per_node",
    "placement",
    "row_transport",
    "stall_timeout_s",
    "parity",
    "backend.fsdp_cfg.shard_size",
    "backend.fsdp_cfg.reshard_after_forward",
    "backend.fsdp_cfg.defer_grad_sync",
    "backend.topology",
    "sync.transport",
    "sync.bucket_mb",
)
"""Keys that may change between a checkpoint and its continuation without changing results."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to continue after (None starts anew), and the reasons why newer ones are skipped."""

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...] = ()


def resume_point(store: CheckpointStore, resume: str) -> ResumePoint:
    """The checkpoint that the setting `resume` selects for the run whose checkpoints are in `store`.

    Raises:
        ConfigError: 2004 when `none` would overwrite a run.
        CheckpointError: 7001 when there are checkpoints and all are damaged, or the named one is.
    """
    if resume == "none":
        return _start_anew(store)
    if resume in ("auto", "latest"):
        return _latest(store)
    return ResumePoint(open_checkpoint(resume))


def check_resumable(point: ResumePoint, own: Path, recipe: Mapping[str, Any], lora: LoraConfig | None) -> None:
    """Refuse a checkpoint that this recipe cannot continue, before a model is loaded.

    Args:
        own: the folder of this run's checkpoints. Only the same recipe may continue them; another recipe may start
            from a checkpoint elsewhere.

    Raises:
        CheckpointError: 7002.
    """
    checkpoint = point.checkpoint
    if checkpoint is None:
        return
    if checkpoint.path.parent == own:
        check_same_recipe(json.loads((checkpoint.path / "trainer.json").read_text())["recipe"], recipe, checkpoint)
    check_trained_weights(read_counters(checkpoint.path / "policy"), lora)


def _start_anew(store: CheckpointStore) -> ResumePoint:
    checkpoints = store.checkpoints()
    if checkpoints:
        raise InvalidValueError(
            f"resume=none, but {store.directory} holds {checkpoints[0].path.name}, which a new run would overwrite: "
            "choose another run.dir, or continue with resume=auto"
        )
    return ResumePoint(None)


def _latest(store: CheckpointStore) -> ResumePoint:
    latest = store.latest_valid()
    reasons = tuple(str(skipped) for skipped in latest.skipped)
    if latest.checkpoint is None and reasons:
        raise CheckpointError(
            f"no checkpoint in {store.directory} is valid ({'; '.join(reasons)}): "
            "restore one from a backup, or start anew in another run.dir"
        )
    return ResumePoint(latest.checkpoint, reasons)


def changed_keys(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: before -> after` of every difference that may change results, sorted by key."""
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    absent = object()
    keys = sorted(k for k in before.keys() | after.keys() if before.get(k, absent) != after.get(k, absent))
    return [f"{k}: {before.get(k)} -> {after.get(k)}" for k in keys if not _is_neutral(k)]


def check_same_recipe(saved: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raises ResumeError (7002) if the recipe would not continue the same run."""
    changed = changed_keys(saved, now)
    if changed:
        raise ResumeError(
            f"{checkpoint.path.name} was written by another recipe ({'; '.join(changed)}): set these back to continue "
            f"the run, or branch off a new one with resume={checkpoint.path} run.dir=<new folder>"
        )


def _is_neutral(key: str) -> bool:
    return any(key == neutral or key.startswith(f"{neutral}.") for neutral in RESULT_NEUTRAL)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
