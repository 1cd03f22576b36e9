"""What a HunyuanVideo 1.5 checkpoint is made of. Tencent 2025 (arXiv:2511.18870)."""

from __future__ import annotations

from unirl.config.errors import NotFoundError
from unirl.models.hunyuan_video.family import FPS, LORA_TARGETS
from unirl.models.hunyuan_video15.published import PUBLISHED
from unirl.models.hunyuan_video15.toy import DISTILLED, TOY, toy_tokenizers
from unirl.models.loading.checkpoint import Config, DiffusersFamily, ModelConfigs
from unirl.sde.guidance import Guidance, NoGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.facts import LatentFacts


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """What the rest of the system needs to know. Raises DataError (4001) for a model that reads more than text."""
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
    """The guider of a checkpoint that was distilled is off."""
    guider = configs.guiders["guider"]
    return guider.get("guidance_scale") == 1.0 or not guider.get("enabled", True)


def _check_text_to_video(transformer: Config) -> None:
    task, wanted = transformer.get("task_type", "i2v"), 2 * transformer["out_channels"] + 1
    if task != "t2v" or transformer["in_channels"] != wanted or transformer.get("use_meanflow"):
        raise NotFoundError(
            f"a HunyuanVideo 1.5 transformer with task_type={task!r}, in_channels={transformer['in_channels']} and "
            f"use_meanflow={bool(transformer.get('use_meanflow'))} is none of text to video (t2v, {wanted}, False), "
            "which this family draws. Take such a checkpoint, for instance "
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
        )


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
    toys={"toy": TOY, "toy-distilled": DISTILLED},
    toy_tokenizers=toy_tokenizers,
    published=PUBLISHED,
)
