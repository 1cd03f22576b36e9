"""The contract of a rollout engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from unirl.distributed.group.dispatch import rank0, scatter
from unirl.types.batch import take_rows
from unirl.types.primitives import Images
from unirl.types.protocols import Capabilities, ModelFacts
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp


def rows_of_all_ranks(parts: Sequence[Tensor]) -> Tensor:
    """Tensors end to end, in rank order."""
    return torch.cat(list(parts))


class RolloutEngine(ABC):
    """Produces a response from a request. After the constructor the engine is usable."""

    capabilities: ClassVar[Capabilities]

    @scatter(RolloutResp.concat, order=RolloutResp.select)
    @abstractmethod
    def generate(self, req: RolloutReq) -> RolloutResp:
        """One track per track spec; rows in the order of the request; the pinned sigmas are used and echoed."""

    @rank0
    @abstractmethod
    def facts(self) -> ModelFacts:
        """What the model knows of itself, for the driver to pin requests with."""

    @scatter(rows_of_all_ranks, order=take_rows)
    def preview(self, decoded: Images) -> Tensor:
        """[B, 3, H, W] uint8 pixels for people to look at."""
        return (decoded.pixels * 255).round().to(torch.uint8).cpu()
