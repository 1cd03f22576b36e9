"""What can be known before anything is loaded: rules between the parts of a recipe, and the files that it names.

An algorithm declares what it needs, engines and rewards what they can do, a model what it knows of itself; joining them
is the only thing done here, on the driver.
"""

from __future__ import annotations

import difflib
import inspect
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from unirl.config.build import build
from unirl.config.errors import (
    DataError,
    IncompatibleError,
    InvalidValueError,
    NotFoundError,
    StorageError,
    UniRLError,
)
from unirl.config.load import Recipe
from unirl.config.node import Node, nodes_below
from unirl.config.recipe import RecipeConfig
from unirl.plan.geometry import Geometry, check_geometry, geometry_of
from unirl.plan.layout import check_layout, layout_notices
from unirl.plan.placement import PlacementPlan, capabilities_of, plan_of
from unirl.types.facts import ModelFacts
from unirl.types.protocols import Capabilities, Needs
from unirl.types.sampling import Sampling, sampling_as

TRAINSIDE = "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine"
RECORDED_ENGINE = "unirl.rollout.engine.recorded.engine.RecordedRolloutEngine"
WAYS_OUT = {
    "rollout": "Take another engine, such as unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine",
    "trainer": "Write trainer._target_=unirl.trainer.text.TextTrainer for text, or leave the block out for pictures",
}
"""Block to what to write instead, where it is for another modality than the pipeline makes."""
KEPT_BY = {"old": "ema_lora_cfg", "ema": "ema_cfg"}
"""Snapshot to the block of the backend that keeps it. `reference` is kept wherever it is read."""
OPTIONAL_IN_EVALUATION = ("num_inference_steps", "guidance_scale", "temperature", "top_p", "top_k", "max_new_tokens")
"""Keys of the evaluation block of which every domain's sampling settings know some."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@runtime_checkable
class KnownModel(Protocol):
    """A bundle class that can describe a model which is not loaded."""

    @staticmethod
    def facts_of(path: str, revision: str | None = None) -> ModelFacts:
        """The facts, from configuration files alone."""
        ...


@dataclass(frozen=True)
class Preflight:
    """A recipe that may start."""

    geometry: Geometry
    plan: PlacementPlan
    notices: tuple[str, ...] = field(default=())
    """What the user should see once: settings without effect, values from the environment."""


def preflight(recipe: Recipe) -> Preflight:
    """All checks between the parts of a recipe.

    Raises:
        ConfigError: 2010 geometry, 2020 a combination that does not work, 2004 a value that the model refuses.
        DependencyError: 3003 no Ray at RAY_ADDRESS.
        DataError: 4001 no such model directory, 4002 no such data file.
    """
    config = recipe.config
    needs = needs_of(config)
    check_sampling_contract(config)
    plan = plan_of(config)
    check_layout(config, plan)
    geometry = geometry_of(config, plan, needs)
    check_geometry(geometry)
    check_combination(config, needs)
    check_objective(config, needs, plan)
    check_model(config)
    check_sampling(config, needs)
    check_evaluation(config)
    check_data(config)
    return Preflight(geometry, plan, tuple(notices(recipe, plan, geometry)))


def needs_of(config: RecipeConfig) -> Needs:
    """What the recipe's algorithm asks for."""
    needs: Needs = build(config.algorithm).needs
    return needs


# Needs and capabilities


def check_combination(config: RecipeConfig, needs: Needs) -> None:
    """The algorithm's needs against the engine, the reward and the stack."""
    for problem in _problems(config, needs):
        raise IncompatibleError(problem)


def _problems(config: RecipeConfig, needs: Needs) -> Iterator[str]:
    engine, name = capabilities_of(config.rollout), config.rollout.schema.owner.__name__
    loss = config.algorithm.schema.owner.__name__
    made = capabilities_of(config.pipeline).modalities
    rewards = {node.path: capabilities_of(node) for node in nodes_below(config.reward) if _declares(node)}
    updates = config.num_updates
    yield from _recorded_problems(config, needs, loss, name)
    yield from _refill_problems(config, needs, loss, name)
    if needs.behaviour_logp and not engine.behaviour_logp:
        yield f"{loss} reads the log-probs of the engine, and {name} records none. Set algorithm.old_logp_source=replay"
    if needs.ema_rollout and not engine.snapshots:
        yield f"{loss} samples from a snapshot of the weights, which {name} cannot. Use the trainside engine"
    tokens = config.micro_batch_tokens
    if tokens is not None and not build(config.algorithm).trains_tokens:
        yield (
            f"stack.micro_batch_tokens={tokens}: {loss} trains no tokens, and every row costs the same. Write "
            "stack.micro_batch_size instead"
        )
    if updates > 1 and not needs.multi_update:
        yield f"{loss} is valid for one update per step. Set stack.num_updates_per_batch=1 (now {updates})"
    yield from _snapshot_problems(config, needs, loss)
    if needs.value and "value_cfg" not in config.backend.values:
        backend = config.backend.schema.owner.__name__
        yield f"{loss} trains a value head, which {backend} cannot. Use unirl.train.backend.fsdp.FSDPBackend"
    for path, reward in rewards.items():
        if reward.modalities and made and not set(reward.modalities) & set(made):
            yield (
                f"{path} scores {' and '.join(reward.modalities)}, and {config.pipeline.schema.owner.__name__} makes "
                f"{' and '.join(made)}. Choose a reward for this modality"
            )
    for node in (config.rollout, config.trainer):
        handled = capabilities_of(node).modalities
        if handled and made and not set(handled) & set(made):
            yield (
                f"{node.path}: {node.schema.owner.__name__} is for {' and '.join(handled)}, and "
                f"{config.pipeline.schema.owner.__name__} makes {' and '.join(made)}. {WAYS_OUT[node.path]}"
            )
    if config.evaluation.weights == "ema" and config.backend.values.get("ema_cfg") is None:
        yield "evaluation.weights=ema needs an average to evaluate: write backend.ema_cfg={} or evaluation.weights=live"


def _recorded_problems(config: RecipeConfig, needs: Needs, loss: str, engine: str) -> Iterator[str]:
    """Samples that exist already: data, engine, reward and loss agree about them, and each has its place in a group."""
    gives_back = capabilities_of(config.rollout).recorded
    roles = config.recorded_roles
    if gives_back and needs.own_samples:
        yield (
            f"{loss} learns from samples of the policy itself, and {engine} gives back recorded ones. Write "
            f"rollout._target_={TRAINSIDE} ~data_source.recorded, or take a loss that learns from any samples, such as "
            "unirl.algorithms.diffusion_dpo.DiffusionDPO"
        )
    if gives_back and not roles:
        yield f"{engine} gives back recorded samples, and none are brought. Set data_source.recorded=[chosen,rejected]"
    if roles and not gives_back:
        yield (
            f"data_source.recorded={list(roles)}: {engine} draws its samples, and would not look at the recorded ones. "
            f"Write rollout._target_={RECORDED_ENGINE}, or ~data_source.recorded"
        )
    if len(set(roles)) < len(roles):
        yield f"data_source.recorded={list(roles)} names a role twice: these would be one sample. Name each once"
    if roles and config.samples_per_prompt != len(roles):
        yield (
            f"sampling.samples_per_prompt={config.samples_per_prompt}, and every prompt brings "
            f"{len(roles)} recorded ({', '.join(roles)}). Set sampling.samples_per_prompt={len(roles)}"
        )
    for node in nodes_below(config.reward):
        if capabilities_of(node).recorded and not gives_back:
            yield (
                f"{node.path} ({node.schema.owner.__name__}) tells what was recorded of samples, and {engine} draws "
                f"them. Choose a scorer of pictures, or write rollout._target_={RECORDED_ENGINE}"
            )


def _refill_problems(config: RecipeConfig, needs: Needs, loss: str, engine: str) -> Iterator[str]:
    """Drawing on is for groups whose rewards could differ, in a loss that is taught by how they do."""
    if config.refill is None:
        return
    if capabilities_of(config.rollout).recorded:
        yield (
            f"refill draws further samples, and {engine} gives back recorded ones, the same at every draw. "
            "Write ~refill"
        )
    if not needs.advantages:
        yield f"refill looks for groups whose rewards differ, and {loss} is not taught by differences. Write ~refill"
    if config.samples_per_prompt == 1:
        yield (
            "refill looks for groups whose rewards differ, and sampling.samples_per_prompt=1 makes groups of one. "
            "Set sampling.samples_per_prompt to 2 or more, or write ~refill"
        )


def _snapshot_problems(config: RecipeConfig, needs: Needs, loss: str) -> Iterator[str]:
    """Weights that the loss reads or samples from, and nobody keeps or publishes."""
    for snapshot, key in KEPT_BY.items():
        sampled = needs.ema_rollout and snapshot == "old"
        if (sampled or snapshot in needs.snapshots) and config.backend.values.get(key) is None:
            yield (
                f"{loss} {'samples from' if sampled else 'reads'} the weight snapshot {snapshot!r}, which the backend "
                f"does not keep. Write backend.{key}={{}}, which keeps it with the default schedule"
            )
    if needs.ema_rollout and config.weight_sync_interval > 1:
        yield (
            f"weight_sync_interval={config.weight_sync_interval}: {loss} samples from the snapshot 'old', which moves "
            "at every step and lags behind the trained weights by its own schedule. Set weight_sync_interval=1"
        )


def _declares(node: Node) -> bool:
    return capabilities_of(node) != Capabilities()


def check_objective(config: RecipeConfig, needs: Needs, plan: PlacementPlan) -> None:
    """A loss on the reward's gradient draws samples again beside the scorer, and every scorer has a gradient."""
    if needs.differentiable_reward:
        for problem in _objective_problems(config, plan):
            raise IncompatibleError(problem)


def _objective_problems(config: RecipeConfig, plan: PlacementPlan) -> Iterator[str]:
    loss = config.algorithm.schema.owner.__name__
    for node in _trained_scorers(config.reward):
        if not capabilities_of(node).differentiable:
            yield (
                f"{loss} needs the gradient of the reward, and {node.path} ({node.schema.owner.__name__}) has none. "
                "Choose a scorer with an `objective`, such as unirl.reward.local.pickscore.PickScoreRewardScorer, or a "
                "loss on rewards alone, such as unirl.algorithms.diffusion_grpo.DiffusionGRPO"
            )
    if plan.is_dedicated:
        yield (
            f"{loss} differentiates through sampling, which only the trained weights themselves can do, and "
            f"{config.rollout.schema.owner.__name__} samples with a copy. Write "
            f"rollout._target_={TRAINSIDE}, without placement.rollout and sync"
        )
    if plan.reward != plan.train:
        yield (
            f"{loss} differentiates through the reward in the processes that train, and placement.reward puts it on "
            f"{plan.reward.words}. Leave placement.reward out"
        )


def _trained_scorers(node: Node) -> Iterator[Node]:
    """The scorers that make up the reward: of those that hold others the others, without what has weight 0."""
    weights = node.values.get("weights")
    unweighed = {name for name, weight in weights.items() if not weight} if isinstance(weights, Mapping) else set()
    held = [
        child
        for value in node.values.values()
        for name, child in (value.items() if isinstance(value, Mapping) else [("", value)])
        if isinstance(child, Node) and name not in unweighed
    ]
    below = [scorer for child in held for scorer in _trained_scorers(child)]
    yield from below or ([node] if _declares(node) else [])


# Sampling and model


def check_sampling_contract(config: RecipeConfig) -> None:
    """The sampling settings, which may be a plugin's, offer everything that is asked of them."""
    sampling = build(config.sampling)
    asked = {name for name in (*vars(Sampling), *Sampling.__annotations__) if not name.startswith("_")}
    lacks = sorted(name for name in asked if inspect.getattr_static(sampling, name, MISSING) is MISSING)
    if lacks:
        raise InvalidValueError(
            f"sampling must be a {Sampling.__module__}.{Sampling.__name__}, and {type(sampling).__name__} has no "
            f"{', '.join(lacks)}. Write them, or inherit from settings that have them"
        )


def check_sampling(config: RecipeConfig, needs: Needs) -> None:
    """The loss can train what is sampled; a loss on log-probs needs some that can be trained."""
    sampling: Sampling = build(config.sampling)
    algorithm = build(config.algorithm)
    try:
        sampling_as(algorithm.sampled_by, sampling, f"{type(algorithm).__name__} trains what is sampled by")
    except ValueError as error:
        raise IncompatibleError(str(error)) from error
    algorithm.check_sampling(sampling)
    loss = config.algorithm.schema.owner.__name__
    try:
        density = sampling.density_problem(0) if needs.density else None
        variety = sampling.variety_problem(0) if sampling.samples_per_prompt > 1 else None
    except UniRLError:
        raise
    except ValueError as error:
        raise InvalidValueError(str(error)) from error
    if density is not None:
        raise IncompatibleError(f"{loss} trains on log-probs, and {density}")
    if variety is not None:
        raise IncompatibleError(f"{loss} compares the samples of a prompt, which would all be the same: {variety}")


def check_evaluation(config: RecipeConfig) -> None:
    """No setting of evaluations that the sampling settings would not look at."""
    sampling: Sampling = build(config.sampling)
    for key in OPTIONAL_IN_EVALUATION:
        value = vars(config.evaluation)[key]
        if value is not None and key not in sampling.evaluation_keys:
            raise IncompatibleError(
                f"evaluation.{key}={value}: {type(sampling).__name__} has no such setting. Write ~evaluation.{key}, "
                f"and set of these what you mean: {', '.join(sampling.evaluation_keys)}"
            )


def check_model(config: RecipeConfig) -> None:
    """A directory that should hold the model exists, and the model can sample as the recipe asks."""
    if config.model_path is not None:
        check_model_path(config.model_path, config.bundle.path)
    sampling: Sampling = build(config.sampling)
    sized = [(f"data_source.sizes={list(size)}: ", _at_size(sampling, size)) for size in sizes_of(config)]
    facts = known_facts(config)
    if facts is not None:
        evaluated = sampling.for_evaluation(config.evaluation.settings(sampling.evaluation_keys))
        for where, asked in (("", sampling), ("in evaluations, ", evaluated), *sized):
            _check_fit(facts, asked, where)


def sizes_of(config: RecipeConfig) -> Sequence[tuple[int, int]]:
    """The (height, width) that samples may have beside that of `sampling`. Raises ConfigError (2004)."""
    sizes = config.image_sizes
    for size in sizes:
        if min(size) < 1 or sizes.count(size) > 1:
            raise InvalidValueError(
                f"data_source.sizes={[list(size) for size in sizes]}: each is [height, width] in pixels, 1 or more, "
                "and stands there once"
            )
    return sizes


def _at_size(sampling: Sampling, size: tuple[int, int]) -> Sampling:
    try:
        return sampling.at_size(*size)
    except ValueError as error:
        raise IncompatibleError(str(error)) from error


def check_model_path(path: str, key: str) -> None:
    """Refuse what is written like a directory and is none."""
    spelled_as_path = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if spelled_as_path and not Path(path).expanduser().is_dir():
        raise NotFoundError(
            f"{key}.path={path}: there is no such directory. Give one as diffusers or transformers saves it, or a hub "
            f"id, in {key}.path=... or PRETRAINED_MODEL"
        )


def known_facts(config: RecipeConfig) -> ModelFacts | None:
    """What is known of the recipe's model before it is loaded.

    None for a bundle that cannot say, and for a hub id that cannot be read now, which the run itself will report.
    """
    bundle, path = config.bundle.schema.owner, config.model_path
    if path is None or not isinstance(bundle, KnownModel):
        return None
    try:
        return bundle.facts_of(path, config.model_revision)
    except DataError:
        if HUB_ID.fullmatch(path) and not Path(path).is_dir():
            return None
        raise


def _check_fit(facts: ModelFacts, sampling: Sampling, where: str = "") -> None:
    try:
        facts.check(sampling)
    except ValueError as error:
        raise InvalidValueError(f"{where}{error}") from error


# Files


def check_data(config: RecipeConfig) -> None:
    """The prompt files exist."""
    check_data_path(config.data_path, "data_source.data_path", "DATA_PATH")
    check_data_path(config.evaluation.data_path, "evaluation.data_path", "EVAL_DATA_PATH")


def check_data_path(path: str | Path | None, key: str, variable: str) -> None:
    """Refuse a file that is not there, naming the most similar file of its folder."""
    if path is None or Path(path).expanduser().is_file():
        return
    folder = Path(path).expanduser().parent
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    similar = difflib.get_close_matches(Path(path).name, names, 1)
    hint = f" Did you mean '{folder / similar[0]}'?" if similar else ""
    raise DataError(f"{key}={path}: there is no such file (seen from {Path.cwd()}).{hint} Set {key}=... or {variable}")


def check_disk(directory: Path, num_bytes: float, what: str) -> None:
    """Refuse to start a run whose checkpoints will not fit.

    Raises:
        CheckpointError: 7003.
    """
    existing = next(folder for folder in (directory, *directory.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise StorageError(
            f"{what} needs {num_bytes / 2**30:.2f} GiB in {directory}, and {free / 2**30:.2f} GiB are free. "
            "Free some, set run.dir to another disk, or lower keep_checkpoints"
        )


# Notices


def notices(recipe: Recipe, plan: PlacementPlan, geometry: Geometry) -> Iterator[str]:
    """Settings without effect, and values that the environment set."""
    config = recipe.config
    yield from layout_notices(config, plan, geometry.num_samples)
    alone = geometry.samples_per_prompt == 1 and config.advantage.values.get("scope") == "group"
    if alone and needs_of(config).advantages:
        yield "sampling.samples_per_prompt=1: a group of one has no advantage, so nothing is learned"
    if geometry.micro_batch_tokens is not None and config.scale == "full" and geometry.micro_batch_size != 1:
        yield (
            f"stack.micro_batch_size={geometry.micro_batch_size} has no effect: stack.micro_batch_tokens cuts the rows"
        )
    if config.backend.values.get("value_cfg") is not None and not needs_of(config).value:
        yield f"backend.value_cfg has no effect: {config.algorithm.schema.owner.__name__} trains no value head"
    for layer in recipe.composed.layers:
        if layer.source == "environment":
            yield from (f"{path} is set by the environment variable {name}" for path, name in layer.places.items())
