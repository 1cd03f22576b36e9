"""Networks of policies that act: from observations to a distribution over actions.

    observations --encoder--> features --output layer--> parameters of a distribution --> actions, log-probs

Each kind of policy says what a recorded action is (`draw`), how likely it was (`log_prob`), and what the environment
gets of it (`executed`). Everything else is `PolicyNetwork`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import interpolate, softplus

from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.types.environments import ActionSpace, ContinuousActions, DiscreteActions, Observations

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

Outputs = dict[str, Tensor]
PARTS = "parts"
"""The output with the log-probs [N, U] of the parts of a decision, such as its tokens. Their sum is `logp`."""
HIDDEN = "hidden"
"""The output with the states [N, D] from which values are computed, of a policy that makes such states."""
Activation = Literal["tanh", "relu", "silu"]
Initial = Literal["orthogonal", "uniform"]
"""How the layers of an encoder start: `initialise`, or as layers of torch do, with random weights and biases."""
ACTIVATIONS: Mapping[Activation, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
Shapes = Mapping[str, Sequence[int]]
"""The shapes of observations by key."""
CLIP = 10.0
"""Bound of the absolute values of observations that are normalized by running statistics."""
LARGE_IMAGE, SMALLEST_IMAGE = 36, 15
"""Pixels per side for which the filters of 8, 4 and 3 pixels fit, and those of 3, 3 and 3 pixels."""


class ObservationEncoder(nn.Module):
    """Features [N, width] of observations: layers of `width` units, for images after convolutions.

    The convolutions are those of Mnih et al. 2015 (doi:10.1038/nature14236). Their filters need 36 pixels per side, so
    smaller images pass through filters of 3 x 3 with stride 2.

    With `normalize`, mean and std of vectors are parameters that no gradient reaches, so that they are saved, sent and
    exported like weights. The stack writes them (`unirl/train/normalization.py`). Otherwise they are buffers.
    """

    def __init__(self, shapes: Shapes, width: int, depth: int, activation: Activation, normalize: bool = False) -> None:
        super().__init__()
        self.normalize, self.width = normalize, width
        self.shapes = {key: tuple(shape) for key, shape in shapes.items()}
        act = ACTIVATIONS[activation]
        self.images = nn.ModuleDict({key: image_layers(shape) for key, shape in self.shapes.items() if len(shape) == 3})
        for key, shape in self.shapes.items():
            if key not in self.images:
                for name, value in zip(statistics_of(key), (torch.zeros(shape), torch.ones(shape)), strict=True):
                    if normalize:
                        self.register_parameter(name, nn.Parameter(value))
                    else:
                        self.register_buffer(name, value)
        sizes = (
            [self._features_of(key) for key in self.shapes] if self.images else [sum(map(math.prod, shapes.values()))]
        )
        layers: list[nn.Module] = []
        size = sum(sizes)
        for _ in range(depth):
            layers += [nn.Linear(size, width), act()]
            size = width
        self.layers = nn.Sequential(*layers)

    def _features_of(self, key: str) -> int:
        shape = self.shapes[key]
        if key not in self.images:
            return math.prod(shape)
        with torch.no_grad():
            return int(self.images[key](torch.zeros(1, *shape)).shape[1])

    def forward(self, observations: Observations) -> Tensor:
        """Features [N, width] of observations [N, *shape]; images may be uint8."""
        parts = [
            self.images[key](unit_scaled(observations[key]))
            if key in self.images
            else self.scaled(key, observations[key].float()).flatten(1)
            for key in self.shapes
        ]
        return self.layers(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))

    def scaled(self, key: str, values: Tensor) -> Tensor:
        """(values - mean) / std with the statistics of the observation; clipped if they are running ones."""
        # Each forward passes here, and `get_parameter` and `get_buffer` take longer than the numbers.
        owned: Mapping[str, Tensor | None] = self._parameters if self.normalize else self._buffers
        mean, std = [cast(Tensor, owned[name]).detach() for name in statistics_of(key)]
        scaled = (values - mean) / std
        return scaled.clamp(-CLIP, CLIP) if self.normalize else scaled

    def measure(self, observations: Observations) -> None:
        """Take mean and std [*shape] from observations [N, *shape]; constant entries keep std 1."""
        for key, values in observations.items():
            if key not in self.images:
                std = values.float().std(0)
                self.get_buffer(f"{key}_mean").copy_(values.float().mean(0))
                self.get_buffer(f"{key}_std").copy_(torch.where(std > 1e-6, std, 1.0))


def statistics_of(key: str) -> tuple[str, str]:
    """The names of mean and std of an observation in its encoder."""
    return f"{key}_mean", f"{key}_std"


def image_layers(shape: Sequence[int]) -> nn.Sequential:
    """Three convolutions from [N, C, H, W] to [N, features], for images of `shape` [C, H, W]."""
    channels, height, width = shape
    if min(height, width) < SMALLEST_IMAGE:
        raise InvalidValueError(
            f"bundle.observations: an image of {height} x {width} pixels is too small for three convolutions. Use "
            f"images of at least {SMALLEST_IMAGE} pixels per side"
        )
    filters = ((8, 4), (4, 2), (3, 1)) if min(height, width) >= LARGE_IMAGE else ((3, 2), (3, 2), (3, 2))
    (first, first_stride), (second, second_stride), (third, third_stride) = filters
    return nn.Sequential(
        nn.Conv2d(channels, 32, first, stride=first_stride),
        nn.ReLU(),
        nn.Conv2d(32, 64, second, stride=second_stride),
        nn.ReLU(),
        nn.Conv2d(64, 64, third, stride=third_stride),
        nn.ReLU(),
        nn.Flatten(),
    )


def unit_scaled(image: Tensor) -> Tensor:
    """Pixels in [0, 1]: levels of uint8 are divided by 255."""
    return image.float() / 255 if image.dtype == torch.uint8 else image


def resized(images: Tensor, side: int) -> Tensor:
    """[N, C, side, side] float32 whole levels from 0 to 255, from images [N, C, H, W] as PIL resizes them (bicubic)."""
    levels = images.float()
    height = levels.shape[-2]
    for size in ((height, side), (side, side)):  # PIL rounds after the first direction, too
        if levels.shape[-2:] != size:
            levels = interpolate(levels, size, mode="bicubic", antialias=True).round().clamp(0, 255)
    return levels


def initialise(module: nn.Module, gain: float) -> None:
    """Orthogonal weights and biases of zero (Saxe et al. 2014, arXiv:1312.6120). Uses torch's generator."""
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.orthogonal_(layer.weight, gain)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)


class PolicyNetwork(nn.Module):
    """A stochastic policy over actions.

    `forward` draws actions, or gives the log-probs of recorded ones. Everything happens inside of it, since FSDP2 hooks
    the call of the root module.
    """

    noise: ClassVar[Literal["normal", "uniform"]]
    """What `draw` turns into actions: standard normal numbers, or uniform ones in [0, 1)."""
    noise_shape: tuple[int, ...]
    """Numbers of noise for one decision."""
    actions: ActionSpace
    chunk: int = 1
    """Actions of one decision."""
    is_squashed: ClassVar[bool] = False
    """Executed actions lie in (-1, 1), and they and their log-probs are differentiable functions of the noise."""
    has_entropy: ClassVar[bool] = True
    """The entropy has a closed form."""

    def forward(
        self,
        observations: Observations,
        actions: Tensor | None = None,
        noise: Tensor | None = None,
        deterministic: bool = False,
        entropy: bool = False,
    ) -> Outputs:
        """`actions` [N, ...] and their `logp` [N], nats; on request also the `entropy` [N] of the policy.

        Args:
            actions: recorded actions. None takes new ones.
            noise: [N, *noise_shape] for new actions.
            deterministic: take the most likely actions.
        """
        parameters = self.parameters_of(observations)
        if actions is None:
            assert noise is not None, "new actions need noise"
            actions = (self.likeliest if deterministic else self.draw)(parameters, noise)
        outputs = {"actions": actions, "logp": self.log_prob(parameters, actions), **self.states(parameters)}
        return outputs | ({"entropy": self.entropy(parameters)} if entropy else {})

    @property
    def decision_size(self) -> int:
        """Numbers of a decision of continuous actions, as critics read it."""
        assert isinstance(self.actions, ContinuousActions)
        return self.actions.size * self.chunk

    @abstractmethod
    def parameters_of(self, observations: Observations) -> Any:
        """The parameters of the distribution: a tensor [N, ...], or a tuple of such tensors."""

    @abstractmethod
    def draw(self, parameters: Any, noise: Tensor) -> Tensor:
        """[N, ...] an action for each row, as it is recorded."""

    @abstractmethod
    def likeliest(self, parameters: Any, noise: Tensor) -> Tensor:
        """[N, ...] the action of highest density, as it is recorded."""

    @abstractmethod
    def log_prob(self, parameters: Any, actions: Tensor) -> Float[Tensor, "N"]:
        """[N] log-probs of recorded actions, nats, summed over the dimensions of an action."""

    @abstractmethod
    def entropy(self, parameters: Any) -> Float[Tensor, "N"]:
        """[N] entropy, nats."""

    @property
    def hidden_size(self) -> int:
        """D of the states `HIDDEN`. 0 if this network makes none."""
        return 0

    def states(self, parameters: Any) -> Outputs:
        """`HIDDEN`, if values are computed from a state of this network. Empty otherwise."""
        return {}

    def executed(self, actions: Shaped[Tensor, "N *recorded"]) -> Shaped[Tensor, "N chunk *action"]:
        """What the environment gets of recorded actions, one after another."""
        return actions[:, None]

    def recorded(self, executed: Shaped[Tensor, "N chunk *action"]) -> Shaped[Tensor, "N *recorded"]:
        """The recorded form of actions that somebody else took: what `executed` turns into them.

        Raises:
            IncompatibleError: 2020, what is executed does not say what was drawn.
        """
        raise IncompatibleError(f"a {type(self).__name__} has no recorded form for actions that it did not draw")

    def imitation(
        self,
        observations: Observations,
        actions: Shaped[Tensor, "N chunk *action"],
        eps: Shaped[Tensor, "N *noise"],
        levels: Float[Tensor, "N"],
    ) -> Float[Tensor, "N"]:
        """The loss of imitating actions: -log pi(a | o), nats.

        Args:
            actions: those of the environment, in [-1, 1] or numbers of discrete ones.
            eps, levels: standard normal [N, *noise_shape], and uniform in [0, 1); for policies without a density.
        """
        return -self(observations, actions=self.recorded(actions))["logp"]


class EncodedPolicy(PolicyNetwork):
    """A policy whose parameters are a linear function of the features of its observations."""

    def __init__(
        self,
        shapes: Shapes,
        outputs: int,
        width: int,
        depth: int,
        activation: Activation,
        seed: int,
        normalize: bool = False,
        initial: Initial = "orthogonal",
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = ObservationEncoder(shapes, width, depth, activation, normalize)
            self.output_layer = nn.Linear(width, outputs)
            if initial == "orthogonal":
                initialise(self.encoder, math.sqrt(2))
            initialise(self.output_layer, 0.01)

    def parameters_of(self, observations: Observations) -> Tensor:
        return self.output_layer(self.encoder(observations))

    def recorded(self, executed: Tensor) -> Tensor:
        return executed[:, 0]


class CategoricalPolicy(EncodedPolicy):
    """Discrete actions: softmax of logits [N, K]. An action is drawn by the inverse of the distribution function."""

    noise = "uniform"
    noise_shape = ()

    def __init__(
        self,
        shapes: Shapes,
        actions: DiscreteActions,
        width: int,
        depth: int,
        activation: Activation,
        seed: int,
        normalize: bool = False,
    ) -> None:
        super().__init__(shapes, actions.count, width, depth, activation, seed, normalize)
        self.actions, self.count = actions, actions.count

    def draw(self, parameters: Tensor, noise: Tensor) -> Tensor:
        below = parameters.softmax(1).cumsum(1) <= noise[:, None]
        return below.sum(1).clamp(max=self.count - 1)

    def likeliest(self, parameters: Tensor, noise: Tensor) -> Tensor:
        return parameters.argmax(1)

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        return parameters.log_softmax(1).gather(1, actions[:, None])[:, 0]

    def entropy(self, parameters: Tensor) -> Tensor:
        return Categorical(logits=parameters, validate_args=False).entropy()


class GaussianPolicy(EncodedPolicy):
    """Continuous actions: N(mean(o), std^2) with one std per dimension. The environment clips to [-1, 1].

    The log-prob is that of the action before the clip, as is usual for PPO.
    """

    noise = "normal"

    def __init__(
        self,
        shapes: Shapes,
        actions: ContinuousActions,
        width: int,
        depth: int,
        activation: Activation,
        seed: int,
        log_std: float = 0.0,
        normalize: bool = False,
        initial: Initial = "orthogonal",
    ) -> None:
        super().__init__(shapes, actions.size, width, depth, activation, seed, normalize, initial)
        self.actions = actions
        self.noise_shape = (actions.size,)
        self.log_std = nn.Parameter(torch.full((actions.size,), log_std))

    def parameters_of(self, observations: Observations) -> Tensor:
        mean = super().parameters_of(observations)
        return torch.stack([mean, self.log_std.expand_as(mean)], dim=1)  # [N, 2, A]

    def draw(self, parameters: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = parameters.unbind(1)
        return mean + log_std.exp() * noise

    def likeliest(self, parameters: Tensor, noise: Tensor) -> Tensor:
        return parameters[:, 0]

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        return normal_log_prob(actions, *parameters.unbind(1)).sum(1)

    def entropy(self, parameters: Tensor) -> Tensor:
        return (parameters[:, 1] + 0.5 * math.log(2 * math.pi * math.e)).sum(1)


def normal_log_prob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log N(x; mean, exp(log_std)^2), nats, elementwise."""
    std = log_std.exp()
    # That of torch.distributions.Normal to the bit, without its checks, which take longer than its numbers.
    return -((x - mean) ** 2) / (2 * std**2) - std.log() - math.log(math.sqrt(2 * math.pi))


LOG_STD_BOUNDS = (-20.0, 2.0)
"""The log of the std of a squashed Gaussian is clamped to these, as in Haarnoja et al. 2018."""
LARGEST_ACTION = 0.999
"""The largest size of a demonstrated action of a squashed Gaussian: tanh(3.8)."""


class SquashedGaussianPolicy(EncodedPolicy):
    """Continuous actions in (-1, 1): tanh(u), u ~ N(mean(o), std(o)^2). Haarnoja et al. 2018, arXiv:1812.05905, App. C.

    u is recorded, so the log-prob is exact where tanh is saturated:
    log pi(a) = log N(u) - sum log(1 - tanh(u)^2),  log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)).

    The mean starts near 0, and the std at exp(`log_std`). With a std of 0.85 the first actions are nearly uniform:
    their distribution function differs by at most 0.01 from that of U(-1, 1).
    """

    is_squashed = True
    has_entropy = False
    noise = "normal"

    def __init__(
        self,
        shapes: Shapes,
        actions: ContinuousActions,
        width: int,
        depth: int,
        activation: Activation,
        seed: int,
        log_std: float = 0.0,
        normalize: bool = False,
        initial: Initial = "orthogonal",
    ) -> None:
        super().__init__(shapes, 2 * actions.size, width, depth, activation, seed, normalize, initial)
        self.actions = actions
        self.noise_shape = (actions.size,)
        with torch.no_grad():
            self.output_layer.bias[actions.size :] = log_std

    def parameters_of(self, observations: Observations) -> Tensor:
        mean, log_std = super().parameters_of(observations).chunk(2, dim=1)
        return torch.stack([mean, log_std.clamp(*LOG_STD_BOUNDS)], dim=1)  # [N, 2, A]

    def draw(self, parameters: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = parameters.unbind(1)
        return mean + log_std.exp() * noise

    def likeliest(self, parameters: Tensor, noise: Tensor) -> Tensor:
        return parameters[:, 0]

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        squash = 2 * (math.log(2) - actions - softplus(-2 * actions))
        return (normal_log_prob(actions, *parameters.unbind(1)) - squash).sum(1)

    def entropy(self, parameters: Tensor) -> Tensor:
        raise IncompatibleError(
            "algorithm.entropy_coef: the entropy of a squashed Gaussian policy has no closed form. Set "
            "algorithm.entropy_coef=0, or bundle.squashed=false"
        )

    def executed(self, actions: Tensor) -> Tensor:
        return actions.tanh()[:, None]

    def recorded(self, executed: Tensor) -> Tensor:
        """[N, A] u with tanh(u) = a. Numbers beyond LARGEST_ACTION are moved to it, since u has to be finite."""
        return executed[:, 0].clamp(-LARGEST_ACTION, LARGEST_ACTION).atanh()


class ObservationValueHead(nn.Module):
    """V(o) in fp32, with an encoder of its own. It starts at 0 everywhere."""

    def __init__(
        self, shapes: Shapes, width: int, depth: int, activation: Activation, seed: int, normalize: bool = False
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = ObservationEncoder(shapes, width, depth, activation, normalize)
            self.output_layer = nn.Linear(width, 1)
            initialise(self.encoder, math.sqrt(2))
            nn.init.zeros_(self.output_layer.weight)
            nn.init.zeros_(self.output_layer.bias)

    def forward(self, observations: Observations) -> Tensor:
        """Values [N] of observations [N, *shape]."""
        return self.output_layer(self.encoder(observations)).sum(1)  # not squeezed, as in ValueHead
