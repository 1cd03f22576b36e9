"""Episodes of a policy in environments whose every number is known beforehand."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal

from tests.scripted_environment import KINDS, Clocks, length_of, pipeline, request
from unirl.config.errors import EpisodeError, IncompatibleError, InvalidValueError
from unirl.models.policies.bundle import CategoricalBundle, FlowBundle, GaussianBundle, PolicyBundle
from unirl.models.policies.networks import PolicyNetwork
from unirl.models.policies.pipeline import PolicyPipeline, episodes_of, start_seed
from unirl.sde.noise import NoiseSource
from unirl.testing.second_device import second_devices
from unirl.types.environments import DiscreteActions
from unirl.types.primitives import Episodes, Texts
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import ActionSegment


def rolled(env: Clocks, req: RolloutReq, chunk: int = 8, seed: int = 0) -> RolloutTrack[ActionSegment]:
    return pipeline(env, seed).generate(req, chunk).tracks["action"].sampled_as(ActionSegment)


@pytest.mark.parametrize("actions", KINDS)
def test_a_row_is_one_episode_whose_return_is_the_sum_of_its_rewards(actions) -> None:
    track = rolled(env := Clocks(actions), request())
    segment = track.segment
    lengths = [length_of(seed % 1000) for seed in env.seeds]
    assert segment.lengths.tolist() == lengths
    assert segment.loss_mask.all() and segment.terminated.sum() == 4 and segment.finished.all()
    assert isinstance(track.decoded, Episodes)
    assert track.decoded.returns.tolist() == [n * (n + 1) / 2 for n in lengths]
    assert segment.observations["state"][:, 1].tolist() == [float(t) for n in lengths for t in range(n)]


def test_an_episode_that_was_cut_off_keeps_the_observation_that_followed() -> None:
    segment = rolled(env := Clocks(KINDS[0], cuts=True), request()).segment
    lengths = [length_of(seed % 1000) for seed in env.seeds]
    assert segment.lengths.tolist() == [n + 1 for n in lengths]
    context = ~segment.loss_mask
    assert segment.observations["state"][context][:, 1].tolist() == [float(n) for n in lengths]
    assert segment.truncated[segment.ends].all() and not segment.terminated.any() and not segment.finished.any()


def test_a_row_that_is_full_keeps_the_observation_after_its_last_decision() -> None:
    segment = rolled(Clocks(KINDS[0]), request(max_steps=2)).segment
    assert segment.lengths.tolist() == [3] * 4
    assert segment.loss_mask.tolist() == [True, True, False] * 4
    assert segment.ends.tolist() == [False, True, False] * 4 and not segment.truncated.any()
    assert segment.observations["state"][~segment.loss_mask][:, 1].tolist() == [2.0] * 4


@pytest.mark.parametrize("cuts", [False, True])
def test_a_continuing_row_goes_on_with_other_episodes_until_it_is_full(cuts: bool) -> None:
    segment = rolled(env := Clocks(KINDS[1], cuts), request(max_steps=17, continuing=True)).segment
    decided = segment.loss_mask
    assert decided.sum() == 4 * 17 and len(set(env.seeds)) == len(env.seeds)
    complete = [episode for row in segment.episodes() for episode in row]
    assert {episode.stop - episode.start for episode in complete} <= {3, 5}
    assert all((segment.terminated | segment.truncated)[episode.stop - 1] for episode in complete)
    # Each row has 17 decisions: whole episodes, and the beginning of one, which is not among them.
    assert sum(e.stop - e.start for e in complete) < 4 * 17
    assert segment.statistics()["env/return"] == pytest.approx(
        sum(n * (n + 1) / 2 for n in (e.stop - e.start for e in complete)) / len(complete)
    )


def test_the_first_episodes_of_a_group_begin_alike_and_later_ones_do_not() -> None:
    env = Clocks(KINDS[0])
    rolled(env, request(groups=["a", "a", "b", "b"], max_steps=12, continuing=True))
    first, later = env.seeds[:4], env.seeds[4:]
    assert first[0] == first[1] != first[2] == first[3]
    assert len(set(later)) == len(later)


@pytest.mark.parametrize("actions", KINDS)
def test_rows_do_not_depend_on_how_many_act_side_by_side(actions) -> None:
    whole = rolled(Clocks(actions), request(6, max_steps=9, continuing=True), chunk=6)
    alone = rolled(Clocks(actions), request(6, max_steps=9, continuing=True), chunk=1)
    assert torch.equal(whole.segment.actions, alone.segment.actions)
    assert torch.equal(whole.segment.logp, alone.segment.logp)
    assert torch.equal(whole.segment.offsets, alone.segment.offsets)


@pytest.mark.parametrize("actions", KINDS)
def test_a_replay_on_the_same_weights_gives_the_recorded_log_probs(actions) -> None:
    policy = pipeline(Clocks(actions, cuts=True))
    segment = (
        policy.generate(request(max_steps=9, continuing=True), 4).tracks["action"].sampled_as(ActionSegment).segment
    )
    replayed = policy.stage.replay({}, segment)
    assert torch.equal(replayed.logp[segment.loss_mask], segment.logp[segment.loss_mask])


def test_draws_follow_the_probabilities_of_the_policy() -> None:
    """20,000 decisions at one observation: frequencies within 4 standard errors of the softmax."""
    stage = pipeline(Clocks(DiscreteActions(3)), seed=3).stage
    with torch.no_grad():
        stage.policy.get_parameter("output_layer.bias").copy_(torch.tensor([0.0, 1.0, -1.0]))
    count = 20_000
    noise = torch.rand(count, generator=torch.Generator().manual_seed(1))
    chosen = stage.decide({"state": torch.zeros(1, 2).expand(count, 2)}, noise)
    expected = torch.tensor([0.0, 1.0, -1.0]).softmax(0)
    frequencies = torch.bincount(chosen["actions"], minlength=3) / count
    assert ((frequencies - expected).abs() < 4 * (expected * (1 - expected) / count).sqrt()).all()


def test_a_row_whose_environment_failed_has_weight_0_and_stops() -> None:
    track = rolled(Clocks(KINDS[0], broken=[1]), request(max_steps=12, continuing=True))
    assert track.weight.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert isinstance(track.decoded, Episodes) and track.decoded.faults == ["", "it broke", "", ""]
    assert track.segment.lengths[1] == 2 and track.segment.loss_mask.sum() == 3 * 12 + 2


def test_only_episodes_whose_environment_reports_success_have_a_success_rate() -> None:
    """Of four rows that are cut after 4 steps, those with odd starts go on, and have no success yet."""
    settings = {"max_steps": 4}
    whole = rolled(env := Clocks(KINDS[0]), request(**settings))
    ended = [float(length_of(seed % 1000) == 3) for seed in env.seeds]
    assert 0 < sum(ended) < 4, "the starts of this test must have both ends"
    assert isinstance(whole.decoded, Episodes) and whole.decoded.success.tolist() == ended
    assert whole.segment.statistics()["env/success_once"] == sum(ended) / 4

    part = rolled(Clocks(KINDS[0], silent=[0]), request(**settings))
    assert isinstance(part.decoded, Episodes) and part.decoded.success.isnan().tolist() == [True, False, False, False]
    assert part.segment.statistics()["env/success_once"] == sum(ended[1:]) / 3
    assert ["success" in facts for facts in part.segment.facts()] == [False, True, True, True]
    assert [facts["success"] for facts in part.segment.facts()[1:]] == [bool(each) for each in ended[1:]]

    none = rolled(Clocks(KINDS[0], silent=range(4)), request(**settings))
    assert none.segment.statistics().keys() == whole.segment.statistics().keys() - {"env/success_once"}
    assert isinstance(none.decoded, Episodes) and none.decoded.success.isnan().all()
    preview = none.decoded.preview()
    assert isinstance(preview, Texts) and not any("success" in text for text in preview.texts)


def test_a_row_of_several_episodes_counts_those_that_report_success() -> None:
    """Decisions of one row: an episode that reports none, one without success, and one with it."""
    told = torch.tensor([-1, -1, -1, 0, 1, 0], dtype=torch.int8)
    ends = torch.tensor([False, True, False, True, False, True])
    row = rolled(Clocks(KINDS[0]), request(1, max_steps=6, continuing=True)).segment.select([0])
    fields = {"terminated": ends, "truncated": torch.zeros(6, dtype=torch.bool), "success": told}
    segment = row.replace(
        **fields,
        offsets=torch.tensor([0, 6]),
        **{name: getattr(row, name)[:6] for name in ("actions", "logp", "rewards", "num_steps")},
        loss_mask=torch.ones(6, dtype=torch.bool),
        observations={"state": row.observations["state"][:6]},
    )
    assert segment.totals()["success"] == [[-1.0, 0.0, 1.0]]
    assert segment.statistics()["env/success_once"] == 0.5 and segment.facts()[0]["success"] is True
    assert episodes_of(segment, [""]).success.tolist() == [0.5]


def test_environments_that_all_failed_end_the_run_by_name() -> None:
    with pytest.raises(EpisodeError, match=r"all 4 rows failed\. The first one: it broke"):
        rolled(Clocks(KINDS[0], broken=[0, 1, 2, 3]), request())


def test_a_policy_of_other_actions_is_refused() -> None:
    with pytest.raises(
        IncompatibleError, match="the policy takes 2 discrete actions, and the environment has 3 discrete"
    ):
        PolicyPipeline(CategoricalBundle(observations=2, actions=2), env=Clocks(DiscreteActions(3)))
    with pytest.raises(IncompatibleError, match=r"reads 'state' of shape \[7\], and the environment shows \[2\]"):
        PolicyPipeline(CategoricalBundle(observations=7, actions=3), env=Clocks(DiscreteActions(3)))
    with pytest.raises(IncompatibleError, match="reads the observation 'pixels', and the environment shows state"):
        bundle = CategoricalBundle(observations={"pixels": (3, 84, 84)}, actions=3)
        PolicyPipeline(bundle, env=Clocks(DiscreteActions(3)))


def test_the_entropy_of_a_squashed_gaussian_is_refused_with_the_way_out() -> None:
    bundle = GaussianBundle(observations=2, actions=2, squashed=True)
    policy = PolicyPipeline(bundle, env=Clocks(KINDS[1]))
    segment = policy.generate(request(), 4).tracks["action"].sampled_as(ActionSegment).segment
    with pytest.raises(IncompatibleError, match=r"algorithm\.entropy_coef=0, or bundle\.squashed=false"):
        policy.stage.replay({}, segment, entropy=True)


@pytest.mark.parametrize("kind", [CategoricalBundle, GaussianBundle, FlowBundle])
def test_a_policy_that_was_written_is_read_as_the_same_policy(kind, tmp_path) -> None:
    written = kind(observations={"state": (2,)}, actions=2, width=8, seed=5)
    parameters = dict(written.trainable().named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.1)
    read = PolicyBundle.from_files(path=str(written.write(tmp_path / "policy", parameters)))
    noise = torch.rand(3, *written.stage().policy.noise_shape)
    state = {"state": torch.rand(3, 2)}
    ours, theirs = (bundle.stage().decide(state, noise) for bundle in (written, read))
    assert type(read) is kind and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", ["categorical", "gaussian", "flow"])
def test_the_host_waits_once_for_each_decision(kind: str) -> None:
    """On an emulated device: what is executed, and how likely it was, come back together."""
    with second_devices() as devices:
        device = torch.device("emulated:0")
        env = Clocks(KINDS[0] if kind == "categorical" else KINDS[1])
        bundle: PolicyBundle
        if kind == "categorical":
            bundle = CategoricalBundle(device, observations=2, actions=3)
        elif kind == "gaussian":
            bundle = GaussianBundle(device, observations=2, actions=2)
        else:
            bundle = FlowBundle(device, observations=2, actions=2)
        acting = PolicyPipeline(bundle, env=env)
        waits = []
        for decisions in (4, 12):
            devices.reset()
            acting.generate(request(max_steps=decisions, continuing=True), 8)
            waits.append(devices.syncs.total())
    assert waits[1] - waits[0] == 8


def test_a_squashed_policy_with_a_std_of_085_begins_with_nearly_uniform_actions() -> None:
    """Kolmogorov's distance to the uniform distribution is 0.01, as the integral says, and 0.44 for a std of 0.22."""
    noise = Normal(0.0, 1.0).icdf((torch.arange(100_000) + 0.5) / 100_000)[:, None].expand(-1, 2)

    def distance(log_std: float) -> float:
        policy = GaussianBundle(observations=2, actions=2, squashed=True, log_std=log_std).trainable()
        assert isinstance(policy, PolicyNetwork)
        with torch.no_grad():
            recorded = policy({"state": torch.zeros(1, 2).expand(100_000, 2)}, noise=noise)["actions"]
        places = policy.executed(recorded)[:, 0, 0].sort().values
        return float(((places + 1) / 2 - torch.linspace(0, 1, 100_000)).abs().max())

    assert distance(-0.16) < 0.02
    assert distance(-1.5) > 0.2
    with pytest.raises(InvalidValueError, match=r"bundle\.log_std must lie in \(-20, 2\)"):
        GaussianBundle(observations=2, actions=2, squashed=True, log_std=2.0)


def test_start_seed_is_the_seed_with_which_the_environment_is_reset() -> None:
    req = request()
    rolled(env := Clocks(KINDS[0]), req)
    noise = NoiseSource(req.only_track(ActionSamplingParams)[1].seed, req.purpose, req.step)
    assert env.seeds == [start_seed(noise, group) for group in req.group_ids]
