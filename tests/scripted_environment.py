"""An environment whose every number is known beforehand, and requests to a policy in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unirl.models.policies.bundle import CategoricalBundle, GaussianBundle, PolicyBundle
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.types.environments import (
    NOT_REPORTED,
    ContinuousActions,
    DiscreteActions,
    EnvironmentSpaces,
    EnvironmentStep,
    EpisodeStart,
    Observations,
)
from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.sampling import ActionSamplingParams

KINDS = [DiscreteActions(3), ContinuousActions(2)]


class Clocks:
    """Each slot counts its steps: observation (start, steps so far). Step t gives reward t.

    Episodes that start at an even second end after 3 steps, the others after 5. `cuts`: they are cut off instead.
    Their end is a success. Slots in `silent` report none.
    """

    is_keyed = True

    def __init__(
        self,
        actions: DiscreteActions | ContinuousActions,
        cuts: bool = False,
        broken: Sequence[int] = (),
        silent: Sequence[int] = (),
    ) -> None:
        self.spaces = EnvironmentSpaces(observations={"state": (2,)}, actions=actions, most_steps=5)
        self.cuts, self.broken, self.silent = cuts, broken, silent
        self.starts: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.seeds: list[int] = []
        self.actions: list[Tensor] = []

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> Observations:
        for slot, start in zip(slots, starts, strict=True):
            self.starts[slot], self.steps[slot] = start.seed % 1000, 0
            self.seeds.append(start.seed)
        return self.observe(slots)

    def observe(self, slots: Sequence[int]) -> Observations:
        return {"state": torch.tensor([[self.starts[s] / 1000, float(self.steps[s])] for s in slots])}

    def step(self, slots: Sequence[int], actions: Tensor) -> EnvironmentStep:
        self.actions.append(actions)
        for slot in slots:
            self.steps[slot] += 1
        over = torch.tensor([self.steps[s] >= length_of(self.starts[s]) for s in slots])
        faults = {i: "it broke" for i, slot in enumerate(slots) if slot in self.broken and self.steps[slot] == 2}
        over |= torch.tensor([i in faults for i in range(len(slots))])
        return EnvironmentStep(
            observations=self.observe(slots),
            rewards=torch.tensor([float(self.steps[s]) for s in slots]),
            terminated=over & (not self.cuts),
            truncated=over & self.cuts,
            success=over.char().masked_fill(torch.tensor([s in self.silent for s in slots]), NOT_REPORTED),
            faults=faults,
        )

    def render(self, slots: Sequence[int]) -> None:
        return None

    def close(self) -> None:
        pass


def length_of(start: int) -> int:
    return 3 if start % 2 == 0 else 5


def pipeline(env: Clocks, seed: int = 0) -> PolicyPipeline:
    bundle: PolicyBundle
    if isinstance(env.spaces.actions, DiscreteActions):
        bundle = CategoricalBundle(observations=2, actions=env.spaces.actions.count, seed=seed)
    else:
        bundle = GaussianBundle(observations=2, actions=env.spaces.actions.size, seed=seed)
    return PolicyPipeline(bundle, env=env)


def request(
    rows: int = 4, *, step: int = 0, groups: Sequence[str] = (), tasks: Sequence[str] = (), **settings: object
) -> RolloutReq:
    params = replace(ActionSamplingParams(), **settings)
    return RolloutReq(
        sample_ids=[f"s{i}" for i in range(rows)],
        group_ids=list(groups) or [f"g{i}" for i in range(rows)],
        primitives={"text": Texts(texts=list(tasks) or [""] * rows)},
        metadata=[{} for _ in range(rows)],
        tracks={"action": TrackSpec(sampling=params)},
        purpose="r",
        step=step,
    )
