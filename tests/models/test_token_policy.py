"""One forward over packed tokens: against transformers' own, and in memory that V and L do not multiply in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness import memory
from tests.models.texts import networks, prompts_of_lengths
from unirl.models.language import policy as token_policy
from unirl.models.language.attention import PackedAttention
from unirl.models.language.packing import pack_prompts
from unirl.models.language.policy import NextTokenLogits, NextTokenLogProbs

LENGTHS = (5, 9, 30, 1)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return networks(tie_word_embeddings=request.param)


def inputs(ask: Any) -> Any:
    packed = pack_prompts(prompts_of_lengths(LENGTHS), range(len(LENGTHS)))
    return packed.inputs(PackedAttention(packed.lengths), ask)


def test_logits_are_those_of_transformers_row_by_row(pair: tuple[Any, Any]) -> None:
    policy, plain = pair
    rows = prompts_of_lengths(LENGTHS)["prompt"].tokens.split(LENGTHS)
    ours = policy(inputs(NextTokenLogits(torch.arange(sum(LENGTHS)))))["logits"]
    assert torch.allclose(ours, torch.cat([plain(input_ids=row[None]).logits[0] for row in rows]), atol=1e-5)


def test_parameters_keep_the_names_of_transformers(pair: tuple[Any, Any]) -> None:
    policy, plain = pair
    assert [name for name, _ in policy.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert policy.state_dict().keys() == plain.state_dict().keys()


def likelihood(**changes: Any) -> NextTokenLogProbs:
    values = {"index": torch.arange(40), "targets": torch.arange(40), "temperature": 0.7, "vocab_size": 261}
    return NextTokenLogProbs(**values | changes)


def test_log_probs_and_entropy_are_those_of_the_tempered_softmax(pair: tuple[Any, Any]) -> None:
    policy, _ = pair
    logits = policy(inputs(NextTokenLogits(torch.arange(40))))["logits"].double() / 0.7
    wanted = torch.distributions.Categorical(logits=logits)
    result = policy(inputs(likelihood(entropy=True)))
    assert torch.allclose(result["logp"].double(), wanted.log_prob(torch.arange(40)), atol=1e-5)
    assert torch.allclose(result["entropy"].double(), wanted.entropy(), atol=1e-5)


def gradients(policy: nn.Module, ask: NextTokenLogProbs) -> list[Tensor]:
    result = policy(inputs(ask))
    return list(torch.autograd.grad(result["logp"].sum() + result["entropy"].sum(), list(policy.parameters())))


def test_the_pieces_of_the_head_change_neither_values_nor_gradients(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _ = pair
    whole = policy(inputs(likelihood()))["logp"], gradients(policy, likelihood(entropy=True))
    monkeypatch.setattr(token_policy, "LOGITS_AT_ONCE", 261 * 5)
    pieces = policy(inputs(likelihood(multiple=4)))["logp"], gradients(policy, likelihood(entropy=True, multiple=4))
    assert torch.equal(whole[0], pieces[0])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole[1], pieces[1], strict=True))


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_in_parts_have_the_gradients_of_the_whole_in_float64(
    monkeypatch: pytest.MonkeyPatch, entropy: bool
) -> None:
    """Against one log-softmax over all tokens, for the hidden states and for the head, weighted token by token."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(12, 261, bias=False, dtype=torch.float64)
    weights = torch.linspace(-1, 1, 40, dtype=torch.float64)
    inputs = [hidden, head.weight]

    logps = (head(hidden[:40]) / 0.7).log_softmax(1)
    wanted = (logps.gather(1, torch.arange(40)[:, None])[:, 0] * weights).sum()
    if entropy:
        wanted = wanted - ((logps.exp() * logps).sum(1) * weights).sum()
    monkeypatch.setattr(token_policy, "LOGITS_AT_ONCE", 261 * 7)
    outputs = likelihood(entropy=entropy)(head, hidden)
    result = (outputs["logp"] * weights).sum() + ((outputs["entropy"] * weights).sum() if entropy else 0.0)
    assert torch.allclose(result, wanted, rtol=1e-12)
    pairs = zip(torch.autograd.grad(result, inputs), torch.autograd.grad(wanted, inputs), strict=True)
    assert all(torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12) for ours, theirs in pairs)


def test_hidden_states_are_given_back_where_they_are_asked_for(pair: tuple[Any, Any]) -> None:
    policy, plain = pair
    assert "hidden" not in policy(inputs(likelihood()))
    hidden = policy(inputs(likelihood(hidden=True)))["hidden"]
    assert torch.allclose(plain.lm_head(hidden), policy(inputs(NextTokenLogits(torch.arange(40))))["logits"], atol=1e-6)


def test_the_memory_of_log_probs_is_that_of_one_piece_for_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """[L, V] alone would be 16 MiB at the longer length; forward and backward take a few pieces of 256 KiB."""
    vocab, width = 2**13, 8
    head = nn.Linear(width, vocab, bias=False)
    monkeypatch.setattr(token_policy, "LOGITS_AT_ONCE", 2**16)

    def run(length: int) -> None:
        hidden = torch.zeros(length, width, requires_grad=True)
        ask = NextTokenLogProbs(
            index=torch.arange(length),
            targets=torch.zeros(length, dtype=torch.int64),
            temperature=1.0,
            vocab_size=vocab,
            entropy=True,
        )
        result = ask(head, hidden)
        (result["logp"].sum() + result["entropy"].sum()).backward()

    run(8)
    short, long = (memory(lambda length=length: run(length)).peak for length in (128, 512))
    assert long < 4 * 2**20
    assert long - short < 2**18
