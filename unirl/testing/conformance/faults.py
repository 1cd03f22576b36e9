"""Faults of a fake server, by name. A client must notice each of them, or work in spite of it."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.config.errors import UsageError, did_you_mean

FAULTS: Mapping[str, str] = {
    "die": "kills itself while it generates the tenth response",
    "half-answer": "sends half of every third response, and closes the connection",
    "close": "closes the connection in place of every third response",
    "slow": "waits two seconds before every response",
    "wrong-dtype": "stores the tensors that it gets in bfloat16",
    "stale-weights": "takes over the first transfer only, and gives later ones their names",
    "other-model": "computes the logits of another model, and reports the checksums of the right one",
    "other-temperature": "reports log-probs at twice the temperature",
    "ignore-seeds": "draws from random numbers of its own",
    "swap-rows": "exchanges the tokens of responses to two prompts",
    "nan-logp": "reports no finite log-prob for the first token of a response",
    "fewer-tokens": "leaves out the last token of a response",
    "version-skew": "samples the last token of a response from weights of another name",
}
"""Name to what the server does."""


def checked_fault(name: str | None) -> str | None:
    """The name itself. Raises UsageError if there is no such fault."""
    if name is not None and name not in FAULTS:
        raise UsageError(f"there is no fault '{name}'.{did_you_mean(name, FAULTS)} Faults: {', '.join(FAULTS)}")
    return name
