"""pi0 against transformers' own class and processor: actions, log-probs, tokens, images, and files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributions import Normal

from unirl.config.errors import DependencyError, InvalidValueError, NotFoundError
from unirl.models.loading.lora import inject_lora
from unirl.models.pi0 import family as pi0
from unirl.models.pi0.family import Pi0Bundle
from unirl.models.pi0.network import Pi0Policy
from unirl.models.policies.scales import EPS
from unirl.models.policies.stage import InstructedStage
from unirl.types.environments import INSTRUCTION, Observations
from unirl.types.facts import LoraSpec

CAMERAS = ("agentview", "wrist")
SETTINGS: dict[str, Any] = {
    "dtype": "fp32",
    "observations": {**dict.fromkeys(CAMERAS, (3, 40, 40)), "state": (5,)},
    "chunk": 2,
    "prompt_tokens": 32,
}
TASKS = ["reach the red disc", "go", "reach the blue disc", "Stay"]
STATISTICS = {
    "state_mean": [0.1, -0.2, 0.3, 0.0, 1.0], "state_std": [0.5, 2.0, 1.0, 0.1, 3.0],
    "actions_mean": [0.1] * 6 + [-0.5], "actions_std": [0.5] * 6 + [2.0],
}  # fmt: skip


def bundle(path: str = "toy", **settings: Any) -> Pi0Bundle:
    return Pi0Bundle(path=path, **SETTINGS | settings)


def inputs(stage: InstructedStage, count: int = 4) -> tuple[Observations, Tensor]:
    generator = torch.Generator().manual_seed(3)
    seen: Observations = {
        key: torch.randint(256, (count, 3, 40, 40), generator=generator, dtype=torch.uint8) for key in CAMERAS
    }
    seen |= {"state": torch.randn(count, 5, generator=generator), **stage.instructions((TASKS * count)[:count])}
    return seen, torch.randn(count, *stage.policy.noise_shape, generator=generator)


def policy_of(stage: InstructedStage) -> Pi0Policy:
    assert isinstance(stage.policy, Pi0Policy)
    return stage.policy


def library_inputs(policy: Pi0Policy, seen: Observations, row: int) -> dict[str, Tensor]:
    """What the library's class reads of one row, without the empty places of its instruction."""
    words = seen[INSTRUCTION][row]
    words = words[words >= 0]
    images = torch.stack([policy.prepared(seen[key][row : row + 1]) for key in CAMERAS], dim=1)
    tokens = torch.cat([torch.full((2 * 4,), policy.pi0.config.vlm_config.image_token_id), words])[None]
    mean, std = policy.get_buffer("state_mean"), policy.get_buffer("state_std")
    state = (seen["state"][row : row + 1] - mean) / (std + EPS)
    return {
        "state": torch.nn.functional.pad(state, (0, 3)),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": images,
        "pixel_attention_mask": torch.ones(1, 2, dtype=torch.bool),
    }


# The network


@torch.no_grad()
@pytest.mark.parametrize("num_steps", [2, 5])
def test_the_deterministic_chain_is_sample_actions_of_the_library(repository: Path, num_steps: int) -> None:
    stage = bundle(str(repository), num_steps=num_steps).stage()
    policy = policy_of(stage)
    seen, noise = inputs(stage)
    ends = stage.decide(seen, noise, deterministic=True)["actions"][:, -1]
    for row in range(4):
        start = noise[row : row + 1, 0].unflatten(1, (6, 8))
        given = library_inputs(policy, seen, row)
        expected = policy.pi0.sample_actions(noise=start, num_steps=num_steps, **given)  # type: ignore[arg-type]
        torch.testing.assert_close(ends[row], expected.flatten(), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("logp_of", ["executed", "all"])
def test_log_probs_are_gaussians_around_the_librarys_velocity(logp_of: str) -> None:
    """The mean and std of Flow-SDE (arXiv:2505.05470, eq. 9) of each transition, in float64."""
    stage = bundle(num_steps=4, eta=0.6, logp_of=logp_of).stage()
    policy = policy_of(stage)
    seen, noise = inputs(stage)
    decided = stage.decide(seen, noise)
    chain = decided["actions"]
    counts = torch.zeros(6, 8, dtype=torch.bool)
    counts[:2, :7] = True
    counted = counts.flatten() if logp_of == "executed" else torch.ones(48, dtype=torch.bool)
    for row in range(4):
        total = 0.0
        for step in range(3):
            sigma, after, x = 1 - step / 4, 1 - (step + 1) / 4, chain[row, step].double()
            given = library_inputs(policy, seen, row)
            v = policy.pi0(noise=x.float().view(1, 6, 8), timestep=torch.tensor([sigma]), **given).logits  # type: ignore[arg-type]
            v = v.flatten().double()
            dt = after - sigma
            s = 0.6 * math.sqrt(sigma / (1 - (after if step == 0 else sigma)))
            score = -(x + (1 - sigma) * v) / sigma
            mean = x + v * dt - s**2 * score * dt / 2
            total += Normal(mean, s * math.sqrt(-dt)).log_prob(chain[row, step + 1].double())[counted].sum().item()
        assert decided["logp"][row].item() == pytest.approx(total, rel=1e-4)


def test_the_entropy_counts_the_numbers_that_the_log_prob_counts() -> None:
    each = [bundle(logp_of=name).stage().policy for name in ("executed", "all")]
    few, every = (policy.noise_entropy() for policy in each)  # type: ignore[operator]
    assert few / every == pytest.approx(2 * 7 / (6 * 8))


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


def by_pil(self: object, images: list[Tensor], **options: object) -> dict[str, Tensor]:
    """PI0ImageProcessor needs torchvision. This resizes, rescales and normalises square images as it says it does."""
    from PIL import Image

    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()).resize((28, 28), 3) for image in images]
    levels = torch.stack([torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) for picture in pictures])
    return {"pixel_values": (levels.float() / 255 - 0.5) / 0.5}


def test_images_and_instructions_are_those_of_the_librarys_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.pi0.image_processing_pi0 import PI0ImageProcessor
    from transformers.models.pi0.processing_pi0 import PI0Processor

    monkeypatch.setattr(PI0ImageProcessor, "__call__", by_pil)
    monkeypatch.setattr(PI0ImageProcessor, "image_seq_length", 4)
    assert (PI0ImageProcessor.resample, *PI0ImageProcessor.image_mean, *PI0ImageProcessor.image_std) == (3, *6 * [0.5])
    stage = bundle().stage()
    seen, _ = inputs(stage)
    processor = PI0Processor(PI0ImageProcessor(), pi0.gemma_tokenizer(), max_state_dim=8, **STATISTICS)
    theirs = processor([[image] for image in seen["agentview"]], TASKS)
    levels = (policy_of(stage).prepared(seen["agentview"]) - theirs["pixel_values"][:, 0]) * 127.5
    assert levels.abs().max() <= 1.001
    for row in range(4):
        tokens = theirs["input_ids"][row][theirs["attention_mask"][row].bool()]
        ours = seen[INSTRUCTION][row]
        assert tokens[4:].tolist() == ours[ours >= 0].tolist()


def test_the_toy_is_the_same_in_every_process() -> None:
    """Processes have drawn different numbers from torch's generator before they build it."""
    states = []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            states.append(bundle().trainable().state_dict())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


# Training


@pytest.mark.parametrize(("train", "is_whole"), [("expert", False), ("all", True)])
def test_gradients_reach_the_trained_part_alone(train: str, is_whole: bool) -> None:
    one = bundle(train=train)
    stage, network = one.stage(), one.trainable()
    seen, noise = inputs(stage)
    stage._forward(seen, actions=stage.decide(seen, noise)["actions"])["logp"].sum().backward()
    moved = {name for name, p in network.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    of_prefix = {name for name in moved if name.startswith("pi0.model.vlm.")}
    assert bool(of_prefix) == is_whole
    assert any("vision_tower" in name for name in of_prefix) == is_whole
    parts = ("action_in_proj", "state_proj", "action_out_proj", "dit.layers.1.mlp", "dit.layers.0.self_attn.k_proj")
    assert all(any(part in name for name in moved) for part in parts)
    frozen = {name for name, p in network.named_parameters() if not p.requires_grad}
    assert "pi0.model.dit.embed_tokens.weight" in frozen
    assert all(name in frozen for name, _ in network.named_parameters() if "vlm." in name) != is_whole


@pytest.mark.parametrize(("train", "count"), [("expert", 2 * 7), ("all", 2 * 7 + 2 * 7)])
def test_adapters_go_on_the_trained_decoders(train: str, count: int) -> None:
    one = bundle(train=train)
    network = one.trainable()
    inject_lora(network, LoraSpec(2, 4.0, one.facts.lora_targets), 0, None)
    adapted = {name.partition(".lora_A")[0] for name, _ in network.named_parameters() if ".lora_A." in name}
    assert len(adapted) == count and not any("vision_tower" in name for name in adapted)
    stage = one.stage()
    seen, noise = inputs(stage)
    stage._forward(seen, actions=stage.decide(seen, noise)["actions"])["logp"].sum().backward()
    moved = {name for name, p in network.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    # The outputs of the last layer of PaliGemma are read by nothing: only its keys and values are.
    unread = {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    idle = {name for name in adapted if "language_model.layers.1" in name and name.rpartition(".")[2] in unread}
    assert {name.partition(".lora_B")[0] for name in moved if ".lora_B." in name} == adapted - idle


@pytest.mark.parametrize(("train", "passes"), [("expert", (2, 0)), ("all", (2, 1))])
def test_every_forward_of_a_block_gets_the_gradient_of_its_output(train: str, passes: tuple[int, int]) -> None:
    """FSDP2 gathers the weights of a block when that arrives. The expert runs twice: for the state, and for actions."""
    one = bundle(train=train)
    stage, model = one.stage(), one.trainable().pi0.model
    arrived: Counter[str] = Counter()

    def watch(name: str) -> Callable[..., None]:
        def hook(block: object, inputs: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: arrived.update([name]))

        return hook

    for part, decoder in (("dit", model.dit), ("vlm", model.vlm.language_model)):
        for number, layer in enumerate(decoder.layers):
            layer.register_forward_hook(watch(f"{part}{number}"))
    seen, noise = inputs(stage)
    stage._forward(seen, actions=stage.decide(seen, noise)["actions"])["logp"].sum().backward()
    assert [arrived[name] for name in ("dit0", "dit1", "vlm0", "vlm1")] == [passes[0]] * 2 + [passes[1]] * 2


def test_checkpointed_blocks_have_the_same_gradients() -> None:
    from unirl.train.backend.base import OptimizerConfig
    from unirl.train.backend.fsdp import FSDPBackend
    from unirl.train.configs import FSDPConfig

    gradients = []
    for is_checkpointed in (True, False):
        one = bundle(train="all")
        config = FSDPConfig(activation_checkpointing=is_checkpointed)
        FSDPBackend(one, optimizer_cfg=OptimizerConfig(learning_rate=1e-3), fsdp_cfg=config)
        stage = one.stage()
        seen, noise = inputs(stage)
        stage._forward(seen, actions=stage.decide(seen, noise)["actions"])["logp"].sum().backward()
        gradients.append({name: p.grad for name, p in one.trainable().named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-4)


def test_the_value_head_reads_the_observation_and_trains_alone() -> None:
    stage = bundle().stage()
    stage.value_head = stage.build_value_head(8, 0)
    seen, noise = inputs(stage)
    with torch.no_grad():
        stage.value_head.get_parameter("output_layer.weight").normal_()
    chains = [stage.decide(seen, part)["actions"] for part in (noise, -noise)]
    outputs = [stage._forward(seen, actions=chain) for chain in chains]
    values = [stage._values(stage.value_head, seen, output, "head") for output in outputs]
    assert torch.equal(*values) and values[0].unique().numel() == 4
    values[0].sum().backward()
    assert all(p.grad is None for p in stage.network.parameters())
    other = {**seen, "state": seen["state"] + 1}
    changed = stage._values(stage.value_head, other, stage._forward(other, actions=chains[0]), "head")
    assert not torch.equal(changed, values[0])


# Files


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with statistics, as its publisher would have written it."""
    folder = tmp_path_factory.mktemp("pi0")
    bundle().write(folder, {})
    (folder / "processor_config.json").write_text(json.dumps(STATISTICS))
    return folder


def damaged(repository: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in repository.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_an_export_is_read_by_the_library_and_by_us(repository: Path, tmp_path: Path) -> None:
    from transformers import PI0ForConditionalGeneration

    one = bundle(str(repository))
    original = one.trainable().state_dict()
    changed = {name: tensor + 0.1 for name, tensor in original.items() if "dit.layers" in name}
    folder = one.write(tmp_path / "export", changed)
    for name in ("processor_config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (repository / name).read_bytes()
    theirs, info = PI0ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = {f"pi0.{name}": tensor for name, tensor in theirs.state_dict().items()}
    assert state.keys() == original.keys()
    assert all(torch.equal(tensor, changed.get(name, original[name])) for name, tensor in state.items())
    again = one.reopened(folder).stage()
    seen, noise = inputs(again)
    one.trainable().load_state_dict(changed, strict=False)
    assert torch.equal(one.stage().decide(seen, noise)["executed"], again.decide(seen, noise)["executed"])


def test_executed_actions_have_the_scale_of_the_data(repository: Path) -> None:
    plain, scaled = (bundle(path).stage() for path in ("toy", str(repository)))
    chain = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))
    numbers = plain.policy.executed(chain)
    assert torch.equal(numbers, chain[:, -1].view(3, 6, 8)[:, :2, :7])
    std, mean = (torch.tensor(STATISTICS[f"actions_{part}"]) for part in ("std", "mean"))
    torch.testing.assert_close(scaled.policy.executed(chain), numbers * std + mean)


def test_the_folder_of_another_model_is_refused(repository: Path, tmp_path: Path) -> None:
    folder = damaged(repository, tmp_path / "other")
    (folder / "config.json").write_text(json.dumps({"type": "pi0", "n_obs_steps": 1}))
    with pytest.raises(
        NotFoundError, match=r"model_type=None, type='pi0', but Pi0Bundle reads model_type='pi0'.*save_pretrained"
    ):
        bundle(str(folder))


def test_missing_tensors_and_other_shapes_are_named(repository: Path, tmp_path: Path) -> None:
    for number, change in enumerate(("missing", "shape")):
        folder = damaged(repository, tmp_path / str(number))
        state = load_file(folder / "model.safetensors")
        taken = state.pop("action_out_proj.weight")
        if change == "shape":
            state["action_out_proj.weight"] = taken[:, :-1].contiguous()
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(NotFoundError, match=r"action_out_proj\.weight"):
            bundle(str(folder))


def test_a_folder_without_a_tokenizer_is_refused(repository: Path, tmp_path: Path) -> None:
    folder = damaged(repository, tmp_path / "other")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(NotFoundError, match="cannot load the tokenizer"):
        bundle(str(folder))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"actions": 9}, r"bundle\.actions=9: the model denoises 8 numbers of an action\. Use 8 or less"),
        ({"chunk": 7}, r"bundle\.chunk=7: the model denoises 6 actions\. Use 6 or less"),
        ({"observations": {"state": (5,)}}, "names state: pi0 reads at least one camera and the state"),
        ({"observations": {"pixels": (3, 24, 24)}}, "names pixels: pi0 reads at least one camera and the state"),
        ({"observations": {"pixels": (3, 24, 32), "state": (5,)}}, r"pixels=\[3, 24, 32\]: pi0 reads square images"),
        ({"observations": {"pixels": (3, 24, 24), "state": (9,)}}, r"state=\[9\]: .* at most 8 numbers"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidValueError, match=why):
        bundle(**settings)


def test_statistics_of_another_robot_are_named(repository: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"actions=6: .* actions_mean of 7 and .* Set bundle\.actions=7"):
        bundle(str(repository), actions=6)


def test_an_instruction_that_does_not_fit_is_named_with_its_length() -> None:
    with pytest.raises(InvalidValueError, match=r"prompt_tokens=6: the instruction 'reach' has 7 tokens"):
        bundle(prompt_tokens=6).stage().instructions(["reach"])


def test_sizes_and_facts_are_known_without_the_weights(repository: Path) -> None:
    real = bundle()
    for path in ("toy", str(repository)):
        estimate = Pi0Bundle.estimate(path)
        assert estimate.parameters == {"policy": sum(p.numel() for p in real.trainable().parameters())}
        assert (estimate.num_blocks, estimate.width) == (2 + 2 + 2, 32)
        settings = {"actions": 7, "train": "expert", "path": path, "revision": None, "version": "pi0", **SETTINGS}
        known = Pi0Bundle.facts_from(settings)
        assert known.observations == real.facts.observations and known.lora_targets == real.facts.lora_targets
        assert known.tokens_per_decision == real.facts.tokens_per_decision == 2 * 4 + 32 + 1 + 6


def test_the_published_model_has_the_parameters_of_the_paper() -> None:
    """Black et al. 2024, section IV: 3 billion of PaliGemma and 300 million of the expert, without its vocabulary."""
    estimate = Pi0Bundle.estimate("lerobot/pi0_base")
    assert estimate.num_blocks == 27 + 18 + 18 and len(estimate.adapted_layers()) == 18 * 7
    vocabulary = 257152 * 1024
    assert estimate.parameters["policy"] - vocabulary == pytest.approx(3.24e9, rel=0.02)


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirl.config.dependencies.version", lambda name: "5.23.1")
    with pytest.raises(DependencyError, match=r"Pi0Bundle needs transformers>=5\.24, and 5\.23\.1 is installed"):
        bundle()
