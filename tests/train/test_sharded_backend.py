"""What a sharded backend promises beside equal gradients: snapshots, ragged sampling, the guard, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.toy import ToyBundle
from tests.train.ranks import run_ranks
from unirl.config.errors import CheckpointError, ConfigError
from unirl.distributed import current
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import EmaFullConfig, FSDPConfig, LoraConfig, TrainTopology

ADAM = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)


def backend_of(lora: bool = False, **options: Any) -> FSDPBackend:
    fsdp = FSDPConfig(**{"reduce_dtype": "fp64"} | options.pop("fsdp", {}))
    return FSDPBackend(
        ToyBundle(width=18, blocks=3),
        **{"optimizer_cfg": ADAM, "fsdp_cfg": fsdp, "lora_cfg": LoraConfig(rank=3) if lora else None} | options,
    )


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 4, 4, generator=generator), torch.rand(4, generator=generator), torch.ones(4, 4)


def output(backend: FSDPBackend, seed: int = 0) -> Tensor:
    """A forward with the weights in force."""
    with torch.no_grad():
        return backend.module(*inputs(seed)).clone()


def update(backend: FSDPBackend, seed: int) -> Any:
    """One update on the same rows for any number of ranks: every rank has the batch and an equal share of the loss."""
    loss = backend.module(*inputs(seed)).square().mean() / current().dp_size
    backend.backward(loss, last=True)
    stats = backend.step(1.0, loss)
    backend.finish_step()
    return stats


# Sampling


def sample_ragged(forwards: list[int]) -> list[Tensor]:
    backend = backend_of()
    update(backend, 0)
    with backend.sampling():
        drawn = [backend.module(*inputs(i)).clone() for i in range(forwards[current().dp_rank])]
        assert not drawn[0].requires_grad
    update(backend, 1)  # the module trains on, in shards
    return [*drawn, output(backend)]


def test_ranks_sample_unequal_numbers_of_batches_as_one_process_does() -> None:
    few, many = run_ranks(2, sample_ragged, [1, 5])
    (alone,) = run_ranks(1, sample_ragged, [5])
    assert np.array_equal(few[0], alone[0]) and np.array_equal(few[-1], alone[-1])
    assert len(many) == len(alone) == 6
    assert all(np.array_equal(a, b) for a, b in zip(many, alone, strict=True))


# Snapshots


def swap(reshard_after_forward: bool, lora: bool) -> dict[str, Any]:
    backend = backend_of(lora, fsdp={"reshard_after_forward": reshard_after_forward})
    backend.snapshot("reference")
    before = output(backend)
    update(backend, 0)
    live_weights, live = dict(backend.gather()), output(backend)
    with torch.no_grad(), backend.weights("reference"):
        inside = output(backend)
        with backend.sampling():
            sampled = output(backend)
    after = output(backend)
    with backend.sampling(), torch.no_grad():
        gathered = output(backend)
        with pytest.raises(RuntimeError, match=r"inside sampling"), backend.weights("reference"):
            pass
    update(backend, 1)
    same = all(torch.equal(live_weights[name], tensor) for name, tensor in backend.gather("reference").items())
    return {
        "before": before,
        "live": live,
        "inside": inside,
        "sampled": sampled,
        "after": after,
        "gathered": gathered,
        "trained": output(backend),
        "confused": same,
    }


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_snapshot_runs_its_own_weights_and_the_live_ones_come_back(reshard: bool, lora: bool) -> None:
    alone = run_ranks(1, swap, reshard, lora)[0]
    for result in run_ranks(2, swap, reshard, lora):
        assert np.array_equal(result["inside"], result["before"]) and np.array_equal(
            result["sampled"], result["before"]
        )
        assert not np.array_equal(result["inside"], result["live"])
        assert np.array_equal(result["after"], result["live"]) and np.array_equal(result["gathered"], result["live"])
        assert not result["confused"]
        assert all(np.array_equal(result[name], alone[name]) for name in alone)


# The guard


def guard() -> list[Any]:
    """Bad values on one rank only; what every rank says."""
    backend = backend_of()
    before = dict(backend.gather())
    result = []
    for bad in ("gradient", "loss"):
        loss = backend.module(*inputs(0)).square().mean()
        backend.backward(loss, last=True)
        shard = backend.shards["blocks.1.proj.weight"]
        assert shard.grad is not None
        if current().dp_rank == current().dp_size - 1:
            if bad == "gradient":
                shard.grad[0, 0] = torch.nan
            else:
                loss = loss * torch.inf
        stats = backend.step(1.0, loss)
        result.append((stats.skipped, stats.skipped_in_a_row, stats.culprit))
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.gather().items())
    assert all(p.grad is None for p in [*backend.trainable.values(), *backend.shards.values()])
    return [*result, update(backend, 0).skipped]


def test_all_ranks_skip_what_is_not_finite_on_one_and_name_it() -> None:
    expected = [[True, 1, "blocks.1.proj.weight"], [True, 2, "loss"], False]
    assert run_ranks(3, guard) == [expected] * 3


# Checkpoints


def steps(folder: str, lora: bool, first: int, last: int, options: dict[str, Any]) -> dict[str, Any]:
    """Resume where `first` > 0, train to `last`, save; all that must be equal."""
    backend = backend_of(lora, ema_cfg=EmaFullConfig(every=1, target_decay=0.5), **options)
    backend.snapshot("reference")
    if first:
        backend.load(f"{folder}/{first}")
    for seed in range(first, last):
        update(backend, seed)
    backend.save(f"{folder}/{last}")
    state = {name: dict(backend.gather(name)) for name in ("live", "ema", "reference")}
    for key in ("exp_avg", "exp_avg_sq"):
        moments = {name: backend.optimizer.state[shard][key] for name, shard in backend.shards.items()}
        whole = {name: backend.sharding.whole(backend.trainable[name], shard) for name, shard in moments.items()}
        state[key] = {name: tensor.clone() for name, tensor in whole.items()}
    return state | {"updates": backend.updates}


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["updates"] == b["updates"] and all(
        np.array_equal(a[part][name], b[part][name]) for part in a if part != "updates" for name in a[part]
    )


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_a_run_saved_on_two_ranks_resumes_on_one_and_on_four(lora: bool, tmp_path: Path) -> None:
    whole = run_ranks(1, steps, str(tmp_path / "whole"), lora, 0, 4, {})[0]
    saved = run_ranks(2, steps, str(tmp_path / "two"), lora, 0, 2, {})
    assert same_state(saved[0], saved[1])
    names = {path.name for path in (tmp_path / "two/2").iterdir()}
    assert {"backend.json", "weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors"} <= names
    assert {Path(name).suffix for name in names} == {".json", ".safetensors"}
    assert set(json.loads((tmp_path / "two/2/backend.json").read_text())["files"]) == names - {"backend.json"}
    for num, options in ((1, {}), (4, {"fsdp": {"shard_size": 2}})):
        for result in run_ranks(num, steps, str(tmp_path / "two"), lora, 2, 4, options):
            assert same_state(result, whole), num


@pytest.mark.slow
def test_a_run_saved_on_one_rank_or_on_copies_resumes_on_shards(tmp_path: Path) -> None:
    whole = run_ranks(1, steps, str(tmp_path), True, 0, 4, {})[0]
    run_ranks(1, steps, str(tmp_path), True, 0, 2, {})
    run_ranks(4, steps, str(tmp_path), True, 2, 3, {"fsdp": {"shard_size": 1}})
    assert same_state(run_ranks(2, steps, str(tmp_path), True, 3, 4, {})[0], whole)


def refused(folder: str, snapshots: tuple[str, ...]) -> tuple[str, int, bool]:
    backend = backend_of(lora=True, ema_cfg=EmaFullConfig())
    for name in snapshots:
        backend.snapshot(name)
    before = dict(backend.gather())
    with pytest.raises(CheckpointError) as raised:
        backend.load(folder)
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in backend.gather().items())
    return str(raised.value), int(raised.value.code), unchanged


def test_a_sharded_checkpoint_is_judged_before_anything_changes(tmp_path: Path) -> None:
    run_ranks(2, steps, str(tmp_path), True, 0, 1, {})
    folder = tmp_path / "1"
    (message, code, unchanged), *_ = run_ranks(2, refused, str(folder), ())
    assert code == 7002 and unchanged and "weight snapshots" in message
    lost = folder / "weights-00002-of-00002.safetensors"
    content = lost.read_bytes()
    for damage in (lambda: lost.write_bytes(content[:-5]), lost.unlink):
        damage()
        for num in (1, 2):
            for message, code, unchanged in run_ranks(num, refused, str(folder), ("reference",)):
                assert (code, unchanged) == (7001, True) and lost.name in message


# Weights that travel


def travel() -> dict[str, Any]:
    backend = backend_of(lora=True)
    backend.snapshot("old")
    update(backend, 0)
    result: dict[str, Any] = {
        f"{payload} {weights}": {n: t.clone() for n, t in backend.named_tensors(payload, weights)}
        for payload in ("adapter", "merged")
        for weights in ("live", "old")
    }
    with pytest.raises(ConfigError, match="'full' does not exist where an adapter is trained"):
        backend.named_tensors("full")
    with pytest.raises(ConfigError, match="'adapter' does not exist where all weights are trained"):
        backend_of().named_tensors("adapter")
    return result | {"full": {n: t.clone() for n, t in backend_of().named_tensors("full")}, "output": output(backend)}


def test_tensors_that_travel_are_whole_and_equal_on_every_rank() -> None:
    alone = run_ranks(1, travel)[0]
    for result in run_ranks(2, travel):
        for payload in alone:
            assert result[payload].keys() == alone[payload].keys() if payload != "output" else True
            pairs = [(result[payload][n], alone[payload][n]) for n in alone[payload]] if payload != "output" else []
            assert all(np.array_equal(a, b) for a, b in pairs), payload
    folded = ToyBundle(width=18, blocks=3)
    parameters = dict(folded.trainable().named_parameters())
    with torch.no_grad():
        for name, tensor in alone["merged live"].items():
            parameters[name].copy_(torch.from_numpy(tensor))
        assert torch.allclose(folded.trainable()(*inputs(0)), torch.from_numpy(alone["output"]), atol=1e-6)
        for name, tensor in alone["merged old"].items():  # B starts at zero
            assert np.array_equal(tensor, dict(ToyBundle(width=18, blocks=3).trainable().named_parameters())[name])
    assert list(alone["full"]) == list(parameters)


# Settings


def offload() -> list[Any]:
    backend = backend_of(ema_cfg=EmaFullConfig())
    update(backend, 0)
    before, parameters = dict(backend.gather()), list(backend.trainable.values())
    backend.offload(("policy", "optimizer"))
    backend.onload(("policy", "optimizer"))
    backend.module._apply(torch.clone)  # new storage, as a move to another device gives
    backend.sharding.moved()
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.gather().items())
    assert all(a is b for a, b in zip(parameters, backend.trainable.values(), strict=True))
    for name, shard in backend.shards.items():
        local: Any = backend.trainable[name].detach()
        local = local.to_local() if current().dp_size > 1 else local
        assert shard.data_ptr() == local.data_ptr() or not shard.numel()
    update(backend, 1)
    return [output(backend)]


def test_a_sharded_policy_leaves_and_returns_without_losing_a_bit() -> None:
    (alone,) = run_ranks(1, offload)
    assert all(np.array_equal(result[0], alone[0]) for result in run_ranks(2, offload))


def topology() -> None:
    backend_of(topology=TrainTopology(dp=2))
    with pytest.raises(ConfigError, match=r"topology\.dp=4, but 2 ranks train.*dp: 2"):
        backend_of(topology=TrainTopology(dp=4))
    with pytest.raises(ConfigError, match=r"shard_size=3 does not divide the 2 ranks.*1, 2"):
        backend_of(fsdp={"shard_size": 3})


def test_a_topology_or_shard_size_that_does_not_fit_is_refused() -> None:
    run_ranks(2, topology)
