"""Steps of training, acting and updating, beside those of Stable-Baselines3. `ratio` is our time over theirs.

    OMP_NUM_THREADS=1 python benchmarks/beside_sb3.py --clock cpu --json benchmarks/beside_sb3.json

Both play HalfCheetah-v5 with networks of the same sizes. `sac`: an episode of 200 steps, then an update of 256
transitions for each of them. `crossq`: the same, our CrossQ beside their SAC. `ppo`: two episodes of 1000 steps, then
ten passes over minibatches of 64, with running normalization. Needs stable-baselines3. Some minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import CLOCKS, Ratio, measuring, paired, report
from unirl.algorithms.action_ppo import ActionPPO
from unirl.algorithms.sac import SAC
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.models.policies.bundle import GaussianBundle
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import ValueConfig
from unirl.train.replay_stack import ReplayStack
from unirl.train.stack import TrainStack
from unirl.train.transition_stack import TransitionStack
from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.sampling import ActionSamplingParams

ID, RATE = "HalfCheetah-v5", 3e-4
SAC_STEPS, SAC_WIDTH = 200, 256
PPO_STEPS, PPO_ROWS, PPO_WIDTH = 1000, 2, 64


def request(step: int, rows: int) -> RolloutReq:
    ids = [f"start{step}.{row}" for row in range(rows)]
    return RolloutReq(
        sample_ids=ids,
        group_ids=ids,
        primitives={"text": Texts(texts=[""] * rows)},
        metadata=[{} for _ in ids],
        tracks={"action": TrackSpec(sampling=ActionSamplingParams())},
        purpose="r",
        step=step,
    )


def step_of(pipeline: PolicyPipeline, stack: TrainStack, rows: int) -> Callable[[], None]:
    """One step of our loop: episodes, then updates."""
    numbers = count()

    def step() -> None:
        with stack.backend.sampling():
            resp = pipeline.generate(request(next(numbers), rows), rows)
        stack.train_track(resp.tracks["action"])

    return step


def backend_of(bundle: GaussianBundle, **value: float) -> FSDPBackend:
    config = ValueConfig(learning_rate=RATE, **value)  # type: ignore[arg-type]
    return FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=RATE), value_cfg=config)


def our_sac(**settings: Any) -> Callable[[], None]:
    bundle = GaussianBundle(
        observations=17, actions=6, squashed=True, log_std=-0.16, width=SAC_WIDTH, activation="relu"
    )
    pipeline = PolicyPipeline(bundle, env=GymnasiumEnvironment(id=ID, max_steps=SAC_STEPS))
    backend = backend_of(bundle, width=SAC_WIDTH, max_grad_norm=1e9)
    stack = ReplayStack(backend, SAC(**settings), pipeline.stage, warmup=SAC_STEPS, max_grad_norm=1e9)
    return step_of(pipeline, stack, 1)


def our_ppo() -> Callable[[], None]:
    bundle = GaussianBundle(observations=17, actions=6, log_std=-0.5, normalize=True, width=PPO_WIDTH)
    pipeline = PolicyPipeline(bundle, env=GymnasiumEnvironment(id=ID, max_steps=PPO_STEPS))
    stack = TransitionStack(backend_of(bundle, width=PPO_WIDTH), ActionPPO(), pipeline.stage, normalize_rewards=True)
    return step_of(pipeline, stack, PPO_ROWS)


def their_sac() -> Callable[[], None]:
    import gymnasium
    import stable_baselines3 as sb3

    environment = gymnasium.make(ID, max_episode_steps=SAC_STEPS)
    model = sb3.SAC(
        "MlpPolicy", environment, learning_rate=RATE, learning_starts=SAC_STEPS - 1, train_freq=(1, "episode"),
        gradient_steps=-1, policy_kwargs={"net_arch": [SAC_WIDTH, SAC_WIDTH]}, device="cpu",
    )  # fmt: skip
    return lambda: model.learn(SAC_STEPS, reset_num_timesteps=False)


def their_ppo() -> Callable[[], None]:
    import stable_baselines3 as sb3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    arch = [PPO_WIDTH, PPO_WIDTH]
    model = sb3.PPO(
        "MlpPolicy", VecNormalize(make_vec_env(ID, n_envs=PPO_ROWS)), learning_rate=RATE, n_steps=PPO_STEPS,
        batch_size=64, n_epochs=10, policy_kwargs={"net_arch": {"pi": arch, "vf": arch}}, device="cpu",
    )  # fmt: skip
    return lambda: model.learn(PPO_ROWS * PPO_STEPS, reset_num_timesteps=False)


CASES: dict[str, tuple[Callable[[], Callable[[], None]], Callable[[], Callable[[], None]], int]] = {
    "sac": (our_sac, their_sac, SAC_STEPS),
    "crossq": (partial(our_sac, norm="batch", target="live"), their_sac, SAC_STEPS),
    "ppo": (our_ppo, their_ppo, PPO_ROWS * PPO_STEPS),
}


def main() -> None:
    options = measuring(__doc__ or "", pairs=9).parse_args()
    torch.set_num_threads(1)
    results: list[Ratio] = []
    for name, (ours, theirs, steps) in CASES.items():
        if options.cases and not any(part in name for part in options.cases):
            continue
        shapes: dict[str, int | float | str] = {"environment_steps": steps, "clock": options.clock}
        results.append(paired(name, shapes, ours(), theirs(), options.pairs, CLOCKS[options.clock]))
    report(results, options.json)


if __name__ == "__main__":
    main()
