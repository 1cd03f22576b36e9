"""The diffusion domain: one denoising track from text prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unirl.config.recipe import EvaluationConfig
from unirl.data.datasets import Prompt, require_text_only
from unirl.trainer.base import Parts, Roles, Trainer
from unirl.types.facts import LatentFacts
from unirl.types.primitives import Texts
from unirl.types.rollout_req import Purpose, RolloutReq, TrackSpec
from unirl.types.sampling import DiffusionSamplingParams

TRACK = "image"


class DiffusionTrainer(Trainer):
    """Trains one denoising model."""

    track = TRACK

    def __init__(self, parts: Parts, roles: Roles, sampling: DiffusionSamplingParams) -> None:
        super().__init__(parts, roles)
        self.facts: LatentFacts = roles.rollout.facts()
        self.sampling = sampling
        self.eval_sampling = eval_sampling(sampling, parts.config.evaluation)

    def make_request(self, prompts: Sequence[Prompt], step: int) -> RolloutReq:
        """P prompts x N samples with the training settings; of prompts that bring their samples, these."""
        req = self._request(prompts, self.sampling, step, "r", self.sampled_weights)
        recorded = [ref for prompt in prompts for ref in prompt.recorded]
        return req.with_recorded(recorded) if recorded else req

    def make_eval_request(self, prompts: Sequence[Prompt]) -> RolloutReq:
        """Held-out prompts with the evaluation's settings, deterministic steps, noise that never changes."""
        return self._request(prompts, self.eval_sampling, 0, "eval", self.config.evaluation.weights)

    def _request(
        self, prompts: Sequence[Prompt], sampling: DiffusionSamplingParams, step: int, purpose: Purpose, weights: str
    ) -> RolloutReq:
        require_text_only(prompts, self.facts.family)
        groups = [prompt.group_id for prompt in prompts]
        return RolloutReq(
            sample_ids=groups,
            group_ids=groups,
            primitives={"text": Texts(texts=[prompt.text for prompt in prompts])},
            metadata=[dict(prompt.metadata) for prompt in prompts],
            tracks={TRACK: TrackSpec(sampling=self._pinned(sampling, step))},
            purpose=purpose,
            step=step,
            weights=weights,
            weight_version=self.version,
        ).expand(sampling.samples_per_prompt)

    def _pinned(self, sampling: DiffusionSamplingParams, step: int) -> DiffusionSamplingParams:
        """With the recipe's own schedule, else the model's."""

        def levels(num_steps: int) -> tuple[float, ...]:
            return tuple(self.facts.schedule.sigmas(num_steps, seq_len).tolist())

        if sampling.sigmas is not None:
            return sampling.pinned(step, sampling.sigmas)
        seq_len = self.facts.image_seq_len(sampling.height, sampling.width)
        return sampling.pinned(step, levels(sampling.num_inference_steps), levels)


def eval_sampling(sampling: DiffusionSamplingParams, block: EvaluationConfig) -> DiffusionSamplingParams:
    """The training settings with those of the evaluation block on top, without stochastic steps."""
    return dataclasses.replace(
        sampling.deterministic(),
        samples_per_prompt=block.samples_per_prompt,
        num_inference_steps=block.num_inference_steps or sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale if block.guidance_scale is None else block.guidance_scale,
        seed=sampling.seed if block.seed is None else block.seed,
        sigmas=sampling.sigmas if block.num_inference_steps is None else None,
        init_same_noise=False,
    )
