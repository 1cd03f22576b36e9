"""Records episodes of Meta-World's scripted expert, an exported policy or random actions as a data set of Minari.

    python scripts/record_demonstrations.py push-v3 --out demonstrations/push    # seconds
    python scripts/record_demonstrations.py reach-v3 --policy runs/RUN/export/CHECKPOINT/full --out demonstrations/reach
    python scripts/record_demonstrations.py HalfCheetah-v5 --policy FOLDER --out demonstrations/cheetah
    python scripts/record_demonstrations.py Reacher-v5 --policy random --out demonstrations/random

It needs pip install 'unirl[metaworld,minari]'. TASK is a task of Meta-World, or an id of Gymnasium, which has no
expert. A recipe reads the data set with `stack.offline: {path: FOLDER}`. The recorded actions are those that the
environment took, in [-1, 1]; with --noise they are the expert's with Gaussian noise, clipped. datasets/metaworld_push
was recorded by the first command with `--episodes 10 --noise 0.1`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from unirl.envs.gymnasium import GymnasiumEnvironment  # noqa: E402
from unirl.envs.metaworld import MetaWorldEnvironment, MetaWorldExpert  # noqa: E402
from unirl.models.policies.bundle import PolicyBundle  # noqa: E402
from unirl.sde.noise import key_seed  # noqa: E402
from unirl.types.environments import STATE, ContinuousActions, Environment, EpisodeStart, Observations  # noqa: E402

Act = Callable[[Observations], Tensor]
"""The next actions [1, C, A] or [1, C] of the episode, for observations [1, *shape]."""


def environment_of(task: str, max_steps: int) -> Environment:
    """A task of Meta-World, or an environment of Gymnasium."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    if task in ALL_V3_ENVIRONMENTS:
        return MetaWorldEnvironment(task=task, max_steps=max_steps)
    return GymnasiumEnvironment(id=task, max_steps=max_steps)


def actor_of(task: str, policy: str | None, env: Environment, generator: torch.Generator) -> Act:
    """The expert of a task of Meta-World, an exported policy, which draws its actions, or uniform actions."""
    if policy == "random":
        space = env.spaces.actions
        if isinstance(space, ContinuousActions):
            return lambda seen: 2 * torch.rand(1, 1, space.size, generator=generator) - 1
        return lambda seen: torch.randint(space.count, (1, 1), generator=generator)
    if policy is None:
        expert = MetaWorldExpert(task=task)
        return lambda seen: expert.label(seen)[:, None]
    stage = PolicyBundle.from_files(path=policy).stage()
    draw = torch.randn if stage.policy.noise == "normal" else torch.rand
    return lambda seen: stage.decide(
        {key: seen[key] for key in stage.facts.observations}, draw(1, *stage.policy.noise_shape, generator=generator)
    )["executed"]


def record(env: Environment, act: Act, number: int, options: argparse.Namespace, generator: torch.Generator) -> Any:
    """One episode as a buffer of Minari, its return, and whether it succeeded."""
    from minari.data_collector.episode_buffer import EpisodeBuffer

    seed = key_seed(options.seed, f"demonstration{number}")
    seen = env.reset([0], [EpisodeStart(seed=seed)])
    shown, actions, rewards, ends, cuts = [seen], [], [], [], []
    success, over = False, False
    while not over:
        for action in act(seen)[0]:
            if isinstance(env.spaces.actions, ContinuousActions):
                action = (action + options.noise * torch.randn(action.shape, generator=generator)).clamp(-1, 1)
            step = env.step([0], action[None])
            if step.faults:
                raise SystemExit(f"episode {number}: the environment failed: {step.faults[0]}")
            seen = step.observations
            shown.append(seen)
            actions.append(action.numpy())
            rewards.append(float(step.rewards))
            ends.append(bool(step.terminated))
            cuts.append(bool(step.truncated))
            success |= bool(step.success)
            over = ends[-1] or cuts[-1]
            if over:
                break
    observations: Any = {key: np.stack([each[key][0].numpy() for each in shown]) for key in seen}
    if list(observations) == [STATE]:
        observations = observations[STATE]
    buffer = EpisodeBuffer(
        id=number,
        seed=seed % 2**31,
        observations=observations,
        actions=np.stack(actions),
        rewards=rewards,
        terminations=ends,
        truncations=cuts,
    )
    return buffer, sum(rewards), success


def write(env: Environment, buffers: list[Any], out: Path, task: str) -> None:
    """Write the episodes as the data set `out`."""
    import minari
    from gymnasium import spaces

    parts: dict[str, spaces.Space[Any]] = {
        key: spaces.Box(0, 255, shape, np.uint8) if len(shape) == 3 else spaces.Box(-np.inf, np.inf, shape, np.float32)
        for key, shape in env.spaces.observations.items()
    }
    actions: spaces.Space[Any] = (
        spaces.Box(-1, 1, (env.spaces.actions.size,), np.float32)
        if isinstance(env.spaces.actions, ContinuousActions)
        else spaces.Discrete(env.spaces.actions.count)
    )
    with TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        minari.create_dataset_from_buffers(
            "recorded/demonstrations-v0",
            buffers,
            observation_space=parts[STATE] if list(parts) == [STATE] else spaces.Dict(parts),
            action_space=actions,
            data_format="hdf5",
            jpeg_encoding=False,
            description=f"{len(buffers)} episodes of {task}. Numbers of actions lie in [-1, 1]",
        )
        shutil.copytree(Path(folder) / "recorded" / "demonstrations-v0", out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="a task of Meta-World such as push-v3, or an id of Gymnasium")
    parser.add_argument("--policy", help="folder of an exported policy, or random; absent: the scripted expert")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--max-steps", type=int, default=100, help="steps of an episode")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of the noise on actions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the data set, which must not exist")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"--out {options.out} exists. Give another folder, or remove it")
    generator = torch.Generator().manual_seed(key_seed(options.seed, "noise"))
    with closing(environment_of(options.task, options.max_steps)) as env:
        act = actor_of(options.task, options.policy, env, generator)
        found = [record(env, act, number, options, generator) for number in range(options.episodes)]
        write(env, [buffer for buffer, _, _ in found], options.out, options.task)
    returns = [total for _, total, _ in found]
    print(
        f"{options.out}: {len(found)} episodes, return {min(returns):.1f} to {max(returns):.1f}, "
        f"{sum(success for _, _, success in found)} with success"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
