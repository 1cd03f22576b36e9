"""`unirl plan` and `unirl check` say who sits where, what travels, and what memory each phase takes."""

import importlib
import json
from dataclasses import replace

import pytest

from unirl.cli.main import main
from unirl.plan import cost
from unirl.plan.residency import PHASES
from unirl.types.facts import CACHE_BYTES, PREFILL_TOKENS

COLOCATE, SEPARATE = (f"diffusion/sd3_replica_lora_{layout}" for layout in ("colocate", "separate"))
PARTS = ("policy", "optimizer", "frozen", "engine", "reward")
EVERYWHERE = dict.fromkeys(PHASES, PARTS)


def planned(capsys, recipe, *overrides):
    assert main(["plan", recipe, *overrides, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


NETWORK = cost.Network(
    matrix_flops=1.0,
    attention_flops=0.0,
    layer_numbers=1.0,
    num_layers=1,
    num_adapted=1,
    tokens=4,
    width=8,
    num_blocks=2,
    active_parameters=1000,
)
SIZES = cost.Sizes(
    policy_parameters=1000,
    encoder_parameters=300,
    trainable_parameters=10,
    dtype_bytes=2,
    full_training=False,
    num_snapshots=1,
    network=NETWORK,
)
SETTINGS = cost.Settings(micro_rows=1, forward_rows=1, recompute=False, num_shards=1)


def byte_rows(**changed):
    settings = {name: changed.pop(name) for name in tuple(changed) if name in vars(SETTINGS)}
    rows = cost.memory_table(replace(SIZES, **changed), replace(SETTINGS, **settings), EVERYWHERE)
    return {row.name: {phase: round(gib * cost.GIB, 6) for phase, gib in row.gib.items()} for row in rows}


def test_the_rows_add_up_to_what_adamw_on_adapters_holds():
    rows = byte_rows()
    assert {name: rows[name]["train"] for name in ("policy weights", "adapters", "gradients", "optimizer (AdamW)")} == {
        "policy weights": 1000 * 2,
        "adapters": 10 * 4,
        "gradients": 10 * 4,
        "optimizer (AdamW)": 2 * 10 * 4,
    }
    assert rows["gradients"]["sample"] == 0
    assert rows["encoders"]["train"] == 300 * 2
    assert byte_rows(keep_resident=False)["encoders"]["train"] == 0
    assert byte_rows(kept_in_fp32=100)["policy weights"]["train"] == 900 * 2 + 100 * 4


def test_shards_divide_what_is_stored_and_sampling_gathers_the_whole_beside_them():
    whole, quarter = byte_rows(), byte_rows(num_shards=4)
    for name in ("policy weights", "adapters", "gradients", "optimizer (AdamW)", "snapshots"):
        assert quarter[name]["train"] == whole[name]["train"] / 4
    assert quarter["gathered weights"]["sample"] == 1000 * 2 + 10 * 4
    assert byte_rows(num_shards=4, deferred=True)["gradients"]["train"] == whole["gradients"]["train"]
    assert byte_rows(num_shards=4, reshard=False)["gathered blocks"]["train"] == 1000 * 2 + 10 * 4


def test_sharded_sampling_gathers_what_is_in_no_block_and_two_blocks_or_those_ahead():
    blocks = {"num_shards": 4, "gathers_once": False, "block_parameters": 800, "largest_block": 100}
    rows = byte_rows(**blocks)
    assert {moment: rows["gathered weights"][moment] for moment in ("encode", "sample", "decode", "train")} == {
        "encode": 200 * 2 + 10 * 4,
        "sample": 200 * 2 + 10 * 4,
        "decode": 200 * 2 + 10 * 4,
        "train": 0,
    }
    assert rows["gathered blocks, sampling"]["sample"] == 2 * 100 * 2
    assert rows["gathered blocks, sampling"]["decode"] == 0
    assert rows["gathered blocks"]["train"] == 200 * 2 + 10 * 4 + 2 * 100 * 2
    assert byte_rows(**blocks, prefetched=3)["gathered blocks, sampling"]["sample"] == 4 * 100 * 2
    assert byte_rows(**blocks, prefetched=30)["gathered blocks, sampling"]["sample"] == 800 * 2
    engine = byte_rows(**blocks, engine_dtype_bytes=2)
    assert "gathered blocks, sampling" not in engine
    assert engine["gathered blocks"]["sync"] == engine["gathered blocks"]["train"]  # of the canary


def test_a_snapshot_from_another_checkpoint_is_a_whole_module(capsys):
    assert byte_rows(num_loaded_snapshots=1)["snapshots"]["train"] == 10 * 4 + 1000 * 2 + 10 * 4
    whole = byte_rows(full_training=True, trainable_parameters=1000, num_snapshots=0, num_loaded_snapshots=1)
    assert whole["snapshots"]["train"] == 1000 * 4
    assert byte_rows(num_loaded_snapshots=1, num_shards=4)["snapshots"]["train"] == (10 * 4 + 1000 * 2 + 10 * 4) / 4
    plans = [planned(capsys, "diffusion/sd3_trainside", "scale=toy", *typed)
             for typed in ([], ["backend.snapshots={teacher: {path: toy}}"])]  # fmt: skip
    plain, taught = ({row["name"]: row["gib"]["train"] for row in plan["memory_gib"]} for plan in plans)
    assert taught["snapshots"] - plain["snapshots"] == plain["policy weights"] + plain["adapters"]


def test_an_engine_of_its_own_is_whole_and_leaves_the_trained_module_in_shards():
    rows = byte_rows(num_shards=4, engine_dtype_bytes=2)
    assert rows["engine weights"]["sample"] == 1000 * 2 + 10 * 4
    assert "gathered weights" not in rows


def test_in_colocate_no_phase_pays_for_optimizer_and_engine_together(capsys):
    rows = planned(capsys, COLOCATE)["memory_gib"]
    by_name = {row["name"]: row["gib"] for row in rows}
    for phase in cost.MOMENTS:
        assert by_name["optimizer (AdamW)"][phase] == 0 or by_name["engine weights"][phase] == 0
    apart = {row["name"]: row["gib"] for row in planned(capsys, SEPARATE)["memory_gib"]}
    assert all(apart["engine weights"][phase] > 0 for phase in cost.MOMENTS)


@pytest.mark.parametrize(
    ("recipe", "overrides", "payload", "transport"),
    [
        ("diffusion/sd3_trainside", [], "nothing", "none"),
        (COLOCATE, [], "adapter", "in_process"),
        (SEPARATE, ["sync.merge_adapters=true"], "merged", "broadcast"),
        ("diffusion/sd3_replica_full_separate", ["sync.transport=ray"], "full", "ray"),
    ],
)
def test_the_plan_says_what_travels_and_how(recipe, overrides, payload, transport, capsys):
    plan = planned(capsys, recipe, *overrides)
    assert (plan["sync"]["payload"], plan["sync"]["transport"]) == (payload, transport)
    sizes = plan["sizes"]
    if payload == "adapter":
        assert plan["sync"]["num_bytes"] == 4 * sizes["trainable_parameters"]
    if payload == "full":
        assert plan["sync"]["num_bytes"] == 2 * plan["parameters"]["transformer"]
    if payload == "merged":
        assert 0 < plan["sync"]["num_bytes"] < 2 * plan["parameters"]["transformer"]


def test_the_plan_for_people_has_a_block_for_each_device_set(capsys):
    assert main(["plan", SEPARATE]) == 0
    shown = capsys.readouterr().out
    assert "placement  separate: train on devices 0-3, rollout and reward on devices 4-7\n" in shown
    assert "adapters to the engine" in shown
    assert shown.index("devices 0-3:\n") < shown.index("optimizer") < shown.index("devices 4-7:\n")
    assert shown.index("devices 4-7:\n") < shown.index("engine weights")


def test_check_says_who_sits_where(capsys):
    assert main(["check", SEPARATE]) == 0
    assert "separate: train on devices 0-3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "status", "says"),
    [
        ("layout=colocate", 2, "Write placement={train: 0-7, rollout: 0-7}"),
        ("placement.rollout=3-7", 2, "error[2010]"),
        ("sync.transport=cuda_ipc", 2, "error[2020]"),
        ("runtime=local", 2, "Set runtime=ray"),
    ],
)
def test_a_layout_that_cannot_run_is_one_short_error(typed, status, says, capsys):
    assert main(["train", SEPARATE, typed]) == status
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err


def test_a_ray_that_does_not_answer_has_the_exit_status_of_a_missing_part(capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["train", SEPARATE]) == 3
    assert "error[3003]: RAY_ADDRESS=127.0.0.1:1: nothing answers there" in capsys.readouterr().err
    assert main(["doctor", "--json"]) == 3
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert not rows["ray"]["ok"]


@pytest.mark.parametrize(
    ("bundle", "path"),
    [("unirl.models.qwen3.family.Qwen3Bundle", "toy"), ("unirl.models.qwen_vl.family.QwenVLBundle", "toy")],
)
def test_a_language_model_is_counted_as_it_would_be_loaded(bundle, path):
    module, _, name = bundle.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    result, loaded = owner.estimate(path), owner(path=path, dtype="fp32").trainable()
    assert result.parameters == {"lm": sum(parameter.numel() for parameter in loaded.parameters())}
    config = loaded.config.get_text_config()
    assert result.num_blocks == config.num_hidden_layers
    assert result.cache_width == 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def test_the_plan_of_text_shows_the_slots_that_an_accelerator_takes_by_itself(capsys):
    """As many as fit the memory for keys and values, no more than the samples of a device, and prompts in parts."""
    alone = ("num_devices=1", "devices_per_node=1", "batch_size=64")
    facts = planned(capsys, "vlm/qwen_vl_argrpo_geo3k_mc_4x8", *alone)
    network = facts["sizes"]["network"]
    slot = network["tokens"] * network["cache_width"] * 2
    assert facts["settings"]["forward_rows"] == CACHE_BYTES // slot // 8 * 8 == 96
    few = planned(capsys, "vlm/qwen_vl_argrpo_geo3k_mc_4x8")
    assert few["settings"]["forward_rows"] == 32 * 16 // 32
    rows = {row["name"]: row["gib"]["sample"] * cost.GIB for row in few["memory_gib"]}
    assert rows["activations of sampling"] == PREFILL_TOKENS * few["sizes"]["network"]["width"] * 2 * 12


def test_the_plan_of_text_holds_the_keys_and_values_of_all_responses_in_the_making(capsys):
    facts = planned(capsys, "llm/quickstart", "scale=toy", "rollout.forward_batch_size=10")
    sizes = facts["sizes"]
    rows = {row["name"]: row["gib"]["sample"] * cost.GIB for row in facts["memory_gib"]}
    network = sizes["network"]
    assert rows["keys and values"] == pytest.approx(10 * network["tokens"] * network["cache_width"] * 4)
    assert sizes["trainable_parameters"] == facts["parameters"]["lm"]


def test_the_plan_says_which_times_it_does_not_predict(capsys):
    words = ["diffusion/sd3_replica_lora_separate", "scale=toy", "num_devices=2", "placement={train: 0, rollout: 1}"]
    unpredicted = ("what sampling.cache_threshold leaves out", "what rollout.weight_dtype=fp8 gains")
    changes = ["sampling.cache_threshold=0.1", "rollout.weight_dtype=fp8", "algorithm.old_logp_source=rollout"]
    for changed, says in ((changes, True), ([], False)):
        assert main(["plan", *words, *changed]) == 0
        text = capsys.readouterr().out
        assert all((line in text) is says for line in unpredicted)


def test_steps_that_are_generated_ahead_take_time_beside_training_and_memory_for_rows_and_snapshots(capsys):
    def of(staleness: int):
        words = (f"asynchronous.max_staleness={staleness}", "algorithm.old_logp_source=rollout")
        facts = planned(capsys, "diffusion/sd3_replica_lora_separate", *words)
        peaks = {row["name"]: max(row["gib"].values()) for row in facts["memory_gib"]}
        return facts, {name: phase["seconds"] for name, phase in facts["time"].items()}, peaks

    (turns, seconds, before), (ahead, same, after) = of(0), of(2)
    assert same == seconds
    assert turns["step_seconds"] == pytest.approx(sum(seconds.values()))
    longest = max(seconds["generate"] + seconds["reward"], seconds["train"])
    assert ahead["step_seconds"] == pytest.approx(seconds["sync"] + longest)
    assert after["stored latents"] == pytest.approx(3 * before["stored latents"])
    trainable = ahead["sizes"]["trainable_parameters"] / ahead["settings"]["num_shards"]
    assert after["snapshots"] - before.get("snapshots", 0.0) == pytest.approx(2 * trainable * 4 / cost.GIB, rel=1e-6)
