"""One recipe, however it is run: the same samples to the bit, the same weights, on 1, 2, 4 ranks, in every layout."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer import assemble

STEPS, SAVED = 3, 1
COMMON = (
    "scale=toy",
    f"num_rollouts={STEPS}",
    "save_interval=0",
    "tracking.sample_steps=0",
    "evaluation.eval_steps=0",
    "stack.num_updates_per_batch=2",
    "stack.micro_batch_size=1",
    "backend.optimizer_cfg.learning_rate=3e-3",
)
RECIPES = {
    ("trainside", "lora"): ("diffusion/sd3_trainside",),
    ("trainside", "full"): ("diffusion/sd3_trainside", "backend.lora_cfg=null"),
    ("colocate", "lora"): ("diffusion/sd3_replica_lora_colocate",),
    ("colocate", "full"): ("diffusion/sd3_replica_full_colocate",),
    ("separate", "lora"): ("diffusion/sd3_replica_lora_separate",),
    ("separate", "full"): ("diffusion/sd3_replica_full_separate",),
    ("beside", "lora"): ("diffusion/sd3_replica_lora_colocate", "sync.transport=cuda_ipc"),
    ("beside", "full"): ("diffusion/sd3_replica_full_colocate", "sync.transport=cuda_ipc"),
}


@dataclass
class Outcome:
    """What a run made: of every step the log-probs, rewards and pictures of all rows; and the final weights."""

    logp: list[Tensor]
    rewards: list[Tensor]
    pictures: list[Tensor]
    weights: dict[str, Tensor]
    driver_bytes: int


def run(folder: Path, recipe: str, *overrides: str) -> Outcome:
    loaded = load(recipe, [*COMMON, f"run.dir={folder}", *overrides])
    preflight(loaded)
    with assemble.build_trainer(loaded) as trainer:
        made = Outcome([], [], [], {}, 0)
        produce = trainer.produce

        def watched(step: int):
            resp = produce(step)
            track = resp.tracks["image"]
            made.logp.append(track.segment.logp)
            made.rewards.append(track.rewards)
            made.pictures.append(trainer.rollout.preview(track.decoded).pixels)
            return resp

        trainer.produce = watched
        trainer.train()
        made.weights = dict(trainer.policy.roles.backend.gather())
        made.driver_bytes = trainer.pool.traffic
    return made


def assert_same(found: Outcome, expected: Outcome) -> None:
    for step in range(len(expected.logp)):
        assert torch.equal(found.logp[step], expected.logp[step]), f"log-probs of step {step}"
        assert torch.equal(found.rewards[step], expected.rewards[step]), f"rewards of step {step}"
        assert torch.equal(found.pictures[step], expected.pictures[step]), f"pictures of step {step}"
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        gap = (found.weights[name] - weight).abs().max() / weight.abs().max().clamp(min=1e-12)
        assert gap <= 1e-6, f"{name}: {gap:.2g}"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> dict[str, Outcome]:
    """The trainside runs in this process, which all others must equal."""
    folder = tmp_path_factory.mktemp("local")
    torch.set_num_threads(1)
    return {tune: run(folder / tune, *RECIPES["trainside", tune]) for tune in ("lora", "full")}


@pytest.mark.slow
@pytest.mark.parametrize("tune", ["lora", "full"])
@pytest.mark.parametrize("layout", ["colocate", "separate"])
def test_an_engine_of_its_own_changes_nothing_in_one_process(layout, tune, local, tmp_path) -> None:
    assert_same(run(tmp_path, *RECIPES[layout, tune]), local[tune])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "devices", "tune"),
    [
        ("trainside", 1, "full"), ("trainside", 2, "lora"), ("trainside", 4, "full"),
        ("colocate", 1, "lora"), ("colocate", 2, "full"), ("colocate", 4, "lora"),
        ("separate", 2, "lora"), ("separate", 4, "full"), ("beside", 2, "full"),
    ],
)  # fmt: skip
def test_workers_change_nothing(layout, devices, tune, local, workers, tmp_path) -> None:
    recipe, *overrides = RECIPES[layout, tune]
    result = run(tmp_path, recipe, *overrides, "runtime=ray", f"num_devices={devices}")
    assert_same(result, local[tune])


@pytest.mark.slow
def test_a_run_saved_on_two_ranks_continues_on_one_and_on_four(local, workers, tmp_path) -> None:
    recipe, *overrides = RECIPES["trainside", "full"]
    run(tmp_path / "two", recipe, *overrides, "runtime=ray", "num_devices=2", f"num_rollouts={SAVED}")
    for devices, runtime in ((1, "local"), (4, "ray")):
        folder = tmp_path / str(devices)
        shutil.copytree(tmp_path / "two", folder)
        result = run(folder, recipe, *overrides, f"runtime={runtime}", f"num_devices={devices}")
        assert len(result.logp) == STEPS - SAVED
        whole = local["full"]
        rest = Outcome(whole.logp[SAVED:], whole.rewards[SAVED:], whole.pictures[SAVED:], whole.weights, 0)
        assert_same(result, rest)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["colocate", "separate"])
def test_no_byte_of_latents_conditions_or_pixels_passes_through_the_driver(layout, workers, tmp_path) -> None:
    """What passes does not depend on the size of the pictures, and one sample of the larger would stand out."""
    passed = []
    for side in (32, 64):
        recipe = load(
            f"diffusion/sd3_replica_lora_{layout}",
            [
                *(*COMMON, f"run.dir={tmp_path / str(side)}", "runtime=ray", "num_devices=4", "num_rollouts=2"),
                *(f"sampling.height={side}", f"sampling.width={side}"),
            ],
        )
        preflight(recipe)
        with assemble.build_trainer(recipe) as trainer:
            before = workers.traffic
            trainer.train()
            passed.append(workers.traffic - before)
    one_picture = 3 * 64 * 64 * 4
    assert abs(passed[1] - passed[0]) < one_picture / 10, passed
    assert passed[1] > 0


@pytest.mark.slow
def test_rows_may_travel_over_a_process_group(workers, tmp_path, monkeypatch) -> None:
    moved = []
    gather = workers.gather
    monkeypatch.setattr(workers, "gather", lambda what, *rest: (moved.append(what), gather(what, *rest))[1])
    recipe, *overrides = RECIPES["separate", "lora"]
    settings = ("runtime=ray", "num_devices=4", "placement={train: 0-2, rollout: 3}", "row_transport=collective")
    settings += ("batch_size=3", "num_rollouts=2")
    expected = run(tmp_path / "local", *RECIPES["trainside", "lora"], "batch_size=3", "num_rollouts=2")
    assert_same(run(tmp_path / "workers", recipe, *overrides, *settings), expected)
    assert moved.count("moving rows") >= 2


def test_training_moved_the_weights(local) -> None:
    for made in local.values():
        assert not torch.equal(made.logp[0], made.logp[-1])
