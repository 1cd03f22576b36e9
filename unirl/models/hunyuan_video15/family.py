"""HunyuanVideo 1.5, text to video. Tencent 2025 (arXiv:2511.18870).

The text encoders give the transformer

    tokens  [B, L, D]    = Qwen2.5-VL states two layers before the last, of a chat without its CROP_START leading tokens
    glyphs  [B, L2, D2]  = ByT5 states of the texts that the prompt puts in quotes; all masked if it quotes nothing

which equals diffusers' `HunyuanVideo15Pipeline.encode_prompt`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import Decoder, DiffusersBundle, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages, causal_mask
from unirl.models.denoising.pipeline import VIDEO
from unirl.models.hunyuan_video.family import FPS, LORA_TARGETS, VideoDecoder
from unirl.models.loading.adapter_files import DIFFUSERS_FILE
from unirl.models.loading.checkpoint import Config, DiffusersFamily, ModelConfigs, read_configs
from unirl.models.loading.toy_tokenizers import byt5_tokenizer, qwen_tokenizer, with_pieces
from unirl.sde.guidance import Guidance, NoGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.protocols import Capabilities
from unirl.types.sampling import DiffusionSamplingParams

FOLDER = Path(__file__).parent
SYSTEM_MESSAGE = (" " * 8).join(
    (
        "You are a helpful assistant. Describe the video by detailing the following aspects: ",
        "1. The main content and theme of the video. ",
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects. ",
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects. ",
        "4. background environment, light, style and atmosphere. ",
        "5. camera angles, movements, and transitions used in the video.",
    )
)
"""The system message before prompts in training."""
CROP_START = 108
"""Number of chat tokens before the prompt, which the transformer does not read."""
SKIPPED_LAYERS = 2
GLYPH_TOKENS = 256
QUOTED = re.compile('"(.*?)"|\u201c(.*?)\u201d')
QWEN, BYT5 = "text_encoder", "text_encoder_2"
TOY_CHAT_TOKENS = 16
"""Tokens of the chat before the prompt other than the system message, in the toy tokenizer."""
TOY_GLYPH_TOKENS = 12


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. Raises NotFoundError (4001) for a model of another task than text to video."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    _check_text_to_video(transformer)
    return LatentFacts(
        family="hunyuan_video15",
        block_class_names=("HunyuanVideo15TransformerBlock",),
        lora_targets=LORA_TARGETS,
        latent_channels=transformer["out_channels"],
        vae_scale=vae.get("spatial_compression_ratio", 16),
        patch_size=transformer["patch_size"],
        frame_scale=vae.get("temporal_compression_ratio", 4),
        fps=FPS,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=NoGuidance() if _is_distilled(configs) else Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["text_embed_dim"],
    )


def _is_distilled(configs: ModelConfigs) -> bool:
    """True if the checkpoint's guider is off."""
    guider = configs.guiders["guider"]
    return guider.get("guidance_scale") == 1.0 or not guider.get("enabled", True)


def _check_text_to_video(transformer: Config) -> None:
    task, in_channels = transformer.get("task_type", "i2v"), 2 * transformer["out_channels"] + 1
    if task != "t2v" or transformer["in_channels"] != in_channels or transformer.get("use_meanflow"):
        raise NotFoundError(
            f"this HunyuanVideo 1.5 transformer has task_type={task!r}, in_channels={transformer['in_channels']} and "
            f"use_meanflow={bool(transformer.get('use_meanflow'))}. Only text to video is supported (t2v, "
            f"{in_channels}, False). Use such a checkpoint, for instance "
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
        )


def toy_tokenizers() -> dict[str, Any]:
    """Byte-level tokenizers. The chat before the prompt has as many tokens as in the real tokenizer."""
    glyphs = byt5_tokenizer()
    glyphs.model_max_length = TOY_GLYPH_TOKENS
    prompts = with_pieces(qwen_tokenizer(), SYSTEM_MESSAGE, CROP_START - TOY_CHAT_TOKENS)
    return {"tokenizer": prompts, "tokenizer_2": glyphs}


HUNYUAN_VIDEO_15 = DiffusersFamily(
    name="hunyuan_video15",
    pipeline="HunyuanVideo15Pipeline",
    classes={
        "transformer": "diffusers.HunyuanVideo15Transformer3DModel",
        "text_encoder": "transformers.Qwen2_5_VLTextModel",
        "text_encoder_2": "transformers.T5EncoderModel",
        "vae": "diffusers.AutoencoderKLHunyuanVideo15",
    },
    tokenizers=("tokenizer", "tokenizer_2"),
    guiders={"guider": "diffusers.ClassifierFreeGuidance"},
    facts=facts,
    toys=read_configs(FOLDER / "toy.json"),
    toy_tokenizers=toy_tokenizers,
    published=read_configs(FOLDER / "published.json"),
)


class HunyuanVideo15Denoiser:
    """The transformer as a velocity field. Text to video gives it an empty condition latent and no image."""

    def __init__(self, transformer: Any, timestep_scale: float) -> None:
        self.transformer = transformer  # diffusers' HunyuanVideo15Transformer3DModel, which has no types
        self.timestep_scale = timestep_scale

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, H, W] fp32 at x [B, C, F, H, W] and sigma [B], given the condition `text`."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.embeds_2 is not None
        dtype = self.transformer.x_embedder.proj.weight.dtype
        latent, condition, mask = x.to(dtype), torch.zeros_like(x, dtype=dtype), torch.zeros_like(x[:, :1], dtype=dtype)
        with one_kernel(latent):
            v = self.transformer(
                hidden_states=torch.cat([latent, condition, mask], dim=1),
                # The timestep stays in fp32: bf16 has 8 bits of precision, too few for 1000 sigma.
                timestep=self.timestep_scale * sigma,
                encoder_hidden_states=text.embeds.to(dtype),
                encoder_attention_mask=text.mask,
                encoder_hidden_states_2=text.embeds_2.to(dtype),
                encoder_attention_mask_2=text.mask_2,
                # All zeros means that there is no image. These tokens are masked, so 1 has the same effect as 729.
                image_embeds=latent.new_zeros(len(x), 1, self.transformer.config.image_embed_dim),
                return_dict=False,
            )[0]
        return v.float()


def one_kernel(x: Tensor) -> AbstractContextManager[None]:
    """Makes a 1 x 1 convolution use the same kernel for any batch size: on a CPU, oneDNN takes over from 16 rows on."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return nullcontext()
    return torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)


class HunyuanVideo15TextEncoder:
    """The frozen language model of Qwen2.5-VL, and ByT5."""

    components: tuple[str, ...] = (QWEN, BYT5)

    def __init__(self, modules: Mapping[str, nn.Module], tokenizers: Mapping[str, Any]) -> None:
        self.qwen, self.byt5 = modules[QWEN], modules[BYT5]
        self.qwen_tokenizer, self.byt5_tokenizer = tokenizers["tokenizer"], tokenizers["tokenizer_2"]
        self.glyph_tokens = glyph_tokens(self.byt5_tokenizer)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts Qwen tokens of the prompt and the chat's end."""
        tokens, mask = self._tokens(texts, max_sequence_length)
        glyphs, glyph_mask = self._glyphs([glyph_text(text) for text in texts])
        return TextEmbedCondition(embeds=tokens, mask=mask, embeds_2=glyphs.to(tokens.dtype), mask_2=glyph_mask)

    def _tokens(self, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
        """Qwen states [B, L, D] and the mask [B, L] of real tokens."""
        batch = self.qwen_tokenizer.apply_chat_template(
            [_chat(text) for text in texts],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            padding="max_length",
            max_length=CROP_START + length,
            truncation=True,
            return_tensors="pt",
        )
        device = next(self.qwen.parameters()).device
        ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
        states = self.qwen(input_ids=ids, attention_mask=causal_mask(mask), output_hidden_states=True).hidden_states
        return states[-1 - SKIPPED_LAYERS][:, CROP_START:], mask[:, CROP_START:].bool()

    def _glyphs(self, texts: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        """ByT5 states [B, L2, D2], zeros for None, and the mask [B, L2] of real tokens."""
        weight = next(self.byt5.parameters())
        if not any(texts):
            shape = (len(texts), self.glyph_tokens)
            width = int(self.byt5.config.d_model)  # type: ignore[union-attr,arg-type]
            return weight.new_zeros(*shape, width), torch.zeros(shape, dtype=torch.bool, device=weight.device)
        # Rows without text run too, so that a row's bits do not depend on how many rows have text.
        batch = self.byt5_tokenizer(
            [text or "" for text in texts],
            padding="max_length",
            max_length=self.glyph_tokens,
            truncation=True,
            return_tensors="pt",
        ).to(weight.device)
        states: Tensor = self.byt5(input_ids=batch.input_ids, attention_mask=batch.attention_mask.float())[0]
        has_text = torch.tensor([text is not None for text in texts], device=weight.device)[:, None]
        return states * has_text[..., None], batch.attention_mask.bool() & has_text


def glyph_tokens(tokenizer: Any) -> int:
    """Number of ByT5 tokens per prompt: 256, or the tokenizer's limit if that is lower."""
    return min(GLYPH_TOKENS, int(tokenizer.model_max_length))


def glyph_text(prompt: str) -> str | None:
    """The text for ByT5: each distinct text in straight or curly quotes. None if the prompt quotes nothing."""
    quoted = [straight or curly for straight, curly in QUOTED.findall(prompt)]
    return "".join(f'Text "{text}". ' for text in dict.fromkeys(quoted)) or None


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_MESSAGE}, {"role": "user", "content": text or " "}]


class HunyuanVideo15Decoder(VideoDecoder):
    """The VAE's decoder, one video at a time: the VAE's attention mask supports no larger batch."""

    def __init__(self, vae: Any) -> None:
        super().__init__(vae)
        vae.enable_slicing()


class HunyuanVideo15Bundle(DiffusersBundle):
    """Transformer, the language model of Qwen2.5-VL, ByT5 and VAE."""

    family: ClassVar[DiffusersFamily] = HUNYUAN_VIDEO_15

    def denoiser(self) -> HunyuanVideo15Denoiser:
        """The transformer as a velocity field."""
        return HunyuanVideo15Denoiser(self.trainable(), self.facts.timestep_scale)

    def text_encoder(self) -> TextEncoder:
        """Qwen2.5-VL and ByT5."""
        self.require(HunyuanVideo15TextEncoder.components, "encode text")
        return HunyuanVideo15TextEncoder(self.modules, self.tokenizers)

    def decoder(self) -> Decoder:
        """The VAE's decoder."""
        self.require(("vae",), "decode latents")
        return HunyuanVideo15Decoder(self.modules["vae"])


class HunyuanVideo15Pipeline(DiffusersPipeline[HunyuanVideo15Bundle]):
    """Text to video with HunyuanVideo 1.5."""

    capabilities: ClassVar[Capabilities] = VIDEO

    def load_lora(self, plain: PlainPipeline, folder: Path) -> None:
        """Loads adapters into diffusers' transformer, because its pipeline cannot load them."""
        plain.transformer.load_lora_adapter(str(folder), weight_name=DIFFUSERS_FILE)

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """diffusers takes the guidance scale and text lengths from its pipeline's attributes, not from the call."""
        plain.guider = plain.guider.new(guidance_scale=params.guidance_scale)
        plain.tokenizer_max_length = params.max_sequence_length
        plain.tokenizer_2_max_length = glyph_tokens(self.bundle.tokenizers["tokenizer_2"])
        plain.vae.enable_slicing()
        frames: Tensor = plain(
            prompt=list(texts),
            negative_prompt=[params.negative_prompt] * len(texts),
            height=params.height,
            width=params.width,
            num_frames=params.num_frames,
            num_inference_steps=params.num_inference_steps,
            sigmas=unshifted_sigmas(params.num_inference_steps),
            latents=x_T,
            output_type="pt",
        ).frames
        return frames.transpose(1, 2)
