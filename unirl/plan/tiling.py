"""`pipeline.vae_tiling=auto`: the VAE decodes in overlapping tiles only where one sample at a time does not fit.

Tiling changes pixels at the seams, so it is the last resort.
"""

from __future__ import annotations

from dataclasses import replace

from unirl.config.recipe import RecipeConfig
from unirl.plan.fit import moment_peaks, usable
from unirl.plan.sizes import RecipeSizes, RunSizes, decoding_of, largest

_KEY = "vae_tiling"


def tiling_key(config: RecipeConfig) -> str:
    """The key of the recipe that says whether the VAE decodes in tiles."""
    return f"{config.pipeline.path}.{_KEY}"


def leaves_tiling_open(config: RecipeConfig) -> bool:
    """True if the recipe leaves it to the device whether the VAE decodes in tiles. Models without a VAE have no key."""
    return config.pipeline.get(_KEY, str) == "auto"


def with_tiling(config: RecipeConfig, tiles: bool) -> RecipeConfig:
    """The recipe with `pipeline.vae_tiling` set."""
    values = {**config.pipeline.values, _KEY: tiles}
    return replace(config, pipeline=replace(config.pipeline, values=values))


def with_auto_tiling(run: RunSizes, config: RecipeConfig, memory_gib: float) -> RunSizes:
    """The run as it decodes on devices with so much memory, if the recipe leaves that open."""
    if not leaves_tiling_open(config) or not run.sizes.decoding.peak_bytes or _peak(run) <= usable(memory_gib):
        return run
    tiled = decoding_of(config, largest(config, run.estimate), tiled=True)
    smaller = tiled.peak_bytes < run.sizes.decoding.peak_bytes
    return replace(run, sizes=replace(run.sizes, decoding=tiled)) if smaller else run


def choose_tiling(sizes: RecipeSizes, memory_gib: float | None) -> tuple[bool, str]:
    """Whether a run on devices with so much memory decodes in tiles, and the reason.

    Args:
        memory_gib: None for CPUs.
    """
    if memory_gib is None:
        return False, "off on CPUs"
    run = sizes.run
    if run is None:
        return False, f"off, since {sizes.config.bundle.class_name} cannot estimate its sizes"
    tiled = with_auto_tiling(run, sizes.config, memory_gib)
    whole = f"decoding one whole sample peaks at {_peak(run):.1f} of {usable(memory_gib):.1f} GiB by the plan"
    if tiled is run:
        return False, f"off; {whole}"
    return True, f"on; {whole}, and in tiles at {_peak(tiled):.1f}"


def _peak(run: RunSizes) -> float:
    """GiB while samples are decoded one at a time."""
    return moment_peaks(run, replace(run.settings, decode_rows=1))["decode"]
