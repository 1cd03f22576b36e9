"""The settings that a server reports are compared with those of the request."""

from __future__ import annotations

import dataclasses
import math

import pytest

from unirl.config.errors import EngineError, SamplingMismatchError
from unirl.rollout.engine.serving.sigma_verify import UsedSettings, verify_used
from unirl.sde.guidance import ExpertGuidance, Guidance
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.sampling import DiffusionSamplingParams

SIGMAS = (1.0, 0.75, 0.5, 0.0)
PARAMS = DiffusionSamplingParams(
    kernel=FlowSDEStrategy(), num_inference_steps=3, sigmas=SIGMAS, sde_indices=(0, 1), guidance_scale=4.0
)
USED = UsedSettings(sigmas=SIGMAS, timesteps={0: 1000.0, 3: 0.0}, sde_indices=(0, 1), guidance_scales=[4.0] * 3)
GUIDANCE = Guidance(scale=4.0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"guidance_scales": None}, {"sigmas": tuple(s * 1.00005 for s in SIGMAS)}, {"timesteps": {1: 750.01}}],
    ids=["equal", "scale not reported", "sigmas rounded", "timestep rounded"],
)
def test_equal_settings_pass(changes) -> None:
    verify_used("server", PARAMS, GUIDANCE, dataclasses.replace(USED, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sigmas": (1.0, 0.9, 0.5, 0.0)}, r"sigmas\) used are \[1, 0\.9, 0\.5, 0\], and the request has \[1, 0\.75"),
        ({"sigmas": SIGMAS[:-1]}, r"used are \[1, 0\.75, 0\.5\], and the request has \[1, 0\.75, 0\.5, 0\]"),
        ({"sigmas": (1.0, math.nan, 0.5, 0.0)}, r"used are \[1, nan, 0\.5, 0\]"),
        ({"timesteps": {1: 700.0}}, r"timesteps used are \[700\], and the request has \[750\]"),
        ({"sde_indices": (0,)}, r"stochastic steps used are \[0\], and the request has \[0, 1\]"),
        (
            {"guidance_scales": (4.0, 4.0, 1.0)},
            r"guidance scales used are \[4, 4, 1\], and the request has \[4, 4, 4\]",
        ),
    ],
)
def test_a_difference_is_named_with_both_lists(changes, says) -> None:
    with pytest.raises(SamplingMismatchError, match=says) as caught:
        verify_used("server", PARAMS, GUIDANCE, dataclasses.replace(USED, **changes))
    assert caught.value.code == 10006 and isinstance(caught.value, EngineError)


def test_each_step_has_the_scale_of_its_expert() -> None:
    """At the boundary itself the first expert runs."""
    guidance = ExpertGuidance(boundary=0.75).at(4.0, 3.0)
    verify_used("server", PARAMS, guidance, dataclasses.replace(USED, guidance_scales=(4.0, 4.0, 3.0)))
    with pytest.raises(SamplingMismatchError, match=r"used are \[4, 3, 3\], and the request has \[4, 4, 3\]"):
        verify_used("server", PARAMS, guidance, dataclasses.replace(USED, guidance_scales=(4.0, 3.0, 3.0)))
