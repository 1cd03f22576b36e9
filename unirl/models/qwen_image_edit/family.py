"""What a Qwen-Image-Edit checkpoint is made of: the networks of Qwen-Image, and a processor of images."""

from __future__ import annotations

from dataclasses import replace

from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs
from unirl.models.qwen_image.family import CLASSES, EDIT, EDIT_PLUS, PIPELINE, SEED
from unirl.models.qwen_image.family import facts as facts_of_drawing
from unirl.models.qwen_image_edit.published import PUBLISHED
from unirl.models.qwen_image_edit.toy import TOY, TOY_PLUS, toy_tokenizers
from unirl.types.facts import LatentFacts

PROCESSOR = "processor"
MAX_CONDITION_IMAGES = {"": 1, EDIT_PLUS: 3}
"""To be edited or combined, by the pipeline that a checkpoint names; at least one."""


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """What the rest of the system needs to know: Qwen-Image's facts, and the images."""
    return replace(
        facts_of_drawing(configs, batch_multiple),
        family="qwen_image_edit",
        condition_images=(1, MAX_CONDITION_IMAGES[configs.pipeline]),
        reference_tokens=True,
    )


QWEN_IMAGE_EDIT = DiffusersFamily(
    name="qwen_image_edit",
    pipeline=EDIT,
    further_pipelines=(EDIT_PLUS,),
    foreign_pipelines={
        PIPELINE: "unirl.models.qwen_image.bundle.QwenImageBundle and "
        "unirl.models.qwen_image.pipeline.QwenImagePipeline"
    },
    classes=CLASSES,
    tokenizers=("tokenizer", PROCESSOR),
    facts=facts,
    toys={"toy": TOY, "toy-plus": TOY_PLUS},
    toy_tokenizers=toy_tokenizers,
    published=PUBLISHED,
    seed=SEED,
)
