"""A prioritised replay store against the distribution of its formula, and memory-mapped columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.off_policy import replay_stack, squashed_pipeline, stage_with_critics, transitions
from tests.scripted_environment import request
from unirl.algorithms.imitation import BehaviourCloning
from unirl.algorithms.sac import SAC
from unirl.config.errors import IncompatibleError, InvalidValueError, ResumeError
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.train.replay_stack import ReplayStack
from unirl.train.replay_store import PriorityConfig, ReplayConfig, ReplayStore
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import ActionSegment
from unirl.types.transitions import Transitions

ERRORS = torch.tensor([0.0, 0.5, 1.0, 2.0, 4.0, 0.1])


def store_of(alpha: float = 0.7, beta: float = 0.5, capacity: int = 8) -> ReplayStore:
    """A ring of six transitions with known errors."""
    store = ReplayStore(ReplayConfig(capacity=capacity, priority=PriorityConfig(alpha=alpha, beta=beta, epsilon=0.01)))
    store.add(transitions(6))
    store.report(torch.arange(6), ERRORS)
    return store


def probabilities(alpha: float = 0.7) -> torch.Tensor:
    powers = (ERRORS.double() + 0.01) ** alpha
    return powers / powers.sum()


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_transitions_are_drawn_with_the_probabilities_of_their_priorities(alpha) -> None:
    count = 60_000
    places = store_of(alpha).draw(count, torch.Generator().manual_seed(3), 0.0).places
    found = torch.bincount(places, minlength=6).double() / count
    wanted = probabilities(alpha)
    assert bool(((found - wanted).abs() < 5 * (wanted * (1 - wanted) / count).sqrt()).all())


@pytest.mark.parametrize(("progress", "exponent"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_importance_weights_are_those_of_the_paper(progress, exponent) -> None:
    draw = store_of().draw(40, torch.Generator().manual_seed(1), progress)
    wanted = (6 * probabilities()[draw.places]) ** -exponent
    assert draw.transitions.weights is not None
    assert torch.allclose(draw.transitions.weights.double(), wanted / wanted.max(), rtol=1e-6)


def test_with_full_weights_the_mean_of_a_draw_is_that_of_the_store() -> None:
    """At beta = 1 the weights correct the draw: sum of w x / sum of w estimates the plain mean."""
    store = store_of(beta=1.0)
    draw = store.draw(200_000, torch.Generator().manual_seed(5), 0.0)
    assert draw.transitions.weights is not None
    weights = draw.transitions.weights.double()
    found = (weights * draw.transitions.rewards).sum() / weights.sum()
    assert float(found) == pytest.approx(float(store.columns["rewards"][:6].mean()), abs=0.02)


def test_a_new_transition_has_the_largest_priority_so_far_and_its_place_forgets_the_old_one() -> None:
    store = store_of(capacity=6)
    store.add(transitions(2, seed=4))
    assert store.priorities.tolist() == pytest.approx([4.01, 4.01, 1.01, 2.01, 4.01, 0.11])
    store.report(torch.tensor([3, 3, 0]), torch.tensor([0.2, 7.0, 0.0]))
    assert store.priorities[[3, 0]].tolist() == pytest.approx([7.01, 0.01]) and float(store.largest) == pytest.approx(
        7.01
    )


def test_weights_multiply_the_losses_of_the_critics_and_errors_are_their_mean_sizes() -> None:
    batch = transitions(5)
    zeros, stage = torch.zeros(5), stage_with_critics(SAC())

    def critic(weights: torch.Tensor | None) -> float:
        found = SAC().transition_loss(stage, replace(batch, weights=weights), torch.Generator().manual_seed(0))
        return found.parts["critic"].item()

    single = [critic(zeros.index_fill(0, torch.tensor([i]), 1.0)) for i in range(5)]
    assert critic(torch.tensor([1.0, 2.0, 0.0, 0.5, 3.0])) == pytest.approx(
        single[0] + 2 * single[1] + 0.5 * single[3] + 3 * single[4], rel=1e-5
    )
    assert critic(None) == pytest.approx(sum(single), rel=1e-5)
    errors = SAC(members=1, subset=1)
    alone = stage_with_critics(errors)
    found = errors.transition_loss(alone, batch, torch.Generator().manual_seed(0))
    assert found.errors is not None
    assert found.parts["critic"].item() == pytest.approx(found.errors.square().mean().item() / 2, rel=1e-5)


def rows_of(step: int) -> RolloutTrack[ActionSegment]:
    return squashed_pipeline().generate(request(5, step=step), 8).tracks["action"].sampled_as(ActionSegment)


def trained(stack: ReplayStack, *steps: int) -> ReplayStack:
    for step in steps:
        stack.train_track(rows_of(step))
    return stack


@pytest.mark.parametrize("capacity", [13, 1000])
def test_a_restored_prioritised_stack_continues_bit_for_bit(tmp_path: Path, capacity) -> None:
    store = ReplayConfig(capacity=capacity, priority=PriorityConfig())
    first = trained(replay_stack(squashed_pipeline(), store=store), 0, 1)
    first.backend.save(str(tmp_path))
    second = replay_stack(squashed_pipeline(), store=store)
    second.backend.load(str(tmp_path))
    ends = [dict(each.backend.gather()) | each.replay.state() for each in (trained(first, 2), trained(second, 2))]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert len(first.replay.priorities.unique()) > 3  # errors were reported
    saved = {
        n.removeprefix("0:replay:"): v for n, v in load_file(tmp_path / "kept.safetensors").items() if "replay" in n
    }
    with pytest.raises(ResumeError, match="is prioritised"):
        ReplayStore(ReplayConfig(capacity=capacity)).restore(saved)


def test_demonstrations_beside_a_prioritised_store_have_weight_1() -> None:
    from unirl.data.demonstrations import DemonstrationsConfig

    stack = replay_stack(
        squashed_pipeline(),
        store=ReplayConfig(priority=PriorityConfig()),
        offline=DemonstrationsConfig(path="toy"),
        minibatch_size=8,
    )
    stack.replay.add(transitions(6))
    stack.replay.report(torch.arange(6), ERRORS)
    own, batch = stack._minibatch(torch.Generator().manual_seed(0))
    assert own is not None and own.transitions.weights is not None and batch.weights is not None
    assert torch.equal(batch.weights, torch.cat([own.transitions.weights, torch.ones(4)]))


def test_mapped_columns_hold_what_memory_would_and_leave_no_file(tmp_path: Path) -> None:
    images = torch.randint(256, (40, 3, 5, 4), dtype=torch.uint8)
    rows = Transitions.of_tensors(
        transitions(40).tensors() | {"observations.pixels": images, "following.pixels": images.flip(0)}
    )
    stores = [ReplayStore(ReplayConfig(capacity=25, folder=folder)) for folder in (None, str(tmp_path))]
    for store in stores:
        store.add(rows)
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    first, second = (each.sample(30, torch.Generator().manual_seed(2)).transitions.tensors() for each in stores)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    other = ReplayStore(ReplayConfig(capacity=25, folder=str(tmp_path)))
    other.restore(stores[1].state())
    assert all(torch.equal(other.columns[name], stores[0].columns[name]) for name in other.columns)


@pytest.mark.parametrize(
    ("recipe", "overrides", "kind", "says"),
    [
        (
            "metaworld_reach_dagger",
            ["+stack.store.priority={}"],
            IncompatibleError,
            "measures no error of a transition",
        ),
        ("pendulum_sac", ["+stack.store.folder=nowhere"], InvalidValueError, "stack.store.folder=nowhere is no folder"),
    ],
)
def test_a_store_that_cannot_work_is_refused(recipe, overrides, kind, says) -> None:
    with pytest.raises(kind, match=says):
        preflight(load(f"embodied/{recipe}", overrides))
    with pytest.raises(IncompatibleError, match="measures no error"):
        replay_stack(squashed_pipeline(), BehaviourCloning(), store=ReplayConfig(priority=PriorityConfig()))
