"""Qwen2.5-VL and Qwen3-VL from transformers classes: a hub id, a directory, a toy, or the shipped quick start."""

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
from unirl.models.language import LanguageBundle, end_tokens, require_vocabulary
from unirl.models.quiet import quiet_libraries
from unirl.models.qwen3.bundle import CPU, LM, LORA_TARGETS, batch_multiple, random_network
from unirl.models.qwen_vl.families import FAMILIES, Family, text_config
from unirl.models.qwen_vl.policy import QwenVLPolicy
from unirl.models.qwen_vl.sight import ImageCutter
from unirl.models.qwen_vl.toy import SEED, TOYS, toy_image_processor, toy_tokenizer
from unirl.models.saved import LANGUAGE_WEIGHTS, ModuleWeights, RenamedWeights, SafetensorsWeights, SavedWeights
from unirl.models.token_policy import policy_class
from unirl.types.facts import LanguageFacts
from unirl.types.protocols import TORCH_DTYPES, DtypeName

SHIPPED = Path(__file__).parent / "quickstart"
PROCESSOR = "preprocessor_config.json"


class QwenVLBundle(LanguageBundle):
    """The dense models of both generations. The vision tower is a part of the network, and frozen unless told."""

    toy: ClassVar[Mapping[str, object]] = {"path": "toy", "dtype": "fp32"}

    def __init__(
        self,
        device: torch.device = CPU,
        components: Sequence[str] | None = None,
        *,
        path: str,
        revision: str | None = None,
        dtype: DtypeName = "bf16",
        freeze_vision_tower: bool = True,
        meta_init: bool = False,
    ) -> None:
        """
        Args:
            components: of a model that has only one.
            path: a hub id, a directory of transformers, `toy` or `toy-qwen2.5` (tiny, random), or `quickstart`
                (shipped).
            revision: branch, tag or commit of a hub id.
            dtype: what the network computes in.
            freeze_vision_tower: only the language model is trained. Adapters never touch the tower.
            meta_init: leave the network without storage: the backend that trains it reads its shards only.
        """
        chosen(components, (LM,), LM)
        self.path = path
        self.revision = revision
        self.config = config_of(path, revision)
        self.family = FAMILIES[self.config["model_type"]]
        facts = facts_of(self.config, self.family, device)
        torch_dtype = TORCH_DTYPES[dtype]
        with quiet_libraries():
            network = self._empty(torch_dtype) if meta_init else self._policy(torch_dtype)
            tokenizer, self.image_processor, generation = self._load_processors()
        require_vocabulary(tokenizer, facts, path)
        codec = TextCodec(tokenizer, end_tokens(tokenizer, text_config(self.config), generation))
        super().__init__({LM: network}, facts, codec, dtype=torch_dtype, device=device)
        assert isinstance(network, QwenVLPolicy)
        network.levels = ImageCutter(self.image_processor).levels
        network.tower().requires_grad_(not freeze_vision_tower)

    @staticmethod
    def facts_of(path: str, revision: str | None = None, device: torch.device = CPU) -> LanguageFacts:
        """The facts of a model that is not loaded, from its configuration file."""
        config = config_of(path, revision)
        return facts_of(config, FAMILIES[config["model_type"]], device)

    @property
    def picture_token(self) -> int:
        """The token that stands for a picture before it is given its places."""
        return int(self.config["image_token_id"])

    def saved(self) -> SavedWeights:
        """The network's weights in the checkpoint."""
        if self.path in TOYS:
            return ModuleWeights(self.untrained())
        files = SafetensorsWeights(directory_of(self.path, self.revision), self.dtype, LANGUAGE_WEIGHTS)
        return RenamedWeights(files, self.family.parameter_name)

    def untrained(self) -> nn.Module:
        """A second network on the CPU, of transformers' own class, with the checkpoint's weights."""
        with quiet_libraries():
            return self._plain(self.dtype).requires_grad_(False).eval()

    @staticmethod
    def estimate(path: str, revision: str | None = None) -> ModelEstimate:
        """Sizes of a model that is not loaded; the vision tower is part of the network."""
        config = config_of(path, revision)
        family, load = FAMILIES[config["model_type"]], QwenVLBundle._transformers
        with quiet_libraries(), torch.device("meta"):
            network = load(family.model_class)(load(family.config_class).from_dict(dict(config)))
        return language_estimate(facts_of(config, family, CPU), network)

    @staticmethod
    def _transformers(name: str) -> Any:
        import transformers

        return getattr(transformers, name)

    def _policy(self, dtype: torch.dtype) -> nn.Module:
        """The network as a policy, with the checkpoint's weights.

        transformers knows by a class's name what its tensors were once called, so its own class reads the files.
        """
        network = self._empty(dtype)
        network.load_state_dict(self._plain(dtype).state_dict(), assign=True)
        network.tie_weights()
        return network

    def _plain(self, dtype: torch.dtype) -> nn.Module:
        """The network of transformers' own class, with the checkpoint's weights."""
        kind = self._transformers(self.family.model_class)
        if self.path in TOYS:
            return random_network(kind, self._transformers_config(), SEED).to(dtype)
        root = directory_of(self.path, self.revision)
        try:
            network, found = kind.from_pretrained(root, dtype=dtype, local_files_only=True, output_loading_info=True)
        except (OSError, ValueError, RuntimeError) as error:
            # The library raises these three for missing, cut and foreign weight files.
            reason = str(error).strip().splitlines()[0]
            raise DataError(f"cannot load the model in {root}: {reason}. Download it again", NOT_FOUND) from error
        if found["missing_keys"]:
            missing = sorted(found["missing_keys"])
            raise DataError(
                f"the weights in {root} lack {missing[0]} ({len(missing)} tensors are missing). Download it again",
                NOT_FOUND,
            )
        plain: nn.Module = network
        return plain

    def _empty(self, dtype: torch.dtype) -> Any:
        """The policy whose parameters have no storage; its computed buffers have theirs."""
        from accelerate import init_empty_weights

        mixin: Any = self.family.policy
        with init_empty_weights(include_buffers=False):
            network = policy_class(self._transformers(self.family.model_class), mixin)(self._transformers_config())
        for parameter in network.parameters():
            parameter.data = parameter.data.to(dtype)
        network.tie_weights()
        return network

    def _transformers_config(self) -> Any:
        return self._transformers(self.family.config_class).from_dict(dict(self.config))

    def _load_processors(self) -> tuple[Any, Any, Mapping[str, Any]]:
        """Tokenizer, image processor, generation config."""
        if self.path in TOYS:
            return toy_tokenizer(), toy_image_processor(), {}
        from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

        root = directory_of(self.path, self.revision)
        if not (root / PROCESSOR).is_file():
            raise DataError(
                f"{root} has no {PROCESSOR}, which says how pictures are cut. Download the model again", NOT_FOUND
            )
        file = root / "generation_config.json"
        return (
            AutoTokenizer.from_pretrained(root, local_files_only=True),
            Qwen2VLImageProcessorPil.from_pretrained(root, local_files_only=True),
            read_json(file) if file.is_file() else {},
        )


def config_of(path: str, revision: str | None) -> Mapping[str, Any]:
    """The configuration of a model, without reading weights."""
    if path in TOYS:
        return TOYS[path]
    root = directory_of(path, revision, configs_only=True)
    config = read_json(root / "config.json")
    if config.get("model_type") not in FAMILIES:
        raise DataError(
            f"{root}: its config.json says model_type={config.get('model_type')!r}, but QwenVLBundle reads "
            f"{', '.join(map(repr, FAMILIES))}. Use the bundle of that family, or another path",
            code=NOT_FOUND,
        )
    return config


def facts_of(config: Mapping[str, Any], family: Family, device: torch.device) -> LanguageFacts:
    """What the rest of the system needs to know."""
    text = text_config(config)
    if text.get("use_sliding_window"):
        raise DataError(f"{family.name}: a sliding window is not written; Qwen's published models have none", NOT_FOUND)
    return LanguageFacts(
        family=family.name,
        trainable_attr=LM,
        block_class_names=(family.block,),
        lora_targets=LORA_TARGETS,
        batch_multiple=batch_multiple(device),
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        context_length=text["max_position_embeddings"],
        sees=True,
    )


def directory_of(path: str, revision: str | None, *, configs_only: bool = False) -> Path:
    """The directory behind `path`, of which `quickstart` is the one that is shipped."""
    return language_directory(str(SHIPPED) if path == "quickstart" else path, revision, configs_only=configs_only)
