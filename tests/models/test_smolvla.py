"""SmolVLA against a plain computation from its published tensors, in float64, and its files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.models.policies.stage import InstructedStage
from unirl.models.smolvla.family import SmolVLABundle
from unirl.models.smolvla.network import SmolVLAPolicy
from unirl.types.environments import INSTRUCTION, Observations

CAMERAS = ("agentview", "wrist")
TASKS = ["reach the red disc", "go", "pick up the cup", "Stay"]
LAYERS, HEAD, WIDTH, IMAGE_TOKENS = 4, 8, 24, 4
NORMALIZER = "policy_preprocessor_step_5_normalizer_processor.safetensors"
STATISTICS = {
    "observation.state.mean": [0.1, -0.2, 0.3, 0.0, 1.0], "observation.state.std": [0.5, 2.0, 1.0, 0.1, 3.0],
    "action.mean": [0.1] * 6 + [-0.5], "action.std": [0.5] * 6 + [2.0],
}  # fmt: skip


def bundle(path: str = "toy", **settings: Any) -> SmolVLABundle:
    shapes = {**dict.fromkeys(CAMERAS, (3, 40, 40)), "state": (5,)}
    return SmolVLABundle(path=path, **{"dtype": "fp32", "observations": shapes, "chunk": 2, **settings})


def inputs(stage: InstructedStage, count: int = 4) -> tuple[Observations, Tensor]:
    generator = torch.Generator().manual_seed(3)
    seen: Observations = {
        key: torch.randint(256, (count, 3, 40, 40), generator=generator, dtype=torch.uint8) for key in CAMERAS
    }
    seen |= {"state": torch.randn(count, 5, generator=generator), **stage.instructions((TASKS * count)[:count])}
    return seen, torch.randn(count, *stage.policy.noise_shape, generator=generator)


def policy_of(stage: InstructedStage) -> SmolVLAPolicy:
    assert isinstance(stage.policy, SmolVLAPolicy)
    return stage.policy


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy as lerobot would have written it: with a head, statistics, and weights that are not so regular."""
    folder, one = tmp_path_factory.mktemp("smolvla"), bundle()
    generator = torch.Generator().manual_seed(5)
    state = one.trainable().state_dict()
    one.write(folder, {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in state.items()})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.vlm_with_expert.vlm.lm_head.weight"] = torch.randn(272, 32, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file({name: torch.tensor(numbers) for name, numbers in STATISTICS.items()}, folder / NORMALIZER)
    return folder


# The network


def turned(x: Tensor, places: Tensor) -> Tensor:
    """Rotary position embedding of x [T, heads, d] by halves, base 10,000 (arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angles = places[:, None, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def attended(queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """[T, heads d]: query head h reads key head h // 2."""
    weights = torch.einsum("thd,shd->hts", queries, keys.repeat_interleave(2, 1)) / math.sqrt(HEAD)
    weights = weights.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, values.repeat_interleave(2, 1)).flatten(1)


class Plain:
    """One row through both stacks of layers, from the published tensors, without a cache or an empty place."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name.removeprefix("model."): tensor.double() for name, tensor in tensors.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.tensors[f"{name}.weight"]

    def heads(self, name: str, x: Tensor) -> Tensor:
        return self.linear(name, x).unflatten(-1, (-1, HEAD))

    def after(self, block: str, x: Tensor, found: Tensor) -> Tensor:
        x = x + self.linear(f"{block}.self_attn.o_proj", found)
        normed = self.norm(f"{block}.post_attention_layernorm", x)
        inner = silu(self.linear(f"{block}.mlp.gate_proj", normed)) * self.linear(f"{block}.mlp.up_proj", normed)
        return x + self.linear(f"{block}.mlp.down_proj", inner)

    def velocity(self, prefix: Tensor, points: Tensor, sigma: float) -> Tensor:
        """[H, D] for the embeddings [P, W] of images, text and state, and points [H, D]."""
        count, places = len(prefix), torch.arange(len(prefix)).double()
        periods = 4e-3 * (4.0 / 4e-3) ** torch.linspace(0, 1, WIDTH // 2, dtype=torch.float64)
        waves = 2 * math.pi * sigma / periods
        levels = torch.cat([waves.sin(), waves.cos()]).expand(len(points), -1)
        y = torch.cat([self.linear("action_in_proj", points), levels], -1)
        y = self.linear("action_time_mlp_out", silu(self.linear("action_time_mlp_in", y)))
        x, own = prefix, torch.arange(len(points)).double()
        everything = torch.ones(count, count, dtype=torch.bool)
        everything[:-1, -1] = False  # the state is hidden from images and text
        causal = torch.ones(len(points), len(points), dtype=torch.bool).tril()
        to_prefix = torch.ones(len(points), count, dtype=torch.bool)
        for number in range(LAYERS):
            vlm = f"vlm_with_expert.vlm.model.text_model.layers.{number}"
            expert = f"vlm_with_expert.lm_expert.layers.{number}"
            normed = self.norm(f"{vlm}.input_layernorm", x)
            q, k, v = (self.heads(f"{vlm}.self_attn.{name}_proj", normed) for name in "qkv")
            q, k = turned(q, places), turned(k, places)
            x = self.after(vlm, x, attended(q, k, v, everything))
            normed = self.norm(f"{expert}.input_layernorm", y)
            q = self.heads(f"{expert}.self_attn.q_proj", normed)
            if number % 2:  # cross-attention to projected keys and values of the prefix
                k, v = (self.heads(f"{expert}.self_attn.{name}_proj", t.flatten(1)) for name, t in (("k", k), ("v", v)))
                found = attended(turned(q, own), k, v, to_prefix)
            else:
                own_k, own_v = (self.heads(f"{expert}.self_attn.{name}_proj", normed) for name in "kv")
                keys = torch.cat([k, turned(own_k, own + count)])
                allowed = torch.cat([to_prefix, causal], dim=1)
                found = attended(turned(q, own + count), keys, torch.cat([v, own_v]), allowed)
            y = self.after(expert, y, found)
        return self.linear("action_out_proj", self.norm("vlm_with_expert.lm_expert.norm", y))


@torch.no_grad()
def test_the_deterministic_chain_is_a_plain_computation_from_the_published_tensors(repository: Path) -> None:
    stage = bundle(str(repository), num_steps=3).stage()
    policy, plain = policy_of(stage), Plain(load_file(repository / "model.safetensors"))
    seen, noise = inputs(stage)
    ends = stage.decide(seen, noise, deterministic=True)["actions"][:, -1]
    vlm = policy.model.vlm
    mean, std = (torch.tensor(STATISTICS[f"observation.state.{name}"]) for name in ("mean", "std"))
    for row in range(4):
        words = seen[INSTRUCTION][row]
        text = vlm.get_input_embeddings()(words[words >= 0])
        shown = [
            vlm.get_image_features(policy.prepared(seen[key][row][None])[None]).pooler_output[0] for key in CAMERAS
        ]
        assert shown[0].shape == (IMAGE_TOKENS, 32)
        state = torch.nn.functional.pad((seen["state"][row] - mean) / std, (0, 3)).double()
        embedded = torch.cat([*shown, text]).double() * math.sqrt(32)
        prefix = torch.cat([embedded, plain.linear("state_proj", state)[None]])
        x = noise[row, 0].unflatten(0, (6, 8)).double()
        for step in range(3):
            x = x - plain.velocity(prefix, x, 1 - step / 3) / 3
        torch.testing.assert_close(ends[row], x.flatten().float(), atol=2e-4, rtol=2e-4)


def test_images_are_resized_as_in_lerobot() -> None:
    """`resize_with_pad` of a square image is torch's bilinear interpolation of numbers in [0, 1]."""
    stage = bundle().stage()
    images = inputs(stage)[0]["wrist"]
    theirs = torch.nn.functional.interpolate(images / 255, (32, 32), mode="bilinear", align_corners=False) * 2 - 1
    torch.testing.assert_close(policy_of(stage).prepared(images), theirs, atol=1e-5, rtol=0)


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
    few, many = (bundle(prompt_tokens=places).stage() for places in (24, 40))
    (seen, noise), (padded, _) = inputs(few), inputs(many)
    ours, theirs = few.decide(seen, noise), many.decide(padded, noise)
    torch.testing.assert_close(ours["actions"], theirs["actions"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("train", "is_whole"), [("expert", False), ("all", True)])
def test_gradients_reach_the_trained_part_alone(train: str, is_whole: bool) -> None:
    one = bundle(train=train)
    stage = one.stage()
    seen, noise = inputs(stage)
    stage._forward(seen, actions=stage.decide(seen, noise)["actions"])["logp"].sum().backward()
    moved = {name for name, p in one.trainable().named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert any(".vlm.model." in name for name in moved) == is_whole
    parts = ("state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "lm_expert.layers.3.mlp")
    assert all(any(part in name for name in moved) for part in parts)
    own = [target for target in one.facts.lora_targets if "lm_expert" in target]
    assert len(own) == LAYERS * 7 and all(any(name.endswith(f"{target}.weight") for name in moved) for target in own)


def test_the_value_reads_the_observation_alone() -> None:
    stage = bundle().stage()
    seen, noise = inputs(stage)
    hidden = [stage._forward(seen, noise=part)["hidden"] for part in (noise, -noise)]
    assert torch.equal(*hidden) and hidden[0].shape == (4, 32)
    for key in (*CAMERAS, "state"):
        assert not torch.equal(stage._forward({**seen, key: seen[key] + 1}, noise=noise)["hidden"], hidden[0])


# Files


def test_an_export_has_the_published_names_and_is_read_again(repository: Path, tmp_path: Path) -> None:
    one = bundle(str(repository))
    original = one.trainable().state_dict()
    changed = {name: tensor + 0.1 for name, tensor in original.items() if "lm_expert.layers" in name}
    folder = one.write(tmp_path / "export", changed)
    before, after = (load_file(path / "model.safetensors") for path in (repository, folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], changed.get(name, tensor)) for name, tensor in before.items())
    assert (folder / NORMALIZER).read_bytes() == (repository / NORMALIZER).read_bytes()
    again = one.reopened(folder).stage()
    seen, noise = inputs(again)
    one.trainable().load_state_dict(changed, strict=False)
    assert torch.equal(one.stage().decide(seen, noise)["executed"], again.decide(seen, noise)["executed"])


def test_executed_actions_have_the_scale_of_the_data(repository: Path) -> None:
    chain = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(STATISTICS[f"action.{part}"]) for part in ("mean", "std"))
    expected = chain[:, -1].view(3, 6, 8)[:, :2, :7] * std + mean
    torch.testing.assert_close(bundle(str(repository)).stage().policy.executed(chain), expected)


def test_the_files_of_the_vlm_may_lie_elsewhere(repository: Path, tmp_path: Path) -> None:
    """As published: config.json names a hub id, and there is no tokenizer."""
    plain, vlm = tmp_path / "plain", tmp_path / "vlm"
    for folder in (plain, vlm):
        folder.mkdir()
    for path in repository.iterdir():
        (vlm if "token" in path.name else plain).joinpath(path.name).write_bytes(path.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    (vlm / "config.json").write_text(json.dumps(config.pop("vlm_config")))
    (plain / "config.json").write_text(json.dumps(config))
    ours, theirs = bundle(str(plain), vlm=str(vlm)), bundle(str(repository))
    seen, noise = inputs(theirs.stage())
    assert torch.equal(inputs(ours.stage())[0][INSTRUCTION], seen[INSTRUCTION])
    assert torch.equal(ours.stage().decide(seen, noise)["actions"], theirs.stage().decide(seen, noise)["actions"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"type": "pi0"}, r"type='pi0', but SmolVLABundle reads 'smolvla' of lerobot"),
        ({"attention_mode": "self_attn"}, r"attention_mode='self_attn', which is not available"),
        ({"num_expert_layers": 2}, r"num_expert_layers=2, which is not available"),
    ],
)
def test_other_checkpoints_are_refused(repository: Path, tmp_path: Path, change: dict[str, Any], why: str) -> None:
    config = json.loads((repository / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(NotFoundError, match=why):
        bundle(str(tmp_path))


def test_missing_tensors_are_named(repository: Path, tmp_path: Path) -> None:
    for path in repository.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    state = load_file(tmp_path / "model.safetensors")
    del state["model.state_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(NotFoundError, match=r"missing \(1\): model\.state_proj\.weight"):
        bundle(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"actions": 9}, r"bundle\.actions=9: the model denoises 8 numbers of an action\. Use 8 or less"),
        ({"observations": {"state": (5,)}}, "names state: SmolVLA reads at least one camera and the state"),
        ({"prompt_tokens": 4}, r"prompt_tokens=4: the instruction 'reach the red disc' has 19 tokens"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidValueError, match=why):
        bundle(**settings).stage().instructions(TASKS)


def test_sizes_and_facts_are_known_without_the_weights(repository: Path) -> None:
    real = bundle()
    estimate = SmolVLABundle.estimate(str(repository))
    assert estimate.parameters == {"policy": sum(p.numel() for p in real.trainable().parameters())}
    settings = {**real.settings, "path": str(repository), "revision": None, "vlm": None}
    known = SmolVLABundle.facts_from(settings)
    assert known.lora_targets == real.facts.lora_targets
    assert known.tokens_per_decision == real.facts.tokens_per_decision == 2 * IMAGE_TOKENS + 48 + 1 + 6


def test_the_published_model_has_the_parameters_of_the_paper() -> None:
    """450 million (arXiv:2506.01844, section 3), with a head of 49,280 tokens of 960 numbers that never runs."""
    parameters = SmolVLABundle.estimate("lerobot/smolvla_base").parameters["policy"]
    assert parameters + 49_280 * 960 == pytest.approx(450e6, rel=0.001)
