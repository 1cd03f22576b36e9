"""TEMPORARY."""

from __future__ import annotations
from collections.abc import Sequence
import numpy as np
import torch
from torch import Tensor
from unirl.types.environments import *


class GymnasiumEnvironment:
    is_keyed = True

    def __init__(self, *, id: str) -> None:
        import gymnasium as gym

        self.id, self.slots = id, {}
        e = gym.make(id)
        self.slots[0] = e
        a = e.action_space
        if hasattr(a, "n"):
            act = DiscreteActions(int(a.n))
        else:
            act = ContinuousActions(a.shape[0])
            self.low, self.high = a.low, a.high
        self.spaces = EnvironmentSpaces(
            observations={"state": e.observation_space.shape}, actions=act, most_steps=e.spec.max_episode_steps
        )

    def reset(self, slots, starts):
        import gymnasium as gym

        out = []
        for s, st in zip(slots, starts, strict=True):
            if s not in self.slots:
                self.slots[s] = gym.make(self.id)
            out.append(self.slots[s].reset(seed=st.seed % 2**31)[0])
        return {"state": torch.from_numpy(np.stack(out)).float()}

    def step(self, slots, actions):
        a = actions.numpy()
        if a.dtype.kind == "f":
            a = self.low + (np.clip(a, -1, 1) + 1) / 2 * (self.high - self.low)
        obs, rew, term, trunc, suc = [], [], [], [], []
        for i, s in enumerate(slots):
            o, r, t, u, info = self.slots[s].step(a[i])
            obs.append(o)
            rew.append(r)
            term.append(t)
            trunc.append(u)
            suc.append(bool(info.get("success", False)))
        return EnvironmentStep(
            observations={"state": torch.from_numpy(np.stack(obs)).float()},
            rewards=torch.tensor(rew, dtype=torch.float32),
            terminated=torch.tensor(term),
            truncated=torch.tensor(trunc),
            success=torch.tensor(suc),
        )

    def render(self, slots):
        return None

    def close(self):
        pass
