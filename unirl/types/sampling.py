"""How to sample: the user's settings, and the copy that a request pins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

from unirl.types.protocols import DtypeName, Kernel, StepChoice


@runtime_checkable
class Sampling(Protocol):
    """How the samples of one track are drawn: what the loop may ask of any domain's settings."""

    evaluation_keys: ClassVar[tuple[str, ...]]
    """The optional keys of the evaluation block that these settings understand, each named as their own."""

    @property
    def samples_per_prompt(self) -> int:
        """N, the size of a group."""
        ...

    @property
    def seed(self) -> int:
        """Seeds all randomness of the run."""
        ...

    @property
    def rows_per_sample(self) -> int:
        """Rows of a forward that one sample takes."""
        ...

    def describe(self) -> str:
        """How large a sample is, for people."""
        ...

    def density_problem(self, step: int) -> str | None:
        """Why a loss on log-probs has nothing to train in loop step `step`, and the way out; None where it has."""
        ...

    def variety_problem(self, step: int) -> str | None:
        """Why the samples of a group would all be the same in loop step `step`, and the way out; None where not."""
        ...

    def at_size(self, height: int, width: int) -> Self:
        """These settings for samples of so many pixels. Raises ValueError where samples have none."""
        ...

    def for_evaluation(self, settings: Mapping[str, Any]) -> Self:
        """These settings with those of the evaluation block on top (`samples_per_prompt`, `seed`, evaluation_keys)."""
        ...


SamplingT = TypeVar("SamplingT", bound=Sampling)


def sampling_as(kind: type[SamplingT], sampling: Sampling, who: str) -> SamplingT:
    """`sampling`, which `who` reads. Raises ValueError where it is of another domain."""
    if not isinstance(sampling, kind):
        raise ValueError(
            f"{who} {kind.__name__}, and the settings are {type(sampling).__name__}. "
            f"Write sampling._target_={kind.__module__}.{kind.__qualname__}"
        )
    return sampling


@dataclass(frozen=True, kw_only=True)
class DiffusionSamplingParams:
    """Sampling of a denoising track. The trainer pins `sigmas` and `sde_indices` for each request."""

    kernel: Kernel
    """The transition on stochastic steps."""
    num_inference_steps: int = 10
    """T, denoising steps."""
    samples_per_prompt: int = 1
    """N, the size of a group."""
    height: int = 512
    """Pixels."""
    width: int = 512
    """Pixels."""
    num_frames: int = 1
    guidance_scale: float = 1.0
    """Classifier-free guidance w: v = v_uncond + w (v_cond - v_uncond); 1 = off. Distilled models may read it."""
    guidance_scale_2: float | None = None
    """w below the boundary of a model of two experts; absent = guidance_scale."""
    guidance_passes: int = 1
    """1 = one forward of a doubled batch; 2 = two forwards, half the peak memory."""
    negative_prompt: str = ""
    seed: int = 42
    """Seeds all randomness of the run: noise, step choice, data order, initial adapters."""
    init_same_noise: bool = False
    """Siblings of a group start from one x_T."""
    sde_steps: StepChoice | None = None
    """Which steps are stochastic; absent = all but the last."""
    sde_indices: tuple[int, ...] | None = None
    """An explicit list, which wins over `sde_steps`; [] = deterministic everywhere."""
    solver: Kernel | None = None
    """The kernel on deterministic steps; absent = Euler."""
    tail_fraction: float | None = None
    """MixGRPO-Flash (arXiv:2507.21802, section 3.3): after the last stochastic step, this share of the steps."""
    sigmas: tuple[float, ...] | None = None
    """An explicit schedule of T + 1 values ending in 0; absent = the model's own."""
    max_sequence_length: int = 256
    """Tokens of the long text encoder."""
    trajectory_dtype: DtypeName = "fp32"
    """Storage of the trajectory; the log-prob is that of the rounded values."""

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
        self._check_at_least("num_inference_steps", 1)
        for name in (
            "samples_per_prompt",
            "height",
            "width",
            "num_frames",
            "max_sequence_length",
        ):
            self._check_at_least(name, 1)
        if self.guidance_passes not in (1, 2):
            raise ValueError(f"sampling.guidance_passes must be 1 or 2, got {self.guidance_passes}")
        for name in ("guidance_scale", "guidance_scale_2"):
            scale = self.__dict__[name]
            if scale is not None and scale < 0:
                raise ValueError(f"sampling.{name} must be >= 0, got {scale}; 1 turns guidance off")
        self._check_indices()
        self._check_sigmas()
        if self.tail_fraction is not None and self.sigmas is not None:
            raise ValueError(
                "sampling.tail_fraction shortens the model's own schedule, and sampling.sigmas is an explicit one: "
                "remove one of them"
            )
        if self.tail_fraction is not None and not 0.0 < self.tail_fraction <= 1.0:
            raise ValueError(
                f"sampling.tail_fraction must lie in (0, 1], got {self.tail_fraction}; leave it out to keep every step"
            )

    def _check_at_least(self, name: str, low: int) -> None:
        value = self.__dict__[name]
        if value < low:
            raise ValueError(f"sampling.{name} must be >= {low}, got {value}")

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
        decreasing = all(a > b for a, b in zip(self.sigmas, self.sigmas[1:], strict=False))
        if len(self.sigmas) != self.num_inference_steps + 1 or not decreasing or self.sigmas[-1] != 0:
            raise ValueError(
                f"sampling.sigmas needs {self.num_inference_steps + 1} decreasing values that end in 0 "
                f"(num_inference_steps + 1), got {len(self.sigmas)}: {list(self.sigmas)}"
            )

    def resolve_sde_indices(self, step: int) -> tuple[int, ...]:
        """The stochastic steps of loop step `step`, sorted: the explicit list, else `sde_steps`, else all but the last.

        Every member of a group, and every group of a step, shares them. Empty when the kernel has no density.
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
        """The copy that a request carries: schedule and stochastic steps written out.

        Args:
            levels: the model's schedule of any number of steps, for `tail_fraction`.
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
            sde_steps=None,
            tail_fraction=None,
        )

    def _short_tail(
        self, sigmas: tuple[float, ...], head: int, fraction: float, levels: Callable[[int], Sequence[float]]
    ) -> tuple[float, ...]:
        """`sigmas` with fewer steps after position `head`: n = int((T - head) fraction), at least 1.

        The tail is spread as the model's schedule is: its level j stands where position head + j (T - head) / n would,
        and the schedule of n T steps holds every such place.
        """
        rest = self.num_inference_steps - head
        count = max(int(rest * fraction), 1)
        fine = levels(count * self.num_inference_steps)
        return (*sigmas[: head + 1], *(fine[head * count + j * rest] for j in range(1, count + 1)))

    def deterministic(self) -> DiffusionSamplingParams:
        """The same settings without any stochastic step."""
        return dataclasses.replace(self, sde_indices=(), sde_steps=None, tail_fraction=None)

    @property
    def rows_per_sample(self) -> int:
        """2 with guidance in one pass."""
        return 2 if self.is_guided and self.guidance_passes == 1 else 1

    @property
    def is_guided(self) -> bool:
        """Whether some step has a scale other than 1."""
        return self.guidance_scale != 1 or self.guidance_scale_2 not in (None, 1)

    def describe(self) -> str:
        """`8 denoising steps at 512 x 512 x 5 frames`."""
        steps = f"{self.num_inference_steps} denoising step{'' if self.num_inference_steps == 1 else 's'}"
        return f"{steps} at {self.height} x {self.width}{f' x {self.num_frames} frames' if self.num_frames > 1 else ''}"

    def density_problem(self, step: int) -> str | None:
        """No step has a log-prob. Raises ValueError where the stochastic steps cannot be chosen."""
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
        """One start and no noise on the way: the siblings of a group are copies."""
        if not self.init_same_noise or self.resolve_sde_indices(step):
            return None
        return (
            "all samples of a prompt start from one noise (sampling.init_same_noise=true) and no denoising step is "
            "stochastic. Use sampling.init_same_noise=false"
        )

    def at_size(self, height: int, width: int) -> DiffusionSamplingParams:
        """The same settings with another height and width."""
        return dataclasses.replace(self, height=height, width=width)

    def for_evaluation(self, settings: Mapping[str, Any]) -> DiffusionSamplingParams:
        """Without stochastic steps; another number of steps goes by the model's own schedule."""
        sigmas = None if "num_inference_steps" in settings else self.sigmas
        return dataclasses.replace(self.deterministic(), init_same_noise=False, **{"sigmas": sigmas, **settings})


@dataclass(frozen=True, kw_only=True)
class ARSamplingParams:
    """Sampling of a track of text. Log-probs are those of the tempered distribution before top_p and top_k."""

    max_new_tokens: int = 1024
    """The longest response, tokens; one that reaches it is cut."""
    samples_per_prompt: int = 1
    """N, the size of a group."""
    temperature: float = 1.0
    """Logits are divided by it; 0 = the likeliest token always, which evaluations may use and training may not."""
    top_p: float = 1.0
    """Keep the likeliest tokens until their mass reaches this; 1 = all."""
    top_k: int = 0
    """Keep so many of the likeliest tokens; 0 = all."""
    min_new_tokens: int = 0
    """No response ends before it has so many tokens."""
    max_prompt_tokens: int = 1024
    """A prompt that is longer, template and images included, is refused."""
    stop: tuple[str, ...] = ()
    """Further strings that end a response, beside the model's own tokens."""
    seed: int = 42
    """Seeds all randomness of the run: draws of tokens, data order, initial adapters."""

    evaluation_keys: ClassVar[tuple[str, ...]] = ("temperature", "top_p", "top_k", "max_new_tokens")
    toy: ClassVar[Mapping[str, object]] = {
        "max_new_tokens": 8,
        "samples_per_prompt": 4,
        "max_prompt_tokens": 512,
    }

    def __post_init__(self) -> None:
        for name, low in (("max_new_tokens", 1), ("samples_per_prompt", 1), ("max_prompt_tokens", 1), ("top_k", 0)):
            if self.__dict__[name] < low:
                raise ValueError(f"sampling.{name} must be >= {low}, got {self.__dict__[name]}")
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
            raise ValueError(f"sampling.stop={list(self.stop)} holds the empty string, which stands everywhere")

    @property
    def rows_per_sample(self) -> int:
        return 1

    def describe(self) -> str:
        """`prompts of at most 1024 tokens, responses of at most 512`."""
        return f"prompts of at most {self.max_prompt_tokens} tokens, responses of at most {self.max_new_tokens}"

    def density_problem(self, step: int) -> str | None:
        """Greedy decoding draws nothing."""
        if self.temperature > 0:
            return None
        return (
            "sampling.temperature=0 draws nothing: every response is the likeliest. Use sampling.temperature=1.0 "
            "(evaluation.temperature=0 is fine)"
        )

    def variety_problem(self, step: int) -> str | None:
        """Greedy decoding says the same every time."""
        return self.density_problem(step)

    def at_size(self, height: int, width: int) -> ARSamplingParams:
        """Refused: a text has no size in pixels."""
        raise ValueError(f"data_source.sizes: a text is not {height} x {width} pixels large. Write ~data_source.sizes")

    def for_evaluation(self, settings: Mapping[str, Any]) -> ARSamplingParams:
        """These settings with others on top; a shorter response may end as early as it likes."""
        longest = settings.get("max_new_tokens", self.max_new_tokens)
        shortest = min(self.min_new_tokens, longest)
        return dataclasses.replace(self, **{"min_new_tokens": shortest, **settings})
