"""Samples latents with a server: encodes prompts, sends one request per sample, checks every answer, and decodes.

prompts --LatentServer.sample--> trajectories --checks--> segment --VAE of the pipeline--> pixels
prompts --encoders of the pipeline--> conditions

The server draws its own noise. A seed determines it, so the engine draws it again, and knows x_T and the log-probs of
every sample without the network: x_T must be that of the seed, and the log-prob of a stochastic step is that of its
noise under the standard deviation of the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.config.errors import EngineError, IncompatibleError, SamplingMismatchError
from unirl.distributed.weight_sync.base import CanaryResult
from unirl.models.base import CANARY_IDS, CANARY_PROMPTS, CanaryOutput, LatentCanaryInputs, response_of
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.models.denoising.pipeline import CANARY_SEQUENCE_LENGTH, CANARY_SIDE_TOKENS
from unirl.rollout.engine.serving.engine import ServingEngine, seeds_of
from unirl.rollout.engine.serving.latent_server import (
    LatentAnswer,
    LatentRequest,
    LatentServer,
    check_images,
    check_length,
    check_noise,
    served_family,
)
from unirl.rollout.engine.serving.settings import FAKE
from unirl.rollout.engine.serving.sigma_verify import verify_used
from unirl.sde.gaussian import Gaussian
from unirl.sde.kernels import EulerODE
from unirl.types.batch import Batch
from unirl.types.device import to_device
from unirl.types.facts import LatentFacts, ModelFacts
from unirl.types.protocols import TORCH_DTYPES
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import DiffusionSamplingParams, Sampling, sampling_as
from unirl.types.segments import LatentSegment, stored_positions

ROUNDING = 2**-7
"""Largest relative difference between x_T and its copy in the trajectory, which may be rounded to bfloat16."""
LOGP_TOLERANCE = 1e-3
"""Largest difference between a reported log-prob and that of the noise, nats per latent element."""
CANARY_STEPS = 2
GUIDANCE_TOLERANCE = 0.1
"""Largest relative difference between the guided velocity and that from both branches. Other scales differ by more."""


class LatentServingEngine(ServingEngine):
    """Samples with a server of latents. The pipeline encodes and decodes; its network has no storage.

    Samples depend on their own seeds, not on other rows. They are not those of the trainside engine, whose random
    numbers a server does not use: the distribution is the same.
    """

    server_class: ClassVar[type[LatentServer]]
    pipeline: DiffusersPipeline[Any]
    server: LatentServer

    def __post_init__(self) -> None:
        sampled, pipeline = self.capabilities.modalities, self.pipeline
        other = [each for each in pipeline.capabilities.modalities if each not in sampled]
        if pipeline.facts.condition_images[0] > 0 or other:
            what = f"makes samples of the kind {other[0]}" if other else "needs condition images"
            raise IncompatibleError(
                f"{type(self).__name__} samples {' and '.join(sampled)} from texts, and {type(pipeline).__name__} "
                f"{what}. Use another engine, such as rollout=replica"
            )
        super().__post_init__()
        self.measured_guidance: set[tuple[float, str]] = set()
        """Scales and negative prompts whose effect was measured."""

    @classmethod
    def check_recipe(cls, facts: ModelFacts, sampling: Sampling, settings: Mapping[str, object]) -> None:
        """Raises IncompatibleError for a model or for settings that the server does not sample. Nothing is built."""
        server = cls.server_class
        family = served_family(server.name, server.families, facts.family)
        params = sampling_as(DiffusionSamplingParams, sampling, f"{server.name} samples with")
        check_images(server.name, facts)
        check_noise(server.name, params)
        server.check_levels(params)
        if settings["program"] != FAKE:
            check_length(server.name, params, family.sequence_length)
        if params.resolve_sde_indices(0):
            server.check_kernel(params.kernel)

    def facts(self) -> LatentFacts:
        """The facts of the model with the schedule of the server: requests have the noise levels that it uses."""
        return self.server.served(self.pipeline.facts)

    # The canary

    def canary_inputs(self) -> LatentCanaryInputs:
        """Fixed prompts, encoded by the pipeline, and the noise with which the server starts."""
        params = self._canary_params()
        shape = self.pipeline.facts.latent_shape(params)
        assert params.sigmas is not None
        return LatentCanaryInputs(
            x=torch.stack([self.server.draws(seed, shape, 1)[0] for seed in range(len(CANARY_IDS))]),
            sigma=torch.full((len(CANARY_IDS),), params.sigmas[0]),
            conditions=self.pipeline.encode(CANARY_PROMPTS, params),
        )

    def canary(self, inputs: Batch, answer: CanaryOutput) -> CanaryResult:
        requests = [LatentRequest(*row) for row in zip(CANARY_IDS, CANARY_PROMPTS, range(len(CANARY_IDS)), strict=True)]
        params = self._canary_params()
        theirs = torch.stack([self._velocity(request, params) for request in requests]).double()
        ours = answer.values.cpu().double()
        gap = theirs - ours
        relative = gap.square().mean().sqrt() / ours.square().mean().sqrt()
        return CanaryResult(False, float(gap.abs().max()), float(relative))

    def _canary_params(self) -> DiffusionSamplingParams:
        """Two steps without guidance, of a small image. Not every schedule has one of a single step."""
        facts = self.facts()
        side = CANARY_SIDE_TOKENS * facts.vae_scale * facts.patch_size
        params = DiffusionSamplingParams(
            kernel=EulerODE(),
            num_inference_steps=CANARY_STEPS,
            height=side,
            width=side,
            max_sequence_length=self.server.sequence_length or CANARY_SEQUENCE_LENGTH,
        )
        return params.pinned(0, facts.schedule.sigmas(CANARY_STEPS, facts.image_seq_len(params)).tolist())

    def _velocity(self, request: LatentRequest, params: DiffusionSamplingParams) -> Tensor:
        """The velocity [*latent] in the first step of a deterministic trajectory: (x_1 - x_0) / (sigma_1 - sigma_0)."""
        answer = self._checked(params, (0, 1), request)
        assert params.sigmas is not None
        start, end = params.sigmas[:2]
        return (answer.latents[1] - answer.latents[0]) / (end - start)

    # Samples

    def respond(self, req: RolloutReq) -> RolloutResp:
        _, params = req.only_track(DiffusionSamplingParams)
        self._check_request(req, params)
        conditions = self.pipeline.conditions_of(req, params)
        self._measure_guidance(params)
        rows = zip(req.sample_ids, req.prompts(), seeds_of(req, params, "x"), strict=True)
        stored = stored_positions(params.sde_indices or (), params.num_inference_steps)
        asked = tuple(sorted({0, *stored}))
        answers = self.answers([LatentRequest(*row) for row in rows], partial(self._checked, params, asked))
        who = f"the {len(answers)} samples of {req.sample_ids[0]} and others"
        self.check_weights(who, self.server.current_weights(), list(self.versions)[-1:])
        segment = self._segment(req, params, answers, [asked.index(position) for position in stored])
        cut = self.pipeline.cut_prompts(req.prompts(), params)
        resp = response_of(req, conditions, segment, self.pipeline.decode(segment.final), cut)
        return self.with_versions(resp, [str(answer.weights) for answer in answers])

    def _check_request(self, req: RolloutReq, params: DiffusionSamplingParams) -> None:
        """Raises IncompatibleError, naming the key, for settings with which the server cannot sample."""
        name = self.server.name
        check_noise(name, params)
        check_length(name, params, self.server.sequence_length)
        if any(req.prompt_image_uris()):
            raise IncompatibleError(f"{name} gets prompts without images here. Use another engine: rollout=replica")
        if params.sde_indices:
            self.server.check_kernel(params.kernel)

    def _checked(
        self, params: DiffusionSamplingParams, positions: Sequence[int], request: LatentRequest
    ) -> LatentAnswer:
        """The checked answer to one request, after retries. A retried request has the same seed."""
        answer, names = self.ask(request.id, lambda: self.server.sample(request, params, positions))
        if answer.weights is None:  # no transfer begins while it is answered
            answer = dataclasses.replace(answer, weights=names[0])
        else:
            self.check_weights(request.id, answer.weights, names)
        who = f"{self.server.name}, for {request.id}"
        verify_used(who, params, self.pipeline.facts.guidance_of(params), answer.used)
        self._check_latents(who, request, params, positions, answer)
        return answer

    def _check_latents(
        self,
        who: str,
        request: LatentRequest,
        params: DiffusionSamplingParams,
        positions: Sequence[int],
        answer: LatentAnswer,
    ) -> None:
        """Raises EngineError for latents or log-probs that are not those of the request's seed."""
        shape, steps = tuple(self.pipeline.facts.latent_shape(params)), params.sde_indices or ()
        if tuple(answer.latents.shape) != (len(positions), *shape):
            raise EngineError(
                f"{who}: the latents are {list(answer.latents.shape)}, and {[len(positions), *shape]} was asked for"
            )
        if not bool(answer.latents.isfinite().all()):
            raise EngineError(
                f"{who}: the latents have values that are not finite: the network of the server overflows"
            )
        noise = self.server.draws(request.seed, shape, 1 + len(steps))
        if not torch.allclose(answer.latents[0].float(), noise[0], rtol=ROUNDING, atol=ROUNDING):
            raise EngineError(
                f"{who}: the trajectory does not start from the noise of its seed {request.seed}: the answer belongs "
                "to another request, or the server draws other random numbers"
            )
        if self.capabilities.old_logp == "native":
            self._check_logp(who, params, noise[1:], answer.logp)

    def _check_logp(self, who: str, params: DiffusionSamplingParams, noise: Tensor, logp: Tensor | None) -> None:
        """Compare the reported log-probs with those of the noise [S, *latent]."""
        steps = params.sde_indices or ()
        reported = [] if logp is None else logp.tolist()
        if len(reported) != len(steps) or not all(map(math.isfinite, reported)):
            raise EngineError(f"{who}: {len(steps)} stochastic steps need as many finite log-probs, not {reported}")
        pairs = [(log_prob_of(params, step, noise[i]), logp_tolerance(params, step)) for i, step in enumerate(steps)]
        wanted = [value for value, _ in pairs]
        if any(abs(a - b) > allowed for a, (b, allowed) in zip(reported, pairs, strict=True)):
            raise SamplingMismatchError(
                f"{who}: its log-probs are {[round(value, 4) for value in reported]}, and those of its noise are "
                f"{[round(value, 4) for value in wanted]}: it samples with another noise scale (sampling.kernel.eta), "
                "or sums where the mean over elements is wanted"
            )

    def _measure_guidance(self, params: DiffusionSamplingParams) -> None:
        """Compare a guided velocity of the server with that from its two branches, once for each scale.

        Raises SamplingMismatchError if the server guides in another way than the request says. The velocity is that
        of the first noise level. A second expert is not measured: its scale must be reported.
        """
        guidance = self.pipeline.facts.guidance_of(params)
        key = (params.guidance_scale, params.negative_prompt)
        small = self._canary_params()
        assert small.sigmas is not None
        if guidance.scale_at(small.sigmas[0]) == 1.0 or not guidance.active or key in self.measured_guidance:
            return
        length, negative = params.max_sequence_length, params.negative_prompt
        plain = dataclasses.replace(small, max_sequence_length=length)
        guided = dataclasses.replace(plain, guidance_scale=params.guidance_scale, negative_prompt=negative)
        cond, uncond, theirs = (
            self._velocity(LatentRequest("guidance", prompt, 0), settings)[None]
            for prompt, settings in ((CANARY_PROMPTS[0], plain), (negative, plain), (CANARY_PROMPTS[0], guided))
        )
        ours = guidance.combine(uncond, cond, torch.full((1,), small.sigmas[0]))
        gap = float((theirs - ours).square().mean().sqrt() / (ours - cond).square().mean().sqrt())
        if not gap <= GUIDANCE_TOLERANCE:
            raise SamplingMismatchError(
                f"{self.server.name} does not use sampling.guidance_scale={params.guidance_scale:g} as the trainer "
                f"does: its guided velocity differs by {gap:.2g} of the effect of guidance, and {GUIDANCE_TOLERANCE:g} "
                "is allowed. Set guidance_scale=1, or use another engine"
            )
        self.measured_guidance.add(key)

    def _segment(
        self, req: RolloutReq, params: DiffusionSamplingParams, answers: Sequence[LatentAnswer], kept: Sequence[int]
    ) -> LatentSegment:
        """The rows of all answers, with the latents `kept`, by their places in the answers."""
        device, dtype = self.pipeline.bundle.device, TORCH_DTYPES[params.trajectory_dtype]
        steps = tuple(params.sde_indices or ())
        logps = [torch.full((len(steps),), math.nan) if row.logp is None else row.logp.float() for row in answers]
        return LatentSegment(
            latents=to_device(torch.stack([row.latents[list(kept)] for row in answers]).to(dtype), device),
            indices=stored_positions(steps, params.num_inference_steps),
            sde_indices=steps,
            sigmas=torch.tensor(params.sigmas, dtype=torch.float32),
            logp=to_device(torch.stack(logps), device),
            kernel=params.kernel,
            init_same_noise=False,
            guidance=self.pipeline.facts.guidance_of(params),
            seed=params.seed,
            step=req.step,
            anchors={},
        )


def log_prob_of(params: DiffusionSamplingParams, step: int, noise: Tensor) -> float:
    """The log-prob of mean + std * noise [*latent] under the kernel's Gaussian, nats, mean over elements."""
    zeros = torch.zeros(1, *noise.shape)
    std = step_std(params, step)
    return float(Gaussian(zeros, std).log_prob(std * noise[None]))


def logp_tolerance(params: DiffusionSamplingParams, step: int) -> float:
    """The largest difference between a reported log-prob and that of the noise, nats, mean over elements.

    Where the sample is rounded to the dtype of the trajectory before its log-prob is computed, the noise differs by
    e = r / std for a rounding error r, and the log-prob by (noise e + e^2 / 2), which grows as std falls.
    """
    rounding = torch.finfo(TORCH_DTYPES[params.trajectory_dtype]).eps
    error = rounding / float(step_std(params, step))
    return LOGP_TOLERANCE + error + error**2


def step_std(params: DiffusionSamplingParams, step: int) -> Tensor:
    """The standard deviation [] of a stochastic step."""
    assert params.sigmas is not None
    zeros = torch.zeros(1, 1)
    return params.kernel.transition(zeros, zeros, params.sigmas[step], params.sigmas[step + 1]).std
