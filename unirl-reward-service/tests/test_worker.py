"""Rows reach a worker's scorer as a run's own would, and one that fails costs no other its score."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from faulty_scorers import Obedient
from reward_service.faults import noise
from reward_service.frames import ItemScores, LoadScorer, ScorerRow
from reward_service.worker import load, outcomes, pixels

from unirl.config.errors import ConfigError, DependencyError
from unirl.reward.base import RewardScorer, single
from unirl.reward.client.wire import ItemError, MediaPayload
from unirl.reward.local.pickscore import PickScoreRewardScorer, PickScoreSpec
from unirl.types.primitives import Videos
from unirl.types.reward import RewardRequest, RewardResponse


def medium(*shape: int, seed: int = 0) -> MediaPayload:
    return MediaPayload(format="raw", data=noise(shape, seed).tobytes(), shape=shape)


def test_pixels_are_the_values_that_a_rollout_rounds_to():
    every = MediaPayload(format="raw", data=bytes(range(256)) * 3, shape=(16, 16, 3))
    levels = torch.frombuffer(bytearray(every.data), dtype=torch.uint8).view(16, 16, 3).permute(2, 0, 1)
    assert torch.equal(pixels(every), (levels.double() / 255).float())
    assert torch.equal(pixels(every), (pixels(every) * 255).round() / 255)


def test_images_of_several_sizes_get_the_same_scores_as_alone():
    scorer = PickScoreRewardScorer(config=PickScoreSpec(path="toy", batch_size=4, device="cpu"))
    sizes = [(24, 24), (24, 32), (24, 24), (40, 24), (24, 32)]
    rows = [ScorerRow(f"r{i}", prompt=f"p{i}", image=medium(*size, 3, seed=i)) for i, size in enumerate(sizes)]
    together = outcomes(scorer, rows, "pick")
    assert together == [outcomes(scorer, [row], "pick")[0] for row in rows]
    for row, result in zip(rows, together, strict=True):
        request = RewardRequest(sample_ids=["a"], prompts=[row.prompt], images=pixels(row.image)[None])
        total = float(scorer.score(request).total)
        assert result == ItemScores({"total": total, "pickscore": total})


class Seen(RewardScorer):
    """Notes what it is given; the total is the number of frames."""

    reads = ("videos", "metadata")
    requests: list[RewardRequest]

    def score(self, request: RewardRequest) -> RewardResponse:
        self.requests = [*getattr(self, "requests", []), request]
        return single("frames", request.videos.offsets.diff().float())


def test_videos_are_concatenated_with_the_metadata_of_their_rows():
    shapes = [(2, 8, 8, 3), (5, 8, 8, 3), (3, 8, 16, 3)]
    rows = [ScorerRow(str(i), video=medium(*shape, seed=i), metadata={"n": i}) for i, shape in enumerate(shapes)]
    scorer = Seen()
    assert [result.parts["total"] for result in outcomes(scorer, rows, "seen")] == [2.0, 5.0, 3.0]
    first, second = scorer.requests
    assert isinstance(first.videos, Videos) and first.videos.frames.shape == (7, 3, 8, 8)
    assert first.videos.offsets.tolist() == [0, 2, 7] and second.videos.frames.shape == (3, 3, 8, 16)
    assert [first.metadata, second.metadata] == [[{"n": 0}, {"n": 1}], [{"n": 2}]]
    expected = np.moveaxis(noise((5, 8, 8, 3), 1), -1, 1) / 255
    assert np.allclose(first.videos.frames[2:].numpy(), expected, atol=1e-7)


def test_failed_rows_are_isolated():
    rows = [ScorerRow(str(i), prompt=prompt) for i, prompt in enumerate(["a", "raise", "ccc", "nan", "eeeee"])]
    result = outcomes(Obedient(), rows, "odd")
    assert [each.kind if isinstance(each, ItemError) else each.parts["total"] for each in result] == [
        1.0,
        "failed",
        3.0,
        "not_finite",
        5.0,
    ]


def build(**changes) -> LoadScorer:
    fields = {"reward": "a", "scorer": "pickscore", "params": {}, "plugins": [], "toy": True, "needs_cuda": False}
    return LoadScorer(**fields | changes)


def test_a_scorer_is_loaded_with_its_weights():
    assert load(build()).reads == ("prompts", "images")


class ReadsLengths(Obedient):
    reads = ("prompts", "lengths")


def test_a_scorer_that_reads_columns_that_are_not_sent_is_refused(monkeypatch):
    monkeypatch.setattr("faulty_scorers.ReadsLengths", ReadsLengths, raising=False)
    ReadsLengths.__module__ = "faulty_scorers"
    with pytest.raises(ConfigError, match="reads lengths, which clients do not send"):
        load(build(scorer="faulty_scorers.ReadsLengths", plugins=["faulty_scorers"]))


def test_a_missing_device_is_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DependencyError, match="needs a CUDA device"):
        load(build(needs_cuda=True))
