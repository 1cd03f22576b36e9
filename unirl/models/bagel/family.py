"""BAGEL: text to image, and text, with one Mixture of Transformers. Deng et al. 2025 (arXiv:2505.14683).

The track `image` is a denoising policy whose prompt the network embeds itself. Every other track is a policy over
tokens by the understanding expert of the same network. Prompts with images, and so editing, are not available.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from unirl.models.bagel.checkpoint import BagelFamily
from unirl.models.bagel.packing import MARKS, ImageInputs, image_inputs
from unirl.models.denoising.vae import KLBundle
from unirl.models.language.bundle import LORA_TARGETS, decoder_sizes
from unirl.models.language.chat import TextCodec
from unirl.models.language.packing import prompt_tokens
from unirl.models.loading.checkpoint import VAE, ModelConfigs, family_files
from unirl.models.loading.toy_tokenizers import qwen_tokenizer
from unirl.models.unified.bundle import UnifiedBundle, UnifiedFacts
from unirl.models.unified.checkpoint import NETWORK
from unirl.models.unified.pipeline import UnifiedPipeline, Written
from unirl.sde.guidance import RenormGuidance, RenormType
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.device import CPU
from unirl.types.facts import LanguageFacts
from unirl.types.protocols import DtypeName, VaeDtype
from unirl.types.sampling import DiffusionSamplingParams

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


def facts(configs: ModelConfigs, batch_multiple: int) -> UnifiedFacts:
    """The facts of a checkpoint."""
    network, vae = configs.components[NETWORK], configs.components[VAE]
    text = LanguageFacts(
        family="bagel",
        trainable_attr=NETWORK,
        block_class_names=BLOCKS,
        lora_targets=LORA_TARGETS,
        batch_multiple=batch_multiple,
        **decoder_sizes(network, network["hidden_size"] // network["num_attention_heads"]),
    )
    vae_scale, patch_size = 2 ** (len(vae["block_out_channels"]) - 1), network["latent_patch_size"]
    return UnifiedFacts(
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
        unconditional="no text",
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
        begin, end, first, last = map(self.token, (BEGIN, END, *IMAGE_MARKS))
        self.codec = TextCodec(self.tokenizer, [end])
        self.prompt_tokenizer = BagelTokenizer(self.codec, begin, end)
        self.marks = (first, last)
        for name, parameter in self.trainable().named_parameters():
            is_text = name.startswith("language_model.") and "_moe_gen" not in name
            if name.startswith("latent_pos_embed.") or (freeze_understanding and is_text):
                parameter.requires_grad_(False)

    def image_inputs(self, x: Tensor, times: Tensor, conditions: Conditions) -> ImageInputs:
        prompts = conditions["text"]
        assert isinstance(prompts, PromptTokens)
        return image_inputs(x, times, prompts, self.marks, self.facts.patch_size, self.facts.batch_multiple)

    def text_encoder(self) -> BagelTokenizer:
        return self.prompt_tokenizer


class BagelPipeline(UnifiedPipeline[BagelBundle]):
    """Text to image with BAGEL, with or without a text before it, and export in the published layout.

    system | prompt | think     each between the tokens for begin and end; the unconditional pass reads the system
    """

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

    def unconditional_prompts(self, texts: Sequence[str], params: DiffusionSamplingParams) -> PromptTokens:
        return prompt_tokens([[] for _ in texts])
