"""What a HunyuanVideo checkpoint is made of. Kong et al. 2024 (arXiv:2412.03603)."""

from __future__ import annotations

from unirl.config.errors import NotFoundError
from unirl.models.hunyuan_video.published import PUBLISHED
from unirl.models.hunyuan_video.toy import TOY, UNDISTILLED, toy_tokenizers
from unirl.models.loading.checkpoint import Config, DiffusersFamily, ModelConfigs
from unirl.sde.guidance import EmbeddedGuidance, Guidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.facts import LatentFacts

FPS = 24.0
LORA_TARGETS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"{part}.net.{layer}" for part in ("ff", "ff_context") for layer in ("0.proj", "2")),
)


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """What the rest of the system needs to know. Raises DataError (4001) for a model of image to video."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    _check_text_to_video(transformer)
    return LatentFacts(
        family="hunyuan_video",
        block_class_names=("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
        lora_targets=LORA_TARGETS,
        latent_channels=transformer["in_channels"],
        vae_scale=vae.get("spatial_compression_ratio", 8),
        patch_size=transformer["patch_size"],
        frame_scale=vae.get("temporal_compression_ratio", 4),
        fps=FPS,
        schedule=SigmaSchedule.from_diffusers(configs.scheduler),
        guidance=EmbeddedGuidance() if transformer["guidance_embeds"] else Guidance(),
        batch_multiple=batch_multiple,
        text_width=transformer["pooled_projection_dim"],
    )


def _check_text_to_video(transformer: Config) -> None:
    kind, channels = transformer.get("image_condition_type"), (transformer["in_channels"], transformer["out_channels"])
    if kind is not None or channels[0] != channels[1]:
        raise NotFoundError(
            f"a HunyuanVideo transformer with image_condition_type={kind!r}, in_channels={channels[0]} and "
            f"out_channels={channels[1]} is one of image to video, and this family draws from text alone. "
            "Take a checkpoint of text to video, such as hunyuanvideo-community/HunyuanVideo"
        )


HUNYUAN_VIDEO = DiffusersFamily(
    name="hunyuan_video",
    pipeline="HunyuanVideoPipeline",
    classes={
        "transformer": "diffusers.HunyuanVideoTransformer3DModel",
        "text_encoder": "transformers.LlamaModel",
        "text_encoder_2": "transformers.CLIPTextModel",
        "vae": "diffusers.AutoencoderKLHunyuanVideo",
    },
    tokenizers=("tokenizer", "tokenizer_2"),
    facts=facts,
    toys={"toy": TOY, "toy-undistilled": UNDISTILLED},
    toy_tokenizers=toy_tokenizers,
    published=PUBLISHED,
)
