"""What is drawn by which number, how responses end, and what tools write into them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from tests.models.texts import networks, prompts_of_lengths, sampled, stage_of
from tests.tokens import top_k_top_p
from unirl.models.language.chat import TextCodec
from unirl.models.language.decoding import Response, ResponseBuilder
from unirl.models.language.sampling import inverse_cdf, sample_tokens, top_k_tokens, top_p_weights
from unirl.models.language.tools import Calculator
from unirl.models.loading.toy_tokenizers import qwen3_tokenizer
from unirl.testing.second_device import second_devices
from unirl.types.sampling import ARSamplingParams

# Drawing


def test_a_uniform_picks_the_token_whose_share_of_the_unit_it_falls_into() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 1 - 2**-24])
    drawn = inverse_cdf(weights.expand(6, -1), uniforms)
    assert drawn.tolist() == [1, 1, 3, 3, 4, 4], "the ends are exact, and weight 0 is never drawn"


def test_draws_follow_the_distribution_over_a_large_vocabulary() -> None:
    """150000 tokens of probability 1/150000: each uniform finds its own token, where float32 sums lose count."""
    count = 150_000
    weights = torch.full((1, count), 1 / count, dtype=torch.float64)
    uniforms = torch.arange(0.5, 2**24, 2**24 / 100, dtype=torch.float64) / 2**24
    drawn = torch.cat([inverse_cdf(weights, u[None]) for u in uniforms])
    assert torch.equal(drawn, (uniforms * count).long())


def test_truncation_keeps_the_likeliest_then_those_that_reach_the_mass() -> None:
    logps = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()

    def kept(top_k: int, top_p: float) -> list[int]:
        tokens = top_k_tokens(logps, top_k) if top_k else torch.arange(4)[None]
        return tokens[top_p_weights(logps.gather(1, tokens), top_p) > 0].tolist()

    assert kept(2, 1.0) == [1, 3]
    assert kept(0, 0.65) == [1, 3]
    assert kept(2, 0.5) == [1], "shares are of what top_k left"
    assert kept(3, 1e-9) == [1], "one token always stays"


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (50, 1.0), (50, 0.9), (1024, 0.9), (0, 0.9), (0, 0.999), (9999, 0.5)]
)
def test_truncated_sampling_gives_the_tokens_of_a_stable_sort_of_the_vocabulary(top_k: int, top_p: float) -> None:
    """Also with ties: rounded logits have many, and forbidden tokens are equally impossible."""
    generator = torch.Generator().manual_seed(top_k)
    logits = 4 * torch.randn(64, 3001, generator=generator)
    logits[16:32] = logits[16:32].round()
    logits[32:40] = 0.0
    logits[40:44, 30:] = -math.inf
    logits[44:48] *= 400  # most probabilities underflow to 0
    logps, uniform = logits.log_softmax(1), torch.rand(64, generator=generator)
    weights = top_k_top_p(logps.double().exp(), top_k, top_p)
    params = ARSamplingParams(top_k=top_k, top_p=top_p)
    for u in (uniform, torch.zeros(64), torch.full((64,), 1 - 2**-24)):
        assert torch.equal(sample_tokens(logps, u, params), inverse_cdf(weights, u))


def test_sampling_does_not_wait_for_the_device() -> None:
    with second_devices() as devices:
        logps, uniform = torch.zeros(3, 40, device="emulated:0").log_softmax(1), torch.zeros(3, device="emulated:0")
        for top_k, top_p in ((0, 1.0), (0, 0.9), (5, 0.9)):
            sample_tokens(logps, uniform, ARSamplingParams(top_k=top_k, top_p=top_p))
        assert not devices.syncs


def test_temperature_zero_takes_the_likeliest_whatever_is_drawn() -> None:
    logps = torch.tensor([[-3.0, -0.1, -2.5]])
    params = ARSamplingParams(temperature=0.0)
    assert [sample_tokens(logps, torch.tensor([u]), params).item() for u in (0.0, 0.5, 0.999)] == [1, 1, 1]


# ResponseBuilder

CODEC = TextCodec(qwen3_tokenizer(), (258,))


def written(text: str, params: ARSamplingParams | None = None, tools: Calculator | None = None) -> Response:
    """The response that grows while the model writes `text` wherever it is let."""
    builder = ResponseBuilder(CODEC, params or ARSamplingParams(), tools)
    response, rest = Response(0, "row0"), CODEC.encode(text)
    while (rest or response.forced) and not response.is_done:
        token = -1 if response.forced else rest.pop(0)
        builder.append(response, token, -1.0)
    return response


def spelled(response: Response, sampled: bool = True) -> str:
    return CODEC.spell([t for t, own in zip(response.tokens, response.sampled, strict=True) if own == sampled])


@pytest.mark.parametrize(
    ("stop", "wanted"), [(("\n\n",), "a\n\n"), (("x", "b"), "a\n\nb"), (("absent",), "a\n\nb\n\nc")]
)
def test_a_response_ends_with_the_first_stop_string(stop: Sequence[str], wanted: str) -> None:
    response = written("a\n\nb\n\nc", ARSamplingParams(stop=tuple(stop)))
    assert spelled(response) == wanted and response.finished == (stop != ("absent",))


def test_a_stop_string_counts_from_the_shortest_length_on() -> None:
    assert spelled(written("a.b.c.d", ARSamplingParams(stop=(".",), min_new_tokens=3))) == "a.b."


def test_a_stop_string_of_several_bytes_to_a_letter_is_found() -> None:
    letters = "\u00e4\u6f22\u5b57"
    assert spelled(written(f"abc{letters}def", ARSamplingParams(stop=(letters,)))) == f"abc{letters}"


def test_an_end_token_finishes_at_the_longest_length_too() -> None:
    at_limit = written("abc<|im_end|>", ARSamplingParams(max_new_tokens=4))
    assert (at_limit.finished, at_limit.truncated) == (True, False)
    beyond = written("abcd<|im_end|>", ARSamplingParams(max_new_tokens=4))
    assert (beyond.finished, beyond.truncated) == (False, True)


def test_a_tool_answers_behind_its_call_and_its_words_are_not_sampled() -> None:
    response = written("it is <calculator>6 * 7</calculator>, so.<|im_end|>", tools=Calculator())
    assert CODEC.spell(response.tokens) == "it is <calculator>6 * 7</calculator><result>42</result>, so.<|im_end|>"
    assert spelled(response, sampled=False) == "<result>42</result>"


def test_an_answer_is_cut_at_the_longest_length() -> None:
    response = written("<calculator>1</calculator>", ARSamplingParams(max_new_tokens=30), Calculator())
    assert len(response.tokens) == 30 and response.truncated and spelled(response, sampled=False) == "<res"


def test_tools_in_a_rollout_leave_other_rows_as_they_are() -> None:
    """A tool that answers every mark, of which special tokens spell none."""

    class Echo:
        closings = tuple("!#$%&()*+,-.:;=?@[]^")
        instruction = ""

        def answer(self, text: str) -> str | None:
            return "123"

    network, conditions = networks()[0], prompts_of_lengths([5, 40, 3, 12])
    params = ARSamplingParams(max_new_tokens=60)
    free, told = (sampled(stage_of(network, tools), conditions, params) for tools in (None, Echo()))
    assert bool(free.loss_mask.all())
    answered = 0
    rows = zip(*(s.tokens.split(s.lengths.tolist()) for s in (free, told)), strict=True)
    for (plain, row), mask in zip(rows, told.loss_mask.split(told.lengths.tolist()), strict=True):
        calls = torch.isin(plain, torch.tensor([ord(mark) for mark in Echo.closings])).nonzero().flatten()
        if len(calls) == 0 or int(calls[0]) + 1 >= 60:
            assert torch.equal(plain, row) and bool(mask.all())
            continue
        answered += 1
        first = int(calls[0]) + 1
        assert torch.equal(plain[:first], row[:first])
        assert CODEC.spell(row[first : first + 3].tolist()) == "123"[: 60 - first]
        assert not mask[first : first + 3].any() and bool(mask[:first].all())
    assert answered
    stage = stage_of(network)
    with torch.no_grad():
        replayed = stage.replay(conditions, told).logp
    assert float((replayed - told.logp).abs().max()) < 1e-5, "context is part of what replay reads"
