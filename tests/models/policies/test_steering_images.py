"""DSRL over policies of images and instructions, whose own state the trained policy and the critics read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import test_gr00t, test_pi0, test_pi05, test_smolvla
from tests.off_policy import replay_stack
from tests.scripted_environment import request
from unirl.algorithms.sac import SAC, critics_of
from unirl.config.build import check_node
from unirl.envs.pixel_reach import PixelReachEnvironment
from unirl.models.policies.bundle import ActionBundle, FlowBundle, PolicyBundle, SteeredBundle
from unirl.models.policies.networks import HIDDEN
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.models.policies.steering import SteeredStage
from unirl.types.environments import Observations
from unirl.types.transitions import Transitions

FAMILIES: dict[str, Callable[[], ActionBundle]] = {
    "pi0": test_pi0.bundle,
    "pi05": test_pi05.bundle,
    "smolvla": test_smolvla.bundle,
    "gr00t": test_gr00t.bundle,
}
BOUND = 4.0


@lru_cache
def frozen(family: str) -> ActionBundle:
    return FAMILIES[family]()


def stage_of(bundle: ActionBundle) -> SteeredStage:
    stage = bundle.stage()
    assert isinstance(stage, SteeredStage)
    return stage


def seen_by(bundle: ActionBundle, count: int = 3) -> Observations:
    return bundle.stage().examples(count, torch.Generator().manual_seed(2))


def pixel_flow(shift: float | None = None) -> FlowBundle:
    """A flow policy of one action of two numbers from images. With a velocity of -shift everywhere, it is w + shift."""
    bundle = FlowBundle(seed=4, observations={"pixels": (3, 24, 24)}, actions=2, num_steps=2, width=16)
    with torch.no_grad():
        bundle.trainable().get_parameter("output_layer.weight").normal_(std=0.5)
        if shift is not None:
            bundle.trainable().get_parameter("output_layer.weight").zero_()
            bundle.trainable().get_parameter("output_layer.bias").fill_(-shift)
    return bundle


@pytest.mark.parametrize("family", FAMILIES)
def test_with_its_own_noise_the_frozen_policy_acts_as_it_did(family: str) -> None:
    """Bit for bit: the noise that is chosen is all that steers it."""
    inner = frozen(family)
    stage = stage_of(SteeredBundle(frozen=inner, bound=BOUND, width=8))
    chain, seen = stage.chain, seen_by(inner)
    chosen = torch.rand(3, 1, chain.size, generator=torch.Generator().manual_seed(5)) * 2 - 1
    noise = torch.zeros(3, *chain.noise_shape)
    noise[:, 0] = BOUND * chosen[:, 0]
    expected = inner.stage().decide(seen, noise, deterministic=True)["executed"]
    assert torch.equal(stage.steered(seen, chosen), expected) and expected.std() > 0

    decided = stage.decide(seen, torch.randn(3, chain.size))
    assert torch.equal(decided["executed"], stage.steered(seen, decided["actions"].tanh()[:, None]))
    assert torch.equal(decided[HIDDEN], stage.encode(seen)[HIDDEN])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_the_state_of_the_frozen_policy(family: str) -> None:
    """The output from which values are computed, with mean 0 and variance 1, beside the numbers of the robot."""
    inner = frozen(family)
    bundle = SteeredBundle(frozen=inner, shared=True, width=8)
    stage, seen = stage_of(bundle), seen_by(inner)
    noise = torch.zeros(3, *stage.chain.noise_shape)
    hidden = inner.stage()._forward(seen, noise=noise)[HIDDEN].double()
    expected = (hidden - hidden.mean(1, True)) / (hidden.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    read = stage.encode(seen)
    torch.testing.assert_close(read[HIDDEN].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(read["state"], seen["state"]) and not torch.equal(expected[0], expected[1])
    assert bundle.facts.inputs == {"state": seen["state"].shape[1:], HIDDEN: (inner.facts.hidden_size,)}
    assert inner.facts.hidden_size == inner.stage().policy.hidden_size == hidden.shape[1]
    assert stage.policy.decision_size == stage.chain.width
    actions = stage.decide(seen, torch.randn(3, stage.chain.width))["actions"]
    starts = (bundle.bound * actions.tanh()).repeat(1, stage.chain.size // stage.chain.width)
    noise[:, 0] = starts
    together = inner.stage().decide(seen, noise, deterministic=True)["executed"]
    assert torch.equal(stage.steered(seen, actions.tanh()[:, None]), together)


class Filmed(PixelReachEnvironment):
    """Keeps every frame that it showed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.film: dict[int, list[Tensor]] = {}

    def _observe(self, slots: Sequence[int]) -> Observations:
        shown = super()._observe(slots)
        for slot, frame in zip(slots, shown["pixels"], strict=True):
            self.film.setdefault(slot, []).append(frame)
        return shown


def test_the_store_holds_what_was_read_before_and_after_each_decision() -> None:
    """States of the frozen policy in place of frames, also of the frame after the cut of an episode."""
    env = Filmed(max_steps=3)
    pipeline = PolicyPipeline(SteeredBundle(seed=1, frozen=pixel_flow(), width=8, bound=1.0), env=env)
    segment = pipeline.generate(request(4), 4).tracks["action"].segment
    frames = [frame for row, count in enumerate(segment.lengths.tolist()) for frame in env.film[row][:count]]
    read = pipeline.stage.encode({"pixels": torch.stack(frames)})[HIDDEN]
    assert list(segment.observations) == [HIDDEN]
    torch.testing.assert_close(segment.observations[HIDDEN], read)
    made = SAC().transitions(pipeline.stage, segment, torch.ones(4), 1)
    assert 0 < len(made) < len(read), "no episode was cut"
    following = torch.cat([torch.arange(len(read))[1:], torch.tensor([0])])[segment.loss_mask]
    going = made.discounts > 0
    torch.testing.assert_close(made.following[HIDDEN][going], read[following][going])


def test_the_frozen_policy_gets_no_gradient_and_keeps_its_weights() -> None:
    inner = pixel_flow()
    before = {name: tensor.clone() for name, tensor in inner.trainable().state_dict().items()}
    bundle = SteeredBundle(seed=1, frozen=inner, width=8, bound=1.0)
    pipeline = PolicyPipeline(bundle, env=PixelReachEnvironment(max_steps=3))
    stack = replay_stack(pipeline, updates_per_decision=1.0)
    trained = {**dict(bundle.trainable().named_parameters()), **dict(critics_of(pipeline.stage).named_parameters())}
    old = {name: tensor.detach().clone() for name, tensor in trained.items()}
    stack.train_track(pipeline.generate(request(4), 4).tracks["action"])
    assert stack.backend.updates > 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in inner.trainable().state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in inner.trainable().parameters())
    assert not any(torch.equal(tensor, old[name]) for name, tensor in trained.items())


@pytest.mark.parametrize("family", ["pi0", "smolvla"])
def test_an_export_has_both_policies(family: str, tmp_path: Path) -> None:
    inner = frozen(family)
    bundle = SteeredBundle(seed=1, frozen=inner, bound=0.7, shared=True, width=8)
    state = {name: tensor + 0.1 for name, tensor in bundle.trainable().state_dict().items()}
    bundle.write(tmp_path / "export", state).rename(tmp_path / "moved")
    texts = [file for file in (tmp_path / "moved").rglob("*.json") if str(tmp_path) in file.read_text("utf-8")]
    assert texts == [], "an export names the folder that it was written to"
    bundle.trainable().load_state_dict(state)
    again = PolicyBundle.from_files(path=str(tmp_path / "moved"))
    noise, seen = torch.randn(3, stage_of(bundle).chain.width), seen_by(inner)
    ours, theirs = (each.stage().decide(seen, noise) for each in (bundle, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ("actions", "executed", HIDDEN))
    assert again.facts == bundle.facts
    planned = PolicyBundle.facts_from({"path": str(tmp_path / "moved")})
    assert replace(planned, batch_multiple=bundle.facts.batch_multiple) == bundle.facts


def test_facts_are_known_without_the_weights() -> None:
    settings: dict[str, Any] = {"_target_": "unirl.models.pi0.family.Pi0Bundle", "path": "toy", **test_pi0.SETTINGS}
    settings["observations"] = {key: list(shape) for key, shape in settings["observations"].items()}
    node = check_node({"_target_": "unirl.models.policies.bundle.SteeredBundle", "frozen": settings})
    planned, bundle = SteeredBundle.facts_from(node.values), SteeredBundle(frozen=frozen("pi0"), width=8)
    assert replace(planned, batch_multiple=bundle.facts.batch_multiple) == bundle.facts


def test_sac_finds_the_best_noise_of_each_image() -> None:
    """Reward -|a - g(o)|^2 with another best noise in dark and in bright images, which the state tells apart."""
    bundle = SteeredBundle(seed=2, frozen=pixel_flow(0.5), bound=1.5, width=32)
    stage, loss = stage_of(bundle), SAC(alpha=0.02, learn_alpha=False)
    stage.value_head = loss.build_head(stage, 64, seed=3)
    draw = torch.Generator().manual_seed(0)
    is_bright = torch.rand(1024, generator=draw) < 0.5
    images = (torch.randint(64, (1024, 3, 24, 24), generator=draw) + 160 * is_bright[:, None, None, None]).byte()
    best = torch.where(is_bright[:, None], torch.tensor([0.6, -0.8]), torch.tensor([-0.9, 0.3]))
    goal = best + 0.5

    def rewards(executed: Tensor) -> Tensor:
        return -(executed.flatten(1) - goal).square().sum(1)

    seen = stage.encode({"pixels": images})
    actions = (2 * torch.rand(1024, 2, generator=draw) - 1).clamp(-0.999, 0.999).atanh()
    store = Transitions(
        observations=seen, actions=actions, rewards=rewards(stage.steered({"pixels": images}, actions.tanh()[:, None])),
        discounts=torch.zeros(1024), following=seen,
    )  # fmt: skip
    optimizer = torch.optim.Adam([*bundle.trainable().parameters(), *critics_of(stage).parameters()], lr=3e-3)
    for _ in range(300):
        chosen = torch.randint(1024, (128,), generator=draw)
        batch = Transitions.of_tensors({k: v[chosen] for k, v in store.tensors().items()})
        optimizer.zero_grad()
        loss.transition_loss(stage, batch, draw).loss.backward()
        optimizer.step()
    done = rewards(stage.decide({"pixels": images}, torch.zeros(1024, 2), deterministic=True)["executed"])
    own_noise = torch.randn(1024, 2, 2, generator=draw)
    unsteered = rewards(bundle.inner.stage().decide({"pixels": images}, own_noise, deterministic=True)["executed"])
    assert done.mean() > -0.15 and unsteered.mean() < -2
