"""Samples images with SGLang: latents of the stochastic steps, their log-probs, and new weights without files."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from unirl.config.errors import IncompatibleError
from unirl.distributed.group.rank import current
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.rollout.engine.environments import ENVIRONMENTS
from unirl.rollout.engine.serving.http_server import ServerAccess
from unirl.rollout.engine.serving.latents import LatentServingEngine, check_images, check_length, check_noise
from unirl.rollout.engine.sglang.server import (
    DiffusionServerSettings,
    LoraMergeMode,
    SGLangDiffusionServer,
    check_kernel,
    served_family,
)
from unirl.rollout.engine.sglang_llm.server import Program
from unirl.types.facts import ModelFacts
from unirl.types.protocols import Capabilities
from unirl.types.sampling import DiffusionSamplingParams, Sampling, sampling_as


class SGLangRolloutEngine(LatentServingEngine):
    """Samples with a diffusion server of SGLang."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        old_logp="native", snapshots=True, dedicated=True, remote=True, adapters=True, modalities=("image",)
    )
    toy: ClassVar[Mapping[str, object]] = {
        "program": "fake",
        "url": None,
        "python_executable": None,
        "model_id": None,
        "tp_size": 1,
        "engine_args": {},
    }

    def __init__(
        self,
        pipeline: DiffusersPipeline[Any],
        run_dir: Path | None = None,
        *,
        program: Program = "sglang",
        url: str | None = None,
        python_executable: str | None = None,
        model_id: str | None = None,
        tp_size: int = 1,
        lora_merge_mode: LoraMergeMode = "dynamic",
        verify_weights: bool = True,
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
            program: the server that is started: `sglang`, or `fake`, a small server of UniRL that speaks the same
                protocol, runs on a CPU without sglang, and is used at scale=toy.
            url: the address of a server that runs, such as http://127.0.0.1:30000. Absent: the engine starts one, and
                stops it at the end.
            python_executable: the Python of the environment with the server. Absent: that of `unirl engines install
                sglang`, or, if it has the package, the one that runs UniRL.
            model_id: the name of the model on the hub without the owner, such as stable-diffusion-3.5-medium, if
                bundle.path is a folder. Absent: the end of bundle.path.
            tp_size: tensor-parallel ranks of a server that the engine starts.
            lora_merge_mode: dynamic adds adapters in every forward, in their own dtype. The word merge adds them to the
                weights, which is faster and rounds small updates away in bfloat16; auto lets SGLang choose.
            verify_weights: compare a checksum of the server's weights after every rollout, since its answers do not
                name the weights. It reads all weights of the trained module.
            engine_args: further arguments of the server, such as {attention_backend: fa}.
            env: further environment variables of the server.
            concurrency: number of requests that the server gets at the same time. It computes one after the other.
            start_timeout_s: seconds that the server has to start.
            timeout_s: seconds that it has for one sample.
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
            log=root / "logs" / f"sglang-diffusion-{current().rank}.log",
        )
        settings = DiffusionServerSettings(
            program=program,
            model_id=model_id,
            tp_size=tp_size,
            lora_merge_mode=lora_merge_mode,
            verify_weights=verify_weights,
            engine_args=engine_args or {},
            env=env or {},
            concurrency=concurrency,
        )
        folder = root / "engine" / f"diffusion-{current().rank}"
        super().__init__(pipeline, SGLangDiffusionServer(pipeline, folder, access, settings))

    @classmethod
    def check_recipe(cls, facts: ModelFacts, sampling: Sampling, settings: Mapping[str, object]) -> None:
        """Raises IncompatibleError for a model or for settings that the server does not sample. Nothing is built."""
        family = served_family(facts.family)
        params = sampling_as(DiffusionSamplingParams, sampling, "SGLang's diffusion server samples with")
        check_images("SGLang", facts)
        check_noise("SGLang", params)
        if settings["program"] != "fake":
            check_length("SGLang", params, family.sequence_length)
        if family.fused and settings["tp_size"] != 1:
            raise IncompatibleError(
                f"rollout.tp_size={settings['tp_size']}: SGLang divides the fused layers of {facts.family} among its "
                "ranks in an order in which they cannot be verified. Set rollout.tp_size=1"
            )
        if params.sigmas is not None or params.tail_fraction is not None:
            key = "sigmas" if params.sigmas is not None else "tail_fraction"
            raise IncompatibleError(f"sampling.{key}: SGLang takes no noise levels, and makes its own. Remove it")
        if params.resolve_sde_indices(0):
            check_kernel(params.kernel)

    @classmethod
    def check_start(cls, settings: Mapping[str, object]) -> None:
        ENVIRONMENTS["sglang"].check_start(settings)
