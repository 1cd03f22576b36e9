"""NextStep-1: text to image with continuous image tokens. NextStep Team 2025 (arXiv:2508.10711).

    config.json, model*.safetensors, tokenizer     the network, with the published tensor names
    vae/                                           diffusers' AutoencoderKL, or the layout of the authors

A prompt is followed by `<|image_area|>`, the size of the image in tokens (`32*32`), and `<|begin_of_image|>`. Then
the image tokens follow, row by row, each of them a patch of the VAE's latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from unirl.config.errors import DataError, NotFoundError
from unirl.models.base import components_to_load
from unirl.models.chunks import batch_multiple
from unirl.models.denoising.continuous_token_pipeline import Config, ContinuousTokenBundle, ContinuousTokenPipeline
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.language.bundle import load_tokenizer
from unirl.models.language.packing import prompt_tokens
from unirl.models.loading.adapter_sources import AdapterLayers, adapter_file, read_peft
from unirl.models.loading.checkpoint import VAE, read_entries, vae_cost
from unirl.models.loading.completeness import check_tensors, loading_info
from unirl.models.loading.dtypes import cast_module
from unirl.models.loading.estimate import (
    DecodingCost,
    ModelEstimate,
    block_counts,
    buffers_of,
    linears_of,
    parameters_of,
)
from unirl.models.loading.hub import language_directory, quiet_libraries, read_json
from unirl.models.loading.kl_vae import build_kl_vae, kl_vae_config, load_kl_vae, random_kl_vae
from unirl.models.loading.saved_weights import LANGUAGE_WEIGHTS, ModuleWeights, SafetensorsWeights, SavedWeights
from unirl.models.loading.toy_tokenizers import qwen_tokenizer
from unirl.models.nextstep1.network import defaults, network_class
from unirl.sde.guidance import NEGATIVE, Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.device import CPU
from unirl.types.facts import LatentFacts
from unirl.types.protocols import TORCH_DTYPES, DtypeName, VaeDtype
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2Model

FOLDER = Path(__file__).parent
LM = "lm"
IMAGE_AREA = "<|image_area|>"
SPECIALS = (IMAGE_AREA, "<|begin_of_image|>", "<|end_of_image|>", "<|image_placeholder|>")
AREA_TOKENS = 9
"""Most tokens between a prompt and its image: the marks of area and image, and a size such as `128*128`."""
LORA_TARGETS = (*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.0", "mlp.2")
"""The attention of the decoder, and the layers of the flow-matching head's residual blocks."""
COMPUTED = ("gen_pos_embed",)
"""Tensors in published files that the network computes."""
READABLE = {"model_type": "nextstep", "attention_bias": True, "o_attention_bias": False, "mlp_bias": False}
"""Values of a configuration without which the decoder is not that of Qwen2."""


def facts(config: Config, vae: Config, multiple: int) -> LatentFacts:
    """The facts of a checkpoint."""
    vae_scale, patch_size = 2 ** (len(vae["block_out_channels"]) - 1), config["latent_patch_size"]
    grid_side = config["base_image_grid_size"] if config["use_gen_pos_embed"] else None
    return LatentFacts(
        family="nextstep1",
        trainable_attr=LM,
        block_class_names=("Qwen2DecoderLayer", "FlowBlock"),
        lora_targets=LORA_TARGETS,
        latent_channels=config["latent_channels"],
        vae_scale=vae_scale,
        patch_size=patch_size,
        schedule=SigmaSchedule(),
        guidance=Guidance(),
        batch_multiple=multiple,
        extra_text_tokens=AREA_TOKENS,
        largest_side=None if grid_side is None else grid_side * vae_scale * patch_size,
    )


class NextStepBundle(ContinuousTokenBundle):
    """The decoder with its flow-matching head in one network; the VAE; the tokenizer."""

    toy: ClassVar[Mapping[str, object]] = {"path": "toy", "dtype": "fp32"}
    toys: ClassVar[Mapping[str, Config]] = read_entries(FOLDER / "toy.json")
    published: ClassVar[Mapping[str, Config]] = read_entries(FOLDER / "published.json")
    seed: int = 20253
    """Seed of the random weights of the toys."""

    def __init__(
        self,
        device: torch.device = CPU,
        components: Sequence[str] | None = None,
        *,
        path: str,
        revision: str | None = None,
        dtype: DtypeName = "bf16",
        vae_dtype: VaeDtype = "auto",
        norm_tokens: bool = True,
        meta_init: bool = False,
    ) -> None:
        """
        Args:
            components: load only these and the network. None loads all.
            path: a hub id, a directory in the published layout, or `toy` (tiny, random).
            revision: branch, tag or commit of a hub id.
            dtype: the compute dtype of the network.
            vae_dtype: the compute dtype of the VAE; the word "auto" takes fp32.
            norm_tokens: give each finished image token the mean 0 and the variance 1 before the network and the VAE
                read it, as the published examples do.
            meta_init: leave the network without storage; its backend reads only the shards it needs.
        """
        self.path, self.norm_tokens = path, norm_tokens
        self.root = None if path in self.toys else language_directory(path, revision)
        self.config, self.vae_config = self._configs(path, self.root)
        self.dtype = TORCH_DTYPES[dtype]
        with quiet_libraries():
            modules: dict[str, nn.Module] = {LM: self._network(self.root, meta_init)}
            if VAE in components_to_load(components, (LM, VAE), LM):
                modules[VAE] = self._vae(vae_torch_dtype(vae_dtype))
            self.tokenizer = self._tokenizer()
        known = facts(self.config, self.vae_config, batch_multiple(device))
        super().__init__(modules, known, dtype=self.dtype, device=device)
        self.trainable().get_submodule("lm_head").requires_grad_(False)  # no image depends on it

    # Facts without loading the model

    @classmethod
    def facts_of(cls, path: str, revision: str | None = None, device: torch.device = CPU) -> LatentFacts:
        """The facts of a model that is not loaded, from its configuration files."""
        return facts(*cls._configs_to_plan(path, revision), batch_multiple(device))

    @classmethod
    def estimate(cls, path: str, revision: str | None = None) -> ModelEstimate:
        """Parameter counts of a model that is not loaded. They include the language model head, which no image runs."""
        config, vae = cls._configs_to_plan(path, revision)
        with quiet_libraries(), torch.device("meta"):
            network, decoder = build_network(config), build_kl_vae(vae)
        known = facts(config, vae, 1)
        return ModelEstimate(
            facts=known,
            parameters={LM: parameters_of(network), VAE: parameters_of(decoder)},
            linears={name: shape for name, shape in linears_of(network).items() if name != "lm_head"},
            patches={},
            buffers=buffers_of(network),
            **block_counts(network, known) | {"num_blocks": config["num_hidden_layers"]},
            width=config["hidden_size"],
        )

    @classmethod
    def decoding(
        cls,
        path: str,
        sampling: DiffusionSamplingParams,
        revision: str | None = None,
        *,
        vae_dtype: VaeDtype,
        dtype: DtypeName,
        tiled: bool,
    ) -> DecodingCost:
        """The cost of decoding one sample of a model that is not loaded, in tiles or whole."""
        config, vae = cls._configs_to_plan(path, revision)
        with torch.device("meta"):
            decoder = build_kl_vae(vae)
        return vae_cost(decoder, facts(config, vae, 1).latent_shape(sampling), vae_torch_dtype(vae_dtype), tiled)

    @classmethod
    def _configs_to_plan(cls, path: str, revision: str | None) -> tuple[Config, Config]:
        if path in cls.published and revision is None:
            return defaults(cls.published[path][LM]), cls.published[path][VAE]
        return cls._configs(path, None if path in cls.toys else language_directory(path, revision, configs_only=True))

    @classmethod
    def _configs(cls, path: str, root: Path | None) -> tuple[Config, Config]:
        """The configurations of network and VAE. Raises NotFoundError (4001) for a model of another family."""
        if root is None:
            return defaults(cls.toys[path][LM]), cls.toys[path][VAE]
        config = defaults(read_json(root / "config.json"))
        for key, value in READABLE.items():
            if config.get(key) != value:
                raise NotFoundError(
                    f"{root}: its config.json has {key}={config.get(key)!r}, but {cls.__name__} reads {value!r}, as in "
                    "the published NextStep-1 models. Use the bundle of that family, or another path"
                )
        return config, kl_vae_config(root / VAE)

    # Weights

    def saved(self) -> SavedWeights:
        return ModuleWeights(self.untrained()) if self.root is None else self._saved_in(self.root)

    def saved_at(self, path: str, revision: str | None = None) -> SavedWeights:
        other = copy(self)
        other.root = None if path in self.toys else language_directory(path, revision)
        other.config, _ = self._configs(path, other.root)
        other.seed = self.seed + 1  # two checkpoints differ, those of toys too
        return other.saved()

    def read_adapter(self, path: str) -> AdapterLayers:
        return read_peft(adapter_file(path), lambda: build_network(self.config))

    def untrained(self) -> nn.Module:
        return self._network(self.root).requires_grad_(False).eval()

    def network_at(self, folder: Path) -> nn.Module:
        return self._network(folder).requires_grad_(False).eval()

    def _saved_in(self, root: Path) -> SavedWeights:
        return SafetensorsWeights(root, lambda name: self.dtype, LANGUAGE_WEIGHTS)

    def _network(self, root: Path | None, is_empty: bool = False) -> nn.Module:
        """The network with the weights in `root`, with those of a toy, or without storage for its parameters."""
        from accelerate import init_empty_weights

        if root is None and not is_empty:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                network = build_network(self.config)
            cast_module(network, self.dtype)
            return network
        with init_empty_weights(include_buffers=False):
            network = build_network(self.config)
        cast_module(network, self.dtype)
        if root is not None:
            saved = self._saved_in(root)
            expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
            shapes = {name: shape for name, shape in saved.shapes().items() if name not in COMPUTED}
            info = loading_info(shapes, expected)
            check_tensors(f"the model in {root}", type(network).__name__, info, may_have_more=False)
            if not is_empty:
                network.load_state_dict({name: saved.read(name) for name in expected}, assign=True)
        return network

    def _vae(self, dtype: torch.dtype) -> nn.Module:
        if self.root is None:
            return random_kl_vae(self.vae_config, self.seed, dtype)
        return load_kl_vae(self.root / VAE, self.vae_config, dtype)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises NotFoundError if its files are missing, or have no mark of an image's area."""
        tokenizer = toy_tokenizer() if self.root is None else load_tokenizer(self.root)
        if IMAGE_AREA not in tokenizer.get_vocab():
            raise NotFoundError(
                f"the tokenizer in {self.root} has no token {IMAGE_AREA}, which tells NextStep-1 the size of an image. "
                "Download the tokenizer of the model again"
            )
        return tokenizer


class NextStepPipeline(ContinuousTokenPipeline[NextStepBundle]):
    """Text to image with NextStep-1."""

    def encode(
        self,
        texts: Sequence[str],
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Conditions:
        """`prompt`, and `negative_prompt` if guidance is active: tokens of texts, then the size of the image."""
        if images is not None:
            raise DataError(
                f"{self.facts.family} takes no condition images, but prompts have some. Remove their media_refs"
            )
        conditions: Conditions = {"prompt": self._prompts(texts, params)}
        if self.facts.guidance_of(params).active:
            conditions[NEGATIVE + "prompt"] = self._prompts([params.negative_prompt] * len(texts), params)
        return conditions

    def _prompts(self, texts: Sequence[str], params: DiffusionSamplingParams) -> PromptTokens:
        """The tokens of texts, cut to `max_sequence_length`, and of the beginning of an image."""
        tokenizer, side = self.bundle.tokenizer, self.facts.vae_scale * self.facts.patch_size
        area = f"{IMAGE_AREA}{params.height // side}*{params.width // side}"
        image = [*tokenizer(area, add_special_tokens=False)["input_ids"], self.bundle.config["boi"]]
        options: dict[str, Any] = {"truncation": True, "max_length": params.max_sequence_length}
        rows = {text: tokenizer(text, **options)["input_ids"] + image for text in dict.fromkeys(texts)}
        return prompt_tokens([rows[text] for text in texts]).to(self.bundle.device)


def build_network(config: Config) -> Qwen2Model:
    """The network with new weights, or without storage under the meta device."""
    from transformers import Qwen2Config

    return network_class()(Qwen2Config.from_dict(dict(config)))


def vae_torch_dtype(choice: VaeDtype) -> torch.dtype:
    """The dtype in which the VAE computes."""
    return torch.float32 if choice == "auto" else TORCH_DTYPES[choice]


def toy_tokenizer() -> PreTrainedTokenizerBase:
    """A Qwen tokenizer with the special tokens of NextStep-1."""
    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens(list(SPECIALS), special_tokens=True)
    return tokenizer
