"""AdamW (arXiv:1711.05101), either fused or independent of the sharding to the bit, and its state as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.state import Tensors
from unirl.types.device import CPU, wait_for

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""The keys of AdamW's state of one parameter."""


def adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, exact: bool) -> torch.optim.AdamW:
    """Build the optimizer of `parameters`: PyTorch's fused AdamW, or `ReproducibleAdamW` if `exact`."""
    kind = ReproducibleAdamW if exact else torch.optim.AdamW
    return kind(
        parameters,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=not exact,
    )


class ReproducibleAdamW(torch.optim.AdamW):
    """AdamW in which the bits of an element do not depend on its position in a tensor.

    The fused kernels contract a multiplication and an addition into one operation where they use vector instructions,
    but not for the elements that are left over at the end of a tensor. Sharding changes which elements these are.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], group)


def _update(parameter: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
    assert parameter.grad is not None
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    (beta1, beta2), t = group["betas"], float(state["step"])
    gradient, m, v = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
    m.mul_(beta1).add_(gradient * (1 - beta1))
    v.mul_(beta2).add_(gradient * gradient * (1 - beta2))
    denominator = (v.sqrt() / (1 - beta2**t) ** 0.5).add_(group["eps"])
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.sub_(m / denominator * (group["lr"] / (1 - beta1**t)))


def move_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Move the moments to `device`. The step counter stays on the CPU, where AdamW keeps it.

    The host waits once for copies to the CPU, which lie in pinned memory.
    """
    origins = set()
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step":
                origins.add(value.device)
                state[key] = value.to(device, non_blocking=True)
    if device == CPU:
        wait_for(origins)


# The optimizer state as tensors, for checkpoints


def optimizer_tensors(optimizer: Optimizer, shards: Mapping[str, nn.Parameter]) -> Tensors:
    """AdamW's moments and step counts by parameter name. A parameter that never had a gradient has no entries."""
    return {
        f"{name}.{key}": optimizer.state[shard][key]
        for name, shard in shards.items()
        if shard in optimizer.state
        for key in MOMENTS
    }


def empty_moments(tensor_names: Iterable[str], shards: Mapping[str, nn.Parameter]) -> Tensors:
    """Uninitialised tensors for the complete AdamW state of every parameter that owns one of `tensor_names`."""
    return {
        f"{name}.{key}": torch.empty(()) if key == "step" else torch.empty_like(shards[name].detach())
        for name in owners(tensor_names, shards)
        for key in MOMENTS
    }


def load_optimizer(optimizer: Optimizer, tensors: Tensors, shards: Mapping[str, nn.Parameter]) -> None:
    """Replace AdamW's state by checked tensors. AdamW's own `load_state_dict` moves them to the right devices."""
    position = {name: i for i, name in enumerate(shards)}
    state = {position[name]: {key: tensors[f"{name}.{key}"] for key in MOMENTS} for name in owners(tensors, shards)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def owners(tensor_names: Iterable[str], parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The names of the parameters to which AdamW's tensors belong."""
    named = {name.rpartition(".")[0] for name in tensor_names}
    return [name for name in parameters if name in named]
