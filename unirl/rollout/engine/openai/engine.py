"""Samples with an OpenAI-compatible server of token ids and their log-probs: vLLM, SGLang, llama.cpp.

The engine starts vLLM, and sends new weights to it as files. A server of another kind is joined at its address, and
keeps its weights: it can sample from the weights of the start, and be evaluated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from unirl.config.errors import IncompatibleError
from unirl.distributed.group.rank import current
from unirl.models.language.pipeline import TextPipeline
from unirl.rollout.engine.environments import ENVIRONMENTS
from unirl.rollout.engine.openai.densities import LogProbKind, check_density
from unirl.rollout.engine.openai.server import Control, OpenAIServer, OpenAISettings, Program
from unirl.rollout.engine.serving.http_server import ServerAccess
from unirl.rollout.engine.serving.tokens import TokenServingEngine
from unirl.types.protocols import Capabilities
from unirl.types.sampling import ARSamplingParams, Sampling, sampling_as


class OpenAIRolloutEngine(TokenServingEngine):
    """Samples with an OpenAI-compatible server."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        old_logp="native", snapshots=True, dedicated=True, remote=True, modalities=("text",)
    )
    toy: ClassVar[Mapping[str, object]] = {
        "program": "fake",
        "url": None,
        "control": "vllm",
        "model": None,
        "python_executable": None,
        "tp_size": 1,
        "gpu_memory_utilization": None,
        "context_length": None,
        "engine_args": {},
        "concurrency": 8,
    }

    def __init__(
        self,
        pipeline: TextPipeline[Any],
        run_dir: Path | None = None,
        *,
        program: Program = "vllm",
        url: str | None = None,
        control: Control = "vllm",
        model: str | None = None,
        logprobs: LogProbKind = "processed",
        python_executable: str | None = None,
        tp_size: int = 1,
        gpu_memory_utilization: float | None = None,
        context_length: int | None = None,
        deterministic: bool = True,
        engine_args: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        concurrency: int = 128,
        start_timeout_s: float = 900.0,
        timeout_s: float = 1800.0,
        max_restarts: int = 3,
    ) -> None:
        """
        Args:
            run_dir: gets the log of the server, and the weights that it loads. None: a temporary folder.
            program: the server that is started: `vllm`, or `fake`, a small server of UniRL that speaks the same
                protocol, runs on a CPU without vllm, and is used at scale=toy.
            url: the address of a server that runs, such as http://127.0.0.1:8000. Absent: the engine starts vLLM, and
                stops it at the end.
            control: the endpoints of the server besides the OpenAI interface. vllm: those for weights and sleep that
                vLLM has with VLLM_SERVER_DEV_MODE=1; its server must see the folder of the run. none: the server has
                none, so it keeps its weights, which must be those of the trainer at the start.
            model: the name of the model in requests. Absent: that of the only model of the server.
            logprobs: the distribution whose log-probs the server reports. raw: temperature 1, all tokens (llama.cpp,
                and the default of vLLM). tempered: the temperature of sampling, all tokens (SGLang). processed: the
                temperature of sampling, the tokens that top_k and top_p leave (vLLM as the engine starts it).
            python_executable: the Python of the environment with vLLM. Absent: that of `unirl engines install vllm`,
                or, if it has the package, the one that runs UniRL.
            tp_size: tensor-parallel ranks of a server that the engine starts.
            gpu_memory_utilization: share of the device memory for weights and the key-value cache. Absent: vLLM
                chooses.
            context_length: the most tokens of a prompt and its response. Absent: those of the model.
            deterministic: require that a seed determines a response. False allows a server that ignores seeds, and
                such a run is not reproducible.
            engine_args: further arguments of `vllm serve`, such as {enforce_eager: true}.
            env: further environment variables of the server.
            concurrency: number of requests that the server gets at the same time.
            start_timeout_s: seconds that the server has to start.
            timeout_s: seconds that it has for one response.
            max_restarts: how often a server that ended is started again. The weights are then sent again.
        """
        starts = url is None and program != "fake"
        python = ENVIRONMENTS["vllm"].python_for(python_executable) if starts else None
        root = Path(tempfile.mkdtemp(prefix="unirl-")) if run_dir is None else run_dir
        access = ServerAccess(
            url=url,
            python_executable=python,
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
            max_restarts=max_restarts,
            log=root / "logs" / f"openai-{current().rank}.log",
        )
        settings = OpenAISettings(
            program=program,
            control=control,
            model=model,
            logprobs=logprobs,
            tp_size=tp_size,
            gpu_memory_utilization=gpu_memory_utilization,
            context_length=context_length,
            deterministic=deterministic,
            engine_args=engine_args or {},
            env=env or {},
            concurrency=concurrency,
        )
        super().__init__(pipeline, OpenAIServer(pipeline, root / "engine" / f"rank-{current().rank}", access, settings))

    @classmethod
    def check_settings(cls, sampling: Sampling, settings: Mapping[str, object]) -> None:
        super().check_settings(sampling, settings)
        params = sampling_as(ARSamplingParams, sampling, "an OpenAI-compatible server samples with")
        if params.min_new_tokens > 0:
            raise IncompatibleError(
                f"sampling.min_new_tokens={params.min_new_tokens}: the server would report log-probs without the end "
                "tokens, which are those of another policy than the trained one. Set sampling.min_new_tokens=0"
            )
        logprobs = settings["logprobs"]
        if settings["url"] is None:
            check_started(settings)
        check_density(params, logprobs)  # type: ignore[arg-type]

    @classmethod
    def check_start(cls, settings: Mapping[str, object]) -> None:
        ENVIRONMENTS["vllm"].check_start(settings)

    @classmethod
    def check_updates(cls, settings: Mapping[str, object], num_weights: int) -> None:
        if settings["control"] == "none" and num_weights > 1:
            raise IncompatibleError(
                f"rollout.control=none: the server keeps its weights, and this run samples from {num_weights} "
                "different ones, since every step trains them. Use a vLLM server (rollout.control=vllm) or "
                "rollout=sglang. Or sample from the weights of the start alone: num_rollouts=1, or "
                "weight_sync_interval=num_rollouts, and evaluation.eval_steps=0. `unirl eval` scores "
                "a server with the weights of a checkpoint"
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
