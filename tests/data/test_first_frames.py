"""The shipped pictures to animate or to edit: small, of three shapes, and drawn by their script."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.source_tree import ROOT
from unirl.data.data_source import MultimodalRLDataSource
from unirl.data.images import check_counts
from unirl.testing.toy import toy_facts

SHIPPED = ROOT / "datasets" / "first_frames"


@pytest.mark.slow
def test_the_script_draws_the_same_images_anew(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "draw_first_frames.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True)
    names = sorted(file.name for file in SHIPPED.iterdir())
    assert names == sorted(file.name for file in tmp_path.iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 50_000


def test_first_frame_and_editing_models_take_them_and_three_sizes_hold_them() -> None:
    sizes = ((32, 48), (48, 32), (32, 32))
    data = MultimodalRLDataSource(data_path=str(SHIPPED / "train.jsonl"), sizes=sizes)
    for takes in ((1, 1), (1, 3)):
        check_counts(data.prompts, replace(toy_facts(), condition_images=takes))
    assert [prompt.size for prompt in data.prompts] == [(32, 48), (32, 48), (48, 32), (32, 32)]
