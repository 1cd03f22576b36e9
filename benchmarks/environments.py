"""Steps of our slots against a bare loop over `gymnasium.make`, and against Gymnasium's SyncVectorEnv.

    python benchmarks/environments.py --clock cpu --json benchmarks/environments.json

A bare loop resets each environment that ended and keeps the observations of a step in one array, as every policy needs
them. `ratio` is our time over its time; with --clock cpu, cases with workers show this process alone. About a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import CLOCKS, Ratio, measuring, paired, report
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.types.environments import ContinuousActions, EpisodeStart

SLOTS, STEPS = 8, 1000
IDS = ("CartPole-v1", "HalfCheetah-v5")


def ours(id: str, actions: torch.Tensor, workers: int) -> Callable[[], None]:
    environment = GymnasiumEnvironment(id=id, workers=workers)
    slots = list(range(SLOTS))

    def run() -> None:
        environment.reset(slots, [EpisodeStart(seed=slot) for slot in slots])
        for number, action in enumerate(actions):
            step = environment.step(slots, action)
            ended = step.terminated | step.truncated
            if ended.any():
                again = ended.nonzero().flatten().tolist()
                environment.reset(again, [EpisodeStart(seed=number + slot) for slot in again])

    return run


def bare(id: str, actions: torch.Tensor) -> Callable[[], None]:
    import gymnasium

    environments = [gymnasium.make(id) for _ in range(SLOTS)]
    given = list(actions.numpy()) if actions.is_floating_point() else actions.tolist()

    def run() -> None:
        for slot, environment in enumerate(environments):
            environment.reset(seed=slot)
        for number, action in enumerate(given):
            observations = np.empty((SLOTS, *environments[0].observation_space.shape), np.float32)
            for slot, environment in enumerate(environments):
                observations[slot], _, terminated, truncated, _ = environment.step(action[slot])
                if terminated or truncated:
                    environment.reset(seed=number + slot)

    return run


def vector(id: str, actions: torch.Tensor) -> Callable[[], None]:
    import gymnasium

    environments = gymnasium.make_vec(id, num_envs=SLOTS, vectorization_mode="sync")
    given = actions.numpy()

    def run() -> None:
        environments.reset(seed=0)
        for action in given:
            environments.step(action)

    return run


def main() -> None:
    options = measuring(__doc__ or "", pairs=9).parse_args()
    results: list[Ratio] = []
    for id in IDS:
        space = GymnasiumEnvironment(id=id).spaces.actions
        if isinstance(space, ContinuousActions):
            actions = torch.rand((STEPS, SLOTS, space.size), generator=torch.Generator().manual_seed(0)) * 2 - 1
        else:
            actions = torch.randint(space.count, (STEPS, SLOTS), generator=torch.Generator().manual_seed(0))
        shapes: dict[str, int | float | str] = {"slots": SLOTS, "steps": STEPS, "clock": options.clock}
        for name, ways in {
            f"{id} against a loop": (ours(id, actions, 0), bare(id, actions)),
            f"{id} against SyncVectorEnv": (ours(id, actions, 0), vector(id, actions)),
            f"{id} workers=2 against a loop": (ours(id, actions, 2), bare(id, actions)),
        }.items():
            if options.cases and not any(case in name for case in options.cases):
                continue
            results.append(paired(name, shapes, *ways, options.pairs, CLOCKS[options.clock]))
    report(results, options.json)


if __name__ == "__main__":
    main()
