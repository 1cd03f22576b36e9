"""What a FLUX.2-klein checkpoint is made of. Black Forest Labs 2026 (github.com/black-forest-labs/flux2)."""

from __future__ import annotations

from dataclasses import replace

from unirl.config.errors import NotFoundError
from unirl.models.flux2_klein.conditioning import MAX_CONDITION_IMAGES
from unirl.models.flux2_klein.published import PUBLISHED
from unirl.models.flux2_klein.text import STACKED
from unirl.models.flux2_klein.toy import DISTILLED, TOY, toy_tokenizers
from unirl.models.flux2_klein.vae import PATCH
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs
from unirl.sde.guidance import Guidance, NoGuidance
from unirl.sde.schedule import SigmaSchedule
from unirl.types.facts import LatentFacts

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
LORA_TARGETS = (
    *(f"attn.{name}" for name in ATTENTION),
    *(f"{part}.{name}" for part in ("ff", "ff_context") for name in ("linear_in", "linear_out")),
    "attn.to_qkv_mlp_proj",
)


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """What the rest of the system needs to know; a distilled checkpoint says so in model_index.json."""
    transformer, vae = configs.components["transformer"], configs.components["vae"]
    _check_layout(configs)
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


def _check_layout(configs: ModelConfigs) -> None:
    """Raises DataError (4001) where the parts do not belong together, or the scale is an input (FLUX.2-dev)."""
    transformer, vae, text = (configs.components[name] for name in ("transformer", "vae", "text_encoder"))
    problems = (
        ("in_channels", transformer["in_channels"], PATCH**2 * vae["latent_channels"]),
        ("joint_attention_dim", transformer["joint_attention_dim"], STACKED * text["hidden_size"]),
        ("guidance_embeds", transformer.get("guidance_embeds", True), False),
    )
    for name, found, known in problems:
        if found != known:
            raise NotFoundError(
                f"the checkpoint's transformer has {name}={found}, and a FLUX.2-klein model with this VAE and text "
                f"encoder has {known}. Use black-forest-labs/FLUX.2-klein-base-4B or -9B"
            )


FLUX2_KLEIN = DiffusersFamily(
    name="flux2_klein",
    pipeline="Flux2KleinPipeline",
    classes={
        "transformer": "diffusers.Flux2Transformer2DModel",
        "text_encoder": "transformers.Qwen3ForCausalLM",
        "vae": "diffusers.AutoencoderKLFlux2",
    },
    facts=facts,
    toys={"toy": TOY, "toy-distilled": DISTILLED},
    toy_tokenizers=toy_tokenizers,
    published=PUBLISHED,
)
