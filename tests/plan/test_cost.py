"""The time that plans show follows from operations, bytes and launches."""

from dataclasses import replace

import pytest

from unirl.cli.main import main
from unirl.cli.plan import clock, gib_text, made_by, rate_text
from unirl.config.errors import UsageError
from unirl.config.load import load
from unirl.plan.cost import engine_bytes, memory_table
from unirl.plan.devices import DEFAULT, DEVICES, device_named
from unirl.plan.fit import best_changes, candidate
from unirl.plan.sizes import RunSizes, resident_parts
from unirl.plan.times import (
    Work,
    collective,
    gather_work,
    generate_work,
    phase_time,
    reduce_work,
    step_times,
    sync_work,
    train_work,
)

H200, _ = device_named("h200")


def sized(recipe, *words):
    return RunSizes.of(load(recipe, list(words)).config)


def test_the_table_has_each_device_once_and_sane_rates():
    assert [device.name for device in DEVICES] == ["a100", "h100", "h200", "b200", "4090", "l40s"]
    for device in DEVICES:
        assert 100 < device.bf16 / device.bandwidth < 500  # operations per byte
        assert device.fp32 < device.bf16
        assert device.network < device.interconnect < device.bandwidth


def test_without_a_gpu_the_plan_says_which_device_it_is_for(monkeypatch):
    monkeypatch.setattr("unirl.plan.devices.own_device_name", lambda: None)
    device, about = device_named(None)
    assert device.name == DEFAULT
    assert "no GPU" in about
    monkeypatch.setattr("unirl.plan.devices.own_device_name", lambda: "NVIDIA H200")
    assert device_named(None) == (H200, "")
    monkeypatch.setattr("unirl.plan.devices.own_device_name", lambda: "Tesla V100")
    assert "Tesla V100 is not in the table" in device_named(None)[1]
    with pytest.raises(UsageError, match="Devices: a100, h100"):
        device_named("h1000")


def test_kernels_follow_each_other_while_the_host_launches_and_the_network_gathers():
    rates = replace(H200, bf16=100 / 0.8, bandwidth=10 / 0.9, interconnect=1.0, launch_s=1.0)
    on_device = phase_time(Work(flops=200, useful_flops=100, traffic=30, launches=4, gathered=4), rates, 2)
    assert on_device.seconds == pytest.approx(2 + 3)
    assert on_device.bound_by == "bytes"
    assert on_device.mfu == pytest.approx(100 / (5 * rates.bf16))
    assert phase_time(Work(flops=200, launches=9), rates, 2).bound_by == "launches"
    assert phase_time(Work(flops=200, gathered=9), rates, 2).bound_by == "gathers"
    assert phase_time(Work(flops=200, host_s=9), rates, 2).seconds == pytest.approx(11)


def test_one_row_a_micro_batch_is_bound_by_launches_and_eight_are_not():
    """By hand for one H200: at most 15 % MFU at one row, and about 35 % at eight."""
    run = sized("diffusion/sd3_trainside")
    one, eight = (step_times(run.sizes, replace(run.settings, micro_rows=rows), H200)["train"] for rows in (1, 8))
    assert one.bound_by == "launches"
    assert one.mfu <= 0.15
    assert eight.bound_by in ("bytes", "compute")
    assert 0.2 < eight.mfu < 0.4


def test_launches_of_a_forward_and_backward_pass_are_those_that_were_counted():
    """SD3.5-M and Qwen-Image, adapters on attention, autocast: 8,796 and 22,011."""
    for recipe, counted in (("diffusion/sd3_trainside", 8796), ("diffusion/qwen_image_trainside", 22011)):
        run = sized(recipe)
        plain = replace(run.settings, recompute=False, micro_rows=1)
        passes = run.sizes.num_trained * run.sizes.trained_steps
        launches = train_work(replace(run.sizes, anchor_passes=0.0), plain).launches / passes
        assert launches == pytest.approx(counted, rel=0.15)


def test_sharded_blocks_that_are_gathered_for_every_row_are_the_bound():
    """Two gathers of 41 GB for each row and step take longer than their compute."""
    run = sized("diffusion/qwen_image_trainside", "num_devices=8")
    slow = step_times(run.sizes, run.settings, H200)["train"]
    assert slow.bound_by == "gathers"
    whole = step_times(run.sizes, replace(run.settings, num_shards=1), H200)["train"]
    assert whole.parts["gathers"] < 0.1 * slow.parts["gathers"]


def test_token_decoding_in_few_slots_is_bound_by_launches():
    run = sized("llm/qwen3_grpo_4b_base_dapo", "num_devices=8")
    few, many = (
        step_times(run.sizes, replace(run.settings, forward_rows=slots), H200)["generate"] for slots in (8, 64)
    )
    assert few.bound_by == "launches"
    assert many.seconds < few.seconds / 4


def test_a_step_cache_keeps_three_numbers_per_token_and_channel_of_a_forward():
    off, on = (sized("diffusion/sd3_nft", *words) for words in ((), ("sampling.cache_threshold=0.1",)))
    tables = [memory_table(run.sizes, run.settings, resident_parts(run.placement)) for run in (off, on)]
    before, after = ({row.name: row.gib["sample"] for row in table}["step cache"] for table in tables)
    network = on.sizes.network
    rows = on.settings.forward_rows * on.sizes.network_rows
    assert before == 0
    assert after == pytest.approx(3 * rows * network.tokens * network.width * 2 / 2**30)


def test_a_mixture_of_experts_copies_their_weights_in_every_forward():
    """HunyuanImage-3 has 32 layers of 64 experts, each with two matrices of width 4096 and one of width 3072."""
    run = sized("unified_model/hi3_trainside")
    expert = 3 * 4096 * 3072
    one_copy = 64 * 2 * 4096 * 3072 * 2 / 2**30
    rows = {row.name: row.gib for row in memory_table(run.sizes, run.settings, resident_parts(run.placement))}
    assert rows["copies of experts, sampling"]["sample"] == pytest.approx(one_copy)
    assert rows["copies of experts"]["train"] == rows["copies of experts"]["anchors"] == one_copy
    without = replace(run.sizes, network=replace(run.sizes.network, copied_parameters=0))
    more = generate_work(run.sizes, run.settings).traffic - generate_work(without, run.settings).traffic
    assert more == pytest.approx(run.sizes.num_steps * 32 * 64 * expert * 2 * 2)  # read and written, in bf16


def test_an_engine_in_eight_bits_halves_the_weights_of_its_blocks():
    """SD3.5-M by hand: 24 blocks of width 1536, of which 13 have a second attention, and the last one fewer layers."""
    words = ("algorithm.old_logp_source=rollout",)
    wide = sized("diffusion/sd3_replica_lora_colocate", *words)
    small = sized("diffusion/sd3_replica_lora_colocate", *words, "rollout.weight_dtype=fp8")
    image, text, second = 6 + 4 + 8, 6 + 4 + 8, 3 + 4
    unused = 4 + 1 + 8  # the last block: 2 of the 6 modulations of its text, no projection of its text, no MLP for it
    matrices = 24 * (image + text) + 13 * second - unused
    assert small.sizes.engine_eight_bit == matrices * 1536**2
    assert engine_bytes(wide.sizes) - engine_bytes(small.sizes) == small.sizes.engine_eight_bit
    assert engine_bytes(wide.sizes) == wide.sizes.policy_parameters * 2


def test_what_the_plan_recommends_is_evaluated_with_the_same_model():
    run = sized("diffusion/qwen_image_trainside", "num_devices=8")
    now = candidate([run], {}, H200)
    gains = best_changes([run], H200, H200.memory_gib)
    assert len(gains) == 3
    assert [gain.seconds for gain in gains] == sorted(gain.seconds for gain in gains)
    for gain in gains:
        changed = sized("diffusion/qwen_image_trainside", "num_devices=8", gain.word)
        assert candidate([changed], {}, H200).seconds == pytest.approx(gain.seconds)
        assert gain.seconds < now.seconds


@pytest.mark.parametrize(
    "recipe", ["diffusion/sd3_refl", "diffusion/sd3_nft", "vlm/quickstart", "diffusion/quickstart"]
)
def test_every_kind_of_loss_has_a_plan_with_time(recipe, capsys):
    assert main(["plan", recipe, "--device", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "counted, not measured on a GPU" in shown
    assert "MFU" in shown


def test_rings_through_two_nodes_send_all_their_bytes_through_the_adapters_of_each():
    """As many rings as adapters carry equal parts; each part passes every edge of its ring, also between nodes."""
    received, group, adapters = 15e9, 16, 8
    part = received / adapters
    assert collective(received, group, adapters) == Work(gathered=received, crossing=part)
    assert collective(received, adapters, adapters).crossing == 0
    h100, _ = device_named("h100")
    time = phase_time(collective(received, group, adapters), h100, 2)
    assert time.bound_by == "network"
    assert time.seconds == pytest.approx(received / min(h100.interconnect, adapters * h100.network))


def test_gathers_stay_within_a_node_if_a_copy_does():
    """32 devices on 4 nodes: one copy over all of them, or one copy on each node."""
    run = sized("vlm/qwen_vl_argrpo_geo3k_mc_4x8")
    whole, copies = (replace(run.settings, num_shards=shards) for shards in (32, 8))
    assert gather_work(run.sizes, whole).crossing == pytest.approx(gather_work(run.sizes, whole).gathered / 8)
    assert gather_work(run.sizes, copies).crossing == 0
    trainable = 4 * run.sizes.trainable_parameters
    assert reduce_work(run.sizes, whole) == collective(31 / 32 * trainable, 32, 8)
    within, between = 7 / 8 * trainable, 2 * 3 / 4 * trainable / 8
    assert reduce_work(run.sizes, copies).gathered == pytest.approx(within + between)
    assert reduce_work(run.sizes, copies).crossing == pytest.approx(between)
    one_node = replace(run.sizes, devices_per_node=None)
    assert reduce_work(one_node, whole).crossing == gather_work(one_node, whole).crossing == 0


def test_sharded_sampling_gathers_the_layers_in_every_forward_and_the_rest_once():
    """80B parameters on 8 devices: 32 layers of 2.496B in bf16, of which 7/8 arrive from the others."""
    layers, rest = 32 * 2.496e9 * 2 * 7 / 8, 1.44e9 * 2 * 7 / 8
    images = sized("unified_model/hi3_trainside")
    steps = step_times(images.sizes, images.settings, H200)["generate"].parts["gathers"]
    assert steps == pytest.approx((16 * layers + rest) / H200.interconnect, rel=0.01)  # one chunk of 16 steps
    recipe = load("unified_model/hi3_joint").policies["recaption"]
    texts = RunSizes.of(recipe)
    tokens = step_times(texts.sizes, texts.settings, H200)["generate"].parts["gathers"]
    assert tokens == pytest.approx((2049 * layers + rest) / H200.interconnect, rel=0.01)  # the prompt and 2048 tokens
    whole = step_times(texts.sizes, replace(texts.settings, gathers_once=True), H200)["generate"].parts["gathers"]
    assert whole == pytest.approx((layers + rest) / H200.interconnect, rel=0.01)
    alone = step_times(texts.sizes, replace(texts.settings, num_shards=1), H200)["generate"].parts["gathers"]
    assert alone == 0


def test_weights_cross_the_network_to_an_engine_on_other_nodes():
    recipe, nodes = "diffusion/sd3_replica_full_separate", "devices_per_node=4"
    one, two = sized(recipe).sizes, sized(recipe, nodes).sizes
    assert sync_work(one).crossing == 0
    assert sync_work(two).crossing == sync_work(two).gathered == sync_work(one).gathered > 0


def test_a_reward_in_bf16_takes_the_rate_of_bf16_and_the_same_memory():
    wide, narrow = (
        sized("diffusion/sd3_trainside", f"reward.backend.config.dtype={dtype}") for dtype in ("fp32", "bf16")
    )
    seconds = [step_times(run.sizes, run.settings, H200)["reward"].seconds for run in (wide, narrow)]
    assert seconds[0] / seconds[1] == pytest.approx(H200.bf16 / H200.fp32)
    # The weights stay in float32: autocast casts what it reads.
    assert wide.sizes.reward.parameters == narrow.sizes.reward.parameters


@pytest.mark.parametrize(
    ("recipe", "noun"),
    [("diffusion/sd3_trainside", "images"), ("diffusion/wan21_t2v", "videos"), ("llm/quickstart", "tokens")],
)
def test_the_rate_of_a_plan_counts_what_the_model_makes(recipe, noun):
    run = sized(recipe)
    per_sample = run.sizes.num_steps if noun == "tokens" else 1
    made = run.sizes.num_samples * per_sample
    assert made_by(run) == noun
    assert rate_text(run, made / 50) == f"50 {noun} per second"
    assert rate_text(run, made / 12345) == f"12,345 {noun} per second"
    assert rate_text(run, made * 36.0) == f"100 {noun} per hour"


def test_times_and_sizes_are_readable_at_any_magnitude():
    assert [clock(value) for value in (0, 0.0123, 3.456, 99.9, 205, 7500)] == [
        "-",
        "0.0123s",
        "3.46s",
        "99.9s",
        "3m25s",
        "2h05m",
    ]
    assert [gib_text(value) for value in (3.456, 1234.56, 23456.7)] == ["3.46", "1,234.6", "23,457"]
