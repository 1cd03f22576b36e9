"""Acting and whole steps of PPO against the same environment steps and network calls in a bare loop.

    OMP_NUM_THREADS=1 python benchmarks/env_to_loss.py --clock cpu --json benchmarks/env_to_loss.json

`act` is a rollout; its bare loop keeps only the newest observations, where the rollout records every decision. `step`
is a step of a recipe, from the start of its episodes to its last update and the files of the run; its bare loop has the
same environments, networks, minibatches and optimizer, and neither metrics nor checks. `ratio` is our time over that of
the bare loop. Some minutes. Meta-World needs the extra metaworld.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import CLOCKS, Ratio, measuring, paired, report
from unirl.config.load import load
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.envs.metaworld import MetaWorldEnvironment, make_task
from unirl.models.policies.bundle import CategoricalBundle, GaussianBundle, PolicyBundle
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.trainer.assemble import build_trainer
from unirl.types.environments import Environment
from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.sampling import ActionSamplingParams

if TYPE_CHECKING:
    import gymnasium

    from unirl.trainer.loop import Trainer

ROWS, DECISIONS = (16, 64), 200


@dataclass(frozen=True)
class Task:
    """An environment, for both loops, and the recipe that trains a policy in it."""

    ours: Callable[[], Environment]
    theirs: Callable[[], gymnasium.Env[Any, Any]]
    bundle: Callable[[], PolicyBundle]
    recipe: str
    rows: int
    decisions: int
    minibatch: int
    rate: float


def made(id: str, **settings: Any) -> gymnasium.Env[Any, Any]:
    import gymnasium

    return gymnasium.make(id, **settings)


def reach(limit: int) -> gymnasium.Env[Any, Any]:
    import gymnasium

    return gymnasium.wrappers.TimeLimit(make_task("reach-v3", render_mode=None), limit)


TASKS = {
    "CartPole-v1": Task(
        partial(GymnasiumEnvironment, id="CartPole-v1"), partial(made, "CartPole-v1"),
        partial(CategoricalBundle, observations=4, actions=2), "embodied/cartpole_ppo", 8, 256, 256, 1e-3,
    ),
    "HalfCheetah-v5": Task(
        partial(GymnasiumEnvironment, id="HalfCheetah-v5"), partial(made, "HalfCheetah-v5"),
        partial(GaussianBundle, observations=17, actions=6, log_std=-0.5, normalize=True), "embodied/halfcheetah_ppo",
        2, 1000, 64, 3e-4,
    ),
    "reach-v3": Task(
        partial(MetaWorldEnvironment, task="reach-v3", max_steps=100), partial(reach, 100),
        partial(GaussianBundle, observations=39, actions=4), "embodied/metaworld_reach_ppo", 16, 100, 256, 3e-4,
    ),
}  # fmt: skip


# Acting


def request(rows: int) -> RolloutReq:
    ids = [f"start{row}" for row in range(rows)]
    params = ActionSamplingParams(max_steps=DECISIONS, continuing=True)
    return RolloutReq(
        sample_ids=ids,
        group_ids=ids,
        primitives={"text": Texts(texts=[""] * rows)},
        metadata=[{} for _ in ids],
        tracks={"action": TrackSpec(sampling=params)},
        purpose="r",
        step=0,
    )


def acting(task: Task, bundle: PolicyBundle, rows: int) -> Callable[[], None]:
    pipeline = PolicyPipeline(bundle, env=task.ours())
    req = request(rows)

    def run() -> None:
        pipeline.generate(req, rows)

    return run


class BareActing:
    """Environments that a network acts in, with numpy and nothing else around it."""

    def __init__(self, task: Task, bundle: PolicyBundle, rows: int) -> None:
        self.environments = [task.theirs() for _ in range(rows)]
        self.policy = bundle.stage().policy
        shape = self.environments[0].observation_space.shape
        assert shape is not None
        self.shape, self.starts = (rows, *shape), itertools.count()

    def reset(self) -> np.ndarray:
        return np.stack([each.reset(seed=next(self.starts))[0] for each in self.environments]).astype(np.float32)

    @torch.no_grad()
    def decide(self, observations: np.ndarray, noise: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.policy({"state": torch.from_numpy(observations)}, noise=noise)
        return outputs["actions"], outputs["logp"]

    def noise(self, decisions: int) -> Tensor:
        draw = torch.randn if self.policy.noise == "normal" else torch.rand
        return draw(decisions, self.shape[0], *self.policy.noise_shape)

    def step(self, actions: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The next observations [N, ...], rewards [N], and which episodes [N] terminated and were truncated."""
        given: Sequence[Any] = list(actions.clamp(-1, 1).numpy()) if actions.is_floating_point() else actions.tolist()
        observations = np.empty(self.shape, np.float32)
        rewards, ends = np.empty(self.shape[0], np.float32), np.empty((2, self.shape[0]), bool)
        for row, environment in enumerate(self.environments):
            observations[row], rewards[row], ends[0, row], ends[1, row], _ = environment.step(given[row])
        return observations, rewards, ends[0], ends[1]

    def again(self, observations: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """The observations, those of new episodes where the last one ended."""
        for row in np.flatnonzero(ended):
            observations[row] = self.environments[row].reset(seed=next(self.starts))[0]
        return observations


def bare_acting(task: Task, bundle: PolicyBundle, rows: int) -> Callable[[], None]:
    actor = BareActing(task, bundle, rows)

    def run() -> None:
        observations = actor.reset()
        for noise in actor.noise(DECISIONS):
            actions, _ = actor.decide(observations, noise)
            observations, _, terminated, truncated = actor.step(actions)
            observations = actor.again(observations, terminated | truncated)

    return run


# Whole steps of PPO


def step_of(trainer: Trainer) -> Callable[[], None]:
    """One step of the loop of a run, without checkpoints and evaluations."""

    def run() -> None:
        with trainer.tracker.timers.phase("step"):
            trainer.learn(trainer.state.step, trainer.produce(trainer.state.step))
        trainer.state.step += 1
        trainer.tracker.log_step(trainer.state.step)

    return run


@contextmanager
def started(recipe: str) -> Iterator[Trainer]:
    """The trainer of a recipe, before its first step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ("runtime=local", "num_rollouts=1000", "evaluation.eval_steps=0", "save_interval=0")
        loaded = load(recipe, (*settings, "tracking.sample_steps=0", f"run.dir={folder}/run"))
        with build_trainer(loaded) as trainer:
            yield trainer


def bare_step(task: Task, gamma: float = 0.99, lam: float = 0.95, epochs: int = 10) -> Callable[[], None]:
    """PPO as a single file would have it: GAE, ten passes over minibatches, clipped ratios, two gradient clips."""
    bundle = task.bundle()
    actor, head = BareActing(task, bundle, task.rows), bundle.stage().build_value_head(64, 0)
    policy_weights, head_weights = list(actor.policy.parameters()), list(head.parameters())
    optimizer = torch.optim.AdamW([*policy_weights, *head_weights], lr=task.rate, weight_decay=0.0, fused=True)

    def values(observations: Tensor) -> Tensor:
        with torch.no_grad():
            flat = head({"state": observations.flatten(0, 1)})
        return flat.view(observations.shape[:2])

    def run() -> None:
        observed, followed, acted, logps = [], [], [], []
        rewarded, ended, terminated = [], [], []
        now = actor.reset()
        for noise in actor.noise(task.decisions):
            actions, logp = actor.decide(now, noise)
            after, rewards, over, cut = actor.step(actions)
            observed.append(now), acted.append(actions), logps.append(logp), followed.append(after.copy())
            rewarded.append(rewards), terminated.append(over), ended.append(over | cut)
            now = actor.again(after, over | cut)
        observations, following = (torch.from_numpy(np.stack(each)) for each in (observed, followed))
        rewards, over, end = (torch.from_numpy(np.stack(each)) for each in (rewarded, terminated, ended))
        now_values = values(observations)
        delta = rewards + gamma * values(following).masked_fill(over, 0.0) - now_values
        advantages, running = torch.empty_like(delta), torch.zeros(task.rows)
        for t in reversed(range(task.decisions)):
            running = delta[t] + gamma * lam * running.masked_fill(end[t], 0.0)
            advantages[t] = running
        returns = (advantages + now_values).flatten()
        flat = ((advantages - advantages.mean()) / (advantages.std() + 1e-8)).flatten()
        states, actions, old = (
            observations.flatten(0, 1),
            torch.stack(acted).flatten(0, 1),
            torch.stack(logps).flatten(),
        )
        for _ in range(epochs):
            for chosen in torch.randperm(len(old)).split(task.minibatch):
                state, advantage = {"state": states[chosen]}, flat[chosen]
                ratio = (actor.policy(state, actions=actions[chosen])["logp"] - old[chosen]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
                loss = loss + 0.5 * (head(state) - returns[chosen]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(policy_weights, 1.0)
                torch.nn.utils.clip_grad_norm_(head_weights, 1.0)
                optimizer.step()

    return run


def main() -> None:
    options = measuring(__doc__ or "", pairs=9).parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # as a run does (`unirl/trainer/loop.py`), and for both loops
    clock, results = CLOCKS[options.clock], list[Ratio]()

    def is_chosen(name: str) -> bool:
        return not options.cases or any(part in name for part in options.cases)

    for id, task in TASKS.items():
        for rows in ROWS:
            if is_chosen(name := f"act {id}"):
                bundle = task.bundle()
                shapes: dict[str, int | float | str] = {"rows": rows, "decisions": DECISIONS, "clock": options.clock}
                both = acting(task, bundle, rows), bare_acting(task, bundle, rows)
                results.append(paired(name, shapes, *both, options.pairs, clock))
        if is_chosen(name := f"step {id}"):
            shapes = {"rows": task.rows, "decisions": task.decisions, "minibatch": task.minibatch}
            with started(task.recipe) as trainer:
                both = step_of(trainer), bare_step(task)
                results.append(paired(name, shapes | {"clock": options.clock}, *both, options.pairs, clock))
    report(results, options.json)


if __name__ == "__main__":
    main()
