"""`pipeline.vae_tiling=auto` decodes in tiles where one whole sample does not fit, and says so."""

from functools import cache

import pytest

from unirl.cli.main import main
from unirl.config.load import load
from unirl.plan.cost import GIB
from unirl.plan.fit import usable
from unirl.plan.sizes import RecipeSizes, RunSizes
from unirl.plan.tiling import _peak, choose_tiling, leaves_tiling_open, with_auto_tiling

VIDEO = "diffusion/hunyuan_video_t2v_trainside"
SIZE = ("sampling.height=480", "sampling.width=832", "sampling.num_frames=33")


@cache
def loaded(*words):
    return load(VIDEO, [*SIZE, *words])


@cache
def sized(*words):
    return RunSizes.of(loaded(*words).config)


@pytest.mark.slow
def test_the_peaks_of_a_video_whole_and_in_tiles_are_those_counted_by_hand():
    """29 GiB in float32, and 5 GiB in tiles."""
    whole, tiled = (sized(f"pipeline.vae_tiling={on}").sizes.decoding for on in ("false", "true"))
    assert whole.peak_bytes / GIB == pytest.approx(29, rel=0.1)
    assert tiled.peak_bytes / GIB == pytest.approx(5, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("excess", "tiles"), [(-0.01, False), (0.01, True)])
def test_auto_tiles_exactly_where_one_whole_sample_does_not_fit(excess, tiles):
    run, config = sized(), loaded().config
    memory = (_peak(run) - excess) / usable(1.0)
    chosen, why = choose_tiling(RecipeSizes(config), memory)
    assert chosen is tiles
    assert why.startswith("on; " if tiles else "off; ")
    placed = with_auto_tiling(run, config, memory)
    assert placed.sizes.decoding == sized(f"pipeline.vae_tiling={str(tiles).lower()}").sizes.decoding


@pytest.mark.parametrize("typed", ["true", "false"])
def test_a_recipe_that_decides_is_left_alone(typed):
    config = loaded(f"pipeline.vae_tiling={typed}").config
    run = sized(f"pipeline.vae_tiling={typed}")
    assert with_auto_tiling(run, config, 1.0) is run
    assert not leaves_tiling_open(config)


@pytest.mark.slow
def test_the_plan_says_when_it_decodes_in_tiles(capsys):
    for device, says in (("4090", True), ("b200", False)):
        assert main(["plan", VIDEO, *SIZE, "--device", device]) == (5 if says else 0)
        assert ("decode     in tiles, chosen for 4090" in capsys.readouterr().out) == says
