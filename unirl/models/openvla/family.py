"""OpenVLA and OpenVLA-OFT from published checkpoints: images and an instruction to chunks of action tokens.

The files are those of `openvla/openvla-7b`, which carry code of their own that is not run here. The language model is
transformers' Llama; `vision.py` has the towers, by the names of timm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
import torch
from torch import Tensor

from unirl.config.dependencies import need_version
from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.models.language.bundle import load_tokenizer
from unirl.models.loading.checkpoint import read_entries
from unirl.models.loading.dtypes import cast_module
from unirl.models.loading.hub import quiet_libraries, read_json
from unirl.models.loading.toy_tokenizers import llama_tokenizer
from unirl.models.openvla.actions import STATISTICS, scale_of, statistics_of
from unirl.models.openvla.network import Config, DecisionPart, DecodingOrder, OpenVLAPolicy, text_config
from unirl.models.openvla.vision_towers import TOWERS
from unirl.models.policies.bundle import positive
from unirl.models.policies.instructed import CONFIG, Settings, StoredPolicyBundle, instructed_facts
from unirl.models.policies.stage import WITH_CACHE
from unirl.models.policies.vla import EMPTY, NUM_ACTIONS
from unirl.types.device import CPU
from unirl.types.facts import ActionFacts
from unirl.types.protocols import DtypeName

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_TYPE = "openvla"
PROMPT = "In: What action should the robot take to {task}?\nOut:"
"""The text with which the model was trained. The task is in lower case."""
SPACE = "\u2581"
"""The piece of the tokenizer for a space alone, which follows the prompt."""
PROMPT_TOKENS = 64
"""The places of a prompt."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of the language model."""
BESIDE = (
    *("preprocessor_config.json", "processor_config.json", "generation_config.json", STATISTICS),
    *("configuration_prismatic.py", "modeling_prismatic.py", "processing_prismatic.py"),
)
"""Files of a checkpoint that an export has, too. The last line is the code of its publisher, which is not run here."""


class OpenVLABundle(StoredPolicyBundle):
    """OpenVLA 7B, its finetuned variants, and OpenVLA-OFT with discrete actions."""

    toy: ClassVar[Mapping[str, object]] = {"path": "toy", "dtype": "fp32", "prompt_tokens": 128, "unnorm_key": "toy"}
    toys: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "toy.json")
    published: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "published.json")
    seed: ClassVar[int] = 20256
    """Seed of the random weights of the toy."""
    model_class: ClassVar[str] = "OpenVLAForActionPrediction"
    beside: ClassVar[tuple[str, ...]] = BESIDE

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
        settings = {
            "path": path, "revision": revision, "dtype": dtype, "observations": observations, "actions": actions,
            "chunk": chunk, "decoding": decoding, "temperature": temperature, "unnorm_key": unnorm_key, "parts": parts,
            "prompt_tokens": prompt_tokens,
        }  # fmt: skip
        super().__init__(device, settings, meta_init=meta_init)

    @classmethod
    def config_in(cls, root: Path, settings: Settings) -> Config:
        return checked_config(root)

    @classmethod
    def described(cls, config: Config, settings: Settings, multiple: int) -> ActionFacts:
        shapes = settings["observations"]
        check_images(shapes)
        patches = (config["image_sizes"][0] // TOWERS[config["timm_model_ids"][0]].patch) ** 2
        return instructed_facts(
            settings,
            multiple,
            family=MODEL_TYPE,
            block_class_names=("LlamaDecoderLayer", "VisionBlock"),
            lora_targets=LORA_TARGETS,
            has_parts=True,
            tokens=len(shapes) * patches + settings["chunk"] * settings["actions"],
            hidden_size=text_config(config).hidden_size,
        )

    @classmethod
    def usual(cls, config: Config) -> Settings:
        shapes = {"camera": (3, 224, 224)}
        return {"observations": shapes, "actions": NUM_ACTIONS, "prompt_tokens": PROMPT_TOKENS}

    @classmethod
    def measured(cls, config: Config) -> tuple[OpenVLAPolicy, int]:
        from accelerate import init_empty_weights

        with quiet_libraries(), init_empty_weights(include_buffers=False):
            network = OpenVLAPolicy(
                config, cameras=("camera",), actions=NUM_ACTIONS, chunk=1, decoding="parallel", temperature=1,
                scale=None,
            )  # fmt: skip
        return network, network.hidden_size

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        return llama_tokenizer() if self.root is None else load_tokenizer(self.root)

    def prompter(self) -> Prompter:
        return Prompter(self.tokenizer, self.prompt_tokens)

    def empty(self, dtype: torch.dtype) -> OpenVLAPolicy:
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


def check_images(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises InvalidValueError (2004) for the shape of anything else than an image of three channels."""
    for key, shape in shapes.items():
        if len(shape) != 3 or shape[0] != 3:
            raise InvalidValueError(
                f"bundle.observations.{key}={list(shape)}: OpenVLA reads images [3, H, W] alone. Name cameras, such as "
                "{pixels: [3, 224, 224]}, and leave out frame_stack"
            )


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
