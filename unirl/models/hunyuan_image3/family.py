"""HunyuanImage-3: text to image, and the texts that lead to it, with one mixture of experts (arXiv:2509.23951).

The track `image` is a denoising policy whose prompt the network embeds itself. Every other track is a policy over
tokens of the same network. Prompts have no images; `unirl.models.hunyuan_image3_vision` reads them.
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
from unirl.models.base import Stage
from unirl.models.denoising.bundle import DiffusersBundle
from unirl.models.denoising.diffusers_pipeline import sample_with_euler
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.stage import DiffusionStage
from unirl.models.hunyuan_image3.checkpoint import FIRST_VERSION, NETWORK, HunyuanImage3Family, write_checkpoint
from unirl.models.hunyuan_image3.packing import image_inputs
from unirl.models.hunyuan_image3.prompts import (
    END_OF_ANSWER,
    TEMPLATE_TOKENS,
    TEXT_TRACKS,
    PromptFormat,
    end_of,
    sizes_of,
)
from unirl.models.hunyuan_image3.vae import ImageVAE
from unirl.models.language.bundle import load_tokenizer
from unirl.models.language.chat import TextCodec
from unirl.models.language.packing import images_of, prompt_tokens
from unirl.models.language.stage import ARStage
from unirl.models.loading.adapter_files import Adapter, write_peft_adapter
from unirl.models.loading.adapter_sources import AdapterLayers, read_peft
from unirl.models.loading.checkpoint import VAE, ModelConfigs, family_files
from unirl.models.loading.hub import quiet_libraries
from unirl.models.loading.saved_weights import SavedWeights
from unirl.models.loading.toy_tokenizers import hunyuan_image_tokenizer
from unirl.models.unified.pipeline import IMAGE, UnifiedBundle, UnifiedPipeline, Written
from unirl.sde.guidance import NEGATIVE, Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.device import CPU
from unirl.types.facts import LanguageFacts, LatentFacts
from unirl.types.protocols import Capabilities, DtypeName, VaeDtype
from unirl.types.sampling import DiffusionSamplingParams, Sampling, sampling_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCKS = ("HunyuanImage3DecoderLayer",)
LORA_TARGETS = ("self_attn.qkv_proj", "self_attn.o_proj")


@dataclass(frozen=True, kw_only=True)
class HunyuanImage3Facts(LatentFacts):
    """Facts about HunyuanImage-3 as a model that denoises latents."""

    def check(self, sampling: Sampling) -> None:
        super().check(sampling)
        params = sampling_as(DiffusionSamplingParams, sampling, f"{self.family} samples with")
        if params.negative_prompt:
            raise ValueError(
                f"sampling.negative_prompt={params.negative_prompt!r}: the unconditional pass of {self.family} has "
                "<cfg> tokens in place of a prompt. Remove the key"
            )


def facts(configs: ModelConfigs, batch_multiple: int) -> HunyuanImage3Facts:
    """The facts of a checkpoint."""
    network, vae = configs.components[NETWORK], configs.components[VAE]
    text = LanguageFacts(
        family="hunyuan_image3",
        trainable_attr=NETWORK,
        block_class_names=BLOCKS,
        lora_targets=LORA_TARGETS,
        batch_multiple=batch_multiple,
        vocab_size=network["vocab_size"],
        hidden_size=network["hidden_size"],
        context_length=network["max_position_embeddings"],
        cache_width=2 * network["num_hidden_layers"] * network["num_key_value_heads"] * network["attention_head_dim"],
    )
    return HunyuanImage3Facts(
        family="hunyuan_image3",
        trainable_attr=NETWORK,
        block_class_names=BLOCKS,
        lora_targets=LORA_TARGETS,
        latent_channels=vae["latent_channels"],
        vae_scale=vae["ffactor_spatial"],
        patch_size=1,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=Guidance(),
        batch_multiple=batch_multiple,
        extra_text_tokens=TEMPLATE_TOKENS,
        text=text,
    )


HUNYUAN_IMAGE3 = HunyuanImage3Family(
    name="hunyuan_image3",
    pipeline="",  # diffusers has none
    classes={
        NETWORK: "unirl.models.hunyuan_image3.network.HunyuanImage3Network",
        VAE: "unirl.models.hunyuan_image3.vae.HunyuanImage3VAE",
    },
    tokenizers=(),
    facts=facts,
    toy_tokenizers=lambda: {"tokenizer": hunyuan_image_tokenizer()},
    seed=20257,
    **family_files(__file__),
)


class HunyuanImage3Denoiser:
    """The network as a velocity field. Each call computes the whole sequence."""

    def __init__(self, network: nn.Module, facts: LatentFacts, format: PromptFormat) -> None:
        self.network = network
        self.facts = facts
        self.format = format

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] fp32 and sigma [B], given the tokens `text`, and `images` in them."""
        prompts, images = conditions["text"], images_of(conditions)
        assert isinstance(prompts, PromptTokens)
        header, times = self.format.header(*x.shape[-2:]), self.facts.timestep_scale * sigma
        inputs = image_inputs(x, times, prompts, header, self.facts.batch_multiple, images)
        v: Tensor = self.network(inputs)["velocity"]
        return v.float()


class HunyuanImage3Bundle(DiffusersBundle, UnifiedBundle):
    """The network, and the VAE, for prompts without images. The encoder that reads images is not loaded."""

    family: ClassVar[HunyuanImage3Family] = HUNYUAN_IMAGE3
    facts: HunyuanImage3Facts
    reads_images: ClassVar[bool] = False
    """Prompts have images."""

    def __init__(
        self,
        device: torch.device = CPU,
        components: Sequence[str] | None = None,
        *,
        path: str,
        revision: str | None = None,
        dtype: DtypeName = "bf16",
        vae_dtype: VaeDtype = "auto",
        meta_init: bool = False,
    ) -> None:
        """See `DiffusersBundle`.

        Args:
            path: a hub id, a folder with the files of the published repository, or `toy` (tiny, random weights).
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
        tokenizer = hunyuan_image_tokenizer() if self.root is None else load_tokenizer(self.root)
        ends = [*map(end_of, TEXT_TRACKS), END_OF_ANSWER]
        self.codec = TextCodec(tokenizer, [*(self._token(tokenizer, end) for end in ends), tokenizer.eos_token_id])
        network = self.configs.components[NETWORK]
        sizes = sizes_of(network["image_base_size"], network.get("model_version") != FIRST_VERSION)
        self.format = PromptFormat(
            codec=self.codec,
            base_size=network["image_base_size"],
            sizes=tuple(sizes),
            has_roles=self.configs.settings.get("sequence_template") == "instruct",
            drops_think=bool(self.configs.settings.get("drop_think")),
            reads_images=self.reads_images,
        )

    # Policies

    def stage_of(self, track: str) -> Stage:
        """The policy of a track: of images for `image`, of text for any other name.

        A text ends with the mark of its track, or with the end of the answer or of the sequence.
        """
        if track == IMAGE:
            return self.stage()
        assert self.facts.text is not None
        tokenizer = self.codec.tokenizer
        ends = [self._token(tokenizer, end) for end in (end_of(track), END_OF_ANSWER)]
        codec = TextCodec(tokenizer, [*ends, tokenizer.eos_token_id])
        return ARStage(self.trainable(), self.facts.text, codec, self.dtype)

    # Components

    def denoiser(self) -> HunyuanImage3Denoiser:
        return HunyuanImage3Denoiser(self.trainable(), self.facts, self.format)

    def text_encoder(self) -> PromptFormat:
        return self.format

    def decoder(self) -> ImageVAE:
        return ImageVAE(*self.require((VAE,), "decode latents"))

    def encoder(self) -> ImageVAE:
        return ImageVAE(*self.require((VAE,), "encode images"))

    # Weights

    def saved_part(self, component: str) -> SavedWeights:
        assert self.root is not None, "a toy has no files"
        return self.family.weights(self.root, component, self.dtype)

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


class HunyuanImage3Pipeline(UnifiedPipeline[HunyuanImage3Bundle]):
    """Text to image with HunyuanImage-3, with or without texts before it, and export in the published layout."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("image", "text"))
    lora_formats: ClassVar[tuple[str, ...]] = ("peft",)
    text_tracks: ClassVar[tuple[str, ...]] = TEXT_TRACKS

    def __init__(
        self,
        bundle: HunyuanImage3Bundle,
        *,
        system_instruction: str | None = None,
        decode_batch_size: int = 1,
        keep_resident: bool = True,
        decode_ahead: bool = False,
    ) -> None:
        """
        Args:
            system_instruction: the text before every prompt. The published prompts for each task are in the file
                system_prompt.py of the published code.
            decode_batch_size: number of latents or images per forward of the VAE.
            keep_resident: False moves the VAE to the device only while it runs.
            decode_ahead: decode each chunk while the next one is sampled. Both need memory at the same time.
        """
        bundle.format = replace(bundle.format, system=system_instruction)
        super().__init__(
            bundle, decode_batch_size=decode_batch_size, keep_resident=keep_resident, decode_ahead=decode_ahead
        )

    def writing_prompt(self, track: str, prompt: str, written: Written) -> list[int]:
        return self.bundle.format.writing(track, self.bundle.format.user(prompt), written)

    def drawing_prompt(self, prompt: str, written: Written, *, conditional: bool = True) -> list[int]:
        return self.bundle.format.drawing(self.bundle.format.user(prompt), written, conditional)

    def encode(
        self,
        texts: Sequence[str],
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Conditions:
        """The tokens `text`, and `negative_text` with <cfg> tokens in place of each prompt if guidance is active."""
        conditions, format = super().encode(texts, params, images), self.bundle.format
        if NEGATIVE + "text" in conditions:
            prompts = [format.user(text, params.max_sequence_length) for text in texts]
            rows = [format.drawing(prompt, {}, conditional=False) for prompt in prompts]
            conditions[NEGATIVE + "text"] = prompt_tokens(rows).to(self.bundle.device)
        return conditions

    # Export

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Write the files of the published repository, with `tensors` in place of those of the trained network."""
        bundle = self.bundle
        frozen = [name for name in bundle.configs.components if name != NETWORK]
        parts = dict(zip(frozen, bundle.require(frozen, "be exported as a whole"), strict=True))
        write_checkpoint(folder, {NETWORK: bundle.with_tensors(tensors), **parts}, bundle.configs, bundle.root)
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
        denoiser = HunyuanImage3Denoiser(network.eval().to(bundle.device), bundle.facts, bundle.format)
        other.stage = DiffusionStage(denoiser, bundle.facts, bundle.dtype)
        ours, theirs = (sample_with_euler(pipeline, texts, params).latents for pipeline in (self, other))
        return float((ours - theirs).abs().max())
