"""Samples with SGLang: token ids in, token ids with exact log-probs out, and new weights without files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

from unirl.rollout.engine.base import EngineUse
from unirl.rollout.engine.serving.http_server import HttpServer
from unirl.rollout.engine.serving.in_flight import InFlight
from unirl.rollout.engine.serving.settings import TOY
from unirl.rollout.engine.serving.tokens import TokenServingEngine
from unirl.rollout.engine.sglang_llm.server import SGLangServer, SGLangSettings, check_pause, check_sampling
from unirl.types.protocols import Capabilities
from unirl.types.sampling import ARSamplingParams, Sampling, sampling_as


@dataclass(kw_only=True, eq=False, repr=False)
class SGLangLLMRolloutEngine(TokenServingEngine, SGLangSettings):
    """Samples with a SGLang server."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        old_logp="native", snapshots=True, dedicated=True, remote=True, adapters=True, modalities=("text",)
    )
    toy: ClassVar[Mapping[str, object]] = {
        **TOY,
        "tp_size": 1,
        "mem_fraction_static": None,
        "context_length": None,
        "concurrency": 8,
    }
    server_class: ClassVar[type[HttpServer]] = SGLangServer
    files: ClassVar[str] = "sglang"

    @classmethod
    def check_use(cls, settings: Mapping[str, object], use: EngineUse) -> None:
        super().check_use(settings, use)
        check_pause(cast(InFlight, settings["in_flight"]), use.adapter_alpha is not None)

    @classmethod
    def check_settings(cls, sampling: Sampling, settings: Mapping[str, object]) -> None:
        super().check_settings(sampling, settings)
        check_sampling(sampling_as(ARSamplingParams, sampling, "SGLang samples with"))
