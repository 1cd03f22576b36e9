"""pi0.5 against a plain computation from its published tensors, and its text against that of openpi."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import gelu, silu

from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.models.pi0.family import Pi0Bundle, number_tokens
from unirl.models.pi0.network import Pi05Policy
from unirl.models.policies.scales import EPS
from unirl.models.policies.stage import InstructedStage
from unirl.types.environments import Observations

CAMERAS = ("agentview", "wrist")
TASKS = ["reach the red disc", "go", "pick_up the cup\n", "Stay"]
WIDTH, HEADS, HEAD, LAYERS = 24, 2, 16, 2
"""Of the expert of the toy."""
Q01, Q99 = [-1.0, -2.0, -0.5, 0.0, 1.0], [1.0, 2.0, 1.5, 4.0, 3.0]


def bundle(path: str = "toy", **settings: Any) -> Pi0Bundle:
    shapes = {**dict.fromkeys(CAMERAS, (3, 28, 28)), "state": (5,)}
    given = {"dtype": "fp32", "observations": shapes, "chunk": 2, "prompt_tokens": 48, "version": "pi05"}
    return Pi0Bundle(path=path, **given | settings)


def inputs(stage: InstructedStage) -> tuple[Observations, Tensor]:
    generator = torch.Generator().manual_seed(3)
    seen: Observations = {
        key: torch.randint(256, (4, 3, 28, 28), generator=generator, dtype=torch.uint8) for key in CAMERAS
    }
    seen |= {"state": torch.randn(4, 5, generator=generator), **stage.instructions(TASKS)}
    return seen, torch.randn(4, *stage.policy.noise_shape, generator=generator)


def policy_of(stage: InstructedStage) -> Pi05Policy:
    assert isinstance(stage.policy, Pi05Policy)
    return stage.policy


def files_of(one: Pi0Bundle, folder: Path) -> Path:
    """The toy with the statistics of lerobot, and biases that are not 0."""
    generator = torch.Generator().manual_seed(5)
    state = one.trainable().state_dict()
    moved = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    one.write(folder, moved)
    statistics = {"observation.state.q01": Q01, "observation.state.q99": Q99, "action.q01": [-1.0] * 7}
    statistics |= {"action.q99": [3.0] * 7, "observation.state.mean": [9.0] * 5}
    tensors = {name: torch.tensor(numbers) for name, numbers in statistics.items()}
    save_file(tensors, folder / "policy_preprocessor_step_2_normalizer_processor.safetensors")
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files_of(bundle(), tmp_path_factory.mktemp("pi05"))


# The network


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """Rotary position embedding of x [N, T, heads, d] by halves, base 10,000 (arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angles = places[..., None, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def attended(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[N, T, heads d] for one head of keys and values, without a mask."""
    weights = torch.einsum("nthd,nsd->nhts", queries, keys) / math.sqrt(HEAD)
    return torch.einsum("nhts,nsd->nthd", weights.softmax(-1), values).flatten(2)


class Plain:
    """The sequence of one row through both stacks of layers, in float64, without a cache, a mask or an empty place."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name.removeprefix("model."): tensor.double() for name, tensor in tensors.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def norm(self, name: str, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        if condition is None:
            return normed * (1 + self.tensors[f"{name}.weight"]), 1.0
        scale, shift, gate = self.linear(f"{name}.dense", condition).chunk(3, -1)
        return normed * (1 + scale) + shift, gate

    def heads(self, block: str, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.linear(f"{block}.self_attn.{name}_proj", x).unflatten(-1, (-1, HEAD)) for name in "qkv")
        return rotated(q, places), rotated(k, places)[:, :, 0], v[:, :, 0]

    def after(self, block: str, x: Tensor, seen: Tensor, gate: Tensor | float, condition: Tensor | None) -> Tensor:
        x = x + gate * self.linear(f"{block}.self_attn.o_proj", seen)
        normed, gate = self.norm(f"{block}.post_attention_layernorm", x, condition)
        inner = gelu(self.linear(f"{block}.mlp.gate_proj", normed), approximate="tanh")
        return x + gate * self.linear(f"{block}.mlp.down_proj", inner * self.linear(f"{block}.mlp.up_proj", normed))

    def velocity(self, prefix: Tensor, points: Tensor, sigma: float) -> Tensor:
        """[1, H, D] for the embeddings [1, P, W] of images and text, and points [1, H, D]."""
        periods = 4e-3 * (4.0 / 4e-3) ** torch.linspace(0, 1, WIDTH // 2, dtype=torch.float64)
        waves = 2 * math.pi * sigma / periods
        condition = silu(self.linear("time_mlp_in", torch.cat([waves.sin(), waves.cos()])))
        condition = silu(self.linear("time_mlp_out", condition))
        x, y = prefix.double(), self.linear("action_in_proj", points.double())
        before, after = torch.arange(x.shape[1]).double(), torch.arange(y.shape[1]).double() + x.shape[1]
        for number in range(LAYERS):
            vlm = f"paligemma_with_expert.paligemma.model.language_model.layers.{number}"
            expert = f"paligemma_with_expert.gemma_expert.model.layers.{number}"
            normed, one = self.norm(f"{vlm}.input_layernorm", x, None)
            q, k, v = self.heads(vlm, normed, before)
            normed, gate = self.norm(f"{expert}.input_layernorm", y, condition)
            own_q, own_k, own_v = self.heads(expert, normed, after)
            x = self.after(vlm, x, attended(q, k, v), one, None)
            both = attended(own_q, torch.cat([k, own_k], 1), torch.cat([v, own_v], 1))
            y = self.after(expert, y, both, gate, condition)
        return self.linear(
            "action_out_proj", self.norm("paligemma_with_expert.gemma_expert.model.norm", y, condition)[0]
        )


@torch.no_grad()
def test_the_deterministic_chain_is_a_plain_computation_from_the_published_tensors(repository: Path) -> None:
    stage = bundle(str(repository), num_steps=3).stage()
    policy, plain = policy_of(stage), Plain(load_file(repository / "model.safetensors"))
    seen, noise = inputs(stage)
    ends = stage.decide(seen, noise, deterministic=True)["actions"][:, -1]
    for row in range(4):
        words = policy.words(seen)[row : row + 1]
        words = words[words >= 0][None]
        vlm = policy.pi0.model.vlm
        shown = [vlm.get_image_features(policy.prepared(seen[key][row : row + 1])).pooler_output for key in CAMERAS]
        prefix = torch.cat([*shown, vlm.get_input_embeddings()(words)], dim=1)
        x = noise[row : row + 1, 0].unflatten(1, (6, 8)).double()
        for step in range(3):
            x = x - plain.velocity(prefix, x, 1 - step / 3) / 3
        torch.testing.assert_close(ends[row], x.flatten().float(), atol=1e-4, rtol=1e-4)


def test_a_replay_has_the_bits_of_the_rollout_and_rows_are_independent() -> None:
    stage = bundle().stage()
    seen, noise = inputs(stage)
    decided = stage.decide(seen, noise)
    again = stage._forward(seen, actions=decided["actions"])
    assert torch.equal(again["logp"], decided["logp"]) and again["logp"].requires_grad
    few = stage.decide({key: value[:2] for key, value in seen.items()}, noise[:2])
    assert torch.equal(few["logp"], decided["logp"][:2]) and torch.equal(few["actions"], decided["actions"][:2])


@pytest.mark.parametrize("train", ["expert", "all"])
def test_gradients_reach_the_trained_part_alone(train: str) -> None:
    one = bundle(train=train)
    stage = one.stage()
    seen, noise = inputs(stage)
    stage._forward(seen, actions=stage.decide(seen, noise)["actions"])["logp"].sum().backward()
    moved = {name for name, p in one.trainable().named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert any(name.startswith("pi0.model.vlm.") for name in moved) == (train == "all")
    parts = ("action_in_proj", "time_mlp_in", "action_out_proj", "dit.norm.dense", "dit.layers.1.input_layernorm.dense")
    assert all(any(part in name for name in moved) for part in parts)
    targets = one.facts.lora_targets
    assert all(any(name.endswith(f"{target}.weight") for name in moved) for target in targets if "dit" in target)


def test_the_value_reads_the_observation_alone() -> None:
    stage = bundle().stage()
    seen, noise = inputs(stage)
    hidden = [stage._forward(seen, noise=part)["hidden"] for part in (noise, -noise)]
    assert torch.equal(*hidden) and hidden[0].shape == (4, 32)
    other = stage._forward({**seen, "state": -seen["state"]}, noise=noise)["hidden"]
    assert not torch.equal(other, hidden[0])


# The text


@pytest.mark.parametrize("padded", [False, True])
def test_the_text_is_that_of_openpi(repository: Path, tmp_path: Path, padded: bool) -> None:
    """`PaligemmaTokenizer.tokenize` of openpi, in numpy. lerobot pads the state before, and has a file that says so."""
    folder = tmp_path / "padded"
    folder.mkdir()
    for path in repository.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if padded:
        (folder / "policy_preprocessor.json").write_text("{}")
    one = bundle(str(folder))
    stage = one.stage()
    seen, _ = inputs(stage)
    seen["state"] = torch.tensor(
        [[-3.0, -2.0, 0.49, 4.0, 2.9], [1, 2, 1.5, 3.99, 1], [0, 0, 0, 0, 0], [9, -9, 9, -9, 9]]
    )
    scaled = 2 * (seen["state"].numpy() - np.array(Q01)) / (np.array(Q99) - np.array(Q01)) - 1
    scaled = np.pad(scaled, ((0, 0), (0, 3 if padded else 0)))
    bins = np.digitize(scaled + 1e-7, bins=np.linspace(-1, 1, 257)[:-1]) - 1
    for row, task in enumerate(TASKS):
        numbers = " ".join(map(str, bins[row]))
        text = f"Task: {task.strip().replace('_', ' ')}, State: {numbers};\nAction: "
        expected = one.tokenizer(text).input_ids
        words = policy_of(stage).words(seen)[row]
        assert words[words >= 0].tolist() == expected


def test_a_tokenizer_that_joins_numbers_is_refused() -> None:
    class Joining:
        def __call__(self, text: str, **options: object) -> Any:
            return type("Tokens", (), {"input_ids": [len(word) for word in text.split()]})

    with pytest.raises(NotFoundError, match=r"bundle\.tokenizer: it does not read the numbers of a state one after"):
        number_tokens(Joining())  # type: ignore[arg-type]


# Files


def test_actions_have_the_quantiles_of_the_data(repository: Path) -> None:
    policy = bundle(str(repository)).stage().policy
    chain = torch.zeros(2, 5, 48)
    chain[0, -1], chain[1, -1] = -1, 1
    torch.testing.assert_close(policy.executed(chain)[:, 0, 0], torch.tensor([-1.0, 3.0]), atol=10 * EPS, rtol=0)


def test_statistics_of_openpi_are_read_and_exported(repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "openpi"
    (folder / "libero").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((repository / name).read_bytes())
    tensors = load_file(repository / "model.safetensors")
    shorter = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(shorter, folder / "model.safetensors", {"format": "pt"})
    numbers = {"state": {"q01": Q01, "q99": Q99}, "actions": {"q01": [-1.0] * 7, "q99": [3.0] * 7}}
    (folder / "libero" / "norm_stats.json").write_text(json.dumps({"norm_stats": numbers}))
    one = bundle(str(folder))
    first, second = (each.stage() for each in (one, bundle(str(repository))))
    seen, noise = inputs(first)
    assert torch.equal(first.decide(seen, noise)["executed"], second.decide(seen, noise)["executed"])
    again = one.reopened(one.write(tmp_path / "export", {})).stage()
    assert torch.equal(again.decide(seen, noise)["executed"], first.decide(seen, noise)["executed"])
    (folder / "droid").mkdir()
    (folder / "droid" / "norm_stats.json").write_text("{}")
    with pytest.raises(InvalidValueError, match=r"statistics of several robots.*Keep the file of the robot"):
        bundle(str(folder))


def test_an_export_has_the_published_names_and_is_read_again(repository: Path, tmp_path: Path) -> None:
    one = bundle(str(repository))
    original = one.trainable().state_dict()
    changed = {name: tensor + 0.1 for name, tensor in original.items() if "dit.layers" in name}
    folder = one.write(tmp_path / "export", changed)
    assert load_file(folder / "model.safetensors").keys() == load_file(repository / "model.safetensors").keys()
    again = one.reopened(folder)
    assert all(torch.equal(t, changed.get(n, original[n])) for n, t in again.trainable().state_dict().items())
    assert again.config == one.config


def test_a_checkpoint_of_the_other_version_is_refused(repository: Path) -> None:
    with pytest.raises(NotFoundError, match=r"the checkpoint is one of pi05\. Set bundle\.version=pi05"):
        bundle(str(repository), version="pi0")


def test_another_size_is_refused(repository: Path, tmp_path: Path) -> None:
    config = json.loads((repository / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "paligemma_variant": "gemma_300m"}))
    with pytest.raises(NotFoundError, match=r"paligemma_variant='gemma_300m'\. The published pi0\.5 has 'gemma_2b'"):
        bundle(str(tmp_path))


def test_facts_are_known_without_the_weights(repository: Path) -> None:
    real = bundle()
    settings = {**real.settings, "path": str(repository), "revision": None}
    known = Pi0Bundle.facts_from(settings)
    assert known.family == "pi05" and known.tokens_per_decision == real.facts.tokens_per_decision
    assert known.lora_targets == real.facts.lora_targets


def test_the_published_model_has_the_parameters_of_pi0_and_its_norms() -> None:
    """pi0 without the projection of the state and with a time MLP of W + W inputs; 37 norms of 3 W (W + 1) numbers."""
    each = [Pi0Bundle.estimate(f"lerobot/{name}").parameters["policy"] for name in ("pi0_base", "pi05_base")]
    w = 1024
    more = 37 * (3 * w * w + 3 * w - w) - (32 * w + w) - (2 * w * w + w) + (w * w + w)
    assert each[1] - each[0] == more


def test_the_plan_counts_the_parameters_of_the_version() -> None:
    """Of the toy, which has both versions by one path, and of the published model."""
    from unirl.config.load import load
    from unirl.plan.sizes import RunSizes

    recipe = "embodied/libero_pi05_ppo"
    planned = RunSizes.of(load(recipe, ["scale=toy"]).config).estimate
    assert planned.parameters == {"policy": sum(p.numel() for p in bundle().trainable().parameters())}
    assert planned.facts.family == "pi05"
    network, _ = Pi0Bundle.measured(Pi0Bundle.published["lerobot/pi05_base"])
    published = RunSizes.of(load(recipe, []).config).estimate
    assert published.parameters == {"policy": sum(p.numel() for p in network.parameters())}
