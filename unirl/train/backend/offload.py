"""Training state that leaves the device while others use it."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer


def move_module(module: nn.Module, device: torch.device) -> None:
    """Parameters, gradients and buffers to `device`; the parameter objects stay the same."""
    module.to(device)


def move_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Moments and counters to `device`; a counter that lives on the CPU by the optimizer's own rule stays there."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step":
                state[key] = value.to(device, non_blocking=False)
