"""The layout of the trained parameters over the ranks of a role: whole on one rank, sharded by FSDP2 on several.

A shard is a plain parameter that shares its storage with this rank's part of a module's parameter. The optimizer, the
snapshots and the check for finite gradients use only shards, so their code is the same for any number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from unirl.distributed import RankInfo
from unirl.train.backend.lockstep import Lockstep
from unirl.train.backend.writer import Piece
from unirl.train.configs import FSDPConfig

if TYPE_CHECKING:  # these imports take seconds
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class GatherDtype:
    """The dtype in which sharded parameters are gathered."""

    dtype: torch.dtype | None = None
    """None: they are gathered as they are stored."""
    kept: Collection[str] = ()
    """Names of the parameters that are gathered as they are stored in any case."""


AS_STORED = GatherDtype()


class Sharding:
    """The layout of one module's parameters, and the reduction of gradients from a backward pass to the shards.

    On one rank every parameter is whole, and a shard is the parameter itself. `FSDP2Sharding` is for several ranks.
    """

    trainable: Parameters
    """Trainable parameters of the module by name."""
    shards: Parameters
    """This rank's parts of the trainable parameters, by name."""

    def __init__(self, config: FSDPConfig) -> None:
        self.config = config
        self.accumulation = torch.float64 if config.reduce_dtype == "fp64" else torch.float32
        self.sums: dict[str, Tensor] = {}

    def for_another_module(self) -> Sharding:
        """Return a sharding over the same ranks for a second module, which is called independently."""
        return Sharding(self.config)

    def wrap(self, module: nn.Module, pieces: Sequence[nn.Module], gathered: GatherDtype = AS_STORED) -> None:
        """Shard `module` in place. Each of `pieces` (inner ones first) and then the rest is gathered as one unit."""
        if self.accumulation == torch.float64:
            for piece in pieces:
                piece.register_forward_pre_hook(_group_gradients, with_kwargs=True)

    def adopt(self, module: nn.Module, prefix: str = "") -> None:
        """Record the module's current parameters, under names that begin with `prefix`."""
        self.parameters: Parameters = dict(module.named_parameters(prefix))
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.shards = {name: self.shard(p) for name, p in self.trainable.items()}

    def shard(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's part of a parameter."""
        return parameter

    def rows(self, parameter: nn.Parameter) -> slice:
        """The rows of the whole parameter that this rank holds."""
        return slice(0, parameter.shape[0])

    def written(self, parameter: nn.Parameter | None, shard: Tensor) -> Piece | None:
        """The rows that this rank writes of a tensor that is laid out like `parameter`; None: another rank does.

        Args:
            parameter: None for a tensor that every rank has whole.
        """
        return Piece(shard)

    def to_dtensor(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """Convert `shard` to a tensor that is laid out like `parameter`: a DTensor on several ranks. Used for files."""
        return shard

    def whole(self, parameter: nn.Parameter, shard: Tensor | None = None) -> Tensor:
        """Gather the whole of a parameter, or of a tensor whose shards are laid out like it. This is a collective."""
        return parameter.detach() if shard is None else shard

    def before_backward(self, last: bool) -> None:
        """Called before each backward pass. `last` is True for the last one of an update."""

    def after_backward(self, last: bool) -> None:
        """Called after each backward pass. After the last one of an update, `shards` hold the sum over all ranks.

        With float64 accumulation, passes are added up in float64, and the last one rounds the sums.
        """
        if self.accumulation == torch.float32:
            return
        for name, parameter in self.trainable.items():
            if parameter.grad is not None:
                total = self.sums.get(name)
                self.sums[name] = parameter.grad.double() if total is None else total.add_(parameter.grad)
                parameter.grad = None
        if last:
            for name, total in self.sums.items():
                self.trainable[name].grad = total.to(self.trainable[name].dtype)
            self.sums.clear()

    def gradient_norm(self) -> Tensor:
        """The norm of the gradient over all shards of all ranks, [] float32."""
        return self.squared_norm().sqrt().float()

    def squared_norm(self) -> Tensor:
        """The sum of squares of the gradient, [] float64. Squares of one tensor add up in the accumulation dtype."""
        gradients = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(torch._foreach_norm(gradients, 2.0, self.accumulation)).double().square().sum()

    def clip(self, norm: Tensor, max_grad_norm: float) -> None:
        """Scale the gradients down to a total norm of `max_grad_norm`. `norm` is their current total norm."""
        gradients = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        if gradients:  # As torch's clip_grads_with_norm_, which first sorts the gradients by device and dtype.
            torch._foreach_mul_(gradients, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0))

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of a scalar over the ranks, [] float64."""
        return value.double()

    def gather_each_once(self) -> None:
        """Gather every piece once, so that a backward pass also works if a piece was in no forward. A collective."""

    def reshard(self) -> None:
        """Drop the gathered copies, so that the next forward reads the shards."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the whole module gathered inside the block, so that forwards contain no collective."""
        yield

    @contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Gather one block at a time in each forward inside the block, in step with the other ranks."""
        yield

    def moved(self) -> None:
        """Called after the module was moved to another device."""


class FSDP2Sharding(Sharding):
    """The layout on several ranks: each rank holds some rows of every parameter.

    `shard_size` ranks share one copy of the parameters, and the other ranks hold further copies.
    """

    def __init__(self, config: FSDPConfig, rank: RankInfo, mesh: DeviceMesh | None = None) -> None:
        """
        Args:
            mesh: the mesh of another layout over the same ranks. If absent, a new one is made: a collective.
        """
        super().__init__(config)
        self.rank = rank
        self.mesh = mesh_of(rank, config.shard_size) if mesh is None else mesh
        self.shard_mesh = self.mesh if self.mesh.ndim == 1 else self.mesh["shard"]
        self.units: dict[nn.Module, list[FSDPModule]] = {}
        """Piece to its units: the piece itself, then those of its parts that are gathered in another dtype."""
        self.roots: list[FSDPModule] = []
        """The units of the rest. The last one is the whole module."""
        self.lockstep: Lockstep | None = None
        """The order in which ranks gather blocks while they sample with sharded weights. None without blocks."""

    def for_another_module(self) -> FSDP2Sharding:
        return FSDP2Sharding(self.config, self.rank, self.mesh)

    def wrap(self, module: nn.Module, pieces: Sequence[nn.Module], gathered: GatherDtype = AS_STORED) -> None:
        dtype = gathered.dtype
        wide = {id(parameter) for name, parameter in module.named_parameters() if name in gathered.kept}
        units: dict[nn.Module, list[FSDPModule]] = {}  # the piece itself is the last of its units
        for unit in (*pieces, module):
            # The parameters of the root are needed again as soon as the backward pass begins.
            reshard = self.config.reshard_after_forward and unit is not module
            group = units.setdefault(unit, [])
            own = (p for part in _own_modules(unit, pieces) for p in part.parameters(recurse=False))
            if dtype is not None and any(id(p) in wide for p in own):
                # FSDP2 gathers a unit in one dtype, so the parts without kept parameters become a unit of their own.
                group.append(self._wrap_unit(_parts_without(wide, unit, pieces), dtype, reshard))
                group.append(self._wrap_unit([unit], None, reshard))
            else:
                group.append(self._wrap_unit([unit], dtype, reshard))
        self.roots += units.pop(module)
        self.units |= {piece: parts[::-1] for piece, parts in units.items()}
        if self.config.prefetch_blocks:
            self._prefetch_chains()
        if self.units:
            blocks = {block: self.units[block] for block in blocks_in(self.units)}
            self.lockstep = Lockstep(module, blocks, self.config.prefetch_blocks, self.rank)
        # The outputs of most video networks are views, and no code changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)

    def _wrap_unit(self, parts: list[nn.Module], dtype: torch.dtype | None, reshard: bool) -> FSDPModule:
        """Shard the parameters of `parts` that are not sharded yet, and gather them together, in `dtype` if given."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=self.accumulation,
            cast_forward_inputs=False,  # 1000 sigma does not fit in the 8 bits of bf16
        )
        wrapped = fully_shard(parts, mesh=self.mesh, mp_policy=policy, reshard_after_forward=reshard)[0]
        # Losses are already divided by the number of elements over all ranks.
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
        return wrapped

    @property
    def pieces(self) -> list[FSDPModule]:
        """The units of all pieces."""
        return [unit for units in self.units.values() for unit in units]

    def _prefetch_chains(self) -> None:
        """Gather the next blocks of a chain ahead of each of its blocks."""
        count = self.config.prefetch_blocks
        for chain in chains_of(list(self.units)):
            for i, block in enumerate(chain):
                later, earlier = chain[i + 1 : i + 1 + count], chain[max(i - count, 0) : i]
                own = self.units[block][0]
                own.set_modules_to_forward_prefetch([unit for each in later for unit in self.units[each]])
                own.set_modules_to_backward_prefetch([unit for each in reversed(earlier) for unit in self.units[each]])

    def shard(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(_local(parameter.detach()), requires_grad=parameter.requires_grad)

    def rows(self, parameter: nn.Parameter) -> slice:
        """The rows of this rank. FSDP2 cuts like `torch.chunk`: equal pieces, the last ones shorter or empty."""
        count = parameter.shape[0]
        piece = -(-count // self.shard_mesh.size())
        start = min(self.shard_mesh.get_local_rank() * piece, count)
        return slice(start, min(start + piece, count))

    def written(self, parameter: nn.Parameter | None, shard: Tensor) -> Piece | None:
        if parameter is None:
            return Piece(shard, 0) if self.rank.dp_rank == 0 else None
        is_first_copy = self.mesh.ndim == 1 or self.mesh.get_local_rank("replicate") == 0
        return Piece(shard, self.rows(parameter).start) if is_first_copy and shard.numel() else None

    def to_dtensor(self, parameter: nn.Parameter, shard: Tensor) -> DTensor:
        from torch.distributed.tensor import DTensor

        like = cast(DTensor, parameter)
        return DTensor.from_local(
            shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def whole(self, parameter: nn.Parameter, shard: Tensor | None = None) -> Tensor:
        tensor = cast("DTensor", parameter.detach()) if shard is None else self.to_dtensor(parameter, shard)
        return tensor.full_tensor()

    def before_backward(self, last: bool) -> None:
        self.roots[-1].set_requires_gradient_sync(last or not self.config.defer_grad_sync)
        if not self.config.reshard_after_forward:
            self.roots[-1].set_reshard_after_backward(last)

    def after_backward(self, last: bool) -> None:
        if last:
            for name, parameter in self.trainable.items():
                self.shards[name].grad = None if parameter.grad is None else _local(parameter.grad)
                parameter.grad = None

    def squared_norm(self) -> Tensor:
        total = super().squared_norm().to(self.rank.device)
        torch.distributed.all_reduce(total, group=self.shard_mesh.get_group())
        return total

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        total = value.detach().to(self.rank.device, torch.float64, copy=True)
        torch.distributed.all_reduce(total, group=self.rank.group)
        return total

    def gather_each_once(self) -> None:
        # FSDP2 creates a piece's unsharded parameters when it first gathers it, and reads them after every backward.
        for module in (*self.pieces, *self.roots):
            module.unshard()
            module.reshard()

    def reshard(self) -> None:
        for module in (*self.pieces, *self.roots):
            module.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        with self._kept_gathered((*self.pieces, *self.roots)):
            yield

    @contextmanager
    def in_lockstep(self) -> Iterator[None]:
        if self.lockstep is None or self.shard_mesh.size() == 1:
            with self.gathered():
                yield
            return
        # What is not in a block, such as embeddings, is needed at the beginning and at the end of every forward.
        blocks = {unit for units in self.lockstep.units.values() for unit in units}
        with self._kept_gathered([unit for unit in (*self.pieces, *self.roots) if unit not in blocks]):
            try:
                with self.lockstep.attached():
                    yield
            finally:
                self._prefetch_chains()

    @contextmanager
    def _kept_gathered(self, kept: Sequence[FSDPModule]) -> Iterator[None]:
        """Keep some units gathered inside the block, and free the others after their forward."""
        for unit in self.pieces:
            unit.set_reshard_after_forward(unit not in kept, recurse=False)
        for unit in kept:
            unit.unshard()
        try:
            yield
        finally:
            self.reshard()
            for unit in self.pieces:
                unit.set_reshard_after_forward(self.config.reshard_after_forward, recurse=False)

    def moved(self) -> None:
        """Point the shards to the storage of their parameters, which were moved in place."""
        for name, shard in self.shards.items():
            shard.data = _local(self.trainable[name].detach())


def _own_modules(unit: nn.Module, others: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """`unit` and the modules inside it that are not inside one of `others`."""
    yield unit
    for child in unit.children():
        if child not in others:
            yield from _own_modules(child, others)


def chains_of(pieces: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The blocks among `pieces`, in their order. Blocks of one expert, which is a piece around them, are a chain."""
    inside = {part: piece for piece in pieces for part in piece.modules() if part is not piece}
    experts = {inside[piece] for piece in pieces if piece in inside}
    chains: dict[nn.Module | None, list[nn.Module]] = {}
    for piece in pieces:
        if piece not in experts:
            chains.setdefault(inside.get(piece), []).append(piece)
    return list(chains.values())


def blocks_in(pieces: Collection[nn.Module]) -> list[nn.Module]:
    """The pieces that contain no other piece."""
    return [piece for piece in pieces if not any(part in pieces for part in piece.modules() if part is not piece)]


def _parts_without(kept: set[int], unit: nn.Module, others: Sequence[nn.Module]) -> list[nn.Module]:
    """The largest modules inside `unit` that have parameters, none with an id in `kept`, and contain no `others`."""
    parts: list[nn.Module] = []
    for child in unit.children():
        ids = {id(parameter) for parameter in child.parameters()}
        if child in others or not ids:
            continue
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)  # FSDP2 cannot wrap modules without a forward
        if is_container or ids & kept or any(part in others for part in child.modules()):
            parts += _parts_without(kept, child, others)
        else:
            parts.append(child)
    return parts


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without a copy."""
    return cast("DTensor", tensor).to_local()


def _group_gradients(
    block: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Give a block's inputs their own autograd nodes, so that their gradients sum in the same order as under FSDP2.

    The gradients of an input's uses inside the block are added up before those of other blocks. FSDP2 inserts such
    nodes to detect the end of a block's backward pass.
    """
    return tuple(_node(value) for value in inputs), {name: _node(value) for name, value in named.items()}


def _node(value: object) -> object:
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value


def mesh_of(rank: RankInfo, shard_size: int | None) -> DeviceMesh:
    """The mesh of the role's ranks, with shape (ranks) or (copies, ranks that share a copy)."""
    from torch.distributed.device_mesh import DeviceMesh

    size = rank.dp_size if shard_size is None else shard_size
    assert rank.group is not None, "several ranks must share a process group"
    ranks = torch.tensor(torch.distributed.get_process_group_ranks(rank.group))
    if size == rank.dp_size:
        return DeviceMesh(rank.device.type, ranks, mesh_dim_names=("shard",))
    return DeviceMesh(rank.device.type, ranks.view(-1, size), mesh_dim_names=("replicate", "shard"))
