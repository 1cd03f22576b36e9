"""OpenVLA against the library's own classes: towers, language model, tokens of actions, and the published layout."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.scripted_environment import request
from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.models.loading.checkpoint import read_entries
from unirl.models.loading.lora import inject_lora
from unirl.models.openvla import family as openvla
from unirl.models.openvla.actions import bin_centres
from unirl.models.openvla.family import OpenVLABundle
from unirl.models.openvla.network import OpenVLAPolicy
from unirl.models.openvla.vision_towers import VisionTower
from unirl.models.policies.stage import InstructedStage
from unirl.types.environments import INSTRUCTION, Observations
from unirl.types.facts import LoraSpec
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import ActionSegment

PUBLISHED = read_entries(Path(openvla.__file__).parent / "published.json")["openvla/openvla-7b"]
SETTINGS: dict[str, Any] = {
    "dtype": "fp32",
    "observations": {"pixels": (3, 24, 24)},
    "prompt_tokens": 96,
    "unnorm_key": "toy",
}
KINDS = [("autoregressive", 1), ("parallel", 2)]
each_kind = pytest.mark.parametrize(("decoding", "chunk"), KINDS)
TASKS = ["reach the red disc", "go", "reach the blue disc", "Stay"]


def bundle(decoding: str = "autoregressive", chunk: int = 1, path: str = "toy", **settings: Any) -> OpenVLABundle:
    return OpenVLABundle(path=path, decoding=decoding, chunk=chunk, **SETTINGS | settings)


def inputs(stage: InstructedStage, count: int = 4) -> tuple[Observations, Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (count, 3, 24, 24), generator=generator, dtype=torch.uint8)
    told = stage.instructions((TASKS * count)[:count])
    return {"pixels": images, **told}, torch.rand(count, stage.policy.noise_shape[0], generator=generator)


# The network


def split_qkv(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors by other names, where `qkv` becomes three tensors."""
    result = {}
    for name, tensor in tensors.items():
        for part, other in names.items():
            name = name.replace(part, other)
        if "{qkv}" in name:
            result |= {name.replace("{qkv}", which): t for which, t in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            result[name] = tensor
    return result


def randomised(tower: VisionTower) -> VisionTower:
    with torch.no_grad():
        for number, parameter in enumerate(tower.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.3)
    return tower


def test_the_first_tower_is_dinov2_with_registers() -> None:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    tower = randomised(VisionTower(openvla.TOWERS["toy_patch14_reg4_dinov2"], 42))
    sizes = tower.sizes
    config = Dinov2WithRegistersConfig(
        hidden_size=sizes.width, num_hidden_layers=sizes.depth - 1, num_attention_heads=sizes.heads,
        mlp_ratio=sizes.hidden // sizes.width, image_size=42, patch_size=14, num_register_tokens=sizes.registers,
    )  # fmt: skip
    theirs = Dinov2WithRegistersModel(config).eval()
    ours = dict(tower.state_dict())
    embedding = {
        # timm adds no position to the class token.
        "embeddings.cls_token": ours.pop("cls_token"),
        "embeddings.position_embeddings": torch.cat([torch.zeros(1, 1, sizes.width), ours.pop("pos_embed")], dim=1),
        "embeddings.register_tokens": ours.pop("reg_token"),
        "embeddings.mask_token": torch.zeros(1, sizes.width),
    }
    names = {
        "patch_embed.proj": "embeddings.patch_embeddings.projection", "attn.qkv": "attention.{qkv}_proj",
        "attn.proj": "attention.o_proj", "ls1.scale_factor": "layer_scale1.lambda1",
        "ls2.scale_factor": "layer_scale2.lambda1",
    }  # fmt: skip
    state = split_qkv(ours, names) | embedding
    prefix = next(name for name in theirs.state_dict() if "norm1.weight" in name).partition("0.norm1")[0]
    state = {name.replace("blocks.", prefix): tensor for name, tensor in state.items()}
    missing = theirs.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) == {"layernorm.weight", "layernorm.bias"}
    theirs.layernorm = torch.nn.Identity()
    images = torch.randint(256, (2, 3, 42, 42), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with torch.no_grad():
        expected = theirs(pixel_values=tower.prepared(images)).last_hidden_state[:, 1 + sizes.registers :]
        torch.testing.assert_close(tower(images), expected, atol=1e-4, rtol=1e-4)


def test_the_second_tower_is_siglip() -> None:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    tower = randomised(VisionTower(openvla.TOWERS["toy_patch14_siglip"], 42))
    sizes = tower.sizes
    config = SiglipVisionConfig(
        hidden_size=sizes.width, num_hidden_layers=sizes.depth - 1, num_attention_heads=sizes.heads,
        intermediate_size=sizes.hidden, image_size=42, patch_size=14, hidden_act="gelu", vision_use_head=False,
    )  # fmt: skip
    theirs = SiglipVisionModel(config).eval()
    names = {
        "patch_embed.proj": "embeddings.patch_embedding", "pos_embed": "embeddings.position_embedding.weight",
        "norm1": "layer_norm1", "norm2": "layer_norm2", "attn.qkv": "self_attn.{qkv}_proj",
        "attn.proj": "self_attn.out_proj", "blocks": "encoder.layers",
    }  # fmt: skip
    state = split_qkv(tower.state_dict(), names)
    state["embeddings.position_embedding.weight"] = state["embeddings.position_embedding.weight"][0]
    prefix = next(name for name in theirs.state_dict() if name.endswith("patch_embedding.weight"))
    prefix = prefix.removesuffix("embeddings.patch_embedding.weight")
    missing = theirs.load_state_dict({prefix + name: tensor for name, tensor in state.items()}, strict=False)
    assert not missing.unexpected_keys
    assert {name.split(".")[-2] for name in missing.missing_keys} == {"post_layernorm"}
    images = torch.randint(256, (2, 3, 42, 42), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with torch.no_grad():
        expected = theirs(pixel_values=tower.prepared(images), output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(tower(images), expected, atol=1e-4, rtol=1e-4)


def test_images_are_resized_as_pil_does_it() -> None:
    from PIL import Image

    tower = VisionTower(openvla.TOWERS["toy_patch14_siglip"], 42)
    image = torch.randint(256, (3, 30, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    pil = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((42, 42), Image.Resampling.BICUBIC)
    ours = (tower.prepared(image[None])[0] * 0.5 + 0.5) * 255
    assert (ours - torch.from_numpy(np.asarray(pil).copy()).permute(2, 0, 1)).abs().max() <= 1.001


def plain_logits(policy: OpenVLAPolicy, seen: Observations, row: int, actions: Tensor) -> Tensor:
    """[K, 256] log-probs of one row by Llama on the sequence without empty places, in the order of the tokens."""
    words = seen[INSTRUCTION][row]
    tokens = words[words >= 0]
    embed = policy.language_model.get_input_embeddings()
    patches = policy.projector(policy.vision_backbone(seen["pixels"][row : row + 1]))[0]
    sequence = [embed(tokens[:1]), patches, embed(tokens[1:])]
    length = len(tokens) + len(patches)
    if policy.decoding == "parallel":
        sequence += [torch.zeros(policy.num_tokens, patches.shape[1]), embed(torch.tensor([2]))]
        total = length + policy.num_tokens + 1
        mask: Tensor | None = torch.ones(1, 1, total, total, dtype=torch.bool)
    else:
        sequence += [embed(384 - 1 - actions[row])]  # 384 tokens without those that pad the vocabulary
        mask = None
    logits = policy.language_model(inputs_embeds=torch.cat(sequence)[None], attention_mask=mask).logits[0]
    return logits[length - 1 :][: policy.num_tokens, 384 - 256 : 384]


@each_kind
@torch.no_grad()
def test_log_probs_are_those_of_llama_on_each_sequence_alone(decoding: str, chunk: int) -> None:
    stage = bundle(decoding, chunk, temperature=1.7).stage()
    seen, noise = inputs(stage)
    decided = stage.decide(seen, noise)
    bins = decided["actions"]
    for row in range(4):
        logp = (plain_logits(stage.policy, seen, row, bins) / 1.7).log_softmax(-1)  # type: ignore[arg-type]
        of_tokens = logp[range(7 * chunk), 255 - bins[row]]
        torch.testing.assert_close(decided["logp"][row], of_tokens.sum(), atol=1e-4, rtol=1e-5)
        # Each token is where the distribution function passes its noise, in the order of the bins.
        below = logp.exp().flip(-1).cumsum(-1)
        for token in range(7 * chunk):
            b = int(bins[row, token])
            assert below[token, b] >= noise[row, token] - 1e-5
            assert b == 0 or below[token, b - 1] <= noise[row, token] + 1e-5


@torch.no_grad()
def test_the_likeliest_actions_are_those_of_the_librarys_generate() -> None:
    from transformers import LogitsProcessor, LogitsProcessorList

    class ActionsAlone(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return torch.full_like(scores, -math.inf).index_copy(1, torch.arange(128, 384), scores[:, 128:384])

    stage = bundle().stage()
    policy = stage.policy
    assert isinstance(policy, OpenVLAPolicy)
    seen, noise = inputs(stage)
    decided = stage.decide(seen, noise, deterministic=True)["actions"]
    for row in range(4):
        words = seen[INSTRUCTION][row]
        embed = policy.language_model.get_input_embeddings()
        patches = policy.projector(policy.vision_backbone(seen["pixels"][row : row + 1]))[0]
        prompt = torch.cat([embed(words[:1]), patches, embed(words[1:][words[1:] >= 0])])[None]
        tokens = policy.language_model.generate(
            inputs_embeds=prompt, attention_mask=torch.ones(prompt.shape[:2]), do_sample=False, max_new_tokens=7,
            logits_processor=LogitsProcessorList([ActionsAlone()]),
        )  # fmt: skip
        assert (384 - 1 - tokens[0]).tolist() == decided[row].tolist()


@each_kind
def test_a_replay_has_the_bits_of_the_rollout_and_rows_are_independent(decoding: str, chunk: int) -> None:
    stage = bundle(decoding, chunk).stage()
    seen, noise = inputs(stage, 9)
    decided = stage.decide(seen, noise)
    again = stage._forward(seen, actions=decided["actions"])
    assert torch.equal(again["logp"], decided["logp"]) and again["logp"].requires_grad
    few = stage.decide({key: value[:2] for key, value in seen.items()}, noise[:2])
    assert torch.equal(few["logp"], decided["logp"][:2]) and torch.equal(few["actions"], decided["actions"][:2])


@each_kind
def test_the_entropy_is_the_expected_surprise(decoding: str, chunk: int) -> None:
    """Over 4,000 draws for one observation: the mean of -log p is the entropy, within 4 standard errors."""
    stage = bundle(decoding, chunk).stage()
    seen, _ = inputs(stage, 1)
    many = {key: value.expand(400, *value.shape[1:]) for key, value in seen.items()}
    noise = torch.rand(400, 7 * chunk, generator=torch.Generator().manual_seed(5))
    decided = stage.decide(many, noise)
    with torch.no_grad():
        entropies = stage._forward(many, actions=decided["actions"], entropy=True)["entropy"]
    surprise = -decided["logp"]
    assert abs(surprise.mean() - entropies.mean()) < 4 * (surprise - entropies).std() / 400**0.5


# Actions


def test_tokens_are_the_published_ones() -> None:
    """Kim et al.: token = V - digitize(a) for 256 edges. Decoding gives the centre of the bin of a."""
    edges = np.linspace(-1, 1, 256)
    numbers = np.random.default_rng(0).uniform(-1, 1, 1000)
    tokens = 32000 - np.digitize(numbers, edges)
    bins = torch.from_numpy(32000 - 1 - tokens)
    assert bins.min() >= 0 and bins.max() <= 255
    assert np.abs(bin_centres(256)[bins].numpy() - numbers).max() <= (edges[1] - edges[0]) / 2 + 1e-6
    assert bin_centres(256)[255] == bin_centres(256)[254]


def test_executed_actions_are_scaled_by_percentiles_but_for_the_masked_ones() -> None:
    policy = bundle("parallel", 2, unnorm_key=None).stage().policy
    bins = torch.arange(14)[None] * 18
    numbers = policy.executed(bins)
    assert numbers.shape == (1, 2, 7) and torch.equal(numbers.flatten(), bin_centres(256)[bins[0]])
    statistics = {"q01": [-0.5] * 6 + [0.0], "q99": [1.5] * 6 + [1.0], "mask": [True] * 6 + [False]}
    scale = openvla.scale_of({"data": {"action": statistics}}, "data", "here")
    scaled = scale.apply(numbers)
    assert torch.equal(scaled[..., 6], numbers[..., 6])
    torch.testing.assert_close(scaled[..., :6], numbers[..., :6] + 0.5)  # (a + 1) / 2 * 2 - 0.5


# Files


def test_the_published_checkpoint_has_as_many_parameters_as_its_index_says() -> None:
    """model.safetensors.index.json of openvla/openvla-7b: total_size 15082474368 bytes, in bf16."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        policy = OpenVLAPolicy(
            PUBLISHED, cameras=("pixels",), actions=7, chunk=1, decoding="parallel", temperature=1.0, scale=None
        )
    count = sum(parameter.numel() for parameter in policy.parameters())
    towers = (policy.vision_backbone.featurizer, policy.vision_backbone.fused_featurizer)
    last_blocks = sum(parameter.numel() for tower in towers for parameter in tower.blocks[0].parameters())
    norms = sum(2 * tower.sizes.width for tower in towers)
    d, h = 1152, 4304  # the pooling of SigLIP: a query, attention to it, a norm and an MLP
    pooling = d + 4 * (d * d + d) + 2 * d + (d * h + h) + (h * d + d)
    assert count + last_blocks + norms + pooling == 15082474368 // 2


def test_sizes_are_known_without_the_weights(repository: Path) -> None:
    real, one = bundle(), bundle("parallel", 3)
    for path in ("toy", str(repository)):
        estimate = OpenVLABundle.estimate(path)
        assert estimate.parameters == {"policy": sum(p.numel() for p in real.trainable().parameters())}
        assert (estimate.num_blocks, estimate.width) == (2 + 2 + 2, 32)
        assert len(estimate.adapted_layers()) == 2 * 7
    assert OpenVLABundle.estimate("openvla/openvla-7b").num_blocks == 23 + 26 + 32
    seen, noise = inputs(one.stage())
    prompt, _ = one.stage().policy._prompt(seen)  # type: ignore[operator]
    assert one.facts.tokens_per_decision == prompt.shape[1] + noise.shape[1]


def published_repository(folder: Path) -> Path:
    """The toy as its publisher would have written it: bf16, two files, further tensors, statistics beside."""
    source = bundle()
    source.write(folder, {})
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for tower, name in (("featurizer", "norm.weight"), ("fused_featurizer", "attn_pool.latent")):
        state[f"vision_backbone.{tower}.{name}"] = torch.ones(4)
    names, weight_map = sorted(state), {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: state[name].bfloat16().contiguous() for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["torch_dtype"] = "bfloat16"
    config |= {
        "architectures": ["OpenVLAForActionPrediction"],
        "auto_map": {"AutoModelForVision2Seq": "modeling_prismatic.OpenVLAForActionPrediction"},
        "hf_llm_id": "meta-llama/Llama-2-7b-hf", "pad_token_id": 384, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    one = {"action": {"q01": [0.0] * 7, "q99": [0.5] * 7}}
    (folder / "dataset_statistics.json").write_text(json.dumps({"libero_spatial_no_noops": one}))
    (folder / "modeling_prismatic.py").write_text("raise RuntimeError('code of a checkpoint must not run')\n")
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_repository(tmp_path_factory.mktemp("openvla"))


def test_a_published_folder_is_read_and_written_in_its_own_layout(repository: Path, tmp_path: Path) -> None:
    read = bundle(path=str(repository), unnorm_key="libero_spatial_no_noops")
    expected = {name: tensor.bfloat16().float() for name, tensor in bundle().trainable().state_dict().items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.trainable().state_dict().items())
    assert read.stage().policy.executed(torch.zeros(1, 7, dtype=torch.int64)).unique().numel() == 1

    changed = {name: tensor + 1 for name, tensor in read.trainable().named_parameters() if name.endswith("fc3.bias")}
    folder = read.write(tmp_path / "export", changed)
    written, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    index = json.loads((repository / "model.safetensors.index.json").read_text())
    assert set(written) == set(index["weight_map"])
    assert config == json.loads((repository / "config.json").read_text())
    for name in ("dataset_statistics.json", "tokenizer.json", "modeling_prismatic.py"):
        assert (folder / name).read_bytes() == (repository / name).read_bytes()
    again = read.reopened(folder)
    seen, noise = inputs(again.stage())
    ours, theirs = read.stage().decide(seen, noise), again.stage().decide(seen, noise)
    assert not torch.equal(ours["logp"], theirs["logp"])
    read.trainable().load_state_dict(changed, strict=False)
    assert torch.equal(read.stage().decide(seen, noise)["logp"], theirs["logp"])


def test_a_network_without_storage_is_filled_from_the_files(repository: Path) -> None:
    from unirl.train.backend.base import OptimizerConfig
    from unirl.train.backend.fsdp import FSDPBackend

    networks = []
    for meta_init in (True, False):
        one = bundle(path=str(repository), unnorm_key=None, meta_init=meta_init, dtype="bf16")
        networks.append(FSDPBackend(one, optimizer_cfg=OptimizerConfig(learning_rate=1e-3)).module.state_dict())
    assert networks[0].keys() == networks[1].keys()
    assert all(torch.equal(tensor, networks[1][name]) for name, tensor in networks[0].items())


def test_adapters_reach_every_layer_of_the_language_model() -> None:
    one = bundle("parallel", 2)
    network = one.trainable()
    inject_lora(network, LoraSpec(2, 4.0, one.facts.lora_targets), 0, None)
    adapted = {name.partition(".lora_A")[0] for name, _ in network.named_parameters() if ".lora_A." in name}
    assert len(adapted) == 2 * 7 and all(name.startswith("language_model.model.layers.") for name in adapted)
    seen, noise = inputs(one.stage())
    stage = one.stage()
    logp = stage._forward(seen, actions=stage.decide(seen, noise)["actions"])["logp"]
    logp.sum().backward()
    gradients = {name for name, p in network.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {name.partition(".lora_B")[0] for name in gradients if ".lora_B." in name} == adapted


def damaged(repository: Path, folder: Path, **config: Any) -> str:
    folder.mkdir()
    for path in repository.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "llava"}, "has model_type='llava', but OpenVLABundle reads 'openvla'"),
        ({"image_sizes": None}, "its config.json has no image_sizes"),
        ({"timm_model_ids": ["vit_b", "vit_c"]}, "knows two towers of vit_large_patch14_reg4_dinov2.lvd142m"),
        ({"image_resize_strategy": "letterbox"}, "only 'resize-naive' is available"),
    ],
)
def test_a_folder_of_another_model_is_refused_by_name(
    repository: Path, tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    with pytest.raises(NotFoundError) as caught:
        bundle(path=damaged(repository, tmp_path / "other", **config), unnorm_key=None)
    assert why in str(caught.value)


def test_missing_tensors_are_named(repository: Path, tmp_path: Path) -> None:
    folder = Path(damaged(repository, tmp_path / "other"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"]["projector.fc1.weight"]
    state = load_file(file)
    del state["projector.fc1.weight"]
    save_file(state, file, {"format": "pt"})
    del index["weight_map"]["projector.fc1.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(NotFoundError, match=r"projector\.fc1\.weight"):
        bundle(path=str(folder), unnorm_key=None)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"unnorm_key": "toi"}, r"unnorm_key=toi: toy has statistics of toy\. Did you mean 'toy'"),
        ({"actions": 4}, r"bundle\.actions=4: the statistics of toy have 7 numbers\. Set bundle\.actions=7"),
        ({"observations": {"state": (39,)}}, r"bundle\.observations\.state=\[39\]: OpenVLA reads images"),
        ({"observations": {"pixels": (6, 24, 24)}}, "leave out frame_stack"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidValueError, match=why):
        bundle(**settings)


def test_an_instruction_that_does_not_fit_is_named_with_its_length() -> None:
    with pytest.raises(InvalidValueError, match=r"prompt_tokens=50: the prompt of the task 'reach' has 55 tokens"):
        bundle(prompt_tokens=50).stage().instructions(["reach"])


# In its pipeline


def test_a_policy_with_adapters_acts_and_is_exported_as_the_whole_model(tmp_path: Path) -> None:
    """The weights with adapters folded in, read again from the written folder, act as the live policy does."""
    from unirl.envs.maniskill import ManiSkillImageEnvironment
    from unirl.models.policies.pipeline import PolicyPipeline
    from unirl.train.backend.base import OptimizerConfig
    from unirl.train.backend.fsdp import FSDPBackend
    from unirl.train.configs import LoraConfig
    from unirl.trainer.export import Exporter

    env = ManiSkillImageEnvironment(id="toy", image_size=(24, 24))
    policy = PolicyPipeline(bundle("parallel", 2, observations={"base_camera": (3, 24, 24)}), env=env)
    lora = LoraConfig(rank=2)
    backend = FSDPBackend(policy.bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-3), lora_cfg=lora)
    req = request(4, max_steps=3, tasks=["reach the red disc", "reach the blue disc"] * 2)
    track = policy.generate(req, 4).tracks["action"]
    segment = track.sampled_as(ActionSegment).segment
    images, told = segment.observations["base_camera"], segment.observations[INSTRUCTION]
    assert images.dtype == torch.uint8 and images.shape[1:] == (3, 24, 24)
    assert torch.equal(told[segment.offsets[:-1]], policy.stage.instructions(req.prompts())[INSTRUCTION])
    replayed = policy.stage.replay({}, segment)
    assert torch.equal(replayed.logp[segment.loss_mask], segment.logp[segment.loss_mask])

    with torch.no_grad():
        for name, parameter in backend.module.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.3)
    exporter = Exporter(pipeline=policy, backend=backend, lora=lora)
    assert exporter.usual_formats == ("full",)
    folder = exporter.write(tmp_path / "full", "full")
    difference = exporter.verify(folder, "full", (), ActionSamplingParams())
    assert difference is not None and difference < 1e-3
    original = policy.bundle.untrained().get_parameter("language_model.model.layers.0.self_attn.q_proj.weight")
    written = load_file(folder / "model.safetensors")["language_model.model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(original, written)


def test_the_value_head_reads_the_policys_state_and_trains_alone() -> None:
    stage = bundle("parallel", 2).stage()
    stage.value_head = stage.build_value_head(8, 0)
    seen, noise = inputs(stage)
    decided = stage.decide(seen, noise)
    with torch.no_grad():
        stage.value_head.get_parameter("output_layer.weight").normal_()
    for gradient, reaches in (("head", False), ("policy", True)):
        hidden = stage._forward(seen, actions=decided["actions"])
        values = stage._values(stage.value_head, seen, hidden, gradient)  # type: ignore[arg-type]
        assert values.shape == (4,) and values.unique().numel() > 1
        stage.network.zero_grad(set_to_none=True)
        stage.value_head.zero_grad(set_to_none=True)
        values.sum().backward()
        moved = any(p.grad is not None for p in stage.network.parameters())
        assert moved == reaches and all(p.grad is not None for p in stage.value_head.parameters())
