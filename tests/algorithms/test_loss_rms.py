"""The reported size of a loss is the root mean square of what each element adds to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tokens import token_stage, token_track
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.base import LOSS_RMS, StageAlgorithm
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.diffusion_ppo import DiffusionPPO
from unirl.models.value_head import ValueHead
from unirl.testing.toy import toy_facts, toy_stage, toy_track
from unirl.types.results import merge
from unirl.types.rollout_resp import RolloutTrack

WEIGHTS = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5, 1.0, 1.0, 3.0])


def anchored(loss: StageAlgorithm[Any, Any], seeds: dict[str, Any], rows: RolloutTrack[Any]) -> RolloutTrack[Any]:
    """`rows` with the anchors of all snapshots, each measured on a policy of its own."""
    for name in {anchor.snapshot for anchor in loss.anchors().values()}:
        rows = rows.replace(segment=loss.prepare_segment(seeds[name], rows, name)[0])
    return rows.replace(weight=WEIGHTS)


def denoising_elements(
    loss: StageAlgorithm[Any, Any], stage: Any, rows: RolloutTrack[Any]
) -> Iterator[tuple[float, float]]:
    """The weight and the value of each element: the loss of one row at one entry, over its weight."""
    for i, weight in enumerate(WEIGHTS.tolist()):
        if weight:
            one = rows.slice(i, i + 1).replace(weight=torch.ones(1))
            yield from ((weight, float(loss.loss(stage, one, part).loss.detach())) for part in loss.parts(rows.segment))


def token_elements(
    loss: StageAlgorithm[Any, Any], stage: Any, rows: RolloutTrack[Any]
) -> Iterator[tuple[float, float]]:
    """The same for tokens: all other tokens are masked."""
    owner = torch.repeat_interleave(torch.arange(len(rows)), rows.segment.lengths)
    for token in rows.segment.loss_mask.nonzero().flatten().tolist():
        weight = float(WEIGHTS[owner[token]])
        if weight:
            mask = torch.zeros_like(rows.segment.loss_mask)
            mask[token] = True
            one = rows.replace(segment=rows.segment.replace(loss_mask=mask), weight=torch.ones(len(rows)))
            yield weight, float(loss.loss(stage, one, (0,)).loss.detach())


def root_mean_square(elements: list[tuple[float, float]]) -> float:
    return math.sqrt(sum(w * value**2 for w, value in elements) / sum(w for w, _ in elements))


DENOISING = [
    DiffusionGRPO(kl_coef=0.5, velocity_coef=2.0, clip_range=0.1),
    DiffusionNFT(velocity_coef=2.0),
]


@pytest.mark.parametrize("loss", DENOISING, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("micro", [3, 8])
def test_the_size_of_a_denoising_loss_is_that_of_its_elements(loss: StageAlgorithm[Any, Any], micro: int) -> None:
    stages = {name: toy_stage(seed) for seed, name in enumerate(("live", "reference", "old", "trained"))}
    rows = anchored(loss, stages, toy_track(stages["live"], prompts=2))
    elements = list(denoising_elements(loss, stages["trained"], rows))
    assert len({round(value, 6) for _, value in elements}) > 6
    results = [
        loss.loss(stages["trained"], each, part).metrics
        for each in rows.chunk(micro)
        for part in loss.parts(rows.segment)
    ]
    assert merge(results)[LOSS_RMS].value == pytest.approx(root_mean_square(elements), rel=1e-5)


def test_the_size_of_a_token_loss_is_that_of_its_tokens() -> None:
    loss = ARGRPO(kl_coef=0.5, entropy_coef=0.1, clip_range=0.2)
    stages = {name: token_stage(seed) for seed, name in enumerate(("live", "reference", "trained"))}
    rows = anchored(loss, stages, token_track(stages["live"], prompts=2))
    elements = list(token_elements(loss, stages["trained"], rows))
    have = loss.loss(stages["trained"], rows, (0,)).metrics[LOSS_RMS].value
    assert have == pytest.approx(root_mean_square(elements), rel=1e-5)
    # Shares within a sequence weigh its tokens, and do not change their size.
    alike = replace(loss, loss_agg_mode="seq-mean-token-sum-norm", horizon=100)
    assert alike.loss(stages["trained"], rows, (0,)).metrics[LOSS_RMS].value == pytest.approx(have, rel=1e-6)


def test_the_size_of_a_loss_with_a_critic_counts_the_elements_of_both_terms() -> None:
    loss = DiffusionPPO(vf_coef=0.7, clip_range=0.1)
    stages = {name: toy_stage(seed) for seed, name in enumerate(("live", "trained"))}
    for seed, stage in enumerate(stages.values()):
        stage.value_head = ValueHead.of(toy_facts(), width=6, seed=seed)
        torch.nn.init.normal_(stage.value_head.output_layer.weight, generator=torch.Generator().manual_seed(seed))
    rows = anchored(loss, stages, toy_track(stages["live"], prompts=2))
    terms: list[tuple[float, float]] = []
    for weight, row in zip(WEIGHTS.tolist(), rows.chunk(1), strict=True):
        for part in loss.parts(rows.segment) if weight else []:
            one = loss.loss(stages["trained"], row.replace(weight=torch.ones(1)), part)
            policy = one.metrics["train/policy_loss"].value
            terms += [(weight, policy), (weight, float(one.loss.detach()) - policy)]
    results = [loss.loss(stages["trained"], rows, part).metrics for part in loss.parts(rows.segment)]
    assert min(abs(value) for _, value in terms) > 0
    assert merge(results)[LOSS_RMS].value == pytest.approx(root_mean_square(terms), rel=1e-5)
