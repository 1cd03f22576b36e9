"""The roles of one policy, each built beside its siblings on the devices that the plan gives it.

trainside    train devices:  bundle pipeline stage backend algorithm stack rollout
dedicated    train devices:  bundle stage backend algorithm stack sender   (only the trained module of the model)
             engine devices: bundle pipeline rollout                       (the whole model)
elastic      the same, and on the train devices a second bundle, pipeline, rollout and sender

A policy of several tracks has a stage, a loss and a stack for each of them, and one stack that trains them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from unirl.algorithms.base import StageAlgorithm
from unirl.config.build import build
from unirl.config.errors import IncompatibleError
from unirl.config.node import Node
from unirl.config.recipe import RecipeConfig
from unirl.distributed import current
from unirl.distributed.group.base import Pool
from unirl.distributed.group.handle import Group, Handle, Remote, Siblings
from unirl.distributed.weight_sync.base import NoSync, WeightSync
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.joint import JointSync
from unirl.models.base import Bundle, Pipeline
from unirl.models.denoising.bundle import DiffusionBundle
from unirl.models.denoising.differentiable import DifferentiableStage
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.plan.placement import PlacementPlan, capabilities_of
from unirl.plan.preflight import KnownModel, needs_of
from unirl.reward.service import RewardService
from unirl.rollout.engine.base import DedicatedEngine, RolloutEngine
from unirl.train.backend.base import TrainBackend
from unirl.train.stack import TrainStack
from unirl.train.unified_model_stack import OF_TRACKS, UnifiedModelStack
from unirl.trainer.residency import Roles

RoleT = TypeVar("RoleT")


def named(policy: str, name: str) -> str:
    """The name of something that each policy has: `stack`, or `ar.stack` in a recipe of several policies."""
    return f"{policy}.{name}" if policy else name


@dataclass(frozen=True)
class Training:
    """The roles that train the weights of one policy."""

    backend: TrainBackend
    stacks: Mapping[str, TrainStack]
    """By track."""
    shared_stack: UnifiedModelStack | None = None
    """Trains the losses of several tracks together. None for a policy of one track."""


@dataclass(frozen=True)
class Places:
    """Places the roles of one policy: on the devices of its plan, under names that begin with the policy's."""

    policy: str
    pool: Pool
    plan: PlacementPlan
    tracks: Mapping[str, RecipeConfig]
    """The recipe as each track of the policy sees it."""
    trained: Sequence[str] = ()
    """The tracks that are trained."""
    run_dir: Path | None = None
    """The run directory."""

    @property
    def config(self) -> RecipeConfig:
        """The recipe as the last track sees it. All tracks of a policy have the same blocks but sampling and loss."""
        *_, last = self.tracks.values()
        return last

    def node(self, workers: Group, name: str, role: type[RoleT], node: Node, **arguments: object) -> RoleT:
        """Build the object of a recipe block on every worker, and return its handle.

        The class and the classes of its inner blocks may also take the `device` of the worker.

        Args:
            role: the contract that the object keeps.
        """
        return cast(RoleT, self.made(workers, name, partial(build_on_device, node), **arguments))

    def of_track(self, track: str, name: str) -> str:
        """The name of a role that each track of the policy has."""
        return name if len(self.tracks) == 1 else f"{track}.{name}"

    def made(self, workers: Group, name: str, make: Callable[..., RoleT], **arguments: object) -> RoleT:
        """Build a role on every worker as `make(**arguments)`, and return its handle, typed as the role itself.

        An argument that is the handle of a role on the same workers arrives there as that role itself.
        """
        siblings = {argument: value.role_name for argument, value in arguments.items() if isinstance(value, Handle)}
        values = {argument: value for argument, value in arguments.items() if not isinstance(value, Handle)}
        build_it = partial(make_beside, make, siblings, values)
        return cast(RoleT, workers.place(Remote(named(self.policy, name), build_it, self.config.num_updates)))

    def training(self, train: Group, bundle: Bundle, stages: Mapping[str, object]) -> Training:
        """The backend, which prepares the bundle's module for training in place, and the stacks."""
        config = self.config
        run = {"seed": config.seed, "run_updates": updates_of_run(config, len(self.trained))}
        backend = self.node(train, "backend", TrainBackend, config.backend, bundle=bundle, **run)
        if len(self.tracks) == 1:
            [(track, stage)] = stages.items()
            given = {"algorithm": self.node(train, "algorithm", StageAlgorithm, config.algorithm), "stage": stage}
            stack = self.node(train, "stack", TrainStack, config.stack, backend=backend, **given)
            return Training(backend, {track: stack})
        stacks = {track: self.stack_of(train, track, backend, stage) for track, stage in stages.items()}
        trained = {track: stacks[track] for track in stages if track in self.trained}
        make_shared = partial(build_shared_stack, config.stack)
        return Training(backend, stacks, self.made(train, "stack", make_shared, backend=backend, **trained))

    def stack_of(self, train: Group, track: str, backend: TrainBackend, stage: object) -> TrainStack:
        """The stack of one of several tracks. It has the settings of the stack that they share."""
        config = self.tracks[track]
        algorithm = self.node(train, f"{track}.algorithm", StageAlgorithm, config.algorithm)
        settings: dict[str, Any] = {name: config.stack.values[name] for name in OF_TRACKS}
        make = partial(TrainStack, **settings)
        return self.made(train, f"{track}.stack", make, backend=backend, algorithm=algorithm, stage=stage)


def place_trainside(places: Places, reward: RewardService) -> Roles:
    """The engine samples with the very weights that are trained, in the processes that train them."""
    config, train = places.config, places.pool.group(places.plan.train)
    bundle = places.node(train, "bundle", Bundle, config.bundle, seed=config.seed)
    pipeline = places.node(train, "pipeline", Pipeline, config.pipeline, bundle=bundle)
    stages: dict[str, object] = {}
    for track in places.tracks:
        if needs_of(config).differentiable_reward:
            stages[track] = places.made(train, "stage", differentiable_stage, pipeline=pipeline, reward=reward)
        else:
            make = partial(stage_of_pipeline, track)
            stages[track] = places.made(train, places.of_track(track, "stage"), make, pipeline=pipeline)
    training = places.training(train, bundle, stages)
    backend = training.backend
    rollout = places.node(train, "rollout", RolloutEngine, config.rollout, pipeline=pipeline, backend=backend)
    return Roles(
        rollout=rollout,
        reward=reward,
        stacks=training.stacks,
        shared_stack=training.shared_stack,
        backend=backend,
        sync=NoSync(),
        train_ranks=train.num_ranks,
    )


def place_dedicated(places: Places, reward: RewardService) -> Roles:
    """The engine has weights of its own, on the same devices in turns (colocate) or on others (separate).

    The trainer needs neither encoders nor decoder, so its bundle holds only the trained module.
    """
    config, plan = places.config, places.plan
    train, engine = places.pool.group(plan.train), places.pool.group(plan.rollout)
    of_bundle = {"seed": config.seed, "components": trained_components(config)}
    bundle = places.node(train, "bundle", Bundle, config.bundle, **of_bundle)
    stages = {
        track: places.made(train, places.of_track(track, "stage"), partial(stage_of_bundle, track), bundle=bundle)
        for track in places.tracks
    }
    training = places.training(train, bundle, stages)
    backend = training.backend

    engine_bundle = places.node(engine, "engine_bundle", Bundle, engine_bundle_node(config), seed=config.seed)
    engine_pipeline = places.node(engine, "engine_pipeline", Pipeline, config.pipeline, bundle=engine_bundle)
    given = {"pipeline": engine_pipeline, "run_dir": places.run_dir}
    rollout = places.node(engine, "rollout", RolloutEngine, config.rollout, **given)

    # The sender reaches an engine in its own process directly: beside it on a worker, or in the driver's process.
    colocated = rollout if engine is train else engine.role_here(named(places.policy, "rollout"))
    stage = places.made(train, "canary", canary_stage, bundle=bundle)
    sender = places.made(train, "sender", WeightSender, weights=backend, stage=stage, engine_in_process=colocated)
    assert config.sync is not None, "preflight refuses a dedicated engine without a sync block"
    sync: WeightSync = build(config.sync, train=sender, rollout=rollout)
    joining = None
    if config.asynchronous.elastic:
        check_equal_devices(train, engine)
        joining, own_sync = place_joining(places, train, backend, stage)
        sync = JointSync(sync, own_sync, joining)
    return Roles(
        rollout=rollout,
        reward=reward,
        stacks=training.stacks,
        shared_stack=training.shared_stack,
        backend=backend,
        sync=sync,
        train_ranks=train.num_ranks,
        has_own_weights=True,
        joining=joining,
    )


def place_joining(
    places: Places, train: Group, backend: TrainBackend, stage: object
) -> tuple[DedicatedEngine, WeightSync]:
    """A second engine on the training devices, asleep, and what brings the weights to it within each process."""
    config = places.config
    assert config.sync is not None, "preflight refuses a dedicated engine without a sync block"
    bundle = places.node(train, "joining_bundle", Bundle, engine_bundle_node(config), seed=config.seed)
    pipeline = places.node(train, "joining_pipeline", Pipeline, config.pipeline, bundle=bundle)
    given = {"pipeline": pipeline, "run_dir": places.run_dir}
    engine = cast(DedicatedEngine, places.node(train, "joining_rollout", RolloutEngine, config.rollout, **given))
    here = train.role_here(named(places.policy, "joining_rollout")) or engine
    sender = places.made(train, "joining_sender", WeightSender, weights=backend, stage=stage, engine_in_process=here)
    block = replace(config.sync, values={**config.sync.values, "transport": "auto"})
    sync: WeightSync = build(block, train=sender, rollout=engine)
    engine.sleep()
    return engine, sync


def check_equal_devices(train: Group, engine: Group) -> None:
    """Refuses devices of two kinds, on which a sample could have other bits. Raises IncompatibleError."""
    kinds = (train.device_kind(), engine.device_kind())
    if kinds[0].comparable != kinds[1].comparable:
        raise IncompatibleError(
            f"asynchronous.elastic=true samples on the devices of train ({kinds[0]}) and of rollout ({kinds[1]}), "
            "which round differently, so samples would depend on timing. Give both devices of one kind, or set "
            "asynchronous.elastic=false"
        )


def updates_of_run(config: RecipeConfig, num_tracks: int) -> int | None:
    """Optimizer updates of a run, at most; None if episodes have no limit, and each decision is trained by itself."""
    stack, size = config.stack, config.stack.get("minibatch_size", int)
    if size is None:
        # An update of the row layout trains all tracks at once, or each in turn.
        return config.total_updates * (num_tracks if stack.get("schedule", str) == "alternating" else 1)
    decisions = config.sampling.get("max_steps", int)
    if decisions is None:
        return None
    decisions *= config.batch_size * config.samples_per_prompt
    per_decision = stack.get("updates_per_decision", float)
    if per_decision is not None:
        return int(config.num_rollouts * decisions * per_decision)
    of_epoch = -(-decisions // size)
    return config.num_rollouts * stack.require("epochs", int) * of_epoch


# What runs on a worker


def stage_of_pipeline(track: str, pipeline: Pipeline) -> object:
    """The policy of a track, as the engine samples with it."""
    return pipeline.stage_of(track)


def stage_of_bundle(track: str, bundle: Bundle) -> object:
    """The policy of a track, without encoders and decoder."""
    return bundle.stage_of(track)


def canary_stage(bundle: Bundle) -> object:
    """The policy that reads the canary inputs of the engine's pipeline, whichever tracks are trained."""
    return bundle.stage()


def engine_bundle_node(config: RecipeConfig) -> Node:
    """The bundle of an engine. No backend fills its network: it loads the weights itself, unless a server has them."""
    bundle, is_remote = config.bundle, capabilities_of(config.rollout).remote
    if bundle.values.get("meta_init", is_remote) == is_remote:
        return bundle
    return replace(bundle, values={**bundle.values, "meta_init": is_remote})


def build_shared_stack(node: Node, backend: TrainBackend, **stacks: TrainStack) -> UnifiedModelStack:
    """The stack that trains the losses of several tracks together."""
    stack: UnifiedModelStack = build(node, backend=backend, stacks=stacks)
    return stack


def make_beside(
    make: Callable[..., RoleT], siblings: Mapping[str, str], values: Mapping[str, object], roles: Siblings
) -> RoleT:
    """Runs on a worker: call `make` with the values, and with the worker's roles that `siblings` names."""
    return make(**values, **{argument: roles[role] for argument, role in siblings.items()})


def build_on_device(node: Node, **arguments: object) -> object:
    """Runs on a worker: the object of a block of the recipe."""
    return build(node, device=current().device, **arguments)


def differentiable_stage(pipeline: DiffusionPipeline[DiffusionBundle], reward: RewardService) -> DifferentiableStage:
    """The policy, its decoder and the reward, for a loss on the gradient of the reward."""
    return DifferentiableStage(
        pipeline.stage,
        pipeline.decoder.decode,
        reward.objective,
        batch_size=pipeline.decode_batch_size,
        resident=partial(pipeline.bundle.resident, pipeline.decoder.components),
    )


def trained_components(config: RecipeConfig) -> tuple[str, ...] | None:
    """The name of the trained component, for a bundle that loads nothing else. None loads all components."""
    owner, path = config.bundle.schema.owner, config.model_path
    if not isinstance(owner, KnownModel) or path is None:
        return None
    return (owner.facts_of(path, config.model_revision).trainable_attr,)
