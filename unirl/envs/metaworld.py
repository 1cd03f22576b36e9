"""TEMPORARY."""

import warnings
import numpy as np, torch
from unirl.types.environments import *
from unirl.envs.gymnasium import GymnasiumEnvironment


class MetaWorldEnvironment(GymnasiumEnvironment):
    def __init__(self, *, task: str) -> None:
        import gymnasium as gym, logging
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        warnings.filterwarnings("ignore")

        def make():
            e = ALL_V3_ENVIRONMENTS[task]()
            e._freeze_rand_vec = False
            e._set_task_called = True
            e.seeded_rand_vec = True
            e._partially_observable = False
            del e.sawyer_observation_space
            return e

        self.make = make
        self.slots = {0: self.make()}
        e = self.slots[0]
        self.low, self.high = e.action_space.low, e.action_space.high
        self.spaces = EnvironmentSpaces(observations={"state": (39,)}, actions=ContinuousActions(4), most_steps=500)

    def reset(self, slots, starts):
        out = []
        for s, st in zip(slots, starts, strict=True):
            if s not in self.slots:
                self.slots[s] = self.make()
            self.slots[s].seed(st.seed % 2**31)
            out.append(self.slots[s].reset()[0])
        return {"state": torch.from_numpy(np.stack(out)).float()}


def expert_of(task):
    from metaworld.policies import ENV_POLICY_MAP

    p = ENV_POLICY_MAP[task]()
    return lambda o: torch.from_numpy(np.asarray(p.get_action(o.double().numpy()))).float()
