"""Configurations of the public Qwen-Image-Edit checkpoints, so that a run can be planned without a connection."""

from __future__ import annotations

from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.qwen_image.family import EDIT_PLUS
from unirl.models.qwen_image.published import published_checkpoint

PUBLISHED: dict[str, ModelConfigs] = {
    "Qwen/Qwen-Image-Edit": published_checkpoint(),
    "Qwen/Qwen-Image-Edit-2509": published_checkpoint(EDIT_PLUS),
    "Qwen/Qwen-Image-Edit-2511": published_checkpoint(EDIT_PLUS, zero_cond_t=True),
}
