"""Samples images and videos with vLLM-Omni: latents of the stochastic steps, their log-probs, and new weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from unirl.distributed.group.rank import current
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.rollout.engine.environments import ENVIRONMENTS
from unirl.rollout.engine.serving.http_server import ServerAccess
from unirl.rollout.engine.serving.latents import LatentServingEngine, check_images, check_length, check_noise
from unirl.rollout.engine.vllm_omni.server import (
    OmniServerSettings,
    Program,
    VLLMOmniServer,
    check_kernel,
    served_family,
)
from unirl.rollout.engine.vllm_omni.transports import ServerTransport
from unirl.types.facts import ModelFacts
from unirl.types.protocols import Capabilities
from unirl.types.sampling import DiffusionSamplingParams, Sampling, sampling_as


class VLLMOmniRolloutEngine(LatentServingEngine):
    """Samples with a server of vLLM-Omni."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        old_logp="native", snapshots=True, dedicated=True, remote=True, adapters=True, modalities=("image", "video")
    )
    toy: ClassVar[Mapping[str, object]] = {
        "program": "fake",
        "url": None,
        "python_executable": None,
        "engine_args": {},
    }

    def __init__(
        self,
        pipeline: DiffusersPipeline[Any],
        run_dir: Path | None = None,
        *,
        program: Program = "vllm_omni",
        url: str | None = None,
        python_executable: str | None = None,
        transport: ServerTransport = "http",
        max_num_seqs: int = 1,
        enable_sleep_mode: bool = True,
        engine_args: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        concurrency: int = 4,
        start_timeout_s: float = 900.0,
        timeout_s: float = 1800.0,
        max_restarts: int = 3,
    ) -> None:
        """
        Args:
            run_dir: gets the log of the server. None: a temporary folder.
            program: the server that is started: `vllm_omni`, or `fake`, a small server of UniRL that speaks the same
                protocol, runs on a CPU without vllm-omni, and is used at scale=toy.
            url: the address of a server that runs, such as http://127.0.0.1:30000. Absent: the engine starts one, and
                stops it at the end.
            python_executable: the Python of the environment with the server. Absent: that of `unirl engines install
                vllm_omni`, or, if it has the package, the one that runs UniRL.
            transport: the way of weights from the engine to its server. http: in requests, through main memory. ipc: a
                buffer on the device that both share, by CUDA IPC.
            max_num_seqs: samples that share a forward. With more than 1 the bits of a sample depend on the others.
            enable_sleep_mode: let the server free its device memory while the trainer uses it. It is needed where both
                share devices, and works on a GPU only.
            engine_args: further fields of OmniDiffusionConfig of vLLM-Omni, such as {enforce_eager: true}.
            env: further environment variables of the server.
            concurrency: number of requests that the server gets at the same time.
            start_timeout_s: seconds that the server has to start.
            timeout_s: seconds that it has for one sample.
            max_restarts: how often a server that ended is started again. The weights are then sent again.
        """
        starts = url is None and program != "fake"
        python = ENVIRONMENTS["vllm_omni"].python_for(python_executable) if starts else None
        root = Path(tempfile.mkdtemp(prefix="unirl-")) if run_dir is None else run_dir
        access = ServerAccess(
            url=url,
            python_executable=python,
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
            max_restarts=max_restarts,
            log=root / "logs" / f"vllm-omni-{current().rank}.log",
        )
        settings = OmniServerSettings(
            program=program,
            transport=transport,
            max_num_seqs=max_num_seqs,
            enable_sleep_mode=enable_sleep_mode,
            engine_args=engine_args or {},
            env=env or {},
            concurrency=concurrency,
        )
        folder = root / "engine" / f"omni-{current().rank}"
        super().__init__(pipeline, VLLMOmniServer(pipeline, folder, access, settings))

    @classmethod
    def check_recipe(cls, facts: ModelFacts, sampling: Sampling, settings: Mapping[str, object]) -> None:
        """Raises IncompatibleError for a model or for settings that the server does not sample. Nothing is built."""
        family = served_family(facts.family)
        params = sampling_as(DiffusionSamplingParams, sampling, "vLLM-Omni samples with")
        check_images("vLLM-Omni", facts)
        check_noise("vLLM-Omni", params)
        if settings["program"] != "fake":
            check_length("vLLM-Omni", params, family.sequence_length)
        if params.resolve_sde_indices(0):
            check_kernel(params.kernel)

    @classmethod
    def check_start(cls, settings: Mapping[str, object]) -> None:
        ENVIRONMENTS["vllm_omni"].check_start(settings)
