"""The service attaches what the scorer said, row by row, and stops at anything else."""

import pytest
import torch

from unirl.config.errors import ConfigError, RewardError
from unirl.reward.base import RewardScorer, single
from unirl.reward.combine import WeightedRewards
from unirl.reward.local.image_statistics import BrightnessRewardScorer
from unirl.reward.local.shapes import ShapesRewardScorer
from unirl.reward.service import RewardService
from unirl.testing.reward import check_reward
from unirl.types.primitives import Images, Texts, Videos
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

LEVELS = [0.0, 0.25, 0.5, 1.0]


def a_request():
    count = len(LEVELS)
    return RolloutReq(
        sample_ids=[f"g{i // 2}:{i % 2}" for i in range(count)],
        group_ids=[f"g{i // 2}" for i in range(count)],
        primitives={"text": Texts(texts=[f"prompt {i // 2}" for i in range(count)])},
        metadata=[{"row": i} for i in range(count)],
        tracks={},
        purpose="r",
        step=0,
    )


def a_track(decoded, ids, **fields):
    return RolloutTrack(
        sample_ids=ids,
        group_ids=[name.split(":")[0] for name in ids],
        conditions={},
        segment=torch.zeros(len(ids)),
        decoded=decoded,
        weight=torch.ones(len(ids)),
        weight_version=torch.zeros(len(ids), dtype=torch.int64),
        **fields,
    )


def flat(levels):
    return Images(pixels=torch.tensor(levels)[:, None, None, None].expand(-1, 3, 4, 4).clone())


def a_response():
    return RolloutResp({"image": a_track(flat(LEVELS), a_request().sample_ids)})


def attached(scorer):
    return RewardService(backend=scorer).score_and_attach(a_request(), a_response()).tracks["image"]


def test_a_sample_without_a_score_names_the_line_of_its_prompt():
    places = [f"mine.jsonl:{3 + i // 2}" for i in range(len(LEVELS))]
    request = a_request().replace(places=places, metadata=[{"color": "red"}] * 2 + [{"color": "mauve"}] * 2)
    with pytest.raises(RewardError, match=r"'g1:0'.*'mauve'.*Write one of red.*2 of 4.*belongs to mine\.jsonl:4\."):
        RewardService(backend=ShapesRewardScorer()).score_and_attach(request, a_response())


class Recorder(RewardScorer):
    """Keeps the request it got; scores by metadata."""

    def __init__(self, *reads):
        self.reads = reads
        self.got = None

    def score(self, request):
        self.got = request
        return single("row", torch.arange(len(request)))


class Broken(RewardScorer):
    """Answers whatever it was made with."""

    reads = ("images",)

    def __init__(self, answer):
        self.answer = answer

    def score(self, request):
        return self.answer(request)


def response(total, **components):
    return RewardResponse(total=total, components=components or {"x": total})


def test_rewards_are_the_scores_in_the_order_of_the_rows():
    track = attached(BrightnessRewardScorer())
    torch.testing.assert_close(track.rewards, torch.tensor(LEVELS))
    assert track.rewards.dtype == torch.float32
    assert torch.equal(track.component_rewards["brightness"], track.rewards)


def test_a_scorer_gets_the_columns_it_reads_and_no_others():
    scorer = Recorder("prompts", "metadata")
    attached(scorer)
    assert scorer.got.prompts == ["prompt 0", "prompt 0", "prompt 1", "prompt 1"]
    assert scorer.got.metadata == [{"row": i} for i in range(4)]
    assert scorer.got.images is None and scorer.got.texts is None


def test_videos_of_unequal_length_reach_the_scorer_as_they_were_decoded():
    frames = torch.rand(9, 3, 4, 4).mul(255).to(torch.uint8)
    videos = Videos(frames=frames, offsets=torch.tensor([0, 2, 5, 6, 9]))
    scorer = Recorder("videos")
    resp = RolloutResp({"video": a_track(videos, a_request().sample_ids)})
    RewardService(backend=scorer).score_and_attach(a_request(), resp)
    assert torch.equal(scorer.got.videos.frames, frames / 255) and scorer.got.images is None
    assert torch.equal(scorer.got.videos.offsets, videos.offsets)
    with pytest.raises(RewardError, match="reads videos, but the rollout decoded Images"):
        attached(scorer)


def test_a_leaf_is_scored_with_the_prompt_of_its_ancestor():
    req = a_request()
    parent = a_track(Texts(texts=["?"] * 4), req.sample_ids)
    ids = [f"{sample}/image{j}" for sample in reversed(req.sample_ids) for j in range(2)]
    parents = [sample for sample in reversed(req.sample_ids) for _ in range(2)]
    leaf = a_track(flat([0.0] * 8), ids, parent_track="text", parent_ids=parents)
    scorer = Recorder("prompts")
    resp = RewardService(backend=scorer).score_and_attach(req, RolloutResp({"text": parent, "image": leaf}))
    assert scorer.got.prompts == ["prompt 1"] * 4 + ["prompt 0"] * 4
    assert resp.tracks["text"].rewards is None and resp.tracks["image"].rewards is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_not_finite_is_an_error_naming_reward_sample_and_value(value):
    total = torch.tensor([0.0, 1.0, value, value])
    with pytest.raises(RewardError, match=rf"'Broken'.* {value} .*'g1:0'.*2 of 4") as caught:
        attached(Broken(lambda request: response(total, x=torch.zeros(4))))
    assert caught.value.code == 6003
    with pytest.raises(RewardError, match=r"Broken\.part"):
        attached(Broken(lambda request: response(torch.zeros(4), part=total)))


@pytest.mark.parametrize("total", [torch.zeros(3), torch.zeros(5), torch.zeros(4, 1), torch.tensor(0.0)])
def test_a_wrong_count_is_an_error(total):
    with pytest.raises(
        RewardError, match=r"(?s)'Broken'.*of \[4\], one number per sample.*4 samples, 'g0:0'"
    ) as caught:
        attached(Broken(lambda request: response(total)))
    assert caught.value.code == 6002


def test_missing_components_are_an_error():
    with pytest.raises(RewardError, match="returned no components: name each score, as in components="):
        attached(Broken(lambda request: RewardResponse(total=torch.zeros(4), components={})))


def test_a_scorer_that_raises_stops_the_step_with_its_own_message():
    def fail(request):
        raise KeyError("answer")

    with pytest.raises(RewardError, match=r"'Broken' failed on 4 samples from 'g0:0'.*KeyError.*answer") as caught:
        attached(Broken(fail))
    assert isinstance(caught.value.__cause__, KeyError)


def test_rewards_are_attached_once():
    service = RewardService(backend=BrightnessRewardScorer())
    once = service.score_and_attach(a_request(), a_response())
    with pytest.raises(RewardError, match="already has a reward"):
        service.score_and_attach(a_request(), once)


def test_a_reward_for_another_modality_is_refused():
    texts = RolloutResp({"text": a_track(Texts(texts=["a"] * 4), a_request().sample_ids)})
    with pytest.raises(RewardError, match="reads images, but the rollout decoded Texts"):
        RewardService(backend=BrightnessRewardScorer()).score_and_attach(a_request(), texts)


def test_an_unknown_column_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="Did you mean 'images'"):
        RewardService(backend=Recorder("image"))


def test_a_constant_reward_fails_the_probe_and_a_varying_one_passes():
    images = flat(LEVELS).pixels
    request = RewardRequest(sample_ids=list("abcd"), images=images)
    assert RewardService(backend=BrightnessRewardScorer()).probe(request).total.tolist() == pytest.approx(LEVELS)
    with pytest.raises(RewardError, match="gave 0 to all 4 rows") as caught:
        RewardService(backend=Broken(lambda request: response(torch.zeros(4)))).probe(request)
    assert caught.value.code == 6003


def test_a_weighted_sum_is_the_sum_of_weights_times_totals():
    bright, other = (
        BrightnessRewardScorer(),
        Broken(lambda r: response(torch.arange(float(len(r))), x=torch.ones(len(r)), y=torch.zeros(len(r)))),
    )
    both = WeightedRewards(scorers={"bright": bright, "rank": other}, weights={"bright": 2.0, "rank": -0.5})
    track = attached(both)
    torch.testing.assert_close(track.rewards, 2 * torch.tensor(LEVELS) - 0.5 * torch.arange(4.0))
    assert sorted(track.component_rewards) == ["bright", "rank", "rank_x", "rank_y"]
    assert both.reads == ("images",)


def test_scorers_and_weights_must_pair_up():
    with pytest.raises(ConfigError, match=r"weights\.brigth names no scorer\. Did you mean 'bright'"):
        WeightedRewards(scorers={"bright": BrightnessRewardScorer()}, weights={"brigth": 1.0})
    with pytest.raises(ConfigError, match=r"scorers\.bright has no weight"):
        WeightedRewards(scorers={"bright": BrightnessRewardScorer()}, weights={})


def test_answers_of_ranks_join_to_the_answer_of_one():
    whole = attached(BrightnessRewardScorer())
    service, req, track = RewardService(backend=BrightnessRewardScorer()), a_request(), a_response().tracks["image"]
    parts = [
        service.score_and_attach(req.slice(a, b), RolloutResp({"image": track.slice(a, b)}))
        for a, b in ((0, 1), (1, 4))
    ]
    assert torch.equal(RolloutResp.concat(parts).tracks["image"].rewards, whole.rewards)


def test_offload_reaches_the_scorer():
    calls = []

    class Moved(Recorder):
        def offload(self):
            calls.append("off")

        def onload(self):
            calls.append("on")

    service = RewardService(backend=Moved())
    service.offload(())
    service.offload(("reward",))
    service.onload(("reward",))
    assert calls == ["off", "on"]


def test_check_reward_catches_a_score_that_depends_on_other_rows():
    def relative(request):
        values = request.images.mean(dim=(1, 2, 3))
        return response(values - values.mean())

    request = RewardRequest(sample_ids=list("abcd"), images=flat(LEVELS).pixels)
    check_reward(BrightnessRewardScorer(), request)
    with pytest.raises(AssertionError, match="a score depends on"):
        check_reward(Broken(relative), request)
