"""Advantages against what a prompt has earned before: few samples per step, many steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from unirl.algorithms.shared.estimator import Estimator, Reward, Standardized
from unirl.algorithms.shared.groups import Groups
from unirl.config.errors import InvalidValueError
from unirl.types.protocols import State
from unirl.types.results import Metric
from unirl.types.rollout_resp import Scores

Histories = dict[str, deque[float]]
"""Prompt id -> its last rewards, oldest first."""


@dataclass(frozen=True, kw_only=True)
class RunningAdvantage(Estimator):
    """A = clip((r - mean) / (std + eps)), mean and std over the prompt's last rewards, those of this step included.

    DDPO (arXiv:2305.13301, section 5). A prompt with fewer than `min_count` rewards so far is measured by all rewards
    of the step instead. Histories are kept per track, reward and prompt, and are part of a checkpoint.
    """

    buffer_size: int = 32
    """Rewards remembered per prompt; of more than that in one step, the last rows."""
    min_count: int = 16
    """Rewards a prompt needs before its own history is the measure."""
    _history: dict[str, Histories] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_count <= self.buffer_size:
            raise InvalidValueError(
                f"advantage.min_count must lie in 1..buffer_size={self.buffer_size}, got {self.min_count}: "
                "a longer history is never reached"
            )

    def standardize(self, reward: Reward, groups: Groups, scores: Scores) -> Standardized:
        histories = self._history.setdefault(f"{scores.track}/{reward.name}", {})
        batch = Groups.one(groups.weights)
        mean = batch.mean(reward.values)[batch.index]
        std = batch.std(reward.values, self.unbiased)[batch.index]
        dead = batch.dead(reward.values)[batch.index]
        own = torch.zeros_like(dead)
        for prompt, rows in _rows_by_prompt(scores, groups).items():
            history = histories.setdefault(prompt, deque(maxlen=self.buffer_size))
            history.extend(reward.values[rows].tolist())
            if len(history) >= self.min_count:
                past = torch.tensor(list(history), dtype=torch.float64)
                whole = Groups.one(torch.ones_like(past))
                mean[rows], std[rows], dead[rows] = whole.mean(past), whole.std(past, self.unbiased), whole.dead(past)
                own[rows] = True
        measured = Metric(float(own.sum()), float(groups.counts.sum()), "mean")
        advantages = (reward.values - mean) / (std + self.eps)
        return Standardized(advantages, dead, {"rollout/own_history_ratio": measured})

    def state_dict(self) -> State:
        """The histories, as lists."""
        return {
            name: {prompt: list(history) for prompt, history in histories.items()}
            for name, histories in self._history.items()
        }

    def load_state_dict(self, state: State) -> None:
        """The inverse of `state_dict`."""
        self._history.clear()
        for name, histories in state.items():
            self._history[name] = {prompt: deque(past, self.buffer_size) for prompt, past in histories.items()}


def prompt_of(group_id: str) -> str:
    """The prompt's id in `{prompt id}@{epoch}`, also where more follows the epoch."""
    return group_id.rpartition("@")[0] or group_id


def _rows_by_prompt(scores: Scores, groups: Groups) -> dict[str, list[int]]:
    """The rows that count, by prompt."""
    rows: dict[str, list[int]] = {}
    for i in groups.counts.nonzero().flatten().tolist():
        rows.setdefault(prompt_of(scores.group_ids[i]), []).append(i)
    return rows
