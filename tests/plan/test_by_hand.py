"""The memory that plans show, beside arithmetic done by hand and beside what toys allocate on an emulated device."""

import contextlib
import gc
from dataclasses import replace
from functools import cache

import pytest

from unirl.config.load import load
from unirl.plan.cost import GIB, memory_table
from unirl.plan.saves import copied_for_saves, saved_bytes
from unirl.plan.sizes import RunSizes, resident_parts
from unirl.testing.second_device import second_devices
from unirl.tracking.tracker import PhaseTimers
from unirl.train.backend.writer import FileWriter
from unirl.trainer.assemble import build_trainer

STORED = ("stored latents", "stored conditions", "rows that are trained")
WAN_14B = ("diffusion/wan21_t2v", "bundle.path=Wan-AI/Wan2.1-T2V-14B-Diffusers")
HI3 = ("unified_model/hi3_trainside",)
BY_HAND = [
    # recipe and overrides, moment, what is counted, GiB by hand, how
    (
        ("diffusion/sd3_trainside",),
        "train",
        "model",
        17.6,
        "2.24B + 5.58B parameters in bf16, the VAE in fp32, 18.8M adapters with gradients and moments, and 2.6 GiB of "
        "activations of one row of 1,357 tokens without checkpointing",
    ),
    (
        ("diffusion/sd3_trainside",),
        "train",
        "stored",
        5 - 2.25,
        "768 x 333 x 4096 x 2 bytes of conditions, 6 latents of 16 x 64 x 64; 2.25 GiB of pixels are on the host",
    ),
    (("diffusion/sd3_trainside",), "train", "reward models", 3.7, "PickScore: 986M parameters in fp32"),
    (
        ("diffusion/qwen_image_trainside",),
        "train",
        "model",
        57.4,
        "20.4B + 8.3B parameters in bf16, 189M adapters with gradients and moments; each block's input is stored",
    ),
    (
        ("diffusion/qwen_image_trainside",),
        "train",
        "stored",
        4.2 - 1.27,
        "768 x 512 x 3584 x 2 bytes of conditions, the latents; 1.27 GiB of pixels are on the host",
    ),
    (
        ("diffusion/flux1_dev_trainside",),
        "train",
        "model and stored",
        35 + 5 - 2.25,
        "11.9B + 4.9B parameters in bf16, 179M adapters; 768 x 512 x 4096 x 2 bytes of conditions, the latents",
    ),
    (
        WAN_14B,
        "sample",
        "model",
        65,
        "14.3B + 5.7B parameters in bf16, adapters and moments, 16 rows of 14,552 tokens of width 5,120 in one block",
    ),
    (WAN_14B, "train", "model", 59, "the same weights; two rows of which each block's input is stored"),
    (WAN_14B, "train", "stored latents", 12, "768 x 9 positions x 16 x 9 x 60 x 104 x 2 bytes"),
    (WAN_14B, "train", "stored conditions", 6, "768 x 2 x 512 x 4096 x 2 bytes, with and without the prompt"),
    (
        ("diffusion/qwen_image_trainside", "num_devices=2"),
        "sample",
        "gathered weights",
        38,
        "20.4B parameters in bf16 beside the shard of 19 GiB, which stays",
    ),
    (
        HI3,
        "sample",
        "model",
        39.0,
        "81.3B parameters in bf16 on 8 devices 18.9; two layers of 64 + 1 experts of 37.7M and 42M of attention 9.3; "
        "embedding and head of 133,120 x 4096, layers of images 2.7; the VAE in fp32 4.7; 4,096 tokens of width 4096; "
        "a copy of the 64 x 25.2M weights by which experts widen 3.0",
    ),
    ((*HI3, "num_devices=16", "batch_size=4"), "sample", "model", 39.0 - 18.9 / 2, "the same with half of a shard"),
    ((*HI3, "num_devices=32", "batch_size=8"), "sample", "model", 39.0 - 18.9 * 3 / 4, "with a quarter of a shard"),
    (
        (*HI3, "num_devices=16", "batch_size=4", "backend.lora_cfg=null", "backend.fsdp_cfg.defer_grad_sync=false"),
        "train",
        "model",
        81.3e9 * 16 / 16 / 2**30 + 12.0 + 4.7 + 1.9 + 6.0,
        "weights, gradients and two moments of 81.3B parameters in fp32 on 16 devices; two gathered layers and what is "
        "in no layer, the VAE, the inputs of 32 layers for one row; a copy of the experts' weights, and its gradient",
    ),
    (
        ("llm/qwen3_grpo_4b_base_dapo", "num_devices=8"),
        "train",
        "gradients",
        15,
        "4.02B fp32 gradients, which are not sharded until they are reduced",
    ),
    (
        ("llm/qwen3_grpo_4b_base_dapo", "num_devices=1"),
        "train",
        "casts of the weights",
        7.5,
        "autocast keeps 2 bytes for each of 4.02B fp32 parameters",
    ),
]


@cache
def rows_of(words):
    run = RunSizes.of(load(words[0], list(words[1:])).config)
    rows = memory_table(run.sizes, run.settings, resident_parts(run.placement))
    return {row.name: row.gib for row in rows}


@pytest.mark.parametrize(("words", "moment", "what", "gib", "how"), BY_HAND, ids=lambda value: str(value)[:40])
def test_the_plan_is_within_a_tenth_of_the_memory_by_hand(words, moment, what, gib, how):
    by_role = {role: figures[moment] for role, figures in rows_of(words).items()}
    stored = sum(by_role.get(role, 0.0) for role in STORED)
    model = sum(gib for role, gib in by_role.items() if not role.startswith(("stored", "rows", "reward")))
    groups = {"model": model, "stored": stored, "model and stored": model + stored}
    assert groups.get(what, by_role.get(what)) == pytest.approx(gib, rel=0.1), how


TOYS = ["diffusion/sd3_trainside", "llm/qwen3_grpo_4b_base_dapo"]
WEIGHTS = ("policy weights", "tables of positions", "adapters", "encoders", "VAE")
TOLERANCE = 0.03
"""Tables of the encoders, which the plan does not count, are this part of a toy at most."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TOYS)
def test_weights_stored_rows_and_moments_are_those_that_a_toy_allocates(recipe, tmp_path):
    words = ["scale=toy", "num_devices=1", "num_rollouts=1", "evaluation.eval_steps=0", "tracking.mirrors=[]"]
    loaded, allocated = load(recipe, [*words, f"run.dir={tmp_path / 'run'}"]), {}
    with second_devices(count=1) as devices, pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseTimers, "phase", noting(PhaseTimers.phase, devices, allocated))
        with build_trainer(loaded) as trainer:
            gc.collect()
            built = devices.allocated[0]
            trainer.train()
        del trainer
    rows = {role: {at: size * GIB for at, size in gib.items()} for role, gib in rows_of((recipe, *words)).items()}
    moments = rows["optimizer (AdamW)"]["train"]
    weights = sum(rows[role]["sync"] for role in WEIGHTS)
    stored = sum(rows[role]["reward"] for role in STORED if role in rows)
    assert built == pytest.approx(weights, rel=TOLERANCE)
    assert allocated["generate"] - built == pytest.approx(stored, rel=TOLERANCE, abs=64)
    # The scorer's own weights come with the reward, and the moments with the first update.
    assert allocated["train"] - allocated["reward"] == pytest.approx(moments, rel=TOLERANCE, abs=64)


@pytest.mark.parametrize("recipe", ["diffusion/quickstart_nft", "llm/qwen3_grpo_4b_base_dapo"])
def test_the_copies_for_background_saves_are_as_large_as_those_that_a_toy_makes(recipe, tmp_path):
    words = ["scale=toy", "num_devices=1", "num_rollouts=1", "evaluation.eval_steps=0", "tracking.sample_steps=0"]
    loaded, copied, begin = load(recipe, [*words, f"run.dir={tmp_path / 'run'}"]), {}, FileWriter.begin

    def noting_copies(self, directory, files):
        begin(self, directory, files)
        copied.update({name.removesuffix(".safetensors"): len(data) for name, data in self.buffers.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileWriter, "begin", noting_copies)
        with build_trainer(loaded) as trainer:
            trainer.train()
    run = RunSizes.of(loaded.config)
    saved = saved_bytes(run.sizes, run.settings)
    assert saved == pytest.approx({stem: size for stem, size in copied.items() if size}, rel=0.01)  # AdamW's counts
    in_background = copied_for_saves(run.sizes, run.settings)
    blocking = copied_for_saves(replace(run.sizes, saves_in_background=False), run.settings)
    assert all(saved[stem] <= gib * GIB < 2 * saved[stem] for stem, gib in in_background.items())
    assert blocking == {"optimizer": pytest.approx(saved["optimizer"] / GIB)}


def noting(phase, devices, allocated):
    """`PhaseTimers.phase`, which also notes the bytes that are alive at the end of the block of each name."""

    @contextlib.contextmanager
    def noted(self, name):
        with phase(self, name):
            yield
            gc.collect()
            allocated[name] = devices.allocated[0]

    return noted
