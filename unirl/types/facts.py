"""What a model knows of itself, so that recipes need not say it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from unirl.types.protocols import GuidanceLike, SigmaScheduleLike
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, Sampling, sampling_as


@dataclass(frozen=True, kw_only=True)
class ModelFacts(ABC):
    """What is true of every model. A domain's own facts follow in the subclasses."""

    family: str
    trainable_attr: str = "transformer"
    """The bundle's attribute that is trained."""
    block_class_names: tuple[str, ...]
    """Classes that are wrapped, checkpointed and compiled one by one."""
    expert_class_names: tuple[str, ...] = ()
    """Classes of whole networks of which a forward may run some only; each is gathered by itself, and by need."""
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

    @abstractmethod
    def images_per_prompt(self) -> tuple[int, int | None]:
        """Fewest and most pictures that a prompt brings; None = any number."""


@dataclass(frozen=True, kw_only=True)
class LatentFacts(ModelFacts):
    """Of a model that denoises latents."""

    latent_channels: int
    vae_scale: int
    """Pixels per latent element along a side; 1 in pixel space."""
    patch_size: int
    """Latent elements per token along a side."""
    frame_scale: int | None = None
    """Frames of a video per latent frame after the first; None: the model draws pictures."""
    fps: float = 16.0
    """Frames of a video per second."""
    schedule: SigmaScheduleLike
    timestep_scale: float = 1000.0
    """The network is fed timestep_scale * sigma."""
    guidance: GuidanceLike
    """The model's kind of guidance, at scale 1."""
    text_width: int | None = None
    """Width of a prompt's pooled text (per token: their mean), which a value head reads; None: no text."""
    condition_images: tuple[int, int] = (0, 0)
    """Fewest and most pictures that a prompt brings: (1, 1) for a video's first frame, (1, n) for editing."""
    reference_tokens: bool = False
    """A condition picture stands as as many tokens as a sample of its size, beside the sample's."""

    def tokens_of(self, sampling: Sampling) -> int:
        """Those of the picture or video, of as many references as a prompt may bring, and of the prompt."""
        params = sampling_as(DiffusionSamplingParams, sampling, self.family)
        pictures = 1 + (self.condition_images[1] if self.reference_tokens else 0)
        return pictures * self.image_seq_len(params) + params.max_sequence_length

    def images_per_prompt(self) -> tuple[int, int]:
        """Those that condition what is drawn."""
        return self.condition_images

    def check(self, sampling: Sampling) -> None:
        """The size divides, the frames are on the grid, the guidance is one that the model has."""
        params = sampling_as(DiffusionSamplingParams, sampling, f"{self.family} samples by")
        self.latent_shape(params)
        self.guidance_of(params)

    def guidance_of(self, params: DiffusionSamplingParams) -> GuidanceLike:
        """The guidance that sampling settings ask for. Raises ValueError where the model cannot be guided so."""
        return self.guidance.at(params.guidance_scale, params.guidance_scale_2, params.guidance_passes)

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """[C, H, W] of a picture's latent, [C, F, H, W] of a video's. Raises ValueError when a size does not divide."""
        multiple = self.vae_scale * self.patch_size
        for name, side in (("height", params.height), ("width", params.width)):
            if side % multiple or side <= 0:
                near = max(multiple, round(side / multiple) * multiple)
                raise ValueError(
                    f"sampling.{name}={side} is not a positive multiple of {multiple} "
                    f"(VAE scale {self.vae_scale} x patch {self.patch_size} of {self.family}). Use {near}"
                )
        rows, columns = params.height // self.vae_scale, params.width // self.vae_scale
        return (self.latent_channels, *self._latent_frames(params.num_frames), rows, columns)

    def _latent_frames(self, num_frames: int) -> tuple[int, ...]:
        """(F,) latent frames of a video, () of a picture."""
        if self.frame_scale is None:
            if num_frames != 1:
                raise ValueError(
                    f"sampling.num_frames={num_frames}: {self.family} draws pictures. Remove it, or take a video model"
                )
            return ()
        if (num_frames - 1) % self.frame_scale:
            near = round((num_frames - 1) / self.frame_scale) * self.frame_scale + 1
            raise ValueError(
                f"sampling.num_frames={num_frames}: (num_frames - 1) is not a multiple of {self.frame_scale}, the "
                f"frames that a latent frame of {self.family} stands for. Use {near}"
            )
        return ((num_frames - 1) // self.frame_scale + 1,)

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        """The number of image tokens."""
        _, *frames, rows, columns = self.latent_shape(params)
        return math.prod(frames) * rows * columns // self.patch_size**2


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

    def images_per_prompt(self) -> tuple[int, int | None]:
        """Any number where the model sees."""
        return (0, None) if self.sees else (0, 0)

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
