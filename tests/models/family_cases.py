"""The toys of diffusers families under test, with their settings.

A new family adds a case at the end. tests/models/test_families.py runs every test with every case. Text embeddings,
published sizes and errors of a family are tested in a file of its own.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.models.loading.checkpoint import ModelConfigs

Size = tuple[int, int, int]
"""Height, width, frames."""


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """One toy of one family."""

    name: str
    pipeline_class: str
    """Import path of the class, relative to unirl.models."""
    bundle_class: str
    path: str = "toy"
    sizes: tuple[Size, Size] = ((32, 32, 1), (32, 48, 1))
    scales: tuple[float, ...] = (1.0, 4.5)
    """Guidance scales: off and on, or two values of an embedded scale."""
    max_sequence_length: int = 16
    without_gradient: tuple[str, ...] = ()
    """Name prefixes of parameters that do not affect the output. A comment at the case gives the reason."""

    def build(self) -> DiffusersPipeline[Any]:
        """A fresh pipeline."""
        bundle_class, pipeline_class = self.classes()
        pipeline: DiffusersPipeline[Any] = pipeline_class(bundle_class(path=self.path, dtype="fp32"))
        return pipeline

    def classes(self) -> tuple[Any, Any]:
        """The bundle class and the pipeline class."""
        return _named(self.bundle_class), _named(self.pipeline_class)


@cache
def built(case: FamilyCase) -> DiffusersPipeline[Any]:
    """The pipeline of a case, shared by all tests that do not change it."""
    return case.build()


def changed(configs: ModelConfigs, component: str, **values: object) -> ModelConfigs:
    """`configs` with other values in the configuration of one component."""
    components = {**configs.components, component: {**configs.components[component], **values}}
    return replace(configs, components=components)


def _named(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(f"unirl.models.{module}"), name)


QWEN_IMAGE_UNUSED = tuple(
    f"transformer_blocks.1.{name}" for name in ("txt_mlp", "attn.to_add_out", "attn.add_q_proj", "attn.norm_added_q")
)
"""The text branch of the last block, whose output is not used. The first two do not even get a gradient of zero."""

CASES = (
    FamilyCase(
        name="sd3",
        pipeline_class="sd3.family.SD3Pipeline",
        bundle_class="sd3.family.SD3Bundle",
        # The last block does not use the queries of its text tokens.
        without_gradient=("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.norm_added_q"),
    ),
    FamilyCase(
        name="qwen_image",
        pipeline_class="qwen_image.family.QwenImagePipeline",
        bundle_class="qwen_image.family.QwenImageBundle",
        without_gradient=QWEN_IMAGE_UNUSED,
    ),
    FamilyCase(
        name="qwen_image_edit",
        pipeline_class="qwen_image_edit.family.QwenImageEditPipeline",
        bundle_class="qwen_image_edit.family.QwenImageEditBundle",
        max_sequence_length=40,
        without_gradient=QWEN_IMAGE_UNUSED,
    ),
    FamilyCase(
        name="hunyuan_video",
        pipeline_class="hunyuan_video.family.HunyuanVideoPipeline",
        bundle_class="hunyuan_video.family.HunyuanVideoBundle",
        sizes=((32, 32, 5), (32, 48, 9)),
        scales=(1.0, 6.0),
    ),
    FamilyCase(
        name="wan21",
        pipeline_class="wan21.family.Wan21Pipeline",
        bundle_class="wan21.family.Wan21Bundle",
        sizes=((32, 32, 5), (32, 48, 9)),
    ),
    FamilyCase(
        name="wan21-i2v",
        pipeline_class="wan21.family.Wan21Pipeline",
        bundle_class="wan21.family.Wan21Bundle",
        path="toy-i2v",
        sizes=((32, 32, 5), (32, 48, 9)),
    ),
    FamilyCase(
        name="flux1",
        pipeline_class="flux1.family.Flux1Pipeline",
        bundle_class="flux1.family.Flux1Bundle",
        scales=(1.0, 3.5),
    ),
    FamilyCase(
        name="flux2_klein",
        pipeline_class="flux2_klein.family.Flux2KleinPipeline",
        bundle_class="flux2_klein.family.Flux2KleinBundle",
        max_sequence_length=48,
    ),
    FamilyCase(
        name="wan22",
        pipeline_class="wan22.family.Wan22Pipeline",
        bundle_class="wan22.family.Wan22Bundle",
        sizes=((32, 32, 5), (32, 48, 9)),
    ),
    FamilyCase(
        name="wan22-i2v",
        pipeline_class="wan22.family.Wan22Pipeline",
        bundle_class="wan22.family.Wan22Bundle",
        path="toy-i2v",
        sizes=((32, 32, 5), (32, 48, 9)),
    ),
    FamilyCase(
        name="wan22-ti2v",
        pipeline_class="wan22.family.Wan22Pipeline",
        bundle_class="wan22.family.Wan22Bundle",
        path="toy-ti2v",
        sizes=((32, 64, 5), (64, 32, 9)),
    ),
    FamilyCase(
        name="hunyuan_video15",
        pipeline_class="hunyuan_video15.family.HunyuanVideo15Pipeline",
        bundle_class="hunyuan_video15.family.HunyuanVideo15Bundle",
        sizes=((32, 32, 5), (32, 48, 9)),
        without_gradient=(
            # Text to video has no condition image, and these prompts quote no text.
            "image_embedder",
            "context_embedder_2",
            # The output of the text branch of the last block is not used.
            "transformer_blocks.1.attn.to_add_out",
            "transformer_blocks.1.attn.add_q_proj",
            "transformer_blocks.1.attn.norm_added_q",
            "transformer_blocks.1.ff_context",
        ),
    ),
    FamilyCase(
        name="lumina2",
        pipeline_class="lumina2.family.Lumina2Pipeline",
        bundle_class="lumina2.family.Lumina2Bundle",
        scales=(1.0, 4.0),
    ),
    FamilyCase(
        name="z_image",
        pipeline_class="z_image.family.ZImagePipeline",
        bundle_class="z_image.family.ZImageBundle",
        max_sequence_length=48,
    ),
)
