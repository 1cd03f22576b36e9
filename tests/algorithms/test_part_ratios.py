"""Ratios of the parts of a decision: the loss by hand, in float64, from the log-probs of the parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.scripted_environment import KINDS, Clocks, pipeline, request
from unirl.algorithms.action_ppo import OLD_PARTS, ActionGRPO, ActionPPO
from unirl.algorithms.ar_ppo import ADVANTAGE
from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.envs.pixel_reach import PixelReachEnvironment
from unirl.models.openvla.family import OpenVLABundle
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import ValueConfig
from unirl.train.transition_stack import TransitionStack
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import ActionSegment

LOW, HIGH = 0.1, 0.2
TASKS = ["reach the red disc", "reach the blue disc"] * 2


def policy_of(parts: str) -> PolicyPipeline:
    bundle = OpenVLABundle(
        path="toy", dtype="fp32", observations={"pixels": (3, 24, 24)}, prompt_tokens=96, decoding="parallel",
        chunk=2, parts=parts,
    )  # fmt: skip
    return PolicyPipeline(bundle, env=PixelReachEnvironment(actions=7))


def rows_of(policy: PolicyPipeline) -> RolloutTrack[ActionSegment]:
    track = policy.generate(request(4, max_steps=3, tasks=TASKS), 4).tracks["action"].sampled_as(ActionSegment)
    return track.replace(advantages=torch.tensor([1.0, -0.5, 0.25, -2.0]), weight=torch.tensor([1.0, 1.0, 0.0, 1.0]))


def token_log_probs(policy: PolicyPipeline, segment: ActionSegment) -> Tensor:
    """[sum L, 14] from the logits of the network."""
    network: Any = policy.stage.policy
    return network.parameters_of(segment.observations).log_softmax(-1).gather(-1, segment.actions[..., None])[..., 0]


@pytest.mark.parametrize(("parts", "size"), [("token", 1), ("action", 7), ("chunk", 14)])
@torch.no_grad()
def test_every_part_has_a_ratio_that_is_clipped_alone(parts: str, size: int) -> None:
    policy = policy_of(parts)
    track = rows_of(policy)
    segment = track.segment
    before = token_log_probs(policy, segment)
    measured = policy.stage.replay({}, segment)
    assert measured.parts is not None and measured.parts.shape == (len(segment.logp), 14 // size)
    torch.testing.assert_close(measured.parts.sum(1), measured.logp)
    anchors = {"old_logp": measured.logp, OLD_PARTS: measured.parts}
    for number, parameter in enumerate(policy.bundle.trainable().parameters()):
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.01)
    gaps = (token_log_probs(policy, segment) - before).unflatten(1, (-1, size)).sum(2).double()

    algorithm = ActionGRPO(ratio_of="part", clip_range=LOW, clip_range_high=HIGH)
    loss = algorithm.loss(policy.stage, track.replace(segment=segment.replace(anchors=anchors)), (0,)).loss
    assert track.advantages is not None
    row = torch.repeat_interleave(torch.arange(4), segment.lengths)
    advantages, ratios = track.advantages[row].double()[:, None], gaps.exp()
    by_hand = -torch.minimum(ratios * advantages, ratios.clamp(1 - LOW, 1 + HIGH) * advantages).mean(1)
    counted = segment.loss_mask & (track.weight[row] > 0)
    assert (ratios > 1 + HIGH).any() and (ratios < 1 - LOW).any()
    torch.testing.assert_close(loss.double(), by_hand[counted].sum(), rtol=1e-4, atol=1e-4)
    whole = replace(algorithm, ratio_of="decision")
    other = whole.loss(policy.stage, track.replace(segment=segment.replace(anchors=anchors)), (0,)).loss
    assert torch.allclose(loss, other, rtol=1e-5) == (parts == "chunk")


def test_ppo_measures_the_old_parts_before_its_first_update() -> None:
    """After two passes over the data, the parts of the second pass are compared with those of the first weights."""
    policy = policy_of("token")
    backend = FSDPBackend(
        policy.bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-3), value_cfg=ValueConfig(width=8)
    )
    algorithm = ActionPPO(ratio_of="part")
    stack = TransitionStack(
        backend, algorithm, policy.stage, micro_batch_size=4, epochs=2, minibatch_size=64, forward_decisions=5
    )
    seen: list[tuple[Tensor, Tensor]] = []
    compare = ActionPPO.with_parts

    def recorded(self: Any, tokens: Any, replay: Any, rows: Any, part: Any) -> Any:
        if self.anchor(rows, ADVANTAGE, part) is not None and len(rows.segment.logp):
            seen.append((self.anchor(rows, OLD_PARTS, part), replay.parts.detach()))
        return compare(self, tokens, replay, rows, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActionPPO, "with_parts", recorded)
        stack.train_track(rows_of(policy).replace(weight=torch.ones(4)))
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert all(torch.equal(old, now) for old, now in first)
    assert not any(torch.equal(old, now) for old, now in second)
    old = [torch.cat([each[0] for each in part]).sum(1).sort().values for part in (first, second)]
    torch.testing.assert_close(*old)


def test_a_policy_without_parts_is_refused_with_the_way_out() -> None:
    facts = pipeline(Clocks(KINDS[1])).facts
    with pytest.raises(IncompatibleError, match=r"ratio_of=part: the decisions of a \w+ have no parts\. Set algorithm"):
        ActionGRPO(ratio_of="part").check_facts(facts)
    with pytest.raises(InvalidValueError, match=r"Leave out algorithm\.old_logp_source"):
        ActionGRPO(ratio_of="part", old_logp_source="rollout")
