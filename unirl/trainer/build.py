"""A checked recipe to placed roles and a trainer."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from unirl import __version__
from unirl.algorithms.base import StageAlgorithm
from unirl.config.build import build
from unirl.config.load import Recipe
from unirl.config.node import Node, nodes_below
from unirl.config.recipe import EvaluationConfig, RecipeConfig
from unirl.data.datasets import Prompt
from unirl.data.images import check_counts
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.pool import Pool, open_pool
from unirl.plan.placement import PlacementPlan, capabilities_of, plan_of
from unirl.plan.preflight import check_disk, known_facts
from unirl.reward.base import StartChecker
from unirl.reward.failures import STRICT, DropBudget, FailurePolicy
from unirl.reward.scoring import check_start
from unirl.tracking.tracker import Tracker
from unirl.train.backend.checkpoint import CheckpointStore
from unirl.train.configs import LoraConfig
from unirl.trainer.base import PUBLISHED, Parts, Roles, Trainer
from unirl.trainer.parity import ParityGate
from unirl.trainer.placement import place_roles
from unirl.trainer.residency import Residency
from unirl.trainer.resume import ResumePoint, check_resumable, resume_point
from unirl.trainer.run import open_tracker
from unirl.types.protocols import DataSource, Stateful


def build_trainer(recipe: Recipe, argv: Sequence[str] = ()) -> Trainer:
    """The trainer of a recipe that passed preflight, with its run directory open. Its `close` ends all workers."""
    data = data_of(recipe)
    check_reward(recipe.config)
    tracker = open_tracker(recipe, argv)
    try:
        return join_parts(recipe, data, tracker)
    except BaseException as error:
        tracker.finish(1, f"{type(error).__name__}: {error}")
        raise


def data_of(recipe: Recipe) -> DataSource:
    """The prompts of a recipe. Read first: a bad line is known before a folder is made or a model loaded.

    Raises DataError, too, for a prompt with fewer or more pictures than the model takes, as far as that is known.
    """
    config = recipe.config
    source: DataSource = build(
        config.data_source, seed=recipe.value("sampling.seed"), eval_data_path=config.evaluation.data_path
    )
    facts = known_facts(config)
    if facts is not None:
        check_counts(prompts_of(source, config.evaluation), facts)
    return source


def prompts_of(source: DataSource, evaluation: EvaluationConfig) -> list[Prompt]:
    """Every prompt that a run may draw, those of its evaluations included."""
    held_out = source.eval_prompts(evaluation.max_prompts) if evaluation.enabled else ()
    return [*source.prompts, *held_out]


def check_reward(config: RecipeConfig) -> None:
    """Whether what a scorer asks elsewhere is there. Raises RewardError or ConfigError, before anything is loaded.

    On several nodes, only the reward's own process can tell, which is asked when it runs (`check_prompts`).
    """
    if config.devices_per_node not in (None, config.num_devices):
        return
    backend = config.reward.values.get("backend")
    if isinstance(backend, Node) and any(issubclass(node.schema.owner, StartChecker) for node in nodes_below(backend)):
        check_start(build(backend))


def join_parts(recipe: Recipe, data: DataSource, tracker: Tracker) -> Trainer:
    """Open the pool of a recipe, place its roles there and join them. The trainer owns the pool from then on."""
    config = recipe.config
    checkpoints = CheckpointStore(tracker.run.checkpoints, keep=config.keep_checkpoints)
    resume = resume_point(checkpoints, config.resume)
    check_resumable(resume, checkpoints.directory, recipe.resolved(), lora_of(config))
    pool = open_pool(
        config.runtime_in_use,
        config.num_devices,
        devices_per_node=config.devices_per_node,
        num_updates=recipe.value("stack.num_updates_per_batch"),
        deadline_s=config.stall_timeout_s,
        row_transport=config.row_transport,
    )
    pool.stack_dir = tracker.run.root / "logs"
    try:
        return _join(recipe, data, tracker, pool, checkpoints, resume)
    except BaseException:
        pool.close()
        raise


def _join(
    recipe: Recipe,
    data: DataSource,
    tracker: Tracker,
    pool: Pool,
    checkpoints: CheckpointStore,
    resume: ResumePoint,
) -> Trainer:
    config = recipe.config
    sampling = build(config.sampling)
    advantage = build(config.advantage)
    algorithm: StageAlgorithm[Any] = build(config.algorithm)
    kl = algorithm.kl_controller()
    drops = DropBudget(failure_policy(config))
    plan = plan_of(config)
    run_updates = config.num_rollouts * recipe.value("stack.num_updates_per_batch")
    placed = place_roles(pool, plan, config, seed=sampling.seed, run_updates=run_updates)
    interval = config.weight_sync_interval if plan.is_dedicated else 1
    if interval > 1:
        placed.handles["backend"].snapshot(PUBLISHED)
    parts = Parts(
        config=config,
        data=data,
        advantage=advantage,
        sync=placed.sync,
        tracker=tracker,
        checkpoints=checkpoints,
        resume=resume,
        drops=drops,
        pool=pool,
        residency=Residency(plan, placed.handles),
        parity=parity_gate(config),
        kl=kl,
        sync_interval=interval,
        stateful={
            name: part
            for name, part in [("data", data), ("advantage", advantage), ("kl", kl), ("drops", drops)]
            if isinstance(part, Stateful)
        },
        recipe=recipe.resolved(),
        write_config=partial(tracker.run.write_config, recipe.composed.text(resolve_all=True), recipe.resolved_text()),
        environment=environment(plan),
    )
    _check_disk(config, tracker, placed.handles["backend"])
    roles = Roles(**{name: placed.handles[name] for name in ("rollout", "reward", "stack", "backend")})
    trainer: Trainer = build(config.trainer, parts=parts, roles=roles, sampling=sampling)
    return trainer


def failure_policy(config: RecipeConfig) -> FailurePolicy:
    """What becomes of samples that cannot be scored; a reward of another class than ours stops at the first."""
    found = config.reward.values.get("on_failure", STRICT)
    policy: FailurePolicy = found if isinstance(found, FailurePolicy) else build(found)
    return policy


def lora_of(config: RecipeConfig) -> LoraConfig | None:
    """The adapters that a recipe trains; None when it trains all weights."""
    node = config.backend.values.get("lora_cfg")
    return None if node is None else build(node)


def parity_gate(config: RecipeConfig) -> ParityGate | None:
    """The gate of a loss with a trust region on log-probs that the engine records; None if both thresholds are off."""
    algorithm: StageAlgorithm[Any] = build(config.algorithm)
    width = algorithm.trust_width()
    recorded = capabilities_of(config.rollout).behaviour_logp
    if width is None or not recorded or not (config.parity.warn or config.parity.stop):
        return None
    return ParityGate(config.parity, width)


def _check_disk(config: RecipeConfig, tracker: Tracker, backend: Handle) -> None:
    kept = (config.keep_checkpoints or config.num_rollouts // max(config.save_interval, 1)) + 1
    check_disk(tracker.run.checkpoints, kept * backend.checkpoint_bytes(), f"{kept} checkpoints")


def device() -> torch.device:
    """Where a policy lives that is not placed: the accelerator of this process, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def environment(plan: PlacementPlan) -> dict[str, str]:
    """What decides bits outside the recipe."""
    return {
        "unirl": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "train_ranks": str(len(plan.train.indices)),
    }
