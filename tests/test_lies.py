"""Every fault of a fake server has a test that shows how its engine notices it, within one step."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scripts.engine_matrix import functions_of
from tests.source_tree import ROOT
from unirl.testing.conformance.faults import FAULTS

TOKENS, IMAGES, LATENTS = "rollout/test_token_servers", "rollout/test_sglang_images", "rollout/test_latent_servers"
OPENAI = "rollout/test_openai"
SENT, SAMPLED = "test_a_lie_is_caught_when_weights_are_sent", "test_a_lie_is_caught_in_the_first_samples"
LIES_OF_TOKENS = {
    "other-temperature": f"{TOKENS}::{SENT}",
    "other-model": f"{TOKENS}::{SENT}",
    "wrong-dtype": f"{TOKENS}::{SENT}",
    "ignore-seeds": f"{TOKENS}::{SENT}",
    "fewer-tokens": f"{TOKENS}::{SENT}",
    "version-skew": f"{TOKENS}::{SENT}",
    "stale-weights": f"{TOKENS}::test_stale_weights_under_a_new_name_are_caught",
    "nan-logp": f"{TOKENS}::test_a_log_prob_that_is_not_finite_is_caught",
    "swap-rows": f"{TOKENS}::test_exchanged_rows_have_log_probs_that_the_replay_contradicts",
}
LIES_OF_SGLANG = {
    "swap-rows": "trainer/test_sglang_loop::test_exchanged_rows_stop_the_run_before_its_first_update",
    "other-image-size": f"{IMAGES}::test_images_of_another_size_are_refused_by_name",
    "other-colours": f"{IMAGES}::test_images_of_other_colours_have_log_probs_that_the_replay_contradicts",
}
FAILURES_OF_TOKENS = {
    "die": f"{TOKENS}::test_a_server_that_is_gone_is_named",
    "no-weights": f"{TOKENS}::test_weights_that_never_arrive_are_named",
    "half-answer": f"{TOKENS}::test_responses_that_are_broken_off_are_asked_for_again",
    "close": f"{TOKENS}::test_responses_that_are_broken_off_are_asked_for_again",
    "slow": f"{TOKENS}::{SENT}",
}
LIES_OF_LATENTS = {
    "other-sigmas": f"{LATENTS}::{SENT}",
    "other-model": f"{LATENTS}::{SENT}",
    "wrong-dtype": f"{LATENTS}::{SENT}",
    "ignore-seeds": f"{LATENTS}::{SENT}",
    "nan": f"{LATENTS}::{SENT}",
    "fewer-rows": f"{LATENTS}::{SENT}",
    "other-steps": f"{LATENTS}::{SAMPLED}",
    "other-noise-scale": f"{LATENTS}::{SAMPLED}",
    "swap-rows": f"{LATENTS}::{SAMPLED}",
    "version-skew": f"{LATENTS}::{SAMPLED}",
    "other-guidance": f"{LATENTS}::test_a_server_that_ignores_guidance_is_caught",
    "stale-weights": f"{LATENTS}::test_stale_weights_are_caught",
}
FAILURES_OF_LATENTS = {
    "die": f"{LATENTS}::test_a_server_that_is_gone_is_named",
    "no-weights": f"{LATENTS}::test_weights_that_never_arrive_are_named",
    "half-answer": f"{LATENTS}::test_samples_that_are_broken_off_are_asked_for_again",
    "close": f"{LATENTS}::test_samples_that_are_broken_off_are_asked_for_again",
    "slow": f"{LATENTS}::{SENT}",
}
STARTS = f"{OPENAI}::test_a_lie_is_caught_when_it_starts"
LIES_OF_OPENAI = {
    **dict.fromkeys(("fewer-rows", "other-name", "text-only", "no-logprobs"), STARTS),
    "no-dev-mode": f"{OPENAI}::test_a_server_without_endpoints_for_weights_is_refused",
}
TESTS: Mapping[str, Mapping[str, str]] = {
    "sglang_llm": {**LIES_OF_TOKENS, **LIES_OF_SGLANG, **FAILURES_OF_TOKENS},
    "openai": {**LIES_OF_TOKENS, **LIES_OF_OPENAI, **FAILURES_OF_TOKENS},
    "sglang": {**LIES_OF_LATENTS, **FAILURES_OF_LATENTS},
    "vllm_omni": {**LIES_OF_LATENTS, **FAILURES_OF_LATENTS},
}
"""Engine to its faults, each with the test that shows how it is noticed."""


@pytest.mark.parametrize("engine", TESTS)
def test_every_fault_is_tested(engine: str) -> None:
    assert set(TESTS[engine]) == set(FAULTS[engine])
    for fault, test in TESTS[engine].items():
        file, _, name = test.partition("::")
        assert name in functions_of(file), test
        assert f'"{fault}"' in (ROOT / "tests" / f"{file}.py").read_text(), f"{file} never asks for {fault}"


def test_each_kind_of_engine_has_eight_lies() -> None:
    assert min(map(len, (LIES_OF_TOKENS, LIES_OF_LATENTS))) >= 8
