"""Two policies on one device: what one keeps there while the other works, beside arithmetic done by hand."""

from __future__ import annotations

import json
import re

import pytest

from unirl.cli.main import main
from unirl.config.device_sets import DeviceSet
from unirl.config.errors import MemoryShortageError
from unirl.config.load import load
from unirl.plan.cost import MOMENTS
from unirl.plan.devices import device_named
from unirl.plan.fit import device_peaks, moment_peaks
from unirl.plan.machine import check_memory
from unirl.plan.sizes import RecipeSizes, RunSizes, sizes_of_policies
from unirl.plan.times import step_times
from unirl.trainer.assemble import check_device_memory
from unirl.types.device import DeviceKind

RECIPE = "pe/pe_trainside_pickscore"
MODELS = ("ar.bundle.path=Qwen/Qwen3-4B-Base", "ar.stack.micro_batch_size=4", "diffusion.stack.micro_batch_size=1")
FULL = ("ar.backend.lora_cfg=null",)
ENGINE = "{_target_: unirl.rollout.engine.replica.engine.ReplicaRolloutEngine}"
SYNC = "{_target_: unirl.distributed.weight_sync.sync.EngineSync}"
REPLICAS = tuple(f"{name}.{block}" for name in ("ar", "diffusion") for block in (f"rollout={ENGINE}", f"sync={SYNC}"))
GIB = 2**30
LM, TRANSFORMER, ENCODERS, VAE, PICKSCORE = 4.02e9, 2.24e9, 5.58e9, 83.8e6, 986e6
TABLE = 384 * 384 * 1536 * 2 / GIB
"""The transformer's table of positions in bf16, which is never sharded."""
LATENTS = 256 / 8 * 11 * 16 * 64 * 64 * 2 / GIB
"""32 images on each device, of which 11 positions are stored in bf16."""
CONDITIONS = 256 / 8 * (77 + 256) * 4096 * 2 / GIB
ROWS = LATENTS + CONDITIONS


def sizes(*words: str) -> dict[str, RecipeSizes]:
    return sizes_of_policies(load(RECIPE, [*MODELS, *words]))


def kept(run: RunSizes | None) -> dict[str, dict[str, float]]:
    """Devices to what the other policy keeps there, GiB by moment."""
    assert run is not None
    return {home.words: dict(row.gib) for home, [row] in run.beside.items() if any(row.gib.values())}


def always(gib: float, **moments: float) -> dict[str, float]:
    return dict.fromkeys(MOMENTS, gib) | moments


def test_a_trainside_policy_keeps_weights_optimizer_encoders_and_reward_while_it_waits() -> None:
    """Each of 8 devices has an eighth of the trained module, and all of the encoders, the VAE and PickScore (fp32)."""
    policies = sizes(*FULL)
    drawing = (TRANSFORMER * 2 / 8 + ENCODERS * 2 + VAE * 4 + PICKSCORE * 4) / GIB + TABLE
    later = dict.fromkeys(("reward", "anchors", "train"), drawing + ROWS)
    [found] = kept(policies["ar"].run).values()
    assert found == pytest.approx(always(drawing, **later), rel=0.01)
    writing = LM * (4 + 8) / 8 / GIB  # weights in fp32, and the two moments of AdamW
    [found] = kept(policies["diffusion"].run).values()
    assert found == pytest.approx(always(writing), rel=0.01)


def test_a_policy_that_is_not_trained_has_neither_optimizer_nor_gradients() -> None:
    policies = sizes(*FULL, "trained=[diffusion]")
    [found] = kept(policies["diffusion"].run).values()
    assert found == pytest.approx(always(LM * 4 / 8 / GIB), rel=0.01)
    assert policies["ar"].run is not None
    names = {row.name for _, row in policies["ar"].run.memory if any(row.gib.values())}
    assert not names & {"optimizer (AdamW)", "gradients", "activations of training", "activations of anchors"}
    both = sizes(*FULL)["ar"].run
    assert both is not None
    assert {"optimizer (AdamW)", "gradients"} < {row.name for _, row in both.memory if any(row.gib.values())}


def test_in_colocate_a_policy_that_waits_keeps_the_rows_of_the_step_alone() -> None:
    """The engine sleeps, the trainer is in main memory, and the reward comes for its own phase only."""
    policies = sizes(*REPLICAS)
    reward = PICKSCORE * 4 / GIB
    expected = always(0.0, reward=ROWS + reward, anchors=ROWS, train=ROWS)
    [found] = kept(policies["ar"].run).values()
    assert found == pytest.approx(expected, rel=0.01)
    assert kept(policies["diffusion"].run) == {}


def test_with_separate_engines_each_policy_keeps_its_part_on_either_device_set() -> None:
    words = (*REPLICAS, *FULL, "placement={train: 0-3, rollout: 4-7}", "diffusion.sampling.samples_per_prompt=8")
    found = kept(sizes(*words)["diffusion"].run)
    assert found["devices 0-3"] == pytest.approx(always(LM * (4 + 8) / 4 / GIB), rel=0.01)
    assert found["devices 4-7"] == pytest.approx(always(LM * 2 / GIB), rel=0.01)


def test_one_policy_may_share_its_weights_with_its_engine_while_the_other_takes_turns() -> None:
    """The reward belongs to the images, whose policy takes turns: it is away while the language model works."""
    words = (f"diffusion.rollout={ENGINE}", f"diffusion.sync={SYNC}", *FULL)
    policies = sizes(*words)
    [found] = kept(policies["ar"].run).values()
    assert (found["sync"], found["sample"]) == (0.0, 0.0)
    assert found["reward"] == pytest.approx(PICKSCORE * 4 / GIB + ROWS, rel=0.01)
    run = policies["ar"].run
    assert run is not None and not any(row.part == "reward" for _, row in run.memory)
    [found] = kept(policies["diffusion"].run).values()
    assert found == pytest.approx(always(LM * (4 + 8) / 8 / GIB), rel=0.01)


def test_the_peak_of_a_policy_is_its_own_and_what_the_other_keeps() -> None:
    policies = sizes(*FULL)
    for name, policy in policies.items():
        alone, run = policy.alone, policy.run
        assert alone is not None and run is not None
        own, [beside] = moment_peaks(alone, alone.settings), kept(run).values()
        if name == "ar":  # the reward is counted where the images are
            assert moment_peaks(run, run.settings) == pytest.approx({at: own[at] + beside[at] for at in MOMENTS})
        [peaks] = device_peaks(run, run.settings).values()
        assert peaks == moment_peaks(run, run.settings)


DEVICES = DeviceSet("device", tuple(range(8)))


def test_a_device_that_holds_each_policy_but_not_both_is_refused() -> None:
    policies = sizes()
    alone = policies["ar"].alone
    assert alone is not None
    room = 34.0
    assert max(moment_peaks(alone, alone.settings).values()) < 0.92 * room
    kind = DeviceKind(name="a GPU", memory_gib=room)
    check_memory(RecipeSizes(policies["ar"].config), DeviceKind(name="a GPU", memory_gib=40.0), pytest.fail, DEVICES)
    with pytest.raises(MemoryShortageError, match=r"ar: .*of which 15\.\d GiB belong to diffusion, which waits"):
        check_device_memory(policies, print, DEVICES, kind)


def test_the_micro_batch_that_is_chosen_leaves_room_for_the_other_policy(capsys) -> None:
    words = ["plan", RECIPE, "ar.bundle.path=Qwen/Qwen3-4B-Base", "--device", "4090"]
    assert main(words) == 5  # 26.6 GiB
    both = re.search(r"(\d+) rows? in a micro-batch \(ar\.stack", capsys.readouterr().out)
    assert both is not None and int(both[1]) < 4  # 4 of them take 27 GiB


def test_the_plan_shows_what_the_other_policy_keeps(capsys) -> None:
    assert main(["plan", RECIPE, *MODELS, "trained=[ar]", "--device", "h100"]) == 0
    _, ar, diffusion = re.split(r"^(?:ar|diffusion)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert "diffusion, which waits" in ar and "ar, which waits" in diffusion
    assert "parameters 0 trained" in diffusion and "optimizer" not in diffusion
    assert "The sums of each track contain what the others keep" in diffusion


@pytest.mark.parametrize(
    "recipe", [(RECIPE, *MODELS), ("unified_model/hi3_joint",)], ids=["two networks", "one network"]
)
def test_the_total_is_the_sum_of_the_times_and_the_highest_peak(recipe: tuple[str, ...], capsys) -> None:
    assert main(["plan", *recipe, "--device", "h200", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    policies, total = facts["policies"], facts["total"]
    peaks = {
        name: max(sum(row["gib"][at] for row in plan["memory_gib"]) for at in MOMENTS)
        for name, plan in policies.items()
    }
    assert total["step_seconds"] == pytest.approx(sum(plan["step_seconds"] for plan in policies.values()))
    assert total["peak_gib"] == pytest.approx(max(peaks.values())) == pytest.approx(peaks[total["peak_of"]])
    assert total["fits"]
    assert main(["plan", *recipe, "--device", "h200"]) == 0
    shown = capsys.readouterr().out
    assert f"peak {total['peak_gib']:.1f} of 129.2 GiB ({total['peak_at']} of {total['peak_of']}): fits h200" in shown


# Tracks of one network

JOINT = "unified_model/hi3_joint"


def tracks(*words: str) -> dict[str, RunSizes]:
    sizes = sizes_of_policies(load(JOINT, list(words)))
    return {name: each.run for name, each in sizes.items() if each.run is not None}


def items(run: RunSizes, moment: str) -> dict[str, float]:
    return {row.name: row.gib[moment] for _, row in run.memory if row.gib[moment]}


def test_beside_a_track_of_the_same_network_are_the_reward_and_the_rows_of_the_step() -> None:
    """32 images of 32 x 64 x 64 latents on 8 devices, of which 4 of 17 positions are stored in bf16."""
    text, image = tracks().values()
    reward, latents = PICKSCORE * 4 / GIB, 4 * 4 * 32 * 64 * 64 * 2 / GIB
    later = dict.fromkeys(("reward", "anchors", "train"), reward + latents)
    [found] = kept(text).values()
    assert found == pytest.approx(always(reward, **later), rel=0.01)
    assert kept(image) == {}  # what the text has are a few tokens, which are not counted


def test_a_balance_holds_a_shard_of_the_gradient_of_each_track() -> None:
    """302.9 GiB are the gradients of 81.3B parameters in fp32."""
    words = ("backend.lora_cfg=null", "stack.balance=gradient_norm")
    fixed, balanced = (tracks(*chosen)["image"] for chosen in (words[:1], words))
    assert items(balanced, "train")["gradients, set aside"] == pytest.approx(2 * 302.9 / 8, rel=0.01)
    assert "gradients, set aside" not in items(fixed, "train")
    alone = tracks(*words, "trained=[image]")["image"]
    assert items(alone, "train")["gradients, set aside"] == pytest.approx(302.9 / 8, rel=0.01)


def test_a_track_that_is_only_sampled_takes_no_time_in_training() -> None:
    device, _ = device_named("h200")
    text, image = tracks("trained=[image]").values()
    assert "train" not in {n for n, each in step_times(text.sizes, text.settings, device).items() if each.seconds}
    assert step_times(image.sizes, image.settings, device)["train"].seconds > 0
    assert not {"gradients", "activations of training"} & set(items(text, "train"))
    assert "optimizer (AdamW)" in items(text, "train")  # of the weights that the images train
