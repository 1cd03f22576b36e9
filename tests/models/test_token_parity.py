"""Replay equals sampling in float32: ragged rows, pictures, padding, packing, policies that training has sharpened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.models.texts import ENDS, textbook_logp
from tests.source_tree import ROOT
from tests.train.ranks import run_ranks
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.distributed import current
from unirl.models.language.chat import TextCodec
from unirl.models.language.packing import prompts_of
from unirl.models.language.pipeline import TextPipeline
from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline
from unirl.models.qwen_vl.family import QwenVLBundle, QwenVLPipeline
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig
from unirl.train.stack import TrainStack
from unirl.types.conditions import Conditions
from unirl.types.primitives import MediaRef, PromptImages, Texts
from unirl.types.results import values
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

MODELS = [
    pytest.param((Qwen3Bundle, "toy"), id="Qwen3-toy"),
    pytest.param((Qwen3Bundle, "quickstart"), id="Qwen3-quickstart"),
    pytest.param((QwenVLBundle, "toy"), id="Qwen3-VL-toy"),
    pytest.param((QwenVLBundle, "toy-qwen2.5"), id="Qwen2.5-VL-toy", marks=pytest.mark.slow),
    pytest.param((QwenVLBundle, "quickstart"), id="Qwen3-VL-quickstart", marks=pytest.mark.slow),
]
SIBLINGS = 4
STEPS = 8
"""Each of two updates of all weights; enough that the policy writes what it has read."""
LARGEST = 1e-6
"""Difference between log-probs, nats; usually there is none."""


def words(data: str, count: int) -> list[dict[str, Any]]:
    lines = (ROOT / "datasets" / data).read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


def prompts(kind: type, path: str, folder: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Texts of unequal lengths and the files of their pictures: none, one or two."""
    if kind is Qwen3Bundle:
        return [(row["prompt"], ()) for row in words("columns/train.jsonl", 6)]
    if path == "quickstart":
        rows = words("shapes_qa/train_short.jsonl", 6)
        data = ROOT / "datasets/shapes_qa"
        return [(row["prompt"], tuple(str(data / ref["uri"]) for ref in row["media_refs"])) for row in rows]
    files = []
    for number, (width, height) in enumerate([(40, 30), (20, 50), (33, 31)]):
        levels = torch.arange(width * height * 3).mul(37 + 11 * number).remainder(256).to(torch.uint8)
        files.append(str(folder / f"{number}.png"))
        if not Path(files[-1]).exists():
            Image.fromarray(levels.view(height, width, 3).numpy()).save(files[-1])
    return [("hi", ()), ("what is this?", (files[0],)), ("and these two", (files[1], files[2])), ("wide", (files[2],))]


def request(rows: Sequence[tuple[str, tuple[str, ...]]], params: ARSamplingParams, step: int) -> RolloutReq:
    groups = [f"p{i}@{step}" for i in range(len(rows))]
    images = PromptImages(
        per_prompt=[tuple(MediaRef("image", "condition", file) for file in files) for _, files in rows]
    )
    texts = Texts(texts=[text for text, _ in rows])
    seen = any(files for _, files in rows)
    return RolloutReq(
        sample_ids=groups,
        group_ids=groups,
        primitives={"text": texts, "images": images} if seen else {"text": texts},
        metadata=[{} for _ in rows],
        tracks={"text": TrackSpec(sampling=params)},
        purpose="r",
        step=step,
    ).expand(SIBLINGS)


class Run:
    """A policy that is sampled, and learns by rote."""

    def __init__(self, kind: type, path: str, folder: Path, temperature: float) -> None:
        self.bundle = kind(path=path, dtype="fp32")
        family = Qwen3Pipeline if kind is Qwen3Bundle else QwenVLPipeline
        self.pipeline: TextPipeline[Any] = family(self.bundle)
        self.rows = prompts(kind, path, folder)
        self.params = ARSamplingParams(max_new_tokens=40, max_prompt_tokens=256, temperature=temperature)
        rate = 1e-3 if path == "quickstart" else 3e-2
        if path != "quickstart":  # whose random weights would hardly ever end a response
            self.pipeline.stage.codec = TextCodec(self.bundle.codec.tokenizer, ENDS)
        sharding = FSDPConfig(reduce_dtype="fp64")
        optimizer = OptimizerConfig(learning_rate=rate)
        self.backend = FSDPBackend(self.bundle, optimizer_cfg=optimizer, fsdp_cfg=sharding)
        self.stack = TrainStack(
            self.backend, ARGRPO(), self.pipeline.stage, micro_batch_size=5, num_updates_per_batch=2
        )

    def sampled(self, step: int) -> RolloutTrack:
        with torch.no_grad(), self.backend.sampling():
            return self.pipeline.generate(request(self.rows, self.params, step), 6).tracks["text"]

    def replayed(self, track: RolloutTrack) -> Tensor:
        with torch.no_grad():
            result: Tensor = self.pipeline.stage.replay(track.conditions, track.segment).logp
        return result

    def learned(self, track: RolloutTrack) -> list[dict[str, float]]:
        """The metrics of two updates that make a sample likelier."""
        result = self.stack.train_track(track.replace(rewards=track.weight, advantages=track.weight))
        return [values(update) for update in result.updates]


@pytest.fixture(scope="module", params=MODELS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    kind, path = request.param
    return Run(kind, path, tmp_path_factory.mktemp("pictures"), temperature=0.8 if path == "toy" else 1.0)


def test_replay_has_the_log_probs_of_sampling_before_and_after_updates_that_sharpen(run: Run) -> None:
    first = run.sampled(0)
    assert first.segment.lengths.unique().numel() > 1, "rows are ragged"
    assert float((run.replayed(first) - first.segment.logp).abs().max()) < LARGEST
    for _ in range(STEPS):
        result = run.learned(first)
        for name in ("ratio_mean", "ratio_min", "ratio_max"):
            assert result[0][f"train/{name}"] == 1.0, "what the first update trains is its own anchor"
        assert result[1]["train/ratio_std"] > 0.0
    track = run.sampled(1)
    assert float(track.segment.logp.mean()) > 0.85 * float(first.segment.logp.mean()), "the policy is sharper"
    assert float((run.replayed(track) - track.segment.logp).abs().max()) < LARGEST


def test_order_neighbours_and_the_number_of_rows_change_no_log_prob(run: Run) -> None:
    track = run.sampled(0)
    whole = run.replayed(track).split(track.segment.lengths.tolist())
    for order in ([3, 1, 2], [0], list(reversed(range(len(track))))):
        some = run.replayed(track.select(order)).split(track.segment.lengths[order].tolist())
        assert all(torch.equal(one, whole[row]) for row, one in zip(order, some, strict=True))


def on_ranks(folder: Path) -> list[Any]:
    """By model: after updates on this rank's share, all rows are sampled; of these, log-probs by both ways."""
    result: list[Any] = []
    for kind, path in [(Qwen3Bundle, "toy"), (QwenVLBundle, "toy"), (QwenVLBundle, "toy-qwen2.5")]:
        run, rank = Run(kind, path, folder, 1.0), current()
        first = run.sampled(0)
        for _ in range(2):
            run.learned(first.select(list(range(rank.dp_rank, len(first), rank.dp_size))))
        track = run.sampled(1)
        result.append([track.segment.tokens, track.segment.logp, run.replayed(track)])
    return result


@pytest.mark.slow
def test_on_two_ranks_replay_equals_sampling_and_both_are_those_of_one(tmp_path: Path) -> None:
    [alone] = run_ranks(1, on_ranks, tmp_path)
    for rank in run_ranks(2, on_ranks, tmp_path):
        for (tokens, sampled, replayed), (wanted_tokens, wanted, _) in zip(rank, alone, strict=True):
            assert np.array_equal(tokens, wanted_tokens)
            assert float(np.abs(sampled - wanted).max()) < 1e-4  # Adam divides rounding by rounding
            assert float(np.abs(replayed - sampled).max()) < LARGEST


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_of_transformers_have_the_log_probs_of_a_sample(side: str) -> None:
    """Its own network, all rows in one batch, masked where they are filled up."""
    pipeline = Qwen3Pipeline(Qwen3Bundle(path="toy", dtype="fp32"))
    params = ARSamplingParams(max_new_tokens=24, max_prompt_tokens=256)
    rows = prompts(Qwen3Bundle, "toy", Path())
    track = pipeline.generate(request(rows, params, 0), 6).tracks["text"]
    plain = pipeline.bundle.untrained()
    theirs = padded_logp(plain, track.conditions, track.segment, side)
    assert float((theirs - track.segment.logp).abs().max()) < 1e-5
    assert float((textbook_logp(plain, track.conditions, track.segment) - theirs).abs().max()) < 1e-5


def padded_logp(plain: Any, conditions: Conditions, segment: TextSegment, side: str) -> Tensor:
    """[sum L] log-probs of responses, by one forward over rows that are filled up on one side."""
    prompt = prompts_of(conditions)
    pieces = zip(
        prompt.tokens.split(prompt.lengths.tolist()), segment.tokens.split(segment.lengths.tolist()), strict=True
    )
    whole = [torch.cat(pair) for pair in pieces]
    width = max(map(len, whole))
    ids, mask = torch.zeros(2, len(whole), width, dtype=torch.int64)
    starts = [width - len(row) if side == "left" else 0 for row in whole]
    for i, (row, start) in enumerate(zip(whole, starts, strict=True)):
        ids[i, start : start + len(row)], mask[i, start : start + len(row)] = row, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logps = plain(input_ids=ids, attention_mask=mask, position_ids=positions).logits.log_softmax(-1)
    result = []
    for i, (row, start, length) in enumerate(zip(whole, starts, segment.lengths.tolist(), strict=True)):
        first = start + len(row) - length
        result.append(logps[i, first - 1 : first - 1 + length].gather(1, row[-length:, None])[:, 0])
    return torch.cat(result)
