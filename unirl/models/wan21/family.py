"""What a Wan 2.1 checkpoint is made of: text to video, or image to video. Wan 2025 (arXiv:2503.20314)."""

from __future__ import annotations

from unirl.config.errors import NotFoundError
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs
from unirl.models.wan21.published import I2V, PUBLISHED
from unirl.models.wan21.toy import TOY, TOY_I2V, toy_tokenizers
from unirl.sde.guidance import Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.facts import LatentFacts
from unirl.types.protocols import GuidanceLike

PIPELINE = "WanPipeline"
FURTHER_PIPELINES = (I2V,)
CLASSES = {
    "transformer": "diffusers.WanTransformer3DModel",
    "text_encoder": "transformers.UMT5EncoderModel",
    "image_encoder": "transformers.CLIPVisionModel",
    "vae": "diffusers.AutoencoderKLWan",
}
LORA_TARGETS = tuple(f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))
ADDED_LORA_TARGETS = ("attn2.add_k_proj", "attn2.add_v_proj")


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """What the rest of the system needs to know; a Wan 2.2 checkpoint is refused."""
    if any(configs.settings.get(name) for name in ("boundary_ratio", "expand_timesteps")):
        raise NotFoundError(
            "this is a Wan 2.2 checkpoint (model_index.json sets boundary_ratio or expand_timesteps). "
            "Use unirl.models.wan22.bundle.Wan22Bundle and unirl.models.wan22.pipeline.Wan22Pipeline"
        )
    return wan_facts("wan21", configs, batch_multiple, Guidance())


def wan_facts(
    family: str,
    configs: ModelConfigs,
    batch_multiple: int,
    guidance: GuidanceLike,
    condition_images: tuple[int, int] | None = None,
) -> LatentFacts:
    """Facts that Wan 2.1 and 2.2 share.

    Args:
        condition_images: absent = one where the transformer has channels for a first frame, else none.
    """
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    frame_scale = vae.get("scale_factor_temporal", 4)
    is_shown = shown_a_frame(transformer["in_channels"], vae["z_dim"], frame_scale)
    if transformer.get("pos_embed_seq_len") is not None:
        raise NotFoundError(
            f"this {family} checkpoint reads a first and a last frame (pos_embed_seq_len is set), which is not "
            "supported. Use one of text to video or image to video"
        )
    added = ADDED_LORA_TARGETS if transformer.get("added_kv_proj_dim") else ()
    return LatentFacts(
        family=family,
        block_class_names=("WanTransformerBlock",),
        lora_targets=LORA_TARGETS + added,
        latent_channels=vae["z_dim"],
        vae_scale=vae.get("scale_factor_spatial", 8),
        patch_size=transformer["patch_size"][-1],
        frame_scale=frame_scale,
        fps=16.0,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=guidance,
        batch_multiple=batch_multiple,
        text_width=transformer["text_dim"],
        condition_images=condition_images or ((1, 1) if is_shown else (0, 0)),
    )


def shown_a_frame(in_channels: int, latent_channels: int, frame_scale: int) -> bool:
    """Whether a transformer reads a mask and the latents of a first frame beside the video's latents.

    Raises DataError (4001) where its number of channels means neither.
    """
    plain, shown = latent_channels, 2 * latent_channels + frame_scale
    if in_channels not in (plain, shown):
        raise NotFoundError(
            f"a Wan transformer with in_channels={in_channels} beside a VAE of {latent_channels} channels: text to "
            f"video has {plain}, image to video {shown}. Use a checkpoint of one of these"
        )
    return in_channels == shown


WAN21 = DiffusersFamily(
    name="wan21",
    pipeline=PIPELINE,
    further_pipelines=FURTHER_PIPELINES,
    classes=CLASSES,
    tokenizers=("tokenizer", "image_processor"),
    optional=("image_encoder",),
    facts=facts,
    toys={"toy": TOY, "toy-i2v": TOY_I2V},
    toy_tokenizers=toy_tokenizers,
    published=PUBLISHED,
)
