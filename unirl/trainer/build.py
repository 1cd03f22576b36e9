"""A checked recipe to placed roles and a trainer."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from unirl import __version__
from unirl.config.build import build
from unirl.config.load import Recipe
from unirl.config.node import Node
from unirl.config.preflight import check_disk
from unirl.config.recipe import RecipeConfig
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.placement import placement
from unirl.distributed.group.pool import DevicePool, LocalGroup
from unirl.distributed.group.remote import Remote, Siblings
from unirl.distributed.weight_sync.base import NoSync
from unirl.tracking.tracker import Tracker
from unirl.train.backend.checkpoint import CheckpointStore
from unirl.trainer.base import Parts, Roles
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.run import open_tracker
from unirl.types.protocols import DataSource, Stateful

ROLES = ("bundle", "pipeline", "backend", "algorithm", "stack", "rollout", "reward")
"""The order in which siblings are built: each may take those before it."""


def build_trainer(recipe: Recipe, argv: Sequence[str] = ()) -> DiffusionTrainer:
    """The trainer of a recipe that passed preflight, with its run directory open."""
    data = data_of(recipe)
    tracker = open_tracker(recipe, argv)
    try:
        return join_parts(recipe, data, tracker)
    except BaseException as error:
        tracker.finish(1, f"{type(error).__name__}: {error}")
        raise


def data_of(recipe: Recipe) -> DataSource:
    """The prompts of a recipe. Read first: a bad line is known before a folder is made or a model loaded."""
    config = recipe.config
    source: DataSource = build(
        config.data_source, seed=recipe.value("sampling.seed"), eval_data_path=config.evaluation.data_path
    )
    return source


def join_parts(recipe: Recipe, data: DataSource, tracker: Tracker) -> DiffusionTrainer:
    """Place the roles of a recipe on its devices and join them."""
    config = recipe.config
    sampling = build(config.sampling)
    advantage = build(config.advantage)
    pool = DevicePool(config.num_devices)
    run_updates = config.num_rollouts * recipe.value("stack.num_updates_per_batch")
    with placement(pool) as group:
        handles = place_roles(group, config, device=device(), seed=sampling.seed, run_updates=run_updates)
    parts = Parts(
        config=config,
        data=data,
        advantage=advantage,
        sync=NoSync() if config.sync is None else build(config.sync),
        tracker=tracker,
        checkpoints=CheckpointStore(tracker.run.checkpoints, keep=config.keep_checkpoints),
        columns=pool.store,
        stateful={
            name: part for name, part in [("data", data), ("advantage", advantage)] if isinstance(part, Stateful)
        },
        recipe=recipe.resolved(),
        write_config=partial(tracker.run.write_config, recipe.composed.text(resolve_all=True), recipe.resolved_text()),
        environment=environment(),
    )
    kept = (config.keep_checkpoints or config.num_rollouts // max(config.save_interval, 1)) + 1
    needed = kept * handles["backend"].checkpoint_bytes()
    check_disk(tracker.run.checkpoints, needed, f"{kept} checkpoints")
    roles = Roles(**{name: handles[name] for name in ("rollout", "reward", "stack", "backend")})
    return DiffusionTrainer(parts, roles, sampling)


def place_roles(group: LocalGroup, config: RecipeConfig, **wired: Any) -> dict[str, Handle]:
    """Build every role of the recipe beside its siblings; a role takes the siblings that its constructor names."""
    nodes: dict[str, Node] = {name: vars(config)[name] for name in ROLES}
    return {name: group.place(Remote(name, partial(_make, node, wired))) for name, node in nodes.items()}


def _make(node: Node, wired: dict[str, Any], siblings: Siblings) -> Any:
    stage = {"stage": siblings["pipeline"].stage} if "pipeline" in siblings else {}
    return build(node, **wired, **siblings, **stage)


def device() -> torch.device:
    """Where the policy lives: the accelerator of this process, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def environment() -> dict[str, str]:
    """What decides bits outside the recipe."""
    return {
        "unirl": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
