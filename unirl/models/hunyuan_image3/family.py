"""HunyuanImage-3: text to image, and the texts that lead to it, with one mixture of experts (arXiv:2509.23951).

The track `image` is a denoising policy whose prompt the network embeds itself. Every other track is a policy over
tokens of the same network. Prompts have no images; `unirl.models.hunyuan_image3_vision` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from unirl.models.hunyuan_image3.checkpoint import FIRST_VERSION, HunyuanImage3Family
from unirl.models.hunyuan_image3.packing import PrefixedImages, image_inputs
from unirl.models.hunyuan_image3.prompts import (
    END_OF_ANSWER,
    TEMPLATE_TOKENS,
    TEXT_TRACKS,
    PromptFormat,
    end_of,
    sizes_of,
)
from unirl.models.hunyuan_image3.vae import ImageVAE
from unirl.models.language.bundle import decoder_sizes
from unirl.models.language.chat import TextCodec
from unirl.models.language.packing import images_of, prompt_tokens
from unirl.models.loading.checkpoint import VAE, ModelConfigs, family_files
from unirl.models.loading.toy_tokenizers import hunyuan_image_tokenizer
from unirl.models.unified.bundle import UnifiedBundle, UnifiedFacts
from unirl.models.unified.checkpoint import NETWORK
from unirl.models.unified.pipeline import UnifiedPipeline, Written
from unirl.sde.guidance import Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.device import CPU
from unirl.types.facts import LanguageFacts
from unirl.types.protocols import Capabilities, DtypeName, VaeDtype
from unirl.types.sampling import DiffusionSamplingParams

BLOCKS = ("HunyuanImage3DecoderLayer",)
LORA_TARGETS = ("self_attn.qkv_proj", "self_attn.o_proj")


def facts(configs: ModelConfigs, batch_multiple: int) -> UnifiedFacts:
    """The facts of a checkpoint."""
    network, vae = configs.components[NETWORK], configs.components[VAE]
    text = LanguageFacts(
        family="hunyuan_image3",
        trainable_attr=NETWORK,
        block_class_names=BLOCKS,
        lora_targets=LORA_TARGETS,
        batch_multiple=batch_multiple,
        **decoder_sizes(network, network["attention_head_dim"]),
    )
    return UnifiedFacts(
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
        unconditional="<cfg> tokens in place of a prompt",
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


class HunyuanImage3Bundle(UnifiedBundle):
    """The network, and the VAE, for prompts without images. The encoder that reads images is not loaded."""

    family: ClassVar[HunyuanImage3Family] = HUNYUAN_IMAGE3
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
        self.codec = self._codec([*map(end_of, TEXT_TRACKS), END_OF_ANSWER])
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

    def codec_of(self, track: str) -> TextCodec:
        """The tokenizer of a text, which ends with the mark of its track, of the answer or of the sequence."""
        return self._codec([end_of(track), END_OF_ANSWER])

    def _codec(self, ends: Sequence[str]) -> TextCodec:
        return TextCodec(self.tokenizer, [*map(self.token, ends), self.tokenizer.eos_token_id])

    def image_inputs(self, x: Tensor, times: Tensor, conditions: Conditions) -> PrefixedImages:
        prompts, header = conditions["text"], self.format.header(*x.shape[-2:])
        assert isinstance(prompts, PromptTokens)
        return image_inputs(x, times, prompts, header, self.facts.batch_multiple, images_of(conditions))

    def text_encoder(self) -> PromptFormat:
        return self.format

    def decoder(self) -> ImageVAE:
        return ImageVAE(*self.require((VAE,), "decode latents"))

    def encoder(self) -> ImageVAE:
        return ImageVAE(*self.require((VAE,), "encode images"))


class HunyuanImage3Pipeline(UnifiedPipeline[HunyuanImage3Bundle]):
    """Text to image with HunyuanImage-3, with or without texts before it, and export in the published layout."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("image", "text"), differentiable=True)
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

    def unconditional_prompts(self, texts: Sequence[str], params: DiffusionSamplingParams) -> PromptTokens:
        format = self.bundle.format
        prompts = [format.user(text, params.max_sequence_length) for text in texts]
        return prompt_tokens([format.drawing(prompt, {}, conditional=False) for prompt in prompts])
