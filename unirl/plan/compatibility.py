"""Rules between the parts of a recipe: the needs of the loss against the engine, reward, data and backend.

Every rule yields the message of the problem that it finds; `check_compatibility` raises the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unirl.algorithms.diffusion_dpo import DiffusionDPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.shared.mismatch import TokenTIS
from unirl.config.build import build
from unirl.config.errors import IncompatibleError
from unirl.config.node import Node, nodes_below
from unirl.config.node_groups import group_of_device
from unirl.config.recipe import RecipeConfig
from unirl.config.schema import dotted_name
from unirl.plan.placement import PlacementPlan, Relation, capabilities_of
from unirl.reward.base import RewardScorer
from unirl.reward.local.pickscore import PickScoreRewardScorer
from unirl.rollout.engine.recorded.engine import RecordedRolloutEngine
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.types.protocols import REFERENCE, Needs

TRAINSIDE = f"rollout._target_={dotted_name(TrainsideRolloutEngine)}"
TOKEN_TIS = dotted_name(TokenTIS)
RECORDED = f"rollout._target_={dotted_name(RecordedRolloutEngine)}"
OTHER_MODALITY = {
    "rollout": "Take another engine, such as rollout=replica, which samples what any model makes",
    # The trainers stand above this package, which may not import them.
    "trainer": "For text, write trainer._target_=unirl.trainer.text.TextTrainer; for images, leave the block out",
}
"""Block to the way out when its class is for another modality than the pipeline makes."""
KEPT_BY = {"old": "ema_lora_cfg", "ema": "ema_cfg"}
"""Weight snapshot to the backend's block that keeps it. `reference` is kept whenever a loss reads it."""


def check_compatibility(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> None:
    """Raises IncompatibleError (2020) for the first rule that the parts of the recipe break."""
    rules = (
        _recorded_problems,
        _refill_problems,
        _loss_problems,
        _eight_bit_problems,
        _backend_problems,
        _asynchronous_problems,
        _elastic_problems,
        _modality_problems,
        _server_problems,
        _reward_gradient_problems,
        _profile_problems,
    )
    for rule in rules:
        for problem in rule(config, needs, plan):
            raise IncompatibleError(problem)


def _recorded_problems(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> Iterator[str]:
    """Recorded samples: the data, engine, reward, group size and loss must all expect them."""
    loss, engine = config.algorithm.class_name, config.rollout.class_name
    replays_recorded = capabilities_of(config.rollout).recorded
    roles = config.recorded_roles
    if replays_recorded and needs.own_samples:
        yield (
            f"{loss} learns from samples of the policy itself, and {engine} returns recorded ones. Write {TRAINSIDE} "
            f"~data_source.recorded, or use a loss that learns from any samples, such as {dotted_name(DiffusionDPO)}"
        )
    if replays_recorded and not roles:
        yield (
            f"{engine} returns recorded samples, and the data source provides none. "
            "Set data_source.recorded=[chosen,rejected]"
        )
    if roles and not replays_recorded:
        yield (
            f"data_source.recorded={list(roles)}: {engine} generates its samples and would ignore the recorded ones. "
            f"Write {RECORDED}, or ~data_source.recorded"
        )
    if len(set(roles)) < len(roles):
        yield f"data_source.recorded={list(roles)} names a role twice, which gives the same sample. Name each role once"
    if roles and config.samples_per_prompt != len(roles):
        yield (
            f"sampling.samples_per_prompt={config.samples_per_prompt}, and every prompt has {len(roles)} recorded "
            f"samples ({', '.join(roles)}). Set sampling.samples_per_prompt={len(roles)}"
        )
    for node in nodes_below(config.reward):
        if capabilities_of(node).recorded and not replays_recorded:
            yield (
                f"{node.path} ({node.class_name}) returns rewards that were recorded with the samples, and {engine} "
                f"generates new samples. Choose a scorer of images, or write {RECORDED}"
            )


def _refill_problems(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> Iterator[str]:
    """Refill helps only if further draws can have other rewards, and if the loss learns from reward differences."""
    if config.refill is None:
        return
    loss, engine = config.algorithm.class_name, config.rollout.class_name
    if capabilities_of(config.rollout).recorded:
        yield (
            f"refill draws further samples, and {engine} returns the same recorded samples at every draw. Write ~refill"
        )
    if not needs.advantages:
        yield f"refill looks for groups whose rewards differ, and {loss} uses no advantages. Write ~refill"
    if config.samples_per_prompt == 1:
        yield (
            "refill looks for groups whose rewards differ, and sampling.samples_per_prompt=1 makes groups of one. "
            "Set sampling.samples_per_prompt to 2 or more, or write ~refill"
        )


def _loss_problems(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> Iterator[str]:
    loss, capabilities = config.algorithm.class_name, capabilities_of(config.rollout)
    if needs.behaviour_logp and capabilities.old_logp == "replay":
        yield (
            f"{loss} reads the log-probs of the engine, and {config.rollout.class_name} records none. "
            "Set algorithm.old_logp_source=replay"
        )
    if needs.density and needs.own_samples and capabilities.old_logp == "none":
        yield (
            f"{loss} needs the log-probs of the samples, and {config.rollout.class_name} reports neither these nor "
            f"what the trainer needs to compute them. Use another engine, such as {TRAINSIDE}"
        )
    if needs.ema_rollout and not capabilities.snapshots:
        yield f"{loss} samples from a weight snapshot, and {config.rollout.class_name} cannot. Write {TRAINSIDE}"
    if config.micro_batch_tokens is not None and not build(config.algorithm).trains_tokens:
        yield (
            f"stack.micro_batch_tokens={config.micro_batch_tokens}: {loss} does not train tokens, so every row costs "
            "the same. Set stack.micro_batch_size instead"
        )
    if config.num_updates > 1 and not needs.multi_update:
        yield (
            f"{loss} is valid for one update per step, and stack.num_updates_per_batch={config.num_updates}. "
            "Set stack.num_updates_per_batch=1"
        )


def _eight_bit_problems(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> Iterator[str]:
    """An engine with weights in eight bits is another policy, so a loss on log-probs must weigh by its log-probs."""
    weight_dtype = config.rollout.get("weight_dtype", str)
    if weight_dtype is None or not needs.density or needs.behaviour_logp:
        return
    loss = config.algorithm.class_name
    mismatch = f", or algorithm.mismatch._target_={TOKEN_TIS}" if "mismatch" in config.algorithm.values else ""
    yield (
        f"rollout.weight_dtype={weight_dtype}: the engine samples from rounded weights, and {loss} "
        "takes its samples for those of the trained policy. Set algorithm.old_logp_source=rollout, which weighs by the "
        f"log-probs of the engine{mismatch}; or leave rollout.weight_dtype out"
    )


def _server_problems(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> Iterator[str]:
    """A server may be unable to load adapters, or to run tools within a response."""
    engine, capabilities = config.rollout.class_name, capabilities_of(config.rollout)
    if plan.is_dedicated and config.lora is not None and not capabilities.adapters and not config.merges_adapters:
        yield (
            f"the recipe trains adapters (backend.lora_cfg), and {engine} cannot load adapters while it runs. Set "
            "sync.merge_adapters=true, which merges them into the weights that are sent"
        )
    if config.pipeline.values.get("tools") is not None and not capabilities.tools:
        yield f"pipeline.tools: {engine} cannot run tools within a response. Write ~pipeline.tools, or {TRAINSIDE}"


def _backend_problems(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> Iterator[str]:
    """Weight snapshots that are read but not kept, or sampled from but published late, and a missing value head."""
    loss = config.algorithm.class_name
    for snapshot, key in KEPT_BY.items():
        if reads_snapshot(needs, snapshot) and config.backend.values.get(key) is None:
            verb = "samples from" if snapshot == "old" and needs.ema_rollout else "reads"
            yield (
                f"{loss} {verb} the weight snapshot {snapshot!r}, which the backend does not keep. "
                f"Write backend.{key}={{}}, which keeps it with the default schedule"
            )
    for snapshot in sorted({*needs.snapshots} - {REFERENCE, *KEPT_BY, *config.loaded_snapshots}):
        yield (
            f"{loss} reads the weight snapshot {snapshot!r}, which the backend does not have. Write "
            f"backend.snapshots={{{snapshot}: {{path: ...}}}}: a hub id or a model directory of the same architecture"
        )
    if needs.ema_rollout and config.weight_sync_interval > 1:
        yield (
            f"weight_sync_interval={config.weight_sync_interval}: {loss} samples from the snapshot 'old', which moves "
            "at every step and lags behind the trained weights by its own schedule. Set weight_sync_interval=1"
        )
    if config.evaluation.weights == "ema" and config.backend.values.get("ema_cfg") is None:
        yield (
            "evaluation.weights=ema evaluates the weight snapshot 'ema', which the backend does not keep. "
            "Write backend.ema_cfg={}, or evaluation.weights=live"
        )
    if needs.value and "value_cfg" not in config.backend.values:
        yield (
            f"{loss} trains a value head, and {config.backend.class_name} has none. "
            f"Write backend._target_={dotted_name(FSDPBackend)}"
        )


def reads_snapshot(needs: Needs, snapshot: str) -> bool:
    """True if a loss with these needs reads the weight snapshot, or samples from it."""
    return snapshot in needs.snapshots or (needs.ema_rollout and snapshot == "old")


SHARED: Mapping[Relation, str] = {
    "trainside": "samples with the trained weights themselves",
    "colocate": "shares the devices of the trainer",
}
"""Why an engine cannot generate while the weights train."""


def _asynchronous_problems(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> Iterator[str]:
    """Generation beside training needs devices of its own, and a loss that learns from weights of some steps before."""
    staleness = config.asynchronous.max_staleness
    if not staleness:
        return
    yield from _free_order_problems(config, needs)
    key, loss = f"asynchronous.max_staleness={staleness}", config.algorithm.class_name
    if needs.ema_rollout:
        yield (
            f"{key}: {loss} samples from the snapshot 'old', and compares with it what it trains. Set "
            "asynchronous.max_staleness=0"
        )
    if needs.own_samples and not needs.multi_update:
        yield (
            f"{key}: {loss} is valid only for samples of the weights that it trains. Set asynchronous.max_staleness=0, "
            f"or take a loss with an importance ratio, such as {dotted_name(DiffusionGRPO)}"
        )
    if plan.relation != "separate":
        yield (
            f"{key} generates steps while the weights train, and the engine ({config.rollout.class_name}) "
            f"{SHARED[plan.relation]}. Give it devices of its own, such as rollout=replica num_devices=2 "
            "placement.train=0 placement.rollout=1, or set asynchronous.max_staleness=0"
        )
    if config.weight_sync_interval > 1:
        yield (
            f"{key} and weight_sync_interval={config.weight_sync_interval} both let samples be older than the weights. "
            "Set weight_sync_interval=1: weights then travel once a step, while nothing waits for them"
        )
    if config.row_transport == "collective":
        yield (
            f"{key}: row_transport=collective needs the sender of rows at the same time as their reader, and here both "
            "are busy at different times. Set row_transport=object_store"
        )


def _elastic_problems(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> Iterator[str]:
    """Devices that join another role take whole parts, and need an engine that samples the same bits everywhere."""
    if not config.asynchronous.elastic:
        return
    key, engine = "asynchronous.elastic=true", config.rollout.class_name
    if plan.relation != "separate":
        yield (
            f"{key} lets the training devices sample while they wait, and here the engine ({engine}) "
            f"{SHARED[plan.relation]}, so nobody waits. Give it devices of its own, such as rollout=replica "
            "num_devices=2 placement.train=0 placement.rollout=1, or set asynchronous.elastic=false"
        )
    if capabilities_of(config.rollout).remote:
        yield (
            f"{key}: {engine} samples in a server, which would need a second one on the training devices, beside the "
            "weights that are trained. Use rollout=replica, or set asynchronous.elastic=false"
        )
    if config.reward_parts == 1:
        yield (
            f"{key} with reward_parts=1: devices that join sample whole parts of a step, and a step has one. Set "
            "reward_parts to several times the number of device sets, such as reward_parts=8"
        )
    groups = config.node_groups or {}
    labels = {group_of_device(groups, devices.indices[0]) for devices in (plan.train, plan.rollout)} if groups else ()
    if len({groups[label].hardware for label in labels}) > 1:
        yield (
            f"{key} samples on the devices of train and of rollout, and these are of two kinds "
            f"({' and '.join(sorted(labels))}), which round differently. Give both devices of one kind, or set "
            "asynchronous.elastic=false"
        )
    if config.row_transport == "collective":
        yield (
            f"{key}: row_transport=collective needs the sender of rows at the same time as their reader, and here both "
            "are busy at different times. Set row_transport=object_store"
        )


def _free_order_problems(config: RecipeConfig, needs: Needs) -> Iterator[str]:
    """Samples of several ages in a step need settings that do not change from step to step."""
    settings, loss = config.asynchronous, config.algorithm.class_name
    if not settings.is_free:
        return
    if config.refill is not None:
        yield (
            "asynchronous.order=free and refill: dynamic sampling draws until a step has enough groups, so the step "
            "has no parts that could wait. Leave refill out, or set asynchronous.order=fixed"
        )
    if settings.slice_tokens is not None:
        yield from _pausing_problems(config, settings.slice_tokens)
    if settings.too_old == "correct" and not needs.behaviour_logp:
        yield (
            "asynchronous.too_old=correct trains old samples by the log-probs under the weights that sampled them, and "
            f"{loss} does not read these. Set algorithm.old_logp_source=rollout, or asynchronous.too_old=redraw"
        )


def _pausing_problems(config: RecipeConfig, slice_tokens: int) -> Iterator[str]:
    key = f"asynchronous.slice_tokens={slice_tokens}"
    for node in (config.rollout, config.pipeline):
        if not capabilities_of(node).pauses:
            yield (
                f"{key}: {node.class_name} cannot go on with a response that paused. Leave it out, or use "
                "unirl.rollout.engine.replica.engine.ReplicaRolloutEngine with a language model"
            )
    if config.pipeline.values.get("tools") is not None:
        yield f"{key}: a response may pause within the answer of a tool. Leave out slice_tokens or pipeline.tools"


def _modality_problems(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> Iterator[str]:
    """Engine and trainer must handle what the pipeline makes."""
    pipeline, made = config.pipeline.class_name, capabilities_of(config.pipeline).modalities
    for node in (config.rollout, config.trainer):
        handled = capabilities_of(node).modalities
        if handled and made and not set(handled) & set(made):
            yield (
                f"{node.path}: {node.class_name} is for {' and '.join(handled)}, and {pipeline} makes "
                f"{' and '.join(made)}. {OTHER_MODALITY[node.path.rpartition('.')[2]]}"
            )


def _reward_gradient_problems(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> Iterator[str]:
    """A loss on the reward's gradient repeats the sampling next to the scorer, and every scorer needs a gradient."""
    if not needs.differentiable_reward:
        return
    loss = config.algorithm.class_name
    for node in _weighted_scorers(config.reward):
        if not capabilities_of(node).differentiable:
            yield (
                f"{loss} needs the gradient of the reward, and {node.path} ({node.class_name}) has none. Choose "
                f"a scorer with an `objective`, such as {dotted_name(PickScoreRewardScorer)}, or a loss on rewards "
                f"alone, such as {dotted_name(DiffusionGRPO)}"
            )
    if not capabilities_of(config.pipeline).differentiable:
        yield (
            f"{loss} differentiates through sampling, and samples of {config.pipeline.class_name} have no gradient. "
            f"Choose a loss on replayed steps, such as {dotted_name(DiffusionGRPO)}"
        )
    if plan.is_dedicated:
        yield (
            f"{loss} differentiates through sampling, which needs the trained weights themselves, and "
            f"{config.rollout.class_name} samples with a copy. Write {TRAINSIDE}, without placement.rollout and sync"
        )
    if plan.reward != plan.train:
        yield (
            f"{loss} differentiates through the reward in the processes that train, and placement.reward puts it "
            f"on {plan.reward.words}. Leave placement.reward out"
        )


def _weighted_scorers(node: Node) -> Iterator[Node]:
    """The scorers that make up the reward; a scorer that combines others stands for those with a weight."""
    weights = node.values.get("weights")
    unweighted = {name for name, weight in weights.items() if not weight} if isinstance(weights, Mapping) else set()
    children = [
        child
        for value in node.values.values()
        for name, child in (value.items() if isinstance(value, Mapping) else [("", value)])
        if isinstance(child, Node) and name not in unweighted
    ]
    below = [scorer for child in children for scorer in _weighted_scorers(child)]
    yield from below or ([node] if issubclass(node.schema.owner, RewardScorer) else [])


def _profile_problems(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> Iterator[str]:
    """The profiler sees the process of the driver alone."""
    if config.profile is not None and config.runtime_in_use != "local":
        yield (
            f"profile traces the process of the driver, and with runtime={config.runtime_in_use} the roles work in "
            "processes of their own. Set num_devices=1 and runtime=local, or write ~profile"
        )
    if config.profile is not None and max(config.profile.steps, default=0) > config.num_rollouts:
        yield (
            f"profile.steps={list(config.profile.steps)}: the run ends with step {config.num_rollouts} (num_rollouts). "
            "Name steps from 1 to that one"
        )
