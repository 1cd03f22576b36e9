"""One network chooses and draws: the task of test_two_policies.py with shared weights and one optimizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from tests.algorithms.test_two_policies import (
    ARMS,
    BEST,
    CHOSEN,
    DRAWN_BLINDLY,
    STEPS,
    ArmFlow,
    Pair,
    T,
    credited,
    share,
    to_the_wrong_parents,
)
from tests.tokens import TableStage, TokenTable
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.base import START
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.models.denoising.stage import DiffusionStage
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack import TrainStack
from unirl.train.unified_model_stack import UnifiedModelStack
from unirl.types.rollout_resp import RolloutResp

LOGIT_SCALE = 15.0
"""The table needs larger steps than the flow, and both have one learning rate."""


class WideTable(TokenTable):
    """A table whose logits are its parameters times LOGIT_SCALE."""

    def forward(self, prompt: Tensor, previous: Tensor) -> Tensor:
        return LOGIT_SCALE * super().forward(prompt, previous)


class Network(nn.Module):
    """The chooser and the flow as one module."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.table, self.flow = WideTable(ARMS, prompts=ARMS), ArmFlow(seed)
        self.facts = self.flow.facts

    def trainable(self) -> nn.Module:
        return self


class Whole(Pair):
    """A network that knows nothing of the choice, with a loss for each of its tracks."""

    def __init__(self, seed: int, schedule: str) -> None:
        super().__init__(seed)
        network = Network(seed)
        self.chooser, self.drawer = TableStage(network.table), DiffusionStage(network.flow, network.facts)
        backend = FSDPBackend(network, seed, optimizer_cfg=OptimizerConfig(learning_rate=3e-3))
        losses = {"ar": ARGRPO(), "diffusion": DiffusionGRPO(clip_range=0.05, steps_per_forward=T - 1)}
        stages = {"ar": self.chooser, "diffusion": self.drawer}
        stacks = {name: TrainStack(backend, losses[name], stages[name], micro_batch_size=128) for name in losses}
        self.shared = UnifiedModelStack(backend, stacks, schedule=schedule)  # type: ignore[arg-type]

    def learn(self, credit: Callable[[RolloutResp], RolloutResp]) -> float:
        """The mean reward of the last five steps."""
        rewards = []
        for step in range(STEPS):
            resp = self.rollout(step)
            rewards.append(float(resp.tracks["diffusion"].rewards.mean()))
            self.shared.train_tracks(credit(resp), {"ar": START, "diffusion": START})
        return sum(rewards[-5:]) / 5


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["joint", "alternating"])
@pytest.mark.seeds
def test_one_network_reaches_most_of_the_best_joint_reward(seed: int, schedule: str) -> None:
    reward = Whole(seed, schedule).learn(credited)
    assert share(reward, BEST) >= 0.9
    assert reward > max(CHOSEN, DRAWN_BLINDLY)  # more than either track could reach alone


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["joint", "alternating"])
def test_credit_for_the_wrong_choice_does_not(schedule: str) -> None:
    assert share(Whole(1, schedule).learn(to_the_wrong_parents), BEST) < 0.6


@pytest.mark.slow
def test_texts_that_are_not_compared_with_others_of_their_prompt_do_not() -> None:
    """A text in a group of its own has no advantage, so only the flow learns."""

    def ungrouped(resp: RolloutResp) -> RolloutResp:
        written = resp.propagate_rewards("mean").tracks["ar"]
        return credited(resp.with_track("ar", written.replace(group_ids=list(written.sample_ids))))

    assert share(Whole(1, "joint").learn(ungrouped), BEST) < 0.6
