"""What a Qwen-Image checkpoint is made of. Wu et al. 2025 (arXiv:2508.02324)."""

from __future__ import annotations

from unirl.config.errors import NotFoundError
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs
from unirl.models.qwen_image.published import PUBLISHED
from unirl.models.qwen_image.toy import TOY, toy_tokenizers
from unirl.sde.guidance import NormCorrectedGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.facts import LatentFacts

PIPELINE = "QwenImagePipeline"
EDIT, EDIT_PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
"""diffusers' pipelines of checkpoints that edit: one image, or one to three."""
EDITING = (
    "unirl.models.qwen_image_edit.bundle.QwenImageEditBundle and "
    "unirl.models.qwen_image_edit.pipeline.QwenImageEditPipeline"
)
CLASSES = {
    "transformer": "diffusers.QwenImageTransformer2DModel",
    "text_encoder": "transformers.Qwen2_5_VLForConditionalGeneration",
    "vae": "diffusers.AutoencoderKLQwenImage",
}
SEED = 20261
"""Of the toys' random weights."""
LORA_TARGETS = tuple(
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
FOREIGN = ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope")
"""Switches of the transformer's class that are on in other models only, and that need other inputs."""


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """What the rest of the system needs to know.

    Raises DataError (4001) for a transformer that reads more than Qwen-Image's do.
    """
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    for switch in FOREIGN:
        if transformer.get(switch):
            raise NotFoundError(
                f"the transformer's configuration has {switch}={transformer[switch]}: that is another model than "
                "Qwen-Image or Qwen-Image-Edit (layered or distilled), which is not supported. Take another checkpoint"
            )
    patch_size = transformer["patch_size"]
    return LatentFacts(
        family="qwen_image",
        block_class_names=("QwenImageTransformerBlock",),
        lora_targets=LORA_TARGETS,
        latent_channels=transformer["in_channels"] // patch_size**2,
        vae_scale=2 ** len(vae["temperal_downsample"]),
        patch_size=patch_size,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        timestep_scale=1.0,
        guidance=NormCorrectedGuidance(patch_size=patch_size),
        batch_multiple=batch_multiple,
        text_width=transformer["joint_attention_dim"],
    )


QWEN_IMAGE = DiffusersFamily(
    name="qwen_image",
    pipeline=PIPELINE,
    foreign_pipelines={EDIT: EDITING, EDIT_PLUS: EDITING},
    classes=CLASSES,
    facts=facts,
    toys={"toy": TOY},
    toy_tokenizers=toy_tokenizers,
    published=PUBLISHED,
    seed=SEED,
)
