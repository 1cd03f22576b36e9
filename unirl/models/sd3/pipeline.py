"""Text to image with Stable Diffusion 3: nothing but the general pipeline over an SD3 bundle."""

from __future__ import annotations

from unirl.models.pipeline import DiffusionPipeline
from unirl.models.sd3.bundle import SD3Bundle


class SD3Pipeline(DiffusionPipeline):
    """The seat of what would differ; SD3's guidance, schedule and conditioning are the general ones."""

    bundle: SD3Bundle
