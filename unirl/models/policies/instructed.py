"""The base of bundles of published vision-language-action models: a network, a tokenizer, and the files of both."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unirl.models.chunks import batch_multiple
from unirl.models.language.bundle import VOCABULARIES
from unirl.models.loading.completeness import check_files, check_tensors, loading_info, read_headers
from unirl.models.loading.estimate import ModelEstimate, block_counts, linears_of, parameters_of, patches_of
from unirl.models.loading.hub import copy_files, language_directory
from unirl.models.loading.saved_weights import LANGUAGE_WEIGHTS, ModuleWeights, SafetensorsWeights, SavedWeights
from unirl.models.policies.bundle import POLICY, ActionBundle, shapes_of
from unirl.models.policies.networks import PolicyNetwork
from unirl.models.policies.stage import InstructedStage
from unirl.models.policies.vla import PROMPT_TOKENS, random_state
from unirl.types.environments import INSTRUCTION, ContinuousActions
from unirl.types.facts import ActionFacts
from unirl.types.protocols import TORCH_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Config = Mapping[str, Any]
Settings = Mapping[str, Any]
CONFIG = "config.json"
TOKENIZER_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", *VOCABULARIES),
    *("merges.txt", "chat_template.json"),
)
"""Files of a tokenizer that an export has as the checkpoint has them."""


class InstructedBundle(ActionBundle):
    """A policy that reads images and an instruction, from the files of a checkpoint or with the weights of a toy.

    A subclass says how its configuration is read and checked, what its facts are, and how its network is made. Its
    constructor lists and explains the settings.
    """

    toys: ClassVar[Mapping[str, Config]]
    published: ClassVar[Mapping[str, Config]]
    """Configurations of public checkpoints by hub id, for plans without a connection. A run reads the files."""
    seed: ClassVar[int]
    """Seed of the random weights of the toy."""
    places: ClassVar[tuple[str, ...]] = ("revision",)
    """Settings that say where files of a checkpoint are. An export has all files, so they are null there."""
    component_names: ClassVar[tuple[str, ...]] = (POLICY,)

    def __init__(self, device: torch.device, settings: Settings) -> None:
        """
        Args:
            settings: those of the subclass, of which `path`, `revision`, `dtype`, `observations`, `actions`, `chunk`
                and `prompt_tokens` are read here.
        """
        self.settings: dict[str, Any] = {**settings, "observations": shapes_of(settings["observations"])}
        self.path: str = settings["path"]
        self.prompt_tokens: int = settings["prompt_tokens"]
        is_toy = self.path in self.toys
        self.root = None if is_toy else language_directory(self.path, settings["revision"])
        self.config = self.config_for({**self.settings, "path": self.path if is_toy else str(self.root)})
        facts = self.described(self.config, self.settings, batch_multiple(device))
        self.tokenizer = self.load_tokenizer()
        dtype = TORCH_DTYPES[settings["dtype"]]
        super().__init__({POLICY: self.initial(dtype)}, facts, dtype=dtype, device=device)

    # What a family says

    @classmethod
    @abstractmethod
    def config_in(cls, root: Path, settings: Settings) -> Config:
        """The configuration in a folder. Raises NotFoundError (4001) if it belongs to another model."""

    @classmethod
    @abstractmethod
    def described(cls, config: Config, settings: Settings, multiple: int) -> ActionFacts:
        """The facts of a policy. Raises InvalidValueError (2004) for settings that the network cannot follow.

        Args:
            multiple: `ActionFacts.batch_multiple`.
        """

    @classmethod
    @abstractmethod
    def usual(cls, config: Config) -> Settings:
        """Observations of one camera, and the other settings of the facts beside `chunk` and `prompt_tokens`."""

    @classmethod
    @abstractmethod
    def measured(cls, config: Config) -> tuple[nn.Module, int]:
        """The network without storage, and the width of a token of its language model."""

    @abstractmethod
    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the checkpoint, or that of the toy."""

    @abstractmethod
    def prompter(self) -> Callable[[Sequence[str]], Tensor]:
        """Turns the texts of tasks into tokens [B, L]."""

    @abstractmethod
    def filled(self, dtype: torch.dtype) -> PolicyNetwork:
        """The network on the CPU with the weights of the files, or those of the toy."""

    # What follows from that

    def initial(self, dtype: torch.dtype) -> PolicyNetwork:
        """The network with which training starts."""
        return self.filled(dtype)

    @classmethod
    def config_for(cls, settings: Settings) -> Config:
        """The configuration of the model that settings name, without its weights."""
        path, revision = settings["path"], settings["revision"]
        if path in cls.toys:
            return cls.toys[path]
        if path in cls.published and revision is None:
            return cls.published[path]
        return cls.config_in(language_directory(path, revision, configs_only=True), settings)

    @classmethod
    def facts_from(cls, settings: Settings) -> ActionFacts:
        """The facts of the policy with these settings of a recipe, without its weights."""
        settings = {**settings, "observations": shapes_of(settings["observations"])}
        return cls.described(cls.config_for(settings), settings, 1)

    @classmethod
    def estimate_from(cls, settings: Settings) -> ModelEstimate:
        """The sizes of the policy with these settings of a recipe, which is not loaded."""
        settings = {**settings, "observations": shapes_of(settings["observations"])}
        return cls._estimate(cls.config_for(settings), settings)

    @classmethod
    def estimate(cls, path: str, revision: str | None = None) -> ModelEstimate:
        """The sizes of a model that is not loaded, for decisions of one action from one image."""
        config = cls.config_for({"path": path, "revision": revision})
        return cls._estimate(config, {"chunk": 1, "prompt_tokens": PROMPT_TOKENS, **cls.usual(config)})

    @classmethod
    def _estimate(cls, config: Config, settings: Settings) -> ModelEstimate:
        network, width = cls.measured(config)
        facts = cls.described(config, settings, 1)
        return ModelEstimate(
            facts=facts,
            parameters={POLICY: parameters_of(network)},
            linears=linears_of(network),
            patches=patches_of(network),
            **block_counts(network, facts),
            width=width,
        )

    def policy(self) -> PolicyNetwork:
        """The network that is trained, for what it says without a forward."""
        network = self.trainable()
        assert isinstance(network, PolicyNetwork)
        return network

    def stage(self) -> InstructedStage:
        network = self.policy()
        return InstructedStage(network, self.facts, self.prompter(), network.hidden_size, self.dtype)

    def untrained(self) -> PolicyNetwork:
        return self.filled(self.dtype).requires_grad_(False).eval()

    def reopened(self, folder: Path) -> Self:
        return type(self)(self.device, **self.settings_for(folder))

    def settings_for(self, folder: Path) -> dict[str, Any]:
        return {**self.settings, "path": str(folder), **dict.fromkeys(self.places)}


class StoredPolicyBundle(InstructedBundle):
    """The base of bundles whose network has the names of the published weights, so that rows are read one by one."""

    model_class: ClassVar[str]
    """The publisher's class of the network, for errors."""
    beside: ClassVar[tuple[str, ...]]
    """Patterns of files of a checkpoint that an export has, too."""

    def __init__(self, device: torch.device, settings: Settings, *, meta_init: bool = False) -> None:
        """
        Args:
            meta_init: leave the network without storage. The train backend then reads only the rows of its shards.
        """
        self.meta_init = meta_init
        super().__init__(device, settings)

    @abstractmethod
    def empty(self, dtype: torch.dtype) -> PolicyNetwork:
        """The network without storage for its parameters. Computed buffers have storage and values."""

    def initial(self, dtype: torch.dtype) -> PolicyNetwork:
        return self.empty(dtype) if self.meta_init else self.filled(dtype)

    def filled(self, dtype: torch.dtype) -> PolicyNetwork:
        network = self.empty(dtype)
        network.load_state_dict(self._state(network, dtype), assign=True)
        return network

    def saved(self) -> SavedWeights:
        if self.root is None:
            return ModuleWeights(self.untrained())
        return SafetensorsWeights(self.root, lambda _: self.dtype, LANGUAGE_WEIGHTS)

    def saved_tensors(self) -> dict[str, Tensor]:
        """All tensors of the checkpoint, those that never run included."""
        saved = self.saved()
        return {name: saved.read(name) for name in saved.shapes()}

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Write the policy in the layout of the published checkpoint. Tensors that never run are copied."""
        folder.mkdir(parents=True, exist_ok=True)
        state = self.saved_tensors() | dict(tensors)
        save_file(
            {name: tensor.detach().cpu().to(self.dtype).contiguous() for name, tensor in state.items()},
            folder / LANGUAGE_WEIGHTS,
            metadata={"format": "pt"},
        )
        if self.root is None or not has_tokenizer(self.root):
            self.tokenizer.save_pretrained(folder)
        if self.root is not None:
            copy_beside(self.root, folder, self.beside)
        (folder / CONFIG).write_text(json.dumps(dict(self.config), indent=2) + "\n", encoding="utf-8")
        return folder

    def _state(self, network: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a network from the files, or those of the toy."""
        expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        if self.root is None:
            return random_state(expected, self.seed, dtype)
        place = f"the model in {self.root}"
        check_files(place, self.root, LANGUAGE_WEIGHTS)
        shapes = {name: tensor.shape for name, tensor in read_headers(place, self.root, LANGUAGE_WEIGHTS).items()}
        check_tensors(place, self.model_class, loading_info(shapes, expected), may_have_more=True)
        saved = SafetensorsWeights(self.root, lambda _: dtype, LANGUAGE_WEIGHTS)
        return {name: saved.read(name) for name in expected}


def has_tokenizer(root: Path) -> bool:
    """True if a folder has the files of a tokenizer."""
    return any((root / name).is_file() for name in VOCABULARIES)


def copy_beside(root: Path, folder: Path, patterns: Sequence[str]) -> None:
    """Copy the files of a checkpoint that match the patterns, and those of its tokenizer."""
    copy_files(root, folder, [path.name for pattern in (*TOKENIZER_FILES, *patterns) for path in root.glob(pattern)])


def instructed_facts(settings: Settings, multiple: int, *, tokens: int, **model: Any) -> ActionFacts:
    """The facts of a policy that reads an instruction and decides on chunks of continuous actions.

    Args:
        tokens: those of a decision beside the places of an instruction.
        model: `family`, `block_class_names`, `lora_targets`, and what else differs between models.
    """
    places: int = settings["prompt_tokens"]
    return ActionFacts(
        observations={**settings["observations"], INSTRUCTION: (places,)},
        actions=ContinuousActions(settings["actions"]),
        chunk=settings["chunk"],
        can_imitate=False,
        tokens_per_decision=tokens + places,
        batch_multiple=multiple,
        **model,
    )
