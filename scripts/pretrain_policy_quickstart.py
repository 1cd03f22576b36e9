"""Trains the policy that `unirl quickstart embodied` starts from, by imitation of a few demonstrations.

    python scripts/pretrain_policy_quickstart.py          # half a minute; needs metaworld

Four demonstrations of Meta-World's scripted expert on reach-v3, with noise on its actions, train a flow policy that
decides on 5 actions at a time. It is a beginner: within 50 steps it reaches about a tenth of the goals. The result is
unirl/models/policies/quickstart, which ships with the package.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from unirl.envs.metaworld import MetaWorldEnvironment, MetaWorldExpert  # noqa: E402
from unirl.models.policies.bundle import SHIPPED, FlowBundle  # noqa: E402
from unirl.models.policies.flow import FlowPolicy  # noqa: E402
from unirl.sde.noise import key_seed  # noqa: E402
from unirl.types.environments import STATE, EpisodeStart  # noqa: E402

TASK, STEPS, CHUNK = "reach-v3", 60, 5
ETA = 1.0
"""Noise of the stochastic steps: with less, the chains of a group hardly differ."""
NOISE = 0.3
"""Standard deviation of the noise on the expert's actions, so that the demonstrations also show how to come back."""


def demonstrations(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Observations [N, D] and the expert's next CHUNK actions [N, CHUNK A] in `count` episodes."""
    env, expert = MetaWorldEnvironment(task=TASK), MetaWorldExpert(task=TASK)
    generator = torch.Generator().manual_seed(key_seed(seed, "demonstrations"))
    observations, chunks = [], []
    for episode in range(count):
        state = env.reset([0], [EpisodeStart(seed=key_seed(seed, f"demonstration{episode}"))])[STATE]
        states, actions = [], []
        for _ in range(STEPS):
            action = expert.label({STATE: state})[0]
            states.append(state[0])
            actions.append(action)
            noisy = action + NOISE * torch.randn(len(action), generator=generator)
            state = env.step([0], noisy[None]).observations[STATE]
        for start in range(STEPS - CHUNK):
            observations.append(states[start])
            chunks.append(torch.cat(actions[start : start + CHUNK]))
    env.close()
    return torch.stack(observations), torch.stack(chunks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demonstrations", type=int, default=4)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=SHIPPED["quickstart"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    observations, targets = demonstrations(options.demonstrations, options.seed)
    bundle = FlowBundle(
        seed=options.seed, observations=observations.shape[1], actions=targets.shape[1] // CHUNK, chunk=CHUNK, eta=ETA
    )
    policy = bundle.trainable()
    assert isinstance(policy, FlowPolicy)
    policy.encoder.measure({STATE: observations})
    generator = torch.Generator().manual_seed(key_seed(options.seed, "imitation"))
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    for update in range(options.updates):
        rows = torch.randint(len(observations), (256,), generator=generator)
        eps = torch.randn(256, targets.shape[1], generator=generator)
        sigma = torch.rand(256, generator=generator)
        chunks = targets[rows].unflatten(1, (CHUNK, -1))
        loss = policy.imitation({STATE: observations[rows]}, chunks, eps[:, None], sigma).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 200 == 0 or update == options.updates - 1:
            print(f"update {update}: loss {loss:.4f}", flush=True)
    print(bundle.write(options.out, dict(policy.named_parameters())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
