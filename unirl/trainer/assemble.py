"""How a checked recipe becomes a trainer: every role is built here, and every line says what it is given.

trainside    train devices:  bundle pipeline stage backend algorithm stack rollout
             (the reward comes first where the loss differentiates through it)
dedicated    train devices:  bundle stage backend algorithm stack sender   (only the trained module of the model)
             engine devices: bundle pipeline rollout                       (the whole model)
reward       on the devices that the placement gives it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

from unirl.algorithms.base import StageAlgorithm
from unirl.config.build import build
from unirl.config.failures import Session, failure_of
from unirl.config.load import Recipe
from unirl.config.node import Node, nodes_below
from unirl.config.recipe import EvaluationConfig, RecipeConfig
from unirl.data.datasets import Prompt
from unirl.data.images import check_counts
from unirl.distributed import current
from unirl.distributed.group.handle import Group, Handle
from unirl.distributed.group.pool import Pool, open_pool
from unirl.distributed.group.remote import Remote, Siblings
from unirl.distributed.weight_sync.base import NoSync
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.sync import SyncEndpoint
from unirl.models.denoising.differentiable import DifferentiableStage
from unirl.plan.placement import PlacementPlan, capabilities_of, plan_of
from unirl.plan.preflight import KnownModel, check_disk, known_facts, needs_of
from unirl.reward.base import StartChecker
from unirl.reward.failures import STRICT, DropBudget, FailurePolicy
from unirl.reward.scoring import check_start
from unirl.tracking.tracker import Tracker
from unirl.train.backend.base import TrainBackend
from unirl.train.backend.checkpoint import CheckpointStore
from unirl.train.configs import LoraConfig
from unirl.trainer.loop import PUBLISHED, Trainer
from unirl.trainer.parity import ParityGate
from unirl.trainer.residency import Phases, Residency
from unirl.trainer.resume import ResumePoint, check_resumable, resume_point
from unirl.trainer.roles import Roles
from unirl.trainer.run_folder import continuation, open_tracker
from unirl.trainer.run_state import RunState, environment
from unirl.types.protocols import DataSource, Stateful


@contextmanager
def build_trainer(
    recipe: Recipe, session: Session | None = None, *, tracker: Tracker | None = None
) -> Iterator[Trainer[Any]]:
    """The trainer of a recipe that passed preflight, with its run directory open and its roles placed.

    When the block ends, all workers end, and the run directory says how the run ended.

    Args:
        session: the command that started the run. Its `run_dir` is set to the run directory.
        tracker: the tracker to report to. None opens the run directory of the recipe.
    """
    data = load_data(recipe)
    if tracker is None:
        check_reward(recipe.config)
        tracker = open_tracker(recipe, session.argv if session else ())
    if session is not None:
        session.run_dir = tracker.run.root
    with recorded_end(tracker):
        checkpoints = CheckpointStore(tracker.run.checkpoints, keep=recipe.config.keep_checkpoints)
        resume = resume_point(checkpoints, recipe.config.resume)
        check_resumable(resume, checkpoints.directory, recipe.resolved(), lora_of(recipe.config))
        with closing(pool_of(recipe, tracker)) as pool:
            yield assemble(recipe, data, tracker, pool, checkpoints, resume)


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


def pool_of(recipe: Recipe, tracker: Tracker) -> Pool:
    """The devices of a recipe. Stalled calls write the stacks of all workers into the run's `logs`."""
    config = recipe.config
    pool = open_pool(
        config.runtime_in_use,
        config.num_devices,
        devices_per_node=config.devices_per_node,
        num_updates=config.num_updates,
        deadline_s=config.stall_timeout_s,
        row_transport=config.row_transport,
    )
    pool.stack_dir = tracker.run.root / "logs"
    return pool


def assemble(
    recipe: Recipe, data: DataSource, tracker: Tracker, pool: Pool, checkpoints: CheckpointStore, resume: ResumePoint
) -> Trainer[Any]:
    """Place the roles of a recipe on a pool, and join them in the trainer of its domain."""
    config, plan = recipe.config, plan_of(recipe.config)
    sampling, advantage = build(config.sampling), build(config.advantage)
    algorithm: StageAlgorithm[Any] = build(config.algorithm)
    kl = algorithm.kl_controller()
    drops = DropBudget(failure_policy(config))
    place_roles = place_dedicated if plan.is_dedicated else place_trainside
    roles = place_roles(pool, plan, config, sampling.seed)
    if roles.has_own_weights and config.weight_sync_interval > 1:
        roles.backend.snapshot(PUBLISHED)
    _check_disk(config, checkpoints, roles.backend)
    candidates = {"data": data, "advantage": advantage, "kl": kl, "drops": drops}
    state = RunState(
        stateful={name: item for name, item in candidates.items() if isinstance(item, Stateful)},
        recipe=recipe.resolved(),
        environment=environment(roles.train_ranks),
        checkpoints=checkpoints,
        resume=resume,
        resume_command=continuation(recipe, tracker.run.root),
        write_config=partial(tracker.run.write_config, recipe.composed.text(resolve_all=True), recipe.resolved_text()),
    )
    trainer: Trainer[Any] = build(
        config.trainer,
        config=config,
        roles=roles,
        data=data,
        sampling=sampling,
        advantage=advantage,
        kl=kl,
        drops=drops,
        state=state,
        tracker=tracker,
        parity=parity_gate(config),
        phases=Phases(timers=tracker.timers, pool=pool, residency=Residency(plan, roles)),
    )
    return trainer


# Placement of roles, one builder per relation of the engine to the trainer


def place_trainside(pool: Pool, plan: PlacementPlan, config: RecipeConfig, seed: int) -> Roles:
    """The engine samples with the very weights that are trained, in the processes that train them."""
    train = pool.group(plan.train)
    reward = place_node(pool.group(plan.reward), "reward", config.reward)
    bundle = place_node(train, "bundle", config.bundle)
    pipeline = place_node(train, "pipeline", config.pipeline, bundle=bundle)
    if needs_of(config).differentiable_reward:
        stage = place(train, "stage", differentiable_stage, pipeline=pipeline, reward=reward)
    else:
        stage = place(train, "stage", stage_of_pipeline, pipeline=pipeline)
    backend = place_node(train, "backend", config.backend, bundle=bundle, seed=seed, run_updates=config.total_updates)
    algorithm = place_node(train, "algorithm", config.algorithm)
    stack = place_node(train, "stack", config.stack, backend=backend, algorithm=algorithm, stage=stage)
    rollout = place_node(train, "rollout", config.rollout, pipeline=pipeline, backend=backend)
    return Roles(
        rollout=rollout,
        reward=reward,
        stack=stack,
        backend=backend,
        sync=NoSync(),
        train_ranks=train.num_ranks,
        has_own_weights=False,
    )


def place_dedicated(pool: Pool, plan: PlacementPlan, config: RecipeConfig, seed: int) -> Roles:
    """The engine has weights of its own, on the same devices in turns (colocate) or on others (separate).

    The trainer needs neither encoders nor decoder, so its bundle holds only the trained module.
    """
    train, engine = pool.group(plan.train), pool.group(plan.rollout)
    bundle = place_node(train, "bundle", config.bundle, components=trained_components(config))
    stage = place(train, "stage", stage_of_bundle, bundle=bundle)
    backend = place_node(train, "backend", config.backend, bundle=bundle, seed=seed, run_updates=config.total_updates)
    algorithm = place_node(train, "algorithm", config.algorithm)
    stack = place_node(train, "stack", config.stack, backend=backend, algorithm=algorithm, stage=stage)

    engine_bundle = place_node(engine, "engine_bundle", config.bundle)
    engine_pipeline = place_node(engine, "engine_pipeline", config.pipeline, bundle=engine_bundle)
    rollout = place_node(engine, "rollout", config.rollout, pipeline=engine_pipeline)

    # The sender reaches an engine in its own process directly: beside it on a worker, or in the driver's process.
    colocated = rollout if engine is train else engine.role_here("rollout")
    sender = place(train, "sender", WeightSender, weights=backend, stage=stage, colocated_engine=colocated)
    assert config.sync is not None, "preflight refuses a dedicated engine without a sync block"
    sync = build(config.sync, train=SyncEndpoint(train, sender), rollout=SyncEndpoint(engine, rollout))
    reward = place_node(pool.group(plan.reward), "reward", config.reward)
    return Roles(
        rollout=rollout,
        reward=reward,
        stack=stack,
        backend=backend,
        sync=sync,
        train_ranks=train.num_ranks,
        has_own_weights=True,
    )


def place(workers: Group, name: str, make: Callable[..., Any], **arguments: Any) -> Any:
    """Build a role on every worker as `make(**arguments)`, and return its handle.

    An argument that is the handle of a role on the same workers arrives there as that role itself. The handle is
    typed as `Any`: `Roles` says once which class each role has.
    """
    siblings = {argument: value.role_name for argument, value in arguments.items() if isinstance(value, Handle)}
    values = {argument: value for argument, value in arguments.items() if not isinstance(value, Handle)}
    return workers.place(Remote(name, partial(make_beside, make, siblings, values)))


def place_node(workers: Group, name: str, node: Node, **arguments: Any) -> Any:
    """Build the object of a recipe block on every worker, and return its handle.

    The class and the classes of its inner blocks may also take the `device` of the worker.
    """
    return place(workers, name, partial(build_on_device, node), **arguments)


def make_beside(
    make: Callable[..., Any], siblings: Mapping[str, str], values: Mapping[str, Any], roles: Siblings
) -> Any:
    """Runs on a worker: call `make` with the values, and with the worker's roles that `siblings` names."""
    return make(**values, **{argument: roles[role] for argument, role in siblings.items()})


def build_on_device(node: Node, **arguments: Any) -> Any:
    """Runs on a worker: the object of a block of the recipe."""
    return build(node, device=current().device, **arguments)


def stage_of_pipeline(pipeline: Any) -> Any:
    """The policy of a whole model."""
    return pipeline.stage


def stage_of_bundle(bundle: Any) -> Any:
    """The policy of a bundle that holds the trained module alone."""
    return bundle.stage()


def differentiable_stage(pipeline: Any, reward: Any) -> DifferentiableStage:
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


def load_data(recipe: Recipe) -> DataSource:
    """The prompts of a recipe. They are read first: a bad line is known before a folder is made or a model loaded.

    Raises:
        DataError: a file is bad, or a prompt brings fewer or more images than the model takes, as far as that is known.
    """
    config = recipe.config
    source: DataSource = build(config.data_source, seed=config.seed, eval_data_path=config.evaluation.data_path)
    facts = known_facts(config)
    if facts is not None:
        check_counts(prompts_of(source, config.evaluation), facts)
    return source


def prompts_of(source: DataSource, evaluation: EvaluationConfig) -> list[Prompt]:
    """Every prompt that a run may take, those of its evaluations included."""
    held_out = source.eval_prompts(evaluation.max_prompts) if evaluation.enabled else ()
    return [*source.prompts, *held_out]


def check_reward(config: RecipeConfig) -> None:
    """Check that the services that a scorer asks are there. Raises RewardError or ConfigError.

    On several nodes only the reward's own process can tell. It is asked when it runs (`check_prompts`).
    """
    if config.devices_per_node not in (None, config.num_devices):
        return
    backend = config.reward_backend
    if backend is not None and any(issubclass(node.schema.owner, StartChecker) for node in nodes_below(backend)):
        check_start(build(backend))


def failure_policy(config: RecipeConfig) -> FailurePolicy:
    """What becomes of samples that cannot be scored. A reward of a class other than ours stops at the first."""
    node = config.reward.values.get("on_failure", STRICT)
    policy: FailurePolicy = node if isinstance(node, FailurePolicy) else build(node)
    return policy


def lora_of(config: RecipeConfig) -> LoraConfig | None:
    """The adapters that a recipe trains; None when it trains all weights."""
    return None if config.lora is None else build(config.lora)


def parity_gate(config: RecipeConfig) -> ParityGate | None:
    """The gate of a loss with a trust region on log-probs that the engine records; None if both thresholds are off."""
    algorithm: StageAlgorithm[Any] = build(config.algorithm)
    width = algorithm.trust_width()
    recorded = capabilities_of(config.rollout).behaviour_logp
    if width is None or not recorded or not (config.parity.warn or config.parity.stop):
        return None
    return ParityGate(config.parity, width)


def _check_disk(config: RecipeConfig, checkpoints: CheckpointStore, backend: TrainBackend) -> None:
    num_checkpoints = (config.keep_checkpoints or config.num_rollouts // max(config.save_interval, 1)) + 1
    num_bytes = num_checkpoints * backend.checkpoint_bytes()
    check_disk(checkpoints.directory, num_bytes, f"{num_checkpoints} checkpoints")
