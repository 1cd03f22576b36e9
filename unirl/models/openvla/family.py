"""OpenVLA and OpenVLA-OFT from published checkpoints: images and an instruction to chunks of action tokens.

The files are those of `openvla/openvla-7b`, which carry code of their own that is not run here. The language model is
transformers' Llama; `vision.py` has the towers, by the names of timm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from unirl.config.dependencies import need_version
from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.models.chunks import batch_multiple
from unirl.models.language.bundle import VOCABULARIES, load_tokenizer
from unirl.models.loading.checkpoint import read_entries
from unirl.models.loading.completeness import check_files, check_tensors, loading_info, read_headers
from unirl.models.loading.dtypes import cast_module
from unirl.models.loading.estimate import ModelEstimate, block_counts, linears_of, parameters_of, patches_of
from unirl.models.loading.hub import copy_files, language_directory, quiet_libraries, read_json
from unirl.models.loading.saved_weights import LANGUAGE_WEIGHTS, ModuleWeights, SafetensorsWeights, SavedWeights
from unirl.models.loading.toy_tokenizers import llama_tokenizer
from unirl.models.openvla.actions import STATISTICS, scale_of, statistics_of
from unirl.models.openvla.network import Config, DecisionPart, DecodingOrder, OpenVLAPolicy
from unirl.models.openvla.vision_towers import TOWERS
from unirl.models.policies.bundle import POLICY, ActionBundle, positive, shapes_of
from unirl.models.policies.stage import WITH_CACHE, InstructedStage
from unirl.models.policies.vla import random_state
from unirl.types.device import CPU
from unirl.types.environments import INSTRUCTION, ContinuousActions
from unirl.types.facts import ActionFacts
from unirl.types.protocols import TORCH_DTYPES, DtypeName

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_TYPE = "openvla"
CONFIG = "config.json"
PROMPT = "In: What action should the robot take to {task}?\nOut:"
"""The text with which the model was trained. The task is in lower case."""
SPACE = "\u2581"
"""The piece of the tokenizer for a space alone, which follows the prompt."""
CAMERA, NUM_ACTIONS, PROMPT_TOKENS = "camera", 7, 64
"""A camera, the numbers of an action, and the places of a prompt, of the usual robot."""
EMPTY = -1
"""Stands in the places of an instruction that no token fills."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of the language model."""
BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", *VOCABULARIES),
    *("preprocessor_config.json", "processor_config.json", "generation_config.json", STATISTICS),
    *("configuration_prismatic.py", "modeling_prismatic.py", "processing_prismatic.py"),
)
"""Files of a checkpoint that an export has, too. The last line is the code of its publisher, which is not run here."""


class OpenVLABundle(ActionBundle):
    """OpenVLA 7B, its finetuned variants, and OpenVLA-OFT with discrete actions."""

    toy: ClassVar[Mapping[str, object]] = {"path": "toy", "dtype": "fp32", "prompt_tokens": 128, "unnorm_key": "toy"}
    toys: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "toy.json")
    published: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "published.json")
    """Configurations of public checkpoints by hub id, for plans without a connection. A run reads the files."""
    seed: ClassVar[int] = 20256
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
        chunk: int = 1,
        decoding: DecodingOrder = "autoregressive",
        temperature: Annotated[float, msgspec.Meta(gt=0)] = 1.0,
        unnorm_key: str | None = None,
        parts: DecisionPart = "token",
        prompt_tokens: int = PROMPT_TOKENS,
        meta_init: bool = False,
    ) -> None:
        """
        Args:
            path: a hub id, a folder with the files of the published repository, or `toy` (tiny, random weights).
            revision: branch, tag or commit of a hub id.
            dtype: the dtype in which the network computes.
            observations: the shapes of images [3, H, W] by the key of the camera. Any size; the network resizes them.
            actions: A, the numbers of an action.
            chunk: C, actions of one decision.
            decoding: `autoregressive` as OpenVLA, or `parallel` as OpenVLA-OFT. A checkpoint knows one of them.
            temperature: divides the logits, in rollouts and in training.
            unnorm_key: the data set whose statistics scale actions, as `norm_stats` of config.json or
                dataset_statistics.json name it. null: the environment gets numbers in [-1, 1].
            parts: what of a decision has a log-prob of its own, for `algorithm.ratio_of=part`: each token, each action
                of the chunk, or nothing but the chunk.
            prompt_tokens: places for the tokens of a prompt. A longer instruction is an error.
            meta_init: leave the network without storage. The train backend then reads only the rows of its shards.
        """
        positive(actions=actions, chunk=chunk, prompt_tokens=prompt_tokens)
        if decoding == "autoregressive":
            need_version("transformers", WITH_CACHE, by="bundle.decoding=autoregressive")
        shapes = image_shapes(observations)
        self.path, self.revision, self.prompt_tokens, self.dtype_name = path, revision, prompt_tokens, dtype
        self.root = None if path in self.toys else language_directory(path, revision)
        self.config = self.toys[path] if self.root is None else checked_config(self.root)
        self.settings: dict[str, Any] = {
            "observations": shapes, "actions": actions, "chunk": chunk, "decoding": decoding,
            "temperature": temperature, "unnorm_key": unnorm_key, "parts": parts, "prompt_tokens": prompt_tokens,
        }  # fmt: skip
        self.tokenizer = llama_tokenizer() if self.root is None else load_tokenizer(self.root)
        facts = facts_of(self.config, shapes, actions, chunk, prompt_tokens, batch_multiple(device))
        torch_dtype = TORCH_DTYPES[dtype]
        network = self._empty(torch_dtype)
        if not meta_init:
            network.load_state_dict(self._state(torch_dtype), assign=True)
        super().__init__({POLICY: network}, facts, dtype=torch_dtype, device=device)

    @classmethod
    def facts_from(cls, settings: Mapping[str, Any]) -> ActionFacts:
        """The facts of the policy with these settings of a recipe, without its weights."""
        names = ("observations", "actions", "chunk", "prompt_tokens")
        observations, actions, chunk, prompt_tokens = (settings[name] for name in names)
        config = cls._config_to_plan(settings["path"], settings["revision"])
        return facts_of(config, image_shapes(observations), actions, chunk, prompt_tokens, 1)

    @classmethod
    def _config_to_plan(cls, path: str, revision: str | None) -> Config:
        """The configuration, without the weights."""
        if path in cls.published and revision is None:
            return cls.published[path]
        if path in cls.toys:
            return cls.toys[path]
        return checked_config(language_directory(path, revision, configs_only=True))

    @classmethod
    def estimate(cls, path: str, revision: str | None = None) -> ModelEstimate:
        """The sizes of a model that is not loaded, for decisions of one action from one image."""
        from accelerate import init_empty_weights

        config = cls._config_to_plan(path, revision)
        facts = facts_of(config, {CAMERA: (3, 224, 224)}, NUM_ACTIONS, 1, PROMPT_TOKENS, 1)
        with quiet_libraries(), init_empty_weights(include_buffers=False):
            network = OpenVLAPolicy(
                config, cameras=(CAMERA,), actions=NUM_ACTIONS, chunk=1, decoding="parallel", temperature=1, scale=None
            )
        return ModelEstimate(
            facts=facts,
            parameters={POLICY: parameters_of(network)},
            linears=linears_of(network),
            patches=patches_of(network),
            **block_counts(network, facts),
            width=network.language_model.config.hidden_size,
        )

    def stage(self) -> InstructedStage:
        width = self.config["text_config"]["hidden_size"]
        return InstructedStage(
            self.trainable(), self.facts, Prompter(self.tokenizer, self.prompt_tokens), width, self.dtype
        )

    def saved(self) -> SavedWeights:
        if self.root is None:
            return ModuleWeights(self.untrained())
        return SafetensorsWeights(self.root, lambda _: self.dtype, LANGUAGE_WEIGHTS)

    def untrained(self) -> OpenVLAPolicy:
        network = self._empty(self.dtype)
        network.load_state_dict(self._state(self.dtype), assign=True)
        return network.requires_grad_(False).eval()

    def reopened(self, folder: Path) -> OpenVLABundle:
        return OpenVLABundle(self.device, path=str(folder), dtype=self.dtype_name, **self.settings)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Write the policy in the layout of the published checkpoint. Tensors that never run are copied."""
        folder.mkdir(parents=True, exist_ok=True)
        state: dict[str, Tensor] = dict(self.saved_tensors()) | dict(tensors)
        save_file(
            {name: tensor.detach().cpu().to(self.dtype).contiguous() for name, tensor in state.items()},
            folder / LANGUAGE_WEIGHTS,
            metadata={"format": "pt"},
        )
        if self.root is None:
            self.tokenizer.save_pretrained(folder)
        else:
            copy_files(self.root, folder, BESIDE)
        (folder / CONFIG).write_text(json.dumps(dict(self.config), indent=2) + "\n", encoding="utf-8")
        return folder

    def saved_tensors(self) -> dict[str, Tensor]:
        """All tensors of the checkpoint, those that never run included."""
        saved = self.saved()
        return {name: saved.read(name) for name in saved.shapes()}

    def _empty(self, dtype: torch.dtype) -> OpenVLAPolicy:
        """The network without storage for its parameters. Computed buffers have storage and values."""
        from accelerate import init_empty_weights

        settings, key = self.settings, self.settings["unnorm_key"]
        scale = None
        if key is not None:
            scale = scale_of(statistics_of(self.config, self.root), key, self.path)
            if scale.size != settings["actions"]:
                raise InvalidValueError(
                    f"bundle.actions={settings['actions']}: the statistics of {key} have {scale.size} numbers. Set "
                    f"bundle.actions={scale.size}"
                )
        with quiet_libraries(), init_empty_weights(include_buffers=False):
            network = OpenVLAPolicy(
                self.config,
                cameras=tuple(settings["observations"]),
                actions=settings["actions"],
                chunk=settings["chunk"],
                decoding=settings["decoding"],
                temperature=settings["temperature"],
                scale=scale,
                parts=settings["parts"],
            )
        cast_module(network, dtype)
        return network

    def _state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of the network from the files, or those of the toy."""
        expected = {name: tuple(tensor.shape) for name, tensor in self._empty(dtype).state_dict().items()}
        if self.root is None:
            return random_state(expected, self.seed, dtype)
        place = f"the model in {self.root}"
        check_files(place, self.root, LANGUAGE_WEIGHTS)
        shapes = {name: tensor.shape for name, tensor in read_headers(place, self.root, LANGUAGE_WEIGHTS).items()}
        check_tensors(place, "OpenVLAForActionPrediction", loading_info(shapes, expected), may_have_more=True)
        saved = SafetensorsWeights(self.root, lambda _: dtype, LANGUAGE_WEIGHTS)
        return {name: saved.read(name) for name in expected}


@dataclass(frozen=True)
class Prompter:
    """Turns tasks into prompts of a fixed number of places."""

    tokenizer: PreTrainedTokenizerBase
    places: int

    def __call__(self, tasks: Sequence[str]) -> Tensor:
        """[B, places] int64: the first token, empty places, and the further tokens.

        Raises:
            InvalidValueError: 2004, a prompt has more tokens than places.
        """
        rows = torch.full((len(tasks), self.places), EMPTY)
        for row, task in zip(rows, tasks, strict=True):
            tokens = torch.tensor(self.tokens(task))
            if len(tokens) > self.places:
                raise InvalidValueError(
                    f"bundle.prompt_tokens={self.places}: the prompt of the task {task!r} has {len(tokens)} tokens. "
                    f"Set bundle.prompt_tokens={len(tokens)} or more"
                )
            row[0] = tokens[0]
            row[self.places - len(tokens) + 1 :] = tokens[1:]
        return rows

    def tokens(self, task: str) -> list[int]:
        """The tokens of a prompt, with the space after it that the model was trained with."""
        tokens: list[int] = self.tokenizer(PROMPT.format(task=task.lower())).input_ids
        space = self.tokenizer.convert_tokens_to_ids(SPACE)
        return tokens if tokens[-1] == space else [*tokens, space]


def facts_of(
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    actions: int,
    chunk: int,
    prompt_tokens: int,
    multiple: int,
) -> ActionFacts:
    """The facts of a policy that reads images of `shapes`."""
    patches = (config["image_sizes"][0] // TOWERS[config["timm_model_ids"][0]].patch) ** 2
    return ActionFacts(
        family=MODEL_TYPE,
        block_class_names=("LlamaDecoderLayer", "VisionBlock"),
        lora_targets=LORA_TARGETS,
        observations={**shapes, INSTRUCTION: (prompt_tokens,)},
        actions=ContinuousActions(actions),
        chunk=chunk,
        has_parts=True,
        can_imitate=False,
        tokens_per_decision=len(shapes) * patches + prompt_tokens + chunk * actions,
        batch_multiple=multiple,
    )


def image_shapes(observations: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of the cameras. Raises InvalidValueError (2004) for anything else than images of three channels."""
    shapes = dict(shapes_of(observations))
    for key, shape in shapes.items():
        if len(shape) != 3 or shape[0] != 3:
            raise InvalidValueError(
                f"bundle.observations.{key}={list(shape)}: OpenVLA reads images [3, H, W] alone. Name cameras, such as "
                "{pixels: [3, 224, 224]}, and leave out frame_stack"
            )
    return shapes


def checked_config(root: Path) -> Config:
    """The configuration in a folder.

    Raises:
        NotFoundError: 4001, it belongs to another model, or asks for what is not available.
    """
    config: Config = read_json(root / CONFIG)
    if config.get("model_type") != MODEL_TYPE:
        raise NotFoundError(
            f"{root}: its config.json has model_type={config.get('model_type')!r}, but OpenVLABundle reads "
            f"{MODEL_TYPE!r}. Use a checkpoint such as openvla/openvla-7b"
        )
    needed = {"timm_model_ids", "image_sizes", "text_config", "n_action_bins", "pad_to_multiple_of"}
    missing = sorted(needed - config.keys())
    if missing:
        raise NotFoundError(f"{root}: its config.json has no {', '.join(missing)}. Download it again")
    towers = config["timm_model_ids"]
    unknown = [name for name in towers if name not in TOWERS]
    if unknown or len(towers) != 2:
        raise NotFoundError(
            f"{root}: its config.json has timm_model_ids={towers}, and OpenVLABundle knows two towers of "
            f"{', '.join(name for name in TOWERS if not name.startswith('toy'))}. Use a checkpoint with these"
        )
    if config.get("image_resize_strategy", "resize-naive") != "resize-naive":
        raise NotFoundError(
            f"{root}: its config.json has image_resize_strategy={config['image_resize_strategy']!r}, and only "
            "'resize-naive' is available. Use a checkpoint with it, such as openvla/openvla-7b"
        )
    return config
