"""The layout of the trained parameters over the ranks of a role: whole on one rank, sharded by FSDP2 on several.

A shard is a plain parameter that shares its storage with this rank's part of a module's parameter. The optimizer, the
snapshots and the check for finite gradients use only shards, so their code is the same for any number of ranks.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unirl.distributed import RankInfo
from unirl.train.configs import FSDPConfig

Parameters = dict[str, nn.Parameter]


class Sharding(ABC):
    """The layout of one module's parameters, and the reduction of gradients from a backward pass to the shards."""

    trainable: Parameters
    """Trainable parameters of the module by name."""
    shards: Parameters
    """This rank's parts of the trainable parameters, by name."""

    def __init__(self, config: FSDPConfig) -> None:
        self.config = config
        self.accumulation = torch.float64 if config.reduce_dtype == "fp64" else torch.float32

    def wrap(  # noqa: B027
        self, module: nn.Module, pieces: Sequence[nn.Module], compute_dtype: torch.dtype
    ) -> None:
        """Shard `module` in place. Each of `pieces` (inner ones first) and then the rest is gathered as one unit."""

    @abstractmethod
    def for_another_module(self) -> Sharding:
        """Return a sharding over the same ranks for a second module, which is called independently."""

    def adopt(self, module: nn.Module, prefix: str = "") -> None:
        """Record the module's current parameters, under names that begin with `prefix`."""
        self.parameters: Parameters = dict(module.named_parameters(prefix))
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.shards = {name: self.shard(p) for name, p in self.trainable.items()}

    @abstractmethod
    def shard(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's part of a parameter."""

    @abstractmethod
    def rows(self, parameter: nn.Parameter) -> slice:
        """The rows of the whole parameter that this rank holds."""

    @abstractmethod
    def to_dtensor(self, parameter: nn.Parameter, shard: Tensor) -> Any:
        """Convert `shard` to a tensor that is laid out like `parameter`: a DTensor on several ranks. Used for files."""

    @abstractmethod
    def whole(self, parameter: nn.Parameter, shard: Tensor | None = None) -> Tensor:
        """Gather the whole of a parameter, or of a tensor whose shards are laid out like it. This is a collective."""

    def before_backward(self, last: bool) -> None:  # noqa: B027
        """Called before each backward pass. `last` is True for the last one of an update."""

    @abstractmethod
    def after_backward(self, last: bool) -> None:
        """Called after each backward pass. After the last one of an update, `shards` hold the sum over all ranks."""

    def gradient_norm(self) -> Tensor:
        """The norm of the gradient over all shards of all ranks, [] float32."""
        gradients = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        return self.squared_norm(gradients).sqrt().float()

    @abstractmethod
    def squared_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sum of squares over all shards, [] float64."""

    @abstractmethod
    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of a scalar over the ranks, [] float64."""

    @abstractmethod
    def first_of_ranks(self, index: int) -> int:
        """The smallest `index` over the ranks."""

    def gather_each_once(self) -> None:  # noqa: B027
        """Gather every piece once, so that a backward pass also works if a piece was in no forward. A collective."""

    def reshard(self) -> None:  # noqa: B027
        """Drop the gathered copies, so that the next forward reads the shards."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the whole module gathered inside the block, so that forwards contain no collective."""
        yield

    def moved(self) -> None:  # noqa: B027
        """Called after the module was moved to another device."""


class Unsharded(Sharding):
    """The layout on one rank: every parameter is whole."""

    def __init__(self, config: FSDPConfig) -> None:
        super().__init__(config)
        self.sums: dict[str, Tensor] = {}

    def for_another_module(self) -> Unsharded:
        return Unsharded(self.config)

    def wrap(self, module: nn.Module, pieces: Sequence[nn.Module], compute_dtype: torch.dtype) -> None:
        if self.accumulation == torch.float64:
            for piece in pieces:
                piece.register_forward_pre_hook(_group_gradients, with_kwargs=True)

    def shard(self, parameter: nn.Parameter) -> nn.Parameter:
        return parameter

    def rows(self, parameter: nn.Parameter) -> slice:
        return slice(0, parameter.shape[0])

    def to_dtensor(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        return shard

    def whole(self, parameter: nn.Parameter, shard: Tensor | None = None) -> Tensor:
        return parameter.detach() if shard is None else shard

    def after_backward(self, last: bool) -> None:
        if self.accumulation == torch.float64:
            self._add_up(last)

    def _add_up(self, last: bool) -> None:
        """Add this backward pass's gradients to float64 sums. The last one rounds the sums to the parameters' dtype."""
        for name, parameter in self.trainable.items():
            if parameter.grad is not None:
                total = self.sums.get(name)
                self.sums[name] = parameter.grad.double() if total is None else total.add_(parameter.grad)
                parameter.grad = None
        if last:
            for name, total in self.sums.items():
                self.trainable[name].grad = total.to(self.trainable[name].dtype)
            self.sums.clear()

    def squared_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return sum_of_squares(gradients, self.accumulation)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        return value.double()

    def first_of_ranks(self, index: int) -> int:
        return index


class Sharded(Sharding):
    """The layout on several ranks: each rank holds some rows of every parameter.

    `shard_size` ranks share one copy of the parameters, and the other ranks hold further copies.
    """

    def __init__(self, config: FSDPConfig, rank: RankInfo, mesh: Any = None) -> None:
        """
        Args:
            mesh: the DeviceMesh of another layout over the same ranks. If absent, a new one is made: a collective.
        """
        super().__init__(config)
        self.rank = rank
        self.mesh = mesh_of(rank, config.shard_size) if mesh is None else mesh
        self.shard_mesh = self.mesh if self.mesh.ndim == 1 else self.mesh["shard"]
        self.modules: list[Any] = []  # FSDPModule, whose import takes seconds
        self.module: Any = None

    def for_another_module(self) -> Sharded:
        return Sharded(self.config, self.rank, self.mesh)

    def wrap(self, module: nn.Module, pieces: Sequence[nn.Module], compute_dtype: torch.dtype) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mixed = self.config.mixed_precision and compute_dtype != torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype if mixed else None,
            reduce_dtype=self.accumulation,
            cast_forward_inputs=False,  # 1000 sigma does not fit in the 8 bits of bf16
        )
        for piece in pieces:
            fully_shard(piece, mesh=self.mesh, mp_policy=policy, reshard_after_forward=self._reshards)
        # The parameters of the root are needed again as soon as the backward pass begins.
        self.module = fully_shard(module, mesh=self.mesh, mp_policy=policy, reshard_after_forward=False)
        self.modules = [*pieces, module]
        for each in self.modules:
            # Losses are already divided by the number of elements over all ranks.
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
        # The outputs of most video networks are views, and no code changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)

    @property
    def _reshards(self) -> bool:
        return self.config.reshard_after_forward

    def shard(self, parameter: Any) -> nn.Parameter:
        return nn.Parameter(parameter.detach().to_local(), requires_grad=parameter.requires_grad)

    def rows(self, parameter: nn.Parameter) -> slice:
        """The rows of this rank. FSDP2 cuts like `torch.chunk`: equal pieces, the last ones shorter or empty."""
        count = parameter.shape[0]
        piece = -(-count // self.shard_mesh.size())
        start = min(self.shard_mesh.get_local_rank() * piece, count)
        return slice(start, min(start + piece, count))

    def to_dtensor(self, parameter: Any, shard: Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            shard,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def whole(self, parameter: Any, shard: Tensor | None = None) -> Tensor:
        tensor = parameter.detach() if shard is None else self.to_dtensor(parameter, shard)
        whole: Tensor = tensor.full_tensor()
        return whole

    def before_backward(self, last: bool) -> None:
        self.module.set_requires_gradient_sync(last or not self.config.defer_grad_sync)
        if not self._reshards:
            self.module.set_reshard_after_backward(last)

    def after_backward(self, last: bool) -> None:
        if last:
            for name, parameter in self.trainable.items():
                grad: Any = parameter.grad
                self.shards[name].grad = None if grad is None else grad.to_local()
                parameter.grad = None

    def squared_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        total = sum_of_squares(gradients, self.accumulation).to(self.rank.device)
        torch.distributed.all_reduce(total, group=self.shard_mesh.get_group())
        return total

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        total = value.detach().to(self.rank.device, torch.float64, copy=True)
        torch.distributed.all_reduce(total, group=self.rank.group)
        return total

    def first_of_ranks(self, index: int) -> int:
        first = torch.tensor(index, device=self.rank.device)
        torch.distributed.all_reduce(first, op=torch.distributed.ReduceOp.MIN, group=self.rank.group)
        return int(first)

    def gather_each_once(self) -> None:
        # FSDP2 creates a piece's unsharded parameters when it first gathers it, and reads them after every backward.
        for module in self.modules:
            module.unshard()
            module.reshard()

    def reshard(self) -> None:
        for module in self.modules:
            module.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self._set_resharding(pieces=False)
        for module in self.modules:
            module.unshard()
        try:
            yield
        finally:
            self.reshard()
            self._set_resharding(pieces=self._reshards)

    def _set_resharding(self, pieces: bool) -> None:
        for piece in self.modules[:-1]:
            piece.set_reshard_after_forward(pieces, recurse=False)

    def moved(self) -> None:
        """Point the shards to the storage of their parameters, which were moved in place."""
        for name, shard in self.shards.items():
            parameter: Any = self.trainable[name]
            shard.data = parameter.detach().to_local()


def _group_gradients(block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """Give a block's inputs their own autograd nodes, so that their gradients sum in the same order as under FSDP2.

    The gradients of an input's uses inside the block are added up before those of other blocks. FSDP2 inserts such
    nodes to detect the end of a block's backward pass.
    """
    return tuple(_node(value) for value in inputs), {name: _node(value) for name, value in named.items()}


def _node(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value


def sharding_of(config: FSDPConfig, rank: RankInfo) -> Sharding:
    """The sharding for the number of ranks: `Unsharded` on one rank, `Sharded` on several."""
    return Unsharded(config) if rank.dp_size == 1 else Sharded(config, rank)


def mesh_of(rank: RankInfo, shard_size: int | None) -> Any:
    """The DeviceMesh of the role's ranks, with shape (ranks) or (copies, ranks that share a copy)."""
    from torch.distributed.device_mesh import DeviceMesh

    size = rank.dp_size if shard_size is None else shard_size
    assert rank.group is not None, "several ranks must share a process group"
    ranks = torch.tensor(torch.distributed.get_process_group_ranks(rank.group))
    if size == rank.dp_size:
        return DeviceMesh(rank.device.type, ranks, mesh_dim_names=("shard",))
    return DeviceMesh(rank.device.type, ranks.view(-1, size), mesh_dim_names=("replicate", "shard"))


def sum_of_squares(gradients: Sequence[Tensor], within: torch.dtype) -> Tensor:
    """The sum of squares over all elements, [] float64. Inside one tensor, squares are added up in dtype `within`."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(list(gradients), 2.0, within)).double().square().sum()


def clip(shards: Mapping[str, nn.Parameter], norm: Tensor, max_grad_norm: float) -> None:
    """Scale the shards' gradients down to a total norm of `max_grad_norm`. `norm` is their current total norm."""
    nn.utils.clip_grads_with_norm_(shards.values(), max_grad_norm, norm, foreach=True)
