"""Facts about models, so that recipes do not have to repeat them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from unirl.types.environments import INSTRUCTION, ActionSpace, EnvironmentSpaces
from unirl.types.protocols import GuidanceLike, SigmaScheduleLike
from unirl.types.sampling import (
    ActionSamplingParams,
    ARSamplingParams,
    DiffusionSamplingParams,
    ImageTokenSamplingParams,
    Sampling,
    sampling_as,
)

ROWS_AT_ONCE = 8
"""Rows of one forward in rollout, unless a cache decides."""
CACHE_BYTES = 24 * 2**30
"""What the keys and values of all slots may take on an accelerator: less than a third of a device of 80 GB."""
PREFILL_TOKENS = 16384
"""Largest number of prompt tokens in one prefill forward. A longer prompt gets a forward of its own."""
MAX_SLOTS = 256
"""A step reads all weights for any number of slots. With this many, it computes about as long as it reads."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts(ABC):
    """Facts that every model has. The subclasses add those of a domain."""

    family: str
    trainable_attr: str = "transformer"
    """Name of the module of the bundle that is trained."""
    block_class_names: tuple[str, ...]
    """Names of the module classes that are sharded, checkpointed and compiled one by one."""
    expert_class_names: tuple[str, ...] = ()
    """Class names of expert networks. A forward pass may run only some of them, so each is gathered on demand."""
    lora_targets: tuple[str, ...]
    """Suffixes of the names of the modules that get LoRA adapters."""
    batch_multiple: int = 1
    """Batches are padded to a multiple of this, so that the bits of a row do not depend on other rows."""
    condition_images: tuple[int, int | None] = (0, 0)
    """Smallest and largest number of images in a prompt: (1, 1) for a first frame, (0, None) for any number."""

    def of(self, sampling: Sampling) -> ModelFacts:
        """The facts of the policy that samples with these settings. One network may be several policies."""
        return self

    @abstractmethod
    def tokens_of(self, sampling: Sampling) -> int:
        """Largest number of tokens that the trained network reads for one sample."""

    @abstractmethod
    def check(self, sampling: Sampling) -> None:
        """Raises ValueError, with the key and the nearest valid value, if the model cannot sample like this."""

    def pinned(self, sampling: Sampling, step: int) -> Sampling:
        """The settings of the request of training step `step`, with nothing left for the engine to decide."""
        return sampling

    def rows_at_once(self, sampling: Sampling, dtype_bytes: int) -> int:
        """Rows of one forward in rollout on an accelerator, unless the recipe sets `rollout.forward_batch_size`."""
        return ROWS_AT_ONCE

    @property
    def normalized(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes by key of the inputs that the model scales by their running statistics."""
        return {}


@dataclass(frozen=True, kw_only=True)
class LatentFacts(ModelFacts):
    """Facts about a model that denoises latents."""

    latent_channels: int
    vae_scale: int
    """Pixels per latent element along one side; 1 for models in pixel space."""
    patch_size: int
    """Latent elements per token along one side."""
    frame_scale: int | None = None
    """Video frames per latent frame after the first; None for image models."""
    fps: float = 16.0
    """Frames per second of a video."""
    schedule: SigmaScheduleLike
    timestep_scale: float = 1000.0
    """The network gets timestep_scale * sigma as its timestep."""
    guidance: GuidanceLike
    """The kind of guidance, at scale 1."""
    text_width: int | None = None
    """Width of the pooled text embedding (or mean of token embeddings) that a value head reads; None = no text."""
    extra_text_tokens: int = 0
    """Text tokens in addition to `max_sequence_length`, such as those of a second encoder."""
    largest_side: int | None = None
    """Pixels of the longest side for which the model has positions. None for no limit."""
    text_is_masked: bool = False
    """Attention excludes the padding of the text, so a forward reads no more text tokens than its prompts have."""
    reference_tokens: bool = False
    """Condition images are extra tokens in the sequence, as many per image as for the sample."""
    text: LanguageFacts | None = None
    """The facts of the language model that the same network is. None for a network that only denoises."""

    def of(self, sampling: Sampling) -> ModelFacts:
        return self.text if self.text is not None and isinstance(sampling, ARSamplingParams) else self

    def tokens_of(self, sampling: Sampling) -> int:
        """Tokens of the sample, of the largest number of condition images, and of the prompt."""
        params = sampling_as(DiffusionSamplingParams, sampling, self.family)
        num_images = 1 + ((self.condition_images[1] or 0) if self.reference_tokens else 0)
        return num_images * self.image_seq_len(params) + self.text_seq_len(params)

    def text_seq_len(self, params: DiffusionSamplingParams) -> int:
        """The number of text tokens."""
        return params.max_sequence_length + self.extra_text_tokens

    def pinned(self, sampling: Sampling, step: int) -> DiffusionSamplingParams:
        """Chooses the stochastic steps, and takes the schedule of the recipe or else of the model."""
        params = sampling_as(DiffusionSamplingParams, sampling, f"{self.family} samples with")
        if params.sigmas is not None:
            return params.pinned(step, params.sigmas)
        schedule, seq_len = self.schedule_of(params), self.image_seq_len(params)

        def levels(num_steps: int) -> tuple[float, ...]:
            return tuple(schedule.sigmas(num_steps, seq_len).tolist())

        return params.pinned(step, levels(params.num_inference_steps), levels)

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError unless size and number of frames fit the model and the guidance is supported."""
        params = sampling_as(DiffusionSamplingParams, sampling, f"{self.family} samples with")
        self.latent_shape(params)
        self.guidance_of(params)
        self.schedule_of(params)
        for name, side in (("height", params.height), ("width", params.width)):
            if self.largest_side is not None and side > self.largest_side:
                raise ValueError(
                    f"sampling.{name}={side}: {self.family} has positions for {self.largest_side} pixels. Use "
                    f"{self.largest_side} or less"
                )

    def guidance_of(self, params: DiffusionSamplingParams) -> GuidanceLike:
        """The guidance at the scales of `params`. Raises ValueError if the model does not support it."""
        guidance = self.guidance.at(params.guidance_scale, params.guidance_scale_2, params.guidance_passes)
        return guidance.with_gradient(params.guidance_gradient)

    def schedule_of(self, params: DiffusionSamplingParams) -> SigmaScheduleLike:
        """The schedule of the model on the grid of `params`. Raises ValueError for an unknown grid."""
        return self.schedule if params.sigma_grid is None else self.schedule.on_grid(params.sigma_grid)

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """Latent shape: [C, H, W] for images, [C, F, H, W] for videos. Raises ValueError if the size does not fit."""
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
        """(F,) for a video with F latent frames, () for an image."""
        if self.frame_scale is None:
            if num_frames != 1:
                raise ValueError(
                    f"sampling.num_frames={num_frames}: {self.family} generates images. Remove it, or use a video model"
                )
            return ()
        if (num_frames - 1) % self.frame_scale:
            near = round((num_frames - 1) / self.frame_scale) * self.frame_scale + 1
            raise ValueError(
                f"sampling.num_frames={num_frames}: (num_frames - 1) is not a multiple of {self.frame_scale}, the "
                f"frames per latent frame of {self.family}. Use {near}"
            )
        return ((num_frames - 1) // self.frame_scale + 1,)

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        """The number of image tokens."""
        _, *frames, rows, columns = self.latent_shape(params)
        return math.prod(frames) * rows * columns // self.patch_size**2


@dataclass(frozen=True, kw_only=True)
class LanguageFacts(ModelFacts):
    """Facts about a language model."""

    trainable_attr: str = "lm"
    vocab_size: int
    """V, the number of rows of the embedding."""
    hidden_size: int
    """D, the width of the last hidden state."""
    context_length: int
    """Largest number of tokens of a prompt and its response together."""
    cache_width: int = 0
    """Numbers that sampling caches per token: keys and values of all layers."""

    def tokens_of(self, sampling: Sampling) -> int:
        """Tokens of the longest prompt and the longest response."""
        params = sampling_as(ARSamplingParams, sampling, self.family)
        return params.max_prompt_tokens + params.max_new_tokens

    def rows_at_once(self, sampling: Sampling, dtype_bytes: int) -> int:
        """As many slots, in eights, as CACHE_BYTES hold at their greatest length; at least 8, at most MAX_SLOTS."""
        slot_bytes = self.tokens_of(sampling) * self.cache_width * dtype_bytes * sampling.rows_per_sample
        return max(min(CACHE_BYTES // max(slot_bytes, 1) // 8 * 8, MAX_SLOTS), ROWS_AT_ONCE)

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError unless the longest prompt and the longest response fit the context together."""
        params = self._params(sampling)
        if params.max_prompt_tokens + params.max_new_tokens > self.context_length:
            left = self.context_length - params.max_prompt_tokens
            advice = f"Use max_new_tokens={left}" if left > 0 else "Lower max_prompt_tokens"
            raise ValueError(
                f"sampling.max_prompt_tokens={params.max_prompt_tokens} + max_new_tokens={params.max_new_tokens} is "
                f"more than the context of {self.family}, {self.context_length} tokens. {advice}"
            )

    def _params(self, sampling: Sampling) -> ARSamplingParams:
        """The settings of texts. Raises ValueError for those of anything else."""
        if isinstance(sampling, ImageTokenSamplingParams):
            raise ValueError(
                f"{self.family} samples texts, but the settings are {type(sampling).__name__}, for tokens of images. "
                f"Write sampling._target_={ARSamplingParams.__module__}.{ARSamplingParams.__qualname__}"
            )
        return sampling_as(ARSamplingParams, sampling, f"{self.family} samples with")


@dataclass(frozen=True, kw_only=True)
class ImageTokenFacts(LanguageFacts):
    """Facts about a language model that writes images as tokens. `vocab_size` is the size of the codebook."""

    image_size: int
    """Pixels along each side of an image."""
    num_image_tokens: int
    """Number of tokens of an image."""

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError unless the size and the number of tokens are the model's own, and fit the context."""
        params = self._params(sampling)
        side, count = self.image_size, self.num_image_tokens
        if (params.height, params.width) != (side, side):
            raise ValueError(
                f"sampling.height={params.height}, width={params.width}: {self.family} draws images of {side} x {side} "
                f"pixels alone. Use sampling.height={side} sampling.width={side}, and leave data_source.sizes out"
            )
        if params.max_new_tokens != count:
            raise ValueError(
                f"sampling.max_new_tokens={params.max_new_tokens}: an image of {self.family} has {count} tokens. "
                f"Use sampling.max_new_tokens={count}"
            )
        super().check(sampling)

    def _params(self, sampling: Sampling) -> ImageTokenSamplingParams:
        return sampling_as(ImageTokenSamplingParams, sampling, f"{self.family} samples with")


@dataclass(frozen=True, kw_only=True)
class ActionFacts(ModelFacts):
    """Facts about a policy that acts in environments."""

    trainable_attr: str = "policy"
    block_class_names: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] = ()
    observations: Mapping[str, tuple[int, ...]]
    """The shapes of the observations that it reads, by key."""
    actions: ActionSpace
    chunk: int = 1
    """Actions that it decides on at a time."""
    is_squashed: bool = False
    """Executed actions lie in (-1, 1), and they and their log-probs are differentiable functions of the noise."""
    has_entropy: bool = True
    """The entropy of a decision has a closed form."""
    has_parts: bool = False
    """A decision has parts with log-probs of their own, such as tokens."""
    can_imitate: bool = True
    """It has a loss of imitating actions that somebody else took."""
    is_normalized: bool = False
    """Running statistics scale the observations that are vectors."""
    tokens_per_decision: int = 1
    """Tokens that the network reads for one decision."""
    hidden_size: int = 0
    """Numbers of the network's own state from which values are computed. 0: there is none."""
    encoded: Mapping[str, tuple[int, ...]] | None = None
    """The shapes of what is recorded and learned from, by key, if a frozen network reads the observations."""

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of what the trained network and critics read, by key."""
        return self.observations if self.encoded is None else self.encoded

    @property
    def normalized(self) -> Mapping[str, tuple[int, ...]]:
        vectors = {key: tuple(shape) for key, shape in self.inputs.items() if len(shape) != 3}
        return vectors if self.is_normalized else {}

    def tokens_of(self, sampling: Sampling) -> int:
        """The tokens of the decisions of a row; of one decision if the settings do not bound them."""
        decisions = sampling_as(ActionSamplingParams, sampling, self.family).max_steps or 1
        return decisions * self.tokens_per_decision

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError for settings of something else than actions."""
        sampling_as(ActionSamplingParams, sampling, f"{self.family} samples with")

    def misfit(self, spaces: EnvironmentSpaces) -> str | None:
        """Why the policy cannot act in environments with these spaces, and the way out; None if it can."""
        for key, shape in self.observations.items():
            if key == INSTRUCTION:
                continue
            if key not in spaces.observations:
                shown = ", ".join(spaces.observations)
                return (
                    f"the policy reads the observation {key!r}, and the environment shows {shown}. Name these in "
                    "bundle.observations, or the environment that shows what the policy reads"
                )
            if tuple(shape) != tuple(spaces.observations[key]):
                return (
                    f"the policy reads {key!r} of shape {list(shape)}, and the environment shows "
                    f"{list(spaces.observations[key])}. Set the shape of the environment in bundle.observations"
                )
        if self.actions != spaces.actions:
            is_size = type(self.actions) is type(spaces.actions)
            way_out = (
                "Set their number in bundle.actions"
                if is_size
                else "Take a bundle for these: CategoricalBundle of unirl.models.policies.bundle has discrete actions, "
                "GaussianBundle and FlowBundle have continuous ones"
            )
            return (
                f"the policy takes {self.actions.describe()}, and the environment has {spaces.actions.describe()}. "
                f"{way_out}"
            )
        return None


@dataclass(frozen=True)
class LoraSpec:
    """The settings of a module's adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Suffixes of the names of linear layers."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank
