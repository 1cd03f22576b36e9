"""Who sits where: the roles of a recipe on the device_sets of its plan.

trainside    train device_set: bundle pipeline stage backend algorithm stack rollout
             (with the reward before the stage, where the loss differentiates through both)
otherwise    train device_set: bundle stage backend algorithm stack sender   (of the model, the trained module alone)
             rollout device_set: engine_bundle engine_pipeline rollout            (the whole model)
reward       beside the rollout, unless it has a device_set of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from unirl.config.build import build
from unirl.config.node import Node
from unirl.config.recipe import RecipeConfig
from unirl.distributed import current
from unirl.distributed.group.handle import Group, Handle
from unirl.distributed.group.pool import Pool
from unirl.distributed.group.remote import Remote, Siblings
from unirl.distributed.weight_sync.base import NoSync, WeightSync
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.sync import SyncEndpoint
from unirl.models.denoising.differentiable import DifferentiableStage
from unirl.plan.placement import PlacementPlan
from unirl.plan.preflight import KnownModel, needs_of

ENGINE = {"bundle": "engine_bundle", "pipeline": "engine_pipeline"}
"""What the engine's own model is called among its siblings, which may be those of the trainer."""


@dataclass(frozen=True)
class Placed:
    """The handles of all roles by name, and how weights travel between them."""

    handles: Mapping[str, Handle]
    sync: WeightSync


def place_roles(pool: Pool, plan: PlacementPlan, config: RecipeConfig, **wired: Any) -> Placed:
    """Build every role of the recipe beside its siblings; a role takes the siblings that its constructor names."""
    train, rollout, reward = (pool.group(device_set) for device_set in (plan.train, plan.rollout, plan.reward))
    sync: WeightSync = NoSync()
    if plan.is_dedicated:
        handles = _place_trainer(train, config, wired) | _place_engine(rollout, config, wired)
        # In one process the engine is at hand, as a sibling or from the other group.
        sender = train.place(Remote("sender", partial(make_sender, rollout.role_here("rollout"))))
        sync = build(
            _required(config.sync), train=SyncEndpoint(train, sender), rollout=SyncEndpoint(rollout, handles["rollout"])
        )
        handles["reward"] = _place(reward, "reward", config.reward, wired)
    else:
        handles = {"reward": _place(reward, "reward", config.reward, wired)} | _place_trainside(train, config, wired)
    return Placed(handles, sync)


def _place_trainside(group: Group, config: RecipeConfig, wired: dict[str, Any]) -> dict[str, Handle]:
    handles = {name: _place(group, name, vars(config)[name], wired) for name in ("bundle", "pipeline")}
    through_reward = needs_of(config).differentiable_reward
    handles["stage"] = group.place(Remote("stage", _stage_and_reward if through_reward else _stage_of_pipeline))
    for name in ("backend", "algorithm", "stack", "rollout"):
        handles[name] = _place(group, name, vars(config)[name], wired)
    return handles


def _place_trainer(group: Group, config: RecipeConfig, wired: dict[str, Any]) -> dict[str, Handle]:
    """The train side of an engine that has its own model: the trained module needs neither encoders nor decoder."""
    handles = {"bundle": _place(group, "bundle", config.bundle, wired | {"components": trained_components(config)})}
    handles["stage"] = group.place(Remote("stage", _stage_of_bundle))
    for name in ("backend", "algorithm", "stack"):
        handles[name] = _place(group, name, vars(config)[name], wired)
    return handles


def _place_engine(group: Group, config: RecipeConfig, wired: dict[str, Any]) -> dict[str, Handle]:
    _place(group, ENGINE["bundle"], config.bundle, wired)
    _place(group, ENGINE["pipeline"], config.pipeline, wired, ENGINE)
    return {"rollout": _place(group, "rollout", config.rollout, wired, ENGINE)}


def _place(
    group: Group, name: str, node: Node, wired: Mapping[str, Any], siblings_as: Mapping[str, str] | None = None
) -> Handle:
    return group.place(Remote(name, partial(make_role, node, dict(wired), dict(siblings_as or {}))))


def make_role(node: Node, wired: Mapping[str, Any], siblings_as: Mapping[str, str], siblings: Siblings) -> Any:
    """The object of a node on the worker that this runs on.

    Args:
        siblings_as: constructor parameter to sibling, where they are called differently.
    """
    renamed = {parameter: siblings[name] for parameter, name in siblings_as.items() if name in siblings}
    return build(node, **{"device": current().device, **wired, **siblings, **renamed})


def trained_components(config: RecipeConfig) -> tuple[str, ...] | None:
    """The component of the bundle that is trained; None, which means all, where the class cannot tell in advance."""
    owner, path = config.bundle.schema.owner, config.bundle.values.get("path")
    if not isinstance(owner, KnownModel) or not isinstance(path, str):
        return None
    return (owner.facts_of(path, config.bundle.values.get("revision")).trainable_attr,)


def make_sender(engine: Any | None, siblings: Siblings) -> WeightSender:
    """The train end of weight synchronisation.

    Args:
        engine: the engine when it lives in the driver's process; else it may be a sibling, or in another process.
    """
    return WeightSender(siblings["backend"], siblings["stage"], engine or siblings.get("rollout"))


def _required(sync: Node | None) -> Node:
    assert sync is not None, "preflight refuses a dedicated engine without a sync block"
    return sync


def _stage_of_pipeline(siblings: Siblings) -> Any:
    return siblings["pipeline"].stage


def _stage_and_reward(siblings: Siblings) -> DifferentiableStage:
    """The policy, its decoder and the reward that a loss on the reward's gradient goes through."""
    pipeline, reward = siblings["pipeline"], siblings["reward"]
    return DifferentiableStage(
        pipeline.stage,
        pipeline.decoder.decode,
        reward.objective,
        batch_size=pipeline.decode_batch_size,
        resident=partial(pipeline.bundle.resident, pipeline.decoder.components),
    )


def _stage_of_bundle(siblings: Siblings) -> Any:
    return siblings["bundle"].stage()
