"""Transitions of environments: what off-policy losses learn from, and how they come from recorded episodes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from unirl.types.environments import Observations
from unirl.types.segments import ActionSegment


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """N transitions (o, a, R, o'): a decision, the reward of n steps, and the observation that follows them."""

    observations: Observations  # key -> [N, *shape]
    actions: Tensor  # [N, ...] in the form in which the policy recorded them
    rewards: Tensor  # [N] float32, R = sum over k < n of gamma^k r_k
    discounts: Tensor  # [N] float32, gamma^n of the value of `following`; 0 where the episode reached an end
    following: Observations  # key -> [N, *shape]
    weights: Tensor | None = None  # [N] float32 importance weights of a draw; None = all are 1, as in what is stored

    def __len__(self) -> int:
        return len(self.rewards)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, such as `observations.state`. `of_tensors` reads them."""
        named: dict[str, Tensor] = {}
        for field in fields(self):
            value = vars(self)[field.name]
            if value is None:
                continue
            named |= (
                {f"{field.name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {field.name: value}
            )
        return named

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> Transitions:
        """The transitions that `tensors` holds."""
        pictured: dict[str, Observations] = {"observations": {}, "following": {}}
        for name, value in tensors.items():
            group, _, key = name.partition(".")
            if key:
                pictured[group][key] = value
        plain = {name: tensors[name] for name in ("actions", "rewards", "discounts")}
        plain |= {name: tensors[name] for name in ("weights",) if name in tensors}
        return cls(observations=pictured["observations"], following=pictured["following"], **plain)

    def to(self, device: torch.device) -> Transitions:
        """The transitions on another device."""
        return Transitions.of_tensors({name: value.to(device) for name, value in self.tensors().items()})

    @staticmethod
    def joined(first: Transitions, second: Transitions) -> Transitions:
        """Both, one after the other. If one has weights, those of the other are 1."""
        if (first.weights is None) != (second.weights is None):
            first, second = (
                each if each.weights is not None else replace(each, weights=torch.ones_like(each.rewards))
                for each in (first, second)
            )
        later = second.tensors()
        return Transitions.of_tensors({n: torch.cat([value, later[n]]) for n, value in first.tensors().items()})


def transitions_of(segment: ActionSegment, weight: Tensor, gamma: float, n_step: int = 1) -> Transitions:
    """One transition for every decision of the rows of weight > 0, in order. A window of n steps ends with its episode.

    Args:
        weight: [B] of the rows.
        gamma: discount of one decision.
        n_step: n >= 1, the most rewards of a transition.
    """
    start = torch.nonzero(counted_decisions(segment, weight))[:, 0]
    last = last_decisions(segment, start)
    stop = torch.minimum(start + n_step, last + 1)  # the element after the window
    rewards = torch.zeros(len(start), dtype=torch.float32, device=start.device)
    for k in range(n_step):
        place = torch.minimum(start + k, last)
        rewards += torch.where(start + k <= last, gamma**k * segment.rewards[place].float(), 0.0)
    terminated = segment.terminated[stop - 1]
    discounts = torch.where(terminated, 0.0, torch.tensor(gamma, dtype=torch.float64) ** (stop - start)).float()
    after = torch.where(terminated, stop - 1, stop)  # its value does not count after an end
    return Transitions(
        observations={key: value[start] for key, value in segment.observations.items()},
        actions=segment.actions[start],
        rewards=rewards,
        discounts=discounts,
        following={key: value[after] for key, value in segment.observations.items()},
    )


def last_decisions(segment: ActionSegment, decisions: Tensor) -> Tensor:
    """[N] the last decision of the episode of each of `decisions` [N], as positions in the packed fields."""
    ends = torch.nonzero(segment.ends)[:, 0]
    return ends[torch.searchsorted(ends, decisions)]


def counted_decisions(segment: ActionSegment, weight: Tensor) -> Tensor:
    """[sum L] bool, the decisions of the rows of weight > 0."""
    counts = (weight.cpu() > 0).repeat_interleave(segment.lengths.cpu())
    return segment.loss_mask & counts.to(segment.loss_mask.device)


def num_decisions(segment: ActionSegment, weight: Tensor) -> int:
    """The number of decisions of the rows of weight > 0."""
    return int(counted_decisions(segment, weight).sum())
