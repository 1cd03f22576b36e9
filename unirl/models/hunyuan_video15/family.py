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
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import Decoder, DiffusersBundle, NetworkDenoiser, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline
from unirl.models.denoising.pipeline import VIDEO
from unirl.models.denoising.ragged import call
from unirl.models.denoising.text_encoders import CausalTextEncoder, tokenize
from unirl.models.hunyuan_video.family import FPS, VideoDecoder
from unirl.models.language.chat import chat
from unirl.models.loading.adapter_files import DIFFUSERS_FILE
from unirl.models.loading.checkpoint import JOINT_BLOCK, DiffusersFamily, ModelConfigs, family_files
from unirl.models.loading.toy_tokenizers import byt5_tokenizer, qwen_tokenizer, with_pieces
from unirl.sde.guidance import Guidance, NoGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.protocols import Capabilities
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
    from diffusers.models.attention_processor import Attention
    from transformers import PreTrainedTokenizerBase, Qwen2_5_VLTextModel, T5EncoderModel

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
TOY_CHAT_TOKENS = 16
"""Tokens of the chat before the prompt other than the system message, in the toy tokenizer."""
TOY_GLYPH_TOKENS = 12


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. Raises NotFoundError (4001) for a model of another task than text to video."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    guider = configs.guiders["guider"]
    is_distilled = guider.get("guidance_scale") == 1.0 or not guider.get("enabled", True)
    task, in_channels = transformer.get("task_type", "i2v"), 2 * transformer["out_channels"] + 1
    if task != "t2v" or transformer["in_channels"] != in_channels or transformer.get("use_meanflow"):
        raise NotFoundError(
            f"this HunyuanVideo 1.5 transformer has task_type={task!r}, in_channels={transformer['in_channels']} and "
            f"use_meanflow={bool(transformer.get('use_meanflow'))}. Only text to video is supported (t2v, "
            f"{in_channels}, False). Use such a checkpoint, for instance "
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
        )
    return LatentFacts(
        family="hunyuan_video15",
        block_class_names=("HunyuanVideo15TransformerBlock",),
        lora_targets=JOINT_BLOCK,
        latent_channels=transformer["out_channels"],
        vae_scale=vae.get("spatial_compression_ratio", 16),
        patch_size=transformer["patch_size"],
        frame_scale=vae.get("temporal_compression_ratio", 4),
        fps=FPS,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=NoGuidance() if is_distilled else Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["text_embed_dim"],
        text_is_masked=True,
    )


def toy_tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """Byte-level tokenizers. The chat before the prompt has as many tokens as in the real tokenizer."""
    glyphs = byt5_tokenizer()
    glyphs.model_max_length = TOY_GLYPH_TOKENS
    prompts = with_pieces(qwen_tokenizer(), SYSTEM_MESSAGE, CROP_START - TOY_CHAT_TOKENS)
    return {"tokenizer": prompts, "tokenizer_2": glyphs}


def causal_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """The mask [L, L] of the VAE's attention: a latent pixel sees those of its own frame and of earlier ones.

    It equals diffusers' `prepare_causal_attention_mask`, which fills its rows in a loop:
    8,100 launches for a video of 480 x 480 x 33.

    Args:
        batch_size: None: without a batch dimension.
    """
    later = torch.full((n_frame, n_frame), -torch.inf, dtype=dtype, device=device).triu(1)
    mask = later.repeat_interleave(n_hw, 0).repeat_interleave(n_hw, 1)
    return mask if batch_size is None else mask.expand(batch_size, -1, -1)


def with_causal_mask(vae: nn.Module) -> None:
    """Let the attention blocks of a VAE make their masks by `causal_mask`."""
    part: Any
    for part in vae.modules():
        if hasattr(part, "prepare_causal_attention_mask"):  # an attribute of diffusers' attention blocks
            part.prepare_causal_attention_mask = causal_mask


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
    toy_tokenizers=toy_tokenizers,
    prepare={"vae": with_causal_mask},
    **family_files(__file__),
)


class HunyuanVideo15Denoiser(NetworkDenoiser):
    """The transformer as a velocity field. Text to video gives it an empty condition latent and no image."""

    network: HunyuanVideo15Transformer3DModel
    matrix: ClassVar[str] = "x_embedder.proj.weight"

    def __init__(self, network: HunyuanVideo15Transformer3DModel, facts: LatentFacts) -> None:
        super().__init__(network, facts)
        for block in network.transformer_blocks:
            block.attn.set_processor(KeyMaskedAttention())

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.mask is not None
        assert text.embeds_2 is not None and text.mask_2 is not None
        dtype = self.dtype
        # The timestep stays in fp32: bf16 has 8 bits of precision, too few for 1000 sigma.
        inputs = x.to(dtype), self.timestep_scale * sigma, text.embeds.to(dtype), text.mask
        with one_kernel(inputs[0]):
            return call(self.network, network_velocity, *inputs, text.embeds_2.to(dtype), text.mask_2).float()


def network_velocity(
    network: HunyuanVideo15Transformer3DModel,
    x: Tensor,
    timestep: Tensor,
    text: Tensor,
    mask: Tensor,
    glyphs: Tensor,
    glyph_mask: Tensor,
) -> Tensor:
    """The network's velocity [B, C, F, H, W]: its own forward, with padding left in place and no tokens of an image.

    The network moves padding to the end of each row. Its text tokens have no positions, so their order has no effect.
    """
    rotations, embed = network.rope(x), network.time_embed
    temb = embed.timestep_embedder(embed.time_proj(timestep).to(x.dtype))
    empty = x.new_zeros(len(x), x.shape[1] + 1, *x.shape[2:])  # the condition latent and its mask
    video = network.x_embedder(torch.cat([x, empty], dim=1))
    kinds = network.cond_type_embed.weight
    text = network.context_embedder(text, timestep, mask) + kinds[0].to(text.dtype)
    # Sharded float32 weights are gathered in bf16, and the layer norm of a CPU takes only inputs of their dtype.
    glyphs = network.context_embedder_2(glyphs.to(network.context_embedder_2.norm.weight.dtype))
    glyphs = glyphs + kinds[1].to(text.dtype)
    context = torch.cat([glyphs, text], dim=1)
    mask = pad(torch.cat([glyph_mask, mask], dim=1), (video.shape[1], 0), value=True)
    for block in network.transformer_blocks:
        video, context = block(video, context, temb, mask, rotations)
    tokens = network.proj_out(network.norm_out(video, temb))
    config = network.config
    patch = (config.patch_size_t, config.patch_size, config.patch_size)
    frames, rows, columns = (side // size for side, size in zip(x.shape[2:], patch, strict=True))
    cut = tokens.unflatten(2, (-1, *patch)).unflatten(1, (frames, rows, columns))
    return cut.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class KeyMaskedAttention:
    """The joint attention of a block, which excludes the padding of the text.

    The processor of diffusers makes a mask [B, 1, L, L] in every block, which takes 0.2 GB per row of 14,000 tokens.
    Outputs at padding tokens differ from it. Nothing reads them.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Outputs for the video and for the text. The mask [B, L] covers all tokens, or the last ones of a row."""
        from diffusers.models.embeddings import apply_rotary_emb

        def heads(tokens: Tensor, projection: nn.Module, norm: nn.Module | None = None) -> Tensor:
            states: Tensor = projection(tokens).unflatten(2, (attn.heads, -1))
            return states if norm is None else norm(states)

        video = [heads(hidden_states, attn.to_q, attn.norm_q), heads(hidden_states, attn.to_k, attn.norm_k)]
        video = [apply_rotary_emb(states, image_rotary_emb, sequence_dim=1) for states in video]
        video.append(heads(hidden_states, attn.to_v))
        text = [
            heads(encoder_hidden_states, attn.add_q_proj, attn.norm_added_q),
            heads(encoder_hidden_states, attn.add_k_proj, attn.norm_added_k),
            heads(encoder_hidden_states, attn.add_v_proj),
        ]
        query, key, value = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(video, text, strict=True))
        missing = query.shape[2] - attention_mask.shape[1]
        if missing:
            attention_mask = pad(attention_mask, (missing, 0), value=True)
        out = scaled_dot_product_attention(query, key, value, attention_mask.bool()[:, None, None, :])
        out = out.transpose(1, 2).flatten(2).to(query.dtype)
        num_tokens = hidden_states.shape[1]
        return attn.to_out[1](attn.to_out[0](out[:, :num_tokens])), attn.to_add_out(out[:, num_tokens:])


def one_kernel(x: Tensor) -> AbstractContextManager[None]:
    """Makes a 1 x 1 convolution use the same kernel for any batch size: on a CPU, oneDNN takes over from 16 rows on."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return nullcontext()
    return torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)


class HunyuanVideo15TextEncoder:
    """The frozen language model of Qwen2.5-VL, and ByT5."""

    components: tuple[str, ...] = ("text_encoder", "text_encoder_2")

    def __init__(
        self, qwen: Qwen2_5_VLTextModel, byt5: T5EncoderModel, tokenizers: Mapping[str, PreTrainedTokenizerBase]
    ) -> None:
        self.qwen = CausalTextEncoder(
            qwen,
            tokenizers["tokenizer"],
            lambda text: chat(tokenizers["tokenizer"], text or " ", SYSTEM_MESSAGE),
            layers=(-1 - SKIPPED_LAYERS,),
            num_dropped=CROP_START,
        )
        self.byt5, self.byt5_tokenizer = byt5, tokenizers["tokenizer_2"]
        self.glyph_tokens = glyph_tokens(self.byt5_tokenizer)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts Qwen tokens of the prompt and the chat's end."""
        condition = self.qwen.encode(texts, max_sequence_length)
        glyphs, mask = self._glyphs([glyph_text(text) for text in texts])
        return condition.replace(embeds_2=glyphs.to(condition.embeds.dtype), mask_2=mask)

    def cuts(self, texts: Sequence[str], max_sequence_length: int) -> list[bool]:
        return self.qwen.cuts(texts, max_sequence_length)

    def _glyphs(self, texts: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        """ByT5 states [B, L2, D2], zeros for None, and the mask [B, L2] of real tokens."""
        if not any(texts):
            shape = (len(texts), self.glyph_tokens)
            glyphs = torch.zeros(*shape, self.byt5.config.d_model, dtype=self.byt5.dtype, device=self.byt5.device)
            return glyphs, torch.zeros(shape, dtype=torch.bool, device=self.byt5.device)
        # Rows without text run too, so that a row's bits do not depend on how many rows have text.
        tokens = tokenize(self.byt5_tokenizer, [text or "" for text in texts], self.glyph_tokens, self.byt5.device)
        states: Tensor = self.byt5(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask.float())[0]
        has_text = torch.tensor([text is not None for text in texts], device=states.device)[:, None]
        return states * has_text[..., None], tokens.attention_mask.bool() & has_text


def glyph_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of ByT5 tokens per prompt: 256, or the tokenizer's limit if that is lower."""
    return min(GLYPH_TOKENS, int(tokenizer.model_max_length))


def glyph_text(prompt: str) -> str | None:
    """The text for ByT5: each distinct text in straight or curly quotes. None if the prompt quotes nothing."""
    quoted = [straight or curly for straight, curly in QUOTED.findall(prompt)]
    return "".join(f'Text "{text}". ' for text in dict.fromkeys(quoted)) or None


class HunyuanVideo15Decoder(VideoDecoder):
    """The VAE's decoder, one video at a time: the VAE's attention mask supports no larger batch."""

    def __init__(self, vae: AutoencoderKLHunyuanVideo15) -> None:
        super().__init__(vae)
        vae.enable_slicing()


class HunyuanVideo15Bundle(DiffusersBundle):
    """Transformer, the language model of Qwen2.5-VL, ByT5 and VAE."""

    family: ClassVar[DiffusersFamily] = HUNYUAN_VIDEO_15
    denoiser_class: ClassVar[type[NetworkDenoiser]] = HunyuanVideo15Denoiser

    def text_encoder(self) -> TextEncoder:
        qwen, byt5 = self.require(HunyuanVideo15TextEncoder.components, "encode text")
        return HunyuanVideo15TextEncoder(qwen, byt5, self.tokenizers)

    def decoder(self) -> Decoder:
        return HunyuanVideo15Decoder(*self.require(("vae",), "decode latents"))


class HunyuanVideo15Pipeline(DiffusersPipeline[HunyuanVideo15Bundle]):
    """Text to video with HunyuanVideo 1.5."""

    capabilities: ClassVar[Capabilities] = VIDEO

    def load_lora(self, plain: PlainPipeline, folder: Path) -> None:
        """Loads adapters into diffusers' transformer, because its pipeline cannot load them."""
        plain.transformer.load_lora_adapter(str(folder), weight_name=DIFFUSERS_FILE)

    def configured(self, plain: PlainPipeline, params: DiffusionSamplingParams, with_images: bool) -> PlainPipeline:
        """diffusers takes the guidance scale and text lengths from its pipeline's attributes, not from the call."""
        plain.guider = plain.guider.new(guidance_scale=params.guidance_scale)
        plain.tokenizer_max_length = params.max_sequence_length
        plain.tokenizer_2_max_length = glyph_tokens(self.bundle.tokenizers["tokenizer_2"])
        plain.vae.enable_slicing()
        return plain
