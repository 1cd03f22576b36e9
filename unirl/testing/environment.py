"""The check of an environment: starts are keyed, slots are independent, and an episode that ended needs a reset."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.types.environments import (
    NOT_REPORTED,
    DiscreteActions,
    Environment,
    EnvironmentStep,
    EpisodeStart,
    Observations,
)

STEPS = 20


def check_environment(environment: Environment, *, steps: int = STEPS, seed: int = 0) -> None:
    """Plays episodes of up to `steps` steps in three slots, then closes the environment.

    Observations have the shapes of `spaces`, and are finite float32, or uint8. Rewards are finite float32, ends are
    bool, and success is bool or int8, [B] each. Actions outside of the bounds are clipped to them. A slot whose episode
    ended refuses a step until it is reset. If `is_keyed`, equal starts and actions give equal episodes, bit for bit,
    whatever the other slots do.

    Raises:
        AssertionError: the environment breaks its contract. The message says where.
    """
    try:
        first = play(environment, [0, 1], [seed, seed + 1], steps)
        if environment.is_keyed:
            again = play(environment, [0, 1], [seed, seed + 1], steps)
            assert same(first, again, [(0, 0), (1, 1)]), (
                "equal starts and actions gave two different episodes in the same slots: reset must seed everything "
                "that is random, or is_keyed must be False"
            )
            moved = play(environment, [2, 1], [seed + 5, seed], steps)
            assert same(first, moved, [(0, 1)]), "an episode depends on its slot, or on what the other slots do"
        check_ends(environment, first, steps, seed)
        check_clipping(environment, seed)
    finally:
        environment.close()


def play(environment: Environment, slots: Sequence[int], seeds: Sequence[int], steps: int) -> list[list[Tensor]]:
    """One episode in each slot, as the tensors of each step by slot. An action is decided by seed and step."""
    starts = [EpisodeStart(seed=seed) for seed in seeds]
    observations = environment.reset(slots, starts)
    check_observations(environment, observations, len(slots), "reset")
    episodes = [[values[row] for values in observations.values()] for row in range(len(slots))]
    alive = list(range(len(slots)))
    for number in range(steps):
        if not alive:
            break
        actions = torch.stack([action(environment, 1000 * seeds[row] + number) for row in alive])
        step = environment.step([slots[row] for row in alive], actions)
        check_step(environment, step, len(alive))
        for place, row in enumerate(alive):
            parts = (*step.observations.values(), step.rewards, step.terminated, step.truncated, step.success)
            episodes[row] += [part[place] for part in parts]
        ended = step.terminated | step.truncated
        alive = [row for place, row in enumerate(alive) if not ended[place]]
    return episodes


def action(environment: Environment, seed: int) -> Tensor:
    """Random actions within the bounds, in the shape that one step takes for a slot."""
    generator = torch.Generator().manual_seed(seed)
    spaces = environment.spaces
    if isinstance(spaces.actions, DiscreteActions):
        return torch.randint(spaces.actions.count, spaces.step_shape, generator=generator)
    return torch.rand(spaces.step_shape, generator=generator) * 2 - 1


def check_observations(environment: Environment, observations: Observations, count: int, what: str) -> None:
    shapes = environment.spaces.observations
    assert observations.keys() == shapes.keys(), (
        f"{what}: observations {sorted(observations)}, but spaces has {sorted(shapes)}"
    )
    for key, values in observations.items():
        assert values.shape == (count, *shapes[key]), (
            f"{what}: observation '{key}' has shape {list(values.shape)}, expected {[count, *shapes[key]]}"
        )
        assert values.dtype in (torch.float32, torch.uint8), f"{what}: observation '{key}' is {values.dtype}"
        assert bool(values.isfinite().all()), f"{what}: observation '{key}' has numbers that are not finite"


def check_step(environment: Environment, step: EnvironmentStep, count: int) -> None:
    assert not step.faults, f"step: faults {dict(step.faults)}"
    check_observations(environment, step.observations, count, "step")
    assert step.rewards.shape == (count,) and step.rewards.dtype == torch.float32, (
        f"rewards must be [{count}] float32, got {list(step.rewards.shape)} {step.rewards.dtype}"
    )
    assert bool(step.rewards.isfinite().all()), f"rewards are not finite: {step.rewards.tolist()}"
    ends = {"terminated": step.terminated, "truncated": step.truncated}
    for name, flag in ends.items():
        assert flag.shape == (count,) and flag.dtype == torch.bool, (
            f"{name} must be [{count}] bool, got {list(flag.shape)} {flag.dtype}"
        )
    success = step.success
    assert success.shape == (count,) and success.dtype in (torch.bool, torch.int8), (
        f"success must be [{count}] bool or int8, got {list(success.shape)} {success.dtype}"
    )
    assert set(success.tolist()) <= {NOT_REPORTED, 0, 1}, (
        f"success must be 1, 0, or {NOT_REPORTED} where nothing is reported, got {success.tolist()}"
    )


def same(first: list[list[Tensor]], second: list[list[Tensor]], pairs: Sequence[tuple[int, int]]) -> bool:
    """True if the episodes of all pairs are equal, bit for bit."""
    return all(
        len(first[a]) == len(second[b]) and all(torch.equal(x, y) for x, y in zip(first[a], second[b], strict=True))
        for a, b in pairs
    )


def check_ends(environment: Environment, episodes: list[list[Tensor]], steps: int, seed: int) -> None:
    """A slot whose episode ended refuses a step, and another reset starts it again."""
    terminated, truncated = episodes[0][-3:-1]
    if not (terminated or truncated):
        return  # the episode did not end within the steps of this check
    play(environment, [0], [seed], steps)
    try:
        environment.step([0], action(environment, 0)[None])
    except Exception:  # the contract does not say which
        environment.reset([0], [EpisodeStart(seed=seed)])
        return
    raise AssertionError("a slot whose episode ended took another step. It must refuse until it is reset")


def check_clipping(environment: Environment, seed: int) -> None:
    """Actions outside of the bounds do what those at the bounds do."""
    if not environment.is_keyed:
        return
    space = environment.spaces.actions
    for side in (-1, 1):
        results = []
        for size in (1, 3):
            environment.reset([1], [EpisodeStart(seed=seed)])
            if isinstance(space, DiscreteActions):
                bound = 0 if side < 0 else space.count - 1
                given = torch.full((1, *environment.spaces.step_shape), bound + side * (size - 1))
            else:
                given = torch.full((1, *environment.spaces.step_shape), float(side * size))
            step = environment.step([1], given)
            check_step(environment, step, 1)
            results.append([*step.observations.values(), step.rewards])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (
            f"an action beyond {side} was not clipped to the bound: the step differs from the one at the bound"
        )
