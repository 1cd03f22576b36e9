"""`unirl reward`: scorers listed, tried on rows of one's own, and checked."""

import json
import shlex

import numpy as np
import pytest
import torch
from PIL import Image

from unirl.cli.main import main
from unirl.config.load import load
from unirl.config.schema import dotted_name
from unirl.reward.base import RewardScorer, single
from unirl.reward.local.image_statistics import BrightnessRewardScorer
from unirl.reward.registry import scorers
from unirl.testing.reward import check_gradient
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest


class Crooked(BrightnessRewardScorer):
    """Its objective is the score, and its gradient is not the objective's."""

    def objective(self, images, prompts=()):
        return super().objective(images * 2 - images.detach(), prompts)


class Misread(BrightnessRewardScorer):
    """It reads a column that no request has."""

    reads = ("image",)


class Shifted(BrightnessRewardScorer):
    """Its objective is another number than its score."""

    def score(self, request):
        return single("brightness", super().score(request).total - 0.2)


class Relative(RewardScorer):
    """What a scorer must not do: compare a row with its neighbours."""

    reads = ("images",)
    capabilities = Capabilities(modalities=("image",))

    def score(self, request):
        values = request.images.mean(dim=(1, 2, 3))
        return single("relative", values - values.mean())


@pytest.fixture
def grays(tmp_path):
    paths = []
    for level in (0, 51, 255):
        path = tmp_path / f"{level}.png"
        Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(path)
        paths.append(str(path))
    return paths


def images(paths):
    return [word for path in paths for word in ("--image", path)]


def test_the_listing_has_every_scorer_and_its_columns(capsys):
    assert main(["reward", "ls", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == scorers().keys() >= {"pickscore", "brightness", "shapes", "jpeg_compressibility"}
    assert set(rows["pickscore"]["reads"]) == {"prompts", "images"} and rows["pickscore"]["differentiable"]
    assert all(row["summary"] for row in rows.values())


def test_a_run_accepts_the_setting_that_is_shown_for_a_scorer(capsys):
    without_required_settings = sorted(scorers().keys() - {"length", "unified_reward", "wise", "geneval2"})
    for name in without_required_settings:
        assert main(["reward", "ls", name]) == 0
        setting = capsys.readouterr().out.splitlines()[-1].partition("RECIPE ")[2]
        config = load("diffusion/quickstart", shlex.split(setting)).config
        assert config.reward.values["backend"].target == dotted_name(scorers()[name])
    assert main(["reward", "ls", "brightnes"]) == 2
    assert "Did you mean 'brightness'?" in capsys.readouterr().err


def test_rows_of_the_command_line_are_scored(capsys, grays):
    assert main(["reward", "score", "-r", "brightness", *images(grays), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["total"] for row in rows] == pytest.approx([0.0, 0.2, 1.0])


def test_one_prompt_serves_all_rows_and_settings_reach_the_scorer(capsys, grays):
    words = ["reward", "score", "-r", "pickscore", "--set", "path=toy", "--set", "batch_size=1"]
    assert main([*words, *images(grays), "--prompt", "a gray wall"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["-r", "brigthness"], 2, "Did you mean 'brightness'"),
        (["-r", "brightness", "--prompt", "x"], 2, "brightness reads images: give --image once for each of the 1 rows"),
        (["-r", "brightness", "--image", "absent.png"], 4, "absent.png"),
        (["-r", "shapes", "--image", "docs/images/quickstart.png", "--metadata", "[1]"], 2, "a JSON object is needed"),
        (["-r", "pickscore", "--set", "path"], 2, "--set key=value"),
        (["-r", "pickscore", "--set", "batch=3"], 2, "batch"),
    ],
)
def test_a_wrong_argument_is_answered_with_the_way_out(capsys, words, status, said):
    assert main(["reward", "score", *words]) == status
    assert said in capsys.readouterr().err


def test_lint_passes_a_scorer_that_keeps_its_contract(capsys):
    assert main(["reward", "lint", "-r", "brightness"]) == 0
    said = capsys.readouterr().out
    assert "change nothing" in said and "finite differences" in said and "not constant" in said


@pytest.mark.slow
def test_lint_draws_signs_that_ocr_tells_apart(capsys):
    assert main(["reward", "lint", "-r", "ocr"]) == 0
    assert "not constant" in capsys.readouterr().out


def test_lint_catches_a_scorer_that_breaks_its_contract(capsys):
    assert main(["reward", "lint", "-r", f"{__name__}.Relative", "--plugins", "tests"]) == 6
    assert "a score depends on" in capsys.readouterr().err


def test_lint_names_a_column_that_does_not_exist_as_a_run_does(capsys):
    assert main(["reward", "lint", "-r", f"{__name__}.Misread", "--plugins", "tests"]) == 2
    assert "reads 'image', which is not a column of a reward request. Did you mean 'images'?" in capsys.readouterr().err


def test_lint_names_the_rows_that_it_needs(capsys, grays):
    assert main(["reward", "lint", "-r", "brightness", *images(grays[:2])]) == 2
    assert "at least 3 rows" in capsys.readouterr().err
    assert main(["reward", "lint", "-r", "shapes"]) == 2
    assert "reads metadata" in capsys.readouterr().err


@pytest.mark.parametrize(("scorer", "broken"), [(Crooked(), "central differences"), (Shifted(), "and score differ")])
def test_a_gradient_that_is_not_the_scores_is_caught(scorer, broken):
    request = RewardRequest(
        sample_ids=list("abc"), images=torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    )
    check_gradient(BrightnessRewardScorer(), request)
    with pytest.raises(AssertionError, match=broken):
        check_gradient(scorer, request)


def test_an_unreachable_service_is_named_with_the_way_out(capsys):
    assert main(["reward", "ping", "http://127.0.0.1:9"]) == 6
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    assert main(["reward", "bench", "http://127.0.0.1:9", "-r", "clip", "--items", "0"]) == 2
    assert "--items must be >= 1" in capsys.readouterr().err
