"""What a Wan 2.2 checkpoint is made of: two experts of 14B, or one model of 5B that may be shown a first frame.

boundary_ratio    experts `transformer` (levels from it up) and `transformer_2` (below); text or image to video
expand_timesteps  a level per token: 0 at the first frame where one is shown
"""

from __future__ import annotations

from dataclasses import replace

from unirl.config.errors import NotFoundError
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs
from unirl.models.wan21.family import CLASSES, FURTHER_PIPELINES, PIPELINE, wan_facts
from unirl.models.wan21.toy import toy_tokenizers
from unirl.models.wan22.published import PUBLISHED
from unirl.models.wan22.toy import TOY, TOY_I2V, TOY_TI2V
from unirl.sde.guidance import ExpertGuidance, Guidance
from unirl.types.facts import LatentFacts

HIGH, LOW = "transformer", "transformer_2"
"""The experts of high and of low noise."""
FPS_5B = 24.0


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """What the rest of the system needs to know; a Wan 2.1 checkpoint is refused."""
    boundary = configs.settings.get("boundary_ratio")
    if (boundary is not None) != (LOW in configs):
        raise NotFoundError(
            f"this checkpoint has boundary_ratio={boundary} and {'a' if LOW in configs else 'no'} {LOW}: two "
            "experts need both. Use the whole checkpoint"
        )
    if boundary is not None:
        found = wan_facts("wan22", configs, batch_multiple, ExpertGuidance(boundary=boundary))
        return replace(found, expert_class_names=("WanTransformer3DModel",))
    if not configs.settings.get("expand_timesteps"):
        raise NotFoundError(
            "this is a Wan 2.1 checkpoint (model_index.json sets neither boundary_ratio nor expand_timesteps). "
            "Use unirl.models.wan21.bundle.Wan21Bundle and unirl.models.wan21.pipeline.Wan21Pipeline"
        )
    found = wan_facts("wan22", configs, batch_multiple, Guidance(), condition_images=(0, 1))
    return replace(found, fps=FPS_5B)


WAN22 = DiffusersFamily(
    name="wan22",
    pipeline=PIPELINE,
    further_pipelines=FURTHER_PIPELINES,
    classes={HIGH: CLASSES[HIGH], LOW: CLASSES[HIGH]} | {name: CLASSES[name] for name in ("text_encoder", "vae")},
    trained=(HIGH, LOW),
    optional=(LOW,),
    facts=facts,
    toys={"toy": TOY, "toy-i2v": TOY_I2V, "toy-ti2v": TOY_TI2V},
    toy_tokenizers=toy_tokenizers,
    published=PUBLISHED,
)
