"""What a checkpoint in the layout of diffusers is made of, known from its configuration files alone.

    model_index.json                 component -> [library, class]; a few settings of the pipeline
    <component>/config.json          of a network or a VAE
    scheduler/scheduler_config.json  and tokenizers in files of their own

A family says which classes it reads and what they imply (`LatentFacts`); how files are found, judged, built and loaded
is written here.
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


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The configurations of one checkpoint."""

    configs: Mapping[str, Config]
    """Of networks and VAE, by component name in the family's order; what is absent is not part of it."""
    scheduler: Config
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What model_index.json says of the pipeline itself (`boundary_ratio`, `is_distilled`, ...)."""
    pipeline: str = ""
    """Its class of diffusers, where a family has several; empty = the family's own."""
    parts: Mapping[str, Config] = field(default_factory=dict)
    """Of further objects without weights (`guider`), by component name."""

    def __contains__(self, component: str) -> bool:
        return component in self.configs


@dataclass(frozen=True, kw_only=True)
class DiffusersFamily:
    """The classes that a family's checkpoints are made of, and what they imply."""

    name: str
    pipeline: str
    """The class of diffusers that the checkpoints belong to."""
    further_pipelines: tuple[str, ...] = ()
    """Of other checkpoints of the same networks (image to video, editing), which are told apart by it."""
    foreign_pipelines: Mapping[str, str] = field(default_factory=dict)
    """Of checkpoints of the same networks that another family reads: class of diffusers to what to use."""
    classes: Mapping[str, str]
    """Component name to `library.Class`; those that are trained come first."""
    trained: tuple[str, ...] = ("transformer",)
    tokenizers: tuple[str, ...] = ("tokenizer",)
    """Tokenizers and processors, by component name."""
    optional: tuple[str, ...] = ()
    """Components that a checkpoint may leave out."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Objects without weights beside the scheduler, which have a `<name>/<name>_config.json`: to `library.Class`."""
    facts: Callable[[Checkpoint, int], LatentFacts]
    """What the rest of the system needs to know of a checkpoint; the number is the batch multiple."""
    toy: Checkpoint
    """The same classes, tiny, with fixed random weights."""
    toys: Mapping[str, Checkpoint] = field(default_factory=dict)
    """Further toys of the family, by the path that names them (`toy-i2v`)."""
    toy_tokenizers: Callable[[], Mapping[str, Any]]
    """The toy's tokenizers, made without files."""
    published: Mapping[str, Checkpoint] = field(default_factory=dict)
    """Public checkpoints by hub id, for plans without a connection; a run reads the files."""
    shipped: Mapping[str, Path] = field(default_factory=dict)
    """Directories of small models that are shipped, by the path that names them."""
    seed: int = 20250
    """Of the toys' random weights."""
    uninitialised: tuple[str, ...] = ()
    """Name suffixes of parameters to which their class gives no values; the toys' are drawn."""

    # A checkpoint that is not loaded

    def checkpoint(self, path: str, revision: str | None = None) -> Checkpoint:
        """The configurations of a toy, a shipped model, a directory or a hub id, without reading weights.

        A hub id whose configurations are built in needs no connection. Raises DataError (4001) for another family's.
        """
        if self.is_toy(path):
            return self.toy if path == TOY else self.toys[path]
        if path in self.published and revision is None:
            return self.published[path]
        return self.read(self.directory(path, revision, configs_only=True))

    def is_toy(self, path: str) -> bool:
        """Whether `path` names a model with random weights."""
        return path == TOY or path in self.toys

    def directory(self, path: str, revision: str | None, *, configs_only: bool = False) -> Path:
        """The directory behind `path`: a shipped one, or what the user has or fetches."""
        return model_directory(str(self.shipped.get(path, path)), revision, configs_only=configs_only)

    def read(self, root: Path) -> Checkpoint:
        """The checkpoint in a model directory."""
        present = components(root)
        for name, wanted in self.classes.items():
            if name not in present and name not in self.optional:
                raise NotFoundError(
                    f"{root}: {MODEL_INDEX} names no {name}, and a {self.name} model has one. Use the bundle of that "
                    "model's family, or another path"
                )
            if name in self.trained and name in present and present[name][1] != _class_name(wanted):
                raise NotFoundError(
                    f"{root}: its {name} is {present[name][1]}, but this bundle ({self.name}) reads "
                    f"{_class_name(wanted)}. Use the bundle of that family, or another path"
                )
        index = read_json(root / MODEL_INDEX)
        named = str(index.get("_class_name", ""))
        if named in self.foreign_pipelines:
            raise NotFoundError(
                f"{root}: {MODEL_INDEX} names {named}, but this bundle ({self.name}) reads checkpoints of "
                f"{self.pipeline}. Use {self.foreign_pipelines[named]}"
            )
        return Checkpoint(
            configs={name: read_json(root / name / "config.json") for name in self.classes if name in present},
            scheduler=read_json(root / SCHEDULER / "scheduler_config.json"),
            settings={k: v for k, v in index.items() if not k.startswith("_") and not isinstance(v, list)},
            pipeline=named if named in self.further_pipelines else "",
            parts={name: read_json(root / name / f"{name}_config.json") for name in self.parts if name in present},
        )

    def estimate(self, path: str, revision: str | None = None) -> ModelEstimate:
        """Parameter counts by component, from modules that are built without storage."""
        checkpoint = self.checkpoint(path, revision)
        facts = self.facts(checkpoint, 1)
        with torch.device("meta"):
            modules = {name: self.build(checkpoint, name) for name in checkpoint.configs}
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

    # Its modules

    def build(self, checkpoint: Checkpoint, component: str) -> nn.Module:
        """A module with fresh weights (on the meta device: with none)."""
        module_class, config = self.class_of(component), dict(checkpoint.configs[component])
        if hasattr(module_class, "config_class"):  # transformers
            module: nn.Module = module_class(module_class.config_class(**config))
        else:
            module = module_class(**{name: value for name, value in config.items() if not name.startswith("_")})
        return module

    def build_empty(self, checkpoint: Checkpoint, component: str) -> nn.Module:
        """A module whose parameters have no storage; its computed buffers have theirs."""
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            return self.build(checkpoint, component)

    def build_part(self, checkpoint: Checkpoint, name: str) -> Any:
        """A new object without weights, as the checkpoint configures it."""
        return self.class_of(name).from_config(dict(checkpoint.parts[name]))

    def class_of(self, component: str) -> Any:
        """The class of a network, a VAE or an object without weights."""
        path = {**self.classes, **self.parts}[component]
        library, _, name = path.rpartition(".")
        if not library:
            raise ValueError(
                f"the family {self.name} reads its {component} by {path!r}. Write the library before the class, as in "
                "'diffusers.AutoencoderKL'"
            )
        return getattr(importlib.import_module(library), name)

    def random(self, checkpoint: Checkpoint, component: str, dtype: torch.dtype) -> nn.Module:
        """A toy's component: the same random weights whenever and wherever it is built."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + (self.trained.index(component) if component in self.trained else 0))
            module = self.build(checkpoint, component)
            for name, parameter in module.named_parameters():
                if self.uninitialised and name.endswith(self.uninitialised):
                    torch.nn.init.normal_(parameter, std=0.02)
        return module if dtype == torch.float32 else module.to(dtype)

    def load(self, root: Path, component: str, dtype: torch.dtype) -> nn.Module:
        """A component with the weights of a directory. Raises DataError (4001) where they cannot be read."""
        try:
            module: nn.Module = self.class_of(component).from_pretrained(root, subfolder=component, dtype=dtype)
        except (OSError, ValueError, RuntimeError) as error:
            # The libraries raise these three for missing, cut and foreign weight files.
            reason = str(error).strip().splitlines()[0]
            raise NotFoundError(
                f"cannot load {component} of the model in {root}: {reason}. Download it again"
            ) from error
        return module


def _class_name(path: str) -> str:
    return path.rpartition(".")[2]


def _width(linears: Mapping[str, tuple[int, int]], facts: LatentFacts) -> int:
    """Numbers of a token, which the first layer that takes adapters reads. Raises ValueError where there is none."""
    for target in facts.lora_targets:
        for name, (inputs, _) in linears.items():
            if f".{name}".endswith(f".{target}"):
                return inputs
    raise ValueError(
        f"facts.lora_targets of {facts.family}: the trained network has no linear layer named "
        f"{' or '.join(facts.lora_targets)}; it has {', '.join(list(linears)[:4])}, ..."
    )
