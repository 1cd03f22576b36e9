"""HunyuanVideo, text to video. Kong et al. 2024 (arXiv:2412.03603).

The text encoders give the transformer

    tokens  [B, L, D]  = LLaMA states two layers before the last, of TEMPLATE, without its CROP_START leading tokens
    pooled  [B, D']    = the CLIP-L state at the end of the text

which equals diffusers' `HunyuanVideoPipeline.encode_prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import Decoder, DiffusersBundle, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages, causal_mask
from unirl.models.denoising.pipeline import VIDEO
from unirl.models.denoising.vae import to_unit
from unirl.models.loading.checkpoint import Config, DiffusersFamily, ModelConfigs, read_configs
from unirl.models.loading.toy_tokenizers import clip_tokenizer, qwen_tokenizer, with_pieces
from unirl.sde.guidance import GUIDANCE, EmbeddedGuidance, Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, ScaleCondition, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.protocols import Capabilities
from unirl.types.sampling import DiffusionSamplingParams

FOLDER = Path(__file__).parent
FPS = 24.0
LORA_TARGETS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"{part}.net.{layer}" for part in ("ff", "ff_context") for layer in ("0.proj", "2")),
)
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
LLAMA, CLIP = "text_encoder", "text_encoder_2"


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. Raises NotFoundError (4001) for a model of image to video."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    _check_text_to_video(transformer)
    return LatentFacts(
        family="hunyuan_video",
        block_class_names=("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
        lora_targets=LORA_TARGETS,
        latent_channels=transformer["in_channels"],
        vae_scale=vae.get("spatial_compression_ratio", 8),
        patch_size=transformer["patch_size"],
        frame_scale=vae.get("temporal_compression_ratio", 4),
        fps=FPS,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=EmbeddedGuidance() if transformer["guidance_embeds"] else Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["pooled_projection_dim"],
    )


def _check_text_to_video(transformer: Config) -> None:
    kind, channels = transformer.get("image_condition_type"), (transformer["in_channels"], transformer["out_channels"])
    if kind is not None or channels[0] != channels[1]:
        raise NotFoundError(
            f"a HunyuanVideo transformer with image_condition_type={kind!r}, in_channels={channels[0]} and "
            f"out_channels={channels[1]} is one of image to video, and this family supports only text to video. "
            "Use a checkpoint of text to video, such as hunyuanvideo-community/HunyuanVideo"
        )


def toy_tokenizers() -> dict[str, Any]:
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
    toys=read_configs(FOLDER / "toy.json"),
    toy_tokenizers=toy_tokenizers,
    published=read_configs(FOLDER / "published.json"),
)


class HunyuanVideoDenoiser:
    """The transformer as a velocity field."""

    def __init__(self, transformer: Any, timestep_scale: float) -> None:
        self.transformer = transformer  # diffusers' HunyuanVideoTransformer3DModel, which has no types
        self.timestep_scale = timestep_scale

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, H, W] fp32 at x [B, C, F, H, W] and sigma [B], given `text` and, if distilled, `guidance`."""
        text, scale = conditions["text"], conditions.get(GUIDANCE)
        assert isinstance(text, TextEmbedCondition) and text.pooled is not None
        assert scale is None or isinstance(scale, ScaleCondition)
        dtype = self.transformer.x_embedder.proj.weight.dtype
        v = self.transformer(
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

    components: tuple[str, ...] = (LLAMA, CLIP)

    def __init__(self, modules: Mapping[str, nn.Module], tokenizers: Mapping[str, Any]) -> None:
        self.llama, self.clip = modules[LLAMA], modules[CLIP]
        self.llama_tokenizer, self.clip_tokenizer = tokenizers["tokenizer"], tokenizers["tokenizer_2"]

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts LLaMA tokens of the prompt and the template's end."""
        tokens, mask = self._tokens(list(texts), max_sequence_length)
        return TextEmbedCondition(embeds=tokens, mask=mask, pooled=self._pooled(list(texts)))

    def _tokens(self, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
        """LLaMA states [B, L, D] and the mask [B, L] of real tokens."""
        batch = _padded(self.llama_tokenizer, [TEMPLATE.format(text) for text in texts], CROP_START + length)
        device = next(self.llama.parameters()).device
        ids, mask = batch.input_ids.to(device), batch.attention_mask.to(device)
        states = self.llama(input_ids=ids, attention_mask=causal_mask(mask), output_hidden_states=True).hidden_states
        return states[-1 - SKIPPED_LAYERS][:, CROP_START:], mask[:, CROP_START:].bool()

    def _pooled(self, texts: list[str]) -> Tensor:
        """CLIP state [B, D']."""
        ids = _padded(self.clip_tokenizer, texts, CLIP_TOKENS).input_ids
        pooled: Tensor = self.clip(ids.to(next(self.clip.parameters()).device)).pooler_output
        return pooled


def _padded(tokenizer: Any, texts: list[str], length: int) -> Any:
    return tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")


class VideoDecoder:
    """The decoder of a video VAE, in the VAE's own dtype (fp32)."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae  # a video VAE of diffusers that scales its latents and does not shift them

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W] in [0, 1] of latents [B, C, F', H', W']."""
        return to_unit(self.vae.decode(latents / self.vae.config.scaling_factor, return_dict=False)[0])


class HunyuanVideoBundle(DiffusersBundle):
    """Transformer, LLaMA, CLIP-L and VAE."""

    family: ClassVar[DiffusersFamily] = HUNYUAN_VIDEO

    def denoiser(self) -> HunyuanVideoDenoiser:
        """The transformer as a velocity field."""
        return HunyuanVideoDenoiser(self.trainable(), self.facts.timestep_scale)

    def text_encoder(self) -> TextEncoder:
        """LLaMA and CLIP-L."""
        self.require(HunyuanVideoTextEncoder.components, "encode text")
        return HunyuanVideoTextEncoder(self.modules, self.tokenizers)

    def decoder(self) -> Decoder:
        """The VAE's decoder."""
        self.require(("vae",), "decode latents")
        return VideoDecoder(self.modules["vae"])


class HunyuanVideoPipeline(DiffusersPipeline[HunyuanVideoBundle]):
    """Text to video with HunyuanVideo. A distilled network reads the guidance scale as an input."""

    capabilities: ClassVar[Capabilities] = VIDEO

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """diffusers calls the embedded scale `guidance_scale`, and that of two branches `true_cfg_scale`."""
        embedded = self.bundle.configs.components["transformer"]["guidance_embeds"]
        frames: Tensor = plain(
            prompt=list(texts),
            negative_prompt=[params.negative_prompt] * len(texts),
            max_sequence_length=params.max_sequence_length,
            height=params.height,
            width=params.width,
            num_frames=params.num_frames,
            true_cfg_scale=1.0 if embedded else params.guidance_scale,
            guidance_scale=params.guidance_scale,
            num_inference_steps=params.num_inference_steps,
            sigmas=unshifted_sigmas(params.num_inference_steps),
            latents=x_T,
            output_type="pt",
        ).frames
        return frames.transpose(1, 2)
