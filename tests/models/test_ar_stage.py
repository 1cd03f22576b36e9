"""The one policy over tokens: what it draws, what it replays, and how these agree with transformers and each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.texts import (
    ENDS,
    networks,
    prompts_of_lengths,
    rows_of,
    sampled,
    segment_of_lengths,
    stage_of,
    textbook_logits,
    textbook_logp,
)
from tests.shapes import unchecked
from unirl.config.errors import DivergenceError
from unirl.models.language import decoding, slots
from unirl.models.language.attention import width_of_all
from unirl.models.language.decoding import LookAhead
from unirl.models.language.stage import ARStage
from unirl.sde.noise import NoiseSource
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

PROMPTS = (5, 40, 1, 3, 70, 12)
RESPONSES = (9, 1, 30, 4, 2, 17)
PARAMS = ARSamplingParams(max_new_tokens=40)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(request: pytest.FixtureRequest) -> tuple[ARStage, Any]:
    """A stage, and transformers' own network with its weights."""
    policy, plain = networks(tie_word_embeddings=request.param)
    return stage_of(policy), plain


@pytest.fixture(scope="module")
def stage() -> ARStage:
    return stage_of(networks()[0])


def assert_same(found: TextSegment, wanted: TextSegment) -> None:
    """Bit for bit."""
    for name in ("tokens", "logp", "loss_mask", "offsets", "finished"):
        assert torch.equal(found.__dict__[name], wanted.__dict__[name]), name


# Sampling


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_of_a_sample_are_transformers_own(pair: tuple[ARStage, Any], temperature: float) -> None:
    stage, plain = pair
    conditions = prompts_of_lengths(PROMPTS)
    segment = sampled(stage, conditions, replace(PARAMS, temperature=temperature))
    assert segment.lengths.unique().numel() > 1, "rows are ragged"
    assert torch.allclose(segment.logp, textbook_logp(plain, conditions, segment), atol=1e-5)


def test_greedy_decoding_gives_the_tokens_of_generate(pair: tuple[ARStage, Any]) -> None:
    stage, plain = pair
    conditions = prompts_of_lengths(PROMPTS)
    segment = sampled(stage, conditions, replace(PARAMS, temperature=0.0))
    for prompt, response in rows_of(conditions, segment):
        whole = plain.generate(
            prompt[None], do_sample=False, max_new_tokens=40, eos_token_id=list(ENDS), pad_token_id=256
        )
        assert response.tolist() == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("slots", [1, 3, 5, 64])
def test_the_number_of_slots_changes_no_bit(stage: ARStage, slots: int) -> None:
    conditions = prompts_of_lengths(PROMPTS)
    assert_same(sampled(stage, conditions, PARAMS, slots), sampled(stage, conditions, PARAMS, 4))


def test_order_and_neighbours_change_no_bit(stage: ARStage) -> None:
    conditions = prompts_of_lengths(PROMPTS)
    whole, order = sampled(stage, conditions, PARAMS), [4, 1, 5]
    some = {"prompt": conditions["prompt"].select(order)}
    ids = [f"row{i}" for i in order]
    assert_same(stage.sample(some, PARAMS, NoiseSource(7, "r", 0), ids, 2), whole.select(order))


def test_siblings_share_the_reading_of_their_prompt_and_no_bit_changes(stage: ARStage) -> None:
    conditions = {"prompt": prompts_of_lengths(PROMPTS[:2])["prompt"].repeat_interleave(3)}
    together = sampled(stage, conditions, PARAMS, 6)
    apart = [4, 0, 5, 1, 3, 2]  # nobody stands beside a sibling: every prompt is read by itself
    some = {"prompt": conditions["prompt"].select(apart)}
    ids = [f"row{i}" for i in apart]
    assert_same(stage.sample(some, PARAMS, NoiseSource(7, "r", 0), ids, 3), together.select(apart))


def test_each_token_is_the_inverse_cdf_of_its_own_draw(pair: tuple[ARStage, Any]) -> None:
    stage, plain = pair
    conditions = prompts_of_lengths(PROMPTS)
    segment = sampled(stage, conditions, PARAMS)
    uniforms = NoiseSource(7, "r", 0).uniform([f"row{i}" for i in range(len(PROMPTS))], "tok", (40,)).double()
    for row, (prompt, response) in enumerate(rows_of(conditions, segment)):
        running = textbook_logits(plain, prompt, response).double().softmax(1).cumsum(1)
        u = uniforms[row, : len(response)]
        upper = running.gather(1, response[:, None])[:, 0]
        lower = torch.where(response > 0, running.gather(1, (response - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        assert bool(((lower - 1e-6 <= u) & (u < upper + 1e-6)).all())


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.5), (20, 0.6)])
def test_first_tokens_follow_the_exact_distribution(stage: ARStage, top_k: int, top_p: float) -> None:
    """1500 rows of one prompt, against the warpers of transformers applied to the exact logits."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    conditions = {"prompt": prompts_of_lengths([6])["prompt"].repeat_interleave(1500)}
    params = ARSamplingParams(max_new_tokens=1, temperature=0.8, top_k=top_k, top_p=top_p)
    drawn = sampled(stage, conditions, params, 500).tokens
    answer = stage.canary(conditions["prompt"].slice(0, 1)).values
    cuts = [TopKLogitsWarper(top_k)] if top_k else []
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8), *cuts, TopPLogitsWarper(top_p)])
    wanted = warpers(None, answer).softmax(1)[0].double()
    counts = torch.bincount(drawn, minlength=len(wanted))
    assert int(counts[wanted == 0].sum()) == 0
    common = wanted * 1500 >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([wanted[common], wanted[~common].sum()[None]]) * 1500
    kept = expected > 0
    assert chisquare(observed[kept].numpy(), (expected / expected.sum() * 1500)[kept].numpy()).pvalue > 1e-3


def test_truncation_shapes_the_sample_and_not_its_log_probs(pair: tuple[ARStage, Any]) -> None:
    stage, plain = pair
    conditions = prompts_of_lengths(PROMPTS)
    segment = sampled(stage, conditions, replace(PARAMS, top_k=3, top_p=0.9))
    for prompt, response in rows_of(conditions, segment):
        ranks = textbook_logits(plain, prompt, response).argsort(1, descending=True).argsort(1)
        assert int(ranks.gather(1, response[:, None]).max()) < 3
    assert torch.allclose(segment.logp, textbook_logp(plain, conditions, segment), atol=1e-5)


def test_no_response_ends_before_its_shortest_length(stage: ARStage) -> None:
    conditions = {"prompt": prompts_of_lengths([5])["prompt"].repeat_interleave(60)}
    free = sampled(stage, conditions, PARAMS, 60)
    held = sampled(stage, conditions, replace(PARAMS, min_new_tokens=15), 60)
    assert int(free.lengths.min()) < 15 <= int(held.lengths.min())
    early = torch.cat([row[:14] for row in held.tokens.split(held.lengths.tolist())])
    assert not set(early.tolist()) & set(ENDS)


def test_a_response_is_finished_by_an_end_token_and_cut_by_the_longest_length(stage: ARStage) -> None:
    segment = sampled(stage, {"prompt": prompts_of_lengths([5])["prompt"].repeat_interleave(100)}, PARAMS, 50)
    is_end = torch.isin(segment.tokens, torch.tensor(ENDS))
    assert torch.equal(segment.finished, is_end[segment.offsets[1:] - 1]) and 0 < int(segment.finished.sum()) < 100
    assert bool((segment.lengths[~segment.finished] == 40).all())
    assert int(is_end.sum()) == int(segment.finished.sum()), "nothing follows an end"


def test_weights_that_are_not_finite_stop_the_rollout_by_name(stage: ARStage) -> None:
    broken = stage_of(networks()[0])
    with torch.no_grad():
        broken.network.get_submodule("model").norm.weight[0] = torch.nan  # type: ignore[union-attr, index]
    with pytest.raises(DivergenceError, match=r"token 0 of row0 the log-prob nan"):
        sampled(broken, prompts_of_lengths([5]), PARAMS)


def test_prompts_that_are_read_in_several_forwards_change_no_bit(
    stage: ARStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    conditions = prompts_of_lengths(PROMPTS)
    whole = sampled(stage, conditions, PARAMS, 6)
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 42)
    assert_same(sampled(stage, conditions, PARAMS, 6), whole)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 6])
@pytest.mark.parametrize("ahead", [LookAhead(8, 0), LookAhead(8, 1), LookAhead(3, 2), LookAhead(1, 1)])
@pytest.mark.parametrize("stop", [(), ("a", "ek")])
def test_sampling_ahead_of_the_host_changes_no_bit(
    stage: ARStage, monkeypatch: pytest.MonkeyPatch, slots: int, ahead: LookAhead, stop: tuple[str, ...]
) -> None:
    """As on an accelerator: many tokens are sampled before the host sees that a response has ended."""
    conditions = prompts_of_lengths(PROMPTS)
    params = replace(PARAMS, min_new_tokens=3, stop=stop)
    whole = sampled(stage, conditions, params, slots)
    assert whole.lengths.unique().numel() > 1
    monkeypatch.setattr(decoding, "look_ahead", lambda device, builder: ahead)
    assert_same(sampled(stage, conditions, params, slots), whole)


def test_the_cache_is_gone_when_a_rollout_ends(stage: ARStage) -> None:
    sampled(stage, prompts_of_lengths(PROMPTS), PARAMS)
    assert not any(hasattr(module, "kv_cache") for module in stage.network.modules())


# Replay


def test_replay_gives_the_log_probs_of_sampling(pair: tuple[ARStage, Any]) -> None:
    stage, _ = pair
    conditions = prompts_of_lengths(PROMPTS)
    segment = sampled(stage, conditions, PARAMS)
    with torch.no_grad():
        assert float((stage.replay(conditions, segment).logp - segment.logp).abs().max()) < 1e-5


def test_replay_is_the_textbook_computation(pair: tuple[ARStage, Any]) -> None:
    stage, plain = pair
    conditions, segment = prompts_of_lengths(PROMPTS), segment_of_lengths(RESPONSES, temperature=0.7)
    result = stage.replay(conditions, segment, entropy=True)
    assert torch.allclose(result.logp, textbook_logp(plain, conditions, segment), atol=1e-5)
    logits = torch.cat([textbook_logits(plain, p, r) for p, r in rows_of(conditions, segment)])
    wanted = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    assert result.entropy is not None and torch.allclose(result.entropy, wanted, atol=1e-5)


def weighted_sum(logp: Tensor) -> Tensor:
    """Every token counts differently, so that a gradient that went to another token would show."""
    return (logp * torch.linspace(-1, 1, len(logp))).sum()


def gradients(network: Any, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*network.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).abs().max()) < 1e-5 * scale, name


def test_gradients_of_packed_rows_are_those_of_one_row_at_a_time(pair: tuple[ARStage, Any]) -> None:
    stage, plain = pair
    conditions, segment = prompts_of_lengths(PROMPTS), segment_of_lengths(RESPONSES)
    result = gradients(stage.network, weighted_sum(stage.replay(conditions, segment).logp))
    assert_close(result, gradients(plain, weighted_sum(textbook_logp(plain, conditions, segment))))


def test_a_row_has_the_same_bits_alone_and_among_others(stage: ARStage) -> None:
    conditions, segment = prompts_of_lengths(PROMPTS), segment_of_lengths(RESPONSES)
    together = stage.replay(conditions, segment, entropy=True)
    for row in range(len(PROMPTS)):
        one = stage.replay({"prompt": conditions["prompt"].slice(row, row + 1)}, segment.slice(row, row + 1))
        assert torch.equal(one.logp, together.logp[segment.offsets[row] : segment.offsets[row + 1]])


def test_a_row_without_tokens_takes_part_and_gives_nothing(stage: ARStage) -> None:
    conditions, segment = prompts_of_lengths([5, 4, 6]), segment_of_lengths([3, 0, 2])
    some = {"prompt": conditions["prompt"].select([0, 2])}
    assert torch.equal(stage.replay(conditions, segment).logp, stage.replay(some, segment.select([0, 2])).logp)


@pytest.mark.parametrize("gradient", ["head", "policy"])
def test_values_are_what_the_head_says_of_the_state_before_each_token(stage: ARStage, gradient: Any) -> None:
    conditions, segment = prompts_of_lengths(PROMPTS), segment_of_lengths(RESPONSES)
    stage.value_head = stage.build_value_head(8, seed=0)
    torch.nn.init.normal_(stage.value_head.output_layer.weight)  # type: ignore[arg-type]
    result = stage.replay(conditions, segment, values=gradient).values
    backbone: Any = networks()[1].model
    states = [
        backbone(input_ids=torch.cat([p, r])[None]).last_hidden_state[0, len(p) - 1 : -1]
        for p, r in rows_of(conditions, segment)
    ]
    assert result is not None and torch.allclose(result, stage.value_head(torch.cat(states)), atol=1e-5)
    layer = stage.network.get_parameter("model.layers.0.mlp.up_proj.weight")
    [to_policy] = torch.autograd.grad(result.sum(), [layer], allow_unused=True)
    assert (to_policy is not None) == (gradient == "policy")
    stage.value_head = None


def test_a_rollout_casts_each_weight_once(stage: ARStage) -> None:
    """With float32 weights that are trained in bfloat16."""
    half = ARStage(stage.network, stage.facts, stage.codec, torch.bfloat16)
    casts: Counter[int] = Counter()

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter):
                casts[id(args[0])] += 1
            return func(*args, **(kwargs or {}))

    with Casts():
        segment = sampled(half, prompts_of_lengths(PROMPTS), PARAMS)
    assert segment.lengths.max() > 5 and casts and set(casts.values()) == {1}


def test_bfloat16_compute_leaves_log_probs_in_float32(stage: ARStage) -> None:
    conditions, segment = prompts_of_lengths(PROMPTS), segment_of_lengths(RESPONSES)
    exact = stage.replay(conditions, segment).logp.detach()
    half = ARStage(stage.network, stage.facts, stage.codec, torch.bfloat16)
    rounded = half.replay(conditions, segment).logp.detach()
    assert rounded.dtype == sampled(half, conditions, PARAMS).logp.dtype == torch.float32
    assert 0 < float((rounded - exact).abs().max()) < 0.2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the tracer warns of its own doings
def test_one_compiled_block_serves_all_layers_in_sampling_and_in_replay() -> None:
    """As with fsdp_cfg.use_torch_compile. The index of a layer is no part of what was compiled."""
    conditions, params = prompts_of_lengths((5, 40)), replace(PARAMS, max_new_tokens=6)
    eager, compiled = (stage_of(networks(num_hidden_layers=4)[0]) for _ in range(2))
    segment = sampled(eager, conditions, params)
    graphs = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for block in compiled.network.get_submodule("model.layers").children():
        block.forward = torch.compile(block.forward, backend=graphs, fullgraph=True)  # type: ignore[method-assign]
    assert_same(sampled(compiled, conditions, params), segment)
    assert graphs.frame_count <= 2, "the first forward is eager, and then only the number of its tokens changes"
    graphs.frame_count = 0
    result = gradients(compiled.network, weighted_sum(compiled.replay(conditions, segment).logp))
    assert_close(result, gradients(eager.network, weighted_sum(eager.replay(conditions, segment).logp)))
    assert graphs.frame_count == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_step_of_all_slots_is_one_graph_for_each_width_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled step, as a program for CUDA graphs needs it: no part of it runs in Python, and no address changes."""
    graphs, addresses = CompileCounter(), set()
    monkeypatch.setattr(decoding, "groups_by_length", lambda lengths: {width_of_all(max(lengths), 256): None})
    conditions, params = prompts_of_lengths((5, 40, 3, 60)), replace(PARAMS, max_new_tokens=90, min_new_tokens=90)
    stage = stage_of(networks()[0])
    eager = sampled(stage, conditions, params)
    torch._dynamo.reset()
    step = torch.compile(slots.DecodeStep.__call__, backend=graphs, fullgraph=True, dynamic=False)

    def sample_ahead(self: decoding.Decoding) -> torch.Tensor:
        assert self.state is not None
        self.cache.reserve(256)
        sampled_tokens = []
        eager_step = slots.DecodeStep(self.forward, self.sampler, self.state, 256)
        for done in range(90):
            width = width_of_all(61 + done, 256)
            tokens, logps = step(eager_step, width, True)
            sampled_tokens.append((tokens, logps))
            addresses.update(t.data_ptr() for t in (self.state.logits, self.state.counters))
            addresses.update(t.data_ptr() for layer in self.cache.layers for t in layer.kv_cache)
        self.unread.append(decoding.Unread.of(self.slots, sampled_tokens))
        self.slots = [None] * len(self.slots)
        return tokens

    monkeypatch.setattr(decoding.Decoding, "_sample_ahead", sample_ahead)
    with unchecked():
        compiled = sampled(stage, conditions, params)
    assert torch.equal(compiled.tokens, eager.tokens) and torch.allclose(compiled.logp, eager.logp, atol=1e-6)
    assert graphs.frame_count == 3, "for the widths 64, 128 and 192"
    assert len(addresses) == 2 + 2 * 2


def test_the_canary_is_the_logits_after_each_prompt(pair: tuple[ARStage, Any]) -> None:
    stage, plain = pair
    prompts = prompts_of_lengths(PROMPTS)["prompt"]
    wanted = [plain(input_ids=row[None]).logits[0, -1] for row in prompts.tokens.split(PROMPTS)]
    assert torch.allclose(stage.canary(prompts).values, torch.stack(wanted), atol=1e-5)
