"""The distributions whose log-probs servers report. Servers do not say which one it is, so it is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from unirl.config.errors import IncompatibleError
from unirl.types.sampling import ARSamplingParams

LogProbKind = Literal["raw", "tempered", "processed"]
STARTED_WITH: Mapping[LogProbKind, str] = {
    "raw": " (vLLM: --logprobs-mode raw_logprobs)",
    "processed": " (vLLM: --logprobs-mode processed_logprobs)",
}
"""The way to get a distribution, where a server has a choice."""
HIGHEST_TEMPERATURE = 2.0
TEMPERATURE, TOP_K = 2.0, 4
"""Settings of the draws by which the distribution is recognised: each of them changes one of the three."""
RECOGNISED = 0.05
"""The largest error by which a distribution is recognised, as a share of the standard deviation of the logits."""
CLEARLY_BETTER = 0.1
"""It is another one than the recipe says if its error is less than this share of the other's."""


def raw(logits: Tensor) -> Tensor:
    """Log-probs at temperature 1."""
    return logits.log_softmax(-1)


def tempered(logits: Tensor) -> Tensor:
    """Log-probs at the temperature of the draws, of all tokens."""
    return (logits / TEMPERATURE).log_softmax(-1)


def processed(logits: Tensor) -> Tensor:
    """Log-probs at the temperature of the draws, of the tokens that top_k leaves.

    Which of two almost equal tokens are left depends on rounding, so all tokens have a value here.
    """
    scaled = logits / TEMPERATURE
    return scaled - scaled.topk(min(TOP_K, logits.shape[-1]), dim=-1).values.logsumexp(-1, keepdim=True)


KINDS: Mapping[LogProbKind, Callable[[Tensor], Tensor]] = {
    "raw": raw,
    "tempered": tempered,
    "processed": processed,
}


def checked_gaps(name: str, claimed: LogProbKind, logits: Tensor, drawn: Sequence[tuple[int, float]]) -> Tensor:
    """Differences between log-probs of drawn tokens and those of the distribution that the recipe names.

    Args:
        name: the server's name in error messages.
        claimed: `rollout.logprobs`.
        logits: [V] before the drawn token.
        drawn: tokens, drawn with TEMPERATURE and TOP_K, and their log-probs as the server reports them.

    Raises:
        IncompatibleError: they are those of another distribution.
    """
    tokens = torch.tensor([token for token, _ in drawn])
    theirs = torch.tensor([logp for _, logp in drawn], dtype=torch.float64)
    gaps = {kind: theirs - log_probs(logits.double())[tokens] for kind, log_probs in KINDS.items()}
    sizes = {kind: float(gap.abs().max()) for kind, gap in gaps.items()}
    nearest = min(KINDS, key=lambda kind: sizes[kind])
    limit = min(RECOGNISED * float(logits.std()), CLEARLY_BETTER * sizes[claimed])
    if nearest != claimed and sizes[nearest] < limit:
        raise IncompatibleError(
            f"{name} reports {nearest} log-probs, and rollout.logprobs={claimed}. Set rollout.logprobs={nearest}, or "
            f"start another server{STARTED_WITH.get(claimed, '')}"
        )
    return gaps[claimed]


def check_density(params: ARSamplingParams, kind: LogProbKind) -> None:
    """Raises IncompatibleError, naming the key, if log-probs of this kind are not those that losses read.

    Losses read log_softmax(logits / temperature), before top_k and top_p.
    """
    if params.temperature > HIGHEST_TEMPERATURE:
        raise IncompatibleError(
            f"sampling.temperature={params.temperature:g}: OpenAI-compatible servers take at most "
            f"{HIGHEST_TEMPERATURE:g}. Lower it, or use rollout=sglang"
        )
    truncations = {"top_k": params.top_k > 0, "top_p": params.top_p < 1}
    truncated = next((key for key, is_set in truncations.items() if is_set), None)
    if kind == "raw" and params.temperature not in (0.0, 1.0):
        raise IncompatibleError(
            f"sampling.temperature={params.temperature:g}: with rollout.logprobs=raw the server reports log-probs at "
            "temperature 1, which are those of another policy. Set sampling.temperature=1, or rollout.logprobs="
            "processed with a server that can do it, such as vLLM"
        )
    if kind == "processed" and truncated is not None:
        raise IncompatibleError(
            f"sampling.{truncated}={vars(params)[truncated]:g}: with rollout.logprobs=processed the server reports "
            f"log-probs of the tokens that {truncated} leaves, and losses need those of all tokens. Remove "
            f"sampling.{truncated}, or set rollout.logprobs=raw and sampling.temperature=1, or use rollout=sglang"
        )
