"""Prompt enhancement: rewrites are sampled, drawn and credited as a tree; both policies learn, stop and resume."""

from __future__ import annotations

import json
import re
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.run_files import metrics_of
from unirl.cli.main import main
from unirl.config.build import build
from unirl.config.errors import IncompatibleError, MemoryShortageError, Preempted, RewriteError, UniRLError
from unirl.config.load import load
from unirl.config.recipe import keys_of_policy, said_of_policy
from unirl.config.schema import dotted_name
from unirl.models.sd3.family import SD3Bundle
from unirl.plan.placement import plan_of
from unirl.plan.preflight import preflight
from unirl.plan.sizes import RecipeSizes
from unirl.rollout.engine.composed.engine import rewrite_in
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.tracking.overview import draw_overview
from unirl.trainer.assemble import build_trainer, check_device_memory
from unirl.trainer.export import refuse_replacing
from unirl.trainer.pe import PETrainer
from unirl.trainer.residency import Phases
from unirl.types.device import DeviceKind
from unirl.types.primitives import Texts

RECIPE = "pe/pe_trainside_pickscore"
COMMON = ("scale=toy", "num_rollouts=2", "tracking.sample_steps=0", "evaluation.eval_steps=0")
COMMON += ("diffusion.sampling.samples_per_prompt=2",)
REMARK = "toy scale: random weights, rewards mean nothing"


@contextmanager
def trainer_of(folder: Path, *overrides: str):
    recipe = load(RECIPE, [*COMMON, f"run.dir={folder}", *overrides])
    preflight(recipe)
    with build_trainer(recipe) as trainer:
        yield trainer


def run(folder: Path, *overrides: str) -> list[dict]:
    with trainer_of(folder, *overrides) as trainer:
        trainer.train()
    return metrics_of(folder)


def weights_of(folder: Path, step: int = 2) -> dict[str, bytes]:
    checkpoint = folder / f"checkpoints/checkpoint-{step:06d}"
    return {
        policy: (checkpoint / f"policy-{policy}/weights.safetensors").read_bytes() for policy in ("ar", "diffusion")
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, "save_interval=1", "tracking.sample_steps=1")
    return folder


# The composed engine


@pytest.mark.parametrize(
    ("response", "marker", "max_chars", "rewrite"),
    [
        ("a red circle", None, None, "a red circle"),
        (' "a red circle"\n', None, None, "a red circle"),
        ("\u201ca red circle\u201d", None, None, "a red circle"),
        ('a "red" circle', None, None, 'a "red" circle'),
        ('"', None, None, '"'),
        ('""', None, None, ""),
        ("thinking... Revised Prompt: a red circle", "Revised Prompt:", None, "a red circle"),
        ("Revised Prompt: no. Revised Prompt: 'yes'", "Revised Prompt:", None, "yes"),
        ("thinking", "Revised Prompt:", None, ""),
        ("Revised Prompt:   ", "Revised Prompt:", None, ""),
        ("a red circle", None, 5, "a red"),
        ("a red circle", None, 6, "a red"),
    ],
)
def test_the_rewrite_in_a_response(response, marker, max_chars, rewrite) -> None:
    assert rewrite_in(response, marker, max_chars) == rewrite


def test_a_tree_holds_what_the_two_engines_sample_alone(tmp_path) -> None:
    with trainer_of(tmp_path) as trainer:
        prompts = trainer.data.take(2)
        req = trainer.requests.training(prompts, 0, trainer.publish(0))
        resp = trainer.rollout.generate(req)
        engines = {learner.track: learner.roles.rollout for learner in trainer.learners}

        written, drawn = resp.tracks["ar"], resp.tracks["diffusion"]
        alone = engines["ar"].generate(req.replace(tracks={"ar": req.tracks["ar"]})).tracks["ar"]
        assert torch.equal(written.segment.tokens, alone.segment.tokens)
        assert written.sample_ids == req.sample_ids and written.group_ids == req.group_ids

        branch = req.tracks["diffusion"].branch
        parents = [sample for sample in req.sample_ids for _ in range(branch)]
        assert branch > 1 and drawn.parent_ids == drawn.group_ids == parents
        assert drawn.sample_ids == [f"{parent}/diffusion{i % branch}" for i, parent in enumerate(parents)]
        rewrites = [rewrite_in(text) or text for text in written.decoded.texts for _ in range(branch)]
        rows = [row for row in range(len(req)) for _ in range(branch)]
        below = req.select(rows).replace(
            sample_ids=drawn.sample_ids,
            group_ids=parents,
            primitives={"text": Texts(texts=rewrites)},
            tracks={"diffusion": replace(req.tracks["diffusion"], parent=None, branch=1)},
        )
        alone = engines["diffusion"].generate(below).tracks["diffusion"]
        assert torch.equal(drawn.segment.logp, alone.segment.logp)
        pixels = [trainer.rollout.preview(track.decoded).pixels for track in (drawn, alone)]
        assert torch.equal(*pixels)


def test_an_empty_rewrite_is_the_original_prompt_and_is_counted(tmp_path) -> None:
    """No response of random weights has the marker, so every prompt is drawn as it is."""
    rows = run(tmp_path, "rollout.pe_marker=Revised Prompt:", "num_rollouts=1")
    assert rows[0]["diffusion/rollout/kept_prompt_ratio"] == 1.0
    with (
        pytest.raises(
            RewriteError, match=r"(?s)'Revised Prompt:' is missing in 8 of 8 responses.*ar.sampling.max_new_tokens"
        ),
        trainer_of(tmp_path / "strict", "rollout.pe_marker=Revised Prompt:", "rollout.pe_max_missing=0.9") as trainer,
    ):
        trainer.train()


def test_rewrites_that_the_text_encoder_cuts_are_counted(tmp_path) -> None:
    """The T5 of SD3 reads the first `max_sequence_length` tokens. Its own tokenizer counts those of each rewrite."""
    with trainer_of(tmp_path, "num_rollouts=1", "diffusion.sampling.max_sequence_length=12") as trainer:
        drawn = trainer.produce(0).tracks["diffusion"]
        trainer.tracker.log_step(1)
        trainer.tracker.flush()
    tokenizer = SD3Bundle(path="toy").tokenizers["tokenizer_3"]
    too_long = [len(tokenizer(rewrite).input_ids) > 12 for rewrite in drawn.prompts]
    assert drawn.cut_prompts == too_long and 0 < sum(too_long) < len(too_long)
    row = metrics_of(tmp_path)[0]
    assert row["diffusion/rollout/cut_rewrite_ratio"] == sum(too_long) / len(too_long)
    assert "ar/rollout/cut_rewrite_ratio" not in row
    long = run(tmp_path / "long", "num_rollouts=1", "diffusion.sampling.max_sequence_length=256")
    assert long[0]["diffusion/rollout/cut_rewrite_ratio"] == 0.0


# Credit


@pytest.mark.parametrize(("rule", "reduced"), [("mean", torch.mean), ("max", torch.amax), ("sum", torch.sum)])
def test_the_reward_of_a_rewrite_is_that_of_its_images(tmp_path, rule, reduced) -> None:
    with trainer_of(tmp_path, f"credit={rule}") as trainer:
        resp = trainer.produce(0)
    written, drawn = resp.tracks["ar"], resp.tracks["diffusion"]
    branch = len(drawn) // len(written)
    torch.testing.assert_close(written.rewards, reduced(drawn.rewards.view(-1, branch), 1))
    groups = written.rewards.double().view(2, -1)
    expected = groups - groups.mean(1, keepdim=True)
    assert (written.advantages.view(2, -1).sign() == expected.sign().float()).all()
    images = drawn.rewards.double().view(-1, branch)
    assert torch.allclose(drawn.advantages.view(-1, branch).sum(1), torch.zeros(len(written)), atol=1e-4)
    assert (drawn.advantages.view(-1, branch).sign() == (images - images.mean(1, keepdim=True)).sign().float()).all()


def test_only_the_best_image_of_each_rewrite_is_trained(tmp_path) -> None:
    with trainer_of(tmp_path, "credit=best_of_n", "num_rollouts=1") as trainer:
        resp = trainer.produce(0)
        before = {learner.track: learner.version for learner in trainer.learners}
        trainer.learn(0, resp)
        assert all(learner.version > before[learner.track] for learner in trainer.learners)
    written, drawn = resp.tracks["ar"], resp.tracks["diffusion"]
    images = drawn.rewards.view(len(written), -1)
    best = torch.nn.functional.one_hot(images.argmax(1), images.shape[1]).float()
    assert torch.equal(drawn.weight.view_as(images), best) and torch.equal(written.rewards, images.amax(1))
    assert (drawn.advantages[drawn.weight > 0] > 0).all() and (written.weight == 1).all()


def test_leaving_one_out_compares_images_and_rewrites_with_their_siblings(tmp_path) -> None:
    with trainer_of(tmp_path, "credit=leave_one_out") as trainer:
        resp = trainer.produce(0)
    written, drawn = resp.tracks["ar"], resp.tracks["diffusion"]
    for track, groups in ((written, 2), (drawn, len(written))):
        rewards = track.rewards.double().view(groups, -1)
        others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
        torch.testing.assert_close(track.advantages.view(groups, -1), (rewards - others).float())


def test_a_request_with_an_image_that_has_no_reward_trains_neither_policy(tmp_path) -> None:
    reward = "reward.backend={_target_: tests.trainer.faulty.Poisoned, share: 0.1}"
    budget = "+reward.on_failure={max_dropped_fraction: 0.9}"
    with trainer_of(tmp_path, "plugins=[tests]", "batch_size=4", reward, budget) as trainer:
        resp = trainer.produce(0)
        trainer.learn(0, resp)
    written, drawn = resp.tracks["ar"], resp.tracks["diffusion"]
    lost = {group for group, score in zip(resp.root_groups("diffusion"), drawn.rewards, strict=True) if score.isnan()}
    assert 0 < len(lost) < 4
    for name, track in (("ar", written), ("diffusion", drawn)):
        assert [bool(weight) for weight in track.weight] == [group not in lost for group in resp.root_groups(name)]
        assert track.advantages.isfinite().all()
    assert all(learner.version > 0 for learner in trainer.learners)


# The loop


def test_both_policies_learn_or_only_the_one_that_the_recipe_names(finished, tmp_path) -> None:
    row = metrics_of(finished)[-1]
    assert row["ar/train/grad_norm"] > 0 and row["diffusion/train/grad_norm"] > 0
    assert row["ar/sync/version"] == 1 and row["diffusion/sync/version"] == 2  # updates per step: 1 and 2
    assert row["rollout/reward_mean"] == row["diffusion/rollout/reward_mean"]
    before, after = weights_of(finished, 1), weights_of(finished, 2)
    assert all(before[policy] != after[policy] for policy in before)

    only = run(tmp_path, "trained=[ar]", "save_interval=1")[-1]
    assert "diffusion/train/loss" not in only and only["ar/train/grad_norm"] > 0
    before, after = weights_of(tmp_path, 1), weights_of(tmp_path, 2)
    assert before["ar"] != after["ar"] and before["diffusion"] == after["diffusion"]


def test_a_page_shows_the_request_the_rewrite_and_the_image(finished) -> None:
    page = (finished / "samples/step-000002/samples.md").read_text()
    rows = [json.loads(line) for line in (finished / "samples/step-000002/manifest.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["prompt"] in page and row["facts"]["rewrite"] and row["file"] in page


def test_a_toy_draws_rewrites_keeps_its_last_step_and_says_that_its_rewards_mean_nothing(tmp_path, capfd) -> None:
    run = tmp_path / "run"
    settings = ("scale=toy", "num_rollouts=1", "evaluation.eval_steps=0", f"run.dir={run}")
    assert main(["train", RECIPE, *settings]) == 0
    assert metrics_of(run)[0]["diffusion/rollout/kept_prompt_ratio"] < 1
    page = (run / "samples/step-000001/samples.md").read_text()
    assert "Drawn from the rewrite:" in page and REMARK in page.replace("Toy", "toy")
    banner, _, summary = capfd.readouterr().err.partition(" step 1/1 ")
    assert f"note       {REMARK}" in banner and re.search(rf"^note +{REMARK}$", summary, re.MULTILINE)
    assert main(["runs", str(tmp_path)]) == 0
    listed = capfd.readouterr().out
    assert f"{RECIPE} (toy)" in listed and REMARK in " ".join(listed.split())

    with_remark = (run / "overview.png").read_bytes()
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"scale": "full"}))
    draw_overview(run)
    assert (run / "overview.png").read_bytes() != with_remark


def test_a_run_that_is_stopped_goes_on_bit_for_bit(finished, tmp_path) -> None:
    with trainer_of(tmp_path, "save_interval=1") as trainer:
        trainer.request_stop(signal.SIGTERM)
        with pytest.raises(Preempted):
            trainer.train()
    assert run(tmp_path, "save_interval=1") == metrics_of(finished)
    assert weights_of(tmp_path) == weights_of(finished)


@pytest.mark.slow
def test_two_ray_workers_sample_the_bits_of_one_process(finished, tmp_path) -> None:
    rows = run(tmp_path, "num_devices=2", "runtime=ray", "save_interval=1")
    for found, expected in zip(rows, metrics_of(finished), strict=True):
        for name in ("ar/rollout/response_len_mean", "rollout/reward_mean", "diffusion/rollout/reward_std"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert rows[0]["rollout/reward_mean"] == metrics_of(finished)[0]["rollout/reward_mean"]


def test_engines_with_weights_of_their_own_take_turns_and_sample_the_same_bits(finished, tmp_path, monkeypatch) -> None:
    """Both engines share the device of the trainer: one sleeps while the other samples, and no phase holds both."""
    entered, enter = [], Phases._enter

    def watched_enter(phases: Phases, phase: str, track: str | None) -> None:
        enter(phases, phase, track)
        entered.append((phase, [name for name, each in phases.residencies.items() if each.here - {"reward"}]))

    monkeypatch.setattr(Phases, "_enter", watched_enter)
    engine = "{_target_: unirl.rollout.engine.replica.engine.ReplicaRolloutEngine}"
    sync = "{_target_: unirl.distributed.weight_sync.sync.EngineSync}"
    blocks = [f"{policy}.{block}" for policy in ("ar", "diffusion") for block in (f"rollout={engine}", f"sync={sync}")]
    asleep: list[tuple[str, list[str]]] = []
    with trainer_of(tmp_path, *blocks, "save_interval=1") as trainer:
        engines = {learner.track: learner.roles.rollout for learner in trainer.learners}

        def watched(track: str) -> None:
            trainer.phase.turn(track)
            here = trainer.phase.residencies
            asleep.append((track, [name for name in engines if "engine" not in here[name].here]))

        trainer.rollout.turn = watched
        trainer.train()
    assert {phase for phase, _ in entered} == {"sync", "generate", "reward", "train", "checkpoint"}
    assert [each for each in entered if len(each[1]) > 1] == []
    assert asleep == [("ar", ["diffusion"]), ("diffusion", ["ar"])] * 2
    for found, expected in zip(metrics_of(tmp_path), metrics_of(finished), strict=True):
        assert found["ar/sync/bytes"] > 0 and found["diffusion/sync/bytes"] > 0
        same = [name for name in expected if "sync/" not in name and "parity" not in name]
        assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    assert weights_of(tmp_path) == weights_of(finished)


def test_every_policy_is_exported_and_verified(finished, tmp_path, capsys) -> None:
    assert main(["export", str(finished), "--out", str(tmp_path / "out")]) == 0
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").glob("*/*")) == [
        "ar/peft",
        "diffusion/diffusers-lora",
        "diffusion/peft",
    ]
    assert main(["sample", str(finished), "-p", "a red circle", "--out", str(tmp_path / "drawn")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "drawn/manifest.jsonl").read_text().splitlines()]
    assert all(row["prompt"] == "a red circle" != row["rewrite"] for row in rows)


def test_the_seed_of_a_run_is_that_of_both_policies() -> None:
    recipe = load(RECIPE, ["scale=toy", "sampling.seed=7"])
    assert {name: policy.seed for name, policy in recipe.policies.items()} == {"ar": 7, "diffusion": 7}
    assert recipe.composed.why("diffusion.sampling.seed")[0].source == "command line"


# Refusals


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("~ar", 2003, "ar is required"),
        ("~diffusion.sampling", 2003, "diffusion.sampling is required"),
        ("ar.sampling.tempurature=1", 2003, "ar.sampling.temperature"),
        ("trained=[]", 2004, "trained is empty"),
        ("rollout.pe_instruction=Improve", 2004, "{prompt}"),
        ("rollout.pe_marker=''", 2004, "pe_marker is empty"),
        ("refill={}", 2020, "~refill"),
        ("credit=best", 2004, "credit must be one of mean, max, sum, best_of_n, leave_one_out"),
        ("evaluation.samples_per_promt=2", 2003, "samples_per_prompt"),
        ("diffusion.algorithm._target_=unirl.algorithms.drtune.DRTune", 2020, "DiffusionGRPO"),
        ("diffusion.sampling.height=33", 2004, "diffusion.sampling.height=33 is not"),
        ("sampling.height=64", 2003, "Write diffusion.sampling.height"),
        ("sampling.hieght=64", 2003, "Its blocks are ar.sampling and diffusion.sampling"),
        ("stack.num_updates_per_batch=2", 2003, "Write ar.stack.num_updates_per_batch or diffusion.stack.num_"),
        ("backend.lora_cfg.rank=4", 2003, "Write ar.backend.lora_cfg.rank or diffusion.backend.lora_cfg.rank"),
        ("rollout.forward_batch_size=4", 2003, "ar.rollout.forward_batch_size or diffusion.rollout.forward_batch_size"),
        ("rollout.pe_markr=x", 2003, "Did you mean 'rollout.pe_marker'"),
        ("evaluation.weights=ema", 2020, "Write ar.backend.ema_cfg={}"),
        ("ar.bundle.path=/nope", 4001, "in ar.bundle.path=..."),
        ("trainer._target_=unirl.trainer.diffusion.DiffusionTrainer", 2020, "Leave the trainer block out"),
        ("ar.algorithm._target_=unirl.algorithms.diffusion_grpo.DiffusionGRPO", 2020, "ar: DiffusionGRPO"),
    ],
)
def test_mistakes_are_refused_at_check_time(override, code, says, tmp_path) -> None:
    with pytest.raises(UniRLError) as refused:
        preflight(load(RECIPE, [*COMMON, f"run.dir={tmp_path}", override]))
    assert refused.value.code == code and says in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("credit=leave_one_out", "advantage.std=batch"), "advantage.std=batch would have no effect"),
        (
            ("credit=leave_one_out", "advantage._target_=unirl.algorithms.shared.advantages.BestOfGroup"),
            "BestOfGroup has another baseline",
        ),
        (
            (
                "credit=best_of_n",
                "diffusion.algorithm={_target_: unirl.algorithms.diffusion_dpo.DiffusionDPO}",
            ),
            "diffusion.algorithm (DiffusionDPO) trains pairs",
        ),
    ],
)
def test_a_rule_of_credit_that_does_not_fit_is_refused(overrides, says) -> None:
    with pytest.raises(IncompatibleError) as refused:
        preflight(load(RECIPE, [*COMMON, *overrides]))
    assert says in str(refused.value)


class Elsewhere(PETrainer):
    """Scores a track that the recipe does not have."""

    track = "video"


def test_a_track_that_no_reward_reaches_is_refused() -> None:
    says = "Elsewhere scores the track 'video', and the last track of this recipe is 'diffusion'"
    with pytest.raises(IncompatibleError, match=says):
        preflight(load(RECIPE, [*COMMON, "plugins=[tests]", f"trainer._target_={dotted_name(Elsewhere)}"]))


def test_a_reward_of_texts_is_refused_where_images_are_scored() -> None:
    reward = "reward.backend={_target_: unirl.reward.local.exact_match.ExactMatchRewardScorer}"
    with pytest.raises(UniRLError, match=r"reward\.backend scores text, and SD3Pipeline makes image"):
        preflight(load(RECIPE, [*COMMON, reward]))


BLOCKS = ("bundle", "pipeline", "backend", "rollout", "algorithm", "sampling")


@pytest.mark.parametrize("key", ["ar", "diffusion", *(f"{side}.{b}" for side in ("ar", "diffusion") for b in BLOCKS)])
def test_a_side_without_one_of_its_blocks_is_refused(key) -> None:
    with pytest.raises(UniRLError, match=f"{key} is required") as refused:
        load(RECIPE, [*COMMON, f"~{key}"])
    assert refused.value.code == 2003


def test_counts_that_do_not_divide_are_those_of_the_recipe() -> None:
    with pytest.raises(UniRLError) as refused:
        preflight(load(RECIPE, [*COMMON, "batch_size=8", "diffusion.stack.num_updates_per_batch=5"]))
    assert "(batch_size 8 x 4 ar x samples_per_prompt 2 " in str(refused.value)
    assert "Use diffusion.stack.num_updates_per_batch=4|8 or batch_size=5|10 or" in str(refused.value)


def test_the_engine_of_one_policy_composes_none() -> None:
    with pytest.raises(
        UniRLError, match=r"TrainsideRolloutEngine is the engine of one policy.*Leave rollout._target_ out"
    ):
        preflight(load("pe/quickstart", [f"rollout._target_={dotted_name(TrainsideRolloutEngine)}"]))


def test_the_blocks_of_two_policies_are_none_of_a_recipe_of_one() -> None:
    with pytest.raises(UniRLError, match="unknown key 'ar'"):
        load("diffusion/quickstart", ["ar.sampling.temperature=1"])
    with pytest.raises(UniRLError, match="PETrainer trains several policies, and this recipe has one"):
        preflight(load("diffusion/quickstart", ["trainer._target_=unirl.trainer.pe.PETrainer"]))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Set stack.micro_batch_size=2", "Set ar.stack.micro_batch_size=2"),
        ("Write backend.ema_cfg={}, or ~backend.lora_cfg", "Write ar.backend.ema_cfg={}, or ~ar.backend.lora_cfg"),
        ("sync={_target_: x}", "ar.sync={_target_: x}"),
        ("rollout._target_=unirl.rollout.engine.X", "ar.rollout._target_=unirl.rollout.engine.X"),
        ("ar.stack.x, diffusion.stack.y, placement.rollout=0", "ar.stack.x, diffusion.stack.y, placement.rollout=0"),
        ("the pipeline. The stack", "the pipeline. The stack"),
    ],
)
def test_a_text_about_a_policy_has_the_keys_of_the_recipe(text, named) -> None:
    assert keys_of_policy(text, load("pe/quickstart").policies["ar"]) == named
    only = load("diffusion/quickstart").config
    assert keys_of_policy(text, only) == said_of_policy(text, "", only) == text


def test_a_notice_about_a_shared_setting_is_given_once_and_names_no_policy(tmp_path) -> None:
    [notice] = preflight(load(RECIPE, [*COMMON, f"run.dir={tmp_path}", "weight_sync_interval=2"])).notices
    assert notice.startswith("weight_sync_interval=2")


def test_the_plan_of_a_policy_names_its_keys(capsys) -> None:
    assert main(["plan", RECIPE, "scale=toy"]) == 0
    _, ar, diffusion = re.split(r"^(?:ar|diffusion)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert "(ar.stack.micro_batch_size)" in ar and "(diffusion.stack.micro_batch_size)" in diffusion
    assert "2 prompts x 4 ar x 4 samples = 32 samples per step" in diffusion


def test_the_banner_has_the_counts_of_both_policies(finished) -> None:
    banner = (finished / "logs/console.log").read_text()
    assert "ar: 2 prompts x 4 samples = 8 samples" in banner
    assert "diffusion: 2 prompts x 4 ar x 2 samples = 16 samples" in banner


def test_the_lines_of_a_step_show_the_ratio_of_both_policies(finished) -> None:
    [step, *_] = re.findall(r" step 1/2 .*\n(.*)\n(.*)", (finished / "logs/console.log").read_text())
    assert re.match(r"  ar        ratio=1\.0000", step[0]) and re.match(r"  diffusion ratio=1\.0000", step[1])


def test_a_device_that_is_too_small_is_refused_with_the_keys_of_the_policy() -> None:
    policies = load(RECIPE, [*COMMON, "diffusion.stack.micro_batch_size=4"]).policies
    sizes = {name: RecipeSizes(config) for name, config in policies.items()}
    with pytest.raises(MemoryShortageError, match=r"\(ar: |ar\.stack\.") as refused:
        tiny = DeviceKind(name="tiny", memory_gib=1e-6)
        check_device_memory(sizes, print, plan_of(policies["ar"]).train.devices, tiny)
    assert not re.search(r"(?<![.\w])(stack|backend|sampling|rollout)\.", str(refused.value))


# Policies that are not trained


def test_a_policy_that_is_not_trained_keeps_no_average_and_is_not_exported(tmp_path, capsys) -> None:
    settings = ("trained=[ar]", "ar.backend.ema_cfg={}", "evaluation.weights=ema", "evaluation.eval_steps=1")
    run(tmp_path / "run", *settings, "num_rollouts=1")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--weights", "ema"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ar"]


def test_an_export_beside_those_of_other_runs_is_not_refused(tmp_path) -> None:
    (tmp_path / "other/peft").mkdir(parents=True)
    refuse_replacing([tmp_path])
    with pytest.raises(UniRLError, match="already holds an export"):
        refuse_replacing([tmp_path / "other"])


# Recipes


@pytest.mark.parametrize(
    ("name", "branches", "tokens", "guidance", "steps", "merges"),
    [
        ("pe_sglang_lora_pickscore", (8, 4, 8), 512, 1.0, tuple(range(9)), False),
        ("pe_sglang_full_pickscore", (8, 4, 8), 512, 1.0, tuple(range(9)), True),
        ("pe_sglang_full_wise", (8, 4, 4), 1024, 4.5, (1, 3), True),
    ],
)
def test_recipes_with_engines_of_their_own_have_the_published_settings(
    name, branches, tokens, guidance, steps, merges
) -> None:
    ar, diffusion = load(f"pe/{name}").policies.values()
    assert (ar.batch_size, ar.samples_per_prompt, diffusion.samples_per_prompt) == branches
    assert (ar.learning_rate, diffusion.learning_rate, ar.num_updates, diffusion.num_updates) == (5e-6, 3e-4, 1, 2)
    assert (ar.algorithm.values["clip_range"], diffusion.algorithm.values["clip_range"]) == (1e-2, 1e-4)
    assert all(policy.lora.values["rank"] == 16 and policy.lora.values["alpha"] == 32 for policy in (ar, diffusion))
    assert (ar.num_devices, ar.num_rollouts, ar.sampling.values["max_new_tokens"]) == (8, 300, tokens)
    assert (ar.merges_adapters, diffusion.merges_adapters) == (merges, False)
    sampling = build(diffusion.sampling)
    assert (sampling.guidance_scale, sampling.resolve_sde_indices(0), sampling.kernel.eta) == (guidance, steps, 0.7)
    for policy in (ar, diffusion):
        assert plan_of(policy).relation == "colocate"
