"""pi0 from checkpoints in the layout of transformers: images, an instruction and a state to chunks of actions.

The network is `PI0ForConditionalGeneration` of transformers, which also reads the names of the published weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from unirl.config.dependencies import need_version
from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.models.chunks import batch_multiple
from unirl.models.language.bundle import VOCABULARIES, load_network, load_tokenizer
from unirl.models.loading.checkpoint import read_entries
from unirl.models.loading.dtypes import cast_module
from unirl.models.loading.estimate import ModelEstimate, block_counts, linears_of, parameters_of, patches_of
from unirl.models.loading.hub import copy_files, language_directory, quiet_libraries, read_json
from unirl.models.loading.toy_tokenizers import gemma_tokenizer
from unirl.models.pi0.network import CountedEntries, Pi0Policy, Scale
from unirl.models.policies.bundle import POLICY, ActionBundle, positive, shapes_of
from unirl.models.policies.stage import WITH_CACHE, InstructedStage
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.device import CPU
from unirl.types.environments import INSTRUCTION, STATE, ContinuousActions
from unirl.types.facts import ActionFacts
from unirl.types.protocols import TORCH_DTYPES, DtypeName

if TYPE_CHECKING:
    from transformers import PI0Config, PI0ForConditionalGeneration, PreTrainedTokenizerBase

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
TrainedPart = Literal["expert", "all"]
MODEL_TYPE = "pi0"
CONFIG, PROCESSOR = "config.json", "processor_config.json"
NUM_ACTIONS, PROMPT_TOKENS = 7, 48
"""The numbers of an action of the usual robot, and the places for an instruction in the published model."""
EMPTY = -1
"""Stands in the places of an instruction that no token fills."""
LAYERS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""The linear layers of a block of Gemma."""
BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", *VOCABULARIES),
    *(PROCESSOR, "preprocessor_config.json"),
)
"""Files of a checkpoint that an export has, too."""


class Pi0Bundle(ActionBundle):
    """pi0: a PaliGemma that reads images and an instruction, and an expert that denoises a chunk of actions."""

    toy: ClassVar[Mapping[str, object]] = {"path": "toy", "dtype": "fp32", "num_steps": 3, "prompt_tokens": 96}
    toys: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "toy.json")
    published: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "published.json")
    """Configurations of public checkpoints by hub id, for plans without a connection. A run reads the files."""
    seed: ClassVar[int] = 20241
    """Seed of the random weights of the toy."""
    component_names: ClassVar[tuple[str, ...]] = (POLICY,)

    def __init__(
        self,
        device: torch.device = CPU,
        *,
        path: str,
        revision: str | None = None,
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
            path: a hub id, a folder in the layout of transformers, or `toy` (tiny, random weights).
            revision: branch, tag or commit of a hub id.
            dtype: the dtype in which the network computes.
            observations: the shapes of square images [3, H, H] by the key of the camera, in the order in which the
                network reads them, and `state: [S]` of the robot. The network resizes images.
            actions: A, the numbers of an action.
            chunk: C, actions of one decision. The network denoises more, and the environment gets the first ones.
            num_steps: K, the denoising steps. All but the last are stochastic.
            eta: strength of their noise (FlowSDEStrategy).
            logp_of: the numbers whose log-prob counts: those that the environment gets, or all that are denoised.
            train: `expert` leaves PaliGemma as it is. With `backend.lora_cfg` it says which layers get adapters.
            prompt_tokens: places for the tokens of an instruction. A longer one is an error.
        """
        need_version("transformers", WITH_CACHE, by=type(self).__name__)
        self.path, self.revision, self.prompt_tokens, self.dtype_name = path, revision, prompt_tokens, dtype
        self.root = None if path in self.toys else language_directory(path, revision)
        self.config = self.toys[path] if self.root is None else checked_config(self.root)
        facts = facts_of(self.config, observations, actions, chunk, prompt_tokens, train, batch_multiple(device))
        self.train = train
        self.settings: dict[str, Any] = {
            "observations": shapes_of(observations), "actions": actions, "chunk": chunk, "num_steps": num_steps,
            "eta": eta, "logp_of": logp_of, "train": train, "prompt_tokens": prompt_tokens,
        }  # fmt: skip
        self.tokenizer = gemma_tokenizer() if self.root is None else load_tokenizer(self.root)
        torch_dtype = TORCH_DTYPES[dtype]
        super().__init__({POLICY: self._policy(torch_dtype)}, facts, dtype=torch_dtype, device=device)
        self.trainable().freeze(train)

    @classmethod
    def facts_from(cls, settings: Mapping[str, Any]) -> ActionFacts:
        """The facts of the policy with these settings of a recipe, without its weights."""
        names = ("observations", "actions", "chunk", "prompt_tokens", "train")
        observations, actions, chunk, prompt_tokens, train = (settings[name] for name in names)
        config = cls._config_to_plan(settings["path"], settings["revision"])
        return facts_of(config, observations, actions, chunk, prompt_tokens, train, 1)

    @classmethod
    def estimate(cls, path: str, revision: str | None = None) -> ModelEstimate:
        """The sizes of a model that is not loaded, for decisions of one action from one image."""
        from accelerate import init_empty_weights

        config = cls._config_to_plan(path, revision)
        with quiet_libraries(), init_empty_weights(include_buffers=False):
            network = network_of(config)
        sizes = network.config
        shapes = {"camera": (3, 224, 224), STATE: (sizes.max_state_dim,)}
        facts = facts_of(config, shapes, min(NUM_ACTIONS, sizes.max_action_dim), 1, PROMPT_TOKENS, "expert", 1)
        return ModelEstimate(
            facts=facts,
            parameters={POLICY: parameters_of(network)},
            linears=linears_of(network),
            patches=patches_of(network),
            **block_counts(network, facts),
            width=sizes.vlm_config.text_config.hidden_size,
        )

    @classmethod
    def _config_to_plan(cls, path: str, revision: str | None) -> Config:
        """The configuration, without the weights."""
        if path in cls.toys:
            return cls.toys[path]
        if path in cls.published and revision is None:
            return cls.published[path]
        return checked_config(language_directory(path, revision, configs_only=True))

    def trainable(self) -> Pi0Policy:
        network = super().trainable()
        assert isinstance(network, Pi0Policy)
        return network

    def stage(self) -> InstructedStage:
        network, places = self.trainable(), self.prompt_tokens
        width = network.pi0.config.dit_config.hidden_size
        return InstructedStage(network, self.facts, Instructor(self.tokenizer, places), width, self.dtype)

    def untrained(self) -> Pi0Policy:
        return self._policy(self.dtype).requires_grad_(False).eval()

    def reopened(self, folder: Path) -> Pi0Bundle:
        return Pi0Bundle(self.device, path=str(folder), dtype=self.dtype_name, **self.settings)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Write the policy in the layout of transformers, which is also that of the published weights."""
        policy = self.untrained()
        policy.load_state_dict({name: tensor.to(self.dtype) for name, tensor in tensors.items()}, strict=False)
        with quiet_libraries():
            policy.pi0.save_pretrained(folder)
        if self.root is None:
            self.tokenizer.save_pretrained(folder)
        else:
            copy_files(self.root, folder, BESIDE)
        return folder

    def _policy(self, dtype: torch.dtype) -> Pi0Policy:
        """The network on the CPU with the weights of the files, or those of the toy."""
        given, root = self.settings, self.root
        if root is None:
            network = network_of(self.config)
            randomise(network, self.seed)
            cast_module(network, dtype)
        else:
            from transformers import PI0ForConditionalGeneration

            with quiet_libraries():
                network = load_network(PI0ForConditionalGeneration, root, dtype)
        statistics = read_json(root / PROCESSOR) if root is not None and (root / PROCESSOR).is_file() else {}
        place, size = f"{self.path}/{PROCESSOR}", given["observations"][STATE][0]
        return Pi0Policy(
            network,
            cameras=cameras_of(given["observations"]),
            actions=given["actions"],
            chunk=given["chunk"],
            num_steps=given["num_steps"],
            kernel=FlowSDEStrategy(eta=given["eta"]),
            logp_of=given["logp_of"],
            state=Scale.of(statistics, "state", size, f"bundle.observations.{STATE}", place),
            action=Scale.of(statistics, "actions", given["actions"], "bundle.actions", place),
        )


@dataclass(frozen=True)
class Instructor:
    """Turns tasks into tokens, at the start of a fixed number of places."""

    tokenizer: PreTrainedTokenizerBase
    places: int

    def __call__(self, tasks: Sequence[str]) -> Tensor:
        """[B, places] int64: <bos>, the task and a line break, as PI0Processor writes them, then empty places.

        Raises:
            InvalidValueError: 2004, an instruction has more tokens than places.
        """
        rows = torch.full((len(tasks), self.places), EMPTY)
        for row, task in zip(rows, tasks, strict=True):
            text = f"{self.tokenizer.bos_token}{task}\n"
            tokens = torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids)
            if len(tokens) > self.places:
                raise InvalidValueError(
                    f"bundle.prompt_tokens={self.places}: the instruction {task!r} has {len(tokens)} tokens. "
                    f"Set bundle.prompt_tokens={len(tokens)} or more"
                )
            row[: len(tokens)] = tokens
        return rows


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
    sizes = configuration_of(config)
    positive(actions=actions, chunk=chunk, prompt_tokens=prompt_tokens)
    shapes = shapes_of(observations)
    check_shapes(shapes, sizes.max_state_dim)
    for name, value, limit, what in (
        ("actions", actions, sizes.max_action_dim, "numbers of an action"),
        ("chunk", chunk, sizes.chunk_size, "actions"),
    ):
        if value > limit:
            raise InvalidValueError(f"bundle.{name}={value}: the model denoises {limit} {what}. Use {limit} or less")
    vision = sizes.vlm_config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    decoders = {"dit": sizes.dit_config.num_hidden_layers}
    if train == "all":
        decoders["language_model"] = sizes.vlm_config.text_config.num_hidden_layers
    return ActionFacts(
        family=MODEL_TYPE,
        block_class_names=("GemmaDecoderLayer", "SiglipEncoderLayer"),
        lora_targets=tuple(
            f"{part}.layers.{number}.{layer}"
            for part, count in decoders.items()
            for number in range(count)
            for layer in LAYERS
        ),
        observations={**shapes, INSTRUCTION: (prompt_tokens,)},
        actions=ContinuousActions(actions),
        chunk=chunk,
        can_imitate=False,
        tokens_per_decision=len(cameras_of(shapes)) * patches + prompt_tokens + 1 + sizes.chunk_size,
        batch_multiple=multiple,
    )


def cameras_of(shapes: Shapes) -> tuple[str, ...]:
    """The keys of the images."""
    return tuple(key for key in shapes if key != STATE)


def check_shapes(shapes: Shapes, most: int) -> None:
    """Raises InvalidValueError (2004) for anything else than square images and a state of at most `most` numbers."""
    for key, shape in shapes.items():
        if key != STATE and (len(shape) != 3 or shape[0] != 3 or shape[1] != shape[2]):
            raise InvalidValueError(
                f"bundle.observations.{key}={list(shape)}: pi0 reads square images [3, H, H] and `{STATE}: [S]`. Name "
                f"such cameras, as in {{agentview: [3, 256, 256], {STATE}: [8]}}, and leave out frame_stack"
            )
    if not cameras_of(shapes) or STATE not in shapes:
        raise InvalidValueError(
            f"bundle.observations names {', '.join(shapes)}: pi0 reads at least one camera and the state of the robot. "
            f"Name both, as in {{agentview: [3, 256, 256], {STATE}: [8]}}"
        )
    state = shapes[STATE]
    if len(state) != 1 or state[0] > most:
        raise InvalidValueError(
            f"bundle.observations.{STATE}={list(state)}: the model reads a vector of at most {most} numbers. Leave out "
            "those that it was not tuned with"
        )


def checked_config(root: Path) -> Config:
    """The configuration in a folder. Raises NotFoundError (4001) if it belongs to another model."""
    config: Config = read_json(root / CONFIG)
    if config.get("model_type") != MODEL_TYPE:
        raise NotFoundError(
            f"{root}: its config.json has model_type={config.get('model_type')!r}, but Pi0Bundle reads {MODEL_TYPE!r} "
            "in the layout of transformers. Convert it: load the weights with PI0ForConditionalGeneration, and give "
            "the folder that its `save_pretrained` writes"
        )
    return config


def configuration_of(config: Config) -> PI0Config:
    """The configuration as an object, with the defaults of the published model."""
    from transformers import PI0Config

    return PI0Config.from_dict(dict(config))


def network_of(config: Config) -> PI0ForConditionalGeneration:
    """The network with weights of no meaning."""
    from transformers import PI0ForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        return PI0ForConditionalGeneration(configuration_of(config)).eval()


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
