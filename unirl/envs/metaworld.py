"""TEMPORARY."""
import warnings
import numpy as np, torch
from unirl.types.environments import *
from unirl.envs.gymnasium import GymnasiumEnvironment

class MetaWorldEnvironment(GymnasiumEnvironment):
    def __init__(self, *, task: str) -> None:
        import gymnasium as gym, metaworld, logging
        warnings.filterwarnings("ignore")
        self.make = lambda: gym.make("Meta-World/MT1", env_name=task, seed=0, disable_env_checker=True)
        self.slots = {0: self.make()}
        e = self.slots[0]
        self.low, self.high = e.action_space.low, e.action_space.high
        self.spaces = EnvironmentSpaces(observations={"state": e.observation_space.shape}, actions=ContinuousActions(4), most_steps=500)
    def reset(self, slots, starts):
        for s in slots:
            if s not in self.slots: self.slots[s] = self.make()
        return super().reset(slots, starts)

def expert_of(task):
    from metaworld.policies import ENV_POLICY_MAP
    p = ENV_POLICY_MAP[task]()
    return lambda o: torch.from_numpy(np.asarray(p.get_action(o.double().numpy()))).float()
