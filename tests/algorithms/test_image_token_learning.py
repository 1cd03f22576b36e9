"""GRPO on image tokens raises a reward that depends on the tokens, with and without guidance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models.test_janus_pro import CODEBOOK, PARAMS, TEXTS, request
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.models.janus_pro.family import JanusProBundle, JanusProPipeline

STEPS, GROUP = 24, 8


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_the_rewarded_half_of_the_codebook_is_used_more(scale: float) -> None:
    pipeline, loss = JanusProPipeline(JanusProBundle(path="toy", dtype="fp32")), ARGRPO()
    optimizer = torch.optim.AdamW(pipeline.bundle.trainable().parameters(), lr=3e-3, weight_decay=0)
    means = []
    for step in range(STEPS):
        params = replace(PARAMS, guidance_scale=scale, seed=step)
        with torch.no_grad():
            track = pipeline.generate(request(params, siblings=GROUP), GROUP * len(TEXTS)).tracks["image"]
        rewards = (
            (track.segment.tokens.unflatten(0, (-1, 16)) < CODEBOOK // 2).float().mean(1).unflatten(0, (-1, GROUP))
        )
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        track = track.replace(advantages=advantages.flatten())
        optimizer.zero_grad()
        (loss.loss(pipeline.stage, track, (0,)).loss / loss.count(track)).backward()
        torch.nn.utils.clip_grad_norm_(pipeline.bundle.trainable().parameters(), 1.0)
        optimizer.step()
        means.append(float(rewards.mean()))
    assert means[0] < 0.6 and means[-1] > 0.8
