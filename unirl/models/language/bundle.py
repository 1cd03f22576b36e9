"""The bundle of a language model: its network as a policy over tokens, and its tokenizer.

A `LanguageFamily` names the transformers classes of one architecture. This module finds, checks and loads checkpoints.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.base import Bundle, components_to_load
from unirl.models.chunks import batch_multiple
from unirl.models.language.chat import TextCodec
from unirl.models.language.policy import TokenPolicy, policy_class
from unirl.models.language.stage import ARStage
from unirl.models.language.tools import ToolBox
from unirl.models.loading.adapter_sources import AdapterLayers, adapter_file, read_peft
from unirl.models.loading.completeness import check_dtypes, check_files, check_tensors, read_headers
from unirl.models.loading.dtypes import cast_module, dtype_in
from unirl.models.loading.estimate import ModelEstimate, block_counts, linears_of, parameters_of, patches_of
from unirl.models.loading.hub import language_directory, quiet_libraries, read_json
from unirl.models.loading.saved_weights import (
    LANGUAGE_WEIGHTS,
    ModuleWeights,
    SafetensorsWeights,
    SavedWeights,
)
from unirl.types.device import CPU
from unirl.types.facts import LanguageFacts
from unirl.types.protocols import TORCH_DTYPES, DtypeName

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Config = Mapping[str, Any]
LM = "lm"
"""The trained component: the network with its output head. Most models have no other."""
LORA_TARGETS = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
VOCABULARIES = ("tokenizer.json", "vocab.json")
"""A saved tokenizer has at least one of these files."""


@dataclass(frozen=True, kw_only=True)
class LanguageFamily:
    """One language model architecture of the transformers library."""

    name: str
    """The `model_type` of its configuration files."""
    model_class: str
    config_class: str
    block: str
    """Class name of the layers of the language model."""
    policy: type[TokenPolicy] = TokenPolicy
    """The mixin class that makes the transformers class a policy."""
    parameter_name: Callable[[str], str] = str
    """Maps a tensor's name in the checkpoint files to its parameter name in the network."""
    reads_images: bool = False
    """True if prompts may contain images."""
    left_out: tuple[str, ...] = ()
    """Names of the parts of the network that its policy does not run, and is built without."""

    def network_class(self) -> type[PreTrainedModel]:
        """The class of transformers. It uses its own name to map older tensor names in files to current ones."""
        return getattr(importlib.import_module("transformers"), self.model_class)

    def configuration(self, config: Config) -> PretrainedConfig:
        """`config` as an object of transformers."""
        return getattr(importlib.import_module("transformers"), self.config_class).from_dict(dict(config))

    def policy_network(self, config: Config) -> TokenPolicy:
        """The policy, without storage for its parameters. Computed buffers have storage and values."""
        from accelerate import init_empty_weights

        # mypy does not see that classes are hashable.
        kind = policy_class(self.network_class(), self.policy)  # type: ignore[arg-type]
        with init_empty_weights(include_buffers=False):
            network = kind(self.configuration(config))
        for name in self.left_out:
            parent, _, own_name = name.rpartition(".")
            delattr(network.get_submodule(parent), own_name)
        return network

    def weights_of_policy(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the whole network that its policy has."""
        prefixes = tuple(f"{name}." for name in self.left_out)
        return {name: tensor for name, tensor in state.items() if not name.startswith(prefixes)}


class DecoderSizes(TypedDict):
    """Four fields of `LanguageFacts`."""

    vocab_size: int
    hidden_size: int
    context_length: int
    cache_width: int


class LanguageBundle(Bundle):
    """A causal language model of the transformers library, trained as a `TokenPolicy`."""

    toy: ClassVar[Mapping[str, object]] = {"path": "toy", "dtype": "fp32"}
    component_names: ClassVar[tuple[str, ...]] = (LM,)
    """The names of all components."""
    families: ClassVar[Mapping[str, LanguageFamily]]
    """The supported architectures by `model_type`."""
    toys: ClassVar[Mapping[str, Config]]
    """Configurations of models with random weights, by their `path`."""
    published: ClassVar[Mapping[str, Config]]
    """Configurations of public checkpoints by hub id, for plans without a connection. A run reads the files."""
    seed: int = 20251
    """Seed of the random weights of the tiny models."""
    shipped: ClassVar[Mapping[str, Path]]
    """The directories of the models that come with this package, by their `path`."""
    toy_tokenizer: ClassVar[Callable[[], PreTrainedTokenizerBase]]
    """Builds the tokenizer of the tiny models. It needs no files."""
    facts: LanguageFacts

    def __init__(
        self,
        device: torch.device = CPU,
        components: Sequence[str] | None = None,
        *,
        path: str,
        revision: str | None = None,
        dtype: DtypeName = "bf16",
        meta_init: bool = False,
    ) -> None:
        """
        Args:
            components: the components to load. None loads all.
            path: a hub id, a directory that transformers wrote, `toy` (tiny, random weights), `random:<hub id>` of a
                Qwen3 model (its sizes, random weights) or `quickstart` (a small trained model that is part of this
                package).
            revision: branch, tag or commit of a hub id.
            dtype: the dtype in which the network computes.
            meta_init: leave the network without storage. The train backend then reads only the rows of its shards.
        """
        names = components_to_load(components, self.component_names, LM)
        self.path = path
        self.revision = revision
        self.config = self.config_of(path, revision)
        self.family = self.families[self.config["model_type"]]
        facts, torch_dtype = self._facts(self.config, device), TORCH_DTYPES[dtype]
        with quiet_libraries():
            network = self._empty(torch_dtype)
            if not meta_init:
                weights = self._plain(torch_dtype).state_dict()
                network.load_state_dict(self.family.weights_of_policy(weights), assign=True)
                network.tie_weights()
            self.codec = self._load_codec()
            frozen = self._load_frozen(names)
        super().__init__({LM: network, **frozen}, facts, dtype=torch_dtype, device=device)

    # Facts about a model that is not loaded

    @classmethod
    def config_of(cls, path: str, revision: str | None = None) -> Config:
        """Read the configuration of a model, but no weights. Raises DataError for a model of another family."""
        if path in cls.toys:
            return cls.toys[path]
        root = cls.directory_of(path, revision, configs_only=True)
        config: Config = read_json(root / "config.json")
        if config.get("model_type") not in cls.families:
            raise NotFoundError(
                f"{root}: its config.json has model_type={config.get('model_type')!r}, but {cls.__name__} reads "
                f"{', '.join(map(repr, cls.families))}. Use the bundle of that family, or another path"
            )
        if text_config(config).get("use_sliding_window"):
            raise NotFoundError(
                f"{root}: its config.json has use_sliding_window=true, and sliding-window attention is not available. "
                "Use a model without it, such as the published Qwen models"
            )
        return config

    @classmethod
    def _config_to_plan(cls, path: str, revision: str | None) -> Config:
        return cls.published[path] if path in cls.published and revision is None else cls.config_of(path, revision)

    @classmethod
    def directory_of(cls, path: str, revision: str | None = None, *, configs_only: bool = False) -> Path:
        """The local directory of the model that `path` selects."""
        return language_directory(str(cls.shipped.get(path, path)), revision, configs_only=configs_only)

    @classmethod
    def facts_of(cls, path: str, revision: str | None = None, device: torch.device = CPU) -> LanguageFacts:
        """The facts of a model that is not loaded. They come from its configuration file."""
        config = cls._config_to_plan(path, revision)
        return cls._facts(config, device)

    @classmethod
    def _facts(cls, config: Config, device: torch.device = CPU) -> LanguageFacts:
        return language_facts(cls.families[config["model_type"]], config, device)

    @classmethod
    def estimate(cls, path: str, revision: str | None = None) -> ModelEstimate:
        """The sizes of a model that is not loaded. A vision tower counts as part of the network."""
        config = cls._config_to_plan(path, revision)
        family = cls.families[config["model_type"]]
        with quiet_libraries():
            network = family.policy_network(config)
            network.tie_weights()  # so that a shared weight counts once
        facts = cls.facts_of(path, revision)
        return ModelEstimate(
            facts=facts,
            parameters={LM: parameters_of(network)},
            linears=linears_of(network),
            patches=patches_of(network),
            **block_counts(network, facts),
            width=facts.hidden_size,
            cache_width=facts.cache_width,
        )

    # The loaded model

    def stage(self, tools: ToolBox | None = None, use_cuda_graphs: bool = False) -> ARStage:
        """The stage that samples and replays responses with the trained network."""
        return ARStage(self.trainable(), self.facts, self.codec, self.dtype, tools, use_cuda_graphs)

    def spell(self, tokens: Sequence[int]) -> tuple[str, ...]:
        return self.codec.pieces(tokens)

    def saved(self) -> SavedWeights:
        if self.path in self.toys:
            return ModuleWeights(self.untrained())
        root = self.directory_of(self.path, self.revision)
        kind = self.family.network_class()
        return SafetensorsWeights(
            root, lambda name: dtype_in(kind, name, self.dtype), LANGUAGE_WEIGHTS, self.family.parameter_name
        )

    def saved_at(self, path: str, revision: str | None = None) -> SavedWeights:
        other = copy(self)
        other.path, other.revision, other.config = path, revision, self.config_of(path, revision)
        other.seed = self.seed + 1  # two checkpoints differ, those of tiny models too
        return other.saved()

    def read_adapter(self, path: str) -> AdapterLayers:
        return read_peft(adapter_file(path), lambda: self.family.policy_network(self.config))

    def untrained(self) -> PreTrainedModel:
        """Load a second network on the CPU, of the plain transformers class, with the checkpoint's weights."""
        with quiet_libraries():
            return self._plain(self.dtype).requires_grad_(False).eval()

    def _plain(self, dtype: torch.dtype) -> PreTrainedModel:
        """The network as the plain transformers class, which reads the checkpoint's weights."""
        kind = self.family.network_class()
        if self.path not in self.toys:
            return load_network(kind, self.directory_of(self.path, self.revision), dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = kind(self.family.configuration(self.config))
        cast_module(network, dtype)
        return network

    def _empty(self, dtype: torch.dtype) -> TokenPolicy:
        """Build the policy without storage for its parameters."""
        network = self.family.policy_network(self.config)
        cast_module(network, dtype)
        network.tie_weights()
        return network

    def _load_frozen(self, names: Sequence[str]) -> Mapping[str, nn.Module]:
        """The frozen components among `names`, such as the decoder of image tokens."""
        return {}

    def _load_codec(self) -> TextCodec:
        if self.path in self.toys:
            tokenizer, generation = type(self).toy_tokenizer(), {}
        else:
            root = self.directory_of(self.path, self.revision)
            tokenizer, file = load_tokenizer(root), root / "generation_config.json"
            generation = read_json(file) if file.is_file() else {}
        highest, size = max(tokenizer.get_vocab().values()), text_config(self.config)["vocab_size"]
        if highest >= size:
            raise NotFoundError(
                f"{self.path}: its tokenizer has token {highest}, and the network embeds {size} tokens, so "
                "they belong to different checkpoints. Download both again"
            )
        return TextCodec(tokenizer, end_tokens(tokenizer, text_config(self.config), generation))


def language_facts(family: LanguageFamily, config: Config, device: torch.device = CPU) -> LanguageFacts:
    """The facts about a model that other packages read."""
    text = text_config(config)
    head_width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return LanguageFacts(
        family=family.name,
        trainable_attr=LM,
        block_class_names=(family.block,),
        lora_targets=LORA_TARGETS,
        batch_multiple=batch_multiple(device),
        condition_images=(0, None if family.reads_images else 0),
        **decoder_sizes(text, head_width),
    )


def decoder_sizes(config: Config, head_width: int) -> DecoderSizes:
    """The sizes of a causal decoder whose configuration has the usual keys."""
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "context_length": config["max_position_embeddings"],
        "cache_width": 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_width,
    }


def text_config(config: Config) -> Config:
    """The language model's part of a configuration that also describes other parts, such as a vision tower."""
    return config.get("text_config", config)


def load_network(kind: type[PreTrainedModel], root: Path, dtype: torch.dtype, **layout: Any) -> PreTrainedModel:
    """Load the network in `root` as the transformers class `kind`. Raises DataError if a weight is missing.

    `layout` has arguments of `from_pretrained` for a folder with another configuration or names. Further weights are
    ignored: files often hold a head that is tied to the embeddings.
    """
    place = f"the model in {root}"
    check_files(place, root, LANGUAGE_WEIGHTS)
    options = {"local_files_only": True, "use_safetensors": True, "ignore_mismatched_sizes": True}
    try:
        network, info = kind.from_pretrained(root, dtype=dtype, output_loading_info=True, **layout, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        # The libraries raise these four types for missing, truncated and unknown weight files.
        reason = str(error).strip().splitlines()[0]
        raise NotFoundError(f"cannot load {place}: {reason}. Download it again") from error
    check_dtypes(place, network, read_headers(place, root, LANGUAGE_WEIGHTS), info["unexpected_keys"])
    check_tensors(place, kind.__name__, info, may_have_more=True)
    return network


def load_tokenizer(root: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `root`. Raises DataError if its files are missing or damaged."""
    from transformers import AutoTokenizer

    # Without any of these files, the library builds a tokenizer with an empty vocabulary.
    if not any((root / name).is_file() for name in VOCABULARIES):
        raise NotFoundError(
            f"cannot load the tokenizer in {root}: the folder has none of {', '.join(VOCABULARIES)}. Save the "
            "tokenizer there with `tokenizer.save_pretrained`, too"
        )
    try:
        return AutoTokenizer.from_pretrained(root, local_files_only=True)
    except (OSError, ValueError) as error:  # raised for missing and invalid files
        reason = str(error).strip().splitlines()[0]
        raise NotFoundError(f"cannot load the tokenizer in {root}: {reason}. Download it again") from error


def end_tokens(tokenizer: PreTrainedTokenizerBase, *configs: Config) -> tuple[int, ...]:
    """The ids of the tokens that end a response: the tokenizer's, and those of the given configurations."""
    token_ids: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for config in configs:
        eos = config.get("eos_token_id")
        token_ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(sorted(set(token_ids)))
