"""Guidance towards the prompt: the conditions of each forward pass, and how the velocities are combined.

    classic          v = v_uncond + w (v_cond - v_uncond)                        Ho & Salimans 2022 (arXiv:2207.12598)
    norm-corrected   the same, each token rescaled to its norm in v_cond         Qwen-Image (arXiv:2508.02324)
    renormalised     the same, scaled down to at most the norm of v_cond         BAGEL (arXiv:2505.14683)
    line norms       the same, each line of a channel rescaled likewise          Lumina-Image 2.0 (arXiv:2503.21758)
    embedded         one forward pass; w is an input of the network              FLUX.1-dev, HunyuanVideo
    per expert       w depends on the expert for the noise level                 Wan 2.2 (arXiv:2503.20314)
    none             one forward pass; the model was distilled for w = 1

The facts of a model have its kind of guidance at scale 1; sampling makes a copy with the method `at`. Conditions of the
unconditional branch have the prefix `negative_`. A condition without a negative one is used in both branches. Both
branches get gradients, or only the conditional one (`gradient`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, get_args

import torch
from torch import Tensor
from torch.linalg import vector_norm

from unirl.sde.kernels import check_choice
from unirl.types.conditions import Conditions, ScaleCondition, TextEmbedCondition
from unirl.types.protocols import GuidanceGradient

if TYPE_CHECKING:
    from jaxtyping import Float

NEGATIVE = "negative_"
GUIDANCE = "guidance"
"""Name of the condition with an embedded scale."""
Network = Callable[[Tensor, Tensor, Conditions], Tensor]
RenormType = Literal["global", "channel", "text_channel"]
NORM_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """Classic guidance, and the base class of all other kinds."""

    scale: float = 1.0
    """w; 1 = no guidance, which needs no negative condition."""
    passes: int = 1
    """1 = one forward pass of a doubled batch; 2 = two forward passes with half the peak memory."""
    gradient: GuidanceGradient = "both"
    """With `conditional`, v_uncond is detached: a constant of the gradient."""

    def at(self, scale: float, scale_2: float | None = None, passes: int = 1) -> Self:
        """The same kind at another scale. Raises ValueError if the model does not support it."""
        if scale_2 is not None:
            raise ValueError(
                f"sampling.guidance_scale_2={scale_2:g} is for models with two experts (Wan 2.2 A14B); remove it"
            )
        return replace(self, scale=scale, passes=passes)

    def with_gradient(self, gradient: GuidanceGradient) -> Self:
        """The same kind, with gradients through one branch or both. Raises ValueError for another word."""
        check_choice("sampling.guidance_gradient", gradient, get_args(GuidanceGradient))
        return replace(self, gradient=gradient)

    @property
    def active(self) -> bool:
        """True if there is an unconditional branch."""
        return self.scale != 1.0

    def off(self) -> Guidance:
        """The same kind without the unconditional branch."""
        return replace(self, scale=1.0)

    def scale_at(self, sigma: float) -> float:
        """The scale at a noise level; 1 = no guidance there."""
        return self.scale

    def combine(
        self, uncond: Float[Tensor, "B *latent"], cond: Float[Tensor, "B *latent"], sigma: Float[Tensor, "B"]
    ) -> Float[Tensor, "B *latent"]:
        """The guided velocity from the velocities of both branches at noise levels `sigma`."""
        return uncond + self.scale * (cond - uncond)

    def feeds(self, conditions: Conditions) -> tuple[Conditions, ...]:
        """The conditions of each forward pass. They are computed once and used at every step."""
        positive = {name: c for name, c in conditions.items() if not name.startswith(NEGATIVE)}
        if not self.active:
            return (positive,)
        if len(positive) == len(conditions):
            raise ValueError(
                f"guidance_scale={self.scale} needs a condition {NEGATIVE + 'text'!r}; there are {sorted(conditions)}"
            )
        negative = {name: conditions.get(NEGATIVE + name, c) for name, c in positive.items()}
        if self.passes == 2:
            return (negative, positive)
        return ({name: type(c).concat([negative[name], c]) for name, c in positive.items()},)

    def velocity(
        self, network: Network, x: Float[Tensor, "B *latent"], sigma: Float[Tensor, "B"], feeds: tuple[Conditions, ...]
    ) -> Float[Tensor, "B *latent"]:
        """The guided velocity at `x` and `sigma`. `feeds` is the result of the method `feeds`."""
        if not self.active:
            return network(x, sigma, feeds[0])
        if self.passes == 2:
            uncond = self._differentiated(network(x, sigma, feeds[0]))
            return self.combine(uncond, network(x, sigma, feeds[1]), sigma)
        uncond, cond = network(torch.cat([x, x]), torch.cat([sigma, sigma]), feeds[0]).chunk(2)
        return self.combine(self._differentiated(uncond), cond, sigma)

    def _differentiated(self, uncond: Tensor) -> Tensor:
        # Gradients stay enabled in the forward pass: autocast would keep weights that it casts without gradients.
        return uncond if self.gradient == "both" else uncond.detach()


@dataclass(frozen=True, kw_only=True)
class LineNormGuidance(Guidance):
    """Classic guidance, rescaled so that each line of a latent channel has its norm in the conditional branch."""

    def combine(
        self, uncond: Float[Tensor, "B *latent"], cond: Float[Tensor, "B *latent"], sigma: Float[Tensor, "B"]
    ) -> Float[Tensor, "B *latent"]:
        guided = super().combine(uncond, cond, sigma)
        return guided * (self.norms(cond) / self.norms(guided))

    def norms(self, v: Float[Tensor, "B *latent"]) -> Float[Tensor, "..."]:
        """The norms that are kept, in a shape that broadcasts over `v`."""
        norms: Tensor = vector_norm(v, dim=-1, keepdim=True)
        return norms


@dataclass(frozen=True, kw_only=True)
class NormCorrectedGuidance(LineNormGuidance):
    """Classic guidance, rescaled so that each token has the norm that it has in the conditional branch."""

    patch_size: int
    """Latent elements per token along one side: the norm is over the C patch_size^2 elements of a token."""

    def norms(self, v: Float[Tensor, "B C H W"]) -> Float[Tensor, "B 1 H W"]:
        return token_norms(v, self.patch_size)


def token_norms(v: Float[Tensor, "B C H W"], patch_size: int) -> Float[Tensor, "B 1 H W"]:
    """The norm of the C patch_size^2 elements of each token, at each of its places."""
    p = patch_size
    squares = v.square().sum(1)  # [B, H, W]
    rows, columns = squares.shape[1] // p, squares.shape[2] // p
    patches = squares.reshape(len(v), rows, p, columns, p).sum((2, 4))
    norms: Tensor = patches.sqrt().repeat_interleave(p, 1).repeat_interleave(p, 2)
    return norms[:, None]


@dataclass(frozen=True, kw_only=True)
class RenormGuidance(Guidance):
    """Classic guidance at some noise levels, scaled down where its norm exceeds that of the conditional branch.

    g = v_uncond + w (v_cond - v_uncond)
    v = s g with s = clamp(|v_cond| / |g|, renorm_min, 1)    if interval[0] < sigma <= interval[1]
    v = v_cond                                               otherwise

    Both branches run at every noise level.
    """

    renorm: RenormType = "global"
    """The norm is that of the whole sample, or with `channel` of each token. `text_channel` renormalises before a
    guidance towards images, which is not available, so it equals `channel`."""
    renorm_min: float = 0.0
    """The smallest s; 1 = no renormalisation."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Noise levels with guidance."""
    patch_size: int
    """Latent elements per token along one side."""

    def __post_init__(self) -> None:
        check_choice("cfg_renorm_type", self.renorm, get_args(RenormType))
        if not 0.0 <= self.renorm_min <= 1.0:
            raise ValueError(f"cfg_renorm_min={self.renorm_min:g} must lie in [0, 1]; 1 = no renormalisation")
        if len(self.interval) != 2 or not 0.0 <= self.interval[0] < self.interval[1] <= 1.0:
            raise ValueError(
                f"cfg_interval={list(self.interval)} must be two increasing noise levels in [0, 1], such as [0.4, 1.0]"
            )

    def at(self, scale: float, scale_2: float | None = None, passes: int = 1) -> Self:
        """The same kind at another scale. Raises ValueError for a scale below 1."""
        if scale < 1.0:
            raise ValueError(f"sampling.guidance_scale={scale:g}: this model has no guidance below 1. Use 1, or more")
        return super().at(scale, scale_2, passes)

    def combine(
        self, uncond: Float[Tensor, "B C H W"], cond: Float[Tensor, "B C H W"], sigma: Float[Tensor, "B"]
    ) -> Float[Tensor, "B C H W"]:
        guided = super().combine(uncond, cond, sigma)
        factor = (self.norms(cond) / (self.norms(guided) + NORM_EPSILON)).clamp(self.renorm_min, 1.0)
        low, high = self.interval
        has_guidance = ((sigma > low) & (sigma <= high)).view(-1, 1, 1, 1)
        return torch.where(has_guidance, guided * factor, cond)

    def scale_at(self, sigma: float) -> float:
        low, high = self.interval
        return self.scale if low < sigma <= high else 1.0

    def norms(self, v: Float[Tensor, "B C H W"]) -> Float[Tensor, "B 1 _ _"]:
        """The norms that are compared, in a shape that broadcasts over `v`."""
        if self.renorm != "global":
            return token_norms(v, self.patch_size)
        norms: Tensor = vector_norm(v, dim=(1, 2, 3), keepdim=True)
        return norms


@dataclass(frozen=True, kw_only=True)
class EmbeddedGuidance(Guidance):
    """A guidance-distilled model: one forward pass, which reads the scale from the condition `guidance`."""

    @property
    def active(self) -> bool:
        return False

    def off(self) -> Guidance:
        """This object: the scale is an input of the network, like the prompt."""
        return self

    def feeds(self, conditions: Conditions) -> tuple[Conditions, ...]:
        [positive] = super().feeds(conditions)
        text = positive["text"]
        assert isinstance(text, TextEmbedCondition)
        scale = torch.full((len(text),), self.scale, device=text.embeds.device)
        return ({**positive, GUIDANCE: ScaleCondition(scale=scale)},)


@dataclass(frozen=True, kw_only=True)
class ExpertGuidance(Guidance):
    """A model with two experts: `scale` at noise levels sigma >= boundary, `scale_2` below."""

    scale_2: float = 1.0
    boundary: float
    """The noise level sigma at which the model changes experts."""

    def at(self, scale: float, scale_2: float | None = None, passes: int = 1) -> Self:
        """The same kind at other scales; an absent `scale_2` is `scale`."""
        return replace(self, scale=scale, scale_2=scale if scale_2 is None else scale_2, passes=passes)

    @property
    def active(self) -> bool:
        return self.scale != 1.0 or self.scale_2 != 1.0

    def off(self) -> Guidance:
        return replace(self, scale=1.0, scale_2=1.0)

    def scale_at(self, sigma: float) -> float:
        return self.scale if sigma >= self.boundary else self.scale_2

    def combine(
        self, uncond: Float[Tensor, "B *latent"], cond: Float[Tensor, "B *latent"], sigma: Float[Tensor, "B"]
    ) -> Float[Tensor, "B *latent"]:
        scales = torch.where(sigma >= self.boundary, self.scale, self.scale_2)
        return uncond + scales.view(-1, *[1] * (cond.ndim - 1)) * (cond - uncond)


@dataclass(frozen=True, kw_only=True)
class NoGuidance(Guidance):
    """A model that was distilled to sample without guidance, in one forward pass."""

    def at(self, scale: float, scale_2: float | None = None, passes: int = 1) -> Self:
        if scale != 1.0:
            raise ValueError(
                f"sampling.guidance_scale={scale:g}: this model was distilled to be sampled without guidance. "
                "Use guidance_scale=1"
            )
        return super().at(scale, scale_2, passes)
