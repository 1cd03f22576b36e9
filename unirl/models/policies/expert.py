"""A trained policy as the expert that a second one imitates."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.models.policies.bundle import PolicyBundle
from unirl.types.environments import Observations


class PolicyExpert:
    """An exported policy, which takes its most likely action. Of a chunk it is the first action."""

    def __init__(self, *, path: str) -> None:
        """
        Args:
            path: the folder of an export (`unirl export`), or `quickstart`.
        """
        self.stage = PolicyBundle.from_files(path=path).stage()

    def label(self, observations: Observations) -> Tensor:
        """[B] or [B, A] the most likely actions. A flow policy starts from noise of 0."""
        seen = {key: observations[key] for key in self.stage.facts.observations}
        count = len(next(iter(seen.values())))
        noise = torch.zeros(count, *self.stage.policy.noise_shape)
        actions = self.stage.decide(seen, noise, deterministic=True)["executed"][:, 0]
        return actions if actions.dtype == torch.int64 else actions.clamp(-1, 1)
