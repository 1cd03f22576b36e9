"""Prompts in, a rollout out: what a response holds, where its noise comes from, and what cannot change a bit of it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import pytest
import torch

from tests.models.rollouts import PROMPTS, request_for, roll, sampling
from tests.toy import ToyBundle, ToyPipeline
from unirl.models.denoising.embeddings import PromptEmbeddings
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.models.sd3.family import SD3Bundle, SD3Pipeline
from unirl.sde.kernels import DPMSolver2M
from unirl.sde.noise import NoiseSource
from unirl.testing.toy import toy_params, toy_request
from unirl.types.conditions import TextEmbedCondition


def test_a_response_echoes_the_request(toy: SD3Pipeline) -> None:
    params = sampling(toy)
    req = request_for(params)
    track = roll(toy)
    assert track.sample_ids == req.sample_ids and track.group_ids == req.group_ids
    assert track.segment.sigmas.tolist() == list(params.sigmas or ())
    assert track.segment.sde_indices == (0, 2) and track.segment.indices == (0, 1, 2, 3, 5)
    assert track.weight.tolist() == [1.0] * 6 and track.weight_version.tolist() == [3] * 6


def test_the_first_stored_latent_is_the_keyed_noise(toy: SD3Pipeline) -> None:
    track = roll(toy)
    wanted = NoiseSource(42, "r", 0).normal(track.sample_ids, "x", (4, 4, 4))
    assert torch.equal(track.segment.latents_at(0), wanted)


def test_siblings_share_their_first_noise_only_when_asked(toy: SD3Pipeline) -> None:
    apart, together = roll(toy), roll(toy, init_same_noise=True)
    assert not torch.equal(apart.segment.latents[0, 0], apart.segment.latents[1, 0])
    assert torch.equal(together.segment.latents[0, 0], together.segment.latents[1, 0])
    assert not torch.equal(together.segment.final[0], together.segment.final[1])
    assert not torch.equal(together.segment.latents[0, 0], together.segment.latents[2, 0])


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 5, 7, 16])
def test_chunk_size_changes_no_bit(toy: SD3Pipeline, chunk_size: int, guidance_scale: float) -> None:
    whole, cut = (roll(toy, size, guidance_scale=guidance_scale) for size in (6, chunk_size))
    assert torch.equal(cut.segment.latents, whole.segment.latents)
    assert torch.equal(cut.segment.logp, whole.segment.logp)
    assert torch.equal(cut.decoded.pixels, whole.decoded.pixels)


@pytest.mark.parametrize("chunk_size", [1, 4, 5])
def test_decoding_while_sampling_changes_no_bit(toy: SD3Pipeline, chunk_size: int) -> None:
    ahead = SD3Pipeline(toy.bundle, decode_ahead=True)
    whole, cut = roll(toy, 6), roll(ahead, chunk_size)
    assert torch.equal(cut.segment.latents, whole.segment.latents)
    assert torch.equal(cut.decoded.pixels, whole.decoded.pixels)


def test_decoding_ahead_runs_while_the_next_chunk_is_sampled(toy: SD3Pipeline) -> None:
    """The first of two chunks is decoded here once the second is begun: it would never be if it stood in the way."""
    ahead, begun, awaited = SD3Pipeline(toy.bundle, decode_ahead=True), threading.Semaphore(0), [2, 0]
    sample, decode = ahead.stage.sample, ahead.decoder.decode

    def sampled(*args, **kwargs):
        begun.release()
        return sample(*args, **kwargs)

    def decoded(latents):
        assert all(begun.acquire(timeout=600.0) for _ in range(awaited.pop(0)))
        return decode(latents)

    ahead.stage.sample, ahead.decoder.decode = sampled, decoded
    try:
        assert len(roll(ahead, 2, per_prompt=2).decoded.pixels) == 6
    finally:
        del ahead.stage.sample


def test_what_decoding_ahead_raises_ends_the_rollout(toy: SD3Pipeline) -> None:
    ahead = SD3Pipeline(toy.bundle, decode_ahead=True)
    ahead.decoder.decode = lambda latents: (_ for _ in ()).throw(RuntimeError("the VAE is broken"))
    with pytest.raises(RuntimeError, match="the VAE is broken"):
        roll(ahead, 4)


def test_multistep_solver_runs_on_the_deterministic_steps(toy: SD3Pipeline) -> None:
    euler, second = roll(toy, sde_indices=()), roll(toy, sde_indices=(), solver=DPMSolver2M())
    assert not torch.equal(euler.segment.final, second.segment.final)
    torch.testing.assert_close(euler.segment.final, second.segment.final, rtol=0.5, atol=0.5)


def test_an_explicit_schedule_wins_over_the_model_s_own() -> None:
    pipeline = ToyPipeline(ToyBundle())
    explicit = (1.0, 0.5, 0.25, 0.0)
    assert pipeline.sigmas(toy_params(num_inference_steps=3, sde_indices=(), sigmas=explicit)).tolist() == list(
        explicit
    )
    own = pipeline.sigmas(dataclasses.replace(toy_params(num_inference_steps=4, sde_indices=()), sigmas=None))
    torch.testing.assert_close(own, torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]))  # 3 t / (1 + 2 t)


def test_two_tracks_are_refused() -> None:
    req = toy_request()
    spec = req.tracks["image"]
    with pytest.raises(ValueError, match="one track"):
        ToyPipeline(ToyBundle()).generate(req.replace(tracks={"a": spec, "b": spec}), 4)


# --- embeddings ------------------------------------------------------------------------------------------------------


class CountingEncoder:
    """Counts the texts of each forward."""

    components: tuple[str, ...] = ()

    def __init__(self, pipeline: DiffusionPipeline) -> None:
        self.inner = pipeline.embed.encoder
        self.forwards: list[list[str]] = []

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        self.forwards.append(list(texts))
        return self.inner.encode(texts, max_sequence_length)


def counting(pipeline: DiffusionPipeline, cache_gb: float) -> tuple[PromptEmbeddings, CountingEncoder]:
    encoder = CountingEncoder(pipeline)
    return PromptEmbeddings(pipeline.bundle, encoder, batch_size=4, cache_gb=cache_gb), encoder


def test_each_prompt_is_encoded_once_across_rollouts(toy: SD3Pipeline) -> None:
    embed, encoder = counting(toy, 1.0)
    embed(["a", "b", "a", "c", "b"], 16)
    embed(["c", "a"], 16)
    assert encoder.forwards == [["a", "b", "c", "a"]]  # one full chunk, filled with a copy
    embed(["d", "a"], 16)
    embed(["a"], 24)  # another length is another embedding
    assert encoder.forwards[1:] == [["d"] * 4, ["a"] * 4]


def test_the_cache_changes_no_bit_when_full_refilled_or_absent(toy: SD3Pipeline) -> None:
    kept, _ = counting(toy, 1.0)
    none, _ = counting(toy, 0.0)
    texts = ["a red circle", "b", "two blue squares", "d", "e", "a red circle"]
    wanted = kept(texts, 16)
    tiny, encoder = counting(toy, kept.cache.size * 2.5 / 5 / 1024**3)
    for order in (texts, texts[::-1], texts[2:4], texts):
        for embed in (kept, none, tiny):
            result = embed(order, 16)
            rows = [texts.index(text) for text in order]
            assert torch.equal(result.embeds, wanted.embeds[rows])
            assert torch.equal(result.pooled, wanted.pooled[rows])
    assert len(tiny.cache.entries) == 2 and tiny.cache.size <= tiny.capacity and len(encoder.forwards) > 3


def test_a_refilled_cache_changes_no_bit_of_a_rollout(toy: SD3Pipeline) -> None:
    first = roll(toy, guidance_scale=3.0)
    toy.embed.cache.clear()
    roll(toy, prompts=("another", "x"), guidance_scale=3.0)
    again = roll(toy, guidance_scale=3.0)
    assert torch.equal(first.segment.latents, again.segment.latents)
    assert torch.equal(first.decoded.pixels, again.decoded.pixels)


# --- residency -------------------------------------------------------------------------------------------------------


def test_encoders_and_decoder_visit_the_device_only_while_they_run() -> None:
    bundle = SD3Bundle(path="toy", dtype="fp32")
    bundle.device = torch.device("meta")  # nothing can run there, but it can be told from the CPU
    moves: list[tuple[str, str]] = []
    bundle._move = lambda names, device: moves.extend((name, device.type) for name in names)  # type: ignore[method-assign]
    with bundle.resident(["vae"]):
        moves.append(("vae", "runs"))
    assert moves == [("vae", "meta"), ("vae", "runs"), ("vae", "cpu")]


def test_cached_prompts_do_not_bring_encoders_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = SD3Pipeline(SD3Bundle(path="toy", dtype="fp32"), keep_resident=False)
    params = sampling(pipeline, guidance_scale=2.0)
    pipeline.encode(PROMPTS, params)
    brought: list[str] = []
    monkeypatch.setattr(pipeline.bundle, "onload", brought.extend)
    pipeline.encode(PROMPTS, params)
    assert brought == []
    pipeline.encode(["new"], params)
    assert brought == ["text_encoder", "text_encoder_2", "text_encoder_3"]


def test_an_unknown_component_is_named() -> None:
    with pytest.raises(ValueError, match="no component 'vea'; it has \\['denoiser'\\]"):
        ToyBundle().offload(["vea"])
