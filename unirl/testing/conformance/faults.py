"""Faults of fake servers, by name. A client must notice each of them, or work in spite of it."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.config.errors import UsageError, did_you_mean

COMMON: Mapping[str, str] = {
    "die": "kills itself while it generates the tenth sample",
    "half-answer": "sends half of every third sample, and closes the connection",
    "close": "closes the connection in place of every third sample",
    "slow": "waits two seconds before every sample",
    "wrong-dtype": "stores the tensors that it gets in bfloat16",
    "no-weights": "closes the connection in place of every request that brings weights",
    "stale-weights": "takes over the first transfer only, and reports success for later ones",
    "other-model": "samples from another model, and reports the checksums of the right one",
    "ignore-seeds": "draws from random numbers of its own",
}
TOKENS: Mapping[str, str] = {
    "other-temperature": "reports log-probs at twice the temperature",
    "swap-rows": "exchanges the tokens of responses to two prompts",
    "nan-logp": "reports no finite log-prob for the first token of a response",
    "fewer-tokens": "leaves out the last token of a response",
    "version-skew": "samples the last token of a response from weights of another name",
}
IMAGES: Mapping[str, str] = {
    "other-image-size": "scales the images of prompts to another size",
    "other-colours": "reads the colours of the images of prompts in another order",
}
OPENAI: Mapping[str, str] = {
    "text-only": "answers with texts, without token ids",
    "no-logprobs": "reports no log-probs",
    "fewer-rows": "answers with no response",
    "other-name": "answers with another model than the one that was asked",
    "no-dev-mode": "has no endpoints for weights and sleep",
}
LATENTS: Mapping[str, str] = {
    "other-sigmas": "samples at the noise levels of another schedule, and reports them",
    "other-steps": "makes one stochastic step fewer than it was asked for",
    "other-noise-scale": "samples with twice the noise, and reports log-probs of it",
    "other-guidance": "ignores the guidance scale",
    "swap-rows": "exchanges the latents of samples of two prompts",
    "nan": "returns latents that are not finite",
    "fewer-rows": "answers with no sample",
    "version-skew": "has other weights from the fifth sample on, as if another program had sent them",
}
FAULTS: Mapping[str, Mapping[str, str]] = {
    "sglang_llm": {**COMMON, **TOKENS, **IMAGES},
    "openai": {**COMMON, **TOKENS, **OPENAI},
    "sglang": {**COMMON, **LATENTS},
    "vllm_omni": {**COMMON, **LATENTS},
}
"""Engine to the names of the faults of its fake server, and what the server does."""


def checked_fault(engine: str, name: str | None) -> str | None:
    """The name itself. Raises UsageError if the fake server of `engine` has no such fault."""
    known = FAULTS[engine]
    if name is not None and name not in known:
        raise UsageError(f"there is no fault '{name}'.{did_you_mean(name, known)} Faults: {', '.join(known)}")
    return name
