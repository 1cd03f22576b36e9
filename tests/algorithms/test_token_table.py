"""The toy policy over tokens is what its table says: sampling, replay, temperature, truncation."""

import math

import pytest
import torch

from tests.tokens import END, TokenSampling, TokenTable, token_stage, token_track, truncated
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.types.results import values


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_replay_on_unchanged_weights_gives_the_recorded_log_probs(temperature: float) -> None:
    stage = token_stage()
    track = token_track(stage, params=TokenSampling(temperature=temperature))
    assert torch.equal(stage.replay(track.conditions, track.segment).logp, track.segment.logp)
    result = values(ARGRPO(old_logp_source="rollout").loss(stage, track, (0,)).metrics)
    assert (result["train/ratio_mean"], result["train/ratio_std"]) == (1.0, 0.0)


def test_the_log_prob_is_that_of_tempered_logits() -> None:
    stage = token_stage(vocabulary=3, prompts=2)
    track = token_track(stage, params=TokenSampling(temperature=0.5))
    row = track.slice(5, 6)  # of prompt 1
    logits = stage.table.table[1].detach() / 0.5
    previous = [3, *row.segment.tokens[:-1].tolist()]
    want = [float(logits[p].log_softmax(0)[t]) for p, t in zip(previous, row.segment.tokens.tolist(), strict=True)]
    assert row.segment.logp.tolist() == pytest.approx(want, rel=1e-6)
    replay = stage.replay(row.conditions, row.segment, entropy=True)
    assert replay.entropy is not None
    entropy = [float(torch.distributions.Categorical(logits=logits[p]).entropy()) for p in previous]
    assert replay.entropy.tolist() == pytest.approx(entropy, rel=1e-5)


def test_values_are_those_of_the_state_before_each_token() -> None:
    stage = token_stage()
    stage.value_head = stage.build_value_head(width=6, seed=0)
    stage.value_head.output_layer.weight.data.fill_(0.5)
    track = token_track(stage)
    said = stage.replay(track.conditions, track.segment, values="head").values
    assert said is not None and said.dtype == torch.float32
    assert stage.replay(track.conditions, track.segment).values is None
    known: dict[tuple[int, int], float] = {}
    rows = zip(
        said.split(track.segment.lengths.tolist()),
        track.segment.tokens.split(track.segment.lengths.tolist()),
        strict=True,
    )
    for row, (values_, tokens) in enumerate(rows):
        prompt = int(track.conditions["prompt"].number[row])  # type: ignore[attr-defined]
        for value, previous in zip(values_.tolist(), [5, *tokens.tolist()], strict=False):
            assert known.setdefault((prompt, previous), value) == pytest.approx(value, abs=1e-6)
    assert len(known) > 6 and len(set(known.values())) == len(known)


def test_a_row_is_replayed_alone_as_among_others() -> None:
    stage = token_stage()
    track = token_track(stage)
    for i in range(len(track)):
        row = track.slice(i, i + 1)
        assert torch.equal(stage.replay(row.conditions, row.segment).logp, row.segment.logp)


def test_responses_end_after_their_end_token_and_depend_on_their_id_alone() -> None:
    stage = token_stage()
    track = token_track(stage, prompts=3, siblings=8)
    rows = track.segment.tokens.split(track.segment.lengths.tolist())
    assert all(END not in row[:-1] and (row[-1] == END or len(row) == 6) for row in rows)
    assert len({len(row) for row in rows}) > 2
    fewer = token_track(stage, prompts=2, siblings=8)
    assert torch.equal(fewer.segment.tokens, track.slice(0, 16).segment.tokens)


def test_tokens_are_drawn_as_often_as_the_table_says() -> None:
    stage = token_stage(vocabulary=4)
    count = 4000
    track = token_track(stage, prompts=1, siblings=count, params=TokenSampling(max_new_tokens=1, ends=False))
    share = torch.bincount(track.segment.tokens, minlength=4) / count
    p = stage.table.table[0, 4].detach().softmax(0)
    assert bool(((share - p).abs() < 4 * (p * (1 - p) / count).sqrt()).all())


def test_truncation_keeps_the_likeliest_tokens() -> None:
    p = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    assert truncated(p, TokenSampling(top_p=0.7)).tolist() == [pytest.approx([0, 4 / 7, 3 / 7, 0])]
    assert truncated(p, TokenSampling(top_p=0.71)).tolist() == [pytest.approx([0, 4 / 9, 3 / 9, 2 / 9])]
    assert truncated(p, TokenSampling(top_k=1)).tolist() == [[0, 1, 0, 0]]
    assert truncated(p, TokenSampling(top_k=2, top_p=0.6)).tolist() == [pytest.approx([0, 4 / 7, 3 / 7, 0])]
    assert truncated(p, TokenSampling(top_k=2, top_p=0.5)).tolist() == [[0, 1, 0, 0]]  # 4/7 of what top_k leaves
    assert torch.allclose(truncated(p, TokenSampling()), p)


def test_the_recorded_log_prob_of_a_truncated_sample_is_that_of_the_whole_distribution() -> None:
    stage = token_stage()
    track = token_track(stage, siblings=16, params=TokenSampling(top_p=0.7))
    assert torch.equal(stage.replay(track.conditions, track.segment).logp, track.segment.logp)


def test_an_engine_that_renormalises_biases_the_ratio_to_the_mass_it_kept() -> None:
    stage = token_stage(vocabulary=4)
    params = TokenSampling(max_new_tokens=1, top_p=0.7, ends=False)
    track = token_track(stage, prompts=1, siblings=64, params=params, context=None)
    p = stage.table.table[0, 4].detach().softmax(0)
    engine = truncated(p[None], params)[0]
    kept = float(p[engine > 0].sum())
    reported = track.replace(segment=track.segment.replace(logp=engine[track.segment.tokens].log()))
    result = values(ARGRPO(old_logp_source="rollout").loss(stage, reported, (0,)).metrics)
    assert 0.7 <= kept < 0.95
    assert result["train/ratio_mean"] == pytest.approx(kept, rel=1e-5)
    gap = ARGRPO().parity(reported, (0,), {"logp": track.segment.logp})["rollout/parity_absdiff_max"].value
    assert gap == pytest.approx(-math.log(kept), rel=1e-4)


def test_an_uncertain_table_is_uniform() -> None:
    assert torch.equal(TokenTable(vocabulary=4)(torch.tensor([1]), torch.tensor([2])), torch.zeros(1, 4))
