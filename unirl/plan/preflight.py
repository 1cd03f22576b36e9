"""All checks that need a whole recipe and no loaded model, and the notices that a user should see once.

Algorithms declare what they need, engines and rewards what they can do, and models what they know of themselves.
`preflight` joins these declarations on the driver, before any process starts.
"""

from __future__ import annotations

import difflib
import inspect
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
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
from unirl.config.recipe import RecipeConfig
from unirl.config.schema import dotted_name
from unirl.plan.compatibility import KEPT_BY, check_compatibility, reads_snapshot
from unirl.plan.geometry import Geometry, check_geometry, geometry_of
from unirl.plan.layout import check_layout, layout_notices
from unirl.plan.placement import PlacementPlan, plan_of
from unirl.train.backend.module_setup import check_component
from unirl.types.facts import ModelFacts
from unirl.types.protocols import Needs
from unirl.types.sampling import Sampling, sampling_as

OPTIONAL_IN_EVALUATION = ("num_inference_steps", "guidance_scale", "temperature", "top_p", "top_k", "max_new_tokens")
"""Keys of the evaluation block that only the sampling settings of some domains have."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@runtime_checkable
class KnownModel(Protocol):
    """A bundle class that can describe a model without loading it."""

    @staticmethod
    def facts_of(path: str, revision: str | None = None) -> ModelFacts:
        """The facts, read from configuration files alone."""
        ...


@dataclass(frozen=True)
class Preflight:
    """The result of the checks, for a recipe that may start."""

    geometry: Geometry
    plan: PlacementPlan
    notices: tuple[str, ...] = field(default=())
    """Settings without effect and values from the environment, to be shown once."""

    def print_notices(self) -> None:
        """Print the notices to stderr."""
        for notice in self.notices:
            print(f"unirl: {notice}", file=sys.stderr)


def preflight(recipe: Recipe) -> Preflight:
    """Checks the parts of a recipe against each other.

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
    check_compatibility(config, needs, plan)
    check_model(config)
    check_sampling(config, needs)
    check_evaluation(config)
    check_data(config)
    return Preflight(geometry, plan, tuple(notices(recipe, plan, geometry, needs)))


def needs_of(config: RecipeConfig) -> Needs:
    """The needs that the recipe's algorithm declares."""
    needs: Needs = build(config.algorithm).needs
    return needs


# Sampling and model


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
    try:
        sampling_as(algorithm.sampled_by, sampling, f"{loss} trains what is sampled by")
    except ValueError as error:
        raise IncompatibleError(str(error)) from error
    algorithm.check_sampling(sampling)
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
    """Every evaluation setting must be one that the sampling settings read."""
    sampling: Sampling = build(config.sampling)
    for key in OPTIONAL_IN_EVALUATION:
        value = vars(config.evaluation)[key]
        if value is not None and key not in sampling.evaluation_keys:
            raise IncompatibleError(
                f"evaluation.{key}={value}: {type(sampling).__name__} has no such setting. Write ~evaluation.{key}. "
                f"Evaluation can set {', '.join(sampling.evaluation_keys)}"
            )


def check_model(config: RecipeConfig) -> None:
    """A local model directory must exist, and the model must be able to sample as the recipe says."""
    if config.model_path is not None:
        check_model_path(config.model_path, config.bundle.path)
    for name, source in (config.backend.values.get("snapshots") or {}).items():
        check_model_path(source.values["path"], f"backend.snapshots.{name}")
    sampling: Sampling = build(config.sampling)
    sized = [(f"data_source.sizes={list(size)}: ", _at_size(sampling, size)) for size in sizes_of(config)]
    facts = known_facts(config)
    if facts is not None:
        check_component(config.backend.get("trainable_attr", str), facts)
        evaluation = sampling.for_evaluation(config.evaluation.settings(sampling.evaluation_keys))
        for where, settings in (("", sampling), ("in evaluations, ", evaluation), *sized):
            _check_fit(facts, settings, where)


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


def _at_size(sampling: Sampling, size: tuple[int, int]) -> Sampling:
    try:
        return sampling.at_size(*size)
    except ValueError as error:
        raise IncompatibleError(str(error)) from error


def check_model_path(path: str, key: str) -> None:
    """Raises NotFoundError (4001) for text that is written like a directory and names none."""
    spelled_as_path = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if spelled_as_path and not Path(path).expanduser().is_dir():
        raise NotFoundError(
            f"{key}.path={path}: there is no such directory. Give a directory that diffusers or transformers saved, or "
            f"a hub id, in {key}.path=... or PRETRAINED_MODEL"
        )


def known_facts(config: RecipeConfig) -> ModelFacts | None:
    """The facts of the recipe's model, without loading it.

    None if the bundle class cannot tell, or if a hub id cannot be read now. The run itself reports the latter.
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
    """The prompt files must exist."""
    check_data_path(config.data_path, "data_source.data_path", "DATA_PATH")
    check_data_path(config.evaluation.data_path, "evaluation.data_path", "EVAL_DATA_PATH")


def check_data_path(path: str | Path | None, key: str, variable: str) -> None:
    """Raises DataError (4002) for a file that does not exist, naming the most similar file of its folder."""
    if path is None or Path(path).expanduser().is_file():
        return
    folder = Path(path).expanduser().parent
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    similar = difflib.get_close_matches(Path(path).name, names, 1)
    hint = f" Did you mean '{folder / similar[0]}'?" if similar else ""
    raise DataError(f"{key}={path}: there is no such file (seen from {Path.cwd()}).{hint} Set {key}=... or {variable}")


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


# Notices


def notices(recipe: Recipe, plan: PlacementPlan, geometry: Geometry, needs: Needs) -> Iterator[str]:
    """Settings without effect, and values that the environment set."""
    config = recipe.config
    yield from layout_notices(config, plan, geometry.num_samples)
    if geometry.samples_per_prompt == 1 and config.advantage.get("scope", str) == "group" and needs.advantages:
        yield "sampling.samples_per_prompt=1: a group of one has no advantage, so nothing is learned"
    if geometry.micro_batch_tokens is not None and config.scale == "full" and geometry.micro_batch_size != 1:
        yield (
            f"stack.micro_batch_size={geometry.micro_batch_size} has no effect: stack.micro_batch_tokens cuts the rows"
        )
    yield from _idle_backend_blocks(config, needs)
    for layer in recipe.composed.layers:
        if layer.source == "environment":
            yield from (f"{path} is set by the environment variable {name}" for path, name in layer.places.items())


def _idle_backend_blocks(config: RecipeConfig, needs: Needs) -> Iterator[str]:
    loss, blocks = config.algorithm.class_name, config.backend.values
    if blocks.get("value_cfg") is not None and not needs.value:
        yield f"backend.value_cfg has no effect: {loss} trains no value head"
    # `ema` may also be evaluated and exported; only the loss reads `old`.
    if blocks.get(KEPT_BY["old"]) is not None and not reads_snapshot(needs, "old"):
        yield (
            f"backend.ema_lora_cfg has no effect on training: {loss} neither reads nor samples from the weight "
            "snapshot 'old'. Write ~backend.ema_lora_cfg"
        )
