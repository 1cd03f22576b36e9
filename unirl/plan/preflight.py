"""All checks that need a whole recipe and no loaded model, and the notices that a user should see once.

Algorithms declare what they need, engines and rewards what they can do, and models what they know of themselves.
`preflight` joins these declarations on the driver, before any process starts.
"""

from __future__ import annotations

import difflib
import inspect
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.shared.contract import check_declarations
from unirl.config.build import build, lacking
from unirl.config.errors import (
    ConfigError,
    DataError,
    IncompatibleError,
    InvalidValueError,
    MemoryShortageError,
    NotFoundError,
    StorageError,
    UniRLError,
    did_you_mean,
)
from unirl.config.load import Recipe
from unirl.config.node import Node
from unirl.config.recipe import RecipeConfig, keys_of_policy, said_of_policy
from unirl.config.schema import dotted_name
from unirl.models.base import Bundle
from unirl.models.unified.pipeline import UnifiedPipeline
from unirl.plan.compatibility import check_compatibility
from unirl.plan.credit import check_credit, check_rewards, credit_notices
from unirl.plan.estimates import Estimated, estimate_of
from unirl.plan.geometry import Geometry, check_geometry, geometry_of
from unirl.plan.layout import check_layout
from unirl.plan.notices import data_notices, engine_notices, environment_notices, policy_notices
from unirl.plan.pipelines import DescribedBundle, pipeline_notices
from unirl.plan.placement import PlacementPlan, plan_of
from unirl.rollout.engine.base import EngineUse, RolloutEngine
from unirl.rollout.engine.composed.engine import ComposedRolloutEngine, check_texts
from unirl.tracking.streams import say
from unirl.train.backend.base import TrainBackend
from unirl.train.backend.module_setup import check_component
from unirl.train.backend.remote import check_url
from unirl.train.stack import TrainStack
from unirl.train.unified_model_stack import UnifiedModelStack, check_balance
from unirl.types.facts import ModelFacts
from unirl.types.protocols import Needs
from unirl.types.sampling import Sampling, sampling_as

OPTIONAL_IN_EVALUATION = ("num_inference_steps", "guidance_scale", "temperature", "top_p", "top_k", "max_new_tokens")
"""Keys of the evaluation block that only the sampling settings of some domains have."""
SHOWN_ENDS = 24
"""Number of names of layers that an error lists."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@runtime_checkable
class KnownModel(Protocol):
    """A bundle class that can describe a model without loading it."""

    @staticmethod
    def facts_of(path: str, revision: str | None = None) -> ModelFacts:
        """The facts, read from configuration files alone."""
        ...


@runtime_checkable
class RestrictedEngine(Protocol):
    """An engine class that can refuse a model or sampling settings without being built."""

    def check_recipe(self, facts: ModelFacts, sampling: Sampling, settings: Mapping[str, object]) -> None:
        """Raises IncompatibleError, naming the key. A method of the class.

        Args:
            settings: the block `rollout`, with its defaults.
        """
        ...


@runtime_checkable
class StartsServer(Protocol):
    """An engine class that can refuse settings without the model and without being built."""

    def check_settings(self, sampling: Sampling, settings: Mapping[str, object]) -> None:
        """Raises a ConfigError that names the key. A method of the class.

        Args:
            settings: the block `rollout`, with its defaults.
        """
        ...


@runtime_checkable
class UsesServers(Protocol):
    """An engine class that can refuse what a recipe asks of its servers, without being built."""

    def check_use(self, settings: Mapping[str, object], use: EngineUse) -> None:
        """Raises IncompatibleError, naming the key. A method of the class.

        Args:
            settings: the block `rollout`, with its defaults.
        """
        ...


@runtime_checkable
class WithLocalFiles(Protocol):
    """A bundle class that can read the names in the weight files of a local model."""

    @staticmethod
    def saved_matrices(path: str) -> Collection[str]:
        """Names of the trained matrices. Empty if the files are not here."""
        ...


@dataclass(frozen=True)
class Preflight:
    """The result of the checks, for a recipe that may start."""

    geometry: Geometry
    plan: PlacementPlan
    notices: tuple[str, ...]
    """Settings without effect and values from the environment, to be shown once."""

    def print_notices(self) -> None:
        """Print the notices to stderr."""
        for notice in self.notices:
            say(f"unirl: {notice}")


def preflight(recipe: Recipe) -> Preflight:
    """Checks the parts of a recipe against each other.

    Raises:
        ConfigError: 2010 geometry, 2020 a combination that does not work, 2004 a value that the model refuses.
        DependencyError: 3003 no Ray at RAY_ADDRESS.
        DataError: 4001 no such model directory, 4002 no such data file.
    """
    config = recipe.config
    texts: list[str] = []
    check_composition(recipe)
    for name, policy in recipe.policies.items():
        with of_policy(name, policy):
            check_roles(policy)
            needs = needs_of(policy)
            check_sampling_contract(policy)
            plan = plan_of(policy)
            check_layout(policy, plan)
            geometry = geometry_of(policy, plan, needs)
            check_geometry(geometry)
            check_compatibility(policy, needs, plan)
            check_server(policy, plan)
            check_stack(policy, plan)
            facts = check_model(policy, recipe.model_variable(name))
            check_sampling(policy, needs)
            texts += pipeline_notices(policy, facts)
            texts += [said_of_policy(text, name, policy) for text in policy_notices(policy, plan, geometry, needs)]
    check_tracks(recipe)
    check_rewards(recipe, trainer_class(config).track)
    check_credit(recipe)
    check_evaluation(recipe)
    check_data(config)
    check_saving(config)
    texts += credit_notices(recipe)
    texts += environment_notices(recipe)
    texts += engine_notices(recipe)
    texts += data_notices(recipe)
    texts = list(dict.fromkeys(texts))  # one about a shared setting comes from every policy
    return Preflight(geometry_of(config, plan_of(config), needs_of(config)), plan_of(config), tuple(texts))


@contextmanager
def of_policy(name: str, config: RecipeConfig) -> Iterator[None]:
    """Name the policy and its keys in a refusal of one of its settings, where a recipe has several.

    Args:
        config: the recipe as the policy sees it.
    """
    try:
        yield
    except (ConfigError, MemoryShortageError) as error:
        if not name:
            raise
        raise type(error)(said_of_policy(str(error), name, config)) from error


@contextmanager
def of_model(config: RecipeConfig, variable: str | None) -> Iterator[None]:
    """Names the key of a policy's model, and the environment variable that sets it, if the model cannot be found."""
    try:
        yield
    except NotFoundError as error:
        key, text = f"{config.bundle.path}.path", keys_of_policy(str(error), config)
        ways = key if variable is None else f"{key} or {variable}"
        raise NotFoundError(text.replace(f"set {key}", f"set {ways}")) from error


@runtime_checkable
class TrainerClass(Protocol):
    """What the checks read from a class of trainers. The trainers stand above this package, which may not import them.

    `unirl.trainer.loop.Trainer` says what the attributes mean.
    """

    track: str
    num_tracks: Literal["one", "several", "any"]

    def train(self) -> None: ...


def trainer_class(config: RecipeConfig) -> TrainerClass:
    """The class of the recipe's trainer. Raises ConfigError (2004) for a class of something else."""
    owner = config.trainer.schema.owner
    if not isinstance(owner, TrainerClass):
        raise InvalidValueError(
            f"trainer._target_={config.trainer.target} is not a trainer that names its track. Leave the trainer block "
            "out for images, write unirl.trainer.text.TextTrainer for text, or derive your class from "
            "unirl.trainer.loop.Trainer and set its `track`"
        )
    return owner


def check_composition(recipe: Recipe) -> None:
    """The trainer, and the engine of a recipe of several policies, must be made for as many policies."""
    trainer, number = recipe.config.trainer, trainer_class(recipe.config).num_tracks
    if len(recipe.policies) == 1 and number == "several":
        raise IncompatibleError(
            f"trainer: {trainer.class_name} trains several policies, and this recipe has one. Write ~trainer, or take "
            "a recipe of several policies, such as pe/quickstart"
        )
    if len(recipe.policies) > 1 and number == "one":
        raise IncompatibleError(
            f"trainer: {trainer.class_name} trains one policy, and this recipe has {' and '.join(recipe.policies)}. "
            "Leave the trainer block out"
        )
    if recipe.engine is not None and "engines" not in recipe.engine.schema.wired:
        raise IncompatibleError(
            f"rollout: {recipe.engine.class_name} is the engine of one policy, and this block composes those of "
            f"{' and '.join(recipe.policies)}. Leave rollout._target_ out. The engine of a policy is "
            f"{' or '.join(f'{name}.rollout' for name in recipe.policies)}"
        )
    if recipe.engine is not None and recipe.config.asynchronous.elastic:
        raise IncompatibleError(
            f"asynchronous.elastic=true: the engines of {' and '.join(recipe.policies)} take turns within a part, and "
            "only one engine can have a second one on the training devices. Set asynchronous.elastic=false"
        )


def check_tracks(recipe: Recipe) -> None:
    """A recipe of several policies: what its engine and its loop cannot do."""
    config = recipe.config
    if len(recipe.policies) == 1:
        return
    if config.refill is not None:
        raise IncompatibleError(
            "refill draws further prompts for one track, and this recipe has several. Write ~refill"
        )
    if config.recorded_roles:
        raise IncompatibleError(
            f"data_source.recorded={list(config.recorded_roles)}: recorded samples continue no sample of another "
            "track. Write ~data_source.recorded"
        )
    if recipe.engine is not None and issubclass(recipe.engine.schema.owner, ComposedRolloutEngine):
        check_texts(recipe.engine.require("pe_instruction", str), recipe.engine.get("pe_marker", str))
    if recipe.shares_weights:
        check_chain(recipe)
    for policy in recipe.policies.values():
        needs, loss = needs_of(policy), f"{policy.algorithm.path}: {policy.algorithm.class_name}"
        if needs.differentiable_reward:
            raise IncompatibleError(
                f"{loss} differentiates the reward of the prompt that was sampled, and samples are scored against the "
                f"original one. Use a loss on rewards alone, such as {dotted_name(DiffusionGRPO)}"
            )
        if recipe.shares_weights and (needs.pairs or needs.ema_rollout):
            raise IncompatibleError(
                f"{loss} chooses its own rows or weights, which the tracks of one network share. Use a loss on "
                f"advantages, such as {dotted_name(DiffusionGRPO)}"
            )


def check_chain(recipe: Recipe) -> None:
    """The pipeline must sample the tracks of one network."""
    owner, config, tracks = recipe.config.pipeline.schema.owner, recipe.config, tuple(recipe.policies)
    if not issubclass(owner, UnifiedPipeline):
        raise IncompatibleError(
            f"sampling names the tracks {', '.join(tracks)}, and {config.pipeline.class_name} samples one track. Write "
            "sampling and algorithm without names, or take the bundle and the pipeline of a unified model"
        )
    stack = config.stack
    if issubclass(stack.schema.owner, UnifiedModelStack):  # a stack of another class checks its own settings
        check_balance(
            stack.require("schedule", str), stack.require("balance", str), stack.require("balance_decay", float)
        )
    for name in stack.get("loss_weights", dict) or {}:
        if name not in recipe.trained:
            raise InvalidValueError(
                f"stack.loss_weights.{name}: the trained tracks are {', '.join(recipe.trained)}. Name one of them, or "
                "remove the key"
            )


def needs_of(config: RecipeConfig) -> Needs:
    """The needs that the recipe's algorithm declares."""
    algorithm = build(config.algorithm)
    check_declarations(algorithm)
    needs: Needs = algorithm.needs
    return needs


# Roles


ROLES: Mapping[str, type] = {
    "algorithm": StageAlgorithm,
    "bundle": Bundle,
    "backend": TrainBackend,
    "rollout": RolloutEngine,
}
"""Block to the class that its class derives from."""


def check_roles(config: RecipeConfig) -> None:
    """The class of each of these blocks must derive from the class of its role, with no method missing."""
    for name, role in ROLES.items():
        node: Node = vars(config)[name]
        lacks = lacking(node.schema, role)
        if lacks:
            raise InvalidValueError(
                f"{name}._target_={node.target} is not a {dotted_name(role)}: it has no {', '.join(lacks)}. "
                f"unirl config show RECIPE names classes that fit; docs/extending.md says how to write one"
            )


def check_stack(config: RecipeConfig, plan: PlacementPlan) -> None:
    """The stack must be able to train the loss."""
    stack = config.stack.schema.owner
    if issubclass(stack, TrainStack):
        stack.check_recipe(config.algorithm.schema.owner, config.stack.values, len(plan.train))


# Sampling and model


@contextmanager
def refusing(kind: type[ConfigError], prefix: str = "") -> Iterator[None]:
    """Turns a plain ValueError of settings or facts, which stand below this package, into an error of `kind`."""
    try:
        yield
    except UniRLError:
        raise
    except ValueError as error:
        raise kind(f"{prefix}{error}") from error


def check_sampling_contract(config: RecipeConfig) -> None:
    """The sampling settings, which may come from a plugin, must have every member of the contract."""
    sampling = build(config.sampling)
    members = {name for name in (*vars(Sampling), *Sampling.__annotations__) if not name.startswith("_")}
    missing = sorted(name for name in members if inspect.getattr_static(sampling, name, MISSING) is MISSING)
    if missing:
        raise InvalidValueError(
            f"sampling must be a {dotted_name(Sampling)}, and {type(sampling).__name__} has no {', '.join(missing)}. "
            "Write them, or inherit from settings that have them"
        )


def check_sampling(config: RecipeConfig, needs: Needs) -> None:
    """The loss must be able to train what is sampled, and the samples of one prompt must differ."""
    sampling: Sampling = build(config.sampling)
    algorithm = build(config.algorithm)
    loss = config.algorithm.class_name
    with refusing(IncompatibleError):
        sampling_as(algorithm.sampled_by, sampling, f"{loss} trains what is sampled by")
    algorithm.check_sampling(sampling)
    with refusing(InvalidValueError):
        density = sampling.density_problem(0) if needs.density else None
        variety = sampling.variety_problem(0) if sampling.samples_per_prompt > 1 else None
    if density is not None:
        raise IncompatibleError(f"{loss} trains on log-probs, and {density}")
    if variety is not None:
        raise IncompatibleError(f"{loss} compares the samples of a prompt, which would all be the same: {variety}")


def check_evaluation(recipe: Recipe) -> None:
    """Every evaluation setting must be one that the sampling settings of a policy read."""
    samplings: list[Sampling] = [build(policy.sampling) for policy in recipe.policies.values()]
    known = list(dict.fromkeys(key for sampling in samplings for key in sampling.evaluation_keys))
    for key in OPTIONAL_IN_EVALUATION:
        value = vars(recipe.config.evaluation)[key]
        if value is not None and key not in known:
            names = " and ".join(type(sampling).__name__ for sampling in samplings)
            raise IncompatibleError(
                f"evaluation.{key}={value}: {names} has no such setting. Write ~evaluation.{key}. "
                f"Evaluation can set {', '.join(known)}"
            )


def check_server(config: RecipeConfig, plan: PlacementPlan) -> None:
    """The settings of an engine's server must lie in their ranges, and it must have those of sampling and training."""
    engine = config.rollout.schema.owner
    if isinstance(engine, StartsServer):
        engine.check_settings(build(config.sampling), config.rollout.values)
    if isinstance(engine, UsesServers):
        sends_adapters = config.lora is not None and not config.merges_adapters
        alpha = config.lora.require("alpha", float) if config.lora is not None and sends_adapters else None
        use = EngineUse(len(plan.rollout), alpha, config.model_path, num_weights_of(config))
        engine.check_use(config.rollout.values, use)


def num_weights_of(config: RecipeConfig) -> int:
    """The number of different weights from which a run samples: those of the steps, and of evaluations after them."""
    published = -(-config.num_rollouts // config.weight_sync_interval)
    return published + (1 if config.evaluation.eval_steps else 0)


def check_model(config: RecipeConfig, variable: str | None) -> ModelFacts | None:
    """A local model directory must exist, and the model must be able to sample as the recipe says.

    Args:
        variable: the environment variable that sets the model.

    Returns:
        The facts of the model that the policy trains, if they are known without it.
    """
    if config.model_path is not None:
        check_model_path(config.model_path, config.bundle.path, variable)
    for name, source in config.loaded_snapshots.items():
        check_model_path(source.require("path", str), f"backend.snapshots.{name}")
    sampling: Sampling = build(config.sampling)
    with refusing(IncompatibleError):
        sized = [(f"data_source.sizes={list(size)}: ", sampling.at_size(*size)) for size in sizes_of(config)]
    with of_model(config, variable):
        facts = known_facts(config)
    if facts is not None:
        facts = facts.of(sampling)
        check_component(config.backend.get("trainable_attr", str), facts)
        with of_model(config, variable):
            check_adapted(config)
        evaluation = sampling.for_evaluation(config.evaluation.settings(sampling.evaluation_keys))
        for where, settings in (("", sampling), ("in evaluations, ", evaluation), *sized):
            with refusing(InvalidValueError, where):
                facts.check(settings)
        engine = config.rollout.schema.owner
        if isinstance(engine, RestrictedEngine):
            engine.check_recipe(facts, sampling, config.rollout.values)
        loss = build(config.algorithm)
        loss.check_facts(facts)
        if issubclass(stack := config.stack.schema.owner, TrainStack):
            stack.check_facts(facts)
            stack.check_data(loss, facts, sampling, config.stack.values)
    return facts


def check_adapted(config: RecipeConfig) -> None:
    """Every entry of `target_modules` must be the end of a linear layer's name. No weights are read.

    The names come from local weight files. Without any, the network is built without storage, which imports the
    libraries of the model and takes seconds.
    """
    targets = None if config.lora is None else config.lora.get("target_modules", tuple)
    owner = config.bundle.schema.owner
    if not targets or not isinstance(owner, Estimated) or config.model_path is None:
        return
    saved = owner.saved_matrices(config.model_path) if isinstance(owner, WithLocalFiles) else ()
    names = saved or estimate_of(config).linears
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            ends = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdecimal()})
            raise InvalidValueError(
                f"backend.lora_cfg.target_modules: '{target}' is the end of no linear layer's name in the model."
                f"{did_you_mean(target, ends)} The ends are {', '.join(ends[:SHOWN_ENDS])}"
            )


def sizes_of(config: RecipeConfig) -> Sequence[tuple[int, int]]:
    """The (height, width) of samples other than that of `sampling`. Raises ConfigError (2004) for an illegal one."""
    sizes = config.image_sizes
    for size in sizes:
        if min(size) < 1 or sizes.count(size) > 1:
            raise InvalidValueError(
                f"data_source.sizes={[list(size) for size in sizes]}: each entry is [height, width] in pixels, at "
                "least 1, and occurs once"
            )
    return sizes


def check_model_path(path: str, key: str, variable: str | None = None) -> None:
    """Raises NotFoundError (4001) for text that is written like a directory and names none.

    Args:
        key: the block with the path.
        variable: the environment variable that sets the path.
    """
    if not path:
        or_variable = f", or the environment variable {variable}," if variable else ""
        raise NotFoundError(f"{key}.path is empty. Set it{or_variable} to a directory or a hub id")
    spelled_as_path = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if spelled_as_path and not Path(path).expanduser().is_dir():
        raise NotFoundError(
            f"{key}.path={path}: there is no such directory. Give a directory that diffusers or transformers saved, or "
            f"a hub id, in {key}.path=..." + (f" or {variable}" if variable else "")
        )


def known_facts(config: RecipeConfig) -> ModelFacts | None:
    """The facts of the recipe's model, without loading it.

    None if the bundle class cannot tell, or if a hub id cannot be read now. The run itself reports the latter.
    """
    bundle, path = config.bundle.schema.owner, config.model_path
    try:
        if isinstance(bundle, DescribedBundle):
            return bundle.facts_from(config.bundle.values)
        if path is not None and isinstance(bundle, KnownModel):
            return bundle.facts_of(path, config.model_revision)
        return None
    except DataError:
        if path is not None and HUB_ID.fullmatch(path) and not Path(path).is_dir():
            return None
        raise


# Files


def check_saving(config: RecipeConfig) -> None:
    """Raises InvalidValueError for milestones that are never saved, and for a place of copies that is no URL."""
    every, interval, place = config.checkpoint.keep_every, config.save_interval, config.checkpoint.copy_to
    if every and (interval == 0 or every % interval):
        raise InvalidValueError(
            f"checkpoint.keep_every={every} must be a multiple of save_interval={interval}, since other steps are not "
            f"saved. Use save_interval={every}, or a multiple of it for checkpoint.keep_every"
        )
    if place is not None:
        check_url(place, "checkpoint.copy_to")


def check_data(config: RecipeConfig) -> None:
    """Raises DataError (4002) for a prompt file that does not exist, naming the most similar file of its folder."""
    for path, key, variable in (
        (config.data_path, "data_source.data_path", "DATA_PATH"),
        (config.evaluation.data_path, "evaluation.data_path", "EVAL_DATA_PATH"),
    ):
        if path is None or Path(path).expanduser().is_file():
            continue
        file = Path(path).expanduser()
        if file.exists():
            kind = (
                "a folder: name a file in it" if file.is_dir() else "a pipe, a socket or a device. Give a regular file"
            )
            raise DataError(f"{key}={path} is {kind}, by {key}=... or {variable}")
        folder = file.parent
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        similar = difflib.get_close_matches(Path(path).name, names, 1)
        hint = f" Did you mean '{folder / similar[0]}'?" if similar else ""
        raise DataError(
            f"{key}={path}: there is no such file (seen from {Path.cwd()}).{hint} Set {key}=... or {variable}"
        )


def check_disk(directory: Path, num_bytes: float, what: str) -> None:
    """Refuses to start a run whose checkpoints do not fit on the disk.

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
