"""The shipped pairs: the chosen picture shows what is asked for, the rejected one does not; they can be drawn anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.source_tree import ROOT
from unirl.data.data_source import MultimodalRLDataSource
from unirl.data.datasets import load_prompts
from unirl.reward.local.shapes import ShapesRewardScorer
from unirl.rollout.engine.recorded.engine import read_images
from unirl.types.reward import RewardRequest

SHIPPED = ROOT / "datasets" / "preferences"


@pytest.fixture(scope="module")
def pairs():
    data = MultimodalRLDataSource(data_path=str(SHIPPED / "train.jsonl"), recorded=("chosen", "rejected"))
    return data.prompts


def test_the_chosen_shows_what_is_asked_for_and_the_rejected_misses_one_thing(pairs) -> None:
    asked = {prompt.text: prompt.metadata for prompt in load_prompts(ROOT / "datasets/shapes/train.jsonl")}
    assert [prompt.text for prompt in pairs] == list(asked)
    images = read_images([ref for prompt in pairs for ref in prompt.recorded], 64, 64)
    request = RewardRequest(
        sample_ids=[f"{prompt.text}, {ref.role}" for prompt in pairs for ref in prompt.recorded],
        images=images.pixels,
        metadata=[asked[prompt.text] for prompt in pairs for _ in range(2)],
    )
    result = ShapesRewardScorer().score(request).total.view(-1, 2)
    assert torch.equal(result, torch.tensor([1.0, 0.5]).expand(len(pairs), 2))


def test_images_are_small_files_of_the_size_that_recipes_ask_for(pairs) -> None:
    files = list((SHIPPED / "pictures").iterdir())
    assert len(files) == 2 * len(pairs) and sum(os.path.getsize(file) for file in files) < 200_000
    for file in files:
        with Image.open(file) as picture:
            assert picture.size == (512, 512)


@pytest.mark.slow
def test_the_script_draws_the_same_pairs_anew(pairs, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "draw_preference_pairs.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path), "--size", "64"], check=True)
    assert (tmp_path / "train.jsonl").read_bytes() == (SHIPPED / "train.jsonl").read_bytes()
    for name in ("00-chosen.png", "17-rejected.png"):
        small = Image.open(SHIPPED / "pictures" / name).resize((64, 64), Image.Resampling.BOX)
        gap = np.abs(np.asarray(small, dtype=int) - np.asarray(Image.open(tmp_path / "pictures" / name), dtype=int))
        assert gap.mean() < 0.3 and gap.max() < 40  # edges of slanted sides are blended from fewer points
