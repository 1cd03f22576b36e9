"""Contracts between packages: Protocols, and dataclasses with what a part needs or offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from unirl.types.conditions import Conditions

PromptT = TypeVar("PromptT")
OldLogp = Literal["native", "replay", "none"]
"""native: the engine reports them. replay: it reports what the trainer needs to compute them. none: neither."""
SigmaGrid = Literal["clean", "diffusers", "unipc"]
"""Noise levels before the shift; see `SigmaSchedule.grid`."""
GuidanceGradient = Literal["both", "conditional"]
"""The branches of guidance through which gradients flow."""
State = dict[str, Any]
"""State that can be written as JSON: numbers, strings, booleans, None, and lists or mappings of these."""


@dataclass(frozen=True)
class Previous:
    """Start of the last deterministic step and its clean prediction. Multistep solvers read it."""

    sigma: float
    x0: Tensor  # [B, *latent]


class Transition(Protocol):
    """A distribution over the next point of a denoising trajectory."""

    @property
    def mean(self) -> Tensor:
        """[B, *latent] float32 or float64."""

    @property
    def std(self) -> Tensor:
        """[] or [B], with the dtype and device of the mean."""

    def sample(self, noise: Tensor) -> Tensor:
        """[B, *latent] mean + std * noise."""

    def log_prob(self, x_next: Tensor) -> Tensor:
        """[B] nats, mean over latent elements; `x_next` is detached."""


@runtime_checkable
class Kernel(Protocol):
    """A transition kernel: one denoising step as a Gaussian. Immutable, equal by value."""

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

    def has_density(self, step: int, num_steps: int) -> bool:
        """True if step `step` of `num_steps` is stochastic. The last step never is."""


@runtime_checkable
class StepChoice(Protocol):
    """Chooses the stochastic denoising steps, which are trained, as a pure function of the step of the loop."""

    def choose(self, step: int, num_inference_steps: int, seed: int) -> tuple[int, ...]:
        """Sorted step numbers within [0, num_inference_steps - 2]."""


class SigmaScheduleLike(Protocol):
    """The noise levels of a model."""

    def on_grid(self, grid: SigmaGrid) -> Self:
        """The same schedule with other levels before the shift."""

    def sigmas(self, num_inference_steps: int, image_seq_len: int) -> Tensor:
        """[T + 1] float32, decreasing, last entry 0."""


class GuidanceLike(Protocol):
    """The kind of guidance of a model, at some scale."""

    @property
    def active(self) -> bool:
        """True if there is an unconditional branch, which needs a negative prompt."""

    def at(self, scale: float, scale_2: float | None = None, passes: int = 1) -> Self:
        """The same kind at another scale. Raises ValueError if the model does not support it."""

    def with_gradient(self, gradient: GuidanceGradient) -> Self:
        """The same kind, with gradients through one branch or both."""

    def off(self) -> GuidanceLike:
        """The same kind without the unconditional branch."""

    def scale_at(self, sigma: float) -> float:
        """The scale at a noise level; 1 = no guidance there."""

    def combine(self, uncond: Tensor, cond: Tensor, sigma: Tensor) -> Tensor:
        """The guided velocity [B, *latent] from those of both branches at noise levels `sigma` [B]."""

    def feeds(self, conditions: Conditions) -> tuple[Conditions, ...]:
        """The conditions of each forward pass. They are computed once and used at every step."""

    def velocity(
        self,
        network: Callable[[Tensor, Tensor, Conditions], Tensor],
        x: Tensor,
        sigma: Tensor,
        feeds: tuple[Conditions, ...],
    ) -> Tensor:
        """The guided velocity [B, *latent] at x [B, *latent] and sigma [B]. `feeds` comes from the method `feeds`."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state changes between steps. It must be registered with the trainer, which saves the state."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


REFERENCE: Final = "reference"
"""Name of the snapshot of the weights before training."""

Quantity = Literal["logp", "mean", "velocity", "value", "parts"]


@dataclass(frozen=True)
class Anchor:
    """An output of weights other than those that are being updated. A loss reads it."""

    snapshot: str
    """Name of a snapshot of the weights, or `live` for the weights before the first update of the step."""
    quantity: Quantity


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """State of the run at an update, as schedules read it. Equal on every rank."""

    progress: float = 0.0
    """Fraction of the run that is done, in [0, 1]."""
    kl_scale: float = 1.0
    """Current factor of an adaptive controller on the KL coefficient of the recipe."""
    totals: tuple[float, ...] = ()
    """Sums over all rows of the step on all ranks, for losses with `Needs.totals`."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Requirements of an algorithm. They are checked before anything is built."""

    behaviour_logp: bool = False
    """The loss reads log-probs computed by the engine."""
    density: bool = True
    """The loss needs stochastic steps with a density."""
    snapshots: tuple[str, ...] = ()
    """Named weight snapshots that must exist."""
    rows_together: int = 1
    """Number of adjacent rows that must stay in one micro-batch."""
    pairs: int = 0
    """Largest number of (better, worse) pairs per group to train on; 0 = train on all samples instead of pairs."""
    multi_update: bool = True
    """The loss stays valid for more than one update per step."""
    ema_rollout: bool = False
    """Samples must come from a snapshot instead of the live weights."""
    value: bool = False
    """A value head is trained together with the policy."""
    totals: bool = False
    """The loss reads sums over all rows of a step. They and live anchors are computed before the first update."""
    differentiable_reward: bool = False
    """The loss differentiates the reward with respect to the samples."""
    advantages: bool = True
    """The loss reads advantages, so groups of one sample or of equal rewards give no gradient."""
    own_samples: bool = True
    """The samples must come from the policy. If False, the loss can also train on recorded samples."""

    @property
    def fits_old_samples(self) -> bool:
        """The loss accounts for samples of weights that differ from those it trains, or does not depend on them."""
        return self.behaviour_logp or not (self.density and self.own_samples)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features that an engine, a reward or a pipeline supports."""

    old_logp: OldLogp = "replay"
    """The origin of the log-probs of an engine's samples under the policy that sampled them."""
    snapshots: bool = False
    """The engine can sample from a snapshot by name."""
    dedicated: bool = False
    """The engine has its own copy of the weights and needs a `sync` block; else it uses the trained weights."""
    remote: bool = False
    """The engine's weights live in a server. Its process has a network without storage, which only names parameters."""
    adapters: bool = False
    """Weight sync can send adapters to the engine. Else they are merged into the weights that are sent."""
    pauses: bool = False
    """The engine, or a pipeline within it, can go on with responses that were begun earlier."""
    tools: bool = False
    """The engine can run tools within a response."""
    differentiable: bool = False
    """The scores of a reward, or the samples of a pipeline, have a gradient."""
    recorded: bool = False
    """The engine returns recorded samples instead of generating; the reward reads what was recorded about them."""
    modalities: tuple[str, ...] = ()


class WeightSource(Protocol):
    """Trained weights: the live ones, and snapshots by name."""

    updates: int
    """Number of optimizer updates behind the live weights."""

    def weights(self, name: str) -> AbstractContextManager[None]:
        """Context in which the module has the weights of a snapshot. Raises if gradients are enabled."""

    def sampling(self, gather: bool = True) -> AbstractContextManager[None]:
        """Context for sampling: eval mode, no gradients, weights gathered once, or block by block in each forward."""


class DataSource(Stateful, Protocol[PromptT]):
    """An endless sequence of prompts. A prompt's `size` is the (height, width) of its samples."""

    prompts: Sequence[PromptT]
    """All prompts that `take` may return, as far as they are known beforehand."""

    def take(self, count: int, size: tuple[int, int] | None = None) -> Sequence[PromptT]:
        """The next `count` prompts, all of one size: `size`, or the one that is due. Moves a cursor, which is state."""

    def sized(self, prompts: Sequence[PromptT]) -> Sequence[PromptT]:
        """Other prompts, each with the size that its samples have with this source."""

    def eval_prompts(self, max_prompts: int) -> Sequence[PromptT]:
        """The first `max_prompts` held-out prompts, in file order."""


TORCH_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by their names in recipes."""

DtypeName = Literal["fp32", "bf16", "fp16"]
VaeDtype = Literal["auto", "fp32", "bf16"]
