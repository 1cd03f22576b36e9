"""Wan 2.1, text to video and image to video. Wan 2025 (arXiv:2503.20314). Wan 2.2 shares most of it.

The transformer reads

    text    [B, L, D]           UMT5 states of the cleaned prompt, then zeros up to max_sequence_length
    image   [B, 4 + C, F, h, w] image to video: mask (1 at the first latent frame) ++ VAE(first frame, then grey frames)
    vision  [B, L, D]           image to video of Wan 2.1: CLIP-vision states before the last layer

The tensors equal those of diffusers' `WanPipeline` and `WanImageToVideoPipeline`. The transformer attends to the zeros
of the text: there is no mask. With CLIP tokens, it takes the last 512 tokens for text, so the zeros reach that length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.models.denoising.bundle import (
    ConditionImageEncoder,
    Decoder,
    DiffusersBundle,
    Encoder,
    NetworkDenoiser,
    TextEncoder,
)
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.pipeline import VIDEO
from unirl.models.denoising.text_encoders import longer_than, tokenize
from unirl.models.denoising.vae import IMAGE, CausalVAE, from_unit
from unirl.models.images import to_pil
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs, family_files
from unirl.models.loading.toy_tokenizers import t5_tokenizer
from unirl.sde.guidance import Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, LatentCondition, TextEmbedCondition, VisionCondition
from unirl.types.facts import LatentFacts
from unirl.types.protocols import Capabilities, GuidanceLike
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from transformers import CLIPImageProcessorPil, CLIPVisionModel, PreTrainedTokenizerBase, UMT5EncoderModel

PIPELINE = "WanPipeline"
FURTHER_PIPELINES = ("WanImageToVideoPipeline",)
CLASSES = {
    "transformer": "diffusers.WanTransformer3DModel",
    "text_encoder": "transformers.UMT5EncoderModel",
    "image_encoder": "transformers.CLIPVisionModel",
    "vae": "diffusers.AutoencoderKLWan",
}
CLIP, CLIP_PROCESSOR = "image_encoder", "image_processor"
VISION = "vision"
"""Name of the condition that CLIP gives for a first frame."""
LORA_TARGETS = tuple(f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))
CLIP_LORA_TARGETS = ("attn2.add_k_proj", "attn2.add_v_proj")
TEXT_LENGTH_WITH_CLIP = 512
"""The text length that diffusers' WanTransformer3DModel assumes to separate text tokens from CLIP tokens."""
TOY_CLIP_SIDE = 28
"""Image side of the toy CLIP, in pixels."""


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. Raises NotFoundError (4001) for a Wan 2.2 checkpoint."""
    if any(configs.settings.get(name) for name in ("boundary_ratio", "expand_timesteps")):
        raise NotFoundError(
            "this is a Wan 2.2 checkpoint (model_index.json sets boundary_ratio or expand_timesteps). "
            "Use unirl.models.wan22.family.Wan22Bundle and unirl.models.wan22.family.Wan22Pipeline"
        )
    return wan_facts("wan21", configs, batch_multiple, Guidance())


def wan_facts(
    family: str,
    configs: ModelConfigs,
    batch_multiple: int,
    guidance: GuidanceLike,
    condition_images: tuple[int, int] | None = None,
) -> LatentFacts:
    """The facts that Wan 2.1 and 2.2 share.

    Args:
        condition_images: fewest and most first frames. If absent, it depends on the channels of the transformer.
    """
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    frame_scale = vae.get("scale_factor_temporal", 4)
    has_first_frame = reads_first_frame(transformer["in_channels"], vae["z_dim"], frame_scale)
    if transformer.get("pos_embed_seq_len") is not None:
        raise NotFoundError(
            f"this {family} checkpoint reads a first and a last frame (pos_embed_seq_len is set), which is not "
            "supported. Use one of text to video or image to video"
        )
    return LatentFacts(
        family=family,
        block_class_names=("WanTransformerBlock",),
        lora_targets=LORA_TARGETS + (CLIP_LORA_TARGETS if transformer.get("added_kv_proj_dim") else ()),
        latent_channels=vae["z_dim"],
        vae_scale=vae.get("scale_factor_spatial", 8),
        patch_size=transformer["patch_size"][-1],
        frame_scale=frame_scale,
        fps=16.0,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=guidance,
        batch_multiple=batch_multiple,
        text_width=transformer["text_dim"],
        condition_images=condition_images or ((1, 1) if has_first_frame else (0, 0)),
    )


def reads_first_frame(in_channels: int, latent_channels: int, frame_scale: int) -> bool:
    """True if a transformer reads a mask and the latents of a first frame in addition to the video's latents.

    Raises NotFoundError (4001) if its number of channels fits neither case.
    """
    text_to_video, image_to_video = latent_channels, 2 * latent_channels + frame_scale
    if in_channels not in (text_to_video, image_to_video):
        raise NotFoundError(
            f"a Wan transformer has in_channels={in_channels} and its VAE {latent_channels} channels: text to "
            f"video has in_channels={text_to_video}, image to video {image_to_video}. Use a checkpoint of one of these"
        )
    return in_channels == image_to_video


def toy_tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """A character-level tokenizer, and an image processor for the toy CLIP."""
    from transformers import CLIPImageProcessorPil

    side = TOY_CLIP_SIDE
    processor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    return {"tokenizer": t5_tokenizer(), CLIP_PROCESSOR: processor}


WAN21 = DiffusersFamily(
    name="wan21",
    pipeline=PIPELINE,
    further_pipelines=FURTHER_PIPELINES,
    classes=CLASSES,
    tokenizers=("tokenizer", CLIP_PROCESSOR),
    optional=(CLIP,),
    facts=facts,
    toy_tokenizers=toy_tokenizers,
    **family_files(__file__),
)


class WanDenoiser(NetworkDenoiser):
    """The transformer as a velocity field.

    Its timestep is 1000 sigma in fp32. diffusers' UniPC scheduler truncates that to an integer; its Euler scheduler
    does not.
    """

    matrix: ClassVar[str] = "patch_embedding.weight"
    block_lists: ClassVar[tuple[str, ...]] = ("blocks",)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, H, W] fp32 at x [B, C, F, H, W] and sigma [B], given `text` and the first frame's conditions."""
        v: Tensor = self.network(**self.inputs(x, sigma, conditions), return_dict=False)[0]
        return v.float()

    def inputs(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> dict[str, Tensor | None]:
        """The arguments of the transformer's forward."""
        text, first_frame, vision = (conditions.get(name) for name in ("text", IMAGE, VISION))
        assert isinstance(text, TextEmbedCondition)
        if isinstance(first_frame, LatentCondition):
            x = torch.cat([x, first_frame.latents.to(x)], dim=1)
        dtype = self.dtype
        return {
            "hidden_states": x.to(dtype),
            "timestep": self.timestep_scale * sigma,
            "encoder_hidden_states": text.embeds.to(dtype),
            "encoder_hidden_states_image": vision.embeds.to(dtype) if isinstance(vision, VisionCondition) else None,
        }


@dataclass(frozen=True)
class WanTextEncoder:
    """The frozen UMT5."""

    encoder: UMT5EncoderModel
    tokenizer: PreTrainedTokenizerBase
    fixed_length: int | None = None
    """Number of tokens that the transformer requires. If absent, any number is possible."""
    components: tuple[str, ...] = ("text_encoder",)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`, each truncated or padded to `max_sequence_length` tokens."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        texts = [prompt_clean(text) for text in texts]
        tokens = tokenize(self.tokenizer, texts, max_sequence_length, self.encoder.device)
        states = self.encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        mask = tokens.attention_mask > 0
        embeds = torch.where(mask[..., None], states, 0.0)
        missing = 0 if self.fixed_length is None else self.fixed_length - max_sequence_length
        if missing < 0:
            raise InvalidValueError(
                f"sampling.max_sequence_length={max_sequence_length}: this transformer reads {self.fixed_length} "
                f"tokens of text. Use at most {self.fixed_length}"
            )
        return TextEmbedCondition(embeds=pad(embeds, (0, 0, 0, missing)), mask=pad(mask, (0, missing)))

    def cuts(self, texts: Sequence[str], max_sequence_length: int) -> list[bool]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return longer_than(self.tokenizer, [prompt_clean(text) for text in texts], max_sequence_length)


@dataclass(frozen=True)
class FirstFrameEncoder:
    """The conditions of a first frame, by the VAE and, if the checkpoint has it, CLIP-vision."""

    vae: CausalVAE
    frame_scale: int
    clip: CLIPVisionModel | None = None
    processor: CLIPImageProcessorPil | None = None

    @property
    def components(self) -> tuple[str, ...]:
        return self.vae.components if self.clip is None else (*self.vae.components, CLIP)

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """`image` and `vision` of images [B, 1, 3, H, W] in [0, 1]."""
        first = from_unit(images[:, 0])
        grey = first.new_zeros(*first.shape[:2], params.num_frames - 1, *first.shape[2:])
        latents = self.vae.encode_frames(torch.cat([first[:, :, None], grey], dim=2))
        mask = latents.new_zeros(len(latents), self.frame_scale, *latents.shape[2:])
        mask[:, :, 0] = 1.0
        conditions: Conditions = {IMAGE: LatentCondition(latents=torch.cat([mask, latents], dim=1))}
        if self.clip is not None and self.processor is not None:
            inputs = self.processor(images=[to_pil(image) for image in images[:, 0]], return_tensors="pt")
            pixels = inputs.pixel_values.to(images.device)
            states = self.clip(pixel_values=pixels, output_hidden_states=True).hidden_states
            conditions[VISION] = VisionCondition(embeds=states[-2])
        return conditions


class WanBundle(DiffusersBundle):
    """Base of the bundles of Wan 2.1 and 2.2: transformer, UMT5, VAE, and CLIP-vision if the checkpoint has it."""

    denoiser_class: ClassVar[type[NetworkDenoiser]] = WanDenoiser

    def text_encoder(self) -> TextEncoder:
        [encoder] = self.require(("text_encoder",), "encode text")
        fixed_length = TEXT_LENGTH_WITH_CLIP if CLIP in self.configs else None
        return WanTextEncoder(encoder, self.tokenizers["tokenizer"], fixed_length)

    def decoder(self) -> Decoder:
        return self.vae()

    def encoder(self) -> Encoder:
        """The VAE. An image is a video of one frame."""
        return self.vae()

    def vae(self) -> CausalVAE:
        return CausalVAE(*self.require(("vae",), "encode or decode videos"))

    def condition_image_encoder(self) -> ConditionImageEncoder | None:
        """The VAE and, if the checkpoint has it, CLIP-vision, for checkpoints of image to video."""
        if not self.facts.condition_images[1]:
            return None
        assert self.facts.frame_scale is not None
        if CLIP not in self.configs:
            return FirstFrameEncoder(self.vae(), self.facts.frame_scale)
        [clip] = self.require((CLIP,), "encode condition images")
        return FirstFrameEncoder(self.vae(), self.facts.frame_scale, clip, self.tokenizers[CLIP_PROCESSOR])

    def _load_tokenizers(self) -> dict[str, PreTrainedTokenizerBase]:
        tokenizers = super()._load_tokenizers()
        return {name: t for name, t in tokenizers.items() if name != CLIP_PROCESSOR or CLIP in self.configs}


class Wan21Bundle(WanBundle):
    """Wan 2.1."""

    family: ClassVar[DiffusersFamily] = WAN21


class Wan21ImageBundle(Wan21Bundle):
    """Wan 2.1, with a toy of image to video."""

    toy: ClassVar[Mapping[str, object]] = {**Wan21Bundle.toy, "path": "toy-i2v"}


WanBundleT = TypeVar("WanBundleT", bound=WanBundle, covariant=True)


class WanVideoPipeline(DiffusersPipeline[WanBundleT]):
    """Base of the pipelines of Wan 2.1 and 2.2: videos from text, or from text and a first frame."""

    capabilities: ClassVar[Capabilities] = VIDEO

    def image_arguments(self, text: str, images: ConditionImages, params: DiffusionSamplingParams) -> dict[str, object]:
        """With our embeddings: the image pipeline cleans texts with ftfy without checking that ftfy is installed."""
        embeds, negative = self.embed([text, params.negative_prompt], params.max_sequence_length).embeds.split(1)
        return {
            "image": to_pil(images.pixels[0]),
            "prompt": None,
            "prompt_embeds": embeds,
            "negative_prompt": None,
            "negative_prompt_embeds": negative,
        }


class Wan21Pipeline(WanVideoPipeline[Wan21Bundle]):
    """Videos with Wan 2.1."""
