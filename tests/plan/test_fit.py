"""`unirl fit` finds the fastest settings that fit, and says why the next faster ones do not."""

import json
import re
import shlex
from functools import cache
from itertools import product

import pytest

from unirl.cli.main import main
from unirl.config.load import load
from unirl.plan.alternatives import with_words
from unirl.plan.devices import device_named
from unirl.plan.fit import (
    FASTER,
    FORWARD,
    LEAST_SAVING,
    MICRO,
    RESIDENT,
    RUNGS,
    candidate,
    changes_of,
    moment_peaks,
    next_rung,
    search,
    settings_with,
    shortage,
    usable,
    values_of,
    words_of,
)
from unirl.plan.fit_together import LASTING, policy_runs, search_together
from unirl.plan.sizes import RunSizes

CASES = {
    "a small card, images": ("diffusion/sd3_trainside", ["--device", "4090"]),
    "eight H100, images": ("diffusion/sd3_trainside", ["--devices", "8", "--device", "h100"]),
    "eight H100, a large base": ("diffusion/qwen_image_trainside", ["--devices", "8", "--device", "h100"]),
    "eight H200, videos": ("diffusion/wan21_t2v", ["--devices", "8", "--device", "h200"]),
    "eight H100, all weights of a language model": (
        "llm/qwen3_grpo_4b_base_dapo",
        ["--devices", "8", "--memory", "80", "--device", "h100"],
    ),
    "eight L40S, adapters of a language model": (
        "vlm/qwen_vl_argrpo_geo3k_mc_4x8_lora",
        ["--devices", "8", "--device", "l40s"],
    ),
}


@cache
def sized(recipe, *words):
    return RunSizes.of(load(recipe, list(words)).config)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_words_that_fit_prints_are_legal_and_fit(case, capsys):
    recipe, options = CASES[case]
    status = main(["fit", recipe, *options])
    shown = capsys.readouterr().out
    if status == 5:
        assert re.search(r"devices with \d+ GiB would do", shown)
        return
    [line] = [line for line in shown.splitlines() if line.startswith("fastest")]
    words = [word for word in shlex.split(line)[1:] if "=" in word]
    assert line.split()[1:4] == ["unirl", "train", recipe]
    device, _ = device_named(options[options.index("--device") + 1])
    count = [f"num_devices={options[options.index('--devices') + 1]}"] if "--devices" in options else []
    before, after = (sized(recipe, *count, *more) for more in ([], words))
    result = candidate([after], {}, device)
    assert result.peak_gib <= usable(device.memory_gib)
    own = candidate([before], {}, device)
    assert result.seconds <= own.seconds or own.peak_gib > usable(device.memory_gib)
    assert "does not fit" in shown or "no setting is faster" in shown
    changed = {word.partition("=")[0] for word in words} - {"num_devices"}
    assert changed <= {rung.key for rung in RUNGS}
    # The algorithm's own counts stay.
    assert (after.sizes.num_samples, after.sizes.num_updates) == (before.sizes.num_samples, before.sizes.num_updates)


def test_the_search_agrees_with_trying_every_setting():
    run = RunSizes.of(load("diffusion/sd3_trainside", ["num_devices=2"]).config)
    device, memory = device_named("h100")[0], 60.0
    fit = search([run], device, memory)
    every = [
        candidate([run], {"micro_rows": micro, "forward_rows": rows, "recompute": recompute}, device)
        for micro, rows, recompute in product((1, 2, 4, 8, 16), (8, 16, 32, 64), (False, True))
    ]
    fastest = min(each.seconds for each in every if each.peak_gib <= usable(memory))
    assert fit.best is not None
    assert fit.best.seconds <= fastest / 0.99
    assert fit.best.peak_gib <= usable(memory)


def test_if_nothing_fits_it_lists_what_saves_memory_and_how_much(capsys):
    recipe, whole = "diffusion/qwen_image_trainside", "pipeline.vae_tiling=false"
    assert main(["fit", recipe, whole, "--device", "4090", "--json"]) == 5
    facts = json.loads(capsys.readouterr().out)
    assert not facts["fits"] and facts["best"] is None
    gains = [saving["gib"] for saving in facts["savings"]]
    assert len(gains) > 1
    assert gains == sorted(gains, reverse=True)
    before = moment_peaks(sized(recipe, whole), sized(recipe, whole).settings)
    for saving in facts["savings"]:
        changed = sized(recipe, whole, saving["word"])
        saved = before[saving["moment"]] - moment_peaks(changed, changed.settings)[saving["moment"]]
        # The plan of a recipe with `auto` chooses the micro-batch for the device; the smallest is the same here.
        assert saved == pytest.approx(saving["gib"])
        assert saved >= LEAST_SAVING
    assert main(["fit", recipe, "--device", "4090"]) == 5
    shown = capsys.readouterr().out
    assert "nothing fits" in shown
    assert "more than fits" in shown
    assert "would do" in shown


def test_a_number_of_rows_between_two_powers_of_two_is_found():
    """With 24 rows, chunks of 8 are three and chunks of 12 are two. Where 16 do not fit, 12 are the fastest."""
    recipe, words = "diffusion/sd3_trainside", ["batch_size=3", "sampling.samples_per_prompt=8"]
    run = RunSizes.of(load(recipe, [*words, "stack.num_updates_per_batch=1", "stack.micro_batch_size=8"]).config)
    device = device_named("h100")[0]
    at = {rows: candidate([run], {"micro_rows": rows, "forward_rows": 24}, device) for rows in (8, 12, 24)}
    assert {8, 12, 24} <= set(values_of(run, MICRO))
    assert at[12].seconds < at[8].seconds
    memory = (at[12].peak_gib + 0.01) / usable(1.0)
    best = search([run], device, memory, [MICRO]).best
    assert best is not None
    assert settings_with(run, best.changes).micro_rows not in (1, 2, 4, 16)


def test_typed_settings_are_kept_and_what_would_be_faster_is_said(capsys):
    typed = ["stack.micro_batch_size=1", "rollout.forward_batch_size=8", "sampling.height=256"]
    assert main(["fit", "diffusion/sd3_trainside", *typed, "--device", "h100", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    words = facts["best"]["command"].split()
    assert set(typed) <= set(words)
    kept = {each["key"]: each["faster"] for each in facts["kept"]}
    assert set(kept) == {"stack.micro_batch_size", "rollout.forward_batch_size"}
    word, seconds = kept["stack.micro_batch_size"]
    assert word.startswith("stack.micro_batch_size=")
    assert seconds < FASTER * facts["best"]["step_seconds"]
    assert main(["fit", "diffusion/sd3_trainside", *typed, "--device", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "kept       stack.micro_batch_size, as typed; a step would take" in shown


def test_options_that_cannot_be_are_refused(capsys):
    assert main(["fit", "diffusion/sd3_trainside", "--device", "tpu"]) == 2
    assert "there is no such device in the table" in capsys.readouterr().err
    assert main(["fit", "diffusion/sd3_trainside", "--memory", "0"]) == 2
    assert "--memory 0" in capsys.readouterr().err
    assert main(["fit", "diffusion/sd3_trainside", "--memory", "nan"]) == 2


def test_each_rung_of_the_ladder_lowers_the_peak_until_none_is_left():
    recipe, words, device = "diffusion/sd3_trainside", ["stack.micro_batch_size=8"], device_named("h100")[0]
    run = RunSizes.of(load(recipe, words).config)
    climbed = []
    while (word := next_rung(run, "train")) is not None:
        climbed.append(word)
        lower = RunSizes.of(load(recipe, [*words, *climbed]).config)
        assert moment_peaks(lower, lower.settings)["train"] < moment_peaks(run, run.settings)["train"]
        run = lower
        assert len(climbed) < 12
    assert climbed[0] == "stack.micro_batch_size=4"
    assert "backend.fsdp_cfg.activation_checkpointing=true" in climbed
    assert words_of({}) == []
    assert "use more devices" in shortage(run, "train")
    assert candidate([run], {}, device).peak_gib > 0


def test_the_printed_command_holds_the_typed_words_that_the_search_leaves(capsys):
    typed = ["pipeline.keep_resident=true", "sampling.height=256"]
    assert main(["fit", "diffusion/sd3_trainside", *typed, "--device", "4090"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fastest")]
    keys = [word.partition("=")[0] for word in shlex.split(line) if "=" in word]
    assert "sampling.height" in keys
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(("device", "status", "says"), [("4090", 5, "does not fit 4090"), ("h200", 0, "fits h200")])
def test_a_plan_says_whether_its_peak_fits_the_device(device, status, says, capsys):
    assert main(["plan", "diffusion/sd3_trainside", "--device", device]) == status
    assert says in capsys.readouterr().out


def test_the_rows_of_a_server_are_not_a_setting_to_choose():
    replica, server = (sized("llm/quickstart", f"rollout={name}") for name in ("replica", "sglang"))
    assert len(values_of(replica, FORWARD)) > 1
    assert values_of(server, FORWARD) == (server.settings.forward_rows,)


def test_a_plan_for_a_device_that_nobody_named_refuses_nothing(capsys, monkeypatch):
    monkeypatch.setattr("unirl.plan.devices.own_device_name", lambda: None)
    assert main(["plan", "unified_model/hi3_trainside", "rollout.gather_weights=true"]) == 0
    assert "does not fit h100" in capsys.readouterr().out


# Recipes of several tracks, and what fits instead


def nearest(text):
    """The recipe and the words of each command line in a refusal, or in the report of `unirl fit`."""
    lines = [line for line in text.splitlines() if "unirl train " in line]
    return [shlex.split(line[line.index("unirl train ") :])[2:] for line in lines]


def fits(words, device, capsys):
    """True if the plan of a command line has no refusal. Checks that it says so, too."""
    status = main(["plan", *words, "--device", device])
    out, err = capsys.readouterr()
    assert (status == 5) == ("error[5002]" in err)
    return status == 0 and f"does not fit {device}" not in out


GATHERED = "rollout.gather_weights=true"
HI3 = ("unified_model/hi3_trainside", "unified_model/hi3_joint", "unified_model/hi3_think")


@pytest.mark.parametrize("recipe", [HI3[0], *(pytest.param(each, marks=pytest.mark.slow) for each in HI3[1:])])
def test_the_weights_of_80_billion_parameters_fit_no_device_whole_and_eight_in_shards(recipe, capsys):
    assert main(["plan", recipe, GATHERED, "--device", "h200"]) == 5
    error = capsys.readouterr().err
    assert "gathered weights 151.45" in error and "129.2 of its 140.4 GiB can be planned for" in error
    [words] = nearest(error)
    assert words[0] == recipe and "rollout.gather_weights=false" in words and GATHERED not in words
    assert "other settings: 8 devices" in error
    assert fits(words, "h200", capsys)
    assert fits([recipe], "h200", capsys)  # the recipe as it is


def test_all_weights_of_80_billion_parameters_need_more_devices_or_adapters(capsys):
    """16 bytes a parameter on 8 devices are 151 GiB, and on 16 devices 76."""
    recipe = "unified_model/hi3_trainside"
    assert main(["plan", recipe, "backend.lora_cfg=null", "--device", "h200"]) == 5
    error = capsys.readouterr().err
    assert "gradients 302.86" in error  # 4 bytes each, not sharded until they are reduced
    devices, adapters = nearest(error)
    assert "more devices: 16 devices" in error and "adapters: 8 devices" in error
    assert "num_devices=16" in devices and "batch_size=4" in devices and "backend.lora_cfg=null" in devices
    assert "backend.lora_cfg={}" in adapters and "backend.lora_cfg=null" not in adapters
    assert fits(devices, "h200", capsys) and fits(adapters, "h200", capsys)


def test_where_a_second_copy_of_the_weights_does_not_fit_the_engine_takes_the_trained_ones(capsys):
    assert main(["plan", "unified_model/hi3_vllmomni", "--device", "h200"]) == 5
    error = capsys.readouterr().err
    assert "engine weights 151.45" in error and "sampling with the trained weights: 8 devices" in error
    [words] = nearest(error)
    assert "rollout=trainside" in words and "rollout.gather_weights=false" in words
    assert fits(words, "h200", capsys)


def test_where_nothing_near_fits_the_refusal_says_so(capsys):
    assert main(["plan", "unified_model/hi3_trainside", "--device", "4090"]) == 5
    error = capsys.readouterr().err
    assert "Nothing near fits: use larger devices, or smaller samples" in error and nearest(error) == []


@pytest.mark.parametrize(
    ("recipe", "device"),
    [
        ("unified_model/bagel_think_joint", "h100"),
        ("pe/pe_trainside_pickscore", "4090"),
        pytest.param("unified_model/hi3_think", "h100", marks=pytest.mark.slow),
        pytest.param("pe/pe_trainside_pickscore", "h100", marks=pytest.mark.slow),
    ],
)
def test_fit_searches_the_settings_of_all_tracks(recipe, device, capsys):
    """Its command line is legal, its peak is that of the plan, and no single change beats it."""
    words = ["ar.bundle.path=Qwen/Qwen3-4B-Base"] if recipe.startswith("pe/") else []
    assert main(["fit", recipe, *words, "--device", device, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    command = shlex.split(best["command"])
    assert command[:3] == ["unirl", "train", recipe]
    chosen, _ = device_named(device)
    policies = policy_runs(load(recipe, command[3:]), chosen, chosen.memory_gib)
    assert policies is not None
    now = {name: candidate(policy.runs, {}, chosen) for name, policy in policies.items()}
    assert max(each.peak_gib for each in now.values()) == pytest.approx(best["peak_gib"])
    seconds = sum(each.seconds for each in now.values())
    assert seconds == pytest.approx(best["step_seconds"])
    for name, policy in policies.items():
        for rung in RUNGS:
            for change in changes_of(policy.runs, rung):
                changed = candidate(policy.runs, change, chosen)
                if rung not in LASTING and changed.peak_gib <= usable(chosen.memory_gib):
                    assert changed.seconds >= FASTER**2 * now[name].seconds


def test_the_settings_that_tracks_share_are_one_word_and_those_of_a_track_have_its_name():
    chosen, _ = device_named("h100")
    policies = policy_runs(load("unified_model/hi3_think"), chosen, 79.6)
    assert policies is not None
    [network] = policies.values()
    assert network.tracks == ("think", "recaption", "image")
    changes = {"num_shards": 4, "guidance_passes": 2}
    assert network.words(changes, fixes_micro=True) == [
        "backend.fsdp_cfg.shard_size=4",
        "sampling.image.guidance_passes=2",
    ]
    each = [candidate([run], {}, chosen).seconds for run in network.runs]
    assert candidate(network.runs, {}, chosen).seconds == pytest.approx(sum(each))
    peaks = [candidate([run], {}, chosen).peak_gib for run in network.runs]
    assert candidate(network.runs, {}, chosen).peak_gib == max(peaks)


def test_a_policy_that_waits_with_less_makes_room_for_the_other(capsys):
    """Encoders that stay are in the way of the language model, which has none."""
    recipe, words = "pe/pe_trainside_pickscore", ["ar.bundle.path=Qwen/Qwen3-4B-Base", "ar.backend.lora_cfg=null"]
    chosen, _ = device_named("4090")
    policies = policy_runs(load(recipe, words), chosen, 24.0)
    assert policies is not None
    free = {"ar": RUNGS, "diffusion": [rung for rung in RUNGS if rung is not RESIDENT]}
    kept, moved = (search_together(policies, chosen, 24.0, each) for each in (free, dict.fromkeys(policies, RUNGS)))
    waiting = [fit.smallest.policies["ar"].runs[0].beside for fit in (kept, moved)]
    largest = [max(row.gib["train"] for rows in each.values() for row in rows) for each in waiting]
    encoders = 5.58e9 * 2 / 2**30
    assert largest[0] - largest[1] == pytest.approx(encoders + 83.8e6 * 4 / 2**30, rel=0.05)
    assert moved.smallest.peak_gib < kept.smallest.peak_gib


def test_a_new_value_replaces_the_word_of_its_key():
    words = ["num_devices=8", "+backend.x=1", "a=b"]
    assert with_words(words, ["num_devices=16", "backend.x=2"]) == ["a=b", "num_devices=16", "backend.x=2"]
