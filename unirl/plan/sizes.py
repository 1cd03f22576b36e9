"""The sizes and settings of a checked recipe, as the cost model reads them. No model is loaded, and no step is run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol, cast, runtime_checkable

import torch

from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.shared.contract import parts_of
from unirl.config.build import build
from unirl.config.device_sets import DeviceSet
from unirl.config.load import Recipe
from unirl.config.node import Node, nodes_below
from unirl.config.node_groups import node_of_device
from unirl.config.recipe import RecipeConfig
from unirl.models.loading.checkpoint import TOY
from unirl.models.loading.estimate import DecodingCost, Lengths, ModelEstimate, forward_flops
from unirl.plan.compatibility import KEPT_BY
from unirl.plan.cost import (
    MASTER_BYTES,
    STEP_PHASES,
    MemoryRow,
    Network,
    Reward,
    Settings,
    Sizes,
    Stored,
    memory_table,
    waiting_table,
)
from unirl.plan.credit import scored_by
from unirl.plan.estimates import KEPT_ESTIMATES, Estimated, estimate_of
from unirl.plan.geometry import Geometry, geometry_of
from unirl.plan.held import held_models
from unirl.plan.layout import can_sample_sharded, num_shards, samples_sharded, transport_of
from unirl.plan.placement import PlacementPlan, plan_of
from unirl.plan.preflight import needs_of, of_model, sizes_of, trainer_class
from unirl.plan.residency import IDLE, PHASES, MemoryPart, home_of, resident
from unirl.reward.base import RewardScorer, ScorerCost
from unirl.types.facts import LanguageFacts, LatentFacts
from unirl.types.protocols import REFERENCE, DtypeName, Needs, VaeDtype
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, ImageTokenSamplingParams, Sampling
from unirl.types.segments import LatentSegment, stored_positions

OTHER_POLICY = "other policy"
"""In place of a part: what another policy keeps."""
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@runtime_checkable
class Decodes(Protocol):
    """A bundle class that can say the cost of decoding a sample without loading a model."""

    @staticmethod
    def decoding(
        path: str,
        sampling: DiffusionSamplingParams,
        revision: str | None,
        *,
        vae_dtype: VaeDtype,
        dtype: DtypeName,
        tiled: bool,
    ) -> DecodingCost:
        """The cost of decoding one sample, in tiles or whole."""
        ...


@dataclass(frozen=True)
class WeightTransfer:
    """The weights that are sent to the engine, and how."""

    payload: str  # nothing, adapter, merged or full
    transport: str
    num_bytes: int
    interval: int  # steps


FORWARD_ROWS = "forward_batch_size"
"""The setting of an engine for the rows of one forward."""


@dataclass(frozen=True, kw_only=True)
class InRecipe:
    """The part of one policy in its recipe. The defaults are those of the only policy of a recipe."""

    is_trained: bool = True
    """False for a policy whose weights never change."""
    has_loss: bool = True
    """False for a policy that only samples. The losses of other tracks may train its network."""
    shares_weights: bool = False
    """The other policies are tracks of the same network."""
    num_aside: int = 0
    """Gradients that an update sets aside until those of all tracks are known."""
    scorers: Sequence[Node] | None = None
    """The scorers of this policy's samples; None = all of the recipe."""
    counts_reward: bool = True
    """False for a policy beside the one of the last track, which counts the memory of all reward models."""


ALONE = InRecipe()


@dataclass(frozen=True)
class RunSizes:
    """Everything that a recipe says about memory and time."""

    placement: PlacementPlan
    geometry: Geometry
    estimate: ModelEstimate
    transfer: WeightTransfer
    sizes: Sizes
    settings: Settings
    beside: Mapping[DeviceSet, Sequence[MemoryRow]] = field(default_factory=dict)
    """By devices, what the other policies of the recipe keep there while this one works: one row for each."""
    part: InRecipe = ALONE
    chooses_rows: bool = True
    """The engine has the setting `forward_batch_size`. A server chooses the rows of a forward itself."""

    @property
    def memory(self) -> list[tuple[DeviceSet, MemoryRow]]:
        """The rows whose sum is the peak of each moment, with the devices of each."""
        return self.memory_with(self.settings)

    def memory_with(self, settings: Settings) -> list[tuple[DeviceSet, MemoryRow]]:
        """The same with other settings of this policy."""
        own = memory_table(self.sizes, settings, resident_parts(self.placement))
        rows = [row for row in own if self.part.counts_reward or row.part != "reward"]
        here = [(home_of(self.placement, cast(MemoryPart, row.part)), row) for row in rows]
        if self.placement.is_elastic:
            here += [(self.placement.train.devices, joining(row)) for row in rows if row.part == "engine"]
        homes = {home for home, _ in here}
        return here + [(home, row) for home, others in self.beside.items() if home in homes for row in others]

    def waiting(self, name: str) -> dict[DeviceSet, MemoryRow]:
        """By devices, the memory that this policy keeps there while another one works.

        Args:
            name: the name of the policy, which is shown.
        """
        plan, totals = self.placement, dict[DeviceSet, dict[str, float]]()
        # The reward works for all policies at once.
        phases: dict[str, Sequence[str]] = {
            phase: resident(plan, phase if phase == "reward" else IDLE) for phase in PHASES
        }
        for row in waiting_table(self.sizes, self.settings, phases, self.part.shares_weights):
            if self.part.counts_reward or row.part != "reward":
                here = totals.setdefault(home_of(plan, cast(MemoryPart, row.part)), dict.fromkeys(row.gib, 0.0))
                for moment, gib in row.gib.items():
                    here[moment] += gib
        return {home: MemoryRow(f"{name}, which waits", OTHER_POLICY, gib) for home, gib in totals.items()}

    @classmethod
    def of(cls, config: RecipeConfig, part: InRecipe = ALONE) -> RunSizes:
        """Works it out from the recipe and the configuration files that its bundle class reads.

        With `stack.micro_batch_size=auto`, the settings hold the smallest micro-batch; `with_auto_micro` of
        unirl.plan.micro_batch chooses one.
        """
        placement, needs = plan_of(config), needs_of(config)
        owner = config.bundle.schema.owner
        assert isinstance(owner, Estimated) and config.model_path is not None
        estimate = estimate_of(config)
        facts = estimate.facts.of(build(config.sampling))
        cache_width = facts.cache_width if isinstance(facts, LanguageFacts) else estimate.cache_width
        estimate = replace(estimate, facts=facts, cache_width=cache_width)
        geometry = geometry_of(config, placement, needs)
        transfer = _transfer(config, placement, estimate)
        sizes = replace(
            _sizes(config, placement, geometry, needs, estimate, transfer),
            is_trained=part.is_trained,
            has_loss=part.has_loss,
            num_aside=part.num_aside,
            reward=reward_of(config, config.scorers if part.scorers is None else part.scorers),
        )
        settings = _settings(config, placement, geometry, sizes, estimate)
        chooses_rows = FORWARD_ROWS in config.rollout.schema.keys
        return cls(placement, geometry, estimate, transfer, sizes, settings, part=part, chooses_rows=chooses_rows)


def joining(row: MemoryRow) -> MemoryRow:
    """The same row of the second engine, on the training devices. What always exists sleeps while these train."""
    sleeps = all(row.gib.values())
    awake = (*STEP_PHASES["sync"], *STEP_PHASES["generate"])
    gib = {moment: size * (not sleeps or moment in awake) for moment, size in row.gib.items()}
    return MemoryRow(f"{row.name} (elastic)", row.part, gib)


def rows_beside(others: Mapping[str, RunSizes]) -> dict[DeviceSet, list[MemoryRow]]:
    """By devices, what other policies keep there while one works.

    Args:
        others: name to the run of each of the other policies.
    """
    beside: dict[DeviceSet, list[MemoryRow]] = {}
    for name, run in others.items():
        for home, row in run.waiting(name).items():
            beside.setdefault(home, []).append(row)
    return beside


@dataclass(eq=False)
class RecipeSizes:
    """A recipe and the sizes of its run, which are worked out when they are first needed, and then kept."""

    config: RecipeConfig
    part: InRecipe = ALONE
    variable: str | None = None
    """The environment variable that sets the model."""
    others: Mapping[str, RecipeSizes] = field(default_factory=dict, repr=False)
    """The other policies of the recipe by name."""

    @cached_property
    def run(self) -> RunSizes | None:
        """The sizes. None if the recipe's bundle cannot say those of its model without loading it."""
        if self.alone is None:
            return None
        others = {name: other.alone for name, other in self.others.items()}
        return replace(self.alone, beside=rows_beside({name: run for name, run in others.items() if run is not None}))

    @cached_property
    def alone(self) -> RunSizes | None:
        """The sizes without what the other policies keep on the devices."""
        is_estimated = isinstance(self.config.bundle.schema.owner, Estimated) and self.config.model_path is not None
        if not is_estimated:
            return None
        with of_model(self.config, self.variable):
            return RunSizes.of(self.config, self.part)


def sizes_of_policies(recipe: Recipe, configs: Mapping[str, RecipeConfig] | None = None) -> dict[str, RecipeSizes]:
    """The sizes of each policy of a recipe, with what the others keep on its devices.

    Args:
        configs: the policies, if they differ from those of the recipe.
    """
    policies = recipe.policies if configs is None else configs
    scored = trainer_class(recipe.config).track
    blocks = scored_by(recipe, scored)
    sizes: dict[str, RecipeSizes] = {}
    balance = recipe.config.stack.get("balance", str)
    for name, config in policies.items():
        part = InRecipe(
            is_trained=name in recipe.trained or recipe.shares_weights,
            has_loss=name in recipe.trained,
            shares_weights=recipe.shares_weights,
            num_aside=0 if balance in (None, "fixed") else len(recipe.trained),
            scorers=[blocks[name]] if name in blocks else [],
            counts_reward=len(policies) == 1 or name == scored,
        )
        sizes[name] = RecipeSizes(config, part, recipe.model_variable(name))
    for name, each in sizes.items():
        each.others = {other: sizes[other] for other in sizes if other != name}
    return sizes


def _settings(
    config: RecipeConfig, placement: PlacementPlan, geometry: Geometry, sizes: Sizes, estimate: ModelEstimate
) -> Settings:
    tokens = sizes.network.tokens * sizes.trained_rows
    budget, fsdp = config.micro_batch_tokens, config.backend.get("fsdp_cfg", Node)
    shards = num_shards(config, placement)
    slots = estimate.facts.rows_at_once(largest(config, estimate), sizes.engine_dtype_bytes or sizes.dtype_bytes)
    rows_at_once = min(slots, -(-sizes.num_samples // sizes.num_engine_devices))
    return Settings(
        micro_rows=geometry.micro_batch_size if budget is None else max(budget // tokens, 1),
        forward_rows=config.rollout.get(FORWARD_ROWS, int) or rows_at_once,
        recompute=fsdp is not None and fsdp.require("activation_checkpointing", bool),
        num_shards=shards,
        gathers_once=not samples_sharded(config),
        reshard=fsdp is None or fsdp.require("reshard_after_forward", bool),
        prefetched=0 if fsdp is None else fsdp.require("prefetch_blocks", int),
        deferred=shards > 1 and (fsdp is None or fsdp.require("defer_grad_sync", bool)),
        keep_resident=config.pipeline.get("keep_resident", bool) is not False,
        guidance_passes=(config.sampling.get("guidance_passes", int) or 1) if sizes.network_rows > 1 else 1,
        decode_rows=config.pipeline.get("decode_batch_size", int) or 1,
        compiled=fsdp is not None and fsdp.require("use_torch_compile", bool),
        decode_ahead=bool(config.pipeline.get("decode_ahead", bool)),
    )


def _sizes(
    config: RecipeConfig,
    placement: PlacementPlan,
    geometry: Geometry,
    needs: Needs,
    estimate: ModelEstimate,
    transfer: WeightTransfer,
) -> Sizes:
    sampling, facts = largest(config, estimate), estimate.facts
    parameters = dict(estimate.parameters)
    policy, vae = parameters.pop(facts.trainable_attr), parameters.pop("vae", 0)
    lora, dtype = config.lora, config.bundle.require("dtype", str)
    rank = 0 if lora is None else lora.require("rank", int)
    targets = None if lora is None else lora.get("target_modules", tuple)
    averages = [config.backend.get(name, Node) for name in KEPT_BY.values()]
    has_reference = REFERENCE in needs.snapshots
    ahead = config.asynchronous
    published = (0 if ahead.is_free else ahead.max_staleness) or int(
        placement.is_dedicated and config.weight_sync_interval > 1
    )
    dtype_bytes = DTYPE_BYTES[dtype]
    work = _work_of_loss(config, sampling, facts, geometry)
    guided = _is_guided(facts, sampling)
    return Sizes(
        policy_parameters=policy,
        block_parameters=estimate.block_parameters,
        largest_block=estimate.largest_block,
        kept_in_fp32=estimate.kept_in_fp32,
        buffers=estimate.buffers,
        encoder_parameters=sum(parameters.values()),
        vae_parameters=vae,
        trainable_parameters=policy if lora is None else estimate.lora_parameters(rank, targets),
        dtype_bytes=dtype_bytes,
        full_training=lora is None,
        num_snapshots=sum(average is not None for average in averages) + has_reference + published,
        num_loaded_snapshots=len(config.loaded_snapshots),
        steps_ahead=ahead.num_ahead,
        swaps_weights=bool(needs.snapshots),
        engine_eight_bit=0 if config.rollout.get("weight_dtype", str) is None else estimate.block_weights,
        engine_dtype_bytes=DTYPE_BYTES[config.rollout.get("dtype", str) or dtype] if placement.is_dedicated else 0,
        can_sample_sharded=can_sample_sharded(config),
        network=_network(estimate, sampling, rank, targets),
        decoding=decoding_of(config, sampling, tiled=config.pipeline.get("vae_tiling", bool) is True),
        stored=_stored(estimate, sampling, guided),
        reward=reward_of(config, config.scorers),
        held_bytes=sum(model.num_bytes for model in held_models(config)),
        num_prompts=geometry.num_prompts,
        encoded_tokens=sampling.max_sequence_length if isinstance(sampling, DiffusionSamplingParams) else 0,
        num_samples=geometry.num_samples,
        num_trained=geometry.num_trained,
        num_updates=geometry.num_updates,
        num_steps=_num_steps(sampling),
        network_rows=2 if guided else 1,
        caches_steps=isinstance(sampling, DiffusionSamplingParams) and sampling.cache_threshold is not None,
        trained_rows=2 if guided and work.is_guided else 1,
        trained_steps=work.steps,
        steps_per_forward=work.steps_per_forward,
        anchor_passes=work.anchor_passes,
        free_passes=work.free_passes,
        always_recomputes=needs.differentiable_reward,
        trains_decoder=needs.differentiable_reward,
        num_engine_devices=len(placement.rollout),
        num_train_devices=len(placement.train),
        num_reward_devices=max(len(placement.reward), 1),
        shares_devices=placement.rollout.devices == placement.train.devices,
        sync_bytes=transfer.num_bytes / transfer.interval,
        sync_crosses=_nodes(placement.train, config) != _nodes(placement.rollout, config),
        devices_per_node=config.devices_on_node if config.node_groups else config.devices_per_node,
        saves_in_background=config.checkpoint.asynchronous,
        takes_turns=placement.relation == "colocate",
    )


def _nodes(devices: DeviceSet, config: RecipeConfig) -> set[int]:
    """The nodes of a device set."""
    if config.node_groups:
        return {node_of_device(config.node_groups, index) for index in devices.indices}
    return {index // config.devices_on_node for index in devices.indices}


def largest(config: RecipeConfig, estimate: ModelEstimate) -> Sampling:
    """The sampling settings, at the size of samples that has the most tokens."""
    sampling: Sampling = build(config.sampling)
    sized = [sampling.at_size(*size) for size in sizes_of(config)]
    return max(sized or [sampling], key=estimate.facts.tokens_of)


def _is_guided(facts: object, sampling: Sampling) -> bool:
    """True if a forward pass of the network reads two rows of each sample, or there are two forward passes."""
    if isinstance(sampling, ImageTokenSamplingParams):
        return sampling.is_guided
    if not isinstance(sampling, DiffusionSamplingParams) or not isinstance(facts, LatentFacts):
        return False
    return facts.guidance_of(sampling).active


def _num_steps(sampling: Sampling) -> int:
    if isinstance(sampling, ARSamplingParams):
        return sampling.max_new_tokens
    return sampling.num_inference_steps if isinstance(sampling, DiffusionSamplingParams) else 1


def _network(estimate: ModelEstimate, sampling: Sampling, rank: int, targets: Iterable[str] | None) -> Network:
    facts, layers = estimate.facts, estimate.layers(targets)
    tokens = facts.tokens_of(sampling)
    lengths = Lengths(0, tokens, causal=True)
    if isinstance(sampling, DiffusionSamplingParams) and isinstance(facts, LatentFacts):
        text = facts.text_seq_len(sampling)
        lengths = Lengths(tokens - text, text)
    matrices, attention = forward_flops(layers, lengths, rank)
    language = facts if isinstance(facts, LanguageFacts) else None
    return Network(
        matrix_flops=matrices,
        attention_flops=attention,
        layer_numbers=sum(lengths.of(layer.stream) * (layer.inputs + layer.outputs) for layer in layers),
        num_layers=len(layers),
        num_adapted=sum(layer.is_adapted for layer in layers) if rank else 0,
        tokens=tokens,
        width=estimate.width,
        num_blocks=estimate.num_blocks // estimate.num_experts,
        active_parameters=estimate.parameters[facts.trainable_attr] // estimate.num_experts,
        idle_parameters=estimate.idle_parameters,
        copied_parameters=estimate.copied_parameters,
        copied_at_once=estimate.copied_at_once,
        cache_width=estimate.cache_width,
        prompt_tokens=sampling.max_prompt_tokens if isinstance(sampling, ARSamplingParams) else 0,
        vocabulary=0 if language is None else language.vocab_size,
    )


def decoding_of(config: RecipeConfig, sampling: Sampling, tiled: bool) -> DecodingCost:
    """The cost of decoding one sample."""
    owner, path = config.bundle.schema.owner, config.model_path
    if not isinstance(owner, Decodes) or not isinstance(sampling, DiffusionSamplingParams) or path is None:
        return DecodingCost()
    words = config.bundle.require("vae_dtype", str), config.bundle.require("dtype", str)
    return _decoding(owner, path, sampling, config.model_revision, *words, tiled)


@lru_cache(maxsize=KEPT_ESTIMATES)
def _decoding(
    owner: Decodes,
    path: str,
    sampling: DiffusionSamplingParams,
    revision: str | None,
    vae_dtype: Any,  # the annotations of the bundle's constructor have checked both words
    dtype: Any,
    tiled: bool,
) -> DecodingCost:
    return owner.decoding(path, sampling, revision, vae_dtype=vae_dtype, dtype=dtype, tiled=tiled)


def _stored(estimate: ModelEstimate, sampling: Sampling, guided: bool) -> Stored:
    """Numbers of the latents and the conditions of a sample. Those of a text are negligible."""
    facts = estimate.facts
    if not isinstance(sampling, DiffusionSamplingParams) or not isinstance(facts, LatentFacts):
        return Stored()
    indices = sampling.resolve_sde_indices(0)
    text = facts.text_seq_len(sampling) * estimate.text_width
    positions = stored_positions(indices, sampling.num_inference_steps)
    return Stored(
        latents=len(positions) * math.prod(facts.latent_shape(sampling)),
        latent_bytes=DTYPE_BYTES[sampling.trajectory_dtype],
        conditions=text * (2 if guided else 1),
    )


@dataclass(frozen=True)
class _LossWork:
    """Passes of the network for one trained row."""

    steps: float
    steps_per_forward: int = 1
    anchor_passes: float = 0.0
    free_passes: float = 0.0
    is_guided: bool = True


def _work_of_loss(config: RecipeConfig, sampling: Sampling, facts: object, geometry: Geometry) -> _LossWork:
    algorithm: StageAlgorithm[object] = build(config.algorithm)
    later = (geometry.num_updates - 1) / geometry.num_updates
    snapshots = {anchor.snapshot for anchor in algorithm.anchors().values()}
    anchors = sum(later if name == "live" and not algorithm.needs.totals else 1.0 for name in snapshots)
    if not isinstance(sampling, DiffusionSamplingParams) or not isinstance(facts, LatentFacts):
        return _LossWork(1.0, 1, anchors)
    segment = _recorded(sampling, facts)
    if algorithm.needs.differentiable_reward:
        path = algorithm.gradient_path(segment)  # type: ignore[attr-defined]  # RewardBackprop has it
        gradient = len(path.gradient.steps)
        return _LossWork(gradient, 1, 0.0, path.num_steps - gradient)
    parts = parts_of(algorithm, segment)
    guided = vars(algorithm).get("train_guided", True)
    return _LossWork(sum(map(len, parts)), max(map(len, parts), default=1), anchors, 0.0, guided)


def _recorded(sampling: DiffusionSamplingParams, facts: LatentFacts) -> LatentSegment:
    """One trajectory of the first step of a run, without latents: the settings that the parts of a loss depend on."""
    steps = sampling.num_inference_steps
    pinned = sampling.pinned(0, [1 - i / steps for i in range(steps + 1)], lambda n: [1 - i / n for i in range(n + 1)])
    indices = pinned.sde_indices or ()
    return LatentSegment(
        latents=torch.zeros(1, 1, 1),
        indices=stored_positions(indices, pinned.num_inference_steps),
        sde_indices=indices,
        sigmas=torch.tensor(pinned.sigmas),
        logp=torch.zeros(1, len(indices)),
        kernel=sampling.kernel,
        init_same_noise=False,
        guidance=facts.guidance,
        seed=sampling.seed,
        step=0,
        anchors={},
    )


def reward_of(config: RecipeConfig, scorers: Sequence[Node]) -> Reward:
    """The cost of the reward: the parameters of all scorers of a recipe, and the time of some of them.

    Args:
        scorers: those whose time counts.
    """
    everything, counted = _costs(config.scorers), _costs(scorers)
    return Reward(
        parameters=sum(cost.parameters for _, cost, _ in everything if cost is not None),
        flops=sum(cost.flops for _, cost, is_fast in counted if cost is not None and is_fast),
        slow_flops=sum(cost.flops for _, cost, is_fast in counted if cost is not None and not is_fast),
        unknown=tuple(name for name, cost, _ in counted if cost is None),
    )


def _costs(blocks: Sequence[Node]) -> list[tuple[str, ScorerCost | None, bool]]:
    """The class of each scorer in these blocks, its cost as the class declares it, and whether it runs in bf16.

    The cost is None if it is not known. Scorers with a toy network are left out.
    """
    costs: list[tuple[str, ScorerCost | None, bool]] = []
    for node in nodes_below(list(blocks)):
        settings = node.get("config", Node)
        is_toy = settings is not None and settings.get("path", str) == TOY
        if issubclass(node.schema.owner, RewardScorer) and not is_toy:
            cost = inspect.getattr_static(node.schema.owner, "cost", None)
            is_fast = settings is not None and settings.get("dtype", str) == "bf16"
            costs.append((node.class_name, cost if isinstance(cost, ScorerCost) else None, is_fast))
    return costs


def _transfer(config: RecipeConfig, plan: PlacementPlan, estimate: ModelEstimate) -> WeightTransfer:
    if config.sync is None:
        return WeightTransfer("nothing", "none", 0, 1)
    lora, dtype = config.lora, config.bundle.require("dtype", str)
    payload, number = "full", estimate.parameters[estimate.facts.trainable_attr]
    if lora is not None:
        targets = lora.get("target_modules", tuple)
        payload, number = "adapter", estimate.lora_parameters(lora.require("rank", int), targets)
        if config.merges_adapters:
            payload = "merged"
            number = sum(inputs * outputs for inputs, outputs in estimate.adapted_layers(targets))
    stored = MASTER_BYTES if payload == "adapter" else DTYPE_BYTES[config.rollout.get("dtype", str) or dtype]
    wire_dtype = config.sync.get("wire_dtype", str)
    size = stored if wire_dtype is None else DTYPE_BYTES[wire_dtype]
    return WeightTransfer(payload, transport_of(config, plan), number * size, config.weight_sync_interval)


def resident_parts(placement: PlacementPlan) -> dict[str, Sequence[str]]:
    """Phase to the parts that are on their devices in it."""

    return {phase: resident(placement, phase) for phase in PHASES}
