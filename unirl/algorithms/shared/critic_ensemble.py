"""Critics of off-policy losses: an ensemble of networks Q(o, a) in one forward, its targets and the temperature."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from unirl.config.errors import IncompatibleError
from unirl.types.environments import Observations

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

Weights = Literal["live", "fixed", "target"]
EPSILON = 1e-5
"""Added to variances."""


class EnsembleLinear(nn.Module):
    """E linear layers side by side: [E, N, in] -> [E, N, out]. Starts as torch.nn.Linear does."""

    def __init__(self, members: int, size_in: int, size_out: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(size_in)
        self.weight = nn.Parameter(torch.empty(members, size_in, size_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, size_out).uniform_(-bound, bound))


class RunningNorm(nn.Module):
    """Scale and shift of a normalization of [E, N, width], and the running statistics of a batch normalization.

    Batch renormalization: Ioffe 2017, arXiv:1702.03275, eqs. in section 3. With r and d at their bounds of 1 and 0, it
    is batch normalization, as in the first `warmup` updates.
    """

    warmup: int = 1000
    momentum: float = 0.01
    r_max: float = 3.0
    d_max: float = 5.0

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, width))
        self.shift = nn.Parameter(torch.zeros(members, 1, width))
        self.register_buffer("mean", torch.zeros(members, 1, width))
        self.register_buffer("variance", torch.ones(members, 1, width))
        self.register_buffer("count", torch.zeros(()))

    def batch(
        self, x: Float[Tensor, "E N D"], scale: Float[Tensor, "E 1 D"], shift: Float[Tensor, "E 1 D"]
    ) -> Float[Tensor, "E N D"]:
        """Normalized by the statistics of the batch, which it adds to the running ones; then scaled and shifted."""
        running_mean, running_variance = self.get_buffer("mean"), self.get_buffer("variance")
        mean = x.mean(1, keepdim=True)
        centered = x - mean
        variance = centered.square().mean(1, keepdim=True)
        std, running_std = (variance + EPSILON).sqrt(), (running_variance + EPSILON).sqrt()
        with torch.no_grad():
            is_warm = self.get_buffer("count") >= self.warmup
            r = torch.where(is_warm, (std / running_std).clamp(1 / self.r_max, self.r_max), 1.0)
            d = torch.where(is_warm, ((mean - running_mean) / running_std).clamp(-self.d_max, self.d_max), 0.0)
            running_mean.lerp_(mean, self.momentum)
            running_variance.lerp_(variance, self.momentum)
            self.get_buffer("count").add_(1)
        # One pass over x for all factors, which are as small as a row.
        return torch.addcmul(shift + d * scale, centered, r / std * scale)

    def fixed(
        self, x: Float[Tensor, "E N D"], scale: Float[Tensor, "E 1 D"], shift: Float[Tensor, "E 1 D"]
    ) -> Float[Tensor, "E N D"]:
        """Normalized by the running statistics; then scaled and shifted."""
        gain = scale / (self.get_buffer("variance") + EPSILON).sqrt()
        return torch.addcmul(shift - self.get_buffer("mean") * gain, x, gain)


def check_vectors(observations: Mapping[str, Sequence[int]]) -> None:
    """Raises IncompatibleError (2020) if an observation is an image.

    Args:
        observations: shapes by key.
    """
    images = [key for key, shape in observations.items() if len(shape) == 3]
    if images:
        raise IncompatibleError(
            f"bundle.observations: {images[0]} is an image, and these critics read vectors. Use an environment "
            "with a state, or a loss on the policy's own samples, such as unirl.algorithms.action_ppo.ActionPPO"
        )


class KeptModule(nn.Module):
    """A module whose buffers are saved in checkpoints beside its trained parameters."""

    def state(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Target networks, running statistics and other buffers, by name."""
        return dict(self.named_buffers())

    def restore(self, tensors: Mapping[str, Shaped[Tensor, "..."]]) -> None:
        """Take over what `state` returned."""
        for name, buffer in self.named_buffers():
            buffer.copy_(tensors[name])


class Critics(KeptModule):
    """E critics: layers of `width` units with ReLU, each normalized on request, and the log of the temperature alpha.

    The backend trains it beside the policy, as it trains a value head.
    """

    log_alpha: nn.Parameter

    def __init__(
        self,
        observations: Mapping[str, tuple[int, ...]],
        action_size: int,
        *,
        members: int,
        width: int,
        depth: int,
        norm: str | None,
        alpha: float,
        seed: int,
    ) -> None:
        """
        Args:
            observations: shapes by key.
            norm: `layer`, `batch`, or None.
            alpha: initial temperature.
        """
        super().__init__()
        check_vectors(observations)
        self.keys, self.norm = tuple(observations), norm
        size = sum(math.prod(shape) for shape in observations.values()) + action_size
        sizes = [size, *[width] * depth]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(EnsembleLinear(members, a, b) for a, b in pairwise(sizes))
            self.output_layer = EnsembleLinear(members, width if depth else size, 1)
        normalized = sizes if norm == "batch" else sizes[1:] if norm == "layer" else []
        self.norms = nn.ModuleList(RunningNorm(members, each) for each in normalized)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha)))
        for name, parameter in self.q_parameters().items():
            self.register_buffer(target_name(name), parameter.detach().clone())

    def q_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the critics, without the temperature."""
        return {name: parameter for name, parameter in self.named_parameters() if name != "log_alpha"}

    def inputs(self, observations: Observations, actions: Float[Tensor, "N *action"]) -> Float[Tensor, "N D"]:
        """[N, size] the observations of N states and the actions there, side by side."""
        return torch.cat([*[observations[key].float().flatten(1) for key in self.keys], actions.flatten(1)], dim=1)

    def forward(
        self, inputs: Float[Tensor, "N D"], weights: Weights = "live", batch_statistics: bool = False
    ) -> Float[Tensor, "E N"]:
        """Values [E, N] of `inputs` [N, size].

        Args:
            weights: `live`, `fixed` (the same, without a gradient to them) or `target`.
            batch_statistics: batch normalization by the statistics of these inputs.
        """
        read = self._reader(weights)
        members = len(self.output_layer.get_parameter("weight"))
        x = inputs.expand(members, *inputs.shape)
        if self.norm == "batch":
            x = self._normalized(0, x, read, batch_statistics)
        for i in range(len(self.layers)):
            x = torch.baddbmm(read(f"layers.{i}.bias"), x, read(f"layers.{i}.weight"))
            if self.norm == "layer":
                x = self._normalized(i, x, read, batch_statistics).relu()
            else:
                x = x.relu()
                if self.norm == "batch":
                    x = self._normalized(i + 1, x, read, batch_statistics)
        return torch.baddbmm(read("output_layer.bias"), x, read("output_layer.weight"))[..., 0]

    def _reader(self, weights: Weights) -> Callable[[str], Tensor]:
        """Reads a weight by name."""
        if weights == "target":
            return lambda name: self.get_buffer(target_name(name))
        if weights == "fixed":
            return lambda name: self.get_parameter(name).detach()
        return self.get_parameter

    def _normalized(self, i: int, x: Tensor, read: Callable[[str], Tensor], batch_statistics: bool) -> Tensor:
        norm, scale, shift = self.norms[i], read(f"norms.{i}.scale"), read(f"norms.{i}.shift")
        assert isinstance(norm, RunningNorm)
        if self.norm == "layer":
            return nn.functional.layer_norm(x, x.shape[-1:]) * scale + shift
        return norm.batch(x, scale, shift) if batch_statistics else norm.fixed(x, scale, shift)

    @torch.no_grad()
    def move_targets(self, tau: float) -> None:
        """target <- (1 - tau) target + tau live (Polyak averaging)."""
        live = self.q_parameters()
        torch._foreach_lerp_([self.get_buffer(target_name(name)) for name in live], list(live.values()), tau)


class ValueCritics(KeptModule):
    """Critics Q(o, a), and a network of state values V(o)."""

    def __init__(self, critics: Critics, value: nn.Module) -> None:
        """
        Args:
            value: values [N] of observations by key.
        """
        super().__init__()
        self.critics, self.value = critics, value


def target_name(name: str) -> str:
    """The name of the buffer with the target of a parameter."""
    return "target_" + name.replace(".", "_")
