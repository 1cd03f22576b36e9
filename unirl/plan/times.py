"""The time of one step by phase, from sizes alone: operations, bytes, launches and messages of each phase.

Nothing here was measured on a GPU. `unirl/plan/cost.py` has the sizes, and the memory of the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from unirl.plan.cost import MASTER_BYTES, Settings, Sizes, adapter_bytes, engine_bytes, policy_bytes, unblocked_bytes
from unirl.plan.devices import HOST_BANDWIDTH, Device
from unirl.types.facts import PREFILL_TOKENS

LAUNCHES_PER_LAYER, LAUNCHES_PER_ADAPTER, CASTS_PER_LAYER = 7.0, 4.0, 2.0
"""Operations of a forward pass: per matrix (6.0 to 8.9 in four networks), per adapted one, and casts of autocast."""
LAUNCHES_PER_TOKEN_LAYER = 8.5
"""The same when one token of each response is decoded: 2,145 for 36 layers of 7 matrices."""
BACKWARD_LAUNCHES = 1.2
"""Launches of a backward pass in relation to those of its forward pass (8,796 of 3,968 for both together)."""
TRAFFIC, CAST_TRAFFIC = 7.0, 2.0
"""Bytes that operations read and write, in relation to the inputs and outputs of the matrices (5.6 to 8.3), and those
of autocast and adapters."""
BACKWARD_TRAFFIC = 1.5
"""Traffic of a backward pass in relation to that of its forward pass (405 GB of 162 GB for both together)."""
BACKWARD_ATTENTION = 2.5
"""Operations of attention in a backward pass in relation to a forward pass: five matrix products instead of two."""
COMPILED = 0.5
"""Launches and traffic of compiled blocks in relation to those of eager ones."""
TF32 = 2.0
"""Time of a float32 convolution, which runs in TF32, in relation to one in bf16."""


@dataclass(frozen=True)
class Work:
    """Operations, bytes and launches of one device, which add up."""

    flops: float = 0.0
    useful_flops: float = 0.0  # without what is computed again
    slow_flops: float = 0.0  # in float32
    traffic: float = 0.0
    launches: float = 0.0
    gathered: float = 0.0  # bytes received from other devices
    crossing: float = 0.0  # bytes received from other nodes through the device's share of the network
    host_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def times(self, factor: float) -> Work:
        """The work of `factor` repetitions."""
        return Work(*(value * factor for value in vars(self).values()))


@dataclass(frozen=True)
class PhaseTime:
    """The expected time of one phase."""

    seconds: float
    bound_by: str
    """The resource that takes the longest: compute, bytes, launches, gathers, network or host."""
    mfu: float
    """Useful operations in relation to those that the device could do at its data sheet's rate."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the phase by resource, if no other resource took time."""


def phase_time(work: Work, device: Device, dtype_bytes: int) -> PhaseTime:
    """The time of `work`. Kernels run one after the other, while the host launches and devices gather."""
    parts = {
        "compute": device.compute_s(work.flops, dtype_bytes) + device.compute_s(work.slow_flops, 4),
        "bytes": device.memory_s(work.traffic),
        "launches": work.launches * device.launch_s,
        "gathers": work.gathered / device.interconnect,
        "network": work.crossing / device.network,
        "host": work.host_s,
    }
    on_device = parts["compute"] + parts["bytes"]
    overlapped = {"device": on_device} | {name: parts[name] for name in ("launches", "gathers", "network")}
    longest = max(overlapped, key=lambda name: overlapped[name])
    seconds = overlapped[longest] + parts["host"]
    kernels = "compute" if parts["compute"] >= parts["bytes"] else "bytes"
    bound = kernels if longest == "device" else longest
    if parts["host"] > overlapped[longest]:
        bound = "host"
    mfu = work.useful_flops / (seconds * device.bf16) if seconds else 0.0
    return PhaseTime(seconds, bound if seconds else "nothing", mfu, parts)


def step_times(sizes: Sizes, settings: Settings, device: Device) -> dict[str, PhaseTime]:
    """The expected time of each phase of a step."""
    works = {
        "sync": sync_work(sizes),
        "generate": generate_work(sizes, settings),
        "reward": reward_work(sizes),
        "train": train_work(sizes, settings),
    }
    return {name: phase_time(work, device, sizes.dtype_bytes) for name, work in works.items()}


def train_seconds(sizes: Sizes, settings: Settings, device: Device) -> float:
    """The expected time of training in a step."""
    return phase_time(train_work(sizes, settings), device, sizes.dtype_bytes).seconds


def step_seconds(sizes: Sizes, settings: Settings, device: Device) -> float:
    """The expected time of a step."""
    return total_seconds(sizes, step_times(sizes, settings, device))


def total_seconds(sizes: Sizes, phases: Mapping[str, PhaseTime]) -> float:
    """The time of a step from those of its phases: in turns, or with generation and training at the same time."""
    seconds = {name: phase.seconds for name, phase in phases.items()}
    if not sizes.steps_ahead:
        return sum(seconds.values())
    train = seconds.pop("train")
    sync = seconds.pop("sync")
    return sync + max(sum(seconds.values()), train)


def sync_work(sizes: Sizes) -> Work:
    """Sending the trained weights to the engine."""
    return Work(gathered=sizes.sync_bytes, crossing=sizes.sync_bytes * sizes.sync_crosses)


def forward_work(sizes: Sizes, settings: Settings, rows: float) -> Work:
    """One forward pass of the network over so many of its rows, weights in place."""
    network, saved = sizes.network, COMPILED if settings.compiled else 1.0
    has_casts = sizes.full_training or network.num_adapted > 0
    flops = rows * (network.matrix_flops + network.attention_flops)
    traffic = rows * network.layer_numbers * sizes.dtype_bytes * (TRAFFIC + CAST_TRAFFIC * has_casts) * saved
    launches = network.num_layers * (LAUNCHES_PER_LAYER + CASTS_PER_LAYER * has_casts)
    launches += network.num_adapted * LAUNCHES_PER_ADAPTER
    weights = (network.active_parameters + 2 * network.copied_parameters) * sizes.dtype_bytes
    return Work(flops, flops, traffic=traffic + weights, launches=launches * saved)


def casts_work(sizes: Sizes, settings: Settings) -> Work:
    """The casts of all weights for a forward pass of a module whose master weights are float32."""
    if not sizes.full_training or sizes.dtype_bytes == MASTER_BYTES or settings.num_shards > 1:
        return Work()
    return Work(traffic=sizes.network.active_parameters * (MASTER_BYTES + sizes.dtype_bytes))


def collective(num_bytes: float, group: int, per_node: int) -> Work:
    """A gather or a reduction that brings `num_bytes` to each device of a group.

    Devices form rings through all nodes of the group, as NCCL does, and the adapters of its devices share the traffic
    between two nodes.

    Args:
        per_node: devices of the group on one node.
    """
    return Work(gathered=num_bytes, crossing=num_bytes / per_node if group > per_node else 0.0)


def gather_work(sizes: Sizes, settings: Settings, num_bytes: float | None = None) -> Work:
    """Gathering the trained module once, or so many bytes of it, from the devices that share a copy."""
    shards = settings.num_shards
    whole = sizes.network.active_parameters * sizes.dtype_bytes if num_bytes is None else num_bytes
    return collective((1 - 1 / shards) * whole, shards, min(shards, sizes.devices_per_node or shards))


def sampling_gathers(sizes: Sizes, settings: Settings, num_forwards: float) -> Work:
    """The gathers of a rollout with sharded weights: the whole module once, or its blocks in each forward pass.

    Devices work in step, so each gathers as often as the one with the most forward passes, whichever blocks it runs.
    """
    if sizes.engine_dtype_bytes or settings.num_shards == 1:
        return Work()
    if settings.gathers_once:
        return gather_work(sizes, settings)
    blocks = gather_work(sizes, settings, sizes.block_parameters * sizes.dtype_bytes)
    return gather_work(sizes, settings, unblocked_bytes(sizes)) + blocks.times(num_forwards)


def reduce_work(sizes: Sizes, settings: Settings) -> Work:
    """Adding up the gradients: each device of a copy gets its shard, and then the copies add up their shards."""
    shards, devices = settings.num_shards, sizes.num_train_devices
    trainable, node = sizes.trainable_parameters * MASTER_BYTES, sizes.devices_per_node or devices
    scattered = collective((1 - 1 / shards) * trainable, shards, min(shards, node))
    copies = devices // shards
    return scattered + collective(
        2 * (1 - 1 / copies) * trainable / shards, copies, min(copies, max(node // shards, 1))
    )


def generate_work(sizes: Sizes, settings: Settings) -> Work:
    """Encoding the prompts, sampling and decoding."""
    rows = sizes.num_samples / sizes.num_engine_devices
    prompts = sizes.num_prompts / sizes.num_engine_devices
    borrows = sizes.engine_dtype_bytes == 0
    encoding = 2.0 * sizes.encoder_parameters * sizes.encoded_tokens * prompts
    work = Work(encoding, encoding, traffic=sizes.encoder_parameters * sizes.dtype_bytes * bool(encoding))
    if not settings.keep_resident:
        moved = sizes.encoder_parameters * sizes.dtype_bytes + sizes.vae_parameters * sizes.decoding.dtype_bytes
        work += Work(host_s=moved / HOST_BANDWIDTH)  # frozen weights stay in main memory, too, so they only come
    if sizes.takes_turns:
        work += Work(host_s=2 * engine_bytes(sizes) / HOST_BANDWIDTH)
    if sizes.network.cache_width:
        return work + tokens_work(sizes, settings, rows)
    chunk = rows / math.ceil(rows / settings.forward_rows)  # the mean, since the last chunk may be smaller
    forward = forward_work(sizes, settings, chunk * sizes.network_rows / settings.guidance_passes)
    forward += casts_work(sizes, settings) if borrows else Work()
    num_forwards = sizes.num_steps * settings.guidance_passes * rows / chunk
    work += forward.times(num_forwards) + sampling_gathers(sizes, settings, num_forwards)
    decoding = sizes.decoding.flops * rows
    slower = TF32 if sizes.decoding.dtype_bytes == 4 else 1.0
    return work + Work(slower * decoding, decoding, traffic=2 * rows * sizes.decoding.made_bytes)


def tokens_work(sizes: Sizes, settings: Settings, rows: float) -> Work:
    """Reading the prompts, then decoding token by token in slots. Every response has the largest length."""
    network, slots = sizes.network, min(settings.forward_rows, rows) * sizes.network_rows
    rows *= sizes.network_rows
    run = network.active_parameters - network.idle_parameters
    prefill = 2.0 * run * network.prompt_tokens * rows
    flops = 2.0 * run * slots
    context = network.prompt_tokens + sizes.num_steps / 2
    read = network.active_parameters + 2 * network.copied_parameters + slots * context * network.cache_width
    launches = LAUNCHES_PER_TOKEN_LAYER * network.num_layers * (COMPILED if settings.compiled else 1.0)
    token = Work(flops, flops, traffic=read * sizes.dtype_bytes, launches=launches) + casts_work(sizes, settings)
    num_tokens, num_prefills = sizes.num_steps * rows / slots, math.ceil(rows * network.prompt_tokens / PREFILL_TOKENS)
    work = Work(prefill, prefill) + token.times(num_tokens)
    return work + sampling_gathers(sizes, settings, num_tokens + num_prefills)


def reward_work(sizes: Sizes) -> Work:
    """Scoring all samples. What the loss itself scores in training is not counted here."""
    rows = sizes.num_samples / sizes.num_reward_devices
    fast, slow = sizes.reward.flops * rows, sizes.reward.slow_flops * rows
    return Work(fast, fast + slow, slow)


def train_work(sizes: Sizes, settings: Settings) -> Work:
    """Anchors, forward and backward passes, and the optimizer's updates. Nothing for a policy that only samples."""
    if not sizes.has_loss:
        return Work()
    network = sizes.network
    rows = sizes.num_trained / sizes.num_train_devices
    share = max(rows / sizes.num_updates, 1)  # of an update
    micro = share / math.ceil(share / settings.micro_rows)  # the mean, since the last micro-batch may be smaller
    forward = forward_work(sizes, settings, micro * sizes.trained_rows * sizes.steps_per_forward)
    gather = gather_work(sizes, settings)
    forward += casts_work(sizes, settings) + gather
    matrices = network.matrix_flops * (2.0 if sizes.full_training else 1.0)
    flops = (matrices + BACKWARD_ATTENTION * network.attention_flops) * forward.flops
    flops /= network.matrix_flops + network.attention_flops
    backward = Work(flops, flops, 0.0, BACKWARD_TRAFFIC * forward.traffic, BACKWARD_LAUNCHES * forward.launches)
    if settings.reshard:
        backward += gather
    if settings.recompute or sizes.always_recomputes:
        backward += replace(forward, useful_flops=0.0, gathered=0.0, crossing=0.0)
    passes = rows / micro * sizes.trained_steps / sizes.steps_per_forward
    work = (forward + backward).times(passes)
    work += forward.times(passes * sizes.anchor_passes + rows / micro * sizes.free_passes)
    trainable = sizes.trainable_parameters * MASTER_BYTES
    update = Work(traffic=7 * trainable / settings.num_shards)  # reads weights, gradients and moments, writes three
    update += reduce_work(sizes, settings)
    if sizes.takes_turns:
        own = (policy_bytes(sizes) + adapter_bytes(sizes) + 2 * trainable) / settings.num_shards
        work += Work(host_s=2 * own / HOST_BANDWIDTH)
    return work + update.times(sizes.num_updates)
