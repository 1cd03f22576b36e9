"""Qwen3 from transformers classes: a hub id, a directory, the toy, or the shipped quick start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from unirl.config.errors import DataError
from unirl.models.base import chosen
from unirl.models.chat import TextCodec
from unirl.models.estimate import ModelEstimate, language_estimate
from unirl.models.hub import NOT_FOUND, language_directory, read_json
from unirl.models.language import LanguageBundle, end_tokens, load_network, load_tokenizer, require_vocabulary
from unirl.models.quiet import quiet_libraries
from unirl.models.qwen3.toy import SEED, TOY, toy_tokenizer
from unirl.models.saved import LANGUAGE_WEIGHTS, ModuleWeights, SafetensorsWeights, SavedWeights
from unirl.models.token_policy import policy_class
from unirl.types.facts import LanguageFacts
from unirl.types.protocols import TORCH_DTYPES, DtypeName

CPU = torch.device("cpu")
SHIPPED = Path(__file__).parent / "quickstart"
LORA_TARGETS = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
LM = "lm"


class Qwen3Bundle(LanguageBundle):
    """The dense Qwen3 models."""

    toy: ClassVar[Mapping[str, object]] = {"path": "toy", "dtype": "fp32"}

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
            components: of a model that has only one.
            path: a hub id, a directory of transformers, `toy` (tiny, random) or `quickstart` (shipped).
            revision: branch, tag or commit of a hub id.
            dtype: what the network computes in.
            meta_init: leave the network without storage: the backend that trains it reads its shards only.
        """
        chosen(components, (LM,), LM)
        self.path = path
        self.revision = revision
        self.config = config_of(path, revision)
        facts = facts_of(self.config, path, device)
        torch_dtype = TORCH_DTYPES[dtype]
        with quiet_libraries():
            network = self._empty(torch_dtype) if meta_init else self._load(self._policy_class(), torch_dtype)
            codec = self._load_codec(facts)
        super().__init__({LM: network}, facts, codec, dtype=torch_dtype, device=device)

    @staticmethod
    def facts_of(path: str, revision: str | None = None, device: torch.device = CPU) -> LanguageFacts:
        """The facts of a model that is not loaded, from its configuration file."""
        return facts_of(config_of(path, revision), path, device)

    @staticmethod
    def estimate(path: str, revision: str | None = None) -> ModelEstimate:
        """Sizes of a model that is not loaded."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = config_of(path, revision)
        with quiet_libraries(), torch.device("meta"):
            network = Qwen3ForCausalLM(Qwen3Config(**config))
        return language_estimate(facts_of(config, path, CPU), network)

    def saved(self) -> SavedWeights:
        """The network's weights in the checkpoint."""
        if self.path == "toy":
            return ModuleWeights(self.untrained())
        return SafetensorsWeights(directory_of(self.path, self.revision), self.dtype, LANGUAGE_WEIGHTS)

    def untrained(self) -> nn.Module:
        """A second network on the CPU, of transformers' own class, with the checkpoint's weights."""
        from transformers import Qwen3ForCausalLM

        with quiet_libraries():
            return self._load(Qwen3ForCausalLM, self.dtype).requires_grad_(False).eval()

    @staticmethod
    def _policy_class() -> Any:
        from transformers import Qwen3ForCausalLM

        return policy_class(Qwen3ForCausalLM)

    def _load(self, kind: Any, dtype: torch.dtype) -> nn.Module:
        if self.path == "toy":
            return random_network(kind, self._transformers_config(), SEED).to(dtype)
        return load_network(kind, directory_of(self.path, self.revision), dtype)

    def _empty(self, dtype: torch.dtype) -> nn.Module:
        """The network whose parameters have no storage; its computed buffers have theirs."""
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            network = self._policy_class()(self._transformers_config())
        for parameter in network.parameters():
            parameter.data = parameter.data.to(dtype)
        network.tie_weights()
        return network

    def _transformers_config(self) -> Any:
        from transformers import Qwen3Config

        return Qwen3Config(**self.config)

    def _load_codec(self, facts: LanguageFacts) -> TextCodec:
        if self.path == "toy":
            tokenizer, generation = toy_tokenizer(), {}
        else:
            root = directory_of(self.path, self.revision)
            tokenizer, file = load_tokenizer(root), root / "generation_config.json"
            generation = read_json(file) if file.is_file() else {}
        require_vocabulary(tokenizer, facts, self.path)
        return TextCodec(tokenizer, end_tokens(tokenizer, self.config, generation))


def config_of(path: str, revision: str | None) -> Mapping[str, Any]:
    """The configuration of a model, without reading weights."""
    if path == "toy":
        return TOY
    root = directory_of(path, revision, configs_only=True)
    config = read_json(root / "config.json")
    if config.get("model_type") != "qwen3":
        raise DataError(
            f"{root}: its config.json says model_type={config.get('model_type')!r}, but Qwen3Bundle reads 'qwen3'. Use "
            "the bundle of that family, or another path",
            code=NOT_FOUND,
        )
    return config


def facts_of(config: Mapping[str, Any], path: str, device: torch.device) -> LanguageFacts:
    """What the rest of the system needs to know."""
    if config.get("use_sliding_window"):
        raise DataError(f"{path}: a sliding window is not written; Qwen's published models have none", NOT_FOUND)
    return LanguageFacts(
        family="qwen3",
        trainable_attr=LM,
        block_class_names=("Qwen3DecoderLayer",),
        lora_targets=LORA_TARGETS,
        batch_multiple=batch_multiple(device),
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        context_length=config["max_position_embeddings"],
    )


def batch_multiple(device: torch.device) -> int:
    """The tokens that forwards are filled to: on CPUs a token's bits are the same in any multiple of 4."""
    return 4 if device.type == "cpu" else 1


def directory_of(path: str, revision: str | None, *, configs_only: bool = False) -> Path:
    """The directory behind `path`, of which `quickstart` is the one that is shipped."""
    return language_directory(str(SHIPPED) if path == "quickstart" else path, revision, configs_only=configs_only)


def random_network(kind: Any, config: Any, seed: int) -> nn.Module:
    """A network of `config` with the same random weights whenever and wherever it is built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: nn.Module = kind(config)
    return network
