"""BAGEL: text to image, and text, with one Mixture of Transformers. Deng et al. 2025 (arXiv:2505.14683).

The track `image` is a denoising policy whose prompt the network embeds itself. Every other track is a policy over
tokens by the understanding expert of the same network. Prompts with images, and so editing, are not available.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.bagel.checkpoint import (
    NETWORK,
    NETWORK_FILE,
    BagelFamily,
    write_checkpoint,
)
from unirl.models.bagel.packing import MARKS, image_inputs
from unirl.models.base import Stage
from unirl.models.denoising.diffusers_pipeline import sample_with_euler
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.stage import DiffusionStage
from unirl.models.denoising.vae import KLBundle
from unirl.models.language.bundle import LORA_TARGETS, load_tokenizer
from unirl.models.language.chat import TextCodec
from unirl.models.language.packing import prompt_tokens
from unirl.models.language.stage import ARStage
from unirl.models.loading.adapter_files import Adapter, write_peft_adapter
from unirl.models.loading.adapter_sources import AdapterLayers, read_peft
from unirl.models.loading.checkpoint import VAE, ModelConfigs, family_files
from unirl.models.loading.hub import quiet_libraries
from unirl.models.loading.saved_weights import SafetensorsWeights, SavedWeights
from unirl.models.loading.toy_tokenizers import qwen_tokenizer
from unirl.models.unified.pipeline import IMAGE, UnifiedBundle, UnifiedPipeline, Written
from unirl.sde.guidance import NEGATIVE, RenormGuidance, RenormType
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.device import CPU
from unirl.types.facts import LanguageFacts, LatentFacts
from unirl.types.protocols import DtypeName, VaeDtype
from unirl.types.sampling import DiffusionSamplingParams, Sampling, sampling_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGIN, END = "<|im_start|>", "<|im_end|>"
"""Each text, a prompt or an answer, stands between these tokens."""
THINK_INSTRUCTION = (
    "You should first think about the planning process in the mind and then generate the image. \n"
    "The planning process is enclosed within <think> </think> tags, i.e. <think> planning process here </think> image "
    "here"
)
"""The system text with which the model was trained to write before it draws."""
IMAGE_MARKS = ("<|vision_start|>", "<|vision_end|>")
GENERATION_LAYERS = (
    *(f"self_attn.{name}_proj_moe_gen" for name in "qkvo"),
    *(f"mlp_moe_gen.{name}_proj" for name in ("gate", "up", "down")),
)
"""The linear layers of the generation expert, which adapters change."""
BLOCKS = ("Qwen2MoTDecoderLayer",)


@dataclass(frozen=True, kw_only=True)
class BagelFacts(LatentFacts):
    """Facts about BAGEL as a model that denoises latents."""

    largest_side: int
    """Pixels of the longest side for which the model has positions."""

    def check(self, sampling: Sampling) -> None:
        super().check(sampling)
        params = sampling_as(DiffusionSamplingParams, sampling, f"{self.family} samples with")
        for name, side in (("height", params.height), ("width", params.width)):
            if side > self.largest_side:
                raise ValueError(
                    f"sampling.{name}={side}: {self.family} has positions for {self.largest_side} pixels. Use "
                    f"{self.largest_side} or less"
                )
        if params.negative_prompt:
            raise ValueError(
                f"sampling.negative_prompt={params.negative_prompt!r}: the unconditional pass of {self.family} has no "
                "text. Remove the key"
            )


def facts(configs: ModelConfigs, batch_multiple: int) -> BagelFacts:
    """The facts of a checkpoint."""
    network, vae = configs.components[NETWORK], configs.components[VAE]
    head_width = network["hidden_size"] // network["num_attention_heads"]
    text = LanguageFacts(
        family="bagel",
        trainable_attr=NETWORK,
        block_class_names=BLOCKS,
        lora_targets=LORA_TARGETS,
        batch_multiple=batch_multiple,
        vocab_size=network["vocab_size"],
        hidden_size=network["hidden_size"],
        context_length=network["max_position_embeddings"],
        cache_width=2 * network["num_hidden_layers"] * network["num_key_value_heads"] * head_width,
    )
    vae_scale, patch_size = 2 ** (len(vae["block_out_channels"]) - 1), network["latent_patch_size"]
    return BagelFacts(
        family="bagel",
        trainable_attr=NETWORK,
        block_class_names=BLOCKS,
        lora_targets=GENERATION_LAYERS,
        latent_channels=network["latent_channels"],
        vae_scale=vae_scale,
        patch_size=patch_size,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        timestep_scale=1.0,
        guidance=RenormGuidance(patch_size=patch_size),
        batch_multiple=batch_multiple,
        extra_text_tokens=MARKS,
        largest_side=network["max_latent_size"] * vae_scale * patch_size,
        text=text,
    )


BAGEL = BagelFamily(
    name="bagel",
    pipeline="",  # diffusers has none
    classes={NETWORK: "unirl.models.bagel.network.BagelNetwork", VAE: "diffusers.AutoencoderKL"},
    tokenizers=(),
    facts=facts,
    toy_tokenizers=lambda: {"tokenizer": qwen_tokenizer()},
    seed=20253,
    **family_files(__file__),
)


class BagelDenoiser:
    """The generation expert as a velocity field, which reads the text through the understanding expert."""

    def __init__(self, network: nn.Module, facts: LatentFacts, marks: tuple[int, int]) -> None:
        self.network = network
        self.facts = facts
        self.marks = marks

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] fp32 and sigma [B], given the tokens `text`."""
        prompts = conditions["text"]
        assert isinstance(prompts, PromptTokens)
        times = self.facts.timestep_scale * sigma
        inputs = image_inputs(x, times, prompts, self.marks, self.facts.patch_size, self.facts.batch_multiple)
        v: Tensor = self.network(inputs)["velocity"]
        return v.float()


@dataclass(frozen=True)
class BagelTokenizer:
    """Prompts as tokens. The network embeds them itself, so no encoder runs."""

    codec: TextCodec
    begin: int
    end: int
    components: tuple[str, ...] = ()

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> PromptTokens:
        """The tokens of each text between the tokens for begin and end; further ones than the length are cut off."""
        longest = max(max_sequence_length - 2, 0)
        return prompt_tokens([self.spoken(self.codec.encode(text)[:longest]) for text in texts])

    def spoken(self, tokens: Sequence[int]) -> list[int]:
        """The tokens between those for begin and end."""
        return [self.begin, *tokens, self.end]


class BagelBundle(KLBundle, UnifiedBundle):
    """The network of both experts, and the VAE. The encoder that reads images is not loaded."""

    family: ClassVar[BagelFamily] = BAGEL
    facts: BagelFacts

    def __init__(
        self,
        device: torch.device = CPU,
        components: Sequence[str] | None = None,
        *,
        path: str,
        revision: str | None = None,
        dtype: DtypeName = "bf16",
        vae_dtype: VaeDtype = "auto",
        cfg_renorm_type: RenormType = "global",
        cfg_renorm_min: float = 0.0,
        cfg_interval: tuple[float, float] = (0.4, 1.0),
        freeze_understanding: bool = True,
        meta_init: bool = False,
    ) -> None:
        """See `DiffusersBundle`.

        Args:
            path: a hub id, a folder with the files of the published repository, or `toy` (tiny, random weights).
            cfg_renorm_type: see `RenormGuidance`. "global" compares the norms of samples, "channel" those of latent
                tokens; "text_channel" is the same without condition images.
            cfg_renorm_min: the smallest factor of the renormalisation. 1 turns it off.
            cfg_interval: guidance acts at noise levels above the first and up to the second of these.
            freeze_understanding: without adapters, train only the generation expert and the layers to and from latents.
                A run that trains text needs False.
        """
        super().__init__(
            device,
            components,
            path=path,
            revision=revision,
            dtype=dtype,
            vae_dtype=vae_dtype,
            meta_init=meta_init,
        )
        guidance = RenormGuidance(
            patch_size=self.facts.patch_size,
            renorm=cfg_renorm_type,
            renorm_min=cfg_renorm_min,
            interval=cfg_interval,
        )
        self.facts = replace(self.facts, guidance=guidance)
        tokenizer = qwen_tokenizer() if self.root is None else load_tokenizer(self.root)
        begin, end, first, last = (self._token(tokenizer, text) for text in (BEGIN, END, *IMAGE_MARKS))
        self.codec = TextCodec(tokenizer, [end])
        self.prompt_tokenizer = BagelTokenizer(self.codec, begin, end)
        self.marks = (first, last)
        for name, parameter in self.trainable().named_parameters():
            is_text = name.startswith("language_model.") and "_moe_gen" not in name
            if name.startswith("latent_pos_embed.") or (freeze_understanding and is_text):
                parameter.requires_grad_(False)

    # Policies

    def stage_of(self, track: str) -> Stage:
        """The policy of a track: of images for `image`, of text for any other name."""
        return self.stage() if track == IMAGE else self.text_stage()

    def text_stage(self) -> ARStage:
        """The understanding expert as a policy over tokens."""
        assert self.facts.text is not None
        return ARStage(self.trainable(), self.facts.text, self.codec, self.dtype)

    def writing_prompts(self, texts: Sequence[str]) -> PromptTokens:
        """Prompts for answers: each text between the tokens for begin and end, then the begin of the answer."""
        begin, end = self.prompt_tokenizer.begin, self.prompt_tokenizer.end
        return prompt_tokens([[begin, *self.codec.encode(text), end, begin] for text in texts])

    # Components

    def denoiser(self) -> BagelDenoiser:
        return BagelDenoiser(self.trainable(), self.facts, self.marks)

    def text_encoder(self) -> BagelTokenizer:
        return self.prompt_tokenizer

    # Weights

    def saved_part(self, component: str) -> SavedWeights:
        assert self.root is not None, "a toy has no files"
        return SafetensorsWeights(self.root, lambda _: self.dtype, NETWORK_FILE)

    def read_adapter_of(self, component: str, file: Path) -> AdapterLayers:
        return read_peft(file, lambda: self.family.build(self.configs, component))

    def _token(self, tokenizer: PreTrainedTokenizerBase, text: str) -> int:
        """The token that is spelt `text`. Raises NotFoundError (4001) if the vocabulary lacks it."""
        token, rows = tokenizer.get_vocab().get(text), self.configs.components[NETWORK]["vocab_size"]
        if token is None or token >= rows:
            raise NotFoundError(
                f"{self.path}: its tokenizer has {text!r} as token {token}, and the network embeds {rows} tokens, so "
                "they belong to different checkpoints. Download both again"
            )
        return token


class BagelPipeline(UnifiedPipeline[BagelBundle]):
    """Text to image with BAGEL, with or without a text before it, and export in the published layout.

    system | prompt | think     each between the tokens for begin and end; the unconditional pass reads the system
    """

    lora_formats: ClassVar[tuple[str, ...]] = ("peft",)
    text_tracks: ClassVar[tuple[str, ...]] = ("think",)

    def writing_prompt(self, track: str, prompt: str, written: Written) -> list[int]:
        spoken, codec = self.bundle.prompt_tokenizer.spoken, self.bundle.codec
        return [*spoken(codec.encode(THINK_INSTRUCTION)), *spoken(codec.encode(prompt)), spoken([])[0]]

    def drawing_prompt(self, prompt: str, written: Written, *, conditional: bool = True) -> list[int]:
        spoken, codec = self.bundle.prompt_tokenizer.spoken, self.bundle.codec
        system = spoken(codec.encode(THINK_INSTRUCTION))
        if not conditional:
            return system
        # A text that was truncated has no end token.
        thought = [token for token in written["think"] if token not in codec.ends]
        return [*system, *spoken(codec.encode(prompt)), *spoken(thought)]

    def encode(
        self,
        texts: Sequence[str],
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Conditions:
        """The tokens `text`, and `negative_text` without any tokens if guidance is active."""
        conditions = super().encode(texts, params, images)
        if NEGATIVE + "text" in conditions:
            conditions[NEGATIVE + "text"] = no_texts(len(texts)).to(self.bundle.device)
        return conditions

    # Export

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Write the files of the published repository, with `tensors` in place of those of the trained network."""
        bundle = self.bundle
        [vae] = bundle.require((VAE,), "be exported as a whole")
        network = bundle.with_tensors(tensors)
        write_checkpoint(folder, network, vae, bundle.configs.components[NETWORK], bundle.root)
        bundle.codec.tokenizer.save_pretrained(folder)
        return folder

    def write_lora(self, folder: Path, adapter: Adapter) -> Path:
        """Write an adapter as a folder that peft loads onto the untrained network."""
        return write_peft_adapter(folder, adapter, self.bundle.path)

    def verify_model(self, folder: Path, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """Max abs difference between samples with the current weights and those of the model in `folder`."""
        return self._difference(self.bundle.family.load(folder, NETWORK, self.bundle.dtype), texts, params)

    def verify_lora(self, folder: Path, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """The same for the untrained network with the adapter in `folder`, loaded by peft."""
        from peft import PeftModel

        with quiet_libraries():
            adapted = PeftModel.from_pretrained(self.bundle.untrained(), str(folder))
        return self._difference(adapted.get_base_model(), texts, params)

    def _difference(self, network: nn.Module, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        other, bundle = copy(self), self.bundle
        denoiser = BagelDenoiser(network.eval().to(bundle.device), bundle.facts, bundle.marks)
        other.stage = DiffusionStage(denoiser, bundle.facts, bundle.dtype)
        ours, theirs = (sample_with_euler(pipeline, texts, params).latents for pipeline in (self, other))
        return float((ours - theirs).abs().max())


def no_texts(count: int) -> PromptTokens:
    """`count` prompts without tokens, for the unconditional pass."""
    nothing = torch.zeros(0, dtype=torch.int64)
    zeros = torch.zeros(count, dtype=torch.int64)
    return PromptTokens(
        tokens=nothing, positions=nothing, next_position=zeros, offsets=torch.zeros(count + 1, dtype=torch.int64)
    )
