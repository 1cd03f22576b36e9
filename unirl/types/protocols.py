"""The contracts that packages meet at: what a part offers, what it needs, what a model knows of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from unirl.types.conditions import Conditions
    from unirl.types.reward import RewardRequest, RewardResponse

State = dict[str, Any]
"""JSON-ready state: numbers, strings, booleans, None, and lists or mappings of these."""


@dataclass(frozen=True)
class Previous:
    """The last deterministic step's point and its clean prediction, for multistep solvers."""

    sigma: float
    x0: Tensor  # [B, *latent]


class Transition(Protocol):
    """A distribution over the next point of a denoising trajectory."""

    @property
    def mean(self) -> Tensor:
        """[B, *latent] float32 or float64."""
        ...

    @property
    def std(self) -> Tensor:
        """[] or [B], dtype and device of the mean."""
        ...

    def sample(self, noise: Tensor) -> Tensor:
        """[B, *latent] mean + std * noise."""
        ...

    def log_prob(self, x_next: Tensor) -> Tensor:
        """[B] nats, mean over latent elements; `x_next` is detached."""
        ...


@runtime_checkable
class Kernel(Protocol):
    """One denoising transition as a Gaussian: the choice of SDE. Immutable, equal by value."""

    preserves: ClassVar[str]
    multistep: ClassVar[bool]

    def transition(
        self,
        x: Tensor,
        v: Tensor,
        sigma: float | Tensor,
        sigma_next: float | Tensor,
        previous: Previous | None = None,
    ) -> Transition:
        """The distribution of x at `sigma_next` given x at `sigma` and the velocity v there."""
        ...

    def has_density(self, step: int, num_steps: int) -> bool:
        """Whether step `step` of `num_steps` is stochastic. The last step never is."""
        ...


@runtime_checkable
class StepChoice(Protocol):
    """Which denoising steps are stochastic and trained: a pure function of the step of the loop."""

    def choose(self, step: int, num_inference_steps: int, seed: int) -> tuple[int, ...]:
        """Sorted step numbers within [0, num_inference_steps - 2]."""
        ...


class SigmaScheduleLike(Protocol):
    """A model's own noise levels."""

    def sigmas(self, num_inference_steps: int, image_seq_len: int) -> Tensor:
        """[T + 1] float32, decreasing, last entry 0."""
        ...


class GuidanceLike(Protocol):
    """A model's kind of guidance, at some scale."""

    @property
    def active(self) -> bool:
        """Whether there is an unconditional branch, which needs a negative prompt."""
        ...

    def at(self, scale: float, scale_2: float | None = None, passes: int = 1) -> Self:
        """The same kind at another scale. Raises ValueError where the model cannot be guided so."""
        ...

    def off(self) -> GuidanceLike:
        """The conditional branch alone."""
        ...

    def feeds(self, conditions: Conditions) -> tuple[Conditions, ...]:
        """The conditions of each forward: computed once, used at every step."""
        ...

    def velocity(
        self,
        network: Callable[[Tensor, Tensor, Conditions], Tensor],
        x: Tensor,
        sigma: Tensor,
        feeds: tuple[Conditions, ...],
    ) -> Tensor:
        """The guided velocity [B, *latent] at x [B, *latent] and sigma [B], with what `feeds` returned."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Something that changes between steps. State has one door: whatever has any is registered with the trainer."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


REFERENCE: Final = "reference"
"""The weight snapshot of the policy at initialisation."""

Quantity = Literal["logp", "mean", "velocity", "value"]


@dataclass(frozen=True)
class Anchor:
    """A column read from a policy that is not being trained right now."""

    snapshot: str
    """A named weight snapshot, or `live` for the weights before the first update of the step."""
    quantity: Quantity


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """Where the run stands when an update is made: what schedules read. Equal on every rank."""

    progress: float = 0.0
    """How far the run is, in [0, 1]."""
    kl_scale: float = 1.0
    """The factor on the recipe's KL coefficient that an adaptive controller has reached."""
    totals: tuple[float, ...] = ()
    """What a loss asked to be summed over all rows of the step, on all ranks (Needs.totals)."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an algorithm asks of the rest, checked before anything starts."""

    behaviour_logp: bool = False
    """The loss reads the engine's own log-probs."""
    density: bool = True
    """The loss needs stochastic steps with a density."""
    snapshots: tuple[str, ...] = ()
    """Named weight snapshots that must exist."""
    rows_together: int = 1
    """Adjacent rows that a micro-batch must not split."""
    pairs: int = 0
    """At most so many pairs of a good and a bad sample of a group are trained, and no other; 0 = all samples are."""
    multi_update: bool = True
    """More than one update per step is valid."""
    ema_rollout: bool = False
    """Sampling must run on a snapshot instead of the live weights."""
    value: bool = False
    """A value head is trained beside the policy."""
    totals: bool = False
    """The loss reads sums over all rows of a step, made before its first update: its live anchors are, too."""
    differentiable_reward: bool = False
    advantages: bool = True
    """Samples teach it by their advantages: it learns nothing from equal rewards, or from groups of one."""
    own_samples: bool = True
    """The samples must be the policy's own; a loss that says False learns from recorded ones as well."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine or a reward offers."""

    behaviour_logp: bool = False
    snapshots: bool = False
    """Can sample from a named snapshot."""
    dedicated: bool = False
    """An engine with weights of its own, which a sync block brings to it; otherwise it borrows the trained ones."""
    differentiable: bool = False
    recorded: bool = False
    """An engine that gives back samples which exist already; a reward that says what was recorded of them."""
    modalities: tuple[str, ...] = ()


class Scorer(Protocol):
    """Maps decoded media, prompts and metadata to finite component scores per sample."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that it gets, of: prompts, images, videos, texts, lengths, metadata."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def score(self, request: RewardRequest) -> RewardResponse: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...


class WeightSource(Protocol):
    """Trained weights, by name, live or as a snapshot."""

    def gather(self, name: str = "live") -> Mapping[str, Tensor]:
        """Full tensors on the CPU by parameter name."""
        ...

    def weights(self, name: str) -> AbstractContextManager[None]:
        """Run with a snapshot's weights; raises if gradients are enabled."""
        ...

    def sampling(self) -> AbstractContextManager[None]:
        """Run in eval mode without gradients, weights gathered."""
        ...


class DataSource(Protocol):
    """An endless sequence of prompts. A prompt's `size` is the (height, width) of its samples."""

    prompts: Sequence[Any]
    """All prompts that `take` may return, as far as they are known beforehand."""

    def take(self, count: int, size: tuple[int, int] | None = None) -> Sequence[Any]:
        """The next `count` prompts, all of one size: `size`, or the one that is due. Moves a cursor, which is state."""
        ...

    def sized(self, prompts: Sequence[Any]) -> Sequence[Any]:
        """Other prompts, each with the size that its samples have with this source."""
        ...

    def eval_prompts(self, max_prompts: int) -> Sequence[Any]:
        """The first `max_prompts` held-out prompts, in file order."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The spelling of dtypes in recipes."""

DtypeName = Literal["fp32", "bf16", "fp16"]
