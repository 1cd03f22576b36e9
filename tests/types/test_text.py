"""The settings, conditions and segments of text, and what a model says of the settings."""

import pytest
import torch

from unirl.sde.kernels import DPMSolver2M, FlowSDEStrategy
from unirl.testing.toy import toy_facts, toy_params
from unirl.types.conditions import EncodedImages, ImagePatches, PackedVectors, PromptTokens
from unirl.types.facts import LanguageFacts
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, Sampling
from unirl.types.segments import TextSegment

FACTS = LanguageFacts(
    family="tiny", block_class_names=("Block",), lora_targets=("proj",), vocab_size=8, hidden_size=4, context_length=32
)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"temperature": -0.1}, "temperature must be >= 0"),
        ({"temperature": float("nan")}, "temperature must be >= 0"),
        ({"temperature": float("inf")}, "temperature must be >= 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be >= 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, r"min_new_tokens must lie in 0\.\.max_new_tokens \(8\)"),
        ({"stop": ("",)}, "empty string"),
    ],
)
def test_settings_of_text_that_mean_nothing_are_refused(change: dict, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        ARSamplingParams(**change)


def test_greedy_text_has_nothing_to_train_and_may_be_evaluated() -> None:
    params = ARSamplingParams(temperature=0.7)
    assert params.density_problem(0) is None
    greedy = params.for_evaluation({"temperature": 0.0, "samples_per_prompt": 3, "seed": 7})
    assert (greedy.temperature, greedy.samples_per_prompt, greedy.seed) == (0.0, 3, 7)
    assert "temperature=1.0" in (greedy.density_problem(0) or "")


def test_an_evaluation_of_shorter_responses_lets_them_end() -> None:
    params = ARSamplingParams(max_new_tokens=64, min_new_tokens=32).for_evaluation({"max_new_tokens": 16})
    assert (params.max_new_tokens, params.min_new_tokens) == (16, 16)


def test_an_evaluation_has_no_stochastic_steps_and_its_own_number_of_steps() -> None:
    params = DiffusionSamplingParams(kernel=FlowSDEStrategy(), num_inference_steps=3, sigmas=(1.0, 0.5, 0.2, 0.0))
    kept = params.for_evaluation({"guidance_scale": 2.0})
    assert (kept.sigmas, kept.guidance_scale, kept.resolve_sde_indices(0)) == (params.sigmas, 2.0, ())
    longer = params.for_evaluation({"num_inference_steps": 9})
    assert (longer.sigmas, longer.num_inference_steps) == (None, 9)


def test_settings_say_which_keys_of_an_evaluation_they_understand() -> None:
    for params in (ARSamplingParams(), toy_params()):
        assert isinstance(params, Sampling)
        assert all(key in vars(params) for key in params.evaluation_keys)


def test_a_kernel_without_noise_gives_a_loss_nothing_to_train() -> None:
    params = DiffusionSamplingParams(kernel=DPMSolver2M(), num_inference_steps=4)
    assert "DPMSolver2M, 4 denoising steps" in (params.density_problem(0) or "")
    assert DiffusionSamplingParams(kernel=FlowSDEStrategy(), num_inference_steps=4).density_problem(0) is None


def test_a_model_refuses_what_it_cannot_sample_and_says_what_fits() -> None:
    FACTS.check(ARSamplingParams(max_prompt_tokens=24, max_new_tokens=8))
    with pytest.raises(
        ValueError, match=r"max_new_tokens=9 is more than the context of \w+, 32 tokens\. Use max_new_tokens=8"
    ):
        FACTS.check(ARSamplingParams(max_prompt_tokens=24, max_new_tokens=9))
    with pytest.raises(ValueError, match="Lower max_prompt_tokens"):
        FACTS.check(ARSamplingParams(max_prompt_tokens=32, max_new_tokens=9))


def test_a_model_refuses_the_settings_of_another_domain() -> None:
    with pytest.raises(ValueError, match=r"Write sampling\._target_=unirl\.types\.sampling\.ARSamplingParams"):
        FACTS.check(toy_params())
    with pytest.raises(ValueError, match=r"Write sampling\._target_=unirl\.types\.sampling\.DiffusionSamplingParams"):
        toy_facts().check(ARSamplingParams())


def test_a_request_names_its_one_track_and_of_which_kind() -> None:
    params = ARSamplingParams()
    req = RolloutReq(
        sample_ids=["a"],
        group_ids=["a"],
        primitives={},
        metadata=[{}],
        tracks={"text": TrackSpec(sampling=params)},
        purpose="r",
        step=0,
    )
    assert req.only_track(ARSamplingParams) == ("text", params)
    with pytest.raises(ValueError, match="track 'text' is sampled with DiffusionSamplingParams"):
        req.only_track(DiffusionSamplingParams)
    with pytest.raises(ValueError, match="generates one track"):
        req.replace(tracks={}).only_track(ARSamplingParams)


def test_lengths_and_cuts_of_responses_are_counted() -> None:
    segment = TextSegment(
        tokens=torch.zeros(6, dtype=torch.int64),
        logp=torch.zeros(6),
        loss_mask=torch.ones(6, dtype=torch.bool),
        offsets=torch.tensor([0, 1, 3, 6]),
        finished=torch.tensor([True, True, False]),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        anchors={},
    )
    assert segment.statistics() == {
        "rollout/response_len_mean": 2.0,
        "rollout/response_len_max": 3.0,
        "rollout/response_len_min": 1.0,
        "rollout/truncated_fraction": pytest.approx(1 / 3),
        "samples/tokens": 6.0,
    }
    costs = segment.select([2, 0]).costs()
    assert costs is not None and costs.tolist() == [3, 1]


def test_prompts_and_their_images_are_selected_row_by_row() -> None:
    prompt = PromptTokens(
        tokens=torch.arange(5),
        positions=torch.arange(15).view(5, 3),
        next_position=torch.tensor([2, 3]),
        offsets=torch.tensor([0, 2, 5]),
    )
    assert prompt.lengths.tolist() == [2, 3]
    last = prompt.select([1])
    assert last.tokens.tolist() == [2, 3, 4] and last.positions[0].tolist() == [6, 7, 8]
    images = ImagePatches(
        patches=torch.arange(6.0)[:, None],
        grids=[(), ((1, 2, 2), (1, 1, 2))],
        digests=[(), ("a", "b")],
        offsets=torch.tensor([0, 0, 6]),
    )
    twice = ImagePatches.concat([images.select([1]), images.select([0])])
    assert twice.grids == [((1, 2, 2), (1, 1, 2)), ()] and twice.offsets.tolist() == [0, 6, 6]
    assert twice.digests == [("a", "b"), ()] and twice.identities()[1] == ((), ())


def test_spans_and_encoded_images_follow_their_rows() -> None:
    prompt = PromptTokens(
        tokens=torch.arange(5),
        positions=torch.arange(10).view(5, 2),
        next_position=torch.tensor([2, 3]),
        offsets=torch.tensor([0, 2, 5]),
        spans=[(), ((0, 2),)],
    )
    assert prompt.select([1, 0, 1]).spans == [((0, 2),), (), ((0, 2),)]
    assert PromptTokens.concat([prompt, prompt.select([1])]).spans == [(), ((0, 2),), ((0, 2),)]
    images = EncodedImages(
        latents=PackedVectors(values=torch.arange(5.0)[:, None], offsets=torch.tensor([0, 2, 5])),
        features=PackedVectors(values=torch.arange(4.0)[:, None], offsets=torch.tensor([0, 2, 4])),
        sizes=[((1, 2),), ((3, 1),)],
        digests=[("a",), ("b",)],
    )
    swapped = images.select([1, 0])
    assert swapped.latents.values.flatten().tolist() == [2, 3, 4, 0, 1] and swapped.sizes == [((3, 1),), ((1, 2),)]
    assert swapped.features.offsets.tolist() == [0, 2, 4] and swapped.identities() == [("b",), ("a",)]
