"""What a Z-Image checkpoint is made of. Alibaba 2025 (arXiv:2511.22699)."""

from __future__ import annotations

from unirl.config.errors import NotFoundError
from unirl.models.loading.checkpoint import Config, DiffusersFamily, ModelConfigs
from unirl.models.z_image.published import PUBLISHED
from unirl.models.z_image.toy import TOY, toy_tokenizers
from unirl.sde.guidance import Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.facts import LatentFacts

PATCH_SIZE = 2
LORA_TARGETS = tuple(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """What the rest of the system needs to know. Raises DataError (4001) for a model that sees images."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    _check_text_to_image(transformer)
    return LatentFacts(
        family="z_image",
        block_class_names=("ZImageTransformerBlock",),
        lora_targets=LORA_TARGETS,
        latent_channels=transformer["in_channels"],
        vae_scale=2 ** (len(vae["block_out_channels"]) - 1),
        patch_size=PATCH_SIZE,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        timestep_scale=1.0,
        guidance=Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["cap_feat_dim"],
    )


def _check_text_to_image(transformer: Config) -> None:
    if transformer.get("siglip_feat_dim") is not None or PATCH_SIZE not in transformer["all_patch_size"]:
        raise NotFoundError(
            f"a Z-Image transformer with siglip_feat_dim={transformer.get('siglip_feat_dim')} and all_patch_size="
            f"{tuple(transformer['all_patch_size'])} is none of text to image (None, and {PATCH_SIZE} among them), "
            "which this family draws. Take such a checkpoint, for instance Tongyi-MAI/Z-Image"
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
    toys={"toy": TOY},
    toy_tokenizers=toy_tokenizers,
    published=PUBLISHED,
    uninitialised=("x_pad_token", "cap_pad_token"),
)
