"""GR00T N1.5 against a plain computation from its published tensors, in float64, and its files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, pad, relu, silu

from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.models.gr00t.family import METADATA, ROBOTS, GR00TBundle
from unirl.models.gr00t.network import GR00TPolicy
from unirl.models.loading.estimate import parameters_of
from unirl.models.policies.stage import InstructedStage
from unirl.types.environments import INSTRUCTION, Observations

CAMERAS = ("agentview", "wrist")
TASKS = ["reach the red disc", "go", "pick up the cup", "Stay"]
HORIZON, WIDTH = 6, 24
LOW = {"x": [-1.0, -2.0], "y": [0.0, 0.5, 3.0]}
HIGH = {"x": [1.0, 2.0], "y": [4.0, 1.5, 3.0]}
"""The last number of the state is always the same."""


def bundle(path: str = "toy", **settings: Any) -> GR00TBundle:
    shapes = {**dict.fromkeys(CAMERAS, (3, 40, 40)), "state": (5,)}
    given = {"dtype": "fp32", "observations": shapes, "chunk": 2, "prompt_tokens": 64, "robot": "libero_franka"}
    return GR00TBundle(path=path, **given | settings)


def inputs(stage: InstructedStage, count: int = 4) -> tuple[Observations, Tensor]:
    generator = torch.Generator().manual_seed(3)
    seen: Observations = {
        key: torch.randint(256, (count, 3, 40, 40), generator=generator, dtype=torch.uint8) for key in CAMERAS
    }
    seen |= {"state": torch.randn(count, 5, generator=generator), **stage.instructions((TASKS * count)[:count])}
    return seen, torch.randn(count, *stage.policy.noise_shape, generator=generator)


def policy_of(stage: InstructedStage) -> GR00TPolicy:
    assert isinstance(stage.policy, GR00TPolicy)
    return stage.policy


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy as its publisher would have written it, with statistics and weights that are not so regular."""
    folder, one = tmp_path_factory.mktemp("gr00t"), bundle()
    generator = torch.Generator().manual_seed(5)
    state = one.trainable().state_dict()
    one.write(folder, {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in state.items()})
    ends = {name: {"min": LOW[name], "max": HIGH[name]} for name in LOW}
    action = {"pose": {"min": [-1.0] * 6, "max": [3.0] * 6}, "gripper": {"min": [0.0], "max": [1.0]}}
    (folder / METADATA).parent.mkdir()
    (folder / METADATA).write_text(json.dumps({"libero_franka": {"statistics": {"state": ends, "action": action}}}))
    return folder


# The network


class Plain:
    """The action head for one row without empty places, from the published tensors, in float64."""

    def __init__(self, tensors: dict[str, Tensor], robot: int) -> None:
        self.tensors = {name.removeprefix("action_head."): tensor.double() for name, tensor in tensors.items()}
        self.robot = robot

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def own(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.W"][self.robot] + self.tensors[f"{name}.b"][self.robot]

    def mlp(self, name: str, x: Tensor) -> Tensor:
        return self.own(f"{name}.layer2", relu(self.own(f"{name}.layer1", x)))

    def attended(self, name: str, x: Tensor, source: Tensor) -> Tensor:
        q, k, v = (
            self.linear(f"{name}.attn1.to_{part}", tokens).unflatten(1, (2, -1)).transpose(0, 1)
            for part, tokens in (("q", x), ("k", source), ("v", source))
        )
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[2])).softmax(2)
        return self.linear(f"{name}.attn1.to_out.0", (weights @ v).transpose(0, 1).flatten(1))

    def feed(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.ff.net.2", gelu(self.linear(f"{name}.ff.net.0.proj", x), approximate="tanh"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def context(self, x: Tensor) -> Tensor:
        x = self.norm("vlln", x)
        for number in range(2):
            name = f"vl_self_attention.transformer_blocks.{number}"
            normed = self.norm(f"{name}.norm1", x)
            x = x + self.attended(name, normed, normed)
            x = x + self.feed(name, self.norm(f"{name}.norm3", x))
        return x

    def velocity(self, context: Tensor, state: Tensor, x: Tensor, bucket: int) -> Tensor:
        """[H, D] d x / d t of the publisher at a time in buckets."""
        rates = 10_000.0 ** (-torch.arange(WIDTH // 2, dtype=torch.float64) / (WIDTH // 2))
        waves = torch.cat([(bucket * rates).sin(), (bucket * rates).cos()]).expand(HORIZON, -1)
        points = silu(self.own("action_encoder.W2", torch.cat([self.own("action_encoder.W1", x), waves], dim=1)))
        points = self.own("action_encoder.W3", points) + self.tensors["position_embedding.weight"][:HORIZON]
        y = torch.cat([self.mlp("state_encoder", state[None]), self.tensors["future_tokens.weight"], points])
        rates = 10_000.0 ** (-torch.arange(128, dtype=torch.float64) / 127)
        condition = torch.cat([(bucket * rates).cos(), (bucket * rates).sin()])
        embedder = "model.timestep_encoder.timestep_embedder.linear"
        condition = self.linear(f"{embedder}_2", silu(self.linear(f"{embedder}_1", condition)))
        for number in range(4):
            name = f"model.transformer_blocks.{number}"
            scale, shift = self.linear(f"{name}.norm1.linear", silu(condition)).chunk(2)
            normed = layer_norm(y, y.shape[-1:]) * (1 + scale) + shift
            y = y + self.attended(name, normed, normed if number % 2 else context)
            y = y + self.feed(name, layer_norm(y, y.shape[-1:]))
        shift, scale = self.linear("model.proj_out_1", silu(condition)).chunk(2)
        y = self.linear("model.proj_out_2", layer_norm(y, y.shape[-1:], eps=1e-6) * (1 + scale) + shift)
        return self.mlp("action_decoder", y)[-HORIZON:]


@torch.no_grad()
def backbone_of(policy: GR00TPolicy, seen: Observations, row: int) -> Tensor:
    """[P, W] of Eagle for one row: transformers' Qwen3 with its own mask, without an empty place."""
    eagle: Any = policy.backbone["eagle_model"]
    model = eagle["language_model"]["model"]
    parts = []
    for number, key in enumerate(CAMERAS):
        tower = eagle["vision_model"]["vision_model"]
        shown = tower(pixel_values=policy.prepared(seen[key][row][None])).last_hidden_state[0]
        parts += [model.embed_tokens(policy.get_buffer(f"opening{number}")), eagle["mlp1"](shown)]
    words = seen[INSTRUCTION][row]
    parts.append(model.embed_tokens(words[words >= 0]))
    output: Tensor = model(inputs_embeds=torch.cat(parts)[None]).last_hidden_state[0]
    return output.double()


@torch.no_grad()
@pytest.mark.parametrize("num_steps", [3, 10])
def test_the_deterministic_chain_is_a_plain_computation_from_the_published_tensors(
    repository: Path, num_steps: int
) -> None:
    """Euler steps of the publisher: at t = step / K, cut to a bucket of 1000, x grows by velocity / K."""
    stage = bundle(str(repository), num_steps=num_steps).stage()
    policy = policy_of(stage)
    plain = Plain(load_file(repository / "model.safetensors"), ROBOTS["libero_franka"])
    seen, noise = inputs(stage)
    ends = stage.decide(seen, noise, deterministic=True)["actions"][:, -1]
    low, high = (torch.tensor([number for part in ends.values() for number in part]) for ends in (LOW, HIGH))
    for row in range(4):
        scaled = torch.where(low == high, 0, 2 * (seen["state"][row] - low) / (high - low) - 1)
        state, context = pad(scaled, (0, 3)).double(), plain.context(backbone_of(policy, seen, row))
        x = noise[row, 0].unflatten(0, (HORIZON, 8)).double()
        for step in range(num_steps):
            x = x + plain.velocity(context, state, x, int(step / num_steps * 1000)) / num_steps
        torch.testing.assert_close(ends[row], x.flatten().float(), atol=2e-4, rtol=2e-4)


def test_a_replay_has_the_bits_of_the_rollout_and_rows_are_independent() -> None:
    stage = bundle().stage()
    seen, noise = inputs(stage, 9)
    decided = stage.decide(seen, noise)
    again = stage._forward(seen, actions=decided["actions"])
    assert torch.equal(again["logp"], decided["logp"]) and again["logp"].requires_grad
    few = stage.decide({key: value[:2] for key, value in seen.items()}, noise[:2])
    assert torch.equal(few["logp"], decided["logp"][:2]) and torch.equal(few["actions"], decided["actions"][:2])


@torch.no_grad()
def test_empty_places_of_an_instruction_change_nothing() -> None:
    few, many = (bundle(prompt_tokens=places).stage() for places in (60, 90))
    (seen, noise), (padded, _) = inputs(few), inputs(many)
    ours, theirs = few.decide(seen, noise), many.decide(padded, noise)
    torch.testing.assert_close(ours["actions"], theirs["actions"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("train", "is_whole"), [("expert", False), ("all", True)])
def test_gradients_reach_the_trained_part_and_the_weights_of_one_robot(train: str, is_whole: bool) -> None:
    one = bundle(train=train)
    stage = one.stage()
    seen, noise = inputs(stage)
    stage._forward(seen, actions=stage.decide(seen, noise)["actions"])["logp"].sum().backward()
    moved = {name: p.grad for name, p in one.trainable().named_parameters() if p.grad is not None and p.grad.any()}
    assert any(name.startswith("backbone.") for name in moved) == is_whole
    targets = one.facts.lora_targets
    assert len(targets) == 6 * (4 + 2) + (2 * 7 if is_whole else 0)
    for target in targets:
        assert any(name.endswith(f"{target}.weight") for name in moved), target
    for name in ("state_encoder.layer1.W", "action_encoder.W2.W", "action_decoder.layer2.b"):
        touched = moved[f"action_head.{name}"].flatten(1).abs().sum(1).nonzero().flatten().tolist()
        assert touched == [ROBOTS["libero_franka"]]


def test_the_value_reads_the_observation_alone() -> None:
    stage = bundle().stage()
    seen, noise = inputs(stage)
    hidden = [stage._forward(seen, noise=part)["hidden"] for part in (noise, -noise)]
    assert torch.equal(*hidden) and hidden[0].shape == (4, stage.policy.hidden_size)
    for key in (*CAMERAS, "state"):
        assert not torch.equal(stage._forward({**seen, key: seen[key] + 1}, noise=noise)["hidden"], hidden[0])


# Files


def test_an_export_has_the_published_names_and_is_read_again(repository: Path, tmp_path: Path) -> None:
    one = bundle(str(repository))
    original = one.trainable().state_dict()
    changed = {name: tensor + 0.1 for name, tensor in original.items() if "action_head.model" in name}
    folder = one.write(tmp_path / "export", changed)
    before, after = (load_file(path / "model.safetensors") for path in (repository, folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], changed.get(name, tensor)) for name, tensor in before.items())
    again = one.reopened(folder).stage()
    seen, noise = inputs(again)
    one.trainable().load_state_dict(changed, strict=False)
    assert torch.equal(one.stage().decide(seen, noise)["executed"], again.decide(seen, noise)["executed"])


def test_executed_actions_have_the_range_of_the_data(repository: Path) -> None:
    chain = torch.zeros(2, 5, 48)
    chain[0, -1], chain[1, -1] = -1, 1
    ends = bundle(str(repository)).stage().policy.executed(chain)[:, 0]
    torch.testing.assert_close(ends, torch.tensor([[-1.0] * 6 + [0.0], [3.0] * 6 + [1.0]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "Gr00tN1d6"}, r"model_type='Gr00tN1d6', but GR00TBundle reads 'gr00t_n1_5'"),
        ({"backbone_cfg": {"project_to_dim": 1536}}, r"backbone_cfg\.project_to_dim=1536, which is not available"),
    ],
)
def test_other_checkpoints_are_refused(repository: Path, tmp_path: Path, change: dict[str, Any], why: str) -> None:
    config = json.loads((repository / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(NotFoundError, match=why):
        bundle(str(tmp_path))


@pytest.mark.parametrize(
    ("robot", "why"),
    [
        ("franka", r"bundle\.robot=franka: the robots are oxe_droid, gr1"),
        ("gr1", r"bundle\.robot=gr1: .*metadata\.json has statistics of libero_franka"),
    ],
)
def test_another_robot_is_refused(repository: Path, robot: str, why: str) -> None:
    with pytest.raises(InvalidValueError, match=why):
        bundle(str(repository), robot=robot)


def test_sizes_and_facts_are_known_without_the_weights(repository: Path) -> None:
    real = bundle()
    estimate = GR00TBundle.estimate(str(repository))
    assert estimate.parameters == {"policy": parameters_of(real.trainable())}
    known = GR00TBundle.facts_from({**real.settings, "path": str(repository)})
    assert known.lora_targets == real.facts.lora_targets
    assert known.tokens_per_decision == real.facts.tokens_per_decision == 2 * 4 + 64 + 1 + 3 + 6


def test_the_published_head_has_the_parameters_that_its_code_prints() -> None:
    """Logs of the publisher's code say 550,386,688 of the DiT, and 201,433,088 of the self-attention before it."""
    network, _ = GR00TBundle.measured(GR00TBundle.published["nvidia/GR00T-N1.5-3B"])
    head = network.action_head
    assert parameters_of(head.model) == 550_386_688 and parameters_of(head.vl_self_attention) == 201_433_088
