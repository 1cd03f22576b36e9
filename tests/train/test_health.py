"""Values that are not finite are found in memory before they are published, and in the files of a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.ranks import run_ranks
from tests.train.test_sharded_backend import backend_of, update
from tests.trainer.test_loop import run
from unirl.config.errors import CheckpointError, DivergenceError
from unirl.distributed import current
from unirl.train.backend.checkpoint import CheckpointStore, open_checkpoint
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.health import NonFinite, listed, not_finite, unhealthy
from unirl.train.backend.manifest import read_manifest, seal
from unirl.train.configs import EmaFullConfig
from unirl.trainer.resume import resume_point


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_of_any_type_is_found_and_the_largest_finite_values_are_not(dtype, bad) -> None:
    largest = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)  # whose sum is infinite
    one = largest.clone()
    one[2, 3] = bad
    assert not_finite({"largest": largest, "one": one, "empty": torch.empty(0, dtype=dtype)}) == ["one"]


def spoil_each() -> dict[str, list[str]]:
    """Spoil one element of one tensor of each kind on the last rank alone. Every rank returns what it was told."""
    backend = backend_of(ema_cfg=EmaFullConfig())
    update(backend, 0)
    name, shard = next((name, shard) for name, shard in backend.shards.items() if shard.numel())
    kinds = {
        "weights": shard.detach(),
        "optimizer": backend.optimizer.state[shard]["exp_avg_sq"],
        "snapshots": backend.snapshots.changing["ema"][name],
    }
    told = {"healthy": [str(each) for each in backend.nonfinite()], "name": [name]}
    for kind, tensor in kinds.items():
        flat = tensor.view(-1)
        kept = flat[-1].clone()
        if current().dp_rank == current().dp_size - 1:
            flat[-1] = math.nan
        told[kind] = [str(each) for each in backend.nonfinite()]
        flat[-1] = kept
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_learns_of_one_bad_element_of_one_rank(ranks) -> None:
    first, *others = run_ranks(ranks, spoil_each)
    [name] = first["name"]
    numel = backend_of().trainable[name].numel()
    assert first["healthy"] == []
    assert first["weights"] == [f"1 of {numel} elements of weights: {name} are not finite"]
    assert first["optimizer"] == [f"1 of {numel} elements of optimizer: {name}.exp_avg_sq are not finite"]
    assert first["snapshots"] == [f"1 of {numel} elements of snapshots: ema:{name} are not finite"]
    assert all(each == first for each in others)


def test_a_message_names_three_tensors_and_counts_the_others() -> None:
    text = listed(NonFinite(f"w{i}", 1, 2) for i in range(5))
    assert text.startswith("1 of 2 elements of w0 are") and text.endswith("w2 are not finite; and 2 more tensors")


# Files


def publish(store: CheckpointStore, step: int, bad: float = 0.0, state_step: int | None = None) -> None:
    with store.stage(step) as folder:
        (folder / "policy").mkdir()
        save_file({"w.exp_avg": torch.tensor([0.0, bad])}, folder / "policy" / "optimizer.safetensors")
        (folder / "trainer.json").write_text(json.dumps({"step": step if state_step is None else state_step}))


def test_resume_auto_takes_the_newest_checkpoint_that_is_whole_and_finite_and_names_the_others(tmp_path) -> None:
    store = CheckpointStore(tmp_path, keep=0)
    publish(store, 1)
    publish(store, 2, state_step=7)
    publish(store, 3, bad=math.nan)
    publish(store, 4)
    (tmp_path / "checkpoint-000004" / "trainer.json").write_text("{}")
    point = resume_point(store, "auto")
    assert point.checkpoint is not None and point.checkpoint.step == 1
    assert [str(each) for each in point.skipped] == [
        "checkpoint-000004 was skipped: trainer.json has 2 bytes instead of 11",
        "checkpoint-000003 was skipped: policy/optimizer.safetensors: 1 of 2 elements of w.exp_avg are not finite",
        "checkpoint-000002 was skipped: trainer.json is of step 7, and the manifest of step 2: the folder was put "
        "together",
    ]


def test_a_named_checkpoint_that_is_not_finite_is_refused_with_the_newest_that_is(tmp_path) -> None:
    store = CheckpointStore(tmp_path, keep=0)
    publish(store, 1)
    publish(store, 2, bad=math.inf)
    with pytest.raises(CheckpointError, match=r"1 of 2 elements of w\.exp_avg(.|\n)*is .*checkpoint-000001"):
        resume_point(store, str(tmp_path / "checkpoint-000002"))
    assert open_checkpoint(tmp_path / "checkpoint-000002").step == 2  # evaluations may look at it


@pytest.mark.parametrize("name", ["../../elsewhere.safetensors", "/etc/hostname", "sub/weights.safetensors"])
def test_a_backend_reads_only_files_that_the_manifest_lists(name, tmp_path) -> None:
    backend = backend_of()
    folder = tmp_path / "policy"
    backend.save(str(folder))
    counters = json.loads((folder / "backend.json").read_text())
    (folder / "backend.json").write_text(json.dumps(counters | {"files": [*counters["files"], name]}))
    with pytest.raises(CheckpointError, match=r"names the file .*manifest does not list"):
        backend.load(str(folder))


# Runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(folder, "save_interval=1")
    return folder


def test_a_run_whose_moments_are_not_finite_stops_and_its_last_healthy_checkpoint_stays_the_latest(
    trained, monkeypatch
) -> None:
    finish_step = FSDPBackend.finish_step

    def spoiled(self: FSDPBackend) -> None:
        finish_step(self)
        self.optimizer.state[next(iter(self.shards.values()))]["exp_avg"].view(-1)[0] = math.nan

    monkeypatch.setattr(FSDPBackend, "finish_step", spoiled)
    with pytest.raises(DivergenceError) as stopped:
        run(trained, "num_rollouts=3")
    text = str(stopped.value)
    assert text.startswith("after step 3 the state is not finite, so no checkpoint of it was published (1 of ")
    assert ".exp_avg are not finite" in text and "checkpoint-000002 stays the latest" in text
    assert "unirl train diffusion/sd3_trainside" in text and "resume=" in text
    assert (trained / "checkpoints" / "LATEST").read_text() == "checkpoint-000002\n"
    assert json.loads((trained / "run.json").read_text())["exit"]["code"] == 9


def test_a_run_goes_on_from_the_last_healthy_checkpoint_by_itself_and_says_so(trained, capsys) -> None:
    poisoned = trained / "checkpoints" / "checkpoint-000002"
    path = poisoned / "policy" / "optimizer.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("exp_avg"))
    tensors[name].view(-1)[0] = math.nan
    save_file(tensors, path)
    seal(poisoned, read_manifest(poisoned).step)  # as a version that did not look published it
    assert unhealthy(poisoned)
    run(trained, "save_interval=1")
    printed = capsys.readouterr()
    said = printed.out + printed.err
    assert f"elements of {name} are not finite" in said and "resumed from checkpoint-000001 (step 1)" in said
    assert not unhealthy(poisoned)
