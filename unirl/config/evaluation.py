"""The block of a recipe about evaluations, and the kinds of numbers that blocks of recipes have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out prompts, with fixed noise and without training."""

    eval_steps: NonNegative = 0
    """Evaluate before the first step, after every this many steps, and after the last step; 0 = never."""
    data_path: str | None = None
    """File of held-out prompts; absent = the training file, unshuffled."""
    max_prompts: Positive = 32
    """Evaluate the first this many prompts of the file."""
    samples_per_prompt: Positive = 1
    num_inference_steps: Positive | None = None
    """Denoising steps, T; absent = as in `sampling`."""
    guidance_scale: NonNegativeFloat | None = None
    """Guidance scale of denoising; absent = as in `sampling`."""
    temperature: NonNegativeFloat | None = None
    """Temperature of text; 0 = always the most likely token; absent = as in `sampling`."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Nucleus sampling of text; 1 keeps every token; absent = as in `sampling`."""
    top_k: NonNegative | None = None
    """Text is sampled from this many most likely tokens; 0 = from all; absent = as in `sampling`."""
    max_new_tokens: Positive | None = None
    """Tokens of a response, at most; absent = as in `sampling`."""
    seed: int = 42
    """Seed of the noise, which is the same in every evaluation."""
    weights: Literal["live", "ema"] = "live"
    """The weights to evaluate: the trained ones, or their average (backend.ema_cfg)."""

    @property
    def enabled(self) -> bool:
        """True if this run evaluates."""
        return self.eval_steps > 0

    def settings(self, known: Sequence[str]) -> dict[str, object]:
        """The sampling settings of evaluations; of the optional keys, those that are set and `known`."""
        optional = {key: vars(self)[key] for key in known if vars(self)[key] is not None}
        return {"samples_per_prompt": self.samples_per_prompt, "seed": self.seed, **optional}
