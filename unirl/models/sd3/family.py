"""What a Stable Diffusion 3 checkpoint is made of. Esser et al. 2024 (arXiv:2403.03206)."""

from __future__ import annotations

from pathlib import Path

from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs
from unirl.models.sd3.published import PUBLISHED
from unirl.models.sd3.toy import TOY, toy_tokenizers
from unirl.sde.guidance import Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.facts import LatentFacts

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
LORA_TARGETS = tuple(
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """What the rest of the system needs to know; without a VAE the transformer works on pixels in [-1, 1]."""
    transformer, vae = configs.components["transformer"], configs.components.get("vae")
    return LatentFacts(
        family="sd3",
        block_class_names=("JointTransformerBlock",),
        lora_targets=LORA_TARGETS,
        latent_channels=transformer["in_channels"],
        vae_scale=1 if vae is None else 2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=transformer["patch_size"],
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["pooled_projection_dim"],
    )


SD3 = DiffusersFamily(
    name="sd3",
    pipeline="StableDiffusion3Pipeline",
    classes={
        "transformer": "diffusers.SD3Transformer2DModel",
        "text_encoder": "transformers.CLIPTextModelWithProjection",
        "text_encoder_2": "transformers.CLIPTextModelWithProjection",
        "text_encoder_3": "transformers.T5EncoderModel",
        "vae": "diffusers.AutoencoderKL",
    },
    tokenizers=("tokenizer", "tokenizer_2", "tokenizer_3"),
    optional=("text_encoder", "text_encoder_2", "text_encoder_3", "vae"),
    facts=facts,
    toys={"toy": TOY},
    toy_tokenizers=toy_tokenizers,
    published=PUBLISHED,
    shipped={name: Path(__file__).parent / name for name in ("quickstart", "quickstart_letters")},
)
