"""Sampling settings: those of the recipe, and the pinned copy in a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

from unirl.types.protocols import DtypeName, GuidanceGradient, Kernel, SigmaGrid, StepChoice


@runtime_checkable
class Sampling(Protocol):
    """Sampling settings of one track, as the loop uses them for every domain."""

    evaluation_keys: ClassVar[tuple[str, ...]]
    """Optional keys of the `evaluation` block that these settings accept. They have the names of the settings."""

    @property
    def samples_per_prompt(self) -> int:
        """N, the number of samples in a group."""

    @property
    def seed(self) -> int:
        """Seed of all randomness of the run."""

    @property
    def rows_per_sample(self) -> int:
        """Number of rows that one sample takes in a forward pass."""

    def describe(self) -> str:
        """A description of the size of a sample, for people."""

    def density_problem(self, step: int) -> str | None:
        """Why a loss on log-probs cannot train in step `step` of the loop, and the way out; None if it can."""

    def variety_problem(self, step: int) -> str | None:
        """Why the samples of a group are equal in step `step` of the loop, and the way out; None if they differ."""

    def at_size(self, height: int, width: int) -> Self:
        """These settings with another size in pixels. Raises ValueError if the samples have no pixels."""

    def for_evaluation(self, settings: EvaluationSettings) -> Self:
        """These settings with those of the `evaluation` block: `samples_per_prompt`, `seed` and `evaluation_keys`."""


EvaluationSettings = Mapping[str, Any]
"""The keys of the `evaluation` block that change sampling. Each has the type of the setting of its name."""
SamplingT = TypeVar("SamplingT", bound=Sampling)


def sampling_as(kind: type[SamplingT], sampling: Sampling, who: str) -> SamplingT:
    """`sampling`, which `who` reads. Raises ValueError if it is of another kind than `kind`."""
    if not isinstance(sampling, kind):
        raise ValueError(
            f"{who} {kind.__name__}, but the settings are {type(sampling).__name__}. "
            f"Write sampling._target_={kind.__module__}.{kind.__qualname__}"
        )
    return sampling


def _check_at_least(params: Sampling, name: str, low: int) -> None:
    value = vars(params)[name]
    if value < low:
        raise ValueError(f"sampling.{name} must be >= {low}, got {value}")


@dataclass(frozen=True, kw_only=True)
class DiffusionSamplingParams:
    """Sampling settings of a denoising track. The trainer pins `sigmas` and `sde_indices` for each request."""

    kernel: Kernel
    """Transition kernel of the stochastic steps."""
    num_inference_steps: int = 10
    """T, the number of denoising steps."""
    samples_per_prompt: int = 1
    """N, the number of samples in a group."""
    height: int = 512
    """Pixels."""
    width: int = 512
    """Pixels."""
    num_frames: int = 1
    """F, the number of frames of a video; 1 = an image."""
    guidance_scale: float = 1.0
    """Classifier-free guidance w: v = v_uncond + w (v_cond - v_uncond); 1 = off. Distilled models may read it."""
    guidance_scale_2: float | None = None
    """w below the boundary of a model with two experts; absent = guidance_scale."""
    guidance_passes: int = 1
    """1 = one forward pass of a doubled batch; 2 = two forward passes with half the peak memory."""
    guidance_gradient: GuidanceGradient = "both"
    """Branches of guidance that training differentiates: both, or with `conditional` only the one with the prompt."""
    negative_prompt: str = ""
    """Prompt of the unconditional pass of guidance."""
    seed: int = 42
    """Seed of all randomness of the run: noise, step choice, data order, initial adapters."""
    init_same_noise: bool = False
    """All samples of a group start from the same x_T."""
    sde_steps: StepChoice | None = None
    """Chooses the stochastic steps; absent = all but the last."""
    sde_indices: tuple[int, ...] | None = None
    """Explicit list of stochastic steps, which overrides `sde_steps`; [] = all steps are deterministic."""
    solver: Kernel | None = None
    """Transition kernel of the deterministic steps; absent = Euler."""
    tail_fraction: float | None = None
    """Fraction of the steps after the last stochastic one that are taken: MixGRPO-Flash (arXiv:2507.21802, 3.3)."""
    sigmas: tuple[float, ...] | None = None
    """Explicit schedule of T + 1 values that ends in 0; absent = the schedule of the model."""
    sigma_grid: SigmaGrid | None = None
    """Levels before the shift of the schedule: `clean` (1 - i / T), those of `diffusers`, whose last level is shifted
    twice, or those of `unipc`; absent = the grid of the model."""
    max_sequence_length: int = 256
    """Largest number of tokens for the text encoder with the longest context."""
    trajectory_dtype: DtypeName = "fp32"
    """Dtype in which trajectories are stored. Log-probs are computed from the rounded values."""
    cache_threshold: float | None = None
    """Largest relative change of a sample's tokens after the first block at which a deterministic step reuses the
    other blocks of an earlier step, such as 0.1; absent = off. Stochastic steps and evaluations run all blocks."""

    evaluation_keys: ClassVar[tuple[str, ...]] = ("num_inference_steps", "guidance_scale")
    toy: ClassVar[Mapping[str, object]] = {
        "num_inference_steps": 4,
        "samples_per_prompt": 4,
        "height": 32,
        "width": 32,
        "max_sequence_length": 16,
        "trajectory_dtype": "fp32",
    }

    def __post_init__(self) -> None:
        counts = ("num_inference_steps", "samples_per_prompt", "height", "width", "num_frames", "max_sequence_length")
        for name in counts:
            _check_at_least(self, name, 1)
        if self.guidance_passes not in (1, 2):
            raise ValueError(f"sampling.guidance_passes must be 1 or 2, got {self.guidance_passes}")
        for name in ("guidance_scale", "guidance_scale_2"):
            scale = self.__dict__[name]
            if scale is not None and scale < 0:
                raise ValueError(f"sampling.{name} must be >= 0, got {scale}; 1 turns guidance off")
        if self.cache_threshold is not None and not 0.0 <= self.cache_threshold < float("inf"):
            raise ValueError(
                f"sampling.cache_threshold must be >= 0, got {self.cache_threshold}; leave it out to compute every step"
            )
        self._check_indices()
        self._check_sigmas()
        if self.tail_fraction is not None and self.sigmas is not None:
            raise ValueError(
                "sampling.tail_fraction shortens the schedule of the model, but sampling.sigmas replaces it: "
                "remove one of them"
            )
        if self.sigma_grid is not None and self.sigmas is not None:
            raise ValueError(
                "sampling.sigma_grid changes the schedule of the model, but sampling.sigmas replaces it: remove one of "
                "them"
            )
        if self.tail_fraction is not None and not 0.0 < self.tail_fraction <= 1.0:
            raise ValueError(
                f"sampling.tail_fraction must lie in (0, 1], got {self.tail_fraction}; leave it out to keep every step"
            )

    def _check_indices(self) -> None:
        last = self.num_inference_steps - 2
        bad = [i for i in self.sde_indices or () if not 0 <= i <= last]
        if bad:
            raise ValueError(
                f"sampling.sde_indices={list(self.sde_indices or ())} holds {bad}: a stochastic step lies within "
                f"0..{last}, since the last of {self.num_inference_steps} steps is always deterministic"
            )

    def _check_sigmas(self) -> None:
        if self.sigmas is None:
            return
        decreasing = all(a > b for a, b in pairwise(self.sigmas))
        if len(self.sigmas) != self.num_inference_steps + 1 or not decreasing or self.sigmas[-1] != 0:
            raise ValueError(
                f"sampling.sigmas needs {self.num_inference_steps + 1} decreasing values that end in 0 "
                f"(num_inference_steps + 1), got {len(self.sigmas)}: {list(self.sigmas)}"
            )

    def resolve_sde_indices(self, step: int) -> tuple[int, ...]:
        """Sorted stochastic steps for step `step` of the loop: `sde_indices`, else `sde_steps`, else all but the last.

        All samples of a step of the loop share them. Empty if the kernel has no density.
        """
        total = self.num_inference_steps
        if self.sde_indices is not None:
            chosen = self.sde_indices
        elif self.sde_steps is not None:
            chosen = self.sde_steps.choose(step, total, self.seed)
        else:
            chosen = tuple(range(total - 1))
        return tuple(sorted(i for i in set(chosen) if self.kernel.has_density(i, total)))

    def pinned(
        self, step: int, sigmas: Sequence[float], levels: Callable[[int], Sequence[float]] | None = None
    ) -> DiffusionSamplingParams:
        """The copy for a request, with explicit sigmas and stochastic steps.

        `tail_fraction` needs `levels`, the schedule of the model for any number of steps.
        """
        chosen = self.resolve_sde_indices(step)
        short = tuple(sigmas)
        if self.tail_fraction is not None:
            assert levels is not None, "tail_fraction needs the model's schedule"
            short = self._short_tail(short, max(chosen, default=-1) + 1, self.tail_fraction, levels)
        return dataclasses.replace(
            self,
            num_inference_steps=len(short) - 1,
            sigmas=short,
            sde_indices=chosen,
            sigma_grid=None,
            sde_steps=None,
            tail_fraction=None,
        )

    def _short_tail(
        self, sigmas: tuple[float, ...], head: int, fraction: float, levels: Callable[[int], Sequence[float]]
    ) -> tuple[float, ...]:
        """`sigmas` with fewer steps after position `head`: n = int((T - head) fraction), at least 1.

        The tail follows the schedule of the model: its level j is the level at the fractional position
        head + j (T - head) / n, which is an entry of the schedule with n T steps.
        """
        rest = self.num_inference_steps - head
        count = max(int(rest * fraction), 1)
        fine = levels(count * self.num_inference_steps)
        return (*sigmas[: head + 1], *(fine[head * count + j * rest] for j in range(1, count + 1)))

    def deterministic(self) -> DiffusionSamplingParams:
        """These settings without stochastic steps."""
        return dataclasses.replace(self, sde_indices=(), sde_steps=None, tail_fraction=None)

    @property
    def rows_per_sample(self) -> int:
        """2 with guidance in one pass, else 1."""
        return 2 if self.is_guided and self.guidance_passes == 1 else 1

    @property
    def is_guided(self) -> bool:
        """True if some step has a guidance scale other than 1."""
        return self.guidance_scale != 1 or self.guidance_scale_2 not in (None, 1)

    def describe(self) -> str:
        """For example `8 denoising steps at 512 x 512 x 5 frames`."""
        steps = f"{self.num_inference_steps} denoising step{'' if self.num_inference_steps == 1 else 's'}"
        return f"{steps} at {self.height} x {self.width}{f' x {self.num_frames} frames' if self.num_frames > 1 else ''}"

    def density_problem(self, step: int) -> str | None:
        """Reports that no step has a log-prob. Raises ValueError if no stochastic steps can be chosen."""
        try:
            chosen = self.resolve_sde_indices(step)
        except ValueError as error:
            raise ValueError(f"sampling.sde_steps: {error}") from error
        if chosen:
            return None
        return (
            f"no step of sampling has one ({type(self.kernel).__name__}, {self.num_inference_steps} denoising steps, "
            "the last always deterministic). Use a stochastic kernel such as unirl.sde.kernels.FlowSDEStrategy, and 2 "
            "or more steps"
        )

    def variety_problem(self, step: int) -> str | None:
        """Reports equal initial noise without stochastic steps, which makes all samples of a group equal."""
        if not self.init_same_noise or self.resolve_sde_indices(step):
            return None
        return (
            "all samples of a prompt start from the same noise (sampling.init_same_noise=true) and no denoising step "
            "is stochastic. Use sampling.init_same_noise=false"
        )

    def at_size(self, height: int, width: int) -> DiffusionSamplingParams:
        return dataclasses.replace(self, height=height, width=width)

    def for_evaluation(self, settings: EvaluationSettings) -> DiffusionSamplingParams:
        """These settings without stochastic steps and without a step cache.

        Another number of steps uses the schedule of the model.
        """
        sigmas = None if "num_inference_steps" in settings else self.sigmas
        whole = dataclasses.replace(self.deterministic(), init_same_noise=False, cache_threshold=None)
        return dataclasses.replace(whole, **{"sigmas": sigmas, **settings})


@dataclass(frozen=True, kw_only=True)
class ARSamplingParams:
    """Sampling settings of a text track. Log-probs are those of the tempered distribution before top_p and top_k."""

    max_new_tokens: int = 1024
    """Largest number of tokens of a response. A response that reaches it is truncated."""
    samples_per_prompt: int = 1
    """N, the number of samples in a group."""
    temperature: float = 1.0
    """Divides the logits. 0 = always the most likely token (greedy), valid in evaluation only."""
    top_p: float = 1.0
    """Keep the most likely tokens until their probabilities sum to this; 1 = all."""
    top_k: int = 0
    """Keep this number of the most likely tokens; 0 = all."""
    min_new_tokens: int = 0
    """Smallest number of tokens of a response."""
    max_prompt_tokens: int = 1024
    """Largest number of tokens of a prompt, including template and images. Longer prompts are an error."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, in addition to the end tokens of the model."""
    seed: int = 42
    """Seed of all randomness of the run: sampled tokens, data order, initial adapters."""

    evaluation_keys: ClassVar[tuple[str, ...]] = ("temperature", "top_p", "top_k", "max_new_tokens")
    toy: ClassVar[Mapping[str, object]] = {
        "max_new_tokens": 8,
        "samples_per_prompt": 4,
        "max_prompt_tokens": 512,
    }

    def __post_init__(self) -> None:
        for name, low in (("max_new_tokens", 1), ("samples_per_prompt", 1), ("max_prompt_tokens", 1), ("top_k", 0)):
            _check_at_least(self, name, low)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"sampling.temperature must be >= 0, got {self.temperature:g}; 1 changes nothing")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p must lie in (0, 1], got {self.top_p:g}; 1 keeps every token")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"sampling.min_new_tokens must lie in 0..max_new_tokens ({self.max_new_tokens}), "
                f"got {self.min_new_tokens}"
            )
        if "" in self.stop:
            raise ValueError(
                f"sampling.stop={list(self.stop)} contains the empty string, which would end every response"
            )

    @property
    def rows_per_sample(self) -> int:
        return 1

    def describe(self) -> str:
        """For example `prompts of at most 1024 tokens, responses of at most 512`."""
        return f"prompts of at most {self.max_prompt_tokens} tokens, responses of at most {self.max_new_tokens}"

    def density_problem(self, step: int) -> str | None:
        """Reports greedy decoding, which is not random."""
        if self.temperature > 0:
            return None
        return (
            "sampling.temperature=0 always decodes the most likely token (greedy). Use sampling.temperature=1.0 "
            "(evaluation.temperature=0 is fine)"
        )

    def variety_problem(self, step: int) -> str | None:
        """Reports greedy decoding, which makes all responses to a prompt equal."""
        return self.density_problem(step)

    def at_size(self, height: int, width: int) -> Self:
        """Raises ValueError: a text has no size in pixels."""
        raise ValueError(
            f"data_source.sizes has {height} x {width} pixels, but the samples are texts. Write ~data_source.sizes"
        )

    def for_evaluation(self, settings: EvaluationSettings) -> Self:
        """These settings with those of the `evaluation` block. `min_new_tokens` is at most `max_new_tokens`."""
        shortest = min(self.min_new_tokens, settings.get("max_new_tokens", self.max_new_tokens))
        return dataclasses.replace(self, **{"min_new_tokens": shortest, **settings})


@dataclass(frozen=True, kw_only=True)
class ImageTokenSamplingParams(ARSamplingParams):
    """Sampling settings of images that a language model writes token by token. An image has no end token.

    Log-probs are those of the tempered distribution of the guided logits, before top_p and top_k.
    """

    max_new_tokens: int = 576
    """Number of tokens of an image. Each model has one."""
    height: int = 384
    """Pixels. Each model has one size."""
    width: int = 384
    """Pixels. Each model has one size."""
    guidance_scale: float = 1.0
    """Classifier-free guidance w on logits: l = l_uncond + w (l_cond - l_uncond); 1 = off, with one forward pass."""

    evaluation_keys: ClassVar[tuple[str, ...]] = ("guidance_scale", "temperature", "top_p", "top_k")
    toy: ClassVar[Mapping[str, object]] = {
        "max_new_tokens": 16,
        "height": 32,
        "width": 32,
        "samples_per_prompt": 4,
        "max_prompt_tokens": 512,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("height", "width"):
            _check_at_least(self, name, 1)
        if not 0 <= self.guidance_scale < float("inf"):
            raise ValueError(f"sampling.guidance_scale must be >= 0, got {self.guidance_scale:g}; 1 turns guidance off")
        if self.stop or self.min_new_tokens:
            key = "stop" if self.stop else "min_new_tokens"
            raise ValueError(f"sampling.{key} must be left out: an image always has all of its tokens")

    @property
    def is_guided(self) -> bool:
        """True if the logits combine a conditional and an unconditional branch."""
        return self.guidance_scale != 1

    @property
    def rows_per_sample(self) -> int:
        """2 with guidance, else 1."""
        return 2 if self.is_guided else 1

    def describe(self) -> str:
        """For example `prompts of at most 1024 tokens, images of 576 tokens at 384 x 384`."""
        prompts = f"prompts of at most {self.max_prompt_tokens} tokens"
        return f"{prompts}, images of {self.max_new_tokens} tokens at {self.height} x {self.width}"

    def at_size(self, height: int, width: int) -> Self:
        return dataclasses.replace(self, height=height, width=width)


@dataclass(frozen=True, kw_only=True)
class ActionSamplingParams:
    """Sampling settings of a policy that acts in environments. A sample, or row, is what one environment did."""

    max_steps: int | None = None
    """Decisions of a row, at most; absent = until the environment ends the episode."""
    continuing: bool = False
    """A row goes on with further episodes until it has `max_steps` decisions; false = a row is one episode."""
    samples_per_prompt: int = 1
    """N, the number of rows that begin alike: a group. Each has an environment of its own."""
    deterministic: bool = False
    """Take the most likely action in place of a random one; valid in evaluation only."""
    expert_share: float | None = None
    """beta of the first step (Ross et al. 2011, arXiv:1011.0686): how probable it is that the expert takes a decision.

    A number needs `pipeline.expert`, which labels every decision; 0 = it never acts. null: there is no expert.
    """
    expert_decay: float = 1.0
    """The factor of beta from step to step; 0 = the expert acts in the first step alone."""
    seed: int = 42
    """Seed of all randomness of the run: starts of episodes, actions, initial weights."""

    evaluation_keys: ClassVar[tuple[str, ...]] = ()
    toy: ClassVar[Mapping[str, object]] = {"max_steps": 16, "samples_per_prompt": 4}

    def __post_init__(self) -> None:
        _check_at_least(self, "samples_per_prompt", 1)
        if self.max_steps is not None:
            _check_at_least(self, "max_steps", 1)
        elif self.continuing:
            raise ValueError("sampling.continuing=true needs sampling.max_steps, the number of decisions of a row")
        for name in ("expert_share", "expert_decay"):
            value = vars(self)[name]
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"sampling.{name} must be between 0 and 1, got {value}")

    def beta(self, step: int) -> float:
        """The probability that the expert acts in a decision of step `step`, from 0."""
        return 0.0 if self.expert_share is None else self.expert_share * self.expert_decay**step

    @property
    def rows_per_sample(self) -> int:
        return 1

    def describe(self) -> str:
        """For example `episodes of at most 200 decisions`."""
        if self.continuing:
            return f"rows of {self.max_steps} decisions"
        return "whole episodes" if self.max_steps is None else f"episodes of at most {self.max_steps} decisions"

    def density_problem(self, step: int) -> str | None:
        """Reports that the most likely action has no log-prob."""
        if not self.deterministic:
            return None
        return "sampling.deterministic=true takes the most likely action. Write ~sampling.deterministic"

    def variety_problem(self, step: int) -> str | None:
        """Reports that rows that begin alike and act alike are equal."""
        return self.density_problem(step)

    def at_size(self, height: int, width: int) -> Self:
        """Raises ValueError: the pixels of an observation are those of its environment."""
        raise ValueError(
            f"data_source.sizes has {height} x {width} pixels, but the samples are episodes. Write ~data_source.sizes"
        )

    def for_evaluation(self, settings: EvaluationSettings) -> Self:
        """One episode for each row, with the most likely actions and without the expert."""
        most = None if self.continuing else self.max_steps
        whole = dataclasses.replace(self, continuing=False, deterministic=True, max_steps=most, expert_share=None)
        return dataclasses.replace(whole, **settings)
