"""What a Lumina-Image 2.0 checkpoint is made of. Qin et al. 2025 (arXiv:2503.21758)."""

from __future__ import annotations

from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs
from unirl.models.lumina2.published import PUBLISHED
from unirl.models.lumina2.toy import TOY, toy_tokenizers
from unirl.sde.guidance import LineNormGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.facts import LatentFacts


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """What the rest of the system needs to know."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    return LatentFacts(
        family="lumina2",
        block_class_names=("Lumina2TransformerBlock",),
        lora_targets=("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        latent_channels=transformer["in_channels"],
        vae_scale=2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=transformer["patch_size"],
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=LineNormGuidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["cap_feat_dim"],
    )


LUMINA2 = DiffusersFamily(
    name="lumina2",
    pipeline="Lumina2Pipeline",
    classes={
        "transformer": "diffusers.Lumina2Transformer2DModel",
        "text_encoder": "transformers.Gemma2Model",
        "vae": "diffusers.AutoencoderKL",
    },
    facts=facts,
    toys={"toy": TOY},
    toy_tokenizers=toy_tokenizers,
    published=PUBLISHED,
)
