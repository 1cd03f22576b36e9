"""Families of diffusers checkpoints: their configuration files, their classes, and how their modules are built.

    model_index.json                 component -> [library, class], and settings of the pipeline
    <component>/config.json          the configuration of a network or a VAE
    scheduler/scheduler_config.json  the configuration of the scheduler

A family declares the classes that its checkpoints use and derives `LatentFacts` from their configurations. This module
finds, checks, builds and loads the components of every family. Nothing is loaded until it is needed: classes are
named by strings, and diffusers and transformers are imported by the functions that build.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unirl.config.errors import NotFoundError
from unirl.models.loading.estimate import ModelEstimate, linears_of, parameters_of
from unirl.models.loading.hub import MODEL_INDEX, components, model_directory, read_json
from unirl.types.facts import LatentFacts

if TYPE_CHECKING:
    from torch import nn

Config = Mapping[str, Any]
TOY = "toy"
SCHEDULER = "scheduler"
EXTENDS = "extends"


@dataclass(frozen=True, kw_only=True)
class ModelConfigs:
    """The configurations of one model, without its weights."""

    components: Mapping[str, Config]
    """Configuration of each network and of the VAE, by component name. An absent component is not part of the model."""
    scheduler: Config
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the pipeline in model_index.json (`boundary_ratio`, `is_distilled`, ...)."""
    pipeline: str = ""
    """The diffusers pipeline class, if it is one of `DiffusersFamily.further_pipelines`; otherwise empty."""
    guiders: Mapping[str, Config] = field(default_factory=dict)
    """Configuration of each guider, by component name."""

    def __contains__(self, component: str) -> bool:
        return component in self.components


def read_entries(path: Path) -> dict[str, Config]:
    """The entries of a configuration file (`published.json`, `toy.json`), by name.

    An entry with the key `extends` starts as a copy of the earlier entry that this key names; nested objects are
    merged and all other values are replaced.
    """
    entries: dict[str, Config] = {}
    for name, entry in read_json(path).items():
        base = entries[entry.pop(EXTENDS)] if EXTENDS in entry else {}
        entries[name] = _merged(base, entry)
    return entries


def read_configs(path: Path) -> dict[str, ModelConfigs]:
    """The models of a configuration file of a diffusers family, by name."""
    return {name: ModelConfigs(**entry) for name, entry in read_entries(path).items()}


def _merged(base: Config, changes: Config) -> Config:
    both = {name: _merged(base[name], value) for name, value in changes.items() if isinstance(base.get(name), Mapping)}
    return {**base, **changes, **both}


@dataclass(frozen=True, kw_only=True)
class DiffusersFamily:
    """The classes that the checkpoints of a family use, and the facts that follow from their configurations."""

    name: str
    pipeline: str
    """The diffusers pipeline class of the family's checkpoints."""
    further_pipelines: tuple[str, ...] = ()
    """Further diffusers pipeline classes with the same networks (image to video, editing)."""
    foreign_pipelines: Mapping[str, str] = field(default_factory=dict)
    """Pipeline classes whose checkpoints have the same networks but belong to another family. The value names the
    classes to use instead."""
    classes: Mapping[str, str]
    """`library.Class` of each component, by component name. The trained components come first."""
    trained: tuple[str, ...] = ("transformer",)
    tokenizers: tuple[str, ...] = ("tokenizer",)
    """Component names of tokenizers and processors."""
    optional: tuple[str, ...] = ()
    """Components that a checkpoint may lack."""
    guiders: Mapping[str, str] = field(default_factory=dict)
    """`library.Class` of each guider, by component name. A guider has a `<name>/<name>_config.json` and no weights."""
    facts: Callable[[ModelConfigs, int], LatentFacts]
    """Derives the facts of a model from its configurations and the batch multiple."""
    toys: Mapping[str, ModelConfigs]
    """Tiny models of the same classes with fixed random weights, by the path that selects them; one is `toy`."""
    toy_tokenizers: Callable[[], Mapping[str, Any]]
    """Builds the tokenizers of the toys, by component name, without files."""
    published: Mapping[str, ModelConfigs] = field(default_factory=dict)
    """Public checkpoints by hub id, so that a run can be planned offline. Training reads the checkpoint's own files."""
    shipped: Mapping[str, Path] = field(default_factory=dict)
    """Directories of small models in this package, by the path that selects them."""
    seed: int = 20250
    """Seed of the toys' random weights."""
    uninitialised: tuple[str, ...] = ()
    """Name suffixes of parameters that their class leaves uninitialised. Toys fill them with normal noise."""

    # Configurations, without weights

    def configs(self, path: str, revision: str | None = None) -> ModelConfigs:
        """The configurations of a toy, a shipped model, a directory or a hub id.

        A published hub id needs no connection. Raises NotFoundError (4001) for a checkpoint of another family.
        """
        if self.is_toy(path):
            return self.toys[path]
        if path in self.published and revision is None:
            return self.published[path]
        return self.read(self.directory(path, revision, configs_only=True))

    def is_toy(self, path: str) -> bool:
        """True if `path` selects a toy."""
        return path in self.toys

    def directory(self, path: str, revision: str | None, *, configs_only: bool = False) -> Path:
        """The directory of a shipped model, of a local model, or of a downloaded copy of a hub id."""
        return model_directory(str(self.shipped.get(path, path)), revision, configs_only=configs_only)

    def read(self, root: Path) -> ModelConfigs:
        """The configurations in a model directory. Raises NotFoundError (4001) for a model of another family."""
        present = components(root)
        self._check_classes(root, present)
        index = read_json(root / MODEL_INDEX)
        pipeline = str(index.get("_class_name", ""))
        if pipeline in self.foreign_pipelines:
            raise NotFoundError(
                f"{root}: {MODEL_INDEX} names {pipeline}, but this bundle ({self.name}) reads checkpoints of "
                f"{self.pipeline}. Use {self.foreign_pipelines[pipeline]}"
            )
        return ModelConfigs(
            components={name: read_json(root / name / "config.json") for name in self.classes if name in present},
            scheduler=read_json(root / SCHEDULER / "scheduler_config.json"),
            settings={k: v for k, v in index.items() if not k.startswith("_") and not isinstance(v, list)},
            pipeline=pipeline if pipeline in self.further_pipelines else "",
            guiders={name: read_json(root / name / f"{name}_config.json") for name in self.guiders if name in present},
        )

    def _check_classes(self, root: Path, present: Mapping[str, tuple[str, str]]) -> None:
        """Raises NotFoundError (4001) if a required component is missing or a trained one has another class."""
        for name, path in self.classes.items():
            if name not in present and name not in self.optional:
                raise NotFoundError(
                    f"{root}: {MODEL_INDEX} names no {name}, which every {self.name} model has. Use the bundle of that "
                    "model's family, or another path"
                )
            if name in self.trained and name in present and present[name][1] != _class_name(path):
                raise NotFoundError(
                    f"{root}: its {name} is {present[name][1]}, but this bundle ({self.name}) reads "
                    f"{_class_name(path)}. Use the bundle of that family, or another path"
                )

    def estimate(self, path: str, revision: str | None = None) -> ModelEstimate:
        """Parameter counts by component, counted on modules without storage."""
        configs = self.configs(path, revision)
        facts = self.facts(configs, 1)
        with torch.device("meta"):
            modules = {name: self.build(configs, name) for name in configs.components}
        trained = {name: modules[name] for name in self.trained if name in modules}
        single = len(trained) == 1
        linears = {
            name if single else f"{component}.{name}": shape
            for component, module in trained.items()
            for name, shape in linears_of(module).items()
        }
        blocks = [m for part in trained.values() for m in part.modules() if type(m).__name__ in facts.block_class_names]
        sizes = {name: parameters_of(module) for name, module in modules.items()}
        trained_size = sum(sizes.pop(name) for name in trained)
        return ModelEstimate(
            facts=facts,
            parameters={facts.trainable_attr: trained_size, **sizes},
            linears=linears,
            num_blocks=len(blocks),
            width=_width(linears, facts),
        )

    # Modules

    def build(self, configs: ModelConfigs, component: str) -> nn.Module:
        """A module with newly initialised weights, or without storage under the meta device."""
        module_class, config = self.class_of(component), dict(configs.components[component])
        if hasattr(module_class, "config_class"):  # transformers
            module: nn.Module = module_class(module_class.config_class(**config))
        else:
            module = module_class(**{name: value for name, value in config.items() if not name.startswith("_")})
        return module

    def build_empty(self, configs: ModelConfigs, component: str) -> nn.Module:
        """A module whose parameters have no storage. Its computed buffers do."""
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            return self.build(configs, component)

    def build_guider(self, configs: ModelConfigs, name: str) -> Any:
        """A new guider with the configured settings."""
        return self.class_of(name).from_config(dict(configs.guiders[name]))

    def class_of(self, component: str) -> Any:
        """The class of a network, a VAE or a guider."""
        path = {**self.classes, **self.guiders}[component]
        library, _, name = path.rpartition(".")
        if not library:
            raise ValueError(
                f"the family {self.name} reads its {component} by {path!r}. Write the library before the class, as in "
                "'diffusers.AutoencoderKL'"
            )
        return getattr(importlib.import_module(library), name)

    def random(self, configs: ModelConfigs, component: str, dtype: torch.dtype) -> nn.Module:
        """A component of a toy. Its random weights are always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + (self.trained.index(component) if component in self.trained else 0))
            module = self.build(configs, component)
            for name, parameter in module.named_parameters():
                if self.uninitialised and name.endswith(self.uninitialised):
                    torch.nn.init.normal_(parameter, std=0.02)
        return module if dtype == torch.float32 else module.to(dtype)

    def load(self, root: Path, component: str, dtype: torch.dtype) -> nn.Module:
        """A component with the weights in a directory. Raises NotFoundError (4001) if they cannot be read."""
        try:
            module: nn.Module = self.class_of(component).from_pretrained(root, subfolder=component, dtype=dtype)
        except (OSError, ValueError, RuntimeError) as error:
            # The libraries raise these three for missing, truncated and mismatching weight files.
            reason = str(error).strip().splitlines()[0]
            raise NotFoundError(
                f"cannot load {component} of the model in {root}: {reason}. Download it again"
            ) from error
        return module


def _class_name(path: str) -> str:
    return path.rpartition(".")[2]


def _width(linears: Mapping[str, tuple[int, int]], facts: LatentFacts) -> int:
    """The width of a token: the input size of the first layer that takes adapters. Raises ValueError if none does."""
    for target in facts.lora_targets:
        for name, (inputs, _) in linears.items():
            if f".{name}".endswith(f".{target}"):
                return inputs
    raise ValueError(
        f"facts.lora_targets of {facts.family}: the trained network has no linear layer named "
        f"{' or '.join(facts.lora_targets)}; it has {', '.join(list(linears)[:4])}, ..."
    )
