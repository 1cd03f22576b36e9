"""Environments of Gymnasium for tests: one whose best return is known, and one that fails on demand.

`unirl.testing.toy_environments:LQR-v0` is a linear system with quadratic cost and a finite horizon T:

    x_0 ~ N(0, S0),   x_{t+1} = A x_t + B u_t + w_t,   w_t ~ N(0, W),   reward_t = -(x_t' Q x_t + u_t' R u_t)

Its best policy is u_t = -K_t x_t, and its best expected return is -(tr(P_0 S0) + sum_t tr(P_{t+1} W)), where P_T = 0
and

    K_t = (R + B' P_{t+1} B)^-1 B' P_{t+1} A,   P_t = Q + A' P_{t+1} (A - B K_t)

(Bertsekas, Dynamic Programming and Optimal Control, volume 1, section 4.1). |u| is at most `bound`, which is so wide by
default that the best policy does not reach it. The observation is x and the part of the episode that has passed, which
decides K_t.

`unirl.testing.toy_environments:Faulty-v0` fails at the step that the options of its reset name.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

HORIZON = 20
A: Array = np.array([[1.0, 0.2], [0.0, 1.0]])
B: Array = np.array([[0.0], [0.2]])
Q: Array = np.diag([1.0, 0.1])
R: Array = np.array([[0.05]])
W: Array = np.diag([1e-4, 1e-3])
S0: Array = np.diag([0.25, 0.25])
BOUND = 20.0
"""Bound of |u| by default: an action of 1 is u = bound."""


def riccati() -> tuple[list[Array], list[Array]]:
    """The gains K_0 ... K_{T-1}, each [1, 2], and the costs P_0 ... P_T, each [2, 2]."""
    costs: list[Array] = [np.zeros_like(Q)]
    gains: list[Array] = []
    for _ in range(HORIZON):
        after = costs[0]
        gain = np.linalg.solve(R + B.T @ after @ B, B.T @ after @ A)
        gains.insert(0, gain)
        costs.insert(0, Q + A.T @ after @ (A - B @ gain))
    return gains, costs


def best_return() -> float:
    """The expected return of the best policy."""
    _, costs = riccati()
    return -float(np.trace(costs[0] @ S0) + sum(np.trace(cost @ W) for cost in costs[1:]))


class LQREnvironment(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """The linear system of this module. Its episode terminates after HORIZON steps."""

    def __init__(self, render_mode: str | None = None, bound: float = BOUND) -> None:
        self.bound = bound
        self.observation_space = gymnasium.spaces.Box(-1000.0, 1000.0, (3,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.render_mode = render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._x = np.sqrt(np.diag(S0)) * self.np_random.standard_normal(2)
        self._time = 0
        return self._observation(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        u = self.bound * np.asarray(action, np.float64)
        cost = float(self._x @ Q @ self._x + u @ R @ u)
        self._x = A @ self._x + B @ u + np.sqrt(np.diag(W)) * self.np_random.standard_normal(2)
        self._time += 1
        return self._observation(), -cost, self._time == HORIZON, False, {}

    def _observation(self) -> NDArray[np.float32]:
        return np.array([*self._x, self._time / HORIZON], np.float32)


class FaultyEnvironment(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Counts its steps, gives the reward 1, and reports success at step 5, which ends the episode.

    Options of a reset: `fault` is what goes wrong, at the step `at` (default 2):

        raise   step raises an exception                      hang    step does not return
        nan     the observation is NaN                        die     the process is killed
        reward  the reward is infinite                        break   every later reset of this object raises
        start   this reset raises, also of a new object
    """

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1000.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.render_mode = render_mode
        self._broken = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._fault = str((options or {}).get("fault", ""))
        self._at = int((options or {}).get("at", 2))
        if self._broken or self._fault == "start":
            raise RuntimeError("this environment cannot start")
        self._state = np.array([self.np_random.integers(1000), 0], np.float32)
        return self._state.copy(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self._state[1] += 1
        observation, reward = self._state.copy(), 1.0
        done = bool(self._state[1] == 5)
        match self._fault if self._state[1] == self._at else "":
            case "raise":
                raise RuntimeError("the arm fell off")
            case "nan":
                observation[0] = np.nan
            case "reward":
                reward = float("inf")
            case "hang":
                time.sleep(3600.0)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "break":
                self._broken = True
        return observation, reward, done, False, {"success": done}


gymnasium.register("LQR-v0", entry_point=LQREnvironment)
gymnasium.register("Faulty-v0", entry_point=FaultyEnvironment)
