"""Samples with SGLang: token ids in, token ids with exact log-probs out, and new weights without files."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from unirl.distributed.group.rank import current
from unirl.models.language.pipeline import TextPipeline
from unirl.rollout.engine.environments import ENVIRONMENTS
from unirl.rollout.engine.serving.http_server import ServerAccess
from unirl.rollout.engine.serving.tokens import TokenServingEngine
from unirl.rollout.engine.sglang_llm.server import Program, SGLangServer, SGLangSettings, check_sampling
from unirl.types.protocols import Capabilities
from unirl.types.sampling import ARSamplingParams, Sampling, sampling_as


class SGLangLLMRolloutEngine(TokenServingEngine):
    """Samples with a SGLang server."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        old_logp="native", snapshots=True, dedicated=True, remote=True, adapters=True, modalities=("text",)
    )
    toy: ClassVar[Mapping[str, object]] = {
        "program": "fake",
        "url": None,
        "python_executable": None,
        "tp_size": 1,
        "mem_fraction_static": None,
        "context_length": None,
        "engine_args": {},
        "concurrency": 8,
    }

    def __init__(
        self,
        pipeline: TextPipeline[Any],
        run_dir: Path | None = None,
        *,
        program: Program = "sglang",
        url: str | None = None,
        python_executable: str | None = None,
        tp_size: int = 1,
        mem_fraction_static: float | None = None,
        context_length: int | None = None,
        deterministic: bool = True,
        enable_memory_saver: bool = True,
        engine_args: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        concurrency: int = 128,
        start_timeout_s: float = 900.0,
        timeout_s: float = 1800.0,
        max_restarts: int = 3,
    ) -> None:
        """
        Args:
            run_dir: gets the log of the server. None: a temporary folder.
            program: the server that is started: `sglang`, or `fake`, a small server of UniRL that speaks the same
                protocol, runs on a CPU without sglang, and is used at scale=toy.
            url: the address of a server that runs, such as http://127.0.0.1:30000. Absent: the engine starts one, and
                stops it at the end.
            python_executable: the Python of the environment with the server. Absent: that of `unirl engines install
                sglang`, or, if it has the package, the one that runs UniRL.
            tp_size: tensor-parallel ranks of a server that the engine starts.
            mem_fraction_static: share of the device memory for weights and the key-value cache. Absent: SGLang chooses.
            context_length: the most tokens of a prompt and its response. Absent: those of the model.
            deterministic: start the server with --enable-deterministic-inference, without which SGLang ignores seeds:
                false is faster, and such a run is not reproducible.
            enable_memory_saver: let the server free its device memory while the trainer uses it. A copy of the weights
                then is in main memory. It is needed where both share devices.
            engine_args: further arguments of sglang.launch_server, such as {attention_backend: fa3}.
            env: further environment variables of the server.
            concurrency: number of requests that the server gets at the same time.
            start_timeout_s: seconds that the server has to start.
            timeout_s: seconds that it has for one response.
            max_restarts: how often a server that ended is started again. The weights are then sent again.
        """
        starts = url is None and program != "fake"
        python = ENVIRONMENTS["sglang"].python_for(python_executable) if starts else None
        root = Path(tempfile.mkdtemp(prefix="unirl-")) if run_dir is None else run_dir
        access = ServerAccess(
            url=url,
            python_executable=python,
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
            max_restarts=max_restarts,
            log=root / "logs" / f"sglang-{current().rank}.log",
        )
        settings = SGLangSettings(
            program=program,
            tp_size=tp_size,
            mem_fraction_static=mem_fraction_static,
            context_length=context_length,
            deterministic=deterministic,
            enable_memory_saver=enable_memory_saver,
            engine_args=engine_args or {},
            env=env or {},
            concurrency=concurrency,
        )
        super().__init__(pipeline, SGLangServer(pipeline, root / "engine" / f"rank-{current().rank}", access, settings))

    @classmethod
    def check_settings(cls, sampling: Sampling, settings: Mapping[str, object]) -> None:
        super().check_settings(sampling, settings)
        check_sampling(sampling_as(ARSamplingParams, sampling, "SGLang samples with"))

    @classmethod
    def check_start(cls, settings: Mapping[str, object]) -> None:
        ENVIRONMENTS["sglang"].check_start(settings)
