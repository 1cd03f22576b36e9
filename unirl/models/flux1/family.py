"""What a FLUX.1 checkpoint is made of. Black Forest Labs 2024 (github.com/black-forest-labs/flux)."""

from __future__ import annotations

from unirl.config.errors import NotFoundError
from unirl.models.flux1.denoiser import PATCH
from unirl.models.flux1.published import PUBLISHED
from unirl.models.flux1.toy import SCHNELL, TOY, toy_tokenizers
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs
from unirl.sde.guidance import EmbeddedGuidance, NoGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.facts import LatentFacts

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
LORA_TARGETS = (
    *(f"attn.{name}" for name in ATTENTION),
    *(f"{part}.net.{name}" for part in ("ff", "ff_context") for name in ("0.proj", "2")),
)


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """What the rest of the system needs to know. Without an input for the guidance scale (schnell), there is none."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    _check_layout(transformer["in_channels"], vae["latent_channels"])
    return LatentFacts(
        family="flux1",
        block_class_names=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        lora_targets=LORA_TARGETS,
        latent_channels=vae["latent_channels"],
        vae_scale=2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=PATCH,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        timestep_scale=1.0,
        guidance=EmbeddedGuidance() if transformer.get("guidance_embeds") else NoGuidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["pooled_projection_dim"],
    )


def _check_layout(in_channels: int, latent_channels: int) -> None:
    """Raises DataError (4001) for a model that reads more than the sample: Fill, Canny, Depth."""
    if in_channels != PATCH**2 * latent_channels:
        raise NotFoundError(
            f"the checkpoint's transformer reads tokens of {in_channels} numbers, and a FLUX.1 model of text to image "
            f"reads {PATCH**2 * latent_channels} ({PATCH} x {PATCH} x {latent_channels} channels of its VAE); those of "
            "Fill, Canny and Depth are not read here. Use black-forest-labs/FLUX.1-dev"
        )


FLUX1 = DiffusersFamily(
    name="flux1",
    pipeline="FluxPipeline",
    classes={
        "transformer": "diffusers.FluxTransformer2DModel",
        "text_encoder": "transformers.CLIPTextModel",
        "text_encoder_2": "transformers.T5EncoderModel",
        "vae": "diffusers.AutoencoderKL",
    },
    tokenizers=("tokenizer", "tokenizer_2"),
    facts=facts,
    toys={"toy": TOY, "toy-schnell": SCHNELL},
    toy_tokenizers=toy_tokenizers,
    published=PUBLISHED,
)
