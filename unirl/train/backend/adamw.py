"""AdamW (arXiv:1711.05101), fused; or of operations that round once, so that bits do not depend on how rows are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unirl.train.backend.base import OptimizerConfig


def adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, exact: bool) -> torch.optim.AdamW:
    """AdamW over `parameters`: one fused pass over the weights, or, if `exact`, `SteadyAdamW`."""
    kind = SteadyAdamW if exact else torch.optim.AdamW
    return kind(
        parameters,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=not exact,
    )


class SteadyAdamW(torch.optim.AdamW):
    """AdamW in which an element's bits do not depend on its place in a tensor.

    The fused kernels fuse a multiplication with an addition in their vectors and not in the elements that are left
    over at a tensor's end, and sharding moves the ends.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], group)


def _update(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
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
