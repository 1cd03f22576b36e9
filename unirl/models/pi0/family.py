"""pi0 and pi0.5 from published checkpoints: images, an instruction and a state to chunks of actions.

The network of pi0 is `PI0ForConditionalGeneration` of transformers, which also reads the names of the published
weights. That of pi0.5 is the same class with another expert (`adaptive.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from unirl.config.dependencies import need_version
from unirl.config.errors import NotFoundError
from unirl.models.language.bundle import load_network, load_tokenizer
from unirl.models.loading.checkpoint import read_entries
from unirl.models.loading.dtypes import cast_module
from unirl.models.loading.hub import copy_files, language_directory, quiet_libraries, read_json
from unirl.models.loading.saved_weights import LANGUAGE_WEIGHTS
from unirl.models.loading.toy_tokenizers import gemma_tokenizer
from unirl.models.pi0 import adaptive
from unirl.models.pi0.network import NUM_BINS, NUMBER_TOKENS, Pi0Policy, Pi05Policy
from unirl.models.policies.bundle import positive
from unirl.models.policies.instructed import (
    CONFIG,
    Config,
    InstructedBundle,
    Settings,
    copy_beside,
    instructed_facts,
)
from unirl.models.policies.scales import NORMALIZER, OPENPI, PROCESSOR, QUANTILES, statistics_in
from unirl.models.policies.stage import WITH_CACHE
from unirl.models.policies.vla import (
    EMPTY,
    NUM_ACTIONS,
    PROMPT_TOKENS,
    CountedEntries,
    Instructor,
    TrainedPart,
    cameras_of,
    chain_settings,
    check_sizes,
    decoder_targets,
)
from unirl.types.device import CPU
from unirl.types.environments import STATE
from unirl.types.facts import ActionFacts
from unirl.types.protocols import DtypeName

if TYPE_CHECKING:
    from transformers import PI0Config, PI0ForConditionalGeneration, PreTrainedTokenizerBase

Version = Literal["pi0", "pi05"]
SIZES = (
    *("chunk_size", "max_action_dim", "max_state_dim", "num_inference_steps", "min_period", "max_period"),
    *("vlm_config", "dit_config"),
)
"""What lerobot's configuration of pi0.5 says about the network. The last two are those of transformers, if present."""
VARIANTS = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
"""The sizes of pi0.5 in lerobot's configuration, which are the defaults of transformers."""
PREPROCESSOR = "policy_preprocessor.json"
"""lerobot's file, whose step pads the state before it becomes text."""
TOY_05 = "-pi05"
"""The end of the name of a toy of pi0.5."""
VISION = "model.vlm.vision_tower."
PUBLISHED_NAMES = {
    "embed_action_time.": "",
    "model.dit.embed_tokens.": "paligemma_with_expert.gemma_expert.lm_head.",
    "model.dit.": "paligemma_with_expert.gemma_expert.model.",
    "model.vlm.language_model.embed_tokens.": "paligemma_with_expert.paligemma.lm_head.",
    VISION: "paligemma_with_expert.paligemma.model.vision_tower.vision_model.",
    "model.vlm.": "paligemma_with_expert.paligemma.model.",
}
"""How names of pi0.5 begin here, and in the published weights."""
FORMS: Mapping[Version, str] = {"pi0": "{task}\n", "pi05": "Task: {task}, State:"}
"""The text with a task in it. Of pi0.5, the numbers of the state and `CLOSING` follow."""
CLOSING, CLOSING_TOKENS = ";\nAction: ", 5
"""The end of the text of pi0.5, and the tokens that it has in the published model."""
BESIDE = (PROCESSOR, "preprocessor_config.json", PREPROCESSOR, "policy_postprocessor.json", NORMALIZER)
"""Files of a checkpoint that an export has, too."""


class Pi0Bundle(InstructedBundle):
    """pi0 or pi0.5: a PaliGemma that reads images and an instruction, and an expert that denoises chunks of actions."""

    toy: ClassVar[Mapping[str, object]] = {
        "path": "toy", "tokenizer": None, "dtype": "fp32", "num_steps": 3, "prompt_tokens": 128,
    }  # fmt: skip
    toys: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "toy.json")
    published: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "published.json")
    seed: ClassVar[int] = 20241
    """Seed of the random weights of the toy."""
    places: ClassVar[tuple[str, ...]] = ("revision", "tokenizer")

    def __init__(
        self,
        device: torch.device = CPU,
        *,
        path: str,
        revision: str | None = None,
        version: Version = "pi0",
        tokenizer: str | None = None,
        dtype: DtypeName = "bf16",
        observations: Mapping[str, tuple[int, ...]],
        actions: int = NUM_ACTIONS,
        chunk: int = 5,
        num_steps: Annotated[int, msgspec.Meta(ge=2)] = 4,
        eta: Annotated[float, msgspec.Meta(gt=0)] = 0.5,
        logp_of: CountedEntries = "executed",
        train: TrainedPart = "expert",
        prompt_tokens: int = PROMPT_TOKENS,
    ) -> None:
        """
        Args:
            path: a hub id, a folder in the layout of transformers (pi0) or lerobot (pi0.5), or `toy` (tiny, random
                weights).
            revision: branch, tag or commit of a hub id.
            version: pi0, or pi0.5, which reads the state as text.
            tokenizer: a hub id or a folder with the tokenizer, if the checkpoint has none.
            dtype: the dtype in which the network computes.
            observations: the shapes of square images [3, H, H] by the key of the camera, in the order in which the
                network reads them, and `state: [S]` of the robot. The network resizes images.
            actions: A, the numbers of an action.
            chunk: C, actions of one decision. The network denoises more, and the environment gets the first ones.
            num_steps: K, the denoising steps. All but the last are stochastic.
            eta: strength of their noise (FlowSDEStrategy).
            logp_of: the numbers whose log-prob counts: those that the environment gets, or all that are denoised.
            train: `expert` leaves PaliGemma as it is. With `backend.lora_cfg` it says which layers get adapters.
            prompt_tokens: places for the tokens of an instruction. A longer one is an error. The state of pi0.5 has
                places of its own.
        """
        need_version("transformers", WITH_CACHE, by=type(self).__name__)
        self.version, self.words = version, tokenizer
        settings = {
            "path": path, "revision": revision, "version": version, "tokenizer": tokenizer, "dtype": dtype,
            "observations": observations, "actions": actions, "chunk": chunk, "num_steps": num_steps, "eta": eta,
            "logp_of": logp_of, "train": train, "prompt_tokens": prompt_tokens,
        }  # fmt: skip
        super().__init__(device, settings)
        self.trainable().freeze(train)

    @classmethod
    def config_in(cls, root: Path, settings: Settings) -> Config:
        return read_json(root / CONFIG)

    @classmethod
    def config_for(cls, settings: Settings) -> Config:
        """The configuration. `version` None: of either version."""
        path, version = settings["path"], settings.get("version")
        if path in cls.toys and version == "pi05":
            path = f"{path.removesuffix(TOY_05)}{TOY_05}"
        return of_version(super().config_for({**settings, "path": path}), path, version)

    @classmethod
    def described(cls, config: Config, settings: Settings, multiple: int) -> ActionFacts:
        sizes, shapes = configuration_of(config), settings["observations"]
        positive(actions=settings["actions"], chunk=settings["chunk"], prompt_tokens=settings["prompt_tokens"])
        check_sizes(
            "pi0", shapes, settings["actions"], settings["chunk"],
            state=sizes.max_state_dim, width=sizes.max_action_dim, horizon=sizes.chunk_size,
        )  # fmt: skip
        vision = sizes.vlm_config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2
        decoders = {"dit.layers": sizes.dit_config.num_hidden_layers}
        if settings["train"] == "all":
            decoders["language_model.layers"] = sizes.vlm_config.text_config.num_hidden_layers
        version = version_of(config)
        after = 1 if version == "pi0" else shapes[STATE][0] * NUMBER_TOKENS + CLOSING_TOKENS
        return instructed_facts(
            settings,
            multiple,
            family=version,
            block_class_names=("GemmaDecoderLayer", "AdaptiveGemmaLayer", "SiglipEncoderLayer"),
            lora_targets=decoder_targets(decoders),
            tokens=len(cameras_of(shapes)) * patches + after + sizes.chunk_size,
            hidden_size=(sizes.dit_config if version == "pi0" else sizes.vlm_config.text_config).hidden_size,
        )

    @classmethod
    def usual(cls, config: Config) -> Settings:
        sizes = configuration_of(config)
        shapes = {"camera": (3, 224, 224), STATE: (sizes.max_state_dim,)}
        return {"observations": shapes, "actions": min(NUM_ACTIONS, sizes.max_action_dim), "train": "expert"}

    @classmethod
    def measured(cls, config: Config) -> tuple[PI0ForConditionalGeneration, int]:
        from accelerate import init_empty_weights

        with quiet_libraries(), init_empty_weights(include_buffers=False):
            network = network_of(config)
        return network, network.config.vlm_config.text_config.hidden_size

    def trainable(self) -> Pi0Policy:
        network = super().trainable()
        assert isinstance(network, Pi0Policy)
        return network

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.words is not None:
            return load_tokenizer(language_directory(self.words, None, configs_only=True))
        return gemma_tokenizer() if self.root is None else load_tokenizer(self.root)

    def prompter(self) -> Instructor:
        start, version = self.tokenizer.bos_token, self.version
        return Instructor(self.tokenizer, self.prompt_tokens, lambda task: f"{start}{text_of(version, task)}")

    def filled(self, dtype: torch.dtype) -> Pi0Policy:
        if self.root is None:
            network = network_of(self.config)
            randomise(network, self.seed)
            cast_module(network, dtype)
            return self._policy(network)
        layout: dict[str, Any] = {"config": configuration_of(self.config)}
        if self.version == "pi05":
            # transformers has all other names, since this class is one of its pi0.
            layout["key_mapping"] = {f"^(model.)?{PUBLISHED_NAMES[VISION]}": VISION}
        with quiet_libraries():
            return self._policy(load_network(network_class(self.config), self.root, dtype, **layout))

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Write the policy with the names of the published weights, and the configuration that it was read with."""
        policy = self.filled(self.dtype)
        policy.load_state_dict({name: tensor.to(self.dtype) for name, tensor in tensors.items()}, strict=False)
        if self.version == "pi05":
            folder.mkdir(parents=True, exist_ok=True)
            saved = {published_name(name): tensor.contiguous() for name, tensor in policy.pi0.state_dict().items()}
            save_file(saved, folder / LANGUAGE_WEIGHTS, metadata={"format": "pt"})
            (folder / CONFIG).write_text(json.dumps(dict(self.config), indent=2) + "\n", encoding="utf-8")
        else:
            with quiet_libraries():
                policy.pi0.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if self.root is not None:
            copy_beside(self.root, folder, BESIDE)
            for path in self.root.rglob(OPENPI):
                copy_files(path.parent, folder, (OPENPI,))
        return folder

    def _policy(self, network: PI0ForConditionalGeneration) -> Pi0Policy:
        """A network as a policy, with the scales of its data."""
        root, is_pi05 = self.root, self.version == "pi05"
        statistics = {} if root is None else statistics_in(root)
        settings = chain_settings(
            self.settings, statistics, f"the data of {self.path}", bounds=QUANTILES if is_pi05 else None
        )
        if not is_pi05:
            return Pi0Policy(network, **settings)
        numbers, closing = number_tokens(self.tokenizer)
        is_padded = root is not None and (root / PREPROCESSOR).is_file()
        return Pi05Policy(network, numbers=numbers, closing=closing, padded=is_padded, **settings)


def text_of(version: Version, task: str) -> str:
    """The text about a task after <bos>, as PI0Processor and openpi write it."""
    words = task if version == "pi0" else task.strip().replace("_", " ").replace("\n", " ")
    return FORMS[version].format(task=words)


def number_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """[257, T] the tokens of " -1", " 0", ..., " 255", with empty places at their ends, and [L] those of `CLOSING`.

    Raises:
        NotFoundError: 4001, the tokens of a text are not those of its parts, so the tokenizer is not that of Gemma.
    """
    pieces = [f" {number}" for number in range(-1, NUM_BINS)]
    rows = [tokenizer(piece, add_special_tokens=False).input_ids for piece in (*pieces, CLOSING)]
    start = FORMS["pi05"].format(task="go")
    together = tokenizer(start + "".join(pieces) + CLOSING, add_special_tokens=False).input_ids
    apart = tokenizer(start, add_special_tokens=False).input_ids + [token for row in rows for token in row]
    if together != apart:
        raise NotFoundError(
            "bundle.tokenizer: it does not read the numbers of a state one after another, as that of PaliGemma does. "
            "Give the tokenizer of google/paligemma-3b-pt-224"
        )
    numbers = torch.full((len(pieces), max(map(len, rows[:-1]))), EMPTY)
    for row, tokens in zip(numbers, rows[:-1], strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return numbers, torch.tensor(rows[-1])


def version_of(config: Config) -> Version | None:
    """What model a configuration belongs to: pi0 of transformers, pi0.5 of lerobot, or another one."""
    if config.get("type") == "pi05":
        return "pi05"
    return "pi0" if config.get("model_type") == "pi0" else None


def of_version(config: Config, place: str, version: Version | None) -> Config:
    """The configuration. `version` None: of either version.

    Raises:
        NotFoundError: 4001, it belongs to another model, or to a size of pi0.5 that was not published.
    """
    found = version_of(config)
    if found is None:
        raise NotFoundError(
            f"{place}: its config.json has model_type={config.get('model_type')!r}, type={config.get('type')!r}, but "
            "Pi0Bundle reads model_type='pi0' of transformers, or type='pi05' of lerobot. Convert it: load the weights "
            "with PI0ForConditionalGeneration or lerobot, and give the folder that its `save_pretrained` writes"
        )
    if version not in (None, found):
        raise NotFoundError(f"{place}: the checkpoint is one of {found}. Set bundle.version={found}")
    for name, size in VARIANTS.items():
        if config.get(name, size) != size:
            raise NotFoundError(
                f"{place}: its config.json has {name}={config[name]!r}. The published pi0.5 has {size!r}"
            )
    return config


def configuration_of(config: Config) -> PI0Config:
    """The configuration as an object, with the defaults of the published model."""
    from transformers import PI0Config

    is_pi05 = version_of(config) == "pi05"
    given = {name: config[name] for name in SIZES if name in config} if is_pi05 else dict(config)
    return PI0Config.from_dict(given)


def network_class(config: Config) -> type[PI0ForConditionalGeneration]:
    """The class of the network of a configuration."""
    if version_of(config) == "pi05":
        return adaptive.network_class()
    from transformers import PI0ForConditionalGeneration

    return PI0ForConditionalGeneration


def network_of(config: Config) -> PI0ForConditionalGeneration:
    """The network with weights of no meaning."""
    with torch.random.fork_rng(devices=[]):
        return network_class(config)(configuration_of(config)).eval()


def published_name(name: str) -> str:
    """The name of a tensor of pi0.5 in the files of lerobot. openpi's lack the first `model`.

    The embeddings have the name of the head, which is the same tensor there.
    """
    for ours, theirs in PUBLISHED_NAMES.items():
        if name.startswith(ours):
            return f"model.{theirs}{name.removeprefix(ours)}"
    return f"model.{name}"


@torch.no_grad()
def randomise(network: PI0ForConditionalGeneration, seed: int) -> None:
    """Random weights: matrices keep the scale of their inputs, biases are 0, and scales are those of the library."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            scale = 0.1 if "embed" in name.split(".")[-2] else math.prod(parameter.shape[1:]) ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        elif name.endswith(".bias"):
            parameter.zero_()
