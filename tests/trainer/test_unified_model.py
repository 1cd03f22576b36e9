"""One network writes a plan of an image and draws it: the tree of samples, both losses, stop and resume, refusals."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.run_files import metrics_of
from unirl.cli.main import main
from unirl.cli.plan import made_by
from unirl.config.errors import IncompatibleError, Preempted, UniRLError
from unirl.config.load import load
from unirl.config.recipe import UnifiedConfig, keys_of_policy, policy_keys, recipe_class, said_of_policy
from unirl.plan.preflight import preflight
from unirl.plan.sizes import RunSizes
from unirl.trainer.assemble import build_trainer
from unirl.types.rollout_req import child_ids
from unirl.types.segments import LatentSegment, TextSegment

RECIPE = "unified_model/bagel_think_joint"
TRACKS = ("think", "image")
SMALL = ("sampling.think.samples_per_prompt=2", "sampling.image.samples_per_prompt=2", "stack.micro_batch_size=4")
COMMON = ("scale=toy", "num_rollouts=2", "tracking.sample_steps=0", "evaluation.eval_steps=0", *SMALL)


@contextmanager
def trainer_of(folder: Path, *overrides: str, recipe: str = RECIPE):
    loaded = load(recipe, [*COMMON, f"run.dir={folder}", *overrides])
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        yield trainer


def run(folder: Path, *overrides: str, recipe: str = RECIPE) -> list[dict]:
    with trainer_of(folder, *overrides, recipe=recipe) as trainer:
        trainer.train()
    return metrics_of(folder)


def weights_of(folder: Path, step: int = 2) -> bytes:
    return (folder / f"checkpoints/checkpoint-{step:06d}/policy/weights.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, "save_interval=1", "tracking.sample_steps=1")
    return folder


# The tree of samples


def test_the_tree_holds_what_the_two_stages_sample_alone(tmp_path) -> None:
    with trainer_of(tmp_path) as trainer:
        req = trainer.requests.training(trainer.data.take(2), 0, trainer.publish(0))
        resp = trainer.rollout.generate(req)
        text, image = (resp.tracks[name] for name in TRACKS)
        pipeline = trainer.pool.group(trainer.phase.residencies["image"].plan.train).role_here("pipeline")

        assert text.sample_ids == req.sample_ids and text.parent_track is None
        below = child_ids(req.sample_ids, "image", 2)
        parents = [sample for sample in req.sample_ids for _ in range(2)]
        assert (image.sample_ids, image.parent_ids, image.group_ids) == (below, parents, parents)

        codec, spoken = pipeline.bundle.codec, pipeline.bundle.prompt_tokenizer.spoken
        rows = text.segment.tokens.split(text.segment.lengths.tolist())
        read = image.conditions["text"]
        for row, tokens in enumerate(read.tokens.split(read.lengths.tolist())):
            thought = [token for token in rows[row // 2].tolist() if token not in codec.ends]
            ending = [*spoken(codec.encode(req.prompts()[row // 2])), *spoken(thought)]
            assert tokens.tolist()[-len(ending) :] == ending
        smaller = pipeline.generate(req, 3)
        for name in TRACKS:
            assert torch.equal(smaller.tracks[name].segment.logp, resp.tracks[name].segment.logp)


def test_both_tracks_replay_what_they_sampled(tmp_path) -> None:
    with trainer_of(tmp_path) as trainer:
        req = trainer.requests.training(trainer.data.take(2), 0, trainer.publish(0))
        pipeline = trainer.pool.group(trainer.phase.residencies["image"].plan.train).role_here("pipeline")
        resp = pipeline.generate(req, 5)
        text, image = resp.tracks["think"], resp.tracks["image"]
        assert isinstance(text.segment, TextSegment) and isinstance(image.segment, LatentSegment)
        with torch.no_grad():
            replayed = pipeline.stage_of("think").replay(text.conditions, text.segment).logp
            steps = pipeline.stage_of("image").replay(image.conditions, image.segment, image.segment.sde_indices).logp
        assert torch.equal(replayed, text.segment.logp) and torch.equal(steps, image.segment.logp)


# The loop


def test_both_losses_train_the_same_weights_in_one_update(finished) -> None:
    first, last = metrics_of(finished)
    for name in TRACKS:
        assert first[f"{name}/train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        assert f"{name}/train/loss" in first and f"{name}/train/grad_norm" not in first
    assert first["train/grad_norm"] > 0 and last["sync/version"] == 1  # one update in the first step
    assert first["rollout/reward_mean"] == first["image/rollout/reward_mean"]
    assert weights_of(finished, 1) != weights_of(finished, 2)


def test_alternating_losses_have_an_update_each(tmp_path) -> None:
    rows = run(tmp_path, recipe="unified_model/bagel_think_alternating")
    assert rows[-1]["sync/version"] == 2
    assert all(rows[0][f"{name}/train/grad_norm"] > 0 for name in TRACKS)


def test_a_track_that_is_not_trained_is_only_sampled(tmp_path) -> None:
    rows = run(tmp_path, "trained=[image]")
    assert "think/train/loss" not in rows[0] and "image/train/loss" in rows[0]
    assert rows[0]["think/rollout/response_len_mean"] > 0


def test_a_run_that_is_stopped_goes_on_bit_for_bit(finished, tmp_path) -> None:
    with trainer_of(tmp_path, "save_interval=1") as trainer:
        trainer.request_stop(signal.SIGTERM)
        with pytest.raises(Preempted):
            trainer.train()
    assert run(tmp_path, "save_interval=1") == metrics_of(finished)
    assert weights_of(tmp_path) == weights_of(finished)


def test_a_run_that_balances_its_losses_remembers_their_sizes(tmp_path) -> None:
    settings = ("stack.balance=uncertainty", "stack.balance_decay=0.5", "save_interval=1")
    whole = run(tmp_path / "whole", *settings)
    assert all(row[f"{name}/train/loss_weight"] > 0 for row in whole for name in TRACKS)
    with trainer_of(tmp_path / "run", *settings) as trainer:
        trainer.request_stop(signal.SIGTERM)
        with pytest.raises(Preempted):
            trainer.train()
    saved = json.loads((tmp_path / "run/checkpoints/checkpoint-000001/trainer.json").read_text())
    assert {name: saved["stateful"]["stack"][name]["updates"] for name in TRACKS} == dict.fromkeys(TRACKS, 1)
    assert run(tmp_path / "run", *settings) == whole
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")


def test_an_engine_with_weights_of_its_own_samples_the_same_bits(finished, tmp_path) -> None:
    """Also where the trainer's network begins without storage: the engine, which no backend fills, loads its own."""
    engine = "rollout={_target_: unirl.rollout.engine.replica.engine.ReplicaRolloutEngine}"
    sync = "sync={_target_: unirl.distributed.weight_sync.sync.EngineSync}"
    rows = run(tmp_path, engine, sync, "bundle.meta_init=true", "save_interval=1")
    for found, expected in zip(rows, metrics_of(finished), strict=True):
        assert found["sync/bytes"] > 0
        same = [name for name in expected if "sync/" not in name and "parity" not in name]
        assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    assert weights_of(tmp_path) == weights_of(finished)


@pytest.mark.slow
def test_two_ray_workers_balance_losses_as_one_process_does(tmp_path) -> None:
    settings = ("stack.balance=uncertainty", "stack.balance_decay=0.5")
    alone, shared = run(tmp_path / "one", *settings), run(tmp_path / "two", *settings, "num_devices=2", "runtime=ray")
    for found, expected in zip(shared, alone, strict=True):
        for name in ("train/grad_norm", *(f"{t}/train/{key}" for t in TRACKS for key in ("loss_weight", "grad_norm"))):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name


@pytest.mark.slow
def test_two_ray_workers_sample_the_bits_of_one_process(finished, tmp_path) -> None:
    rows = run(tmp_path, "num_devices=2", "runtime=ray", "save_interval=1")
    assert rows[0]["rollout/reward_mean"] == metrics_of(finished)[0]["rollout/reward_mean"]
    for found, expected in zip(rows, metrics_of(finished), strict=True):
        for name in ("think/rollout/response_len_mean", "rollout/reward_mean", "train/grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name


def test_the_network_is_exported_once_and_images_show_their_text(finished, tmp_path) -> None:
    assert main(["export", str(finished), "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["peft"]
    assert main(["sample", str(finished), "-p", "a red circle", "--out", str(tmp_path / "drawn")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "drawn/manifest.jsonl").read_text().splitlines()]
    assert all(row["prompt"] == "a red circle" != row["rewrite"] for row in rows)
    page = (finished / "samples/step-000002/samples.md").read_text()
    assert "Drawn from the rewrite:" in page


# Keys and refusals


def test_the_keys_of_a_track_are_those_of_the_recipe() -> None:
    recipe = load(RECIPE)
    tree, image = recipe.resolved(), recipe.policies["image"]
    assert recipe_class(tree) is UnifiedConfig
    assert policy_keys(tree, "sampling.seed") == ["sampling.think.seed", "sampling.image.seed"]
    assert policy_keys(tree, "stack.num_updates_per_batch") == ["stack.num_updates_per_batch"] * 2
    text = "Set algorithm.clip_range=1, stack.micro_batch_size=2; algorithm.image.clip_range stays"
    named = "Set algorithm.image.clip_range=1, stack.micro_batch_size=2; algorithm.image.clip_range stays"
    assert keys_of_policy(text, image) == named
    assert said_of_policy("stack.x=1 is odd", "image", image) == "stack.x=1 is odd"
    assert said_of_policy("the loss is odd", "image", image) == "image: the loss is odd"
    assert load(RECIPE, ["sampling.seed=7"]).policies["think"].seed == 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["~algorithm.think"], "algorithm has the tracks image, and sampling has think, image"),
        (["~sampling.think", "~algorithm.think"], "sampling has the track image alone"),
        (["trained=[images]"], r"no track 'images'\. Did you mean 'image'\? Its tracks are think, image"),
        (["trained=[]"], "trained is empty, .* Name one or more of think, image"),
        (["sampling.height=64"], "this recipe has several tracks. Write sampling.image.height"),
        (["algorithm.think.clip_rang=1"], "unknown key 'algorithm.think.clip_rang'"),
        (["sampling.think.temperature=-1"], "sampling.think.temperature must be >= 0"),
        (["sampling.image.height=33"], "sampling.image.height=33 is not a positive multiple"),
        (["stack.loss_weights.image=0"], "stack.loss_weights.image must be > 0"),
        (["stack.balance=uncertain"], "stack.balance"),
        (["stack.balance=uncertainty", "stack.balance_decay=1"], "stack.balance_decay must be >= 0 and < 1, got 1"),
        (
            ["stack.balance=uncertainty", "stack.balance_decay=-0.1"],
            "stack.balance_decay must be >= 0",
        ),
        (["stack.balance_decay=0.9"], "stack.balance_decay=0.9 has no effect: stack.balance=fixed keeps no average"),
        (["stack.balance=uncertainty", "stack.schedule=alternating"], "stack.balance=uncertainty balances the grad"),
        (["stack.loss_weights.imag=1"], "stack.loss_weights.imag: the trained tracks are think, image"),
        (
            ["algorithm.image={_target_: unirl.algorithms.diffusion_dpo.DiffusionDPO}"],
            "chooses its own rows or weights, which the tracks of one network share",
        ),
        (
            ["pipeline={_target_: unirl.models.sd3.family.SD3Pipeline}"],
            "SD3Pipeline samples one track",
        ),
        (
            ["trainer={_target_: unirl.trainer.diffusion.DiffusionTrainer}"],
            "DiffusionTrainer trains one policy",
        ),
        (["batch_size=3", "num_devices=16"], "batch_size"),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides, message) -> None:
    with pytest.raises(UniRLError, match=message):
        preflight(load(RECIPE, overrides))


def test_tracks_have_the_order_in_which_the_model_writes_and_draws() -> None:
    assert list(load("unified_model/hi3_think").policies) == ["think", "recaption", "image"]


def test_a_track_that_the_model_does_not_have_is_refused() -> None:
    overrides = [
        "sampling.plan={_target_: unirl.types.sampling.ARSamplingParams}",
        "algorithm.plan={_target_: unirl.algorithms.ar_grpo.ARGRPO}",
    ]
    with pytest.raises(UniRLError, match=r"sampling.plan .*BagelPipeline has no track 'plan'\. Its .* think, image"):
        preflight(load(RECIPE, overrides))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("sampling.recaption=5", "BagelPipeline has no track 'recaption'. Its tracks are think, image"),
        ("algorithm.think=null", "algorithm.think is a block of keys, got null"),
        ("sampling.height=64", "this recipe has several tracks. Write sampling.image.height"),
        ("~sampling.image", "sampling has the track think alone. A recipe of one track writes"),
    ],
)
def test_a_value_in_place_of_the_block_of_a_track_is_refused_by_what_it_is(word, says) -> None:
    with pytest.raises(UniRLError) as refused:
        load("unified_model/bagel_think_joint", ["scale=toy", word])
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("recipe", "pipeline", "tracks"),
    [
        ("unified_model/bagel_think_joint", "BagelPipeline", "think, image"),
        ("unified_model/hi3_joint", "HunyuanImage3Pipeline", "think, recaption, image"),
    ],
)
@pytest.mark.parametrize("key", ["sampling.{}.max_new_tokens", "algorithm.{}.clip_range"])
def test_a_key_of_a_track_that_a_unified_family_lacks_lists_those_that_it_has(recipe, pipeline, tracks, key) -> None:
    with pytest.raises(IncompatibleError) as refused:
        load(recipe, ["scale=toy", f"{key.format('recaptions')}=1"])
    block = key.partition(".")[0]
    assert str(refused.value).startswith(f"{block}.recaptions (command line): {pipeline} has no track 'recaptions'.")
    assert f"Its tracks are {tracks}." in str(refused.value) and "loss" not in str(refused.value)


def test_the_plan_counts_the_tokens_of_the_text_and_the_images_of_the_image() -> None:
    sizes = {name: RunSizes.of(config) for name, config in load(RECIPE).policies.items()}
    assert (made_by(sizes["think"]), made_by(sizes["image"])) == ("tokens", "images")
    assert sizes["think"].sizes.network.cache_width > 0 == sizes["image"].sizes.network.cache_width
