"""FLUX.2-klein. Black Forest Labs 2026 (github.com/black-forest-labs/flux2).

    pixels --VAE--> [B, 32, H / 8, W / 8] --patches of 2 x 2--> [B, 128, H / 16, W / 16] --(z - mean) / std--> latents

Each token has a position (time, row, column, index): (0, row, column, 0) for the sample, (10 + 10 i, row, column, 0)
for the i-th condition image and (0, 0, 0, index) for the text. The condition images follow the sample.

The text condition joins three hidden states of Qwen3, of a chat with the prompt as the user's message:

    tokens  [B, L, 3 D] = states after layers N/4 | N/2 | 3N/4

Qwen3-4B and -8B have N = 36 layers, so theirs are 9, 18 and 27. The result equals diffusers'
`Flux2KleinPipeline.encode_prompt`. The transformer attends to padding as to any other token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import ConditionImageEncoder, Decoder, DiffusersBundle, Encoder, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages, causal_mask
from unirl.models.denoising.vae import from_unit, to_unit
from unirl.models.images import to_pil
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs, read_configs
from unirl.models.loading.toy_tokenizers import qwen_tokenizer
from unirl.sde.guidance import Guidance, NoGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, LatentCondition, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

FOLDER = Path(__file__).parent
PATCH = 2
NUM_TEXT_LAYERS = 3
"""Hidden states that are joined in each text token."""
MAX_CONDITION_IMAGES = 4
"""The limit that the model's authors state."""
IMAGE_GAP = 10
"""Distance in time between the sample and the first condition image, and between condition images."""
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
LORA_TARGETS = (
    *(f"attn.{name}" for name in ATTENTION),
    *(f"{part}.{name}" for part in ("ff", "ff_context") for name in ("linear_in", "linear_out")),
    "attn.to_qkv_mlp_proj",
)


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. `is_distilled` in model_index.json marks a distilled one, which has no guidance."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    _check_components(configs)
    return LatentFacts(
        family="flux2_klein",
        block_class_names=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
        lora_targets=LORA_TARGETS,
        latent_channels=transformer["in_channels"],
        vae_scale=PATCH * 2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=1,
        schedule=replace(SigmaSchedule.from_diffusers(configs.scheduler), mu="flux2"),
        timestep_scale=1.0,
        guidance=NoGuidance() if configs.settings.get("is_distilled") else Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["joint_attention_dim"],
        condition_images=(0, MAX_CONDITION_IMAGES),
    )


def _check_components(configs: ModelConfigs) -> None:
    """Raises NotFoundError (4001) if the components do not fit together, or the guidance scale is an input (dev)."""
    transformer, vae, text = (configs.components[name] for name in ("transformer", "vae", "text_encoder"))
    requirements = (
        ("in_channels", transformer["in_channels"], PATCH**2 * vae["latent_channels"]),
        ("joint_attention_dim", transformer["joint_attention_dim"], NUM_TEXT_LAYERS * text["hidden_size"]),
        ("guidance_embeds", transformer.get("guidance_embeds", True), False),
    )
    for name, value, required in requirements:
        if value != required:
            raise NotFoundError(
                f"the checkpoint's transformer has {name}={value}, and a FLUX.2-klein model with this VAE and text "
                f"encoder has {required}. Use black-forest-labs/FLUX.2-klein-base-4B or -9B"
            )


def toy_tokenizers() -> dict[str, Any]:
    """A byte-level Qwen tokenizer."""
    return {"tokenizer": qwen_tokenizer()}


FLUX2_KLEIN = DiffusersFamily(
    name="flux2_klein",
    pipeline="Flux2KleinPipeline",
    classes={
        "transformer": "diffusers.Flux2Transformer2DModel",
        "text_encoder": "transformers.Qwen3ForCausalLM",
        "vae": "diffusers.AutoencoderKLFlux2",
    },
    facts=facts,
    toys=read_configs(FOLDER / "toy.json"),
    toy_tokenizers=toy_tokenizers,
    published=read_configs(FOLDER / "published.json"),
)


class KleinDenoiser:
    """The transformer as a velocity field."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer  # diffusers' Flux2Transformer2DModel, which has no types

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given `text` and, if there are any, `image` latents."""
        text, image = conditions["text"], conditions.get("image")
        assert isinstance(text, TextEmbedCondition)
        dtype = self.transformer.x_embedder.weight.dtype
        tokens, positions = [_tokens(x)], [_positions(x, 0)]
        if image is not None:
            assert isinstance(image, LatentCondition)
            for i, latents in enumerate(image.latents.to(x).unbind(1)):
                tokens.append(_tokens(latents))
                positions.append(_positions(latents, IMAGE_GAP * (i + 1)))
        v = self.transformer(
            hidden_states=torch.cat(tokens, dim=1).to(dtype),
            timestep=sigma,  # the transformer multiplies it by 1000
            encoder_hidden_states=text.embeds.to(dtype),
            txt_ids=_grid(1, 1, text.embeds.shape[1], device=x.device),
            img_ids=torch.cat(positions),
            return_dict=False,
        )[0]
        rows, columns = x.shape[-2:]
        return v[:, : rows * columns].float().transpose(1, 2).unflatten(2, (rows, columns))


def _tokens(x: Tensor) -> Tensor:
    """[B, H W, C] tokens of x [B, C, H, W]."""
    return x.flatten(2).transpose(1, 2)


def _positions(x: Tensor, time: int) -> Tensor:
    """[H W, 4] positions of the tokens of x [B, C, H, W]."""
    positions = _grid(x.shape[-2], x.shape[-1], 1, device=x.device)
    positions[:, 0] = time
    return positions


def _grid(rows: int, columns: int, indices: int, device: torch.device) -> Tensor:
    """[rows columns indices, 4] int64 positions at time 0."""
    axes = [torch.arange(count, device=device) for count in (1, rows, columns, indices)]
    return torch.cartesian_prod(*axes)


class KleinTextEncoder:
    """The frozen Qwen3, without its head."""

    components: tuple[str, ...] = ("text_encoder",)

    def __init__(self, text_encoder: Any, tokenizer: Any) -> None:
        self.text_encoder = text_encoder  # transformers' Qwen3ForCausalLM; its head is not run
        self.tokenizer = tokenizer
        self.layers = text_layers(text_encoder.config.num_hidden_layers)

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The condition of `texts`; `max_sequence_length` counts the tokens of the whole chat."""
        batch = self.tokenizer(
            [self._chat(text) for text in texts],
            padding="max_length",
            max_length=max_sequence_length,
            truncation=True,
            return_tensors="pt",
        ).to(self.text_encoder.device)
        states = self.text_encoder.model(
            input_ids=batch.input_ids,
            attention_mask=causal_mask(batch.attention_mask),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        embeds = torch.cat([states[layer] for layer in self.layers], dim=-1)
        return TextEmbedCondition(embeds=embeds, mask=batch.attention_mask.bool())

    def _chat(self, text: str) -> str:
        chat: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return chat


def text_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose hidden states are joined, counted from 1."""
    return tuple(num_layers * part // (NUM_TEXT_LAYERS + 1) for part in range(1, NUM_TEXT_LAYERS + 1))


class KleinDecoder:
    """The VAE's decoder, in the VAE's own dtype (fp32)."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae  # diffusers' AutoencoderKLFlux2, which has no types

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [0, 1] of latents [B, 128, H / 16, W / 16]."""
        mean, std = _channel_statistics(self.vae)
        return to_unit(self.vae.decode(pixel_shuffle(latents * std + mean, PATCH), return_dict=False)[0])


class KleinEncoder:
    """The VAE's encoder. It gives the mean of its Gaussian."""

    components: tuple[str, ...] = ("vae",)

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, 128, H / 16, W / 16] of pixels [B, 3, H, W] in [0, 1]."""
        mean, std = _channel_statistics(self.vae)
        latents = pixel_unshuffle(self.vae.encode(from_unit(pixels)).latent_dist.mode(), PATCH)
        return (latents - mean) / std


def _channel_statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """[128, 1, 1] mean and standard deviation of each channel of a patch, which are buffers of the VAE."""
    mean, variance = vae.bn.running_mean, vae.bn.running_var
    return mean[:, None, None], (variance[:, None, None] + vae.config.batch_norm_eps).sqrt()


class KleinImageEncoder:
    """Condition images as VAE latents."""

    def __init__(self, encoder: KleinEncoder) -> None:
        self.encoder = encoder
        self.components = encoder.components

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """`image`: latents [B, N, 128, H / 16, W / 16] of images [B, N, 3, H, W]."""
        latents = self.encoder.encode(images.flatten(0, 1))
        return {"image": LatentCondition(latents=latents.unflatten(0, images.shape[:2]))}


class Flux2KleinBundle(DiffusersBundle):
    """Transformer, Qwen3 and VAE."""

    family: ClassVar[DiffusersFamily] = FLUX2_KLEIN

    def denoiser(self) -> KleinDenoiser:
        """The transformer as a velocity field."""
        return KleinDenoiser(self.trainable())

    def text_encoder(self) -> TextEncoder:
        """Qwen3."""
        self.require(KleinTextEncoder.components, "encode text")
        return KleinTextEncoder(self.modules["text_encoder"], self.tokenizers["tokenizer"])

    def condition_image_encoder(self) -> ConditionImageEncoder | None:
        """The VAE's encoder, for images to be edited."""
        self.require(("vae",), "encode images")
        return KleinImageEncoder(KleinEncoder(self.modules["vae"]))

    def decoder(self) -> Decoder:
        """The VAE's decoder."""
        self.require(("vae",), "decode latents")
        return KleinDecoder(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The VAE's encoder."""
        self.require(("vae",), "encode images")
        return KleinEncoder(self.modules["vae"])


class Flux2KleinPipeline(DiffusersPipeline[Flux2KleinBundle]):
    """Text to image and image editing with FLUX.2-klein."""

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """With condition images, one prompt per call: diffusers gives the same images to all prompts of a call."""
        if images is None:
            return self._sample(plain, texts, x_T, params)
        rows = [
            self._sample(plain, [text], x_T[i : i + 1], params, image=[to_pil(pixels) for pixels in row.pixels])
            for i, (text, row) in enumerate(zip(texts, images, strict=True))
        ]
        return torch.cat(rows)

    def _sample(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        **image: Any,
    ) -> Tensor:
        layers = text_layers(plain.text_encoder.config.num_hidden_layers)
        text_settings = {"max_sequence_length": params.max_sequence_length, "text_encoder_out_layers": layers}
        result: Tensor = plain(
            **image,
            prompt=list(texts),
            negative_prompt_embeds=plain.encode_prompt([params.negative_prompt] * len(texts), **text_settings)[0],
            **text_settings,
            height=params.height,
            width=params.width,
            guidance_scale=params.guidance_scale,
            num_inference_steps=params.num_inference_steps,
            sigmas=unshifted_sigmas(params.num_inference_steps),
            latents=x_T,
            output_type="pt",
        ).images
        return result
