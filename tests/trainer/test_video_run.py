"""A whole run on the toy Wan 2.1: videos from the rollout to the reward and to the run directory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.run_files import lines_of, metrics_of
from tests.trainer.test_loop import run
from unirl.cli.main import main
from unirl.tracking.media import read_samples
from unirl.tracking.videos import STRIP_GAP, VideoMedia, can_write_mp4

pytestmark = pytest.mark.slow

WAN = (
    "bundle._target_=unirl.models.wan21.family.Wan21Bundle",
    "pipeline._target_=unirl.models.wan21.family.Wan21Pipeline",
    "reward.backend._target_=unirl.reward.local.video_pickscore.VideoPickScoreRewardScorer",
    "sampling.num_frames=5",
    "num_rollouts=1",
    "tracking.sample_steps=1",
    "tracking.max_samples=4",
    "evaluation.eval_steps=1",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, *WAN)
    return folder


def test_a_run_keeps_its_videos_and_reads_them_back(finished) -> None:
    folder = finished / "samples/step-000001"
    rows = list(lines_of(folder / "manifest.jsonl"))
    assert len(rows) == 4 and {row["medium"] for row in rows} == {"video"}
    result = read_samples(rows, folder)
    assert isinstance(result.media, VideoMedia)
    for row, clip in zip(rows, result.media.videos, strict=True):
        height, width = clip.pixels.shape[1:3]
        assert row["facts"]["size"] == f"{width}x{height}" and row["facts"]["frames"] == len(clip.pixels) == 5
        strip = np.asarray(Image.open(folder / f"{Path(row['file']).stem}-strip.png"))
        assert strip.shape[1] == 5 * width * (128 // width) + 4 * STRIP_GAP
        assert (folder / row["file"]).with_suffix(".mp4").exists() == can_write_mp4()
    assert (folder / "contact_sheet.png").exists() and (folder / "samples.md").exists()


def test_a_run_scores_videos_and_evaluates_them(finished) -> None:
    (row,) = metrics_of(finished)
    assert row["reward/video_pickscore_mean"] == row["rollout/reward_mean"]
    scores = json.loads((finished / "eval/step-000001/scores.json").read_text())
    assert {sample["medium"] for sample in scores["samples"]} == {"video"}


def test_videos_are_drawn_with_its_checkpoint(finished, tmp_path, capsys) -> None:
    asked = ["sample", str(finished), "-p", "a cat", "-p", "a dog", "--count", "2", "--out", str(tmp_path / "drawn")]
    assert main(asked) == 0
    assert "4 videos" in capsys.readouterr().out
    names = [path.name for path in sorted((tmp_path / "drawn").glob("*.webp"))]
    assert names == ["p00-s00.webp", "p00-s01.webp", "p01-s00.webp", "p01-s01.webp"]
    assert (tmp_path / "drawn/grid.png").exists()
