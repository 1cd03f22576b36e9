"""Rules between the placement of a recipe and its runtime, weight sync, sharding and Ray address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from unirl.config.build import build
from unirl.config.dependencies import check_ray_address
from unirl.config.errors import GeometryError, IncompatibleError
from unirl.config.node import Node, nodes_below
from unirl.config.node_groups import CPU_HARDWARE, group_of_device
from unirl.config.recipe import RecipeConfig
from unirl.plan.placement import REPLICA, SYNC, PlacementPlan

BETWEEN_PROCESSES = ("broadcast", "ray")


@runtime_checkable
class Ranked(Protocol):
    """A block of the backend that limits the number of ranks."""

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ConfigError (2010) if this block does not work on `num_ranks` ranks."""
        ...


def check_layout(config: RecipeConfig, plan: PlacementPlan) -> None:
    """Checks the rest of the recipe against the placement.

    Raises:
        ConfigError: 2010 for counts, 2020 for settings that cannot work together.
        DependencyError: 3003 if nothing answers at RAY_ADDRESS.
    """
    _check_runtime(config, plan)
    _check_row_service(config)
    _check_sync(config, plan)
    for node in nodes_below(config.backend.values):
        if issubclass(node.schema.owner, Ranked):
            build(node).check_ranks(len(plan.train))
    _check_reward_parts(config, plan)
    _check_sharded_sampling(config, plan)
    if config.runtime_in_use == "ray":
        check_ray_address(os.environ.get("RAY_ADDRESS", ""))


def _check_reward_parts(config: RecipeConfig, plan: PlacementPlan) -> None:
    """A reward that scores while the engine samples needs devices of its own. Devices that join take parts anyway."""
    shared = [role for role in ("train", "rollout") if plan.device_sets[role].devices == plan.reward.devices]
    if config.reward_parts > 1 and shared and not config.asynchronous.elastic:
        raise IncompatibleError(
            f"reward_parts={config.reward_parts} scores one part of a step while the next is sampled, and the reward "
            f"shares {plan.reward.words} with {shared[-1]}, where they take turns. Write +placement.reward=cpu for a "
            "reward on the host's CPUs (or one that calls a service), give it devices of its own, or set "
            "reward_parts=1"
        )


def num_shards(config: RecipeConfig, plan: PlacementPlan) -> int:
    """The number of devices that share one copy of the trained weights."""
    fsdp = config.backend.get("fsdp_cfg", Node)
    return (fsdp and fsdp.get("shard_size", int)) or len(plan.train)


def samples_sharded(config: RecipeConfig) -> bool:
    """True if the engine samples with sharded weights, where there are several shards."""
    return config.rollout.get("gather_weights", bool) is False


def can_sample_sharded(config: RecipeConfig) -> bool:
    """True if the engine samples with the trained weights and can leave them sharded."""
    return "gather_weights" in config.rollout.schema.keys and not config.pipeline.get("use_cuda_graphs", bool)


def _check_sharded_sampling(config: RecipeConfig, plan: PlacementPlan) -> None:
    """A captured step cannot wait for other devices."""
    if samples_sharded(config) and not can_sample_sharded(config) and num_shards(config, plan) > 1:
        raise IncompatibleError(
            "rollout.gather_weights=false gathers a block at a time from the other devices, and "
            "pipeline.use_cuda_graphs=true captures forwards, which then cannot wait for them. Use "
            "pipeline.use_cuda_graphs=false, or rollout.gather_weights=true"
        )


def in_one_process(config: RecipeConfig, plan: PlacementPlan) -> bool:
    """True if train and rollout share their processes, rank by rank."""
    return config.runtime_in_use == "local" or plan.train == plan.rollout


def transport_of(config: RecipeConfig, plan: PlacementPlan) -> str:
    """How weights travel to the engine: `none`, `in_process`, or one of BETWEEN_PROCESSES or `cuda_ipc`."""
    if not plan.is_dedicated:
        return "none"
    if config.sync_transport in (None, "auto"):
        return "in_process" if in_one_process(config, plan) else BETWEEN_PROCESSES[_mixes_hardware(config, plan)]
    return str(config.sync_transport)


def _check_runtime(config: RecipeConfig, plan: PlacementPlan) -> None:
    for role, device_set in plan.device_sets.items():
        if config.runtime_in_use == "local" and len(device_set) > 1:
            fewer = "set num_devices=1" if config.placement is None else f"give {role} one"
            raise IncompatibleError(
                f"runtime=local is one process, and {role} has {len(device_set)} devices ({device_set}). Set "
                f"runtime=ray, which has one worker per device, or {fewer}"
            )
    if config.runtime_in_use == "torchrun":
        _check_torchrun(config, plan)
    per_node = config.devices_per_node
    if per_node is not None and config.num_devices % per_node:
        divisors = [str(size) for size in range(1, config.num_devices + 1) if config.num_devices % size == 0]
        raise GeometryError(
            f"devices_per_node={per_node} does not divide num_devices={config.num_devices}: every node has equally "
            f"many devices. Use devices_per_node={'|'.join(divisors)}"
        )


def _check_torchrun(config: RecipeConfig, plan: PlacementPlan) -> None:
    """Refuses what needs other processes than the one of each device."""
    if plan.is_dedicated:
        raise IncompatibleError(
            f"runtime=torchrun trains recipes whose engine samples with the trained weights, and "
            f"{config.rollout.class_name} has weights of its own, which need workers of Ray. Start the run without "
            "torchrun (runtime=ray)"
        )
    if plan.reward.kind == "cpu":
        raise IncompatibleError(
            f"placement.reward={plan.reward} needs processes beside those of torchrun. Leave it out, so that the "
            "reward runs on the devices, or start the run without torchrun (runtime=ray)"
        )
    if config.node_groups:
        raise IncompatibleError(
            "node_groups places workers on nodes of a Ray cluster, and torchrun has started them already. Start the "
            "run without torchrun (runtime=ray)"
        )


def _check_row_service(config: RecipeConfig) -> None:
    """A service carries rows between worker processes, in place of another transport."""
    if config.transfer_queue is None:
        return
    service = f"transfer_queue={config.transfer_queue.class_name}"
    if config.runtime_in_use != "ray":
        raise IncompatibleError(
            f"{service} carries rows between workers of Ray, and runtime={config.runtime_in_use} has none. Set "
            "runtime=ray, or leave transfer_queue out"
        )
    if config.row_transport != "object_store":
        raise IncompatibleError(
            f"{service} and row_transport={config.row_transport} are two ways for the same rows. Keep one of them"
        )


def _check_sync(config: RecipeConfig, plan: PlacementPlan) -> None:
    engine = config.rollout.class_name
    if plan.is_dedicated and config.sync is None:
        raise IncompatibleError(
            f"{engine} has weights of its own, and no sync block sends it the trained ones. Write "
            f"sync: {{_target_: {SYNC}}}"
        )
    if not plan.is_dedicated and config.sync is not None:
        raise IncompatibleError(
            f"sync: {engine} samples with the trained weights themselves, so there is nothing to send. Remove the "
            f"block (~sync), or use an engine with weights of its own, such as {REPLICA}"
        )
    if plan.is_dedicated and config.merges_adapters and "lora_cfg" in config.backend.values and config.lora is None:
        raise IncompatibleError(
            "sync.merge_adapters folds adapters into the weights that are sent, and this recipe trains all weights, "
            "not adapters. Remove the key, or set backend.lora_cfg={}"
        )
    if plan.is_dedicated:
        _check_transport(config, plan)


def _check_transport(config: RecipeConfig, plan: PlacementPlan) -> None:
    transport = transport_of(config, plan)
    legal: tuple[str, ...] = ("in_process",)
    if config.runtime_in_use == "ray":
        legal = BETWEEN_PROCESSES if plan.relation == "separate" else ("in_process", "cuda_ipc")
    if transport in legal and transport == "cuda_ipc" and config.row_transport == "collective":
        raise IncompatibleError(
            "row_transport=collective joins all workers in one group, where NCCL takes one process of a device, and "
            "sync.transport=cuda_ipc runs two processes on each. Use row_transport=object_store, or "
            "sync.transport=in_process"
        )
    if transport in legal:
        _check_mixed_hardware(config, plan, transport)
        return
    where = f"train is on {plan.train} and rollout on {plan.rollout}"
    others = "place the roles on other devices"
    if transport == "cuda_ipc" and plan.relation == "separate":
        rule, others = f"shares memory of one device, and {where}", f"placement.rollout={plan.train}"
    elif transport == "cuda_ipc":
        rule, others = "sends weights between processes, and runtime=local is one process", "runtime=ray"
    elif in_one_process(config, plan):
        runtime = config.runtime_in_use
        rule = f"sends weights between processes, and both roles share theirs ({where}, runtime={runtime})"
    else:
        rule = f"needs both roles in one process, and {where}"
    raise IncompatibleError(
        f"sync.transport={transport} {rule}. Use sync.transport=auto|{'|'.join(legal)}, or {others}"
    )


def _mixes_hardware(config: RecipeConfig, plan: PlacementPlan) -> bool:
    """True if one of train and rollout is on a group of GPUs, and the other one on a group of CPU nodes."""
    groups = config.node_groups or {}
    if not groups:
        return False
    sets = (plan.train, plan.rollout)
    hardware = [groups[group_of_device(groups, each.indices[0])].hardware for each in sets]
    return hardware.count(CPU_HARDWARE) == 1 and None not in hardware


def _check_mixed_hardware(config: RecipeConfig, plan: PlacementPlan, transport: str) -> None:
    """Refuses process groups of GPUs and CPU processes, for weights and for rows."""
    if not _mixes_hardware(config, plan):
        return
    where = f"train is on {plan.words_of(plan.train)} and rollout on {plan.words_of(plan.rollout)}, GPUs and CPUs"
    if transport == "broadcast":
        raise IncompatibleError(
            f"sync.transport=broadcast joins both in one process group, and {where}. Set sync.transport=ray, or auto"
        )
    if config.row_transport == "collective":
        raise IncompatibleError(
            f"row_transport=collective joins all workers in one process group, and {where}. Set "
            "row_transport=object_store"
        )


def layout_notices(config: RecipeConfig, plan: PlacementPlan, num_samples: int) -> Iterator[str]:
    """Settings without effect, stale weights, and padding rows."""
    interval = config.weight_sync_interval
    if interval != 1 and not plan.is_dedicated:
        yield f"weight_sync_interval={interval} has no effect: the engine samples with the trained weights themselves"
    elif interval != 1:
        yield f"weight_sync_interval={interval}: samples come from weights that are up to {interval - 1} steps old"
    if config.runtime_in_use == "local":
        reason = "has no effect: runtime=local is this one process"
        if os.environ.get("RAY_ADDRESS"):
            yield f"RAY_ADDRESS is set and {reason}. Set runtime=ray to use it"
        if config.row_transport != "object_store":
            yield f"row_transport={config.row_transport} {reason}"
        if config.devices_per_node is not None:
            yield f"devices_per_node={config.devices_per_node} {reason}"
        if config.node_groups and config.scale != "toy":
            yield f"node_groups {reason}: it only numbers the devices, and its env_vars are not set"
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if transport_of(config, plan) == "cuda_ipc" and "expandable_segments:True" in allocator:
        yield (
            "sync.transport=cuda_ipc shares memory between processes, and PYTORCH_ALLOC_CONF asks for "
            "expandable_segments, whose memory some kernels do not let other processes map. Unset it if the first sync "
            "fails"
        )
    if samples_sharded(config) and num_shards(config, plan) == 1 and config.scale == "full":
        yield "rollout.gather_weights=false has no effect: every device that trains has a whole copy of the weights"
    for role, device_set in {"rollout": plan.rollout, "reward": plan.reward}.items():
        padding = -num_samples % len(device_set)
        if padding:
            yield (
                f"{role} has {len(device_set)} devices, which do not divide the {num_samples} samples: {padding} "
                "padding rows are added to the last share and discarded"
            )
