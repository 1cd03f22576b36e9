"""Samples with an OpenAI-compatible server of token ids and their log-probs: vLLM, SGLang, llama.cpp.

The engine starts vLLM, and sends new weights to it as files. A server of another kind is joined at its address, and
keeps its weights: it can sample from the weights of the start, and be evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from unirl.config.errors import IncompatibleError
from unirl.rollout.engine.base import EngineUse
from unirl.rollout.engine.openai.densities import check_density
from unirl.rollout.engine.openai.server import OpenAIServer, OpenAISettings
from unirl.rollout.engine.serving.checkpoint_server import TOY_CHECKPOINT
from unirl.rollout.engine.serving.http_server import HttpServer
from unirl.rollout.engine.serving.tokens import TokenServingEngine
from unirl.types.protocols import Capabilities
from unirl.types.sampling import ARSamplingParams, Sampling, sampling_as


@dataclass(kw_only=True, eq=False, repr=False)
class OpenAIRolloutEngine(TokenServingEngine, OpenAISettings):
    """Samples with an OpenAI-compatible server."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        old_logp="native", snapshots=True, dedicated=True, remote=True, modalities=("text",)
    )
    toy: ClassVar[Mapping[str, object]] = {
        **TOY_CHECKPOINT,
        "control": "vllm",
        "model": None,
        "gpu_memory_utilization": None,
    }
    server_class: ClassVar[type[HttpServer]] = OpenAIServer
    files: ClassVar[str] = "openai"

    @classmethod
    def check_settings(cls, sampling: Sampling, settings: Mapping[str, object]) -> None:
        super().check_settings(sampling, settings)
        logprobs = settings["logprobs"]
        if settings["url"] is None:
            check_started(settings)
        params = sampling_as(ARSamplingParams, sampling, f"{cls.server_class.name} samples with")
        check_density(params, logprobs)  # type: ignore[arg-type]

    @classmethod
    def check_use(cls, settings: Mapping[str, object], use: EngineUse) -> None:
        super().check_use(settings, use)
        if settings["control"] == "none" and use.num_weights > 1:
            raise IncompatibleError(
                f"rollout.control=none: the server keeps its weights, and this run samples from {use.num_weights} "
                "different ones: those of its steps, and those that its last evaluation scores. Use a vLLM server "
                "(rollout.control=vllm) or rollout=sglang. Or sample from the weights of the start alone: both "
                "evaluation.eval_steps=0 and either num_rollouts=1 or weight_sync_interval=num_rollouts. `unirl eval` "
                "scores a server with the weights of a checkpoint"
            )


def check_started(settings: Mapping[str, object]) -> None:
    """Raises IncompatibleError for settings that a server that the engine starts cannot have."""
    if settings["control"] != "vllm":
        raise IncompatibleError(
            f"rollout.control={settings['control']} is for a server that runs already: set rollout.url to its address, "
            "or leave rollout.control out"
        )
    if settings["model"] is not None:
        raise IncompatibleError(
            f"rollout.model={settings['model']} is for a server that runs already, and rollout.url is absent: the "
            "engine starts one with the model of bundle.path. Leave rollout.model out"
        )
    if settings["logprobs"] == "tempered":
        raise IncompatibleError(
            "rollout.logprobs=tempered: vLLM, which the engine starts, reports raw or processed log-probs. Leave it "
            "out, or use rollout=sglang"
        )
