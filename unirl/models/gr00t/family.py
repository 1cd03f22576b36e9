"""GR00T N1.5 from checkpoints of NVIDIA: images, an instruction and a state to chunks of actions, of many robots.

The vision tower is transformers' SigLIP and the language model the first layers of its Qwen3, as Eagle 2.5 joins them;
everything else is in `network.py`. The files of Eagle and its tokenizer are not beside the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import torch

from unirl.config.dependencies import need_version
from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.models.gr00t.network import GR00TPolicy
from unirl.models.language.bundle import load_tokenizer
from unirl.models.loading.checkpoint import read_entries
from unirl.models.loading.dtypes import cast_module
from unirl.models.loading.hub import copy_files, language_directory, quiet_libraries, read_json
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
from unirl.models.policies.scales import EXTREMES, Scale, Statistics
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
from unirl.types.device import CPU
from unirl.types.environments import STATE
from unirl.types.facts import ActionFacts
from unirl.types.protocols import DtypeName

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3Config, SiglipVisionConfig

MODEL_TYPE = "gr00t_n1_5"
EAGLE, HEAD = "eagle_cfg", "action_head_cfg"
"""The configurations of Eagle and of the action head. Published files lack the former; an export has it."""
TOKENIZER = "lerobot/eagle2hg-processor-groot-n1p5"
"""The hub id of the copy of Eagle's tokenizer that lerobot published."""
METADATA = Path("experiment_cfg") / "metadata.json"
"""The statistics of the data, by the name of a robot."""
ROBOTS: Mapping[str, int] = {
    "oxe_droid": 17, "gr1": 24, "agibot_genie1": 26, "maniskill_widowx": 30, "new_embodiment": 31, "libero_franka": 31,
}  # fmt: skip
"""The number of the weights of each kind of robot. Those of LIBERO and ManiSkill are RLinf's."""
ONLY: Config = {
    f"{HEAD}.use_vlln": True, f"{HEAD}.add_pos_embed": True, "backbone_cfg.project_to_dim": None,
    "backbone_cfg.reproject_vision": False, f"{HEAD}.diffusion_model_cfg.norm_type": "ada_norm",
    f"{HEAD}.diffusion_model_cfg.interleave_self_attention": True,
    f"{HEAD}.diffusion_model_cfg.positional_embeddings": None, f"{EAGLE}.mlp_connector_layers": 1,
    f"{EAGLE}.use_pixel_shuffle": False, f"{EAGLE}.select_layer": -1,
}  # fmt: skip
"""The only value that this class supports for each of these keys of config.json."""
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
IMAGE, AFTER_IMAGE, AFTER_TASK = "<image {number}><img>", "</img>", "<|im_end|>\n<|im_start|>assistant\n"
"""The text around images and the task."""
DIT_LAYERS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "ff.net.0.proj", "ff.net.2")


class GR00TBundle(StoredPolicyBundle):
    """GR00T N1.5: a SigLIP and a Qwen3 that read images and an instruction, and a DiT that denoises actions."""

    toy: ClassVar[Mapping[str, object]] = {
        "path": "toy", "tokenizer": None, "dtype": "fp32", "num_steps": 3, "prompt_tokens": 160,
    }  # fmt: skip
    toys: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "toy.json")
    published: ClassVar[Mapping[str, Config]] = read_entries(Path(__file__).parent / "published.json")
    seed: ClassVar[int] = 20255
    places: ClassVar[tuple[str, ...]] = ("revision", "tokenizer")
    model_class: ClassVar[str] = "GR00T_N1_5"
    beside: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        device: torch.device = CPU,
        *,
        path: str,
        revision: str | None = None,
        tokenizer: str | None = None,
        dtype: DtypeName = "bf16",
        observations: Mapping[str, tuple[int, ...]],
        robot: str = "new_embodiment",
        actions: int = NUM_ACTIONS,
        chunk: int = 5,
        num_steps: Annotated[int, msgspec.Meta(ge=2)] = 4,
        eta: Annotated[float, msgspec.Meta(gt=0)] = 0.5,
        logp_of: CountedEntries = "executed",
        train: TrainedPart = "expert",
        prompt_tokens: int = PROMPT_TOKENS,
        meta_init: bool = False,
    ) -> None:
        """
        Args:
            path: a hub id, a folder with the files of the published repository, or `toy` (tiny, random weights).
            revision: branch, tag or commit of a hub id.
            tokenizer: a hub id or a folder with the tokenizer of Eagle. null: that of the checkpoint, or of lerobot.
            dtype: the dtype in which the network computes.
            observations: the shapes of square images [3, H, H] by the key of the camera, in the order in which the
                network reads them, and `state: [S]` of the robot. The network resizes images.
            robot: the kind of robot, whose weights read states and write actions, and whose statistics scale them.
            actions: A, the numbers of an action.
            chunk: C, actions of one decision. The network denoises more, and the environment gets the first ones.
            num_steps: K, the denoising steps. All but the last are stochastic.
            eta: strength of their noise (FlowSDEStrategy).
            logp_of: the numbers whose log-prob counts: those that the environment gets, or all that are denoised.
            train: `expert` leaves the vision-language model as it is. With `backend.lora_cfg` it says which layers get
                adapters.
            prompt_tokens: places for the tokens of an instruction. A longer one is an error.
            meta_init: leave the network without storage. The train backend then reads only the rows of its shards.
        """
        need_version("transformers", WITH_CACHE, by=type(self).__name__)
        settings = {
            "path": path, "revision": revision, "tokenizer": tokenizer, "dtype": dtype, "observations": observations,
            "robot": robot, "actions": actions, "chunk": chunk, "num_steps": num_steps, "eta": eta, "logp_of": logp_of,
            "train": train, "prompt_tokens": prompt_tokens,
        }  # fmt: skip
        super().__init__(device, settings, meta_init=meta_init)
        self.trainable().freeze(train)

    @classmethod
    def config_in(cls, root: Path, settings: Settings) -> Config:
        return checked_config(read_json(root / CONFIG), str(root), next(iter(cls.published.values()))[EAGLE])

    @classmethod
    def described(cls, config: Config, settings: Settings, multiple: int) -> ActionFacts:
        head, (vision, text), shapes = config[HEAD], eagle_configs(config), settings["observations"]
        positive(actions=settings["actions"], chunk=settings["chunk"], prompt_tokens=settings["prompt_tokens"])
        check_sizes(
            "GR00T", shapes, settings["actions"], settings["chunk"],
            state=head["max_state_dim"], width=head["action_dim"], horizon=head["action_horizon"],
        )  # fmt: skip
        category_of(settings["robot"], head["max_num_embodiments"])
        targets = decoder_targets(
            {
                "action_head.model.transformer_blocks": head["diffusion_model_cfg"]["num_layers"],
                "vl_self_attention.transformer_blocks": head["vl_self_attention_cfg"]["num_layers"],
            },
            DIT_LAYERS,
        )
        if settings["train"] == "all":
            targets += decoder_targets({"language_model.model.layers": text.num_hidden_layers})
        cameras, patches = len(cameras_of(shapes)), (vision.image_size // vision.patch_size) ** 2
        own = 1 + head["num_target_vision_tokens"] + head["action_horizon"]
        return instructed_facts(
            settings,
            multiple,
            family=MODEL_TYPE,
            block_class_names=("DiTBlock", "ContextBlock", "Qwen3DecoderLayer", "SiglipEncoderLayer"),
            lora_targets=targets,
            tokens=cameras * patches + own,
            hidden_size=head["backbone_embedding_dim"] + head["input_embedding_dim"],
        )

    @classmethod
    def usual(cls, config: Config) -> Settings:
        head = config[HEAD]
        shapes = {"camera": (3, 224, 224), STATE: (head["max_state_dim"],)}
        actions = min(NUM_ACTIONS, head["action_dim"])
        return {"observations": shapes, "actions": actions, "train": "expert", "robot": "new_embodiment"}

    @classmethod
    def measured(cls, config: Config) -> tuple[GR00TPolicy, int]:
        given = {**cls.usual(config), "chunk": 1, "num_steps": 2, "eta": 1.0, "logp_of": "executed"}
        network = empty_network(config, [], 0, chain_settings(given, {}, "no data"))
        return network, eagle_configs(config)[1].hidden_size

    def trainable(self) -> GR00TPolicy:
        network = super().trainable()
        assert isinstance(network, GR00TPolicy)
        return network

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        given, root = self.settings["tokenizer"], self.root
        if given is None and root is None:
            return qwen_tokenizer()
        if given is None and root is not None and has_tokenizer(root):
            return load_tokenizer(root)
        return load_tokenizer(language_directory(given or TOKENIZER, None, configs_only=True))

    def prompter(self) -> Instructor:
        return Instructor(self.tokenizer, self.prompt_tokens, lambda task: f"{AFTER_IMAGE}{task}{AFTER_TASK}")

    def empty(self, dtype: torch.dtype) -> GR00TPolicy:
        settings = chain_settings(self.settings, self.statistics(), f"the data of {self.path}", bounds=EXTREMES)
        state: Scale = settings["state"]
        # A number that is always the same becomes 0, as in the publisher's code.
        settings["state"] = replace(state, std=state.std.where(state.std != 0, torch.inf))
        openings = [
            (SYSTEM if number == 0 else AFTER_IMAGE) + IMAGE.format(number=number + 1)
            for number in range(len(cameras_of(self.settings["observations"])))
        ]
        tokens = [torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids) for text in openings]
        category = category_of(self.settings["robot"], self.config[HEAD]["max_num_embodiments"])
        network = empty_network(self.config, tokens, category, settings)
        cast_module(network, dtype)
        return network

    def statistics(self) -> Statistics:
        """The smallest and largest numbers of states and actions, joined in the order of the file. Empty: none."""
        root, robot = self.root, self.settings["robot"]
        if root is None or not (root / METADATA).is_file():
            return {}
        robots = read_json(root / METADATA)
        if robot not in robots:
            raise InvalidValueError(
                f"bundle.robot={robot}: {root / METADATA} has statistics of {', '.join(robots)}. Use one of these, or "
                "give weights that were tuned on the robot"
            )
        given = robots[robot]["statistics"]
        return {
            f"{ours}_{part}": torch.tensor([number for entry in given[theirs].values() for number in entry[part]])
            for theirs, ours in (("state", "state"), ("action", "actions"))
            for part in EXTREMES
        }

    def write(self, folder: Path, tensors: Mapping[str, Any]) -> Path:
        super().write(folder, tensors)
        if self.root is not None and (self.root / METADATA).is_file():
            (folder / METADATA).parent.mkdir(exist_ok=True)
            copy_files(self.root, folder, [str(METADATA)])
        return folder


def checked_config(config: Config, place: str, eagle: Config) -> Config:
    """The configuration, with that of Eagle in it.

    Raises:
        NotFoundError: 4001, it belongs to another model, or asks for what is not available.
    """
    if config.get("model_type") != MODEL_TYPE:
        raise NotFoundError(
            f"{place}: its config.json has model_type={config.get('model_type')!r}, but GR00TBundle reads "
            f"{MODEL_TYPE!r}, which is GR00T N1.5. Use a checkpoint such as nvidia/GR00T-N1.5-3B"
        )
    config = {EAGLE: eagle, **config}
    for name, value in ONLY.items():
        *blocks, last = name.split(".")
        block: Config = config
        for part in blocks:
            block = block[part]
        if block.get(last, value) != value:
            raise NotFoundError(
                f"{place}: its config.json has {name}={json.dumps(block[last])}, which is not available. Use a "
                f"checkpoint with {json.dumps(value)}, as nvidia/GR00T-N1.5-3B has"
            )
    return config


def category_of(robot: str, count: int) -> int:
    """The number of the weights of a robot. Raises InvalidValueError (2004) for a robot that is not known."""
    number = ROBOTS.get(robot)
    if number is None or number >= count:
        raise InvalidValueError(f"bundle.robot={robot}: the robots are {', '.join(ROBOTS)}. Use one of these names")
    return number


def eagle_configs(config: Config) -> tuple[SiglipVisionConfig, Qwen3Config]:
    """The configurations of the vision tower and of the layers of the language model that run."""
    from transformers import Qwen3Config, SiglipVisionConfig

    eagle, count = config[EAGLE], config["backbone_cfg"]["select_layer"]
    vision: SiglipVisionConfig = SiglipVisionConfig.from_dict({**eagle["vision_config"], "vision_use_head": False})
    text: Qwen3Config = Qwen3Config.from_dict({**eagle["text_config"], "num_hidden_layers": count})
    return vision, text


def empty_network(config: Config, openings: list[torch.Tensor], category: int, settings: dict[str, Any]) -> GR00TPolicy:
    """The network without storage for its parameters. Computed buffers have storage and values."""
    from accelerate import init_empty_weights

    with quiet_libraries(), init_empty_weights(include_buffers=False):
        vision, text = eagle_configs(config)
        return GR00TPolicy(vision, text, config[HEAD], openings=openings, category=category, **settings).eval()
