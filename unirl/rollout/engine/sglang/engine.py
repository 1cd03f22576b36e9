"""Samples images with SGLang: latents of the stochastic steps, their log-probs, and new weights without files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from unirl.rollout.engine.serving.latent_server import LatentServer
from unirl.rollout.engine.serving.latents import LatentServingEngine
from unirl.rollout.engine.serving.settings import TOY
from unirl.rollout.engine.sglang.server import SGLangDiffusionServer, SGLangDiffusionSettings
from unirl.types.protocols import Capabilities


@dataclass(kw_only=True, eq=False, repr=False)
class SGLangRolloutEngine(LatentServingEngine, SGLangDiffusionSettings):
    """Samples with a diffusion server of SGLang."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        old_logp="native", snapshots=True, dedicated=True, remote=True, adapters=True, modalities=("image",)
    )
    toy: ClassVar[Mapping[str, object]] = {**TOY, "model_id": None, "tp_size": 1}
    server_class: ClassVar[type[LatentServer]] = SGLangDiffusionServer
    files: ClassVar[str] = "sglang-diffusion"
