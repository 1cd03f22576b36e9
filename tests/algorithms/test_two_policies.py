"""Two policies learn together: a chooser of tokens, and a flow that draws what was chosen. The optimum is known.

The flow draws arm k as N(m_k, s^2) in the plane. Prompt p wants the point m_p + d. A sample x is rewarded by
-|x - m_p - d|^2, so the chooser must learn arm p for prompt p, and the flow must learn to draw every arm shifted by d.

A choice may have a reward of its own, which is added to that of its samples. The optimum of the sum is known as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.tokens import PromptNumber, TableStage, TokenSampling, TokenTable
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.shared.advantages import GroupAdvantage
from unirl.models.denoising.stage import DiffusionStage
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.toy import toy_facts
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack import TrainStack
from unirl.types.conditions import Conditions
from unirl.types.credit import CREDIT_RULES, RewardOp
from unirl.types.facts import LatentFacts
from unirl.types.rollout_req import child_ids
from unirl.types.rollout_resp import RolloutResp, RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

ARMS, CHOICES, DRAWN, T, STEPS = 4, 8, 4, 8, 80
STD = 0.2
MEANS = 1.5 * torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])  # [ARMS, 2]
SHIFT = torch.tensor([0.4, 0.3])
WANTED = MEANS + SHIFT  # by prompt

# The expected rewards of a sample, in closed form. The points of the arms sum to zero.
NOISE = 2 * STD**2
START = -float((MEANS[:, None] - WANTED).square().sum(2).mean()) - NOISE
CHOSEN = -float(SHIFT.square().sum()) - NOISE
"""Of the best chooser with the untrained flow."""
DRAWN_BLINDLY = -float((WANTED - WANTED.mean(0)).square().sum(1).mean())
"""Of the best flow with a chooser that knows nothing: it draws the mean of all points that may be wanted."""
BEST = 0.0
"""Of the best policies together."""


NO_OWN = torch.zeros(ARMS, ARMS)
"""By prompt and arm, the reward of a choice itself."""
OF_ARMS = -(MEANS[None] - WANTED[:, None]).square().sum(2) - NOISE
"""By prompt and arm, the expected reward of a sample of the untrained flow, in closed form."""
NEXT_ARM = torch.eye(ARMS).roll(1, dims=1)
"""1 for the arm that follows the wanted one. Its samples are worth 2.4 to 6.6 less than those of the wanted arm."""
BONUS = torch.tensor([1.0, 1.0, 10.0, 10.0])[:, None] * NEXT_ARM
"""Contradicts the reward of the samples, in vain for prompts 0 and 1; for the others it is worth more."""


class ArmFlow(nn.Module):
    """v(x, sigma, k) = the exact velocity of N(m_k, s^2) + net(x, sigma, k), net zero at first."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3 + ARMS, 32), nn.Tanh(), nn.Linear(32, 2))
        with torch.no_grad():
            for i, parameter in enumerate(self.net.parameters()):
                parameter.normal_(std=0.5 * (i == 0), generator=torch.Generator().manual_seed(100 * seed + i))

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        arm = conditions["arm"]
        assert isinstance(arm, PromptNumber)
        level = sigma[:, None]
        residual = x - (1 - level) * MEANS[arm.number]
        variance = ((1 - level) * STD) ** 2 + level**2
        exact = level / variance * residual - MEANS[arm.number] - (1 - level) * STD**2 / variance * residual
        inputs = [x, level, nn.functional.one_hot(arm.number, ARMS).to(x)]
        return exact + self.net(torch.cat(inputs, dim=1))

    @property
    def facts(self) -> LatentFacts:
        return replace(toy_facts(batch_multiple=1), latent_channels=2, text_width=None)

    def trainable(self) -> nn.Module:
        return self


@dataclass
class Pair:
    """A chooser that knows nothing and an exact flow, each with its loss and its optimizer."""

    seed: int
    own: Tensor = field(default_factory=lambda: NO_OWN)
    """By prompt and arm, the reward of a choice itself."""

    def __post_init__(self) -> None:
        table, flow = TokenTable(ARMS, prompts=ARMS), ArmFlow(self.seed)
        self.chooser, self.drawer = TableStage(table), DiffusionStage(flow, flow.facts)
        choose = FSDPBackend(table, self.seed, optimizer_cfg=OptimizerConfig(learning_rate=0.05))
        draw = FSDPBackend(flow, self.seed, optimizer_cfg=OptimizerConfig(learning_rate=3e-3))
        steps = DiffusionGRPO(clip_range=0.05, steps_per_forward=T - 1)
        self.stacks = {
            "ar": TrainStack(choose, ARGRPO(), self.chooser, micro_batch_size=ARMS * CHOICES),
            "diffusion": TrainStack(draw, steps, self.drawer, micro_batch_size=ARMS * CHOICES * DRAWN),
        }
        sigmas = tuple(flow.facts.schedule.sigmas(T, 1).tolist())
        self.params = DiffusionSamplingParams(
            kernel=FlowSDEStrategy(eta=0.7), num_inference_steps=T, seed=self.seed
        ).pinned(0, sigmas)

    def rollout(self, step: int) -> RolloutResp:
        """CHOICES arms of every prompt and DRAWN samples of each, with the reward of each sample."""
        noise = NoiseSource(self.seed, "r", step)
        groups = [f"p{p}@{step}" for p in range(ARMS) for _ in range(CHOICES)]
        ids = [f"{group}:{i % CHOICES}" for i, group in enumerate(groups)]
        prompts = torch.arange(ARMS).repeat_interleave(CHOICES)
        conditions: Conditions = {"prompt": PromptNumber(number=prompts)}
        chosen = self.chooser.sample(conditions, TokenSampling(max_new_tokens=1, ends=False), noise, ids)
        parents = [sample for sample in ids for _ in range(DRAWN)]
        below = child_ids(ids, "diffusion", DRAWN)
        arms: Conditions = {"arm": PromptNumber(number=chosen.tokens.repeat_interleave(DRAWN))}
        with torch.no_grad():
            drawn = self.drawer.sample(arms, noise.normal(below, "x", (2,)), self.params, noise, below)
        rewards = -(drawn.final - WANTED[prompts.repeat_interleave(DRAWN)]).square().sum(1)
        written = track(ids, groups, conditions, chosen)
        if self.own is not NO_OWN:
            written = written.replace(rewards=self.own[prompts, chosen.tokens])
        images = track(below, parents, arms, drawn).replace(parent_track="ar", parent_ids=parents, rewards=rewards)
        return RolloutResp({"ar": written, "diffusion": images})

    def train(
        self, credit: Callable[[RolloutResp], RolloutResp], trained: tuple[str, ...] = ("ar", "diffusion")
    ) -> float:
        """The mean reward of the last five steps: that of the samples, and that of the choices themselves."""
        rewards = []
        for step in range(STEPS):
            resp = self.rollout(step)
            rewards.append(sum(float(each.rewards.mean()) for each in resp.tracks.values() if each.rewards is not None))
            resp = credit(resp)
            for name in trained:
                self.stacks[name].train_track(resp.tracks[name])
        return sum(rewards[-5:]) / 5


def track(ids, groups, conditions, segment) -> RolloutTrack:
    return RolloutTrack(
        sample_ids=ids,
        group_ids=groups,
        conditions=conditions,
        segment=segment,
        weight=torch.ones(len(ids)),
        weight_version=torch.zeros(len(ids), dtype=torch.int64),
    )


def credited(resp: RolloutResp, rule: RewardOp = "mean") -> RolloutResp:
    """As the loop does it: a reward for each choice from those of its samples, and groups on both tracks."""
    is_rloo, best_only = CREDIT_RULES[rule].leave_one_out, CREDIT_RULES[rule].best_only
    estimator = GroupAdvantage().leaving_one_out() if is_rloo else GroupAdvantage()
    resp = resp.propagate_rewards(rule)
    for name in resp.by_depth():
        resp = resp.with_track(name, resp.tracks[name].compute_advantages(estimator, name=name)[0])
        resp = resp.only_best(name) if best_only else resp
    return resp


def to_the_wrong_parents(resp: RolloutResp) -> RolloutResp:
    """The rewards of the samples credit the next choice of the prompt, not their own."""
    resp = resp.propagate_rewards("mean")
    written = resp.tracks["ar"]
    shifted = written.rewards.view(ARMS, CHOICES).roll(1, dims=1).flatten()
    return credited(resp.with_track("ar", written.replace(rewards=shifted)))


def share(reward: float, of: float) -> float:
    """The share of the rise from the start to the closed form `of`."""
    return (reward - START) / (of - START)


def test_the_start_is_the_closed_form() -> None:
    rewards = torch.cat([Pair(seed).rollout(0).tracks["diffusion"].rewards for seed in range(8)])
    assert float(rewards.mean()) == pytest.approx(START, rel=0.1)  # steps of finite size widen the samples a little


@pytest.mark.slow
@pytest.mark.seeds
def test_both_policies_reach_most_of_the_best_joint_reward(seed: int) -> None:
    reward = Pair(seed).train(credited)
    assert share(reward, BEST) >= 0.9
    assert reward > max(CHOSEN, DRAWN_BLINDLY)  # more than either could reach alone


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["max", "sum", "best_of_n", "leave_one_out"])
def test_both_policies_learn_by_every_rule_of_credit(rule: RewardOp) -> None:
    """`leave_one_out` divides by no deviation, so its gradient is smaller near the optimum."""
    assert share(Pair(1).train(partial(credited, rule=rule)), BEST) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "best"), [("ar", CHOSEN), ("diffusion", DRAWN_BLINDLY)])
def test_one_policy_alone_reaches_its_own_optimum_and_no_more(trained: str, best: float) -> None:
    reward = Pair(1).train(credited, (trained,))
    # GRPO divides advantages by the deviation of their group, so a flow alone weighs near and far points alike.
    assert share(reward, best) >= (0.9 if trained == "ar" else 0.5)
    assert reward <= best


@pytest.mark.slow
@pytest.mark.seeds
def test_credit_for_the_wrong_choice_does_not(seed: int) -> None:
    assert share(Pair(seed).train(to_the_wrong_parents), BEST) < 0.6


# A reward of the choices themselves


def by_its_own(resp: RolloutResp) -> RolloutResp:
    """A choice has its own reward, without that of its samples."""
    return credited(resp.with_track("ar", resp.tracks["ar"].replace(rewards_are_final=True)))


def by_its_samples(resp: RolloutResp) -> RolloutResp:
    """A choice has the reward of its samples, without its own."""
    return credited(resp.with_track("ar", resp.tracks["ar"].replace(rewards=None)))


SUM_AT_START = START + float(BONUS.mean())
BEST_SUM = float((OF_ARMS + BONUS).amax(1).mean())
BEST_OF_ITS_OWN = float((OF_ARMS + BONUS)[NEXT_ARM.bool()].mean())
BEST_OF_ITS_SAMPLES = CHOSEN
"""The sums that a chooser reaches if it learns from both rewards, its own alone, and that of its samples alone."""


def test_the_optimum_of_the_sum_keeps_two_arms_and_changes_two() -> None:
    assert (OF_ARMS + BONUS).argmax(1).tolist() == [0, 1, 3, 0]
    assert OF_ARMS.argmax(1).tolist() == [0, 1, 2, 3] and pytest.approx(float(OF_ARMS.amax(1).mean())) == CHOSEN
    assert float(OF_ARMS.mean()) == pytest.approx(START)
    assert max(SUM_AT_START, BEST_OF_ITS_OWN, BEST_OF_ITS_SAMPLES) < BEST_SUM - 0.5


@pytest.mark.slow
@pytest.mark.seeds
def test_a_chooser_reaches_the_optimum_of_the_sum_of_both_rewards(seed: int) -> None:
    reward = Pair(seed, BONUS).train(credited, ("ar",))
    assert (reward - SUM_AT_START) / (BEST_SUM - SUM_AT_START) >= 0.9
    assert reward > max(BEST_OF_ITS_OWN, BEST_OF_ITS_SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize(("credit", "best"), [(by_its_own, BEST_OF_ITS_OWN), (by_its_samples, BEST_OF_ITS_SAMPLES)])
def test_one_of_the_two_rewards_does_not_lead_there(credit, best: float) -> None:
    assert Pair(1, BONUS).train(credit, ("ar",)) == pytest.approx(best, abs=0.3)


@pytest.mark.slow
@pytest.mark.seeds
def test_both_policies_reach_most_of_the_joint_optimum_if_the_rewards_agree(seed: int) -> None:
    """The wanted arm has a reward of 2 itself, so the best sum is 2. Without it the flow's optimum is the same."""
    reward = Pair(seed, 2 * torch.eye(ARMS)).train(credited)
    assert (reward - START - 2 / ARMS) / (BEST + 2 - START - 2 / ARMS) >= 0.9
