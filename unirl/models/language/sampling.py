"""Selects tokens from log-probs: top-k, then top-p, then the inverse CDF in vocabulary order.

No function here waits for the device, so a step of decoding can be launched ahead, or captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unirl.types.sampling import ARSamplingParams

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def sample_tokens(
    logps: Float[Tensor, "S V"], uniform: Float[Tensor, "S"], params: ARSamplingParams
) -> Int[Tensor, "S"]:
    """Tokens [S] int64 from log-probs [S, V]: the most likely at temperature 0, else the inverse CDF at uniform [S].

    The CDF runs in vocabulary order over the tokens that top-k and then top-p keep.
    """
    if params.temperature == 0:
        return logps.argmax(1)
    if params.top_k == 0:
        return inverse_cdf(top_p_weights(logps, params.top_p) if params.top_p < 1 else logps.double().exp(), uniform)
    tokens = top_k_tokens(logps, params.top_k)
    index = inverse_cdf(top_p_weights(logps.gather(1, tokens), params.top_p), uniform)
    return tokens.gather(1, index[:, None])[:, 0]


def top_k_tokens(logps: Float[Tensor, "S V"], top_k: int) -> Int[Tensor, "S K"]:
    """[S, K] the `top_k` most likely tokens in vocabulary order. Of equally likely ones, the first are kept.

    A selection finds the K-th largest value, and the tokens that reach it are counted off. This gives the K tokens of
    a stable sort of the vocabulary, in a fraction of its time.
    """
    top_k = min(top_k, logps.shape[1])
    least = logps.topk(top_k, dim=1).values[:, -1:]
    above, equal = logps > least, logps == least
    num_equal = top_k - above.sum(1, keepdim=True)
    kept = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= num_equal))
    # The place of each kept token among the kept ones. All others go to one more place, which is cut off.
    place = torch.where(kept, kept.cumsum(1, dtype=torch.int32) - 1, top_k).long()
    vocabulary = torch.arange(logps.shape[1], device=logps.device).expand_as(place)
    return place.new_zeros(len(logps), top_k + 1).scatter_(1, place, vocabulary)[:, :top_k]


def top_p_weights(logps: Float[Tensor, "S M"], top_p: float) -> Float[Tensor, "S M"]:
    """[S, M] float64 probabilities of the tokens that top-p keeps, and 0 elsewhere. They are not renormalised.

    Keeps the fewest of the most likely tokens whose share of the sum reaches `top_p`. The sort reads float32: different
    log-probs have different float64 probabilities, or probabilities of 0.
    """
    probabilities = logps.double().exp()
    order = logps.sort(dim=1, descending=True, stable=True).indices
    ranked = probabilities.gather(1, order)
    shares = ranked.cumsum(1) / ranked.sum(1, keepdim=True)
    before = torch.cat([shares.new_zeros(len(shares), 1), shares[:, :-1]], dim=1)
    return torch.zeros_like(probabilities).scatter(1, order, torch.where(before < top_p, ranked, 0.0))


def inverse_cdf(weights: Float[Tensor, "S M"], uniform: Float[Tensor, "S"]) -> Int[Tensor, "S"]:
    """[S] the first index at which the running sum of weights [S, M] float64 exceeds `uniform` [S] times their sum.

    It never selects an index of weight 0. In float64 the sums of 150,000 weights are accurate to 1e-14; in float32 a
    token of probability 1e-7 could not be distinguished from one of probability 0.
    """
    running = weights.cumsum(1)
    target = uniform.double()[:, None] * running[:, -1:]
    return torch.searchsorted(running, target, right=True)[:, 0].clamp(max=weights.shape[1] - 1)
