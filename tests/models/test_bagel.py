"""BAGEL computes the published equations: images by the generation expert, text by the understanding expert."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, silu
from torch.utils.flop_counter import FlopCounterMode

from unirl.config.errors import DataError
from unirl.models.bagel.family import THINK_INSTRUCTION, BagelBundle, BagelPipeline
from unirl.models.bagel.network import Config
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.stage import DiffusionStage
from unirl.models.language.packing import prompt_tokens
from unirl.models.language.pipeline import transformers_logp
from unirl.models.language.stage import ARStage
from unirl.models.loading.estimate import Lengths, forward_flops
from unirl.models.loading.lora import inject_lora
from unirl.sde.kernels import EulerODE, FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.bundle import check_bundle, rollout_of
from unirl.types.conditions import PromptTokens
from unirl.types.facts import LoraSpec
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams

PUBLISHED = "ByteDance-Seed/BAGEL-7B-MoT"
TEXTS = ("two", "a blue square on the left", "a red circle on a long grey road or so", "")
"""Three padded lengths, where the first occurs again at the end, so that rows of a length are not adjacent."""
PARAMS = DiffusionSamplingParams(
    kernel=FlowSDEStrategy(), num_inference_steps=3, height=32, width=48, max_sequence_length=16
)
WRITING = ARSamplingParams(max_new_tokens=6, temperature=0.8)


@pytest.fixture(scope="module")
def toy() -> BagelPipeline:
    return BagelPipeline(BagelBundle(path="toy", dtype="fp32"))


@pytest.fixture(scope="module")
def noised() -> BagelPipeline:
    """A toy with noise on every parameter, since all of its norms are equal, and so those of both experts."""
    pipeline, generator = BagelPipeline(BagelBundle(path="toy", dtype="fp32")), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in pipeline.bundle.trainable().parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return pipeline


def latents(pipeline: BagelPipeline, count: int = len(TEXTS), name: str = "x") -> Tensor:
    ids = [f"r{i}" for i in range(count)]
    return NoiseSource(0, "r", 0).normal(ids, name, pipeline.facts.latent_shape(PARAMS))


# --- the published equations, row by row, in float64 ------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x: Tensor, positions: Sequence[int], theta: float) -> Tensor:
    """Rotary embedding of one head [L, d]: pairs are (i, i + d / 2)."""
    half = x.shape[1] // 2
    result = torch.empty_like(x)
    for row, position in enumerate(positions):
        for i in range(half):
            angle = position * theta ** (-2 * i / x.shape[1])
            a, b = x[row, i], x[row, i + half]
            result[row, i] = a * math.cos(angle) - b * math.sin(angle)
            result[row, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return result


class Published:
    """The published forward of one row: the whole sequence in order, with an explicit mask."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Config) -> None:
        self.tensors = {name: tensor.detach().double() for name, tensor in tensors.items()}
        self.config = config

    def of(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        return linear(x, weight, bias)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def by_expert(self, function, name: str, x: Tensor, is_latent: Sequence[bool]) -> Tensor:
        """Each token through the weights of its expert."""
        ends = ["_moe_gen" if latent else "" for latent in is_latent]
        return torch.stack([function(name + end, row) for end, row in zip(ends, x, strict=True)])

    def layer(self, i: int, x: Tensor, is_latent: list[bool], positions: list[int], mask: Tensor) -> Tensor:
        prefix, config = f"language_model.model.layers.{i}", self.config
        width = config["hidden_size"] // config["num_attention_heads"]
        groups = config["num_attention_heads"] // config["num_key_value_heads"]
        h = self.by_expert(self.norm, f"{prefix}.input_layernorm", x, is_latent)
        q, k, v = (self.by_expert(self.of, f"{prefix}.self_attn.{n}_proj", h, is_latent) for n in "qkv")
        heads = []
        for head in range(config["num_attention_heads"]):
            own, shared = (slice(n * width, (n + 1) * width) for n in (head, head // groups))
            query = self.by_expert(self.norm, f"{prefix}.self_attn.q_norm", q[:, own], is_latent)
            key = self.by_expert(self.norm, f"{prefix}.self_attn.k_norm", k[:, shared], is_latent)
            query, key = (turned(t, positions, config["rope_theta"]) for t in (query, key))
            scores = (query @ key.T / math.sqrt(width)).masked_fill(~mask, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, shared])
        x = x + self.by_expert(self.of, f"{prefix}.self_attn.o_proj", torch.cat(heads, 1), is_latent)
        h = self.by_expert(self.norm, f"{prefix}.post_attention_layernorm", x, is_latent)
        return x + torch.stack(
            [self.mlp(f"{prefix}.mlp{'_moe_gen' * e}", r) for e, r in zip(is_latent, h, strict=True)]
        )

    def mlp(self, name: str, x: Tensor) -> Tensor:
        return self.of(f"{name}.down_proj", silu(self.of(f"{name}.gate_proj", x)) * self.of(f"{name}.up_proj", x))

    def velocity(self, x: Tensor, sigma: float, text: list[int], marks: tuple[int, int]) -> Tensor:
        """[C, H, W] from x [C, H, W]."""
        config, (channels, height, width) = self.config, x.shape
        rows, columns, length = height // 2, width // 2, len(text)
        places = [(r, c) for r in range(rows) for c in range(columns)]
        patches = [x[:, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].permute(1, 2, 0).flatten() for r, c in places]
        frequencies = [10000.0 ** (-i / 128) for i in range(128)]
        waves = [math.cos(sigma * f) for f in frequencies] + [math.sin(sigma * f) for f in frequencies]
        times = self.of("time_embedder.mlp.2", silu(self.of("time_embedder.mlp.0", torch.tensor(waves).double())))
        table = self.tensors["latent_pos_embed.pos_embed"]
        side = config["max_latent_size"]
        image = [
            self.of("vae2llm", patch.double()) + times + table[r * side + c]
            for patch, (r, c) in zip(patches, places, strict=True)
        ]
        embed = self.tensors["language_model.model.embed_tokens.weight"]
        states = torch.stack([*embed[text], embed[marks[0]], *image, embed[marks[1]]])
        is_latent = [False] * (length + 1) + [True] * len(image) + [False]
        positions = [*range(length), *[length] * (len(image) + 2)]
        mask = torch.ones(len(states), len(states), dtype=torch.bool).tril()
        mask[length:] = True
        for i in range(config["num_hidden_layers"]):
            states = self.layer(i, states, is_latent, positions, mask)
        states = states[length + 1 : -1]
        tokens = self.of("llm2vae", self.norm("language_model.model.norm_moe_gen", states))
        v = torch.empty(channels, height, width, dtype=torch.float64)
        for token, (r, c) in zip(tokens, places, strict=True):
            v[:, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2] = token.view(2, 2, channels).permute(2, 0, 1)
        return v


def published(pipeline: BagelPipeline) -> Published:
    return Published(pipeline.bundle.trainable().state_dict(), pipeline.bundle.configs.components["transformer"])


def rows_of(prompts: PromptTokens) -> list[list[int]]:
    return [row.tolist() for row in prompts.tokens.split(prompts.lengths.tolist())]


@pytest.mark.parametrize("condition", ["text", "negative_text"])
def test_the_velocity_is_that_of_the_published_equations(noised: BagelPipeline, condition: str) -> None:
    x, sigma = latents(noised), torch.tensor([1.0, 0.7, 0.31, 0.05])
    params = DiffusionSamplingParams(kernel=EulerODE(), guidance_scale=4.0, max_sequence_length=64)
    prompts = noised.encode(TEXTS, params)[condition]
    assert isinstance(prompts, PromptTokens)
    v = noised.stage.velocity(x, sigma, {"text": prompts}, noised.facts.guidance).detach()
    equations, marks = published(noised), noised.bundle.marks
    for row, text in enumerate(rows_of(prompts)):
        expected = equations.velocity(x[row], float(sigma[row]), text, marks)
        assert float((v[row] - expected).abs().max()) < 1e-5 * float(expected.abs().max()), row


@pytest.mark.parametrize("wide", [False, True], ids=["weights_in_bf16", "autocast"])
def test_the_velocity_in_bf16_is_that_of_float32_up_to_rounding(noised: BagelPipeline, wide: bool) -> None:
    """Full training has float32 weights and computes by autocast; adapters have a base in bf16."""
    x, sigma = latents(noised), torch.tensor([1.0, 0.7, 0.31, 0.05])
    conditions, guidance = noised.encode(TEXTS, PARAMS), noised.facts.guidance
    network = deepcopy(noised.bundle.trainable()) if wide else deepcopy(noised.bundle.trainable()).bfloat16()
    denoiser = noised.bundle.with_network(network).denoiser()
    with torch.no_grad():
        expected = noised.stage.velocity(x, sigma, conditions, guidance)
        stage = DiffusionStage(denoiser, noised.facts, torch.bfloat16)
        stage.needs_autocast = lambda: wide
        v = stage.velocity(x, sigma, conditions, guidance)
    assert v.dtype == torch.float32 and not torch.equal(v, expected)
    assert float((v - expected).norm() / expected.norm()) < 0.03


def test_prompts_stand_between_the_published_tokens_and_the_unconditional_pass_has_none(toy: BagelPipeline) -> None:
    params = DiffusionSamplingParams(kernel=EulerODE(), guidance_scale=4.0, max_sequence_length=8)
    conditions = toy.encode(("ab", "", "abcdefghij"), params)
    spelt = [toy.bundle.codec.spell(row) for row in rows_of(conditions["text"])]  # type: ignore[arg-type]
    assert spelt == [f"<|im_start|>{text}<|im_end|>" for text in ("ab", "", "abcdef")]
    negative = conditions["negative_text"]
    assert isinstance(negative, PromptTokens)
    assert negative.lengths.tolist() == [0, 0, 0] and negative.next_position.tolist() == [0, 0, 0]
    think = toy.bundle.codec.spell(toy.writing_prompt("think", "ab", {}))
    assert think == f"<|im_start|>{THINK_INSTRUCTION}<|im_end|><|im_start|>ab<|im_end|><|im_start|>"


def test_the_places_of_latents_have_the_sine_and_cosine_embeddings_of_column_and_row(toy: BagelPipeline) -> None:
    table, side = toy.bundle.trainable().get_parameter("latent_pos_embed.pos_embed"), 6
    for row, column in ((0, 0), (1, 0), (3, 5)):
        angles = [[place / 10000 ** (i / 8) for i in range(8)] for place in (column, row)]
        expected = [f(a) for axis in angles for f in (math.sin, math.cos) for a in axis]
        assert torch.allclose(table[row * side + column], torch.tensor(expected))


def test_the_schedule_is_the_published_one(toy: BagelPipeline) -> None:
    ends = torch.linspace(1, 0, 15)
    expected = 3.0 * ends / (1 + (3.0 - 1) * ends)
    assert torch.allclose(toy.facts.schedule.sigmas(14, 1024), expected, atol=1e-6)


def test_the_toy_passes_check_bundle(toy: BagelPipeline) -> None:
    check_bundle(toy, 32, 48, 4.0)


def test_text_does_not_depend_on_the_latents(toy: BagelPipeline) -> None:
    seen: list[tuple[Tensor, ...]] = []
    layers = toy.bundle.trainable().get_submodule("language_model.model.layers")
    hook = list(layers.children())[-1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    conditions, sigma = toy.encode(TEXTS, PARAMS), torch.full((4,), 0.5)
    with hook:
        for name in ("x", "y"):
            toy.stage.velocity(latents(toy, name=name), sigma, conditions, toy.facts.guidance)
    text = conditions["text"]
    assert isinstance(text, PromptTokens)
    num_text = len(text.tokens)
    (first, _), (second, _) = seen
    assert torch.equal(first[:num_text], second[:num_text])
    assert not torch.equal(first[num_text : num_text + 8], second[num_text : num_text + 8])


# --- text -----------------------------------------------------------------------------------------------------------


def qwen3_with_the_same_weights(bundle: BagelBundle) -> torch.nn.Module:
    """The understanding expert as transformers' Qwen3, which is Qwen2 with normed queries and keys.

    Qwen2 has biases for queries, keys and values, but none for the output of attention, so that bias of Qwen3 is zero.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = bundle.configs.components["transformer"]
    network = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["hidden_size"] // config["num_attention_heads"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
            attention_bias=True,
            tie_word_embeddings=False,
        )
    )
    tensors = bundle.trainable().state_dict()
    own = {n.removeprefix("language_model."): t for n, t in tensors.items() if n.startswith("language_model.")}
    own = {name: tensor for name, tensor in own.items() if "_moe_gen" not in name}
    zeros = {n: torch.zeros_like(t) for n, t in network.state_dict().items() if n.endswith("o_proj.bias")}
    network.load_state_dict(own | zeros)
    return network.eval()


def test_log_probs_of_text_equal_those_of_transformers_and_of_sampling(noised: BagelPipeline) -> None:
    stage = noised.bundle.stage_of("text")
    assert isinstance(stage, ARStage)
    prompts = [noised.writing_prompt("think", text, {}) for text in TEXTS]
    conditions, ids = {"prompt": prompt_tokens(prompts)}, [f"r{i}" for i in range(4)]
    noise = NoiseSource(0, "r", 0)
    segment = stage.sample(conditions, WRITING, noise, ids, slots=4)
    for slots in (1, 3):
        again = stage.sample(conditions, WRITING, noise, ids, slots=slots)
        assert torch.equal(again.tokens, segment.tokens) and torch.equal(again.logp, segment.logp)
    with torch.no_grad():
        assert torch.equal(stage.replay(conditions, segment).logp, segment.logp)
        expected = transformers_logp(qwen3_with_the_same_weights(noised.bundle), conditions, segment)
    assert float((segment.logp - expected).abs().max()) < 1e-5
    assert segment.lengths.max() > 1 and float(segment.logp.std()) > 0.1


def test_each_track_has_its_policy_of_the_one_network(toy: BagelPipeline) -> None:
    image, text = toy.bundle.stage_of("image"), toy.bundle.stage_of("thought")
    assert isinstance(image, DiffusionStage) and isinstance(text, ARStage)
    assert image.denoiser.network is text.network is toy.bundle.trainable()  # type: ignore[attr-defined]
    assert text.codec.ends == (toy.bundle.prompt_tokenizer.end,)


# --- gradients ------------------------------------------------------------------------------------------------------


def reached(pipeline: BagelPipeline) -> set[str]:
    """The parameters that the gradient of the image loss reaches."""
    track = rollout_of(pipeline, PARAMS)
    replay = pipeline.stage.replay(track.conditions, track.segment, track.segment.sde_indices)
    (replay.velocity.square().mean() + replay.logp.sum()).backward()
    named = pipeline.bundle.trainable().named_parameters()
    return {name for name, p in named if p.grad is not None and bool(p.grad.any())}


def names(bundle: BagelBundle, moe_gen: bool) -> set[str]:
    named = dict(bundle.trainable().named_parameters())
    return {name for name in named if name.startswith("language_model.") and ("_moe_gen" in name) == moe_gen}


LATENT_LAYERS = {f"{layer}.{kind}" for layer in ("vae2llm", "llm2vae") for kind in ("weight", "bias")} | {
    f"time_embedder.mlp.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")
}


def test_the_image_loss_reaches_the_generation_expert_alone() -> None:
    pipeline = BagelPipeline(BagelBundle(path="toy", dtype="fp32"))
    trained = {name for name, p in pipeline.bundle.trainable().named_parameters() if p.requires_grad}
    assert trained == names(pipeline.bundle, moe_gen=True) | LATENT_LAYERS
    assert reached(pipeline) == trained


def test_without_freezing_it_also_reaches_what_the_image_reads_of_the_text() -> None:
    pipeline = BagelPipeline(BagelBundle(path="toy", dtype="fp32", freeze_understanding=False))
    last = "language_model.model.layers.1."
    unread = {
        *(f"{last}self_attn.{name}" for name in ("q_proj.weight", "q_proj.bias", "q_norm.weight", "o_proj.weight")),
        *(f"{last}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        f"{last}post_attention_layernorm.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    }
    every = names(pipeline.bundle, True) | names(pipeline.bundle, False) | LATENT_LAYERS
    assert reached(pipeline) == every - unread


def test_adapters_go_on_the_generation_expert_and_get_all_of_the_gradient() -> None:
    pipeline = BagelPipeline(BagelBundle(path="toy", dtype="fp32"))
    network = pipeline.bundle.trainable()
    inject_lora(network, LoraSpec(4, 8.0, pipeline.facts.lora_targets), seed=1)
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    layers = [f"language_model.model.layers.{i}" for i in range(2)]
    targets = [f"self_attn.{n}_proj_moe_gen" for n in "qkvo"] + [
        f"mlp_moe_gen.{n}_proj" for n in ("gate", "up", "down")
    ]
    assert trained == {f"{la}.{t}.lora_{s}.default.weight" for la in layers for t in targets for s in "AB"}
    assert reached(pipeline) == {name for name in trained if ".lora_B." in name}  # B starts as zero


# --- facts, plans and refusals --------------------------------------------------------------------------------------


def test_the_published_model_has_14_billion_parameters_without_being_loaded() -> None:
    estimate = BagelBundle.estimate(PUBLISHED)
    width, hidden, keys, vocabulary = 3584, 18944, 512, 152064
    attention = 2 * width * width + width + 2 * (width * keys + keys) + 2 * 128
    expert = attention + 3 * width * hidden + 2 * width
    heads = 2 * 64 * width + width + 64 + 256 * width + width * width + 2 * width + 4096 * width
    assert estimate.parameters["transformer"] == 2 * (28 * expert + width) + 2 * vocabulary * width + heads
    assert estimate.num_blocks == 28 and estimate.width == 3584
    assert len(estimate.adapted_layers()) == 28 * 7
    facts = BagelBundle.facts_of(PUBLISHED)
    assert facts.latent_shape(DiffusionSamplingParams(kernel=EulerODE())) == (16, 64, 64)


def test_the_plan_counts_the_operations_of_a_forward(toy: BagelPipeline) -> None:
    text = ["same length"] * 4
    conditions = toy.encode(text, PARAMS)
    prompts = conditions["text"]
    assert isinstance(prompts, PromptTokens)
    length = int(prompts.lengths[0])
    x = latents(toy)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        toy.stage.denoiser.velocity(x, torch.full((4,), 0.5), conditions)
    matrices, _ = forward_flops(BagelBundle.estimate("toy").layers(), Lengths(6, length + 2))
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.aten.addmm] + counts[torch.ops.aten.mm] == 4 * matrices
    [_, attention] = forward_flops(BagelBundle.estimate("toy").layers(), Lengths(6, 14))
    heads, layers = 32, 2
    assert attention == layers * 4 * heads * (14 * 14 + 6 * (6 + 14))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"height": 112}, "sampling.height=112: bagel has positions for 96 pixels. Use 96 or less"),
        ({"width": 40}, "sampling.width=40 is not a positive multiple of 16"),
        (
            {"negative_prompt": "blurry"},
            "sampling.negative_prompt='blurry': the unconditional pass of bagel has no text",
        ),
        ({"guidance_scale": 0.5}, "sampling.guidance_scale=0.5: this model has no guidance below 1"),
    ],
)
def test_settings_that_the_model_cannot_sample_with_are_refused(
    toy: BagelPipeline, settings: dict[str, object], message: str
) -> None:
    params = DiffusionSamplingParams(**{"kernel": EulerODE(), "height": 32, "width": 32, **settings})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        toy.facts.check(params)


def test_condition_images_are_refused(toy: BagelPipeline) -> None:
    grey = ConditionImages.of(torch.full((1, 3, 32, 48), 0.5))
    with pytest.raises(DataError, match="bagel takes no condition images"):
        toy.encode(["a"], PARAMS, [grey])


def test_the_guidance_of_the_recipe_is_that_of_the_samples() -> None:
    bundle = BagelBundle(path="toy", cfg_renorm_type="channel", cfg_renorm_min=0.2, cfg_interval=(0.1, 0.9))
    guidance = bundle.facts.guidance.at(4.0)
    shown = {name: vars(guidance)[name] for name in ("scale", "renorm", "renorm_min", "interval", "patch_size")}
    assert shown == {"scale": 4.0, "renorm": "channel", "renorm_min": 0.2, "interval": (0.1, 0.9), "patch_size": 2}
