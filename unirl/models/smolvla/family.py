"""SmolVLA from checkpoints of lerobot: images, an instruction and a state to chunks of actions.

The vision tower and the language model are those of transformers' SmolVLM; the expert is in `network.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from unirl.config.dependencies import need_version
from unirl.config.errors import NotFoundError
from unirl.models.chunks import batch_multiple
from unirl.models.language.bundle import VOCABULARIES, load_tokenizer
from unirl.models.loading.checkpoint import read_entries
from unirl.models.loading.completeness import check_files, check_tensors, loading_info, read_headers
from unirl.models.loading.dtypes import cast_module
from unirl.models.loading.estimate import ModelEstimate, block_counts, linears_of, parameters_of, patches_of
from unirl.models.loading.hub import copy_files, language_directory, quiet_libraries, read_json
from unirl.models.loading.saved_weights import LANGUAGE_WEIGHTS, ModuleWeights, SafetensorsWeights, SavedWeights
from unirl.models.loading.toy_tokenizers import qwen_tokenizer
from unirl.models.policies.bundle import POLICY, ActionBundle, positive, shapes_of
from unirl.models.policies.scales import NORMALIZER, Scale, statistics_in
from unirl.models.policies.stage import WITH_CACHE, InstructedStage
from unirl.models.policies.vla import CountedEntries, Instructor, TrainedPart, cameras_of, check_sizes, random_state
from unirl.models.smolvla.network import THETA, SmolVLANetwork, SmolVLAPolicy
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.device import CPU
from unirl.types.environments import INSTRUCTION, STATE, ContinuousActions
from unirl.types.facts import ActionFacts
from unirl.types.protocols import TORCH_DTYPES, DtypeName

if TYPE_CHECKING:
    from transformers import LlamaConfig, SmolVLMConfig

Config = Mapping[str, Any]
TYPE = "smolvla"
CONFIG, VLM = "config.json", "vlm_config"
"""The file of lerobot, and the configuration of SmolVLM in it. An export has it; lerobot names a hub id alone."""
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
NUM_ACTIONS, PROMPT_TOKENS = 7, 48
"""The numbers of an action of the usual robot, and the places for an instruction in the published model."""
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", *VOCABULARIES),
    *("policy_preprocessor.json", "policy_postprocessor.json"),
)
"""Files of a checkpoint that an export has, too."""


class SmolVLABundle(ActionBundle):
    """SmolVLA: the first layers of a SmolVLM, and an expert that denoises chunks of actions."""

    toy: ClassVar[Mapping[str, object]] = {
        "path": "toy", "vlm": None, "dtype": "fp32", "num_steps": 3, "prompt_tokens": 128,
    }  # fmt: skip
    toys: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "toy.json")
    published: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "published.json")
    """Configurations of public checkpoints by hub id, for plans without a connection. A run reads the files."""
    seed: ClassVar[int] = 20250
    """Seed of the random weights of the toy."""
    component_names: ClassVar[tuple[str, ...]] = (POLICY,)

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
        self.path, self.revision, self.prompt_tokens, self.dtype_name = path, revision, prompt_tokens, dtype
        self.root = None if path in self.toys else language_directory(path, revision)
        self.config = self.toys[path] if self.root is None else checked_config(self.root, vlm)
        facts = facts_of(self.config, observations, actions, chunk, prompt_tokens, train, batch_multiple(device))
        self.settings: dict[str, Any] = {
            "observations": shapes_of(observations), "actions": actions, "chunk": chunk, "num_steps": num_steps,
            "eta": eta, "logp_of": logp_of, "train": train, "prompt_tokens": prompt_tokens,
        }  # fmt: skip
        words = self.root if self.root is None or has_tokenizer(self.root) else vlm_directory(self.config, vlm)
        self.tokenizer = qwen_tokenizer() if words is None else load_tokenizer(words)
        torch_dtype = TORCH_DTYPES[dtype]
        super().__init__({POLICY: self._policy(torch_dtype)}, facts, dtype=torch_dtype, device=device)
        self.trainable().freeze(train)

    @classmethod
    def facts_from(cls, settings: Mapping[str, Any]) -> ActionFacts:
        """The facts of the policy with these settings of a recipe, without its weights."""
        names = ("observations", "actions", "chunk", "prompt_tokens", "train")
        config = cls._config_to_plan(settings["path"], settings["revision"], settings["vlm"])
        observations, actions, chunk, prompt_tokens, train = (settings[name] for name in names)
        return facts_of(config, observations, actions, chunk, prompt_tokens, train, 1)

    @classmethod
    def estimate(cls, path: str, revision: str | None = None) -> ModelEstimate:
        """The sizes of a model that is not loaded, for decisions of one action from one image."""
        config = cls._config_to_plan(path, revision, None)
        sizes = sizes_of(config)
        shapes = {"camera": (3, 256, 256), STATE: (sizes["max_state_dim"],)}
        actions = min(NUM_ACTIONS, sizes["max_action_dim"])
        facts = facts_of(config, shapes, actions, 1, PROMPT_TOKENS, "expert", 1)
        network = empty_network(config)
        return ModelEstimate(
            facts=facts,
            parameters={POLICY: parameters_of(network)},
            linears=linears_of(network),
            patches=patches_of(network),
            **block_counts(network, facts),
            width=network.vlm.config.text_config.hidden_size,
        )

    @classmethod
    def _config_to_plan(cls, path: str, revision: str | None, vlm: str | None) -> Config:
        """The configuration, without the weights."""
        if path in cls.toys:
            return cls.toys[path]
        if path in cls.published and revision is None:
            return cls.published[path]
        return checked_config(language_directory(path, revision, configs_only=True), vlm)

    def trainable(self) -> SmolVLAPolicy:
        network = super().trainable()
        assert isinstance(network, SmolVLAPolicy)
        return network

    def stage(self) -> InstructedStage:
        network = self.trainable()
        instructor = Instructor(self.tokenizer, self.prompt_tokens, lambda task: task.removesuffix("\n") + "\n")
        return InstructedStage(network, self.facts, instructor, network.hidden_size, self.dtype)

    def untrained(self) -> SmolVLAPolicy:
        return self._policy(self.dtype).requires_grad_(False).eval()

    def reopened(self, folder: Path) -> SmolVLABundle:
        return SmolVLABundle(self.device, path=str(folder), dtype=self.dtype_name, **self.settings)

    def saved(self) -> SavedWeights:
        if self.root is None:
            return ModuleWeights(self.untrained())
        return SafetensorsWeights(self.root, lambda _: self.dtype, LANGUAGE_WEIGHTS)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Write the policy in the layout of lerobot. Tensors that never run, such as the head, are copied."""
        folder.mkdir(parents=True, exist_ok=True)
        saved = self.saved()
        state = {name: saved.read(name) for name in saved.shapes()} | dict(tensors)
        save_file(
            {name: tensor.detach().cpu().to(self.dtype).contiguous() for name, tensor in state.items()},
            folder / LANGUAGE_WEIGHTS,
            metadata={"format": "pt"},
        )
        self.tokenizer.save_pretrained(folder)
        if self.root is not None:
            copy_files(self.root, folder, (*BESIDE, *(path.name for path in self.root.glob(NORMALIZER))))
        (folder / CONFIG).write_text(json.dumps(dict(self.config), indent=2) + "\n", encoding="utf-8")
        return folder

    def _policy(self, dtype: torch.dtype) -> SmolVLAPolicy:
        """The network on the CPU with the weights of the files, or those of the toy."""
        given, root, sizes = self.settings, self.root, sizes_of(self.config)
        statistics, place = {} if root is None else statistics_in(root), f"the data of {self.path}"
        state, actions = given["observations"][STATE][0], given["actions"]
        network = empty_network(self.config)
        cast_module(network, dtype)
        policy = SmolVLAPolicy(
            network,
            image_size=sizes["resize_imgs_with_padding"][0],
            min_period=sizes["min_period"],
            max_period=sizes["max_period"],
            horizon=sizes["chunk_size"],
            width=sizes["max_action_dim"],
            state_width=sizes["max_state_dim"],
            cameras=cameras_of(given["observations"]),
            actions=actions,
            chunk=given["chunk"],
            num_steps=given["num_steps"],
            kernel=FlowSDEStrategy(eta=given["eta"]),
            logp_of=given["logp_of"],
            state=Scale.of(statistics, "state", state, f"bundle.observations.{STATE}", place),
            action=Scale.of(statistics, "actions", actions, "bundle.actions", place),
        )
        policy.load_state_dict(self._state(policy, dtype), assign=True)
        return policy

    def _state(self, policy: SmolVLAPolicy, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of the network from the files, or those of the toy."""
        expected = {name: tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
        if self.root is None:
            return random_state(expected, self.seed, dtype)
        place = f"the model in {self.root}"
        check_files(place, self.root, LANGUAGE_WEIGHTS)
        shapes = {name: tensor.shape for name, tensor in read_headers(place, self.root, LANGUAGE_WEIGHTS).items()}
        check_tensors(place, "SmolVLAPolicy", loading_info(shapes, expected), may_have_more=True)
        saved = SafetensorsWeights(self.root, lambda _: dtype, LANGUAGE_WEIGHTS)
        return {name: saved.read(name) for name in expected}


def facts_of(
    config: Config,
    observations: Mapping[str, tuple[int, ...]],
    actions: int,
    chunk: int,
    prompt_tokens: int,
    train: TrainedPart,
    multiple: int,
) -> ActionFacts:
    """The facts of a policy with these observations and actions.

    Raises:
        InvalidValueError: 2004, the network cannot read or make them.
    """
    sizes, vlm = sizes_of(config), vlm_config(config)
    positive(actions=actions, chunk=chunk, prompt_tokens=prompt_tokens)
    shapes, horizon = shapes_of(observations), sizes["chunk_size"]
    check_sizes(
        "SmolVLA", shapes, actions, chunk,
        state=sizes["max_state_dim"], width=sizes["max_action_dim"], horizon=horizon,
    )  # fmt: skip
    patches = (sizes["resize_imgs_with_padding"][0] // vlm.vision_config.patch_size // vlm.scale_factor) ** 2
    decoders = ("lm_expert", *(("text_model",) if train == "all" else ()))
    return ActionFacts(
        family=TYPE,
        block_class_names=("LlamaDecoderLayer", "SmolVLAExpertLayer", "SmolVLMEncoderLayer"),
        lora_targets=tuple(
            f"{decoder}.layers.{number}.{layer}"
            for decoder in decoders
            for number in range(sizes["num_vlm_layers"])
            for layer in (
                *(f"self_attn.{name}" for name in LAYERS), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
            )
        ),
        observations={**shapes, INSTRUCTION: (prompt_tokens,)},
        actions=ContinuousActions(actions),
        chunk=chunk,
        can_imitate=False,
        tokens_per_decision=len(cameras_of(shapes)) * patches + prompt_tokens + 1 + horizon,
        batch_multiple=multiple,
    )  # fmt: skip


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


def has_tokenizer(root: Path) -> bool:
    return any((root / name).is_file() for name in VOCABULARIES)


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
