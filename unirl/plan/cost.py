"""The cost model of `unirl plan` and `unirl fit`: the sizes of a step, and its memory by phase, from these alone.

Nothing here was measured on a GPU. `unirl/plan/times.py` has the time of the same step. Operations
are those that torch's counter sees, and bytes and launches follow from the layers by constants that were counted on
networks of the published sizes without storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from unirl.models.loading.estimate import DecodingCost
from unirl.plan.devices import GIB
from unirl.types.facts import PREFILL_TOKENS

MASTER_BYTES = 4
"""Trainable weights, gradients, snapshots and each of AdamW's two moments are float32."""
JOINED = 2
"""Copies of the rows of a step while the chunks of a rollout are joined: the chunks and the whole."""
ACTIVATION_BYTES_PER_BLOCK = 26
"""Bytes stored for the backward pass per token, channel and byte of the compute dtype.

34 bytes at 16 bits are arXiv:2205.05198, eq. 1, without the attention matrix, which fused attention does not store.
Autocast adds the casts of what it reads: 2.4 GiB a row were counted for SD3.5-M at 512 px.
"""
LIVE_BYTES_WITHOUT_GRAD = 12
"""The same without gradients: the residual, q, k, v and the widened layer of the block that runs."""
CACHED_STREAMS = 3
"""Numbers that a step cache keeps per token and channel: after the first block in two steps, and a residual."""
LOGIT_BYTES = 2**27
"""The logits that exist at one time when log-probs of tokens are computed."""

MOMENTS = ("sync", "encode", "sample", "decode", "reward", "anchors", "train", "resume")
"""The moments of a step at which memory peaks: encode, sample and decode belong to the phase generate, anchors (the
outputs of other weights, before any gradient) to train, and resume to the start of a run that continues."""
STEP_PHASES: Mapping[str, tuple[str, ...]] = {
    "sync": ("sync",),
    "generate": ("encode", "sample", "decode"),
    "reward": ("reward",),
    "train": ("anchors", "train"),
    "checkpoint": ("resume",),
}
"""The phases of the loop, and their moments."""
KEPT = ("decode", "reward", "anchors", "train")
"""The moments at which the rows of a step exist."""
WAITING = ("reward", "anchors", "train")
"""The moments of another policy at which the rows of a policy that waits exist."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that change memory and speed, and the results by rounding alone."""

    micro_rows: int
    """Rows of a micro-batch (stack.micro_batch_size)."""
    forward_rows: int
    """Rows of a forward pass of sampling, or slots of responses in the making (rollout.forward_batch_size)."""
    recompute: bool
    num_shards: int
    """Devices that share one copy of the trained module."""
    reshard: bool = True
    """Gathered blocks are freed after their forward pass."""
    prefetched: int = 0
    """Blocks that are gathered ahead of the one that runs (backend.fsdp_cfg.prefetch_blocks)."""
    gathers_once: bool = True
    """Sampling gathers the sharded weights once per rollout, or else block by block in each forward pass
    (rollout.gather_weights)."""
    deferred: bool = False
    """Gradients are reduced once per update, so each device holds all of them until then."""
    keep_resident: bool = True
    """Encoders and VAE stay on the device while idle."""
    guidance_passes: int = 1
    decode_rows: int = 8
    compiled: bool = False
    decode_ahead: bool = False


@dataclass(frozen=True, kw_only=True)
class Network:
    """The trained network on one row: what a forward pass costs, and how wide it is."""

    matrix_flops: float
    attention_flops: float
    layer_numbers: float
    """Inputs and outputs of all matrices, in numbers."""
    num_layers: int
    num_adapted: int
    tokens: int  # of one row, at most
    width: int
    num_blocks: int
    active_parameters: int  # that one row needs
    idle_parameters: int = 0  # of these, that one token does not run
    copied_parameters: int = 0  # that every forward pass copies
    copied_at_once: int = 0  # of these, in one copy
    cache_width: int = 0  # numbers that sampling caches per token
    prompt_tokens: int = 0  # of a language model
    vocabulary: int = 0


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Numbers of one sample that its device keeps until the step ends. Pixels leave it chunk by chunk."""

    latents: int = 0
    latent_bytes: int = 4
    conditions: int = 0


@dataclass(frozen=True, kw_only=True)
class Reward:
    """The sizes of the reward models."""

    parameters: int = 0
    flops: float = 0.0  # of one sample, in bf16
    slow_flops: float = 0.0  # of one sample, in float32
    unknown: tuple[str, ...] = ()
    """Scorers whose cost is not known."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a recipe on one device, without the settings that `unirl fit` chooses."""

    policy_parameters: int
    block_parameters: int = 0  # of these, in blocks, which are gathered one at a time
    largest_block: int = 0
    kept_in_fp32: int = 0
    buffers: int = 0  # numbers of the trained module that are no parameters, and are never sharded
    encoder_parameters: int = 0
    vae_parameters: int = 0
    held_bytes: int = 0  # of untrained models on the same device: the video model of an environment, a frozen policy
    trainable_parameters: int
    dtype_bytes: int
    full_training: bool
    num_snapshots: int = 0  # copies of the trained weights
    num_loaded_snapshots: int = 0  # from other checkpoints; each is a whole module, also with adapters
    swaps_weights: bool = False  # the loss reads outputs of a snapshot
    engine_dtype_bytes: int = 0  # of a dedicated engine's network; 0 = the engine borrows the trained one
    can_sample_sharded: bool = False  # the engine that borrows it can sample with sharded weights
    engine_eight_bit: int = 0  # parameters of the engine's network that are stored in eight bits
    network: Network
    decoding: DecodingCost = field(default_factory=DecodingCost)
    stored: Stored = field(default_factory=Stored)
    reward: Reward = field(default_factory=Reward)
    steps_ahead: int = 0  # generated while the weights learn from an earlier one
    num_prompts: int = 1  # of a step
    encoded_tokens: int = 0  # of one prompt
    num_samples: int = 1  # of a step
    num_trained: int = 1  # rows of a step that are trained
    num_updates: int = 1
    num_steps: int = 1  # network evaluations to sample a row: denoising steps, or tokens of a response
    network_rows: int = 1  # of one sample in a forward pass: 2 with guidance
    caches_steps: bool = False  # sampling keeps tokens of an earlier step
    trained_rows: int = 1  # the same in training
    trained_steps: float = 1.0  # forward and backward passes of a trained row
    steps_per_forward: int = 1
    anchor_passes: float = 0.0  # further forward passes of a trained row, for each trained step
    free_passes: float = 0.0  # forward passes without gradient per trained row, in training
    always_recomputes: bool = False  # the loss repeats each forward pass in the backward pass
    trains_decoder: bool = False  # gradients flow through the decoder
    num_engine_devices: int = 1
    num_train_devices: int = 1
    num_reward_devices: int = 1
    shares_devices: bool = True  # of rollout and train
    sync_bytes: float = 0.0
    sync_crosses: bool = False  # the engine is on other nodes than the trainer
    devices_per_node: int | None = None  # None: one node has all devices
    is_trained: bool = True
    """False for a policy whose weights never change: it has no optimizer state."""
    has_loss: bool = True
    """False for a policy that only samples. The losses of other tracks may train its network."""
    num_aside: int = 0
    """Gradients that an update sets aside until those of all tracks are known (stack.balance)."""
    saves_in_background: bool = True
    """A save copies its files to main memory, and the copies stay for the next save (checkpoint.asynchronous)."""
    takes_turns: bool = False
    """Engine and trainer take turns on the same devices, so both are moved in every step."""


# Memory


@dataclass(frozen=True)
class MemoryRow:
    """Memory of one kind on one device, at each moment of a step."""

    name: str
    """The item, such as gradients."""
    part: str
    """The part of the residency table that it belongs to."""
    gib: Mapping[str, float]


Item = tuple[str, str, float, Collection[str]]
"""Name, the part that it belongs to, bytes, and the moments at which it exists."""


def memory_table(sizes: Sizes, settings: Settings, resident: Mapping[str, Collection[str]]) -> list[MemoryRow]:
    """The rows whose sum is the peak of each moment.

    Args:
        resident: phase of the loop to the parts that are on their devices in it.
    """
    here = {moment: resident[phase] for phase, moments in STEP_PHASES.items() for moment in moments}
    items = (*_weights(sizes, settings), *_training(sizes, settings), *_sampling(sizes, settings), *_rows(sizes))
    return [_row(item, {moment for moment in item[3] if item[1] in here[moment]}) for item in items]


def waiting_table(
    sizes: Sizes, settings: Settings, resident: Mapping[str, Collection[str]], shares_weights: bool = False
) -> list[MemoryRow]:
    """The rows of a policy that waits, at the moments of another one that works.

    It keeps what exists at all moments of its own step, and from the reward on its rows of the step, which are released
    when all policies have trained.

    Args:
        resident: phase of the policy that works to the parts of the waiting one that are on their devices.
        shares_weights: both are tracks of one network, which the table of the one that works contains.
    """
    here = {moment: resident[phase] for phase, moments in STEP_PHASES.items() for moment in moments}
    items = (*_weights(sizes, settings), *_training(sizes, settings), *_sampling(sizes, settings))
    kept = [item for item in items if item[1] == "reward" or not shares_weights]
    lasting = [item for item in kept if tuple(item[3]) == MOMENTS]
    stored = [item for item in _rows(sizes) if set(WAITING) <= set(item[3])]
    return [
        *(_row(item, {moment for moment in MOMENTS if item[1] in here[moment]}) for item in lasting),
        *(_row(item, WAITING) for item in stored),
    ]


def _row(item: Item, when: Collection[str]) -> MemoryRow:
    """The row of an item that is on its device at the moments `when`."""
    name, part, size, _ = item
    return MemoryRow(name, part, {moment: size / GIB * (moment in when) for moment in MOMENTS})


def policy_bytes(sizes: Sizes) -> float:
    """Bytes of the trained module without adapters, over all shards."""
    if sizes.full_training:
        return sizes.policy_parameters * MASTER_BYTES
    wide = sizes.kept_in_fp32 * (MASTER_BYTES - sizes.dtype_bytes)
    return sizes.policy_parameters * sizes.dtype_bytes + wide


def engine_bytes(sizes: Sizes) -> int:
    """Bytes of the network of a dedicated engine without adapters."""
    wide = sizes.policy_parameters - sizes.engine_eight_bit
    return wide * sizes.engine_dtype_bytes + sizes.engine_eight_bit


def adapter_bytes(sizes: Sizes) -> int:
    """Bytes of the adapters, over all shards."""
    return 0 if sizes.full_training else sizes.trainable_parameters * MASTER_BYTES


def unblocked_bytes(sizes: Sizes) -> float:
    """Bytes of what is in no block of the trained module, such as embeddings, and is gathered as one."""
    return (sizes.policy_parameters - sizes.block_parameters) * sizes.dtype_bytes + adapter_bytes(sizes)


def gathered_blocks(sizes: Sizes, settings: Settings) -> float:
    """Bytes of the blocks that are gathered at one time: the one that runs, and those ahead of it, at least one."""
    at_once = 1 + max(settings.prefetched, 1)
    return min(at_once * sizes.largest_block, sizes.block_parameters) * sizes.dtype_bytes


def _weights(sizes: Sizes, settings: Settings) -> Iterator[Item]:
    shards = settings.num_shards
    policy, adapters = policy_bytes(sizes) / shards, adapter_bytes(sizes) / shards
    trainable = sizes.trainable_parameters * MASTER_BYTES / shards
    yield "policy weights", "policy", policy, MOMENTS
    yield "tables of positions", "policy", sizes.buffers * sizes.dtype_bytes, MOMENTS
    yield "adapters", "policy", adapters, MOMENTS
    yield "optimizer (AdamW)", "optimizer", 2 * trainable * sizes.is_trained, MOMENTS
    snapshots = sizes.num_snapshots * trainable + sizes.num_loaded_snapshots * (policy + adapters)
    yield "snapshots", "policy", snapshots, MOMENTS
    yield "live weights, set aside", "policy", trainable * sizes.swaps_weights * sizes.is_trained, ("anchors",)
    yield "weights and snapshots, read", "policy", trainable * (1 + sizes.num_snapshots), ("resume",)


def _training(sizes: Sizes, settings: Settings) -> Iterator[Item]:
    if not sizes.has_loss:
        return
    network, shards = sizes.network, settings.num_shards
    trainable = sizes.trainable_parameters * MASTER_BYTES
    yield "gradients", "policy", trainable / (1 if settings.deferred else shards), ("train",)
    yield "gradients, set aside", "policy", sizes.num_aside * trainable / shards, ("train",)
    whole = sizes.policy_parameters * sizes.dtype_bytes
    if shards > 1:
        # Blocks that are not freed stay from their forward pass to the backward pass.
        blocks = gathered_blocks(sizes, settings) if settings.reshard else sizes.block_parameters * sizes.dtype_bytes
        canary = ("sync",) if sizes.engine_dtype_bytes else ()
        yield "gathered blocks", "policy", unblocked_bytes(sizes) + blocks, (*canary, "anchors", "train")
    elif sizes.full_training and sizes.dtype_bytes < MASTER_BYTES:
        yield "casts of the weights", "policy", whole, ("anchors", "train")
    # The backward pass has the gradients of the copied weights as well, if these are trained.
    copied = network.copied_at_once * sizes.dtype_bytes
    yield "copies of experts", "policy", copied * (1 + sizes.full_training), ("anchors", "train")
    rows = settings.micro_rows * sizes.trained_rows * sizes.steps_per_forward
    per_channel = rows * network.tokens * network.width * sizes.dtype_bytes
    one_block = per_channel * ACTIVATION_BYTES_PER_BLOCK
    kept = per_channel * network.num_blocks + one_block if settings.recompute else one_block * network.num_blocks
    yield "activations of training", "policy", kept, ("train",)
    yield "activations of anchors", "policy", per_channel * LIVE_BYTES_WITHOUT_GRAD, ("anchors",)
    if network.vocabulary:
        logits = min(rows * network.tokens * network.vocabulary * MASTER_BYTES, LOGIT_BYTES)
        yield "logits", "policy", 2 * logits, ("anchors", "train")
    if sizes.trains_decoder:
        yield "decoder in training", "policy", 3 * settings.micro_rows * sizes.decoding.peak_bytes, ("train",)


def _sampling(sizes: Sizes, settings: Settings) -> Iterator[Item]:
    """Memory of sampling, either with the trained module, gathered for it, or in an engine with its own weights."""
    network, borrows = sizes.network, sizes.engine_dtype_bytes == 0
    part, frozen = ("policy", "frozen") if borrows else ("engine", "engine")
    generate = STEP_PHASES["generate"]
    sampled = ("sample", "decode") if settings.decode_ahead else ("sample",)
    if not borrows:
        yield "engine weights", part, engine_bytes(sizes) + adapter_bytes(sizes), MOMENTS
    elif settings.num_shards > 1:
        blocks = sizes.block_parameters * sizes.dtype_bytes if settings.gathers_once else 0
        yield "gathered weights", part, unblocked_bytes(sizes) + blocks, generate
        at_once = 0 if settings.gathers_once else gathered_blocks(sizes, settings)
        yield "gathered blocks, sampling", part, at_once, sampled
    elif sizes.full_training and sizes.dtype_bytes < MASTER_BYTES:
        yield "casts of the weights, sampling", part, sizes.policy_parameters * sizes.dtype_bytes, generate
    always = settings.keep_resident
    yield "encoders", frozen, sizes.encoder_parameters * sizes.dtype_bytes, MOMENTS if always else ("encode",)
    yield "VAE", frozen, sizes.vae_parameters * sizes.decoding.dtype_bytes, MOMENTS if always else ("decode",)
    yield "models beside the policy", frozen, sizes.held_bytes, MOMENTS
    copied = network.copied_at_once * sizes.dtype_bytes
    yield "copies of experts, sampling", part, copied, ("sample",)
    rows = settings.forward_rows * sizes.network_rows / settings.guidance_passes
    # A language model reads the prompts, some at a time, and then one token of each response.
    at_once = max(PREFILL_TOKENS, network.tokens) if network.cache_width else rows * network.tokens
    per_channel = min(at_once, rows * network.tokens) * network.width * sizes.dtype_bytes
    yield "activations of sampling", part, per_channel * LIVE_BYTES_WITHOUT_GRAD, sampled
    cached = settings.forward_rows * sizes.network_rows * network.tokens * network.cache_width * sizes.dtype_bytes
    yield "keys and values", part, cached, ("sample",)
    tokens = settings.forward_rows * sizes.network_rows * network.tokens * sizes.caches_steps
    yield "step cache", part, CACHED_STREAMS * tokens * network.width * sizes.dtype_bytes, ("sample",)
    yield "activations of the decoder", frozen, settings.decode_rows * sizes.decoding.peak_bytes, ("decode",)
    yield "reward models", "reward", sizes.reward.parameters * MASTER_BYTES, MOMENTS


def _rows(sizes: Sizes) -> Iterator[Item]:
    """The rows of a step and of those ahead: with the engine until the step ends, with the trainer while it trains."""
    stored = sizes.stored
    part, rows = ("policy" if sizes.shares_devices else "engine"), sizes.num_samples / sizes.num_engine_devices
    rows *= 1 + sizes.steps_ahead
    latents, conditions = stored.latents * stored.latent_bytes, stored.conditions * sizes.dtype_bytes
    yield "stored latents", part, rows * latents, ("sample", *KEPT)
    yield "stored latents, joined", part, rows * latents * (JOINED - 1), ("sample",)
    yield "stored conditions", part, rows * conditions, ("encode", "sample", *KEPT)
    if not sizes.shares_devices:
        trained = sizes.num_trained / sizes.num_train_devices * (latents + conditions)
        yield "rows that are trained", "policy", trained, ("anchors", "train")
