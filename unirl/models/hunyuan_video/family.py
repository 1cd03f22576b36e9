"""HunyuanVideo, text to video. Kong et al. 2024 (arXiv:2412.03603).

The text encoders give the transformer

    tokens  [B, L, D]  = LLaMA states two layers before the last, of TEMPLATE, without its CROP_START leading tokens
    pooled  [B, D']    = the CLIP-L state at the end of the text

which equals diffusers' `HunyuanVideoPipeline.encode_prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import Decoder, DiffusersBundle, NetworkDenoiser, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.models.denoising.pipeline import VIDEO
from unirl.models.denoising.text_encoders import CausalTextEncoder, tokenize
from unirl.models.denoising.vae import VAEAdapter
from unirl.models.loading.checkpoint import JOINT_BLOCK, DiffusersFamily, ModelConfigs, family_files
from unirl.models.loading.toy_tokenizers import clip_tokenizer, qwen_tokenizer, with_pieces
from unirl.sde.guidance import GUIDANCE, EmbeddedGuidance, Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, ScaleCondition, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.protocols import Capabilities
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo
    from transformers import CLIPTextModel, LlamaModel, PreTrainedTokenizerBase

FPS = 24.0
GUIDANCE_SCALE = 1000.0
"""The network reads the embedded guidance scale times 1000."""
TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
"""The template around prompts in training."""
CROP_START = 95
"""Number of template tokens before the prompt, which the transformer does not read."""
SKIPPED_LAYERS = 2
CLIP_TOKENS = 77


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. Raises NotFoundError (4001) for a model of image to video."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    kind, channels = transformer.get("image_condition_type"), (transformer["in_channels"], transformer["out_channels"])
    if kind is not None or channels[0] != channels[1]:
        raise NotFoundError(
            f"a HunyuanVideo transformer with image_condition_type={kind!r}, in_channels={channels[0]} and "
            f"out_channels={channels[1]} is one of image to video, and this family supports only text to video. "
            "Use a checkpoint of text to video, such as hunyuanvideo-community/HunyuanVideo"
        )
    return LatentFacts(
        family="hunyuan_video",
        block_class_names=("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
        lora_targets=JOINT_BLOCK,
        latent_channels=transformer["in_channels"],
        vae_scale=vae.get("spatial_compression_ratio", 8),
        patch_size=transformer["patch_size"],
        frame_scale=vae.get("temporal_compression_ratio", 4),
        fps=FPS,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=EmbeddedGuidance() if transformer["guidance_embeds"] else Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["pooled_projection_dim"],
        text_is_masked=True,
    )


def toy_tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """Byte-level tokenizers. The part of the template before the prompt has as many tokens as in the real tokenizer."""
    start = TEMPLATE.partition("{}")[0]
    return {"tokenizer": with_pieces(qwen_tokenizer(), start, CROP_START), "tokenizer_2": clip_tokenizer()}


HUNYUAN_VIDEO = DiffusersFamily(
    name="hunyuan_video",
    pipeline="HunyuanVideoPipeline",
    classes={
        "transformer": "diffusers.HunyuanVideoTransformer3DModel",
        "text_encoder": "transformers.LlamaModel",
        "text_encoder_2": "transformers.CLIPTextModel",
        "vae": "diffusers.AutoencoderKLHunyuanVideo",
    },
    tokenizers=("tokenizer", "tokenizer_2"),
    facts=facts,
    toy_tokenizers=toy_tokenizers,
    **family_files(__file__),
)


class HunyuanVideoDenoiser(NetworkDenoiser):
    """The transformer as a velocity field."""

    matrix: ClassVar[str] = "x_embedder.proj.weight"
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks", "single_transformer_blocks")

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, H, W] fp32 at x [B, C, F, H, W] and sigma [B], given `text` and, if distilled, `guidance`."""
        text, scale = conditions["text"], conditions.get(GUIDANCE)
        assert isinstance(text, TextEmbedCondition) and text.pooled is not None
        assert scale is None or isinstance(scale, ScaleCondition)
        dtype = self.dtype
        v = self.network(
            hidden_states=x.to(dtype),
            # The timestep stays in fp32: bf16 has 8 bits of precision, too few for 1000 sigma.
            timestep=self.timestep_scale * sigma,
            encoder_hidden_states=text.embeds.to(dtype),
            encoder_attention_mask=text.mask,
            pooled_projections=text.pooled.to(dtype),
            # The scale is rounded as in diffusers: in bf16, 6000 becomes 6016.
            guidance=None if scale is None else scale.scale.to(dtype) * GUIDANCE_SCALE,
            return_dict=False,
        )[0]
        return v.float()


class HunyuanVideoTextEncoder:
    """The frozen LLaMA and CLIP-L."""

    components: tuple[str, ...] = ("text_encoder", "text_encoder_2")

    def __init__(
        self, llama: LlamaModel, clip: CLIPTextModel, tokenizers: Mapping[str, PreTrainedTokenizerBase]
    ) -> None:
        self.llama = CausalTextEncoder(
            llama, tokenizers["tokenizer"], TEMPLATE.format, layers=(-1 - SKIPPED_LAYERS,), num_dropped=CROP_START
        )
        self.clip, self.clip_tokenizer = clip, tokenizers["tokenizer_2"]

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts LLaMA tokens of the prompt and the template's end."""
        clip_tokens = tokenize(self.clip_tokenizer, texts, CLIP_TOKENS, self.clip.device)
        pooled = self.clip(clip_tokens.input_ids).pooler_output
        return self.llama.encode(texts, max_sequence_length).replace(pooled=pooled)

    def cuts(self, texts: Sequence[str], max_sequence_length: int) -> list[bool]:
        return self.llama.cuts(texts, max_sequence_length)


class VideoDecoder(VAEAdapter):
    """The decoder of a video VAE that scales its latents and does not shift them."""

    vae: AutoencoderKLHunyuanVideo

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W] in [0, 1] of latents [B, C, F', H', W']."""
        return self.decoded(latents / self.vae.config.scaling_factor)


class HunyuanVideoBundle(DiffusersBundle):
    """Transformer, LLaMA, CLIP-L and VAE."""

    family: ClassVar[DiffusersFamily] = HUNYUAN_VIDEO
    denoiser_class: ClassVar[type[NetworkDenoiser]] = HunyuanVideoDenoiser

    def text_encoder(self) -> TextEncoder:
        llama, clip = self.require(HunyuanVideoTextEncoder.components, "encode text")
        return HunyuanVideoTextEncoder(llama, clip, self.tokenizers)

    def decoder(self) -> Decoder:
        return VideoDecoder(*self.require(("vae",), "decode latents"))


class HunyuanVideoPipeline(DiffusersPipeline[HunyuanVideoBundle]):
    """Text to video with HunyuanVideo. A distilled network reads the guidance scale as an input."""

    capabilities: ClassVar[Capabilities] = VIDEO

    def call_arguments(self, texts: Sequence[str], x_T: Tensor, params: DiffusionSamplingParams) -> dict[str, object]:  # noqa: N803
        """diffusers calls the embedded scale `guidance_scale`, and that of two branches `true_cfg_scale`."""
        embedded = self.bundle.configs.components["transformer"]["guidance_embeds"]
        scale = 1.0 if embedded else params.guidance_scale
        return super().call_arguments(texts, x_T, params) | {"true_cfg_scale": scale}
