"""SmolVLA from checkpoints of lerobot: images, an instruction and a state to chunks of actions.

The vision tower and the language model are those of transformers' SmolVLM; the expert is in `network.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import torch

from unirl.config.dependencies import need_version
from unirl.config.errors import NotFoundError
from unirl.models.language.bundle import load_tokenizer
from unirl.models.loading.checkpoint import read_entries
from unirl.models.loading.dtypes import cast_module
from unirl.models.loading.hub import language_directory, quiet_libraries, read_json
from unirl.models.loading.toy_tokenizers import qwen_tokenizer
from unirl.models.policies.bundle import positive
from unirl.models.policies.instructed import (
    CONFIG,
    Config,
    Settings,
    StoredPolicyBundle,
    has_tokenizer,
    instructed_facts,
)
from unirl.models.policies.scales import NORMALIZER, statistics_in
from unirl.models.policies.stage import WITH_CACHE
from unirl.models.policies.vla import (
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
from unirl.models.smolvla.network import THETA, SmolVLANetwork, SmolVLAPolicy
from unirl.types.device import CPU
from unirl.types.environments import STATE
from unirl.types.facts import ActionFacts
from unirl.types.protocols import DtypeName

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerBase, SmolVLMConfig

TYPE = "smolvla"
VLM = "vlm_config"
"""The configuration of SmolVLM in that of lerobot. An export has it; lerobot names a hub id alone."""
DEFAULTS: Config = {
    "chunk_size": 50, "max_action_dim": 32, "max_state_dim": 32, "resize_imgs_with_padding": [512, 512],
    "num_vlm_layers": 16, "expert_width_multiplier": 0.75, "min_period": 4e-3, "max_period": 4.0,
}  # fmt: skip
"""The defaults of lerobot."""
ONLY: Config = {
    "attention_mode": ("cross_attn",), "self_attn_every_n_layers": (2,), "num_expert_layers": (-1, 0),
    "add_image_special_tokens": (False,), "adapt_to_pi_aloha": (False,),
}  # fmt: skip
"""What a configuration may say, if it says it: other values are not available."""


class SmolVLABundle(StoredPolicyBundle):
    """SmolVLA: the first layers of a SmolVLM, and an expert that denoises chunks of actions."""

    toy: ClassVar[Mapping[str, object]] = {
        "path": "toy", "vlm": None, "dtype": "fp32", "num_steps": 3, "prompt_tokens": 128,
    }  # fmt: skip
    toys: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "toy.json")
    published: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "published.json")
    seed: ClassVar[int] = 20250
    """Seed of the random weights of the toy."""
    places: ClassVar[tuple[str, ...]] = ("revision", "vlm")
    model_class: ClassVar[str] = "SmolVLAPolicy"
    beside: ClassVar[tuple[str, ...]] = ("policy_preprocessor.json", "policy_postprocessor.json", NORMALIZER)

    def __init__(
        self,
        device: torch.device = CPU,
        *,
        path: str,
        revision: str | None = None,
        vlm: str | None = None,
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
            path: a hub id, a folder in the layout of lerobot, or `toy` (tiny, random weights).
            revision: branch, tag or commit of a hub id.
            vlm: a hub id or a folder with the configuration and the tokenizer of SmolVLM, of which no weights are read.
                null: that which the checkpoint names, or none if it has both, as an export does.
            dtype: the dtype in which the network computes.
            observations: the shapes of square images [3, H, H] by the key of the camera, in the order in which the
                network reads them, and `state: [S]` of the robot. The network resizes images.
            actions: A, the numbers of an action.
            chunk: C, actions of one decision. The network denoises more, and the environment gets the first ones.
            num_steps: K, the denoising steps. All but the last are stochastic.
            eta: strength of their noise (FlowSDEStrategy).
            logp_of: the numbers whose log-prob counts: those that the environment gets, or all that are denoised.
            train: `expert` leaves SmolVLM as it is. With `backend.lora_cfg` it says which layers get adapters.
            prompt_tokens: places for the tokens of an instruction. A longer one is an error.
        """
        need_version("transformers", WITH_CACHE, by=type(self).__name__)
        self.vlm = vlm
        settings = {
            "path": path, "revision": revision, "vlm": vlm, "dtype": dtype, "observations": observations,
            "actions": actions, "chunk": chunk, "num_steps": num_steps, "eta": eta, "logp_of": logp_of, "train": train,
            "prompt_tokens": prompt_tokens,
        }  # fmt: skip
        super().__init__(device, settings)
        self.trainable().freeze(train)

    @classmethod
    def config_in(cls, root: Path, settings: Settings) -> Config:
        return checked_config(root, settings.get("vlm"))

    @classmethod
    def described(cls, config: Config, settings: Settings, multiple: int) -> ActionFacts:
        sizes, vlm, shapes = sizes_of(config), vlm_config(config), settings["observations"]
        actions, chunk, horizon = settings["actions"], settings["chunk"], sizes["chunk_size"]
        positive(actions=actions, chunk=chunk, prompt_tokens=settings["prompt_tokens"])
        check_sizes(
            "SmolVLA", shapes, actions, chunk,
            state=sizes["max_state_dim"], width=sizes["max_action_dim"], horizon=horizon,
        )  # fmt: skip
        patches = (sizes["resize_imgs_with_padding"][0] // vlm.vision_config.patch_size // vlm.scale_factor) ** 2
        decoders = ("lm_expert.layers", *(("text_model.layers",) if settings["train"] == "all" else ()))
        return instructed_facts(
            settings,
            multiple,
            family=TYPE,
            block_class_names=("LlamaDecoderLayer", "SmolVLAExpertLayer", "SmolVLMEncoderLayer"),
            lora_targets=decoder_targets(dict.fromkeys(decoders, sizes["num_vlm_layers"])),
            tokens=len(cameras_of(shapes)) * patches + 1 + horizon,
            hidden_size=vlm.text_config.hidden_size,
        )

    @classmethod
    def usual(cls, config: Config) -> Settings:
        sizes = sizes_of(config)
        shapes = {"camera": (3, 256, 256), STATE: (sizes["max_state_dim"],)}
        return {"observations": shapes, "actions": min(NUM_ACTIONS, sizes["max_action_dim"]), "train": "expert"}

    @classmethod
    def measured(cls, config: Config) -> tuple[SmolVLANetwork, int]:
        network = empty_network(config)
        return network, network.vlm.config.text_config.hidden_size

    def trainable(self) -> SmolVLAPolicy:
        network = super().trainable()
        assert isinstance(network, SmolVLAPolicy)
        return network

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.root is None:
            return qwen_tokenizer()
        return load_tokenizer(self.root if has_tokenizer(self.root) else vlm_directory(self.config, self.vlm))

    def prompter(self) -> Instructor:
        return Instructor(self.tokenizer, self.prompt_tokens, lambda task: task.removesuffix("\n") + "\n")

    def empty(self, dtype: torch.dtype) -> SmolVLAPolicy:
        sizes, network = sizes_of(self.config), empty_network(self.config)
        cast_module(network, dtype)
        statistics = {} if self.root is None else statistics_in(self.root)
        return SmolVLAPolicy(
            network,
            image_size=sizes["resize_imgs_with_padding"][0],
            min_period=sizes["min_period"],
            max_period=sizes["max_period"],
            horizon=sizes["chunk_size"],
            width=sizes["max_action_dim"],
            state_width=sizes["max_state_dim"],
            **chain_settings(self.settings, statistics, f"the data of {self.path}"),
        )


def checked_config(root: Path, vlm: str | None) -> Config:
    """The configuration in a folder, with that of SmolVLM in it.

    Raises:
        NotFoundError: 4001, it belongs to another model, or asks for what is not available.
    """
    config: Config = read_json(root / CONFIG)
    if config.get("type") != TYPE:
        raise NotFoundError(
            f"{root}: its config.json has type={config.get('type')!r}, but SmolVLABundle reads {TYPE!r} of lerobot. "
            "Use a checkpoint such as lerobot/smolvla_base"
        )
    for name, values in ONLY.items():
        if config.get(name, values[0]) not in values:
            raise NotFoundError(
                f"{root}: its config.json has {name}={config[name]!r}, which is not available. Use a checkpoint with "
                f"{values[0]!r}, as lerobot/smolvla_base has"
            )
    if VLM not in config:
        config = {**config, VLM: read_json(vlm_directory(config, vlm) / CONFIG)}
    return config


def sizes_of(config: Config) -> dict[str, Any]:
    """The configuration, with the defaults of lerobot."""
    return {**DEFAULTS, **config}


def vlm_directory(config: Config, vlm: str | None) -> Path:
    """The folder of SmolVLM's configuration and tokenizer."""
    return language_directory(vlm or config["vlm_model_name"], None, configs_only=True)


def vlm_config(config: Config) -> SmolVLMConfig:
    """The configuration of the layers of SmolVLM that the policy has."""
    from transformers import SmolVLMConfig

    vlm: SmolVLMConfig = SmolVLMConfig.from_dict(dict(config[VLM]))
    vlm.text_config.num_hidden_layers = sizes_of(config)["num_vlm_layers"]
    vlm.text_config.rope_parameters = {"rope_type": "default", "rope_theta": THETA}
    return vlm


def expert_config(config: Config) -> LlamaConfig:
    """The configuration of the expert: as many layers and heads, and fewer units."""
    from transformers import LlamaConfig

    text = vlm_config(config).text_config
    width = int(text.hidden_size * sizes_of(config)["expert_width_multiplier"])
    inner = 256 * math.ceil(int(4 * int(2 * width / 3)) / 256)
    return LlamaConfig.from_dict({**text.to_dict(), "hidden_size": width, "intermediate_size": inner})


def empty_network(config: Config) -> SmolVLANetwork:
    """The network without storage for its parameters. Computed buffers have storage and values."""
    from accelerate import init_empty_weights

    sizes = sizes_of(config)
    with quiet_libraries(), init_empty_weights(include_buffers=False):
        vlm, expert = vlm_config(config), expert_config(config)
        return SmolVLANetwork(vlm, expert, sizes["max_state_dim"], sizes["max_action_dim"]).eval()
