"""Rewards of tracks before the last one: texts are scored beside their images, trained, dropped, saved and refused."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.run_files import lines_of, metrics_of
from tests.trainer.text_reward import shared
from unirl.cli.main import main
from unirl.config.errors import IncompatibleError, Preempted, RewardError, UniRLError
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.plan.sizes import sizes_of_policies
from unirl.trainer.assemble import build_trainer

PE, BAGEL, CHAIN = "pe/pe_trainside_pickscore", "unified_model/bagel_think_joint", "unified_model/hi3_think"
JOINT = "unified_model/hi3_joint"
COMMON = ("scale=toy", "num_rollouts=2", "tracking.sample_steps=0", "evaluation.eval_steps=0", "plugins=[tests]")
OF_RECIPE = {
    # Some responses end before 64 tokens.
    PE: ("rollout.pe_marker=null", "ar.sampling.max_new_tokens=64", "diffusion.sampling.samples_per_prompt=2"),
    BAGEL: ("sampling.think.samples_per_prompt=2", "sampling.image.samples_per_prompt=2", "stack.micro_batch_size=4"),
}
LENGTH = "{_target_: unirl.reward.local.length.TextLengthRewardScorer, config: {max_tokens: 1, buffer: 64}}"
JUDGE = "{_target_: tests.trainer.text_reward.SharedLetters}"
FAULTY = "{_target_: tests.trainer.text_reward.SharedLetters, share: 0.3}"
PICKSCORE = "{_target_: unirl.reward.local.pickscore.PickScoreRewardScorer}"
VIDEO = "{_target_: unirl.reward.local.video_pickscore.VideoPickScoreRewardScorer}"
REMOTE = "{_target_: unirl.reward.remote.RemoteRewardBackend, config: {base_url: http://h:1, required_rewards: [a]}}"


def reward_of(track: str, backend: str, **keys: object) -> str:
    settings = "".join(f", {key}: {value}" for key, value in keys.items())
    return f"+reward.tracks.{track}={{backend: {backend}{settings}}}"


def weighted(scorers: dict[str, str], **weights: float) -> str:
    inner = ", ".join(f"{name}: {scorer}" for name, scorer in scorers.items())
    numbers = ", ".join(f"{name}: {weight}" for name, weight in weights.items())
    return f"{{_target_: unirl.reward.combine.WeightedRewards, scorers: {{{inner}}}, weights: {{{numbers}}}}}"


@contextmanager
def trainer_of(folder: Path, *overrides: str, recipe: str = PE):
    loaded = load(recipe, [*COMMON, *OF_RECIPE[recipe], f"run.dir={folder}", *overrides])
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        yield trainer


def run(folder: Path, *overrides: str, recipe: str = PE) -> list[dict]:
    with trainer_of(folder, *overrides, recipe=recipe) as trainer:
        trainer.train()
    return metrics_of(folder)


SCORED = reward_of("ar", LENGTH, weight=0.5)
SETTINGS = (SCORED, "save_interval=1", "tracking.sample_steps=1", "evaluation.eval_steps=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, *SETTINGS)
    return folder


# Rewards


def test_a_rewrite_has_its_images_rewards_and_a_weighted_one_for_its_length(tmp_path) -> None:
    with trainer_of(tmp_path, reward_of("ar", LENGTH, weight=0.5)) as trainer:
        resp = trainer.produce(0)
    written, drawn = resp.tracks["ar"], resp.tracks["diffusion"]
    tokens = written.segment.lengths.double()
    penalty = -((tokens - 1) / 64).clamp(0, 1).float()
    assert len(penalty.unique()) > 1
    torch.testing.assert_close(written.component_rewards["text_length"], penalty)
    images = drawn.rewards.view(len(written), -1).mean(1)
    torch.testing.assert_close(written.rewards, 0.5 * penalty + images)
    torch.testing.assert_close(written.component_rewards["pickscore"], images)
    groups = written.rewards.double().view(2, -1)
    assert (written.advantages.view(2, -1).sign() == (groups - groups.mean(1, keepdim=True)).sign().float()).all()
    assert "text_length" not in drawn.component_rewards


def test_a_judge_of_texts_scores_the_rewrites_for_the_original_prompt(tmp_path) -> None:
    with trainer_of(tmp_path, reward_of("ar", JUDGE, with_credit="false")) as trainer:
        resp = trainer.produce(0)
        prompts = {prompt.prompt_id: prompt.text for prompt in trainer.data.prompts}
    written = resp.tracks["ar"]
    asked = [prompts[group.rpartition("@")[0]] for group in written.group_ids]
    expected = [shared(prompt, text) for prompt, text in zip(asked, written.decoded.texts, strict=True)]
    assert written.rewards.tolist() == pytest.approx(expected) and len(set(expected)) > 2
    assert list(written.component_rewards) == ["shared_letters"]  # without credit, the images do not count
    assert (resp.tracks["diffusion"].advantages != 0).any()  # they are trained as before


def test_a_text_reward_credits_the_thoughts_of_one_network_beside_the_images(tmp_path) -> None:
    with trainer_of(tmp_path, reward_of("think", JUDGE, weight=2), recipe=BAGEL) as trainer:
        resp = trainer.produce(0)
        trainer.learn(0, resp)
        assert trainer.learners[0].version == 1
    thought, image = resp.tracks["think"], resp.tracks["image"]
    images = image.rewards.view(len(thought), -1).mean(1)
    torch.testing.assert_close(thought.rewards, 2 * thought.component_rewards["shared_letters"] + images)
    assert list(image.component_rewards) == ["pickscore"]


def test_several_scorers_of_a_track_are_weighted_and_logged(tmp_path) -> None:
    both = weighted({"length": LENGTH, "judge": JUDGE, "watched": JUDGE}, length=0.5, judge=1.0, watched=0.0)
    [row] = run(tmp_path, reward_of("ar", both), "num_rollouts=1")
    means = {name: row[f"ar/reward/{name}_mean"] for name in ("length", "judge", "watched", "pickscore")}
    assert row["ar/rollout/reward_mean"] == pytest.approx(
        0.5 * means["length"] + means["judge"] + means["pickscore"], rel=1e-5
    )
    assert means["watched"] == means["judge"]


# Rows without a reward


def test_a_rewrite_that_cannot_be_scored_drops_all_rows_of_its_prompt_by_the_name_of_its_reward(tmp_path) -> None:
    budget = "+reward.on_failure={max_dropped_fraction: 0.9}"
    with trainer_of(tmp_path, reward_of("ar", FAULTY), budget, "batch_size=8") as trainer:
        resp = trainer.produce(0)
        trainer.tracker.log_step(1)
        trainer.tracker.flush()
    written, drawn = resp.tracks["ar"], resp.tracks["diffusion"]
    failed = [bool(reasons) for reasons in written.failures]
    lost = {group for group, has_failed in zip(written.group_ids, failed, strict=True) if has_failed}
    assert 0 < len(lost) < 8
    for name, track in (("ar", written), ("diffusion", drawn)):
        assert [bool(weight) for weight in track.weight] == [group not in lost for group in resp.root_groups(name)]
        assert track.advantages.isfinite().all()
    [ledger] = lines_of(tmp_path / "ledger.jsonl")
    branch = len(drawn) // len(written)
    assert ledger["reasons"] == {
        "SharedLetters": branch * sum(failed),
        "sibling": branch * (len(lost) * 4 - sum(failed)),
    }
    drops = [event for event in lines_of(tmp_path / "events.jsonl") if event["ev"] == "group.drop"]
    assert {event["group"] for event in drops} == lost and len(drops) == len(lost)
    assert {event["reason"] for event in drops} == {"SharedLetters"}


def test_without_a_budget_the_first_rewrite_without_a_reward_ends_the_run(tmp_path) -> None:
    with pytest.raises(RewardError, match="'SharedLetters' gave nan to sample"):
        run(tmp_path, reward_of("ar", FAULTY))


def test_evaluations_leave_out_images_of_rewrites_without_a_reward(tmp_path) -> None:
    budget = "+reward.on_failure={max_dropped_fraction: 0.9}"
    settings = ("evaluation.eval_steps=1", "evaluation.samples_per_prompt=2", "num_rollouts=1", "batch_size=8")
    run(tmp_path, reward_of("ar", FAULTY), budget, *settings)
    scores = json.loads((tmp_path / "eval/step-000000/scores.json").read_text())
    assert scores["metrics"]["eval/unscored"] > 0 and scores["samples"]
    assert all(0 <= row["rewards"]["shared_letters"] <= 1 for row in scores["samples"])


# The loop


def test_metrics_samples_and_evaluations_have_the_rewards_of_the_track(finished) -> None:
    for row in metrics_of(finished):
        assert row["ar/rollout/reward_mean"] == pytest.approx(
            0.5 * row["ar/reward/text_length_mean"] + row["rollout/reward_mean"], rel=1e-5
        )
        assert row["reward/text_length_mean"] == row["ar/reward/text_length_mean"]
        assert row["reward/pickscore_mean"] == row["diffusion/reward/pickscore_mean"]
        assert "diffusion/reward/text_length_mean" not in row
    assert "eval/text_length_mean" in (finished / "eval_metrics.csv").read_text()
    assert " text_length=-0." in (finished / "logs/console.log").read_text()
    held_out = json.loads((finished / "eval/step-000002/scores.json").read_text())["samples"]
    for rows in (lines_of(finished / "samples/step-000002/manifest.jsonl"), held_out):
        assert rows and all(set(row["rewards"]) == {"pickscore", "text_length"} for row in rows)
        assert all(row["reward"] == row["rewards"]["pickscore"] for row in rows)


def test_a_run_that_is_stopped_goes_on_bit_for_bit(finished, tmp_path) -> None:
    with trainer_of(tmp_path, *SETTINGS) as trainer:
        trainer.request_stop(signal.SIGTERM)
        with pytest.raises(Preempted):
            trainer.train()
    assert run(tmp_path, *SETTINGS) == metrics_of(finished)
    for policy in ("ar", "diffusion"):
        file = f"checkpoints/checkpoint-000002/policy-{policy}/weights.safetensors"
        assert (tmp_path / file).read_bytes() == (finished / file).read_bytes()


def test_the_length_changes_what_is_learned_by_the_language_model_alone(finished, tmp_path) -> None:
    """In the first step, the diffusion model learns from the same samples and rewards with it and without it."""
    run(tmp_path, *(setting for setting in SETTINGS if setting != SCORED), "num_rollouts=1")
    weights = {
        policy: [
            (folder / f"checkpoints/checkpoint-000001/policy-{policy}/weights.safetensors").read_bytes()
            for folder in (tmp_path, finished)
        ]
        for policy in ("ar", "diffusion")
    }
    assert weights["ar"][0] != weights["ar"][1] and weights["diffusion"][0] == weights["diffusion"][1]


@pytest.mark.slow
def test_two_ray_workers_score_as_one_process_does(finished, tmp_path) -> None:
    rows = run(tmp_path, *SETTINGS, "num_devices=2", "runtime=ray")
    names = ("ar/reward/text_length_mean", "ar/rollout/reward_mean", "rollout/reward_mean")
    for name in names:
        assert rows[0][name] == pytest.approx(metrics_of(finished)[0][name], rel=1e-5), name


# Checks, plans and documents


@pytest.mark.parametrize(
    ("recipe", "override", "code", "says"),
    [
        (
            PE,
            reward_of("arr", JUDGE),
            2020,
            "is sampled. Did you mean 'ar'? The tracks are ar, diffusion",
        ),
        (
            BAGEL,
            "reward.tracks.plan.weight=1",
            2020,
            "plan names no track that is sampled. The tracks are think",
        ),
        (
            JOINT,
            "reward.tracks.think.weight=1",
            2020,
            "To sample think as well, write sampling.think and",
        ),
        (JOINT, "reward.tracks.image.weight=1", 2020, "reward.backend scores the track 'image', which is the last one"),
        ("diffusion/quickstart", "reward.tracks.image.weight=1", 2020, "this recipe has one track"),
        (PE, reward_of("diffusion", PICKSCORE), 2020, "reward.backend scores the track 'diffusion'"),
        ("diffusion/quickstart", reward_of("image", JUDGE), 2020, "this recipe has one track"),
        (PE, reward_of("ar", PICKSCORE), 2020, "ar.backend scores image, and Qwen3Pipeline makes text in track 'ar'"),
        (
            PE,
            reward_of("ar", PICKSCORE),
            2020,
            "Write a scorer of text here. A scorer of image fits the track diffusion:",
        ),
        (PE, reward_of("ar", PICKSCORE), 2020, "fits the track diffusion: write it as reward.backend"),
        (BAGEL, reward_of("think", PICKSCORE), 2020, "scores image, and BagelPipeline makes text in track 'think'"),
        (BAGEL, f"reward.backend={JUDGE}", 2020, "scores text, and BagelPipeline makes image in track 'image'"),
        (
            BAGEL,
            f"reward.backend={JUDGE}",
            2020,
            "Write a scorer of image here. A scorer of text fits the track think:",
        ),
        (CHAIN, f"reward.backend={JUDGE}", 2020, "as reward.tracks.think.backend or reward.tracks.recaption.backend"),
        (BAGEL, f"reward.backend={VIDEO}", 2020, "No track of this recipe is of video"),
        (PE, reward_of("ar", REMOTE), 2020, "or the settings with which this one scores it"),
        (PE, reward_of("ar", weighted({"a": PICKSCORE}, a=1)), 2020, "tracks.ar.backend.scorers.a scores image"),
        (PE, reward_of("ar", JUDGE, weight=0), 2004, "reward.tracks.ar.weight=0: the scores would not count"),
        (PE, reward_of("ar", weighted({"a": JUDGE}, a=0)), 2004, "tracks.ar.backend.weights={'a': 0.0}: every reward"),
        (PE, reward_of("ar", JUDGE, wieght=2), 2003, "Did you mean 'reward.tracks.ar.weight'?"),
        (PE, "+reward.tracks={ar: {weight: 1}}", 2003, "reward.tracks.ar.backend is required"),
        (
            PE,
            "reward="
            + f"{{_target_: unirl.reward.service.RewardService, backend: {weighted({'same': PICKSCORE}, same=1)}, "
            + f"tracks: {{ar: {{backend: {weighted({'same': JUDGE}, same=1)}}}}}}}",
            2020,
            "the tracks ar and diffusion both have a component 'same'",
        ),
        (
            CHAIN,
            f"+reward.tracks={{think: {{backend: {JUDGE}}}, recaption: {{backend: {JUDGE}}}}}",
            2020,
            "the tracks think and recaption both have a component 'SharedLetters'",
        ),
    ],
)
def test_mistakes_are_refused_at_check_time(recipe, override, code, says) -> None:
    with pytest.raises(UniRLError) as refused:
        preflight(load(recipe, ["scale=toy", "plugins=[tests]", override]))
    assert says in str(refused.value) and refused.value.code == code


def test_a_remote_judge_scores_what_its_settings_say() -> None:
    texts = REMOTE.replace("required", "input_kind: text, required")
    preflight(load(PE, ["scale=toy", reward_of("ar", texts)]))
    preflight(load("llm/quickstart", ["scale=toy", f"reward.backend={texts}"]))
    with pytest.raises(IncompatibleError, match=r"scores image, and .* makes text"):
        preflight(load("llm/quickstart", ["scale=toy", f"reward.backend={REMOTE}"]))
    gradient = "algorithm={_target_: unirl.algorithms.drtune.DRTune}"
    with pytest.raises(IncompatibleError, match=r"reward.backend \(RemoteRewardBackend\) has none"):
        preflight(load("diffusion/sd3_trainside", ["scale=toy", f"reward.backend={REMOTE}", gradient]))


def test_a_key_that_is_written_twice_is_refused(tmp_path) -> None:
    """So no two components of one track have one name."""
    recipe = tmp_path / "twice.yaml"
    recipe.write_text(
        f"# @package _global_\n# Two.\ndefaults: [pe/quickstart, _self_]\nreward:\n  tracks:\n"
        f"    ar: {{backend: {JUDGE}}}\n    ar: {{backend: {LENGTH}}}\n"
    )
    with pytest.raises(UniRLError, match=r"(?i)duplicate|twice"):
        load(str(recipe))


def test_components_of_one_name_that_only_the_scorers_know_are_refused_at_the_first_samples(tmp_path) -> None:
    """The name of the images' reward is a setting of the recipe; that of the texts' is in the class."""
    images = f"reward.backend={weighted({'shared_letters': PICKSCORE}, shared_letters=1)}"
    with (
        pytest.raises(IncompatibleError, match=r"ar and diffusion both have a component 'shared_letters'.*Weighted"),
        trainer_of(tmp_path, images, reward_of("ar", JUDGE)) as trainer,
    ):
        trainer.train()


def test_rewards_without_effect_are_noticed() -> None:
    common = (*COMMON, *OF_RECIPE[PE], reward_of("ar", JUDGE, weight=2))
    [notice] = preflight(load(PE, [*common, "trained=[diffusion]"])).notices
    assert notice.startswith("reward.tracks.ar has no effect on training: ar only samples")
    [notice] = preflight(load(PE, [*common, "advantage.weights={pickscore: 1}"])).notices
    assert notice.startswith("reward.tracks.ar.weight has no effect on advantages")
    assert preflight(load(PE, common)).notices == ()


def test_check_and_plan_say_what_each_track_is_rewarded_for(capsys) -> None:
    override = [*COMMON, *OF_RECIPE[PE], reward_of("ar", JUDGE, weight=0.5)]
    assert main(["check", PE, *override]) == 0
    assert "reward of ar: 0.5 x SharedLetters + mean over diffusion" in capsys.readouterr().out
    assert main(["plan", PE, *override]) == 0
    assert "ar: 0.5 x SharedLetters + mean over diffusion" in capsys.readouterr().out
    assert main(["check", PE, *COMMON, reward_of("ar", JUDGE, with_credit="false"), "credit=max"]) == 0
    assert "reward of ar: SharedLetters\n" in capsys.readouterr().out


def test_the_keys_are_documented_and_written_into_the_resolved_recipe(capsys, finished) -> None:
    assert main(["config", "show", PE, *COMMON, reward_of("ar", LENGTH), "--doc"]) == 0
    shown = capsys.readouterr().out
    assert "reward.tracks.ar.weight: float = 1.0" in shown and "reward.tracks.ar.with_credit: bool = true" in shown
    assert main(["check", PE, *COMMON, reward_of("ar", LENGTH), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reward"]["tracks"]["ar"]["backend"]["config"]["max_tokens"] == 1
    assert "TextLengthRewardScorer" in (finished / "config/resolved.yaml").read_text()


def test_the_plan_counts_the_time_of_a_scorer_for_its_own_track_and_the_memory_of_all_once() -> None:
    words = ("ar.bundle.path=Qwen/Qwen3-4B-Base", "plugins=[tests]")
    plain = sizes_of_policies(load(PE, words))
    judged = sizes_of_policies(load(PE, [*words, reward_of("ar", "{_target_: tests.trainer.text_reward.Costly}")]))
    runs = {name: (plain[name].run.sizes.reward, judged[name].run.sizes.reward) for name in plain}
    assert [reward.slow_flops for reward in runs["ar"]] == [0.0, 5e12]
    before, after = runs["diffusion"]
    assert before.slow_flops == after.slow_flops > 0 and after.parameters - before.parameters == 7_000_000_000
