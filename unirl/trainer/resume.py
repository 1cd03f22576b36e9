"""Where a run continues, and whether the recipe that continues it is the one that began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from unirl.config.build import build
from unirl.config.errors import CheckpointError, InvalidValueError, ResumeError
from unirl.config.load import Recipe
from unirl.config.merge import Tree, get, leaves
from unirl.config.recipe import RecipeConfig, policy_keys
from unirl.config.values import show
from unirl.train.backend.checkpoint import CheckpointStore, ResumePoint, open_checkpoint
from unirl.train.backend.remote import RemoteCheckpoints, is_url
from unirl.train.backend.signing import is_signed
from unirl.train.backend.state import check_trained_weights, read_counters
from unirl.train.configs import LoraConfig
from unirl.trainer.run_state import policy_folder, read_state
from unirl.types.secrets import MASK, is_secret_name

RESULT_NEUTRAL = (
    "num_rollouts",
    "save_interval",
    "keep_checkpoints",
    "checkpoint",
    "restarts",
    "resume",
    "run",
    "tracking",
    "watch",
    "profile",
    "evaluation",
    "pipeline.keep_resident",
    "pipeline.use_cuda_graphs",
    "plugins",
    "data_source.data_path",  # the data source compares its own fingerprint
    "data_source.allow_remote",
    "data_source.remote_hosts",
    "rollout.forward_batch_size",
    "rollout.gather_weights",
    "stack.micro_batch_size",
    "pipeline.decode_batch_size",
    "sampling.guidance_passes",
    "runtime",
    "num_devices",
    "devices_per_node",
    "node_groups",
    "placement",
    "memory_check",
    "allow_mixed_devices",
    "connect_timeout_s",
    "row_transport",
    "transfer_queue",
    "stall_timeout_s",
    "parity",
    "backend.fsdp_cfg.activation_checkpointing",
    "backend.fsdp_cfg.shard_size",
    "backend.fsdp_cfg.reshard_after_forward",
    "backend.fsdp_cfg.defer_grad_sync",
    "backend.topology",
    "sync.transport",
    "sync.bucket_mb",
)
"""Keys that may change between a checkpoint and its continuation without changing results but by rounding."""

FETCHED = ".fetched-checkpoints"
"""The folder beside run directories that holds checkpoints from URLs."""
ABSENT = object()
SHOWN_CHANGES = 4
"""Number of changed keys that a refusal lists, classes first."""


def resume_point(store: CheckpointStore, resume: str) -> ResumePoint:
    """The checkpoint that the setting `resume` selects for the run whose checkpoints are in `store`.

    Raises:
        ConfigError: 2004 when `none` would overwrite a run.
        CheckpointError: 7001 when there are checkpoints and all are damaged or not finite, or the named one is.
    """
    if resume == "none":
        checkpoints = store.checkpoints()
        if checkpoints:
            raise InvalidValueError(
                f"resume=none, but {store.directory} holds {checkpoints[0].path.name}, which a new run would "
                "overwrite: choose another run.dir, or continue with resume=auto"
            )
        return ResumePoint(None)
    if is_url(resume):
        cache = store.directory.parent.parent / FETCHED
        fetched = RemoteCheckpoints(resume, setting="resume").fetch_newest(cache)
        return ResumePoint(open_checkpoint(fetched, healthy=True, key=store.key))
    if resume not in ("auto", "latest"):
        return ResumePoint(open_checkpoint(resume, healthy=True, key=store.key))
    latest = store.latest_valid(healthy=True)
    if latest.checkpoint is None and latest.skipped:
        raise CheckpointError(
            f"no checkpoint in {store.directory} is valid ({'; '.join(map(str, latest.skipped))}): "
            "restore one from a backup, or start anew in another run.dir"
        )
    return latest


def check_resumable(point: ResumePoint, own: Path, recipe: Recipe) -> None:
    """Refuse a checkpoint that this recipe cannot continue, before a model is loaded.

    Args:
        own: the folder of this run's checkpoints. Only the same recipe may continue them; another recipe may start
            from a checkpoint elsewhere.

    Raises:
        CheckpointError: 7002.
    """
    if point.checkpoint is None:
        return
    path = point.checkpoint.path
    if path.parent == own and recipe.config.checkpoint.signing_key is None:
        _check_unsigned(path)
    changed = changed_keys(read_state(path)["recipe"], recipe.public()) if path.parent == own else []
    if changed:
        shown = sorted(changed, key=lambda change: "_target_" not in change.partition(":")[0])[:SHOWN_CHANGES]
        others = f"; and {len(changed) - len(shown)} more" if len(changed) > len(shown) else ""
        raise ResumeError(
            f"{path.name} was written by another recipe ({'; '.join(shown)}{others}): set these back to continue "
            f"the run, start another one in another run.dir, or branch off with resume={path} run.dir=<new folder>"
        )
    for name, tracks in recipe.weights.items():
        config = recipe.policies[tracks[-1]]
        lora: LoraConfig | None = None if config.lora is None else build(config.lora)
        key, start = f"{config.backend.path}.lora_cfg.path", None if lora is None else lora.path
        if start is not None and path.parent != own and start != get(read_state(path)["recipe"], key):
            raise ResumeError(
                f"{key}={start} would have no effect: the run begins from the adapters of {path.name}. "
                "Remove one of the two"
            )
        check_trained_weights(read_counters(policy_folder(path, name)), lora)


def _check_unsigned(path: Path) -> None:
    """Refuse to continue a run with signed checkpoints without its key. The signature would mean nothing from then on.

    A removed signature is noticed by the recipe in the checkpoint. The message does not repeat where that recipe reads
    its key, because nothing has verified it.
    """
    if is_signed(path) or get(read_state(path)["recipe"], "checkpoint.signing_key") is not None:
        raise ResumeError(
            f"{path.name} belongs to a run with signed checkpoints, and this start has no checkpoint.signing_key: its "
            "signature would not be checked, later checkpoints would be unsigned, and a start with the key would pass "
            "them over. Set checkpoint.signing_key to the key of the run, or branch off without signatures, if you "
            f"trust the folder: resume={path} run.dir=<new folder>"
        )


def continued(config: RecipeConfig) -> RecipeConfig:
    """The recipe as it is built for a checkpoint: adapters start from the checkpoint, so no adapter file is read."""
    lora = config.lora
    if lora is None or lora.get("path", str) is None:
        return config
    from_checkpoint = replace(lora, values={**lora.values, "path": None})
    return replace(
        config, backend=replace(config.backend, values={**config.backend.values, "lora_cfg": from_checkpoint})
    )


def changed_keys(saved: Tree, now: Tree) -> list[str]:
    """`key: before -> after` of every difference that may change results, sorted by key.

    A block that only one of the two has is named by its keys alone, unless it is empty. Secrets change no results, and
    are not written.
    """
    before, after = dict(leaves(saved)), dict(leaves(now))
    keys = sorted(k for k in before.keys() | after.keys() if before.get(k, ABSENT) != after.get(k, ABSENT))
    neutral = tuple(f"{path}." for key in RESULT_NEUTRAL for path in (key, *policy_keys(now, key)))
    return [
        f"{k}: {_shown(before, k)} -> {_shown(after, k)}"
        for k in keys
        if not f"{k}.".startswith(neutral)
        and not is_secret_name(k)
        and MASK not in (before.get(k), after.get(k))
        and not any(other.startswith(f"{k}.") for other in keys)
    ]


def _shown(values: Mapping[str, object], key: str) -> str:
    """The value of a key as a recipe writes it, or that it is absent."""
    value = values.get(key, ABSENT)
    return "absent" if value is ABSENT else "an empty block" if value == {} else show(value)
