"""Samples images with SGLang: latents of the stochastic steps, their log-probs, and new weights without files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from unirl.config.errors import IncompatibleError
from unirl.rollout.engine.base import EngineUse
from unirl.rollout.engine.serving.latent_server import LatentServer
from unirl.rollout.engine.serving.latents import LatentServingEngine
from unirl.rollout.engine.serving.settings import TOY
from unirl.rollout.engine.sglang.families import FAMILIES
from unirl.rollout.engine.sglang.server import SGLangDiffusionServer, SGLangDiffusionSettings
from unirl.types.facts import ModelFacts
from unirl.types.protocols import Capabilities
from unirl.types.sampling import Sampling


@dataclass(kw_only=True, eq=False, repr=False)
class SGLangRolloutEngine(LatentServingEngine, SGLangDiffusionSettings):
    """Samples with a diffusion server of SGLang."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        old_logp="native", snapshots=True, dedicated=True, remote=True, adapters=True, modalities=("image",)
    )
    toy: ClassVar[Mapping[str, object]] = {**TOY, "model_id": None, "tp_size": 1}
    server_class: ClassVar[type[LatentServer]] = SGLangDiffusionServer
    files: ClassVar[str] = "sglang-diffusion"

    @classmethod
    def check_recipe(cls, facts: ModelFacts, sampling: Sampling, settings: Mapping[str, object]) -> None:
        super().check_recipe(facts, sampling, settings)
        if FAMILIES[facts.family].fused and settings["tp_size"] != 1:
            raise IncompatibleError(
                f"rollout.tp_size={settings['tp_size']}: SGLang divides the fused layers of {facts.family} among its "
                "ranks in an order in which they cannot be verified. Set rollout.tp_size=1"
            )

    @classmethod
    def check_use(cls, settings: Mapping[str, object], use: EngineUse) -> None:
        super().check_use(settings, use)
        name, alpha, path = cls.server_class.name, use.adapter_alpha, use.model_path
        if alpha is not None and alpha != int(alpha):
            raise IncompatibleError(
                f"backend.lora_cfg.alpha={alpha:g}: {name} takes integers only. Use an integer, or "
                "sync.merge_adapters=true"
            )
        starts = settings["url"] is None
        if starts and settings["model_id"] is None and path is not None and Path(path).is_dir():
            raise IncompatibleError(
                f"bundle.path={path} is a folder, and {name} recognises a model by its name. Set rollout.model_id to "
                f"its name on the hub without the owner, such as {FAMILIES['sd3'].model_id}"
            )
