"""Responses that pause and go on: the same bits as without a pause, and the version of every token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models.texts import networks, prompts_of_lengths, sampled, stage_of
from unirl.models.language.decoding import LookAhead
from unirl.models.language.stage import ARStage
from unirl.sde.noise import NoiseSource
from unirl.trainer.slices import beginnings, oldest_versions
from unirl.types.primitives import StartedResponses
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

PROMPTS = (5, 40, 1, 3, 70, 12)
PARAMS = ARSamplingParams(max_new_tokens=40)


@pytest.fixture(scope="module")
def stage() -> ARStage:
    return stage_of(networks()[0])


def in_slices(stage: ARStage, params: ARSamplingParams, size: int, slots: int = 4) -> tuple[TextSegment, int]:
    """The responses in slices of `size` tokens of versions 0, 1, ..., and the number of slices."""
    conditions, version = prompts_of_lengths(PROMPTS), 0
    waiting, started = list(range(len(PROMPTS))), StartedResponses.empty(len(PROMPTS), size)
    ended: dict[int, TextSegment] = {}
    while waiting:
        some, ids = {"prompt": conditions["prompt"].select(waiting)}, [f"row{row}" for row in waiting]
        segment = stage.go_on(some, params, NoiseSource(7, "r", 0), ids, slots, started, version)
        version += 1
        over = (segment.finished | (segment.lengths >= params.max_new_tokens)).tolist()
        ended |= {row: segment.select([place]) for place, row in enumerate(waiting) if over[place]}
        rest = [place for place, is_over in enumerate(over) if not is_over]
        waiting, started = [waiting[place] for place in rest], beginnings(segment.select(rest), size)
    return TextSegment.concat([ended[row] for row in range(len(PROMPTS))]), version


@pytest.mark.parametrize(
    ("params", "size"),
    [
        *((PARAMS, size) for size in (1, 3, 7, 39, 40, 100)),
        (replace(PARAMS, temperature=0.6, top_k=20, top_p=0.9), 5),
        (replace(PARAMS, temperature=0.0), 4),
        (replace(PARAMS, min_new_tokens=9), 4),
    ],
    ids=str,
)
def test_slices_of_unchanged_weights_are_the_whole_response(
    stage: ARStage, params: ARSamplingParams, size: int
) -> None:
    whole, (sliced, number) = sampled(stage, prompts_of_lengths(PROMPTS), params), in_slices(stage, params, size)
    for name in ("tokens", "logp", "loss_mask", "offsets", "finished"):
        assert torch.equal(sliced.__dict__[name], whole.__dict__[name]), name
    assert number == -(-int(whole.lengths.max()) // size)


def test_every_token_has_the_version_of_its_slice(stage: ARStage) -> None:
    segment, _ = in_slices(stage, PARAMS, 7)
    assert segment.versions is not None
    for row in range(len(segment)):
        begin, end = segment.offsets[row : row + 2].tolist()
        assert segment.versions[begin:end].tolist() == [place // 7 for place in range(end - begin)]
    assert oldest_versions(segment).tolist() == [0] * len(segment)


def test_new_weights_change_the_tokens_after_the_pause_alone(stage: ARStage) -> None:
    conditions, ids = prompts_of_lengths(PROMPTS), [f"row{i}" for i in range(len(PROMPTS))]
    whole, size = sampled(stage, conditions, PARAMS), 6
    long = [row for row in range(len(PROMPTS)) if int(whole.lengths[row]) > size + 6]
    some = {"prompt": conditions["prompt"].select(long)}
    noise, names = NoiseSource(7, "r", 0), [ids[row] for row in long]
    first = stage.go_on(some, PARAMS, noise, names, 4, StartedResponses.empty(len(long), size), 3)
    other = stage_of(networks()[0])
    with torch.no_grad():
        for parameter in other.network.parameters():
            parameter.mul_(1.3)
    second = other.go_on(some, PARAMS, noise, names, 4, beginnings(first, 100), 4)
    replayed = other.replay(some, second)
    for row, place in zip(long, range(len(long)), strict=True):
        begin, end = second.offsets[place : place + 2].tolist()
        before = whole.tokens[whole.offsets[row] : whole.offsets[row] + size]
        assert torch.equal(second.tokens[begin : begin + size], before)
        assert second.versions[begin:end].tolist() == [3] * size + [4] * (end - begin - size)
        # The log-probs of the beginning are those of the weights that sampled it, and the others those of the new ones.
        assert torch.equal(
            second.logp[begin : begin + size], whole.logp[whole.offsets[row] : whole.offsets[row] + size]
        )
        assert torch.equal(second.logp[begin + size : end], replayed.logp[begin + size : end])
        assert not torch.equal(second.logp[begin : begin + size], replayed.logp[begin : begin + size])


def test_a_device_that_runs_ahead_pauses_at_the_same_tokens(stage: ARStage, monkeypatch) -> None:
    whole = sampled(stage, prompts_of_lengths(PROMPTS), PARAMS)
    monkeypatch.setattr("unirl.models.language.decoding.look_ahead", lambda device, builder: LookAhead(8, 1))
    for size in (3, 11):
        sliced, _ = in_slices(stage, PARAMS, size)
        assert torch.equal(sliced.tokens, whole.tokens)
        assert torch.equal(sliced.logp, whole.logp)
