"""What a model knows of itself, so that recipes need not say it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from unirl.types.protocols import SigmaScheduleLike
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, Sampling, sampling_as


@dataclass(frozen=True, kw_only=True)
class ModelFacts(ABC):
    """What is true of every model. A domain's own facts follow in the subclasses."""

    family: str
    trainable_attr: str = "transformer"
    """The bundle's attribute that is trained."""
    block_class_names: tuple[str, ...]
    """Classes that are wrapped, checkpointed and compiled one by one."""
    lora_targets: tuple[str, ...]
    """Module name suffixes that carry adapters."""
    batch_multiple: int = 1
    """Forward batches are filled to a multiple of this, so that a row's bits do not depend on its neighbours."""

    @abstractmethod
    def tokens_of(self, sampling: Sampling) -> int:
        """The most tokens that the trained network reads of one sample."""

    @abstractmethod
    def check(self, sampling: Sampling) -> None:
        """Raises ValueError, naming the key and the nearest value that works, where this model cannot sample so."""


@dataclass(frozen=True, kw_only=True)
class LatentFacts(ModelFacts):
    """Of a model that denoises latents."""

    latent_channels: int
    vae_scale: int
    """Pixels per latent element along a side; 1 in pixel space."""
    patch_size: int
    """Latent elements per token along a side."""
    schedule: SigmaScheduleLike
    timestep_scale: float = 1000.0
    """The network is fed timestep_scale * sigma."""
    text_width: int | None = None
    """Width of a prompt's pooled text (per token: their mean), which a value head reads; None: no text."""

    def tokens_of(self, sampling: Sampling) -> int:
        """Those of the picture, and of the prompt."""
        params = sampling_as(DiffusionSamplingParams, sampling, self.family)
        return self.image_seq_len(params.height, params.width) + params.max_sequence_length

    def check(self, sampling: Sampling) -> None:
        """The size of the pictures divides."""
        params = sampling_as(DiffusionSamplingParams, sampling, f"{self.family} samples by")
        self.latent_shape(params.height, params.width)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """[C, H, W] of one image's latent. Raises ValueError when a side does not divide."""
        multiple = self.vae_scale * self.patch_size
        for name, side in (("height", height), ("width", width)):
            if side % multiple or side <= 0:
                near = max(multiple, round(side / multiple) * multiple)
                raise ValueError(
                    f"sampling.{name}={side} is not a positive multiple of {multiple} "
                    f"(VAE scale {self.vae_scale} x patch {self.patch_size} of {self.family}). Use {near}"
                )
        return (self.latent_channels, height // self.vae_scale, width // self.vae_scale)

    def image_seq_len(self, height: int, width: int) -> int:
        """The number of image tokens."""
        _, rows, columns = self.latent_shape(height, width)
        return rows * columns // self.patch_size**2


@dataclass(frozen=True, kw_only=True)
class LanguageFacts(ModelFacts):
    """Of a model that continues text."""

    trainable_attr: str = "lm"
    vocab_size: int
    """Rows of the embedding, V."""
    hidden_size: int
    """Width of the hidden state that the logits are made of, D."""
    context_length: int
    """Tokens of a prompt and its response that the positions are good for."""
    sees: bool = False
    """Prompts may bring pictures."""

    def tokens_of(self, sampling: Sampling) -> int:
        """The longest prompt and the longest response."""
        params = sampling_as(ARSamplingParams, sampling, self.family)
        return params.max_prompt_tokens + params.max_new_tokens

    def check(self, sampling: Sampling) -> None:
        """The longest prompt and the longest response fit the context together."""
        params = sampling_as(ARSamplingParams, sampling, f"{self.family} samples by")
        if params.max_prompt_tokens + params.max_new_tokens > self.context_length:
            left = self.context_length - params.max_prompt_tokens
            advice = f"Use max_new_tokens={left}" if left > 0 else "Lower max_prompt_tokens"
            raise ValueError(
                f"sampling.max_prompt_tokens={params.max_prompt_tokens} + max_new_tokens={params.max_new_tokens} is "
                f"more than the {self.context_length} tokens that {self.family} was made for. {advice}"
            )
