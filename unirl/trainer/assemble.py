"""Builds the trainer of a checked recipe: checks what the run needs, places the reward and the policies, joins them.

`unirl/trainer/places.py` builds the roles of each policy. The reward is on the devices that the placement gives it.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.shared.advantages import GroupAdvantage
from unirl.config.build import build
from unirl.config.device_sets import DeviceSet
from unirl.config.errors import StorageError
from unirl.config.failures import Session, failure_of
from unirl.config.load import Recipe
from unirl.config.node import Node, nodes_below
from unirl.config.recipe import RecipeConfig, said_of_policy
from unirl.config.secrets import refuse_masked
from unirl.data.datasets import Prompt
from unirl.distributed.group.base import Pool
from unirl.distributed.group.handle import Group
from unirl.distributed.group.pool import open_pool
from unirl.models.loading.checkpoint import TOY
from unirl.models.loading.hub import ModelSource, look_up, quiet_downloads
from unirl.plan.machine import check_engines, check_machine, check_memory, is_elsewhere, scores_elsewhere
from unirl.plan.placement import capabilities_of, plan_of
from unirl.plan.preflight import check_disk, needs_of, of_policy, trainer_class
from unirl.plan.prompts import load_data
from unirl.plan.sizes import RecipeSizes, sizes_of_policies
from unirl.plan.threads import Recorded, ThreadChoice, in_use, threads_of
from unirl.plan.tiling import choose_tiling, leaves_tiling_open, tiling_key, with_tiling
from unirl.reward.base import RewardScorer
from unirl.reward.failures import STRICT, DropBudget
from unirl.reward.service import RewardService
from unirl.rollout.engine.base import RolloutEngine
from unirl.tracking.owner import OwnershipLostError
from unirl.tracking.run_directory import RunDirectory
from unirl.tracking.tracker import Tracker
from unirl.train.backend.checkpoint import CheckpointStore, ResumePoint
from unirl.train.backend.remote import RemoteCheckpoints
from unirl.train.backend.signing import read_key
from unirl.train.backend.snapshots import LIVE
from unirl.train.configs import EmaLoraConfig
from unirl.train.parity import ParityGate
from unirl.trainer.generation import PromptsAhead
from unirl.trainer.learner import Learner, TrackLearner
from unirl.trainer.loop import Trainer
from unirl.trainer.micro_batch import MicroBatch, chooses_micro_batch
from unirl.trainer.places import Places, named, place_dedicated, place_trainside
from unirl.trainer.publishing import Publisher
from unirl.trainer.requests import RequestMaker, TrackSampling
from unirl.trainer.residency import Phases, Residency, Roles
from unirl.trainer.resume import check_resumable, continued, resume_point
from unirl.trainer.run_folder import continuation, open_tracker, run_root
from unirl.trainer.run_state import RunState, environment, recorded_threads, saved_choices
from unirl.types.credit import CREDIT_RULES
from unirl.types.device import DeviceKind
from unirl.types.facts import ModelFacts
from unirl.types.progress import Heartbeat, reporting_to
from unirl.types.protocols import DataSource, Stateful
from unirl.types.rollout_resp import AdvantageEstimator


@contextmanager
def build_trainer(
    recipe: Recipe,
    session: Session | None = None,
    *,
    tracker: Tracker | None = None,
    recorded: Recorded | None = None,
) -> Iterator[Trainer]:
    """The trainer of a recipe that passed preflight, with its run directory open and its roles placed.

    When the block ends, all workers end, and the run directory says how the run ended.

    Args:
        session: the command that started the run. Its `run_dir` is set to the run directory.
        tracker: the tracker to report to. None opens the run directory of the recipe.
        recorded: the threads of the run whose steps are repeated. None: those of the checkpoint that is continued.
    """
    is_own_run = tracker is None
    if is_own_run:
        refuse_masked(recipe.resolved())
    data = load_data(recipe)
    root = run_root(recipe) if tracker is None else tracker.run.root
    # A run that may not start leaves no folder.
    checkpoints = store_of(recipe.config, root)
    judged = checkpoints.listing()
    resume = resume_point(checkpoints, recipe.config.resume)
    check_resumable(resume, checkpoints.directory, recipe)
    look_up_models(recipe)
    if is_own_run:
        check_reward(recipe.config)
        check_engines(recipe)
        if (copies := remote_copies(recipe.config)) is not None:
            copies.check()
    # The last check: it may count the parameters of the model, which imports its libraries.
    threads = threads_of(recipe.config, recorded or recorded_threads(resume, checkpoints.directory))
    if tracker is None:
        if session is not None:
            session.start()
        tracker = open_tracker(recipe, root, session.argv if session else (), threads)
    if session is not None:
        session.run_dir, session.grace_s = root, recipe.config.run.stop_grace_s
    with recorded_end(tracker):
        if session is not None and session.restart is not None:
            tracker.restarted(**vars(session.restart))
        # From here on this process alone writes. Another one may have saved after `resume` was chosen.
        checkpoints.check_writer = tracker.run.fence.check
        checkpoints.collect()
        if checkpoints.listing() != judged:
            resume = resume_point(checkpoints, recipe.config.resume)
            check_resumable(resume, checkpoints.directory, recipe)
        yield from _running(recipe, data, tracker, threads, checkpoints, resume, is_own_run)


def _running(
    recipe: Recipe,
    data: DataSource[Prompt],
    tracker: Tracker,
    threads: ThreadChoice | None,
    checkpoints: CheckpointStore,
    resume: ResumePoint,
    is_own_run: bool,
) -> Iterator[Trainer]:
    """The trainer on its open pool, for `build_trainer`."""
    policies = recipe.policies
    if resume.checkpoint is not None:
        policies = {name: continued(config) for name, config in policies.items()}
    sizes = sizes_of_policies(recipe, policies)
    with (
        in_use(threads),
        closing(pool_of(sizes, tracker, threads)) as pool,
        reporting_to(pool.heartbeat),
    ):
        with tracker.watching(lambda: f"load: {pool.status()}"), quiet_downloads():
            trainer = assemble(recipe, sizes, data, tracker, pool, checkpoints, resume)
        if is_own_run:
            _check_disk(recipe.config, checkpoints, trainer.learners)
        with tracker.watching(lambda: status_of(pool)), files_of_engines(tracker.run):
            yield trainer


@contextmanager
def files_of_engines(run: RunDirectory) -> Iterator[None]:
    """Remove the weights that engines wrote for their servers. A worker that is killed cannot remove its own."""
    try:
        yield
    finally:
        with suppress(OwnershipLostError):  # the files are those of the process that took the run over
            run.fence.check()
            shutil.rmtree(run.root / "engine", ignore_errors=True)


@contextmanager
def recorded_end(tracker: Tracker) -> Iterator[None]:
    """Write into run.json how the block ended.

    Raises StorageError (7003) if another process took the run over while this one was paused. Nothing is written then.
    """
    try:
        yield
        tracker.finish()
    except BaseException as error:
        # A full disk may be what ended the run; it must not hide the error that is on its way.
        with suppress(OSError, OwnershipLostError):
            tracker.finish(failure_of(error).status, f"{type(error).__name__}: {error}")
        if isinstance(error, OwnershipLostError):
            raise StorageError(str(error)) from error
        raise


def pool_of(sizes: Mapping[str, RecipeSizes], tracker: Tracker, threads: ThreadChoice | None) -> Pool:
    """The devices of a recipe. Stalled calls write the stacks of all workers into the run's `logs`."""
    config = next(iter(sizes.values())).config
    for name, policy in sizes.items():
        with of_policy(name, policy.config):
            check_machine(policy, warning_of(name, policy.config, tracker.warn))
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
            row_service=None if config.transfer_queue is None else build(config.transfer_queue),
            node_groups=config.node_groups,
        )
    pool.stack_dir = tracker.run.root / "logs"
    pool.spans = tracker.timers.spans
    tracker.probe(pool.state)
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
        with of_policy(name, policy.config):
            check_memory(policy, kind, warning_of(name, policy.config, warn), devices)


def warning_of(policy: str, config: RecipeConfig, warn: Callable[[str], None]) -> Callable[[str], None]:
    """`warn` for texts about one policy, which name it."""
    return lambda text: warn(said_of_policy(text, policy, config))


def status_of(pool: Pool) -> str:
    """What a run is doing, as text for the console: `generate: sample 8/24 (2.1/s), denoising step 12/20 (3.1/s)`."""
    phases = " and ".join(sorted({*pool.phases.values()}))
    return f"{phases}: {pool.status()}" if phases else "writing files and preparing the next phase"


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
    reward = Places("", pool, plan, {"": config}).node(pool.group(plan.reward), "reward", RewardService, config.reward)
    chosen: dict[str, Any] = {}
    learners: dict[str, Learner] = {}
    for name, tracks in recipe.weights.items():
        views = {track or domain.track: sizes[track] for track in tracks}
        trained = [track or domain.track for track in tracks if track in recipe.trained]
        learners[name] = place_learner(name, views, trained, reward, pool, saved, chosen, tracker)
    tracks_of_run = {name: each for learner in learners.values() for name, each in learner.tracks.items()}
    prompts = PromptsAhead(data)
    stateful: dict[str, object] = {
        "data": prompts if isinstance(data, Stateful) else data,
        "advantage": advantage,
        "drops": drops,
    }
    for name, each in zip(recipe.policies, tracks_of_run.values(), strict=True):
        stateful[named(name, "kl")] = each.kl
    for name, learner in learners.items():
        stateful[named(name, "publisher")] = learner.publisher
    saved_objects = {name: item for name, item in stateful.items() if isinstance(item, Stateful)}
    for name, learner in learners.items():
        shared = learner.roles.shared_stack
        if shared is not None and shared.state_dict():
            saved_objects[named(name, "stack")] = shared
    state = RunState(
        policies=learners,
        tracker=tracker,
        stateful=saved_objects,
        recipe=recipe.public(),
        environment=environment(next(iter(learners.values())).roles.train_ranks),
        chosen=chosen,
        checkpoints=checkpoints,
        copies=remote_copies(config),
        saves_in_background=config.checkpoint.asynchronous,
        resume=resume,
        resume_command=continuation(recipe, tracker.run.root),
        write_config=partial(tracker.run.write_config, recipe.written_text(), recipe.resolved_text(), recipe.origins()),
    )
    phases = Phases(
        timers=tracker.timers,
        pool=pool,
        residencies={
            learner.track: Residency(plan, learner.roles, owns_reward=domain.track in learner.tracks)
            for learner in learners.values()
            for plan in [plan_of(learner.tracks[learner.track].config)]
        },
        shortage=partial(memory_advice, sizes, list(tracks_of_run.values())),
    )
    trainer: Trainer = build(
        config.trainer,
        config=config,
        learners=tuple(learners.values()),
        rollout=engine_of(recipe, learners, phases),
        reward=reward,
        requests=RequestMaker(tracks=samplings_of(tracks_of_run)),
        prompts=prompts,
        advantage=advantage,
        drops=drops,
        state=state,
        phases=phases,
        credit_rule=recipe.credit,
    )
    return trainer


def store_of(config: RecipeConfig, root: Path) -> CheckpointStore:
    """The checkpoints of the run in `root`. Raises ConfigError (2004) if there is no key to sign them with."""
    source = config.checkpoint.signing_key
    return CheckpointStore(
        root / "checkpoints",
        keep=config.keep_checkpoints,
        keep_every=config.checkpoint.keep_every,
        key=None if source is None else read_key(source, "checkpoint.signing_key"),
    )


def remote_copies(config: RecipeConfig) -> RemoteCheckpoints | None:
    """The place where checkpoints are copied."""
    url = config.checkpoint.copy_to
    if url is None:
        return None
    return RemoteCheckpoints(url, keep=config.keep_checkpoints, keep_every=config.checkpoint.keep_every)


def estimator_of(recipe: Recipe) -> AdvantageEstimator:
    """The estimator of advantages, with the baseline that the rule of credit sets."""
    estimator: AdvantageEstimator = build(recipe.config.advantage)
    if not CREDIT_RULES[recipe.credit].leave_one_out:
        return estimator
    return cast(GroupAdvantage, estimator).leaving_one_out()  # preflight refuses another estimator with this rule


def engine_of(recipe: Recipe, learners: Mapping[str, Learner], phases: Phases) -> RolloutEngine:
    """The engine of the only policy, or the one that composes the engines of all."""
    if recipe.engine is None:
        [learner] = learners.values()
        return learner.roles.rollout
    engine: RolloutEngine = build(
        recipe.engine,
        engines={track: learner.roles.rollout for learner in learners.values() for track in learner.tracks},
        turn=phases.turn,
    )
    return engine


def samplings_of(tracks: Mapping[str, TrackLearner]) -> dict[str, TrackSampling]:
    """The sampling settings of each track, for training and for evaluations. Each continues the one before it."""
    samplings: dict[str, TrackSampling] = {}
    parent: str | None = None
    for name, track in tracks.items():
        config, sampling = track.config, build(track.config.sampling)
        settings = config.evaluation.settings(sampling.evaluation_keys)
        if parent is not None:
            settings["samples_per_prompt"] = 1  # evaluation.samples_per_prompt counts the samples of the first track
        samplings[name] = TrackSampling(
            facts=track.facts,
            parent=parent,
            training=sampling,
            evaluation=sampling.for_evaluation(settings),
            eval_weights=config.evaluation.weights,
        )
        parent = name
    return samplings


def place_learner(
    policy: str,
    tracks: Mapping[str, RecipeSizes],
    trained: Sequence[str],
    reward: RewardService,
    pool: Pool,
    saved: Mapping[str, Any],
    chosen: dict[str, Any],
    tracker: Tracker,
) -> Learner:
    """Place the roles of one policy.

    Args:
        tracks: what each track of the policy sees of the recipe; the last one decodes.
        saved: what the run that continues chose for open settings.
        chosen: gets the open settings of this policy.
    """
    *_, last = tracks
    plan, tiling = plan_of(tracks[last].config), tiling_key(tracks[last].config)
    tiles = tiling_of(tracks[last], pool.group(plan.rollout), saved.get(tiling), tracker.choice)
    configs = {name: sizes.config for name, sizes in tracks.items()}
    if tiles is not None:
        configs = {name: with_tiling(config, tiles) for name, config in configs.items()}
        chosen |= {tiling: tiles}
    if tiles:  # decoding in tiles needs less memory
        tracks = {name: replace(sizes, config=configs[name]) for name, sizes in tracks.items()}
    place_roles = place_dedicated if plan.is_dedicated else place_trainside
    roles = place_roles(Places(policy, pool, plan, configs, trained, tracker.run.root), reward)
    config, facts = configs[last], roles.rollout.facts()
    is_free = config.asynchronous.is_free
    return Learner(
        tracks={
            name: track_learner(name, name in trained, sizes, configs[name], roles, facts, chosen, tracker)
            for name, sizes in tracks.items()
        },
        roles=roles,
        publisher=Publisher(
            roles.sync,
            roles.backend,
            interval=config.weight_sync_interval if roles.has_own_weights else 1,
            ahead=config.asynchronous.max_staleness if roles.has_own_weights and not is_free else 0,
            is_free=is_free,
            weights=EmaLoraConfig.snapshot if needs_of(config).ema_rollout else LIVE,
        ),
    )


def track_learner(
    track: str,
    is_trained: bool,
    sizes: RecipeSizes,
    config: RecipeConfig,
    roles: Roles,
    facts: ModelFacts,
    chosen: dict[str, Any],
    tracker: Tracker,
) -> TrackLearner:
    """What a policy learns from one track.

    Args:
        config: the recipe as the track sees it, with what the run chose.
        chosen: gets the open settings of this track.
    """
    stack = roles.stacks[track]
    algorithm: StageAlgorithm[object] = build(config.algorithm)
    name = track if roles.shared_stack is not None else ""  # the tracks have the same stack block
    micro_batch = MicroBatch(sizes, stack, tracker.choice, name) if chooses_micro_batch(config) else None
    chosen |= {} if micro_batch is None else {micro_batch.key: None}
    return TrackLearner(
        track=track,
        is_trained=is_trained,
        config=config,
        stack=stack,
        facts=facts.of(build(config.sampling)),
        needs=needs_of(config),
        kl=algorithm.kl_controller(),
        parity=parity_gate(config, algorithm),
        micro_batch=micro_batch,
        chosen=chosen,
    )


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


def memory_advice(sizes: Mapping[str, RecipeSizes], learners: Sequence[TrackLearner], phase: str) -> str:
    """The plan's advice for a phase that ran out of memory. Empty if no bundle can estimate the size of its model."""
    from unirl.plan.fit import shortage

    advice = []
    for (name, policy), learner in zip(sizes.items(), learners, strict=True):
        run, micro_batch = policy.run, learner.micro_batch
        if run is not None:
            text = shortage(run if micro_batch is None else micro_batch.applied_to(run), phase)
            advice.append(said_of_policy(text, name, policy.config))
    return "\n  ".join(advice)


# What a run needs beside its roles


def check_reward(config: RecipeConfig) -> None:
    """Check that the packages and services that a scorer needs are there.

    Raises DependencyError, RewardError or ConfigError.

    On several nodes only the reward's own process can tell. It is asked when it runs (`check_prompts`).
    """
    if scores_elsewhere(config):
        return
    for scorer in config.scorers:
        if any(_checks_start(node.schema.owner) for node in nodes_below(scorer)):
            build(scorer).check_start()


def look_up_models(recipe: Recipe) -> None:
    """Refuse the models and those of rewards if they are neither on this machine nor on the hub.

    Rewards are loaded after the model, which may take minutes. Raises NotFoundError (4001).
    """
    config = recipe.config
    if is_elsewhere(config):
        return
    trained = {
        _with_variable(f"{policy.bundle.path}.path", recipe.model_variable(name)): policy.model_path
        for name, policy in recipe.policies.items()
        if policy.model_path is not None
    }
    look_up(trained | models_named_by(config.reward))


def _with_variable(key: str, variable: str | None) -> str:
    """The key of a model, with the environment variable that sets it: `bundle.path (PRETRAINED_MODEL)`."""
    return key if variable is None else f"{key} ({variable})"


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
    recorded = capabilities_of(config.rollout).old_logp == "native"
    if width is None or not recorded or not (config.parity.warn or config.parity.stop):
        return None
    return ParityGate(config.parity, width)


def _check_disk(config: RecipeConfig, checkpoints: CheckpointStore, learners: Sequence[Learner]) -> None:
    num_checkpoints = (config.keep_checkpoints or config.num_rollouts // max(config.save_interval, 1)) + 1
    if config.checkpoint.keep_every:
        num_checkpoints += config.num_rollouts // math.lcm(config.checkpoint.keep_every, max(config.save_interval, 1))
    num_bytes = num_checkpoints * sum(learner.backend.checkpoint_bytes() for learner in learners)
    check_disk(checkpoints.directory, num_bytes, f"{num_checkpoints} checkpoints")
