"""HunyuanImage-3 computes the published equations, for images and for text, and joins both in one tree of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, gelu, group_norm, linear, silu
from torch.utils.flop_counter import FlopCounterMode

from unirl.config.errors import DataError
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.stage import DiffusionStage
from unirl.models.hunyuan_image3.checkpoint import FIRST_VERSION
from unirl.models.hunyuan_image3.family import HunyuanImage3Bundle, HunyuanImage3Pipeline
from unirl.models.hunyuan_image3.network import Config, HunyuanImage3Network, MoE
from unirl.models.hunyuan_image3.prompts import sizes_of
from unirl.models.language.packing import prompt_tokens
from unirl.models.language.pipeline import transformers_logp
from unirl.models.language.stage import ARStage
from unirl.models.loading.estimate import Lengths, forward_flops
from unirl.models.loading.lora import inject_lora
from unirl.sde.kernels import EulerODE, FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.bundle import check_bundle, rollout_of
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.facts import LoraSpec
from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq, TrackSpec, child_ids
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams
from unirl.types.segments import LatentSegment, TextSegment

INSTRUCT, BASE = "tencent/HunyuanImage-3.0-Instruct", "tencent/HunyuanImage-3.0"
TEXTS = ("two", "a blue square on the left", "a red circle on a long grey road or so", "")
"""Several padded lengths, in an order that is not that of the lengths."""
PARAMS = DiffusionSamplingParams(
    kernel=FlowSDEStrategy(), num_inference_steps=3, height=32, width=48, max_sequence_length=64
)
GUIDED = DiffusionSamplingParams(kernel=EulerODE(), guidance_scale=4.0, max_sequence_length=64)
WRITING = ARSamplingParams(max_new_tokens=6, temperature=0.8)


@pytest.fixture(scope="module")
def toy() -> HunyuanImage3Pipeline:
    return HunyuanImage3Pipeline(HunyuanImage3Bundle(path="toy", dtype="fp32"))


@pytest.fixture(scope="module")
def noised() -> HunyuanImage3Pipeline:
    """A toy with noise on every parameter, since its norms are 1 and its blocks nearly pass their input."""
    return with_noise(HunyuanImage3Pipeline(HunyuanImage3Bundle(path="toy", dtype="fp32")))


def with_noise(pipeline: HunyuanImage3Pipeline) -> HunyuanImage3Pipeline:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in pipeline.bundle.trainable().parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return pipeline


def latents(pipeline: HunyuanImage3Pipeline, count: int = len(TEXTS), name: str = "x") -> Tensor:
    ids = [f"r{i}" for i in range(count)]
    return NoiseSource(0, "r", 0).normal(ids, name, pipeline.facts.latent_shape(PARAMS))


# --- the published equations, row by row, in float64 ------------------------------------------------------------------


def positions_of(length: int, start: int, rows: int, columns: int) -> list[tuple[int, int]]:
    """(row, column) of each of `length` tokens, of which those from `start` on are an image. The published loop."""
    y = list(range(start))
    x = list(range(start))
    first_y, first_x = start + (columns * rows - rows) / 2, start + (columns * rows - columns) / 2
    for i in range(rows):
        for j in range(columns):
            y.append(int(first_y + i))
            x.append(int(first_x + j))
    last = start + columns * rows
    return list(zip(y + list(range(last, length)), x + list(range(last, length)), strict=True))


class Published:
    """The published forward of one row: the whole sequence with the tokens after the image, and an explicit mask."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Config) -> None:
        self.tensors = {name: tensor.detach().double() for name, tensor in tensors.items()}
        self.config = config

    def of(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def turned(self, x: Tensor, positions: Sequence[tuple[int, int]]) -> Tensor:
        """Rotary embedding of one head [L, d]: pairs are (i, i + d / 2), with the row for even i, else the column."""
        half, result = x.shape[1] // 2, torch.empty_like(x)
        for token, place in enumerate(positions):
            for i in range(half):
                angle = place[i % 2] * self.config["rope_theta"] ** (-2 * i / x.shape[1])
                a, b = x[token, i], x[token, i + half]
                result[token, i] = a * math.cos(angle) - b * math.sin(angle)
                result[token, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return result

    def attention(self, name: str, x: Tensor, positions: Sequence[tuple[int, int]], mask: Tensor) -> Tensor:
        keys, width = self.config["num_key_value_heads"], self.config["attention_head_dim"]
        groups = self.config["num_attention_heads"] // keys
        heads = []
        for key_head, block in enumerate(self.of(f"{name}.qkv_proj", x).chunk(keys, dim=1)):
            *queries, key, value = block.split(width, dim=1)
            key = self.norm(f"{name}.key_layernorm", self.turned(key, positions))
            for query in queries:
                query = self.norm(f"{name}.query_layernorm", self.turned(query, positions))
                scores = (query @ key.T / math.sqrt(width)).masked_fill(~mask, -math.inf)
                heads.append(scores.softmax(-1) @ value)
            assert len(heads) == (key_head + 1) * groups
        return self.of(f"{name}.o_proj", torch.cat(heads, 1))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        up, gate = self.of(f"{name}.gate_and_up_proj", x).chunk(2, dim=-1)
        return self.of(f"{name}.down_proj", up * silu(gate))

    def experts(self, name: str, x: Tensor, top_k: int) -> Tensor:
        """Every expert on every token, with weights that are zero for those that are not among the best."""
        gates = self.of(f"{name}.gate.wg", x).softmax(1)
        outputs = torch.zeros_like(x)
        for token, row in enumerate(gates.tolist()):
            best = sorted(range(len(row)), key=lambda expert: -row[expert])[:top_k]
            total = sum(row[expert] for expert in best)
            for expert in range(len(row)):
                weight = row[expert] / total if expert in best else 0.0
                outputs[token] += weight * self.mlp(f"{name}.experts.{expert}", x[token])
        return outputs + self.mlp(f"{name}.shared_mlp", x)

    def layers(self, x: Tensor, positions: Sequence[tuple[int, int]], mask: Tensor) -> Tensor:
        for i in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{i}"
            x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x), positions, mask)
            h = self.norm(f"{name}.post_attention_layernorm", x)
            is_dense = i < self.config["moe_layer_num_skipped"]
            top_k = self.config["moe_topk"][i]
            x = x + (self.mlp(f"{name}.mlp", h) if is_dense else self.experts(f"{name}.mlp", h, top_k))
        return x

    def time(self, name: str, timestep: float) -> Tensor:
        angles = [timestep * 10000.0 ** (-i / 128) for i in range(128)]
        waves = torch.tensor([*map(math.cos, angles), *map(math.sin, angles)], dtype=torch.float64)
        return self.of(f"{name}.mlp.2", gelu(self.of(f"{name}.mlp.0", waves)))

    def conv(self, name: str, x: Tensor, padding: int = 1) -> Tensor:
        return conv2d(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], padding=padding)

    def group_norm(self, name: str, x: Tensor) -> Tensor:
        return group_norm(x, 32, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def block(self, name: str, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv(f"{name}.in_layers.2", silu(self.group_norm(f"{name}.in_layers.0", x)))
        scale, shift = self.of(f"{name}.emb_layers.1", silu(time)).chunk(2)
        h = self.group_norm(f"{name}.out_layers.0", h) * (1 + scale[:, None, None]) + shift[:, None, None]
        h = self.conv(f"{name}.out_layers.3", silu(h))
        has_skip = f"{name}.skip_connection.weight" in self.tensors
        return h + (self.conv(f"{name}.skip_connection", x, padding=0) if has_skip else x)

    def velocity(self, x: Tensor, sigma: float, sequence: list[int], after: list[int]) -> Tensor:
        """[C, H, W] from x [C, H, W]. The last token of `sequence` is <timestep>; `after` are those after the image."""
        rows, columns, embed = *x.shape[1:], self.tensors["model.wte.weight"]
        patches = self.conv("patch_embed.model.0", x.double()[None])
        patches = self.block("patch_embed.model.1", patches, self.time("time_embed", 1000 * sigma))
        image = torch.stack([patches[0, :, i, j] for i in range(rows) for j in range(columns)])
        time = self.time("timestep_emb", 1000 * sigma)[None]
        states = torch.cat([embed[sequence[:-1]], time, image, embed[after]])
        start, end = len(sequence), len(sequence) + rows * columns
        mask = torch.ones(len(states), len(states), dtype=torch.bool).tril()
        mask[start:end, start:end] = True
        states = self.layers(states, positions_of(len(states), start, rows, columns), mask)[start:end]
        grid = states.T.reshape(1, -1, rows, columns)
        h = self.block("final_layer.model.0", grid, self.time("time_embed_2", 1000 * sigma))
        return self.conv("final_layer.model.1.2", silu(self.group_norm("final_layer.model.1.0", h)))[0]

    def logits(self, tokens: list[int]) -> Tensor:
        """[L, V] of the token after each of `tokens`."""
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        places = [(i, i) for i in range(len(tokens))]
        states = self.layers(self.tensors["model.wte.weight"][tokens], places, mask)
        return self.of("lm_head", self.norm("model.ln_f", states))


def published(pipeline: HunyuanImage3Pipeline) -> Published:
    return Published(pipeline.bundle.trainable().state_dict(), pipeline.bundle.configs.components["transformer"])


def rows_of(prompts: Any) -> list[list[int]]:
    assert isinstance(prompts, PromptTokens)
    return [row.tolist() for row in prompts.tokens.split(prompts.lengths.tolist())]


def written_after(prompts: Sequence[Sequence[int]]) -> Conditions:
    return {"prompt": prompt_tokens(prompts)}


@pytest.mark.parametrize("condition", ["text", "negative_text"])
def test_the_velocity_is_that_of_the_published_equations(noised: HunyuanImage3Pipeline, condition: str) -> None:
    x, sigma = latents(noised), torch.tensor([1.0, 0.7, 0.31, 0.05])
    prompts = noised.encode(TEXTS, GUIDED)[condition]
    v = noised.stage.velocity(x, sigma, {"text": prompts}, noised.facts.guidance).detach()
    equations, codec = published(noised), noised.bundle.codec
    header = codec.encode("<boi><img_size_1024><img_ratio_13><timestep>")  # of 832 x 1216
    after = codec.encode("<eoi></answer>\n\n")
    for row, prompt in enumerate(rows_of(prompts)):
        expected = equations.velocity(x[row], float(sigma[row]), [*prompt, *header], after)
        assert float((v[row] - expected).abs().max()) < 1e-5 * float(expected.abs().max()), row


def test_log_probs_of_text_are_those_of_the_published_equations_and_of_sampling(noised: HunyuanImage3Pipeline) -> None:
    stage = noised.bundle.stage_of("think")
    assert isinstance(stage, ARStage)
    conditions = written_after([noised.writing_prompt("think", text, {}) for text in TEXTS])
    ids, noise = [f"r{i}" for i in range(4)], NoiseSource(0, "r", 0)
    segment = stage.sample(conditions, WRITING, noise, ids, slots=4)
    for slots in (1, 3):
        again = stage.sample(conditions, WRITING, noise, ids, slots=slots)
        assert torch.equal(again.tokens, segment.tokens) and torch.equal(again.logp, segment.logp)
    with torch.no_grad():
        assert torch.equal(stage.replay(conditions, segment).logp, segment.logp)
    equations, expected = published(noised), []
    rows = segment.tokens.split(segment.lengths.tolist())
    for prompt, response in zip(rows_of(conditions["prompt"]), rows, strict=True):
        logits = equations.logits([*prompt, *response.tolist()])[len(prompt) - 1 : -1] / WRITING.temperature
        expected.append(logits.log_softmax(1).gather(1, response[:, None])[:, 0])
    assert float((segment.logp - torch.cat(expected)).abs().max()) < 1e-5
    assert segment.lengths.max() > 1 and float(segment.logp.std()) > 0.1


def test_text_is_that_of_the_mixture_of_experts_of_transformers(toy: HunyuanImage3Pipeline) -> None:
    from transformers import HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM

    same = {"moe_layer_num_skipped": 0, "moe_topk": 2, "num_shared_expert": 1, "moe_intermediate_size": 24}
    config = {**toy.bundle.configs.components["transformer"], **same}
    torch.manual_seed(3)
    network = HunyuanImage3Network(config).eval()
    theirs = HunYuanMoEV1ForCausalLM(
        HunYuanMoEV1Config(
            **{name: config[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "moe_topk")},
            **{name: config[name] for name in ("num_attention_heads", "num_key_value_heads", "num_experts")},
            intermediate_size=24,
            head_dim=8,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ).eval()
    theirs.load_state_dict(of_transformers(network.state_dict()))
    assert toy.facts.text is not None
    stage = ARStage(network, toy.facts.text, toy.bundle.codec)
    conditions = written_after([toy.bundle.codec.encode(text + ".") for text in TEXTS])
    segment = stage.sample(conditions, WRITING, NoiseSource(0, "r", 0), list("abcd"), slots=4)
    with torch.no_grad():
        expected = transformers_logp(theirs, conditions, segment)
    assert float((segment.logp - expected).abs().max()) < 1e-5


def of_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of text by the names of transformers, which splits queries, keys, values, gates and ups."""
    result: dict[str, Any] = {}
    for name, tensor in tensors.items():
        name = name.replace("model.wte", "model.embed_tokens").replace("model.ln_f", "model.norm")
        if name.endswith("qkv_proj.weight"):
            heads = tensor.unflatten(
                0, (2, 4, 8)
            )  # two heads of keys, each with two of queries, one of keys, of values
            for letter, part in zip("qkv", heads.split([2, 1, 1], dim=1), strict=True):
                result[name.replace("qkv_proj", f"{letter}_proj")] = part.flatten(0, 2)
        elif "shared_mlp.gate_and_up" in name:
            up, gate = tensor.chunk(2)
            result[name.replace("gate_and_up", "gate")], result[name.replace("gate_and_up", "up")] = gate, up
        elif ".experts." in name:
            kind = "gate_up_proj" if "gate_and_up" in name else "down_proj"
            own = torch.cat(tensor.chunk(2)[::-1]) if kind == "gate_up_proj" else tensor
            result.setdefault(f"{name.partition('.experts.')[0]}.experts.{kind}", []).append(own)
        elif name.startswith(("model.", "lm_head.")):
            result[name] = tensor
    return {name: torch.stack(value) if isinstance(value, list) else value for name, value in result.items()}


@pytest.mark.parametrize("wide", [False, True], ids=["weights_in_bf16", "autocast"])
def test_the_velocity_in_bf16_is_that_of_float32_up_to_rounding(toy: HunyuanImage3Pipeline, wide: bool) -> None:
    """Full training has float32 weights and computes by autocast; adapters have a base in bf16."""
    x, sigma = latents(toy), torch.tensor([1.0, 0.7, 0.31, 0.05])
    conditions, guidance = toy.encode(TEXTS, PARAMS), toy.facts.guidance
    network = deepcopy(toy.bundle.trainable()) if wide else deepcopy(toy.bundle.trainable()).bfloat16()
    denoiser = toy.bundle.with_network(network).denoiser()
    with torch.no_grad():
        expected = toy.stage.velocity(x, sigma, conditions, guidance)
        stage = DiffusionStage(denoiser, toy.facts, torch.bfloat16)
        stage.needs_autocast = lambda: wide
        v = stage.velocity(x, sigma, conditions, guidance)
    assert v.dtype == torch.float32 and not torch.equal(v, expected)
    assert float((v - expected).norm() / expected.norm()) < 0.03


def test_the_toy_passes_check_bundle(toy: HunyuanImage3Pipeline) -> None:
    check_bundle(toy, 32, 48, 4.0)


def test_text_does_not_depend_on_the_image(noised: HunyuanImage3Pipeline) -> None:
    seen: list[Tensor] = []
    layers = list(noised.bundle.trainable().get_submodule("model.layers").children())
    conditions = noised.encode(TEXTS, PARAMS)
    with layers[-1].register_forward_hook(lambda module, inputs, output: seen.append(output)):
        for name, sigma in (("x", 0.5), ("y", 0.2)):
            x = latents(noised, name=name)
            noised.stage.velocity(x, torch.full((4,), sigma), conditions, noised.facts.guidance)
    lengths = [len(row) + 4 for row in rows_of(conditions["text"])]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    first, second = seen
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert torch.equal(first[start : end - 1], second[start : end - 1])
        assert not torch.equal(first[end - 1], second[end - 1])  # <timestep>


def test_the_schedule_and_the_timesteps_are_the_published_ones(toy: HunyuanImage3Pipeline) -> None:
    ends = torch.linspace(1, 0, 17)
    expected = 3.0 * ends / (1 + (3.0 - 1) * ends)
    assert torch.allclose(toy.facts.schedule.sigmas(16, 4096), expected, atol=1e-6)
    assert toy.facts.timestep_scale == 1000.0


# --- prompts ----------------------------------------------------------------------------------------------------------


def spelt(pipeline: HunyuanImage3Pipeline, tokens: Sequence[int]) -> str:
    return pipeline.bundle.codec.spell(tokens)


def test_sequences_have_the_published_templates(toy: HunyuanImage3Pipeline) -> None:
    codec = toy.bundle.codec
    thought, truncated = codec.encode("hm</think>"), codec.encode("a do")
    begin = "<|startoftext|>User: ab\n\nAssistant: "
    assert spelt(toy, toy.writing_prompt("think", "ab", {})) == begin + "<think>"
    assert spelt(toy, toy.writing_prompt("recaption", "ab", {"think": thought})) == begin + (
        "<think>hm</think><recaption>"
    )
    assert spelt(toy, toy.writing_prompt("answer", "ab", {})) == begin
    assert spelt(toy, toy.drawing_prompt("ab", {})) == begin + "<answer>"
    both = {"think": thought, "recaption": truncated}
    drawn = begin + "<think>hm</think><recaption>a do</recaption><answer>"
    assert spelt(toy, toy.drawing_prompt("ab", both)) == drawn
    erased = spelt(toy, toy.drawing_prompt("ab", both, conditional=False))
    assert erased == (
        "<|startoftext|>User: <cfg><cfg>\n\nAssistant: <think><cfg><cfg></think>"
        "<recaption><cfg><cfg><cfg><cfg></recaption><answer>"
    )


def test_the_recipe_and_the_checkpoint_decide_the_template() -> None:
    system = HunyuanImage3Pipeline(HunyuanImage3Bundle(path="toy", dtype="fp32"), system_instruction="Draw.")
    assert spelt(system, system.drawing_prompt("ab", {})).startswith("<|startoftext|>Draw.\n\nUser: ab\n\n")
    bundle = HunyuanImage3Bundle(path="toy", dtype="fp32")
    bundle.format = replace(bundle.format, has_roles=False, drops_think=True)
    base = HunyuanImage3Pipeline(bundle, system_instruction="Draw.")
    written = {name: bundle.codec.encode(name[0]) for name in ("think", "recaption")}
    assert spelt(base, base.drawing_prompt("ab", written)) == "<|startoftext|>Draw.ab<recaption>r</recaption>"
    assert spelt(base, base.writing_prompt("recaption", "ab", {"think": [116]})).endswith("</think><recaption>")


def test_both_passes_read_as_many_tokens_and_long_prompts_are_cut(toy: HunyuanImage3Pipeline) -> None:
    params = DiffusionSamplingParams(kernel=EulerODE(), guidance_scale=4.0, max_sequence_length=6)
    conditions = toy.encode(("ab", "", "abcdefghij"), params)
    texts, erased = (rows_of(conditions[name]) for name in ("text", "negative_text"))
    assert [len(row) for row in texts] == [len(row) for row in erased]
    assert "User: abcdef\n" in spelt(toy, texts[2]) and "User: " + 6 * "<cfg>" + "\n" in spelt(toy, erased[2])


def test_the_ratio_token_is_that_of_the_nearest_published_size(toy: HunyuanImage3Pipeline) -> None:
    sizes = [(1024, 1024)]
    for larger in (0, 1):
        sides = [1024, 1024]
        while not (sides[larger] >= 2048 and sides[1 - larger] <= 512):
            sides[larger], sides[1 - larger] = min(sides[larger] + 64, 2048), max(sides[1 - larger] - 64, 512)
            sizes.append((sides[0], sides[1]))
    sizes.sort(key=lambda size: size[0] / size[1])
    assert len(sizes) == 33
    later = [(1024, 768), (1280, 720), (768, 1024), (720, 1280)]  # checkpoints after the first one
    for index, (height, width) in enumerate(sizes + later):
        header = toy.bundle.format.header(height // 16, width // 16)
        assert spelt(toy, header) == f"<boi><img_size_1024><img_ratio_{index}><timestep>"
    first = HunyuanImage3Bundle.family.published[BASE].components["transformer"]["model_version"]
    assert first == FIRST_VERSION and sizes_of(1024, False) == sizes and sizes_of(1024, True) == sizes + later


# --- policies, and the tree of their samples --------------------------------------------------------------------------


def test_each_track_has_its_policy_of_the_one_network_and_its_end(toy: HunyuanImage3Pipeline) -> None:
    image = toy.bundle.stage_of("image")
    assert isinstance(image, DiffusionStage)
    for track, end in (("think", "</think>"), ("recaption", "</recaption>"), ("answer", "</answer>")):
        stage = toy.bundle.stage_of(track)
        assert isinstance(stage, ARStage) and stage.network is toy.bundle.trainable()
        ends = [stage.codec.spell([token]) for token in stage.codec.ends]
        assert ends == list(dict.fromkeys([end, "</answer>", "<|endoftext|>"]))


def request(names: Sequence[str], pipeline: HunyuanImage3Pipeline) -> RolloutReq:
    image = DiffusionSamplingParams(
        kernel=FlowSDEStrategy(), num_inference_steps=2, height=32, width=32, guidance_scale=2.0
    )
    samplings = [pipeline.facts.pinned(image, 0) if name == "image" else WRITING for name in names]
    parents = [None, *names]
    tracks = {
        name: TrackSpec(parent=parent, branch=1 if parent is None else 2, sampling=sampling, weight_version=3)
        for name, parent, sampling in zip(names, parents, samplings, strict=False)
    }
    texts = TEXTS[:2]
    groups = [f"p{i}" for i in range(len(texts))]
    return RolloutReq(
        sample_ids=groups,
        group_ids=groups,
        primitives={"text": Texts(texts=list(texts))},
        metadata=[{} for _ in texts],
        tracks=tracks,
        purpose="r",
        step=0,
    ).expand(2)


CHAIN = ("think", "recaption", "image")


@torch.no_grad()
def test_a_chain_holds_what_each_policy_samples_alone_and_replays_it(noised: HunyuanImage3Pipeline) -> None:
    req = request(CHAIN, noised)
    resp = noised.generate(req, 5)
    ids, parent, written = req.sample_ids, None, [{} for _ in req.sample_ids]  # type: ignore[var-annotated]
    prompts = list(req.prompts())
    for name in CHAIN:
        track, spec = resp.tracks[name], req.tracks[name]
        if parent is not None:
            prompts = [each for each in prompts for _ in range(2)]
            written = [each for each in written for _ in range(2)]
            parents = [each for each in ids for _ in range(2)]
            ids = child_ids(ids, name, 2)
            assert (track.parent_track, track.parent_ids, track.group_ids) == (parent, parents, parents)
        assert track.sample_ids == ids and track.weight_version.tolist() == [3] * len(ids)
        pairs = list(zip(prompts, written, strict=True))
        segment, stage, noise = track.segment, noised.stage_of(name), NoiseSource(42, "r", 0)
        if isinstance(segment, TextSegment):
            assert isinstance(stage, ARStage) and isinstance(spec.sampling, ARSamplingParams)
            conditions = written_after([noised.writing_prompt(name, text, each) for text, each in pairs])
            alone = stage.sample(conditions, spec.sampling, noise, ids, slots=1)
            assert torch.equal(alone.tokens, segment.tokens) and torch.equal(alone.logp, segment.logp)
            assert torch.equal(stage.replay(track.conditions, segment).logp, segment.logp)
            rows = segment.tokens.split(segment.lengths.tolist())
            written = [{**each, name: row.tolist()} for each, row in zip(written, rows, strict=True)]
        else:
            assert isinstance(segment, LatentSegment) and isinstance(stage, DiffusionStage)
            assert isinstance(spec.sampling, DiffusionSamplingParams)
            conditions = {
                prefix + "text": prompt_tokens(
                    [noised.drawing_prompt(text, each, conditional=not prefix) for text, each in pairs]
                )
                for prefix in ("", "negative_")
            }
            x = noised.initial_noise(noise, ids, spec.sampling)
            latent = stage.sample(conditions, x, spec.sampling, noise, ids)
            assert torch.equal(latent.latents, segment.latents) and torch.equal(latent.logp, segment.logp)
            replayed = stage.replay(track.conditions, segment, segment.sde_indices)
            assert torch.equal(replayed.logp, segment.logp)
        parent = name
    assert len(resp.tracks["image"]) == 2 * 2 * 2 * 2
    again = noised.generate(req, 1)
    assert all(torch.equal(again.tracks[name].segment.logp, resp.tracks[name].segment.logp) for name in CHAIN)


@pytest.mark.parametrize("names", [("recaption", "image"), ("think", "recaption"), ("image",)])
def test_a_request_may_leave_out_tracks(noised: HunyuanImage3Pipeline, names: tuple[str, ...]) -> None:
    with torch.no_grad():
        resp = noised.generate(request(names, noised), 4)
    assert list(resp.tracks) == list(names) and len(resp.tracks[names[-1]]) == 4 * 2 ** (len(names) - 1)


# --- gradients --------------------------------------------------------------------------------------------------------


def with_gradient(pipeline: HunyuanImage3Pipeline) -> set[str]:
    named = pipeline.bundle.trainable().named_parameters()
    return {name for name, p in named if p.grad is not None and bool(p.grad.any())}


IMAGE_LAYERS = ("timestep_emb.", "time_embed", "patch_embed.", "final_layer.")


def test_the_image_loss_reaches_all_but_the_head_of_text() -> None:
    pipeline = with_noise(HunyuanImage3Pipeline(HunyuanImage3Bundle(path="toy", dtype="fp32")))
    track = rollout_of(pipeline, PARAMS)
    replay = pipeline.stage.replay(track.conditions, track.segment, track.segment.sde_indices)
    (replay.velocity.square().mean() + replay.logp.sum()).backward()
    names = {name for name, _ in pipeline.bundle.trainable().named_parameters()}
    assert with_gradient(pipeline) == names - {"lm_head.weight", "model.ln_f.weight"}


def test_the_text_loss_reaches_the_head_the_router_and_all_experts_but_no_layer_of_images() -> None:
    pipeline = with_noise(HunyuanImage3Pipeline(HunyuanImage3Bundle(path="toy", dtype="fp32")))
    stage = pipeline.bundle.stage_of("think")
    assert isinstance(stage, ARStage)
    conditions = written_after([pipeline.writing_prompt("think", text, {}) for text in TEXTS])
    segment = stage.sample(conditions, WRITING, NoiseSource(0, "r", 0), list("abcd"), slots=4)
    stage.replay(conditions, segment).logp.sum().backward()
    names = {name for name, _ in pipeline.bundle.trainable().named_parameters()}
    assert with_gradient(pipeline) == {name for name in names if not name.startswith(IMAGE_LAYERS)}
    assert {"lm_head.weight", "model.layers.1.mlp.gate.wg.weight"} <= with_gradient(pipeline)


def test_an_expert_without_tokens_has_a_gradient_of_zero(toy: HunyuanImage3Pipeline) -> None:
    layer = MoE(toy.bundle.configs.components["transformer"], 1)
    with torch.no_grad():
        layer.gate.wg.weight.copy_(torch.arange(4.0)[:, None].expand(4, 64))  # the last experts for positive tokens
    layer(torch.rand(3, 64)).sum().backward()
    idle, used = ([p.grad for p in layer.experts[i].parameters()] for i in (0, 3))
    assert all(grad is not None and not grad.any() for grad in idle)
    assert all(grad is not None and grad.any() for grad in used)


def test_adapters_go_on_attention_and_get_all_of_the_gradient() -> None:
    pipeline = with_noise(HunyuanImage3Pipeline(HunyuanImage3Bundle(path="toy", dtype="fp32")))
    network = pipeline.bundle.trainable()
    inject_lora(network, LoraSpec(4, 8.0, pipeline.facts.lora_targets), seed=1)
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    layers = [f"model.layers.{i}.self_attn.{part}" for i in range(3) for part in ("qkv_proj", "o_proj")]
    assert trained == {f"{layer}.lora_{side}.default.weight" for layer in layers for side in "AB"}
    track = rollout_of(pipeline, PARAMS)
    pipeline.stage.replay(track.conditions, track.segment, track.segment.sde_indices).logp.sum().backward()
    assert with_gradient(pipeline) == {name for name in trained if ".lora_B." in name}  # B starts as zero


# --- facts, plans and refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [BASE, INSTRUCT])
def test_the_published_model_has_81_billion_parameters_of_which_a_token_runs_14(path: str) -> None:
    estimate = HunyuanImage3Bundle.estimate(path)
    width, vocabulary = 4096, 133120
    expert = 3 * width * 3072
    attention = width * (32 + 2 * 8) * 128 + width * width + 2 * 128
    layer = attention + 65 * expert + 64 * width + 2 * width
    time = 256 * width + width + width * width + width
    block_in = 2 * 1024 + 9 * 1024 * width + width + 2 * width * width + 2 * width
    block_in += 2 * width + 9 * width * width + width + 1024 * width + width
    block_out = 2 * width + 9 * 1024 * width + 1024 + 2 * width * 1024 + 2 * 1024
    block_out += 2 * 1024 + 9 * 1024 * 1024 + 1024 + 1024 * width + 1024
    image = 3 * time + (9 * 32 * 1024 + 1024) + block_in + block_out + 2 * 1024 + 9 * 1024 * 32 + 32
    total = 32 * layer + 2 * vocabulary * width + width + image
    assert estimate.parameters["transformer"] == total
    assert estimate.idle_parameters == 32 * 56 * expert and 13e9 < total - estimate.idle_parameters < 14e9
    assert estimate.copied_parameters == 32 * 64 * expert
    assert estimate.copied_at_once == 64 * 2 * 3072 * width  # gates and ups of a layer
    assert estimate.num_blocks == 32 and estimate.width == 4096 and len(estimate.adapted_layers()) == 64
    facts = HunyuanImage3Bundle.facts_of(path)
    assert facts.latent_shape(DiffusionSamplingParams(kernel=EulerODE(), height=1024, width=768)) == (32, 64, 48)
    assert facts.of(WRITING) is facts.text and facts.text is not None and facts.text.context_length == 22800


def test_the_plan_counts_the_operations_of_a_forward(toy: HunyuanImage3Pipeline) -> None:
    conditions, x = toy.encode(["same length"] * 4, PARAMS), latents(toy)
    length = len(rows_of(conditions["text"])[0]) + 4

    def grouped(rows: torch.Size, weights: torch.Size, *args: object, **named: object) -> int:
        return 2 * rows[0] * weights[1] * weights[2]

    product = torch.ops.aten._grouped_mm
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping={product: grouped}) as counter:
        toy.stage.denoiser.velocity(x, torch.full((4,), 0.5), conditions)
    matrices, attention = forward_flops(HunyuanImage3Bundle.estimate("toy").layers(), Lengths(6, length))
    counts = counter.get_flop_counts()["Global"]
    layers = torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.convolution, product
    counted = sum(counts[kind] for kind in layers)
    assert 4 * matrices <= counted < 4.2 * matrices  # experts have padding rows
    assert attention == 3 * 4 * 32 * (length + 6) ** 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 40}, "sampling.width=40 is not a positive multiple of 16"),
        ({"num_frames": 5}, "sampling.num_frames=5: hunyuan_image3 generates images"),
        ({"negative_prompt": "blurry"}, "the unconditional pass of hunyuan_image3 has <cfg> tokens"),
    ],
)
def test_settings_that_the_model_cannot_sample_with_are_refused(
    toy: HunyuanImage3Pipeline, settings: dict[str, object], message: str
) -> None:
    params = DiffusionSamplingParams(**{"kernel": EulerODE(), "height": 32, "width": 32, **settings})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        toy.facts.check(params)


def test_condition_images_are_refused(toy: HunyuanImage3Pipeline) -> None:
    grey = ConditionImages.of(torch.full((1, 3, 32, 48), 0.5))
    with pytest.raises(DataError, match="hunyuan_image3 takes no condition images"):
        toy.encode(["a"], PARAMS, [grey])
