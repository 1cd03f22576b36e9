"""How a checked recipe becomes a trainer: every role is built here, and every line says what it is given.

trainside    train devices:  bundle pipeline stage backend algorithm stack rollout
dedicated    train devices:  bundle stage backend algorithm stack sender   (only the trained module of the model)
             engine devices: bundle pipeline rollout                       (the whole model)
reward       on the devices that the placement gives it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.shared.advantages import GroupAdvantage
from unirl.config.build import build
from unirl.config.device_sets import DeviceSet
from unirl.config.failures import Session, failure_of
from unirl.config.load import Recipe
from unirl.config.node import Node, nodes_below
from unirl.config.recipe import RecipeConfig, said_of_policy
from unirl.data.datasets import Prompt
from unirl.distributed import current
from unirl.distributed.group.base import Pool
from unirl.distributed.group.handle import Group, Handle, Remote, Siblings
from unirl.distributed.group.pool import open_pool
from unirl.distributed.weight_sync.base import NoSync
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.models.base import Bundle, Pipeline
from unirl.models.denoising.bundle import DiffusionBundle
from unirl.models.denoising.differentiable import DifferentiableStage
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.models.loading.checkpoint import TOY
from unirl.models.loading.hub import ModelSource, look_up, quiet_downloads
from unirl.plan.machine import check_machine, check_memory, is_elsewhere
from unirl.plan.placement import PlacementPlan, capabilities_of, plan_of
from unirl.plan.preflight import KnownModel, check_disk, needs_of, of_policy, trainer_class
from unirl.plan.prompts import load_data
from unirl.plan.sizes import RecipeSizes, sizes_of_policies
from unirl.plan.threads import ThreadChoice, in_use, threads_of
from unirl.plan.tiling import choose_tiling, leaves_tiling_open, tiling_key, with_tiling
from unirl.reward.base import RewardScorer
from unirl.reward.failures import STRICT, DropBudget
from unirl.reward.service import RewardService
from unirl.rollout.engine.base import RolloutEngine
from unirl.tracking.tracker import Tracker
from unirl.train.backend.base import TrainBackend
from unirl.train.backend.checkpoint import CheckpointStore, ResumePoint
from unirl.train.backend.snapshots import LIVE
from unirl.train.configs import EmaLoraConfig
from unirl.train.parity import ParityGate
from unirl.train.stack import TrainStack
from unirl.trainer.learner import Learner
from unirl.trainer.loop import Trainer
from unirl.trainer.micro_batch import MicroBatch, chooses_micro_batch
from unirl.trainer.publishing import Publisher
from unirl.trainer.requests import RequestMaker, TrackSampling
from unirl.trainer.residency import Phases, Residency, Roles
from unirl.trainer.resume import check_resumable, continued, resume_point
from unirl.trainer.run_folder import continuation, open_tracker, run_root
from unirl.trainer.run_state import RunState, environment, recorded_threads, saved_choices
from unirl.types.credit import CREDIT_RULES
from unirl.types.device import DeviceKind
from unirl.types.progress import Heartbeat, reporting_to
from unirl.types.protocols import DataSource, Stateful
from unirl.types.rollout_resp import AdvantageEstimator

RoleT = TypeVar("RoleT")


@contextmanager
def build_trainer(
    recipe: Recipe, session: Session | None = None, *, tracker: Tracker | None = None
) -> Iterator[Trainer]:
    """The trainer of a recipe that passed preflight, with its run directory open and its roles placed.

    When the block ends, all workers end, and the run directory says how the run ended.

    Args:
        session: the command that started the run. Its `run_dir` is set to the run directory.
        tracker: the tracker to report to. None opens the run directory of the recipe.
    """
    data = load_data(recipe)
    is_own_run = tracker is None
    root = run_root(recipe) if tracker is None else tracker.run.root
    # A run that may not start leaves no folder.
    checkpoints = CheckpointStore(root / "checkpoints", keep=recipe.config.keep_checkpoints)
    resume = resume_point(checkpoints, recipe.config.resume)
    check_resumable(resume, checkpoints.directory, recipe)
    threads = threads_of(recipe.config, recorded_threads(resume, checkpoints.directory))
    look_up_models(recipe)
    if tracker is None:
        check_reward(recipe.config)
        if session is not None:
            session.start()
        tracker = open_tracker(recipe, root, session.argv if session else (), threads)
    if session is not None:
        session.run_dir = root
    policies = recipe.policies
    if resume.checkpoint is not None:
        policies = {name: continued(config) for name, config in policies.items()}
    sizes = sizes_of_policies(recipe, policies)
    with (
        recorded_end(tracker),
        in_use(threads),
        closing(pool_of(sizes, tracker, threads)) as pool,
        reporting_to(pool.heartbeat),
    ):
        with tracker.watching(lambda: f"load: {pool.status()}"), quiet_downloads():
            trainer = assemble(recipe, sizes, data, tracker, pool, checkpoints, resume)
        if is_own_run:
            _check_disk(recipe.config, checkpoints, trainer.learners)
        with tracker.watching(lambda: status_of(pool)):
            yield trainer


@contextmanager
def recorded_end(tracker: Tracker) -> Iterator[None]:
    """Write into run.json how the block ended."""
    try:
        yield
    except BaseException as error:
        # A full disk may be what ended the run; it must not hide the error that is on its way.
        with suppress(OSError):
            tracker.finish(failure_of(error).status, f"{type(error).__name__}: {error}")
        raise
    tracker.finish()


def pool_of(sizes: Mapping[str, RecipeSizes], tracker: Tracker, threads: ThreadChoice | None) -> Pool:
    """The devices of a recipe. Stalled calls write the stacks of all workers into the run's `logs`."""
    config = next(iter(sizes.values())).config
    for name, policy in sizes.items():
        with of_policy(name):
            check_machine(policy, warning_of(name, tracker.warn))
    opening = Heartbeat(f"start of runtime {config.runtime_in_use}")
    with tracker.watching(lambda: f"load: {opening.status()}"):
        pool = open_pool(
            config.runtime_in_use,
            config.num_devices,
            devices_per_node=config.devices_per_node,
            num_updates=config.num_updates,
            deadline_s=config.stall_timeout_s,
            row_transport=config.row_transport,
            threads=None if threads is None else threads.count,
        )
    pool.stack_dir = tracker.run.root / "logs"
    if is_elsewhere(config) and config.scale != "toy":
        pool.check_device = partial(check_device_memory, sizes, tracker.warn)
    pool.connect_s = config.connect_timeout_s
    pool.allow_mixed_devices = config.allow_mixed_devices
    return pool


def check_device_memory(
    sizes: Mapping[str, RecipeSizes], warn: Callable[[str], None], devices: DeviceSet, kind: DeviceKind
) -> None:
    """Refuse a device that is too small for any of the policies with what the others keep on it."""
    for name, policy in sizes.items():
        with of_policy(name):
            check_memory(policy, kind, warning_of(name, warn), devices)


def warning_of(policy: str, warn: Callable[[str], None]) -> Callable[[str], None]:
    """`warn` for texts about one policy, which name it."""
    return lambda text: warn(said_of_policy(text, policy))


def status_of(pool: Pool) -> str:
    """What a run is doing, as text for the console: `generate: sample 8/24 (2.1/s), denoising step 12/20 (3.1/s)`."""
    return f"{pool.phase}: {pool.status()}" if pool.phase else "between phases"


def assemble(
    recipe: Recipe,
    sizes: Mapping[str, RecipeSizes],
    data: DataSource[Prompt],
    tracker: Tracker,
    pool: Pool,
    checkpoints: CheckpointStore,
    resume: ResumePoint,
) -> Trainer:
    """Place the roles of a recipe on a pool, and join them in the trainer of its domain.

    Args:
        sizes: by policy.
    """
    config = recipe.config
    domain = trainer_class(config)
    advantage = estimator_of(recipe)
    on_failure = config.reward.get("on_failure", Node)
    # A reward of a class other than ours stops at the first sample that cannot be scored.
    drops = DropBudget(STRICT if on_failure is None else build(on_failure))
    saved = {} if resume.checkpoint is None else saved_choices(resume.checkpoint.path)
    plan = plan_of(config)
    reward = Places("", pool, plan, config).node(pool.group(plan.reward), "reward", RewardService, config.reward)
    chosen: dict[str, Any] = {}
    learners = {
        name: place_learner(
            name, name or domain.track, name in recipe.trained, sizes[name], reward, pool, saved, chosen, tracker
        )
        for name in recipe.policies
    }
    stateful: dict[str, object] = {"data": data, "advantage": advantage, "drops": drops}
    for name, learner in learners.items():
        stateful |= {named(name, "kl"): learner.kl, named(name, "publisher"): learner.publisher}
    state = RunState(
        policies=learners,
        tracker=tracker,
        stateful={name: item for name, item in stateful.items() if isinstance(item, Stateful)},
        recipe=recipe.resolved(),
        environment=environment(next(iter(learners.values())).roles.train_ranks),
        chosen=chosen,
        checkpoints=checkpoints,
        resume=resume,
        resume_command=continuation(recipe, tracker.run.root),
        write_config=partial(tracker.run.write_config, recipe.composed.text(resolve_all=True), recipe.resolved_text()),
    )
    phases = Phases(
        timers=tracker.timers,
        pool=pool,
        residencies={
            learner.track: Residency(plan_of(learner.config), learner.roles, owns_reward=learner.track == domain.track)
            for learner in learners.values()
        },
        shortage=partial(memory_advice, sizes, learners),
    )
    trainer: Trainer = build(
        config.trainer,
        config=config,
        learners=tuple(learners.values()),
        rollout=engine_of(recipe, learners, phases),
        reward=reward,
        requests=RequestMaker(tracks={each.track: sampling_of(each, domain.parents) for each in learners.values()}),
        data=data,
        advantage=advantage,
        drops=drops,
        state=state,
        phases=phases,
        credit_rule=recipe.credit,
    )
    return trainer


def estimator_of(recipe: Recipe) -> AdvantageEstimator:
    """The estimator of advantages, with the baseline that the rule of credit sets."""
    estimator: AdvantageEstimator = build(recipe.config.advantage)
    if not CREDIT_RULES[recipe.credit].leave_one_out:
        return estimator
    assert isinstance(estimator, GroupAdvantage), "preflight refuses another estimator with this rule"
    return estimator.leaving_one_out()


def engine_of(recipe: Recipe, learners: Mapping[str, Learner], phases: Phases) -> RolloutEngine:
    """The engine of the only policy, or the one that composes the engines of all."""
    if recipe.engine is None:
        [learner] = learners.values()
        return learner.roles.rollout
    engine: RolloutEngine = build(
        recipe.engine,
        engines={learner.track: learner.roles.rollout for learner in learners.values()},
        turn=phases.turn,
    )
    return engine


def sampling_of(learner: Learner, parents: Mapping[str, str]) -> TrackSampling:
    """The sampling settings of a policy, for training and for evaluations."""
    config, sampling = learner.config, build(learner.config.sampling)
    parent = parents.get(learner.track)
    settings = config.evaluation.settings(sampling.evaluation_keys)
    if parent is not None:
        settings["samples_per_prompt"] = 1  # evaluation.samples_per_prompt is the number of rewrites of a prompt
    return TrackSampling(
        facts=learner.facts,
        parent=parent,
        training=sampling,
        evaluation=sampling.for_evaluation(settings),
        eval_weights=config.evaluation.weights,
    )


def place_learner(
    policy: str,
    track: str,
    is_trained: bool,
    sizes: RecipeSizes,
    reward: RewardService,
    pool: Pool,
    saved: Mapping[str, Any],
    chosen: dict[str, Any],
    tracker: Tracker,
) -> Learner:
    """Place the roles of one policy.

    Args:
        saved: what the run that continues chose for open settings.
        chosen: gets the open settings of this policy.
    """
    plan = plan_of(sizes.config)
    tiling = tiling_key(sizes.config)
    tiles = tiling_of(sizes, pool.group(plan.rollout), saved.get(tiling), tracker.choice)
    config = sizes.config if tiles is None else with_tiling(sizes.config, tiles)
    if tiles:
        sizes = replace(sizes, config=config)  # decoding in tiles needs less memory
    place_roles = place_dedicated if plan.is_dedicated else place_trainside
    roles = place_roles(Places(policy, pool, plan, config), reward)
    algorithm: StageAlgorithm[object] = build(config.algorithm)
    needs = needs_of(config)
    micro_batch = MicroBatch(sizes, roles.stack, tracker.choice) if chooses_micro_batch(config) else None
    chosen |= {} if tiles is None else {tiling: tiles}
    chosen |= {} if micro_batch is None else {micro_batch.key: None}
    return Learner(
        track=track,
        is_trained=is_trained,
        config=config,
        roles=roles,
        facts=roles.rollout.facts(),
        needs=needs,
        publisher=Publisher(
            roles.sync,
            roles.backend,
            interval=config.weight_sync_interval if roles.has_own_weights else 1,
            weights=EmaLoraConfig.snapshot if needs.ema_rollout else LIVE,
        ),
        kl=algorithm.kl_controller(),
        parity=parity_gate(config, algorithm),
        micro_batch=micro_batch,
        chosen=chosen,
    )


def named(policy: str, name: str) -> str:
    """The name of something that each policy has: `stack`, or `ar.stack` in a recipe of several policies."""
    return f"{policy}.{name}" if policy else name


def tiling_of(
    sizes: RecipeSizes, engine: Group, saved: bool | None, report: Callable[[str, object, str], None]
) -> bool | None:
    """Whether the VAE decodes in tiles, where the recipe leaves it open. None where it does not.

    Args:
        engine: the workers that decode.
        saved: the choice in the checkpoint that the run continues, which is taken, since tiles change pixels.
        report: called with the key, the choice and the reason, unless a new run is on CPUs.
    """
    if not leaves_tiling_open(sizes.config):
        return None
    if saved is not None:
        report(tiling_key(sizes.config), saved, f"{'on' if saved else 'off'}, as in the checkpoint")
        return saved
    memory = engine.device_kind().memory_gib
    tiles, why = choose_tiling(sizes, memory)
    if memory is not None:
        report(tiling_key(sizes.config), tiles, why)
    return tiles


def memory_advice(sizes: Mapping[str, RecipeSizes], learners: Mapping[str, Learner], phase: str) -> str:
    """The plan's advice for a phase that ran out of memory. Empty if no bundle can estimate the size of its model."""
    from unirl.plan.fit import shortage

    advice = []
    for name, policy in sizes.items():
        run, micro_batch = policy.run, learners[name].micro_batch
        if run is not None:
            text = shortage(run if micro_batch is None else micro_batch.applied_to(run), phase)
            advice.append(said_of_policy(text, name))
    return "\n  ".join(advice)


# Placement of roles, one builder per relation of the engine to the trainer


@dataclass(frozen=True)
class Places:
    """Places the roles of one policy: on the devices of its plan, under names that begin with the policy's."""

    policy: str
    pool: Pool
    plan: PlacementPlan
    config: RecipeConfig

    def node(self, workers: Group, name: str, role: type[RoleT], node: Node, **arguments: object) -> RoleT:
        """Build the object of a recipe block on every worker, and return its handle.

        The class and the classes of its inner blocks may also take the `device` of the worker.

        Args:
            role: the contract that the object keeps.
        """
        return cast(RoleT, self.made(workers, name, partial(build_on_device, node), **arguments))

    def made(self, workers: Group, name: str, make: Callable[..., RoleT], **arguments: object) -> RoleT:
        """Build a role on every worker as `make(**arguments)`, and return its handle, typed as the role itself.

        An argument that is the handle of a role on the same workers arrives there as that role itself.
        """
        siblings = {argument: value.role_name for argument, value in arguments.items() if isinstance(value, Handle)}
        values = {argument: value for argument, value in arguments.items() if not isinstance(value, Handle)}
        build_it = partial(make_beside, make, siblings, values)
        return cast(RoleT, workers.place(Remote(named(self.policy, name), build_it, self.config.num_updates)))

    def training(self, train: Group, bundle: Bundle, stage: object) -> tuple[TrainBackend, TrainStack]:
        """The backend, which prepares the bundle's module for training in place, and the stack."""
        config = self.config
        run = {"seed": config.seed, "run_updates": config.total_updates}
        backend = self.node(train, "backend", TrainBackend, config.backend, bundle=bundle, **run)
        algorithm = self.node(train, "algorithm", StageAlgorithm, config.algorithm)
        stack = self.node(train, "stack", TrainStack, config.stack, backend=backend, algorithm=algorithm, stage=stage)
        return backend, stack


def place_trainside(places: Places, reward: RewardService) -> Roles:
    """The engine samples with the very weights that are trained, in the processes that train them."""
    config, train = places.config, places.pool.group(places.plan.train)
    bundle = places.node(train, "bundle", Bundle, config.bundle)
    pipeline = places.node(train, "pipeline", Pipeline, config.pipeline, bundle=bundle)
    stage: object
    if needs_of(config).differentiable_reward:
        stage = places.made(train, "stage", differentiable_stage, pipeline=pipeline, reward=reward)
    else:
        stage = places.made(train, "stage", lambda pipeline: pipeline.stage, pipeline=pipeline)
    backend, stack = places.training(train, bundle, stage)
    rollout = places.node(train, "rollout", RolloutEngine, config.rollout, pipeline=pipeline, backend=backend)
    return Roles(
        rollout=rollout, reward=reward, stack=stack, backend=backend, sync=NoSync(), train_ranks=train.num_ranks
    )


def place_dedicated(places: Places, reward: RewardService) -> Roles:
    """The engine has weights of its own, on the same devices in turns (colocate) or on others (separate).

    The trainer needs neither encoders nor decoder, so its bundle holds only the trained module.
    """
    config, plan = places.config, places.plan
    train, engine = places.pool.group(plan.train), places.pool.group(plan.rollout)
    bundle = places.node(train, "bundle", Bundle, config.bundle, components=trained_components(config))
    stage = places.made(train, "stage", lambda bundle: bundle.stage(), bundle=bundle)
    backend, stack = places.training(train, bundle, stage)

    engine_bundle = places.node(engine, "engine_bundle", Bundle, config.bundle)
    engine_pipeline = places.node(engine, "engine_pipeline", Pipeline, config.pipeline, bundle=engine_bundle)
    rollout = places.node(engine, "rollout", RolloutEngine, config.rollout, pipeline=engine_pipeline)

    # The sender reaches an engine in its own process directly: beside it on a worker, or in the driver's process.
    colocated = rollout if engine is train else engine.role_here(named(places.policy, "rollout"))
    sender = places.made(train, "sender", WeightSender, weights=backend, stage=stage, engine_in_process=colocated)
    assert config.sync is not None, "preflight refuses a dedicated engine without a sync block"
    return Roles(
        rollout=rollout,
        reward=reward,
        stack=stack,
        backend=backend,
        sync=build(config.sync, train=sender, rollout=rollout),
        train_ranks=train.num_ranks,
        has_own_weights=True,
    )


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


# What a run needs beside its roles


def check_reward(config: RecipeConfig) -> None:
    """Check that the packages and services that a scorer needs are there.

    Raises DependencyError, RewardError or ConfigError.

    On several nodes only the reward's own process can tell. It is asked when it runs (`check_prompts`).
    """
    if config.devices_per_node not in (None, config.num_devices):
        return
    backend = config.reward_backend
    if backend is not None and any(_checks_start(node.schema.owner) for node in nodes_below(backend)):
        build(backend).check_start()


def look_up_models(recipe: Recipe) -> None:
    """Refuse the models and those of rewards if they are neither on this machine nor on the hub.

    Rewards are loaded after the model, which may take minutes. Raises NotFoundError (4001).
    """
    config = recipe.config
    if is_elsewhere(config):
        return
    trained = {
        f"PRETRAINED_MODEL ({policy.bundle.path}.path)" if not name else f"{policy.bundle.path}.path": policy.model_path
        for name, policy in recipe.policies.items()
        if policy.model_path is not None
    }
    look_up(trained | ({} if config.reward_backend is None else models_named_by(config.reward_backend)))


def models_named_by(root: Node) -> dict[str, str]:
    """Key to hub id or path of every model that the blocks of a node name (`ModelSource`); a toy block reads none."""
    models: dict[str, str] = {}
    for node in nodes_below(root):
        sources = [key.name for key in node.schema.keys.values() if key.annotation == ModelSource]
        named = {name: node.require(name, str) for name in sources}
        if TOY not in named.values():
            models |= {f"{node.path}.{name}": path for name, path in named.items()}
    return models


def _checks_start(cls: type) -> bool:
    """Returns True for a scorer with a check of its own at the start of a run."""
    return issubclass(cls, RewardScorer) and cls.check_start is not RewardScorer.check_start


def parity_gate(config: RecipeConfig, algorithm: StageAlgorithm[object]) -> ParityGate | None:
    """The gate of a loss with a trust region on log-probs that the engine records; None if both thresholds are off."""
    width = algorithm.trust_width()
    recorded = capabilities_of(config.rollout).behaviour_logp
    if width is None or not recorded or not (config.parity.warn or config.parity.stop):
        return None
    return ParityGate(config.parity, width)


def _check_disk(config: RecipeConfig, checkpoints: CheckpointStore, learners: Sequence[Learner]) -> None:
    num_checkpoints = (config.keep_checkpoints or config.num_rollouts // max(config.save_interval, 1)) + 1
    num_bytes = num_checkpoints * sum(learner.backend.checkpoint_bytes() for learner in learners)
    check_disk(checkpoints.directory, num_bytes, f"{num_checkpoints} checkpoints")
