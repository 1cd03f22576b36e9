"""Whether runtime, sync, sharding and Ray's address fit the plan of a recipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from unirl.config.build import build
from unirl.config.errors import GeometryError, IncompatibleError
from unirl.config.node import nodes_below
from unirl.config.ray_address import check_ray_address
from unirl.config.recipe import RecipeConfig
from unirl.plan.placement import REPLICA, SYNC, PlacementPlan

BETWEEN_PROCESSES = ("broadcast", "ray")


@runtime_checkable
class Ranked(Protocol):
    """A block of the backend that some numbers of ranks do not fit."""

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ConfigError (2010) when `num_ranks` do not."""
        ...


def check_layout(config: RecipeConfig, plan: PlacementPlan) -> None:
    """All rules between the plan and the rest of the recipe.

    Raises:
        ConfigError: 2010 for counts, 2020 for what cannot work together.
        DependencyError: 3003 when RAY_ADDRESS does not answer.
    """
    _check_runtime(config, plan)
    _check_sync(config, plan)
    _check_ranks(config, plan)
    _check_parts(config, plan)
    if config.runtime_in_use == "ray":
        check_ray_address(os.environ.get("RAY_ADDRESS", ""))


def _check_parts(config: RecipeConfig, plan: PlacementPlan) -> None:
    """A reward that works while the engine does has a place of its own."""
    shared = [role for role in ("train", "rollout") if plan.device_sets[role].devices == plan.reward.devices]
    if config.reward_parts > 1 and shared:
        raise IncompatibleError(
            f"reward_parts={config.reward_parts} scores one part of a step while the next is drawn, and the reward "
            f"sits with {shared[-1]} on {plan.reward.words}, where they take turns. Write +placement.reward=cpu for a "
            "reward on the host's own processor (or one that asks a service), name devices of its own, or set "
            "reward_parts=1"
        )


def in_one_process(config: RecipeConfig, plan: PlacementPlan) -> bool:
    """Whether trainer and engine live in the same processes, rank by rank."""
    return config.runtime_in_use == "local" or plan.train == plan.rollout


def transport_of(config: RecipeConfig, plan: PlacementPlan) -> str:
    """How weights travel: `none`, `in_process`, or between processes."""
    if not plan.is_dedicated:
        return "none"
    if config.sync_transport in (None, "auto"):
        return "in_process" if in_one_process(config, plan) else BETWEEN_PROCESSES[0]
    return str(config.sync_transport)


def _check_runtime(config: RecipeConfig, plan: PlacementPlan) -> None:
    for role, device_set in plan.device_sets.items():
        if config.runtime_in_use == "local" and len(device_set) > 1:
            fewer = "set num_devices=1" if config.placement is None else f"give {role} one"
            raise IncompatibleError(
                f"runtime=local is one process, and {role} has {len(device_set)} devices ({device_set}). Set "
                f"runtime=ray, which has one worker per device, or {fewer}"
            )
    per_node = config.devices_per_node
    if per_node is not None and config.num_devices % per_node:
        raise GeometryError(
            f"devices_per_node={per_node} does not divide num_devices={config.num_devices}: every node gives equally "
            f"many. Use devices_per_node={_divisors(config.num_devices)}"
        )


def _check_sync(config: RecipeConfig, plan: PlacementPlan) -> None:
    engine = config.rollout.schema.owner.__name__
    if plan.is_dedicated and config.sync is None:
        raise IncompatibleError(
            f"{engine} holds weights of its own, and no sync block brings it the trained ones. Write "
            f"sync: {{_target_: {SYNC}}}"
        )
    if not plan.is_dedicated and config.sync is not None:
        raise IncompatibleError(
            f"sync: {engine} samples with the trained weights themselves, so there is nothing to send. Remove the "
            f"block (~sync), or use an engine that holds its own weights, such as {REPLICA}"
        )
    if plan.is_dedicated:
        _check_payload(config)
        _check_transport(config, plan)


def _check_payload(config: RecipeConfig) -> None:
    if config.merges_adapters and "lora_cfg" in config.backend.values and config.lora is None:
        raise IncompatibleError(
            "sync.merge_adapters folds adapters into the weights that are sent, and this recipe trains all weights, "
            "not adapters. Remove the key, or set backend.lora_cfg={}"
        )


def _check_transport(config: RecipeConfig, plan: PlacementPlan) -> None:
    transport, legal = transport_of(config, plan), _legal_transports(config, plan)
    if transport in legal:
        return
    where, others = f"train is on {plan.train} and rollout on {plan.rollout}", "other devices"
    if transport == "cuda_ipc" and plan.relation == "separate":
        rule, others = f"shares memory of one device, and {where}", f"placement.rollout={plan.train}"
    elif transport == "cuda_ipc":
        rule, others = "goes from process to process, and runtime=local is one process", "runtime=ray"
    elif in_one_process(config, plan):
        runtime = config.runtime_in_use
        rule = f"goes from process to process, and both roles live in the same ones ({where}, runtime={runtime})"
    else:
        rule = f"needs both roles in one process, and {where}"
    raise IncompatibleError(
        f"sync.transport={transport} {rule}. Use sync.transport=auto|{'|'.join(legal)}, or {others}"
    )


def _legal_transports(config: RecipeConfig, plan: PlacementPlan) -> tuple[str, ...]:
    if config.runtime_in_use == "local":
        return ("in_process",)
    return BETWEEN_PROCESSES if plan.relation == "separate" else ("in_process", "cuda_ipc")


def _check_ranks(config: RecipeConfig, plan: PlacementPlan) -> None:
    for node in nodes_below(config.backend.values):
        if issubclass(node.schema.owner, Ranked):
            build(node).check_ranks(len(plan.train))


def _divisors(number: int) -> str:
    return "|".join(str(size) for size in range(1, number + 1) if number % size == 0)


def layout_notices(config: RecipeConfig, plan: PlacementPlan, num_samples: int) -> Iterator[str]:
    """Settings without effect, and rows that are only there to fill up a share."""
    interval = config.weight_sync_interval
    if interval != 1 and not plan.is_dedicated:
        yield f"weight_sync_interval={interval} has no effect: the engine samples with the trained weights themselves"
    elif interval != 1:
        yield f"weight_sync_interval={interval}: samples come from weights that are up to {interval - 1} steps old"
    if config.runtime_in_use == "local" and os.environ.get("RAY_ADDRESS"):
        yield "RAY_ADDRESS is set and has no effect: runtime=local is this one process. Set runtime=ray to use it"
    if config.runtime_in_use == "local" and config.row_transport != "object_store":
        yield f"row_transport={config.row_transport} has no effect: runtime=local is this one process"
    if config.runtime_in_use == "local" and config.devices_per_node is not None:
        yield f"devices_per_node={config.devices_per_node} has no effect: runtime=local is this one process"
    for role, device_set in {"rollout": plan.rollout, "reward": plan.reward}.items():
        filled = -num_samples % len(device_set)
        if filled:
            yield (
                f"{role} has {len(device_set)} devices, which do not divide the {num_samples} samples: {filled} copies "
                "fill up the last share, and are thrown away"
            )
