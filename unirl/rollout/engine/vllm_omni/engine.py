"""Samples images and videos with vLLM-Omni: latents of the stochastic steps, their log-probs, and new weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from unirl.rollout.engine.serving.latent_server import LatentServer
from unirl.rollout.engine.serving.latents import LatentServingEngine
from unirl.rollout.engine.serving.settings import TOY
from unirl.rollout.engine.vllm_omni.server import VLLMOmniServer, VLLMOmniSettings
from unirl.types.protocols import Capabilities


@dataclass(kw_only=True, eq=False, repr=False)
class VLLMOmniRolloutEngine(LatentServingEngine, VLLMOmniSettings):
    """Samples with a server of vLLM-Omni."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        old_logp="native", snapshots=True, dedicated=True, remote=True, adapters=True, modalities=("image", "video")
    )
    toy: ClassVar[Mapping[str, object]] = TOY
    server_class: ClassVar[type[LatentServer]] = VLLMOmniServer
    files: ClassVar[str] = "vllm-omni"
