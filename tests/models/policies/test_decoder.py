"""The decoder of chunks: its distribution, its export, and a task whose best chunk is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal

from unirl.config.errors import InvalidValueError
from unirl.models.policies.bundle import ChunkDecoderBundle, PolicyBundle
from unirl.types.environments import Observations


def bundle(**settings: object) -> ChunkDecoderBundle:
    shapes = {"state": (3,), "pixels": (3, 24, 24)}
    return ChunkDecoderBundle(seed=1, **{"observations": shapes, "actions": 2, "chunk": 5, "width": 16} | settings)  # type: ignore[arg-type]


def observed(count: int) -> Observations:
    draw = torch.Generator().manual_seed(2)
    pixels = torch.randint(256, (count, 3, 24, 24), generator=draw, dtype=torch.uint8)
    return {"state": torch.randn(count, 3, generator=draw), "pixels": pixels}


def test_log_prob_and_entropy_are_those_of_torch() -> None:
    stage = bundle().stage()
    noise = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))
    decided = stage.decide(observed(6), noise)
    assert decided["executed"].shape == (6, 5, 2)
    replayed = stage._forward(observed(6), actions=decided["actions"], entropy=True)
    assert torch.equal(replayed["logp"], decided["logp"]) and replayed["logp"].requires_grad
    mean, log_std = stage.policy.parameters_of(observed(6)).unbind(1)
    expected = Independent(Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(decided["logp"], expected.log_prob(decided["actions"]))
    torch.testing.assert_close(replayed["entropy"], expected.entropy())


def test_an_export_is_read_again(tmp_path: Path) -> None:
    one = bundle()
    state = {name: tensor + 0.1 for name, tensor in one.trainable().state_dict().items()}
    one.write(tmp_path, state)
    one.trainable().load_state_dict(state)
    noise = torch.randn(3, 10)
    both = [
        each.stage().decide(observed(3), noise)["actions"]
        for each in (one, PolicyBundle.from_files(path=str(tmp_path)))
    ]
    assert torch.equal(*both)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(InvalidValueError, match=r"bundle\.heads=3 must divide bundle\.width=16"):
        bundle(heads=3)


def test_imitation_learns_chunks_that_differ_by_place() -> None:
    """a_c = s_1 (c + 1) / 5 in the first number, and -s_2 in the second: a known function of the observation."""
    one = bundle(observations=3, log_std=-1.0)
    network = one.trainable()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(4)

    def wanted(state: Tensor) -> Tensor:
        places = torch.arange(1, 6) / 5
        return torch.stack([state[:, :1] * places, -state[:, 1:2].expand(-1, 5)], dim=2)

    for _ in range(200):
        state = 2 * torch.rand(32, 3, generator=draw) - 1
        loss = network.imitation({"state": state}, wanted(state), torch.zeros(32, 10), torch.zeros(32)).mean()  # type: ignore[operator]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = 2 * torch.rand(64, 3, generator=draw) - 1
    done = one.stage().decide({"state": state}, torch.zeros(64, 10), deterministic=True)["executed"]
    assert (done - wanted(state)).abs().mean() < 0.12
