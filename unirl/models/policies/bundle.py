"""Bundles of policies: a network with new weights, or those of an exported policy."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unirl.config.build import SPECIAL, build
from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.config.schema import dotted_name
from unirl.config.targets import find_target
from unirl.models.base import Bundle
from unirl.models.chunks import batch_multiple
from unirl.models.loading.estimate import HeldModel, bytes_of, parameters_of
from unirl.models.policies.decoder import ChunkDecoderPolicy
from unirl.models.policies.flow import FlowPolicy
from unirl.models.policies.networks import (
    LOG_STD_BOUNDS,
    Activation,
    CategoricalPolicy,
    GaussianPolicy,
    Initial,
    PolicyNetwork,
    SquashedGaussianPolicy,
)
from unirl.models.policies.stage import ActionStage
from unirl.models.policies.steering import SteeredStage, SteeringPolicy, checked_chain, statistics_for, steered_facts
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import key_seed
from unirl.types.device import CPU
from unirl.types.environments import STATE, ActionSpace, ContinuousActions, DiscreteActions
from unirl.types.facts import ActionFacts
from unirl.types.protocols import TORCH_DTYPES

POLICY, FROZEN = "policy", "frozen"
"""The component that is trained, and the folder of a policy that it steers in an export."""
Shapes = Mapping[str, tuple[int, ...]]


CONFIG, WEIGHTS = "config.json", "policy.safetensors"
"""The files of an exported policy."""
BUNDLE = "bundle.json"
"""The file with the class and settings of the bundle of a steered policy that is no `PolicyBundle`."""
SHIPPED = {"quickstart": Path(__file__).parent / "quickstart"}
"""Policies that are part of this package, by their `path`."""


class ActionBundle(Bundle):
    """The base of all bundles whose trained network is a policy that acts."""

    facts: ActionFacts
    path: str
    """The source of its weights: a folder, a hub id, or a description such as "new weights"."""

    @abstractmethod
    def stage(self) -> ActionStage: ...

    @abstractmethod
    def untrained(self) -> nn.Module:
        """A second network of this kind on the CPU, with the weights from which training started, or new ones."""

    @abstractmethod
    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Write the policy, with `tensors` in place of its own parameters, so that `reopened` reads it."""

    @abstractmethod
    def reopened(self, folder: Path) -> ActionBundle:
        """The policy that `write` wrote, on the device of this one."""

    @classmethod
    @abstractmethod
    def facts_from(cls, settings: Mapping[str, Any]) -> ActionFacts:
        """The facts of the policy with these settings of a recipe, without its weights."""

    @abstractmethod
    def settings_for(self, folder: Path) -> dict[str, Any]:
        """The settings with which the class reads what `write` wrote to `folder`."""


class PolicyBundle(ActionBundle):
    """The base of bundles with one policy network. `PolicyBundle.from_files` reads an exported one of any kind."""

    path = "new weights"
    """The folder of the exported policy, for the model card."""

    def __init__(
        self,
        network: PolicyNetwork,
        shapes: Shapes,
        settings: Mapping[str, Any],
        *,
        device: torch.device,
        depth: int,
        activation: Activation,
        normalize: bool = False,
    ) -> None:
        """
        Args:
            settings: the other keyword arguments that build the same network, for an export.
            depth, activation, normalize: those of the network, which the value head shares.
        """
        observations = {key: list(shape) for key, shape in shapes.items()}
        common = {"observations": observations, "depth": depth, "activation": activation}
        self.settings: dict[str, Any] = {"kind": type(self).__name__, **settings, **common}
        self.depth, self.activation = depth, activation
        facts = ActionFacts(
            family=type(network).__name__,
            observations=dict(shapes),
            actions=network.actions,
            chunk=network.chunk,
            is_squashed=network.is_squashed,
            has_entropy=network.has_entropy,
            is_normalized=normalize,
            hidden_size=network.hidden_size,
            batch_multiple=batch_multiple(device),
        )
        super().__init__({POLICY: network}, facts, dtype=torch.float32, device=device)

    @classmethod
    def from_files(cls, device: torch.device = CPU, *, path: str) -> PolicyBundle:
        """An exported policy.

        Args:
            path: the folder of an export (`unirl export`), or `quickstart`, a policy that is part of this package.
        """
        folder = folder_of(path)
        kind, settings = kind_in(folder, path)
        bundle = kind(device=device, **settings)
        bundle.path = path
        weights = load_file(folder / WEIGHTS)
        bundle.trainable().load_state_dict(weights)
        return bundle

    @classmethod
    def facts_from(cls, settings: Mapping[str, Any]) -> ActionFacts:
        """The facts of the policy with these settings of a recipe, without its weights."""
        kind, found = kind_in(folder_of(settings["path"]), settings["path"])
        return kind.facts_from(found)

    @classmethod
    def settings_in(cls, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the class, from those in the file of an export in `folder`."""
        return settings

    def reopened(self, folder: Path) -> PolicyBundle:
        return self.from_files(self.device, path=str(folder))

    def settings_for(self, folder: Path) -> dict[str, Any]:
        return {"path": str(folder)}

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().cpu() for name, tensor in self.untrained().state_dict().items()} | dict(tensors)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(self.settings, indent=1) + "\n", encoding="utf-8")
        return folder

    def untrained(self) -> nn.Module:
        """A second network of this kind, with the statistics of this one's observations."""
        settings = {name: value for name, value in self.settings.items() if name != "kind"}
        other = KINDS[type(self).__name__](**settings).trainable()
        other.load_state_dict(dict(self.trainable().named_buffers()), strict=False)
        return other

    def stage(self) -> ActionStage:
        return ActionStage(self.trainable(), self.facts, self.depth, self.activation)


def shapes_of(observations: Mapping[str, Sequence[int]] | int) -> Shapes:
    """The shapes of the setting `bundle.observations`: one number is the length of the observation `state`."""
    shapes = (
        {STATE: (observations,)} if isinstance(observations, int) else {k: tuple(v) for k, v in observations.items()}
    )
    if not shapes or any(size < 1 for shape in shapes.values() for size in shape):
        raise InvalidValueError(
            f"bundle.observations={observations}: write the length of the environment's observation, or its shape by "
            "key, such as {pixels: [3, 84, 84]}"
        )
    return shapes


def positive(**values: int) -> None:
    """Raises InvalidValueError for a setting of the bundle below 1."""
    for name, value in values.items():
        if value < 1:
            raise InvalidValueError(f"bundle.{name} must be >= 1, got {value}")


def described(
    policy: type[PolicyNetwork], settings: Mapping[str, Any], actions: ActionSpace, chunk: int = 1, hidden_size: int = 0
) -> ActionFacts:
    """The facts of a network of this class, which is not built.

    Args:
        settings: those of the bundle.
    """
    return ActionFacts(
        family=policy.__name__,
        observations=shapes_of(settings["observations"]),
        actions=actions,
        chunk=chunk,
        is_squashed=policy.is_squashed,
        has_entropy=policy.has_entropy,
        is_normalized=settings.get("normalize", False),
        hidden_size=hidden_size,
    )


class CategoricalBundle(PolicyBundle):
    """A policy of discrete actions."""

    toy: ClassVar[Mapping[str, object]] = {"width": 16}

    def __init__(
        self,
        device: torch.device = CPU,
        seed: int = 0,
        *,
        observations: Mapping[str, tuple[int, ...]] | int,
        actions: int,
        width: int = 64,
        depth: int = 2,
        activation: Activation = "tanh",
        normalize: bool = False,
    ) -> None:
        """
        Args:
            seed: the seed of the run, from which the initial weights are drawn.
            observations: length of the observation `state`, or shapes by key.
            actions: number of discrete actions.
            width: units of a layer.
            depth: layers before the output.
            activation: after each layer.
            normalize: subtract the running mean of observations that are vectors, and divide by their running std.
        """
        positive(actions=actions, width=width, depth=depth)
        shapes = shapes_of(observations)
        space = DiscreteActions(actions)
        network = CategoricalPolicy(shapes, space, width, depth, activation, key_seed(seed, POLICY), normalize)
        settings = {"actions": actions, "width": width, "normalize": normalize}
        super().__init__(
            network, shapes, settings, device=device, depth=depth, activation=activation, normalize=normalize
        )

    @classmethod
    def facts_from(cls, settings: Mapping[str, Any]) -> ActionFacts:
        actions = DiscreteActions(settings["actions"])
        return described(CategoricalPolicy, settings, actions)


class GaussianBundle(PolicyBundle):
    """A policy of continuous actions: a Gaussian, whose samples the environment clips to [-1, 1]."""

    toy: ClassVar[Mapping[str, object]] = {"width": 16}

    def __init__(
        self,
        device: torch.device = CPU,
        seed: int = 0,
        *,
        observations: Mapping[str, tuple[int, ...]] | int,
        actions: int,
        squashed: bool = False,
        log_std: float = 0.0,
        width: int = 64,
        depth: int = 2,
        activation: Activation = "tanh",
        normalize: bool = False,
        initial: Initial = "orthogonal",
    ) -> None:
        """
        Args:
            seed: the seed of the run, from which the initial weights are drawn.
            observations: length of the observation `state`, or shapes by key.
            actions: A, the dimensions of an action.
            squashed: tanh of a Gaussian whose std depends on the observation, as for SAC.
            log_std: initial log of the std.
            width: units of a layer.
            depth: layers before the output.
            activation: after each layer.
            normalize: subtract the running mean of observations that are vectors, and divide by their running std.
            initial: weights of the hidden layers: orthogonal, with biases of zero, or uniform, as those of torch start.
                The output starts near zero either way.
        """
        positive(actions=actions, width=width, depth=depth)
        shapes, space, start = shapes_of(observations), ContinuousActions(actions), key_seed(seed, POLICY)
        low, high = LOG_STD_BOUNDS
        if squashed and not low < log_std < high:
            raise InvalidValueError(
                f"bundle.log_std must lie in ({low:g}, {high:g}), the bounds of a squashed policy, got {log_std:g}"
            )
        kind: type[GaussianPolicy] | type[SquashedGaussianPolicy]
        kind = SquashedGaussianPolicy if squashed else GaussianPolicy
        network = kind(shapes, space, width, depth, activation, start, log_std, normalize, initial)
        settings = {
            "actions": actions, "squashed": squashed, "log_std": log_std, "width": width, "normalize": normalize,
            "initial": initial,
        }  # fmt: skip
        super().__init__(
            network, shapes, settings, device=device, depth=depth, activation=activation, normalize=normalize
        )

    @classmethod
    def facts_from(cls, settings: Mapping[str, Any]) -> ActionFacts:
        policy = SquashedGaussianPolicy if settings["squashed"] else GaussianPolicy
        return described(policy, settings, ContinuousActions(settings["actions"]))


class FlowBundle(PolicyBundle):
    """A policy of continuous actions that denoises them: `FlowPolicy`."""

    toy: ClassVar[Mapping[str, object]] = {"width": 16}

    def __init__(
        self,
        device: torch.device = CPU,
        seed: int = 0,
        *,
        observations: Mapping[str, tuple[int, ...]] | int,
        actions: int,
        chunk: int = 1,
        num_steps: int = 4,
        eta: float = 0.3,
        width: int = 128,
        depth: int = 2,
        activation: Activation = "silu",
    ) -> None:
        """
        Args:
            seed: the seed of the run, from which the initial weights are drawn.
            observations: length of the observation `state`, or shapes by key.
            actions: A, the dimensions of an action.
            chunk: actions of one decision, C. The environment takes them one after another.
            num_steps: K, the denoising steps. All but the last are stochastic.
            eta: strength of their noise (FlowSDEStrategy).
            width: units of a layer.
            depth: layers between the features of the observation and the output.
            activation: after each layer.
        """
        positive(actions=actions, chunk=chunk, width=width, depth=depth)
        if num_steps < 2:
            raise InvalidValueError(
                f"bundle.num_steps must be >= 2, got {num_steps}: the last step is not stochastic, so one step alone "
                "has no log-prob"
            )
        shapes, space, start = shapes_of(observations), ContinuousActions(actions), key_seed(seed, POLICY)
        network = FlowPolicy(
            shapes,
            space,
            width,
            depth,
            activation,
            start,
            num_steps=num_steps,
            chunk=chunk,
            kernel=FlowSDEStrategy(eta=eta),
        )
        settings = {"actions": actions, "chunk": chunk, "num_steps": num_steps, "eta": eta, "width": width}
        super().__init__(network, shapes, settings, device=device, depth=depth, activation=activation)

    @classmethod
    def facts_from(cls, settings: Mapping[str, Any]) -> ActionFacts:
        actions, chunk, width = (settings[name] for name in ("actions", "chunk", "width"))
        return described(FlowPolicy, settings, ContinuousActions(actions), chunk, width)


class ChunkDecoderBundle(PolicyBundle):
    """A policy of chunks of continuous actions, which are decoded together by attention: the decoder of ACT."""

    toy: ClassVar[Mapping[str, object]] = {"width": 16}

    def __init__(
        self,
        device: torch.device = CPU,
        seed: int = 0,
        *,
        observations: Mapping[str, tuple[int, ...]] | int,
        actions: int,
        chunk: int,
        log_std: float = -0.5,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        activation: Activation = "relu",
    ) -> None:
        """
        Args:
            seed: the seed of the run, from which the initial weights are drawn.
            observations: length of the observation `state`, or shapes by key. Each key is a token.
            actions: A, the dimensions of an action.
            chunk: actions of one decision, C. The environment takes them one after another.
            log_std: initial log of the std.
            width: units of a token.
            depth: layers of the decoder.
            heads: heads of its attention.
            activation: after the layer that makes a token.
        """
        positive(actions=actions, chunk=chunk, width=width, depth=depth, heads=heads)
        if width % heads:
            raise InvalidValueError(f"bundle.heads={heads} must divide bundle.width={width}, the units of all heads")
        shapes, space, start = shapes_of(observations), ContinuousActions(actions), key_seed(seed, POLICY)
        network = ChunkDecoderPolicy(shapes, space, chunk, width, depth, heads, activation, start, log_std)
        settings = {"actions": actions, "chunk": chunk, "log_std": log_std, "width": width, "heads": heads}
        super().__init__(network, shapes, settings, device=device, depth=depth, activation=activation)

    @classmethod
    def facts_from(cls, settings: Mapping[str, Any]) -> ActionFacts:
        return described(ChunkDecoderPolicy, settings, ContinuousActions(settings["actions"]), settings["chunk"])


class SteeredBundle(PolicyBundle):
    """A policy that chooses the noise of a frozen flow policy, for SAC: DSRL (`unirl/models/policies/steering.py`)."""

    toy: ClassVar[Mapping[str, object]] = {"width": 16}

    def __init__(
        self,
        device: torch.device = CPU,
        seed: int = 0,
        *,
        frozen: ActionBundle | str,
        bound: Annotated[float, msgspec.Meta(gt=0)] = 1.5,
        shared: bool = False,
        log_std: float = 0.0,
        width: int = 128,
        depth: int = 2,
        activation: Activation = "relu",
    ) -> None:
        """
        Args:
            seed: the seed of the run, from which the initial weights are drawn.
            frozen: the bundle of a flow policy, such as Pi0Bundle, the folder of an exported one (`unirl export`), or
                `quickstart`. It is not trained. If it reads images, the trained policy and critics read its state.
            bound: the largest size of a number of the noise. Flow policies learned from standard normal noise.
            shared: all actions of a chunk get the same noise, so that fewer numbers are chosen.
            log_std: initial log of the std.
            width: units of a layer.
            depth: layers before the output.
            activation: after each layer.
        """
        positive(width=width, depth=depth)
        inner = opened(frozen, device) if isinstance(frozen, str) else frozen
        chain, facts = checked_chain(inner.stage().policy, inner.path), inner.facts
        assert isinstance(facts.actions, ContinuousActions)
        shapes = steered_facts(facts).inputs
        network = SteeringPolicy(
            shapes,
            facts.actions,
            facts.chunk,
            chain.width if shared else chain.size,
            width,
            depth,
            activation,
            key_seed(seed, POLICY),
            log_std,
        )
        settings = {"frozen": FROZEN, "bound": bound, "shared": shared, "log_std": log_std, "width": width}
        super().__init__(
            network,
            shapes,
            settings,
            device=device,
            depth=depth,
            activation=activation,
        )
        self.facts = steered_facts(facts)
        del self.settings["observations"]
        # Observations have the units of the data of the frozen policy.
        network.encoder.load_state_dict(statistics_for(network.encoder, chain), strict=False)
        inner.trainable().requires_grad_(False)
        self.inner, self.bound = inner, bound

    @classmethod
    def settings_in(cls, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
        return {**settings, "frozen": str(folder / settings["frozen"])}

    @classmethod
    def facts_from(cls, settings: Mapping[str, Any]) -> ActionFacts:
        frozen = settings["frozen"]
        owner, values = opener_of(frozen) if isinstance(frozen, str) else (frozen.schema.owner, frozen.values)
        return steered_facts(owner.facts_from(values))

    @classmethod
    def held(cls, settings: Mapping[str, Any]) -> HeldModel:
        """The size of the frozen policy. A small one, without language model, is built to be counted."""
        owner: Any
        name, frozen = "frozen policy", settings["frozen"]
        owner, values = opener_of(frozen) if isinstance(frozen, str) else (frozen.schema.owner, frozen.values)
        if not issubclass(owner, PolicyBundle):
            parameters = sum(owner.estimate_from(values).parameters.values())
            return HeldModel(name, parameters, parameters * TORCH_DTYPES[values["dtype"]].itemsize)
        inner = opened(frozen, CPU) if isinstance(frozen, str) else build(frozen, device=CPU, seed=0)
        network = inner.trainable()
        return HeldModel(name, parameters_of(network), bytes_of(network))

    def stage(self) -> ActionStage:
        network = self.trainable()
        assert isinstance(network, PolicyNetwork)
        return SteeredStage(network, self.facts, self.depth, self.activation, self.inner.stage(), self.bound)

    def untrained(self) -> nn.Module:
        settings = {name: value for name, value in self.settings.items() if name not in ("kind", "frozen")}
        return SteeredBundle(frozen=self.inner, **settings).trainable()

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Write both policies: the frozen one is in a folder beside the files of the trained one."""
        inner = self.inner.write(folder / FROZEN, self.inner.trainable().state_dict())
        if not isinstance(self.inner, PolicyBundle):
            settings = {SPECIAL: dotted_name(type(self.inner)), **self.inner.settings_for(inner)}
            del settings["path"]  # the folder may move, and `opener_of` knows where it is
            (inner / BUNDLE).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        return super().write(folder, tensors)


KINDS: Mapping[str, type[PolicyBundle]] = {
    kind.__name__: kind for kind in (CategoricalBundle, GaussianBundle, FlowBundle, ChunkDecoderBundle, SteeredBundle)
}
"""The kinds of policies that an export may be, by name."""


def folder_of(path: str) -> Path:
    """The folder of an exported policy, or of one that is part of this package."""
    return SHIPPED.get(path, Path(path).expanduser())


def opener_of(path: str) -> tuple[type[ActionBundle], dict[str, Any]]:
    """The class of the policy that `path` names, and the settings with which it reads it.

    Args:
        path: the setting `bundle.frozen`.
    """
    file = folder_of(path) / BUNDLE
    if not file.is_file():
        return PolicyBundle, {"path": path}
    settings = json.loads(file.read_text(encoding="utf-8")) | {"path": str(file.parent)}
    owner = find_target(settings.pop(SPECIAL, None), f"{file}: ")
    assert isinstance(owner, type) and issubclass(owner, ActionBundle), f"{file}: {owner} is no policy"
    return owner, settings


def opened(path: str, device: torch.device) -> ActionBundle:
    """The policy that the setting `bundle.frozen` names."""
    owner, settings = opener_of(path)
    if issubclass(owner, PolicyBundle):
        return PolicyBundle.from_files(device, **settings)
    return owner(device, **settings)  # type: ignore[arg-type]


def kind_in(folder: Path, path: str) -> tuple[type[PolicyBundle], dict[str, Any]]:
    """The class of the policy in a folder, and the arguments that build it.

    Args:
        path: the setting `bundle.path`, for messages.

    Raises:
        NotFoundError: 4001, the folder has no policy.
    """
    if not (folder / CONFIG).is_file():
        raise NotFoundError(
            f"bundle.path={path}: there is no {folder / CONFIG}. Give the folder of an exported policy, such as "
            "runs/RUN/export/CHECKPOINT/full, or quickstart"
        )
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    kind = KINDS.get(settings.pop("kind", ""))
    if kind is None:
        raise NotFoundError(f"{folder / CONFIG}: kind must be one of {', '.join(KINDS)}. The file is no policy's")
    return kind, kind.settings_in(folder, settings)
