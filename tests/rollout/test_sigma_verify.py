"""The settings that a server reports are compared with those of the request."""

from __future__ import annotations

import dataclasses
import math

import pytest

from unirl.config.errors import EngineError, SamplingMismatchError
from unirl.rollout.engine.serving.sigma_verify import UsedSettings, verify_used
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.sampling import DiffusionSamplingParams

SIGMAS = (1.0, 0.75, 0.5, 0.0)
PARAMS = DiffusionSamplingParams(
    kernel=FlowSDEStrategy(), num_inference_steps=3, sigmas=SIGMAS, sde_indices=(0, 1), guidance_scale=4.0
)
USED = UsedSettings(sigmas=SIGMAS, timesteps={0: 1000.0, 3: 0.0}, sde_indices=(0, 1), guidance_scale=4.0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"guidance_scale": None}, {"sigmas": tuple(s * 1.00005 for s in SIGMAS)}, {"timesteps": {1: 750.01}}],
    ids=["equal", "scale not reported", "sigmas rounded", "timestep rounded"],
)
def test_equal_settings_pass(changes) -> None:
    verify_used("server", PARAMS, dataclasses.replace(USED, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sigmas": (1.0, 0.9, 0.5, 0.0)}, r"sigmas\) used are \[1, 0\.9, 0\.5, 0\], and the request has \[1, 0\.75"),
        ({"sigmas": SIGMAS[:-1]}, r"used are \[1, 0\.75, 0\.5\], and the request has \[1, 0\.75, 0\.5, 0\]"),
        ({"sigmas": (1.0, math.nan, 0.5, 0.0)}, r"used are \[1, nan, 0\.5, 0\]"),
        ({"timesteps": {1: 700.0}}, r"timesteps used are \[700\], and the request has \[750\]"),
        ({"sde_indices": (0,)}, r"stochastic steps used are \[0\], and the request has \[0, 1\]"),
        ({"guidance_scale": 1.0}, r"guidance scale used are \[1\], and the request has \[4\]"),
    ],
)
def test_a_difference_is_named_with_both_lists(changes, says) -> None:
    with pytest.raises(SamplingMismatchError, match=says) as caught:
        verify_used("server", PARAMS, dataclasses.replace(USED, **changes))
    assert caught.value.code == 10006 and isinstance(caught.value, EngineError)
