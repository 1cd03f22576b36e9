"""Samples with SGLang: token ids in, token ids with exact log-probs out, and new weights without files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

from unirl.rollout.engine.base import EngineUse
from unirl.rollout.engine.serving.checkpoint_server import TOY_CHECKPOINT
from unirl.rollout.engine.serving.http_server import HttpServer
from unirl.rollout.engine.serving.in_flight import InFlight
from unirl.rollout.engine.serving.tokens import TokenServingEngine
from unirl.rollout.engine.sglang_llm.server import SGLangServer, SGLangSettings, check_pause
from unirl.types.protocols import Capabilities


@dataclass(kw_only=True, eq=False, repr=False)
class SGLangLLMRolloutEngine(TokenServingEngine, SGLangSettings):
    """Samples with a SGLang server."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        old_logp="native", snapshots=True, dedicated=True, remote=True, adapters=True, modalities=("text",)
    )
    toy: ClassVar[Mapping[str, object]] = {**TOY_CHECKPOINT, "mem_fraction_static": None}
    server_class: ClassVar[type[HttpServer]] = SGLangServer
    files: ClassVar[str] = "sglang"

    @classmethod
    def check_use(cls, settings: Mapping[str, object], use: EngineUse) -> None:
        super().check_use(settings, use)
        check_pause(cast(InFlight, settings["in_flight"]), use.adapter_alpha is not None)
