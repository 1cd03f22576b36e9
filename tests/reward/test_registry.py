"""Scorers by name: every one has one, and what is asked of it is checked as in a recipe."""

import pytest

from unirl.config.errors import ConfigError
from unirl.reward.local.image_statistics import JpegCompressibilityRewardScorer
from unirl.reward.local.pickscore import PickScoreRewardScorer
from unirl.reward.registry import make_scorer, scorers


def test_names_are_the_file_or_the_words_of_the_class():
    result = scorers()
    assert result["pickscore"] is PickScoreRewardScorer
    assert result["jpeg_compressibility"] is JpegCompressibilityRewardScorer
    assert {"shapes", "shapes_classifier", "brightness", "jpeg_incompressibility"} <= result.keys()
    assert len(set(result.values())) == len(result)


def test_params_are_the_fields_of_the_spec_or_the_keywords():
    assert make_scorer("jpeg_compressibility", {"quality": 7}).config.quality == 7
    assert make_scorer("shapes_classifier", {"batch_size": 3}).batch_size == 3


def test_toy_values_fill_in_missing_settings():
    spec = make_scorer("pickscore", {"batch_size": 2}, toy=True).config
    assert (spec.path, spec.batch_size) == ("toy", 2)


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("pickscor", {}, "Did you mean 'pickscore'"),
        ("pickscore", {"pth": "toy"}, "Did you mean 'pickscore.config.path'"),
        ("jpeg_compressibility", {"quality": 200}, "must lie in 1..95"),
        ("brightness", {"size": 3}, "unknown key 'brightness.size'"),
        ("os.path", {}, "outside the packages"),
        ("unirl.reward.combine.WeightedRewards", {}, "is required"),
        ("unirl.types.primitives.Images", {}, "RewardScorer"),
    ],
)
def test_an_unknown_scorer_or_setting_is_named_with_the_way_out(name, params, said):
    with pytest.raises(ConfigError) as raised:
        make_scorer(name, params)
    assert said in str(raised.value)
