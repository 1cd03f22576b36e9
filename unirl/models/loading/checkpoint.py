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
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn

from unirl.config.errors import NotFoundError
from unirl.models.loading.completeness import check_dtypes, check_files, check_tensors, loading_info, read_headers
from unirl.models.loading.dtypes import cast_module, kept_parameters
from unirl.models.loading.estimate import (
    DecodingCost,
    ModelEstimate,
    block_counts,
    buffers_of,
    decoding_cost,
    linears_of,
    parameters_of,
    patches_of,
)
from unirl.models.loading.hub import MODEL_INDEX, components, model_directory, quiet_libraries, read_json
from unirl.models.loading.saved_weights import LANGUAGE_WEIGHTS, WEIGHTS
from unirl.types.facts import LatentFacts
from unirl.types.protocols import TORCH_DTYPES, DtypeName, VaeDtype
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Config = Mapping[str, Any]
TOY = "toy"
VAE = "vae"
SCHEDULER = "scheduler"
EXTENDS = "extends"
RANDOM = "random:"
"""Begins the path of a model with the sizes of a published one and random weights."""
ConfigT = TypeVar("ConfigT")
JOINT_ATTENTION = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
)
"""Linear layers of the attention that reads image and text tokens together (MMDiT), for `LatentFacts.lora_targets`."""
JOINT_BLOCK = (*JOINT_ATTENTION, *(f"{part}.net.{name}" for part in ("ff", "ff_context") for name in ("0.proj", "2")))
"""The same, and the feed-forward layers of both kinds of tokens."""


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


def read_entries(path: Path, base: Path | None = None) -> dict[str, Config]:
    """The entries of a configuration file (`published.json`, `toy.json`), by name.

    An entry with the key `extends` starts as a copy of the earlier entry that this key names; nested objects are
    merged and all other values are replaced.

    Args:
        base: a file whose entries may be extended as well.
    """
    entries: dict[str, Config] = {}
    others = {} if base is None else read_entries(base)
    for name, entry in read_json(path).items():
        start = {**others, **entries}[entry.pop(EXTENDS)] if EXTENDS in entry else {}
        entries[name] = _merged(start, entry)
    return entries


def read_configs(path: Path, base: Path | None = None) -> dict[str, ModelConfigs]:
    """The models of a configuration file of a diffusers family, by name. See `read_entries`."""
    return {name: ModelConfigs(**entry) for name, entry in read_entries(path, base).items()}


class FamilyFiles(TypedDict):
    """Two fields of a `DiffusersFamily`, read from `toy.json` and `published.json`."""

    toys: Mapping[str, ModelConfigs]
    published: Mapping[str, ModelConfigs]


def family_files(module: str, base: str | None = None) -> FamilyFiles:
    """The models in the files beside a family's module (its `__file__`).

    Args:
        base: the module of a family whose models those of this one may extend.
    """

    def read(name: str) -> dict[str, ModelConfigs]:
        return read_configs(Path(module).parent / name, None if base is None else Path(base).parent / name)

    published = read("published.json")
    return {"toys": with_random(read("toy.json"), published), "published": published}


def with_random(toys: Mapping[str, ConfigT], published: Mapping[str, ConfigT]) -> dict[str, ConfigT]:
    """The toys, and every published model as `random:<hub id>`: its sizes with fixed random weights and no files."""
    return {**toys, **{f"{RANDOM}{name}": configs for name, configs in published.items()}}


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
    """Models of the same classes with fixed random weights, by the path that selects them: tiny ones, of which one is
    `toy`, and those of `with_random`."""
    toy_tokenizers: Callable[[], Mapping[str, PreTrainedTokenizerBase]]
    """Builds the tokenizers of the toys, by component name, without files."""
    published: Mapping[str, ModelConfigs] = field(default_factory=dict)
    """Public checkpoints by hub id, so that a run can be planned offline. Training reads the checkpoint's own files."""
    shipped: Mapping[str, Path] = field(default_factory=dict)
    """Directories of small models in this package, by the path that selects them."""
    vae_in_bf16: bool = False
    """With `vae_dtype: auto`, the VAE computes in bf16 where the model does, as in diffusers' examples. False
    where a configuration of the VAE has `force_upcast` (SD3, FLUX, Z-Image, Lumina 2), and where the examples use
    float32 (Wan) or float16 (HunyuanVideo)."""
    prepare: Mapping[str, Callable[[nn.Module], None]] = field(default_factory=dict)
    """Functions that make a built or loaded component faster without changing its results, by component name."""
    seed: int = 20250
    """Seed of the toys' random weights."""
    uninitialised: tuple[str, ...] = ()
    """Name suffixes of parameters that their class leaves uninitialised. Toys fill them with normal noise."""

    def vae_dtype(self, choice: VaeDtype, dtype: DtypeName) -> torch.dtype:
        """The dtype in which the VAE computes.

        Args:
            dtype: that of the model.
        """
        if choice == "auto":
            return torch.bfloat16 if self.vae_in_bf16 and dtype == "bf16" else torch.float32
        return TORCH_DTYPES[choice]

    # Configurations, without weights

    def configs(self, path: str, revision: str | None = None) -> ModelConfigs:
        """The configurations of a toy, a shipped model, a directory or a hub id.

        A published hub id needs no connection. Raises NotFoundError (4001) for a checkpoint of another family.
        """
        if path in self.toys:
            return self.toys[path]
        if path in self.published and revision is None:
            return self.published[path]
        return self.read(self.directory(path, revision, configs_only=True))

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
            class_name = path.rpartition(".")[2]
            if name not in present and name not in self.optional:
                raise NotFoundError(
                    f"{root}: {MODEL_INDEX} names no {name}, which every {self.name} model has. Use the bundle of that "
                    "model's family, or another path"
                )
            if name in self.trained and name in present and present[name][1] != class_name:
                raise NotFoundError(
                    f"{root}: its {name} is {present[name][1]}, but this bundle ({self.name}) reads {class_name}. "
                    "Use the bundle of that family, or another path"
                )

    def estimate(self, path: str, revision: str | None = None) -> ModelEstimate:
        """Parameter counts by component, counted on modules without storage."""
        configs = self.configs(path, revision)
        facts = self.facts(configs, 1)
        with torch.device("meta"):
            modules = {name: self.build(configs, name) for name in configs.components}
        trained = {name: modules.pop(name) for name in self.trained if name in modules}
        network = nn.ModuleDict(trained) if len(trained) > 1 else next(iter(trained.values()))
        linears = linears_of(network)
        frozen = {name: parameters_of(module) for name, module in modules.items()}
        return ModelEstimate(
            facts=facts,
            parameters={facts.trainable_attr: parameters_of(network), **frozen},
            linears=linears,
            patches=patches_of(network),
            num_experts=len(trained),
            buffers=buffers_of(network),
            kept_in_fp32=sum(kept_in_fp32(module) for module in trained.values()),
            **block_counts(network, facts),
            width=_width(linears, facts),
        )

    def saved_matrices(self, path: str) -> set[str]:
        """Names of layers with a matrix of weights, in the files of the trained components of a shipped or local model.

        No class of the model is imported. Empty where the files are not here, or where not diffusers wrote them, since
        other libraries rename tensors when they load them.
        """
        root, names = Path(self.shipped.get(path, path)), set[str]()
        for component in self.trained:
            with suppress(NotFoundError, OSError, SafetensorError):  # loading the model reports them
                headers = read_headers(component, root / component, WEIGHTS)
                matrices = [name for name, saved in headers.items() if len(saved.shape) == 2]
                names |= {name.removesuffix(".weight") for name in matrices if name.endswith(".weight")}
        return names

    def decoding(
        self,
        path: str,
        sampling: DiffusionSamplingParams,
        revision: str | None = None,
        dtype: torch.dtype = torch.float32,
        tiled: bool = False,
    ) -> DecodingCost:
        """The cost of decoding one sample in `dtype`, in tiles or whole. Nothing, for a model without a VAE."""
        configs = self.configs(path, revision)
        if VAE not in configs:
            return DecodingCost()
        shape = self.facts(configs, 1).latent_shape(sampling)
        with torch.device("meta"):
            vae = self.build(configs, VAE)
        return vae_cost(vae, shape, dtype, tiled)

    # Modules

    def build(self, configs: ModelConfigs, component: str) -> nn.Module:
        """A module with newly initialised weights, or without storage under the meta device.

        Keys of the configuration that the class does not know are ignored, as by `from_pretrained`.
        """
        module_class, config = self.class_of(component), dict(configs.components[component])
        with quiet_libraries():
            if hasattr(module_class, "config_class"):  # transformers
                module: nn.Module = module_class(module_class.config_class.from_dict(config))
            else:
                module = module_class.from_config(config)
        return self._prepared(component, module)

    def _prepared(self, component: str, module: nn.Module) -> nn.Module:
        if component in self.prepare:
            self.prepare[component](module)
        return module

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
        cast_module(module, dtype)
        return module

    def load(self, root: Path, component: str, dtype: torch.dtype) -> nn.Module:
        """A component with the weights in a directory.

        Raises NotFoundError (4001) if they cannot be read, or are not exactly the weights of the component. Files of
        encoders and of the VAE may have further weights, which are ignored.
        """
        module_class, place = self.class_of(component), f"{component} of the model in {root}"
        check_files(place, root / component, self.weight_file(component))
        # diffusers refuses tensors of another shape by itself; transformers reports them only if told to ignore them.
        options = {"ignore_mismatched_sizes": True} if hasattr(module_class, "config_class") else {}
        module: nn.Module
        try:
            module, info = module_class.from_pretrained(
                root, subfolder=component, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            # The libraries raise these four for missing, truncated and mismatching weight files.
            reason = str(error).strip().splitlines()[0].split(" If you want")[0].rstrip(".")
            raise NotFoundError(f"cannot load {place}: {reason}. Download it again") from error
        saved = read_headers(place, root / component, self.weight_file(component))
        check_dtypes(place, module, saved, info["unexpected_keys"])
        check_tensors(place, module_class.__name__, info, may_have_more=component not in self.trained)
        return self._prepared(component, module)

    def check(self, root: Path, component: str, module: nn.Module, saved: Mapping[str, tuple[int, ...]]) -> None:
        """Raises NotFoundError (4001) unless a trained component has exactly the `saved` tensors."""
        module_class = self.class_of(component)
        unused = getattr(module_class, "_keys_to_ignore_on_load_unexpected", None) or ()
        saved = {name: shape for name, shape in saved.items() if not any(re.search(word, name) for word in unused)}
        info = loading_info(saved, {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()})
        check_tensors(f"{component} of the model in {root}", module_class.__name__, info, may_have_more=False)

    def weight_file(self, component: str) -> str:
        """The name of a component's weight file, which larger models split into several."""
        return LANGUAGE_WEIGHTS if hasattr(self.class_of(component), "config_class") else WEIGHTS


def vae_cost(vae: Any, latent_shape: tuple[int, ...], dtype: torch.dtype, tiled: bool) -> DecodingCost:
    """The cost of decoding one sample in `dtype`, in tiles or whole, with a VAE without storage."""
    channels, *frames, height, width = latent_shape
    vae.eval()
    with quiet_libraries():  # diffusers warns of casts in general
        vae.to(dtype)
    if tiled and hasattr(vae, "use_tiling"):  # the attribute of diffusers' VAEs that support it
        vae.enable_tiling()
    settings: Mapping[str, Any] = vae.config
    own_channels = settings.get("latent_channels") or settings["z_dim"]
    # Some models put squares of the VAE's latents into the channels of theirs.
    side = math.isqrt(channels // own_channels)
    has_frames = any(isinstance(part, nn.Conv3d) for part in vae.modules())
    shape = (1, own_channels, *(frames or (1,) * has_frames), height * side, width * side)
    return replace(decoding_cost(vae, shape), tiled=tiled)


def kept_in_fp32(network: nn.Module) -> int:
    """Number of parameters that stay in fp32 when the network is loaded in bf16."""
    kept = kept_parameters(network, torch.bfloat16)
    return sum(parameter.numel() for name, parameter in network.named_parameters() if name in kept)


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
