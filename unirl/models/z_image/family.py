"""Z-Image and Z-Image-Turbo. Alibaba 2025 (arXiv:2511.22699).

Each row has its own number of text tokens, filled to a multiple of 32 by a learned token that is attended to, and the
image tokens, filled likewise, come before them. diffusers pads shorter rows to the longest of the batch, and masks only
if rows differ. Here the rows of a batch are always masked, so that a row's bits do not depend on its neighbours.

The text condition is the hidden states of Qwen3 before its last layer, of a chat with the prompt as the user's message,
as diffusers' `ZImagePipeline.encode_prompt` gives them, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import NetworkDenoiser, TextEncoder
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.models.denoising.ragged import Rotations, call, patches, unpatched
from unirl.models.denoising.text_encoders import CausalTextEncoder
from unirl.models.denoising.vae import KLBundle
from unirl.models.language.chat import chat
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs, family_files
from unirl.models.loading.toy_tokenizers import qwen_tokenizer
from unirl.sde.guidance import Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from diffusers import ZImageTransformer2DModel

PATCH_SIZE = 2
PATCH_KEY = f"{PATCH_SIZE}-1"
"""Name of the layers for patches of this size and of one frame."""
TEXT_MULTIPLE = 32


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. Raises NotFoundError (4001) for a model that reads images."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    if transformer.get("siglip_feat_dim") is not None or PATCH_SIZE not in transformer["all_patch_size"]:
        raise NotFoundError(
            f"this Z-Image transformer has siglip_feat_dim={transformer.get('siglip_feat_dim')} and all_patch_size="
            f"{tuple(transformer['all_patch_size'])}. Only text to image is supported (siglip_feat_dim=None and "
            f"{PATCH_SIZE} in all_patch_size). Use such a checkpoint, for instance Tongyi-MAI/Z-Image"
        )
    return LatentFacts(
        family="z_image",
        block_class_names=("ZImageTransformerBlock",),
        lora_targets=("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
        latent_channels=transformer["in_channels"],
        vae_scale=2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=PATCH_SIZE,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        timestep_scale=1.0,
        guidance=Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["cap_feat_dim"],
        text_is_masked=True,
    )


Z_IMAGE = DiffusersFamily(
    name="z_image",
    pipeline="ZImagePipeline",
    classes={
        "transformer": "diffusers.ZImageTransformer2DModel",
        "text_encoder": "transformers.Qwen3Model",
        "vae": "diffusers.AutoencoderKL",
    },
    facts=facts,
    toy_tokenizers=lambda: {"tokenizer": qwen_tokenizer()},
    uninitialised=("x_pad_token", "cap_pad_token"),
    **family_files(__file__),
)


class ZImageDenoiser(NetworkDenoiser):
    """The transformer as a velocity field."""

    matrix: ClassVar[str] = "cap_embedder.1.weight"
    block_lists: ClassVar[tuple[str, ...]] = ("layers",)
    network: ZImageTransformer2DModel

    def __init__(self, network: ZImageTransformer2DModel, facts: LatentFacts) -> None:
        super().__init__(network, facts)
        rope = network.rope_embedder
        self.rotations = Rotations(rope.precompute_freqs_cis(rope.axes_dims, rope.axes_lens, rope.theta))

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.mask is not None
        dtype = self.dtype
        v = call(self.network, self.toward_data, x.to(dtype), 1.0 - sigma, text.embeds.to(dtype), text.mask)
        return -v.float()

    def toward_data(
        self, network: ZImageTransformer2DModel, x: Tensor, time: Tensor, text: Tensor, mask: Tensor
    ) -> Tensor:
        """The network's velocity [B, C, H, W]: its own forward, without cutting rows to the length of their text."""
        temb = network.t_embedder(time * network.t_scale).type_as(x)
        image, image_rotations, ends = self.image(network, x, mask)
        text, text_rotations, text_mask = self.text(network, text, mask, ends)
        for layer in network.noise_refiner:
            image = layer(image, None, image_rotations, temb)
        for layer in network.context_refiner:
            text = layer(text, text_mask, text_rotations)
        tokens = torch.cat([image, text], dim=1)
        rotations = torch.cat([image_rotations, text_rotations], dim=1)
        mask = pad(text_mask, (image.shape[1], 0), value=True)
        for layer in network.layers:
            tokens = layer(tokens, mask, rotations, temb)
        num_tokens = x.shape[-2] * x.shape[-1] // PATCH_SIZE**2
        return unpatched(network.all_final_layer[PATCH_KEY](tokens[:, :num_tokens], c=temb), x.shape, PATCH_SIZE)

    def image(self, network: ZImageTransformer2DModel, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Image tokens [B, S, D], filled up, and their rotations; the number of text tokens [B], filled up."""
        tokens = network.all_x_embedder[PATCH_KEY](patches(x, PATCH_SIZE))
        ends = (mask.sum(1) + TEXT_MULTIPLE - 1) // TEXT_MULTIPLE * TEXT_MULTIPLE
        # The first text token has position 1.
        rotations = self.rotations.of_image(ends + 1, x.shape[-2] // PATCH_SIZE, x.shape[-1] // PATCH_SIZE)
        missing = -tokens.shape[1] % TEXT_MULTIPLE
        filler = network.x_pad_token.to(tokens.dtype).expand(len(x), missing, -1)
        origin = self.rotations.of_text(1, 0, x.device).expand(len(x), missing, -1)
        return torch.cat([tokens, filler], dim=1), torch.cat([rotations, origin], dim=1), ends

    def text(
        self, network: ZImageTransformer2DModel, text: Tensor, mask: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Text tokens [B, L, D], filled up, their rotations, and the mask [B, L] of those that are attended to."""
        missing = -text.shape[1] % TEXT_MULTIPLE
        tokens = network.cap_embedder(pad(text, (0, 0, 0, missing)))
        tokens = torch.where(pad(mask, (0, missing))[..., None], tokens, network.cap_pad_token.to(tokens.dtype))
        length = tokens.shape[1]
        rotations = self.rotations.of_text(length, 1, text.device).expand(len(text), -1, -1)
        return tokens, rotations, torch.arange(length, device=text.device) < ends[:, None]


class ZImageBundle(KLBundle):
    """Transformer, Qwen3 and VAE."""

    family: ClassVar[DiffusersFamily] = Z_IMAGE
    denoiser_class: ClassVar[type[NetworkDenoiser]] = ZImageDenoiser

    def text_encoder(self) -> TextEncoder:
        [model], tokenizer = self.require(("text_encoder",), "encode text"), self.tokenizers["tokenizer"]
        return CausalTextEncoder(model, tokenizer, partial(chat, tokenizer, enable_thinking=True))


class ZImagePipeline(DiffusersPipeline[ZImageBundle]):
    """Text to image with Z-Image."""

    def call_arguments(self, texts: Sequence[str], x_T: Tensor, params: DiffusionSamplingParams) -> dict[str, object]:  # noqa: N803
        """diffusers adds guidance_scale (v_cond - v_uncond) to v_cond, so its scale is ours minus 1."""
        return super().call_arguments(texts, x_T, params) | {"guidance_scale": params.guidance_scale - 1.0}
