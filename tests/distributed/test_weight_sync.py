"""Weights arrive, or the fault is named: every transport, every payload, and every way to lose a tensor."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable

import pytest
import torch

from tests.sync_ends import Ends, NamedTensors, ends, toy_pipeline
from unirl.config.errors import ConfigError, StallError, SyncError
from unirl.distributed.weight_sync.base import Numerics
from unirl.distributed.weight_sync.buckets import Bucket
from unirl.distributed.weight_sync.sync import choose_transport
from unirl.models.loading.lora import inject_lora
from unirl.testing.toy import toy_request
from unirl.types.device import CPU
from unirl.types.facts import LoraSpec
from unirl.types.rollout_req import RolloutReq

A, B = "blocks.0.proj.lora_A.default.weight", "blocks.0.proj.lora_B.default.weight"
SQUARE = "blocks.0.proj.weight"
BY_THREAD = [{"transport": "broadcast"}, {"transport": "cuda_ipc"}]
TINY = 128  # bytes: several buckets even for the toy


@pytest.fixture(params=[{}, *BY_THREAD], ids=["in_process", "broadcast", "shared_buffer"])
def way(request: pytest.FixtureRequest) -> dict[str, object]:
    return {"colocated": not request.param, **request.param}


def pushed(lora: bool = True, **options: object) -> Ends:
    """Ends after a first, healthy push of version 1, in many small buckets."""
    joined = ends(**({} if lora else {"lora": None}), **options)  # type: ignore[arg-type]
    joined.sync.bucket_bytes = TINY
    joined.train()
    joined.sync.push(1)
    joined.train()
    return joined


def live(version: int) -> RolloutReq:
    return toy_request(1).from_weights("live", version)


def held(joined: Ends, names: list[str]) -> bool:
    """Whether the engine's parameters are the trainer's."""
    return all(torch.equal(joined.network.get_parameter(n), joined.backend.trainable[n]) for n in names)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_weights_arrive_bit_for_bit_in_many_buckets(way: dict[str, object], lora: bool) -> None:
    joined = pushed(lora, **way)
    report = joined.sync.push(2)
    assert held(joined, list(joined.backend.trainable))
    assert report.canary_absdiff == 0.0 and report.seconds > 0
    assert report.num_bytes >= sum(p.nbytes for p in joined.backend.trainable.values())


def test_only_adapters_travel_where_adapters_are_trained() -> None:
    joined = pushed()
    assert joined.sync.agreement is not None and list(joined.sync.agreement.layout.tensors) == [A, B]


def test_what_the_engine_holds_is_not_sent_again() -> None:
    joined = pushed()
    first = joined.sync.push(2)
    assert first.num_bytes > 0
    joined.backend.bend = lambda tensors: pytest.fail("sent again")
    assert joined.sync.push(2) == first


def test_merged_adapters_reach_an_engine_without_adapters() -> None:
    joined = ends(merge_adapters=True)
    joined.train()
    report = joined.sync.push(1)
    base = dict(toy_pipeline().bundle.trainable().named_parameters())[SQUARE]
    a, b = (joined.backend.trainable[name] for name in (A, B))
    assert torch.equal(joined.network.get_parameter(SQUARE), base + 2.0 * (b @ a))
    assert A not in dict(joined.network.named_parameters())
    assert report.canary_absdiff < 1e-5


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_bf16_engine_gets_the_masters_rounded_and_answers_within_tolerance(lora: bool) -> None:
    joined = pushed(lora, engine={"dtype": "bf16"})
    report = joined.sync.push(2)
    stored = torch.float32 if lora else torch.bfloat16
    for name, master in joined.backend.trainable.items():
        assert torch.equal(joined.network.get_parameter(name), master.to(stored))
    assert 0.0 < report.canary_absdiff < 0.5


def test_a_narrow_wire_halves_the_bytes_and_is_proven_too() -> None:
    joined, wide = pushed(wire_dtype="bf16"), pushed()
    assert joined.sync.push(2).num_bytes * 2 == wide.sync.push(2).num_bytes
    name = A
    assert torch.equal(joined.network.get_parameter(name), joined.backend.trainable[name].bfloat16().float())


# Faults. Each is caught by name, and the engine then refuses to sample.

Bend = Callable[[NamedTensors], NamedTensors]


def without_last(tensors: NamedTensors) -> NamedTensors:
    yield from list(tensors)[:-1]


def renamed(tensors: NamedTensors) -> NamedTensors:
    for name, tensor in tensors:
        yield name.replace("lora_B", "lora_C"), tensor


def swapped(tensors: NamedTensors) -> NamedTensors:
    (first, a), (second, b) = itertools.islice(tensors, 2)
    yield from [(second, b), (first, a)]
    yield from tensors


@pytest.mark.parametrize(
    ("bend", "named"),
    [
        (without_last, f"announced '{B}'.*then sent nothing"),
        (renamed, f"announced '{B}'.*then sent 'blocks.0.proj.lora_C"),
        (swapped, f"announced '{A}'.*then sent '{B}'"),
    ],
)
def test_a_trainer_that_sends_other_tensors_than_it_announced_is_caught(
    way: dict[str, object], bend: Bend, named: str
) -> None:
    joined = pushed(**way)
    joined.backend.bend = bend
    with pytest.raises(SyncError, match=named):
        joined.sync.push(2)
    refuses(joined)


def test_a_surplus_tensor_is_caught() -> None:
    joined = pushed()
    joined.backend.bend = lambda tensors: itertools.chain(tensors, [("extra", torch.ones(1))])
    with pytest.raises(SyncError, match="'extra', which it had not announced"):
        joined.sync.push(2)


def test_a_name_that_the_engine_does_not_have_is_caught() -> None:
    joined = ends(lora=None)
    joined.backend.bend = lambda tensors: ((name.replace("output_layer", "output_layerr"), t) for name, t in tensors)
    with pytest.raises(SyncError, match=r"'output_layerr.weight'.*Did you mean 'output_layer.weight'"):
        joined.sync.push(0)


def test_a_name_that_comes_twice_is_caught() -> None:
    joined = ends(lora=None)
    joined.backend.bend = lambda tensors: itertools.chain(tensors, [("input_layer.weight", torch.ones(1))])
    with pytest.raises(SyncError, match=r"give 'input_layer.weight' twice"):
        joined.sync.push(0)


def edited(edit: Callable[[Bucket], Bucket | None], number: int = 0) -> Callable[[Bucket], Bucket | None]:
    """`edit` on bucket `number` of a transfer."""
    return lambda bucket: edit(bucket) if bucket.number == number else bucket


def flipped(bucket: Bucket) -> Bucket:
    bucket.data[5] ^= 1
    return bucket


def transposed(bucket: Bucket) -> Bucket:
    for entry in bucket.entries:
        if entry.name == SQUARE:
            bucket.values(entry).copy_(bucket.values(entry).T.clone())
    return bucket


def halved(bucket: Bucket) -> Bucket:
    return dataclasses.replace(bucket, data=bucket.data[: bucket.data.numel() // 2])


def half_zero(bucket: Bucket) -> Bucket:
    bucket.data[bucket.data.numel() // 2 :] = 0
    return bucket


def empty(bucket: Bucket) -> Bucket:
    return dataclasses.replace(bucket, entries=())


def stale(bucket: Bucket) -> Bucket:
    return dataclasses.replace(bucket, version=bucket.version - 1)


def renamed_entry(bucket: Bucket) -> Bucket:
    return dataclasses.replace(bucket, entries=(dataclasses.replace(bucket.entries[0], name="nobody"),))


FAULTS: dict[str, tuple[bool, Callable[[Bucket], Bucket | None], str]] = {
    "flipped bit": (True, edited(flipped), f"'{A}' did not arrive as it was sent.*the bytes are not"),
    "transposed": (False, transposed, f"'{SQUARE}' did not arrive as it was sent"),
    "half a bucket": (True, edited(halved), f"bucket 0 of version 2 was cut short: '{A}'"),
    "half a bucket of zeros": (True, edited(half_zero), f"'{A}' did not arrive as it was sent"),
    "dropped tensor": (True, edited(empty), f"'{A}' was sent as .* and did not arrive"),
    "dropped last bucket": (True, edited(lambda bucket: None, 1), f"'{B}' was sent as .* and did not arrive"),
    "dropped first bucket": (True, edited(lambda bucket: None, 0), f"arrived instead of bucket 2 of version 1.*'{B}'"),
    "nothing arrives": (True, lambda bucket: None, f"version 2 .live. was sent, but version 1.*'{A}' and 1 more"),
    "stale version": (True, stale, f"version 2 .live. was sent, but version 1 .live. arrived.*'{A}'"),
    "stale bucket": (True, edited(stale, 1), f"version 1 .live. arrived instead of bucket 1 of version 2.*'{B}'"),
    "renamed": (True, edited(renamed_entry), "'nobody' arrived, but the trainer had not announced"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_way_is_caught_with_the_tensors_name(way: dict[str, object], fault: str) -> None:
    lora, bend, named = FAULTS[fault]
    joined = pushed(lora, **way)
    joined.engine.bend = bend
    with pytest.raises(SyncError, match=named) as caught:
        joined.sync.push(2)
    assert caught.value.code == 10002
    refuses(joined)
    joined.engine.bend = lambda bucket: bucket
    joined.sync.push(2)
    joined.engine.generate(live(2))


def refuses(joined: Ends) -> None:
    """The engine samples neither from the old weights nor from what arrived of the new ones."""
    for version in (1, 2):
        with pytest.raises(SyncError, match="the engine has"):
            joined.engine.generate(live(version))


@pytest.mark.parametrize("way", BY_THREAD, ids=["broadcast", "shared_buffer"])
def test_an_engine_that_does_not_listen_is_waited_for_no_longer_than_the_deadline(way: dict[str, object]) -> None:
    joined = ends(colocated=False, **way)  # type: ignore[arg-type]
    joined.sync.deadline_s = 1.0
    joined.sync.push(0)
    joined.train()
    joined.engine.listen = lambda: None  # type: ignore[method-assign]
    start = time.perf_counter()
    with pytest.raises(StallError, match=r"took more than 1 s|waited 1 s for an engine's receipt of bucket 0"):
        joined.sync.push(1)
    assert time.perf_counter() - start < 60.0
    with pytest.raises(SyncError, match="has no verified weights"):
        joined.engine.generate(live(0))


def test_an_engine_that_changes_a_weight_after_it_arrived_is_caught() -> None:
    joined = pushed()
    plain = joined.engine.arrival

    def arrival() -> object:
        with torch.no_grad():
            joined.network.get_parameter(B).mul_(1.0001)
        return plain()

    joined.engine.arrival = arrival  # type: ignore[method-assign]
    with pytest.raises(SyncError, match=f"'{B}' did not arrive as it was sent"):
        joined.sync.push(2)


def test_a_dtype_that_changed_after_binding_is_caught() -> None:
    joined = pushed()
    joined.network.get_parameter(A).data = joined.network.get_parameter(A).data.half()
    with pytest.raises(SyncError, match=f"'{A}'.*changed the parameter's dtype"):
        joined.sync.push(2)


def test_another_version_than_the_trainers_is_not_sent_as_it() -> None:
    joined = pushed()
    with pytest.raises(SyncError, match="after 7 updates, but the trainer has made 2 updates"):
        joined.sync.push(7)


def test_an_adapter_for_layers_that_the_engine_does_not_have_is_caught() -> None:
    joined = ends(engine_pipeline=lambda: toy_pipeline(blocks=2), pipeline=lambda: toy_pipeline(blocks=1))
    with pytest.raises(SyncError, match=r"has the adapter weight 'blocks.1.proj.lora_A.default.weight' \(2 in all"):
        joined.sync.push(0)
    joined = ends(engine_pipeline=lambda: toy_pipeline(blocks=1), pipeline=lambda: toy_pipeline(blocks=2))
    with pytest.raises(SyncError, match=r"'blocks.1.proj.lora_A.default.weight', and the engine's .* has no such"):
        joined.sync.push(0)


def test_an_adapter_bound_to_nothing_is_caught() -> None:
    joined = ends()
    joined.engine.network.blocks[0].proj = torch.nn.Identity()  # type: ignore[index, union-attr]
    with pytest.raises(ConfigError, match="'proj' is the end of no linear layer's name in ToyDenoiser"):
        joined.sync.push(0)


def test_a_second_adapter_left_in_place_is_caught() -> None:
    joined = ends()
    inject_lora(joined.network, LoraSpec(2, 4.0, ("input_layer",)), seed=0)
    with pytest.raises(SyncError, match=r"has the adapter weight 'input_layer.lora_A.default.weight'"):
        joined.sync.push(0)


def test_an_adapter_left_in_an_engine_for_merged_weights_is_caught() -> None:
    joined = ends(merge_adapters=True)
    inject_lora(joined.network, LoraSpec(2, 4.0, ("input_layer",)), seed=0)
    with pytest.raises(SyncError, match=r"has the adapter weight 'input_layer.lora_A.default.weight'"):
        joined.sync.push(0)


@pytest.mark.parametrize("spec", [LoraSpec(2, 8.0, ("proj",)), LoraSpec(3, 6.0, ("proj",))], ids=["alpha", "rank"])
def test_an_adapter_of_another_scale_or_rank_is_caught(spec: LoraSpec) -> None:
    joined = ends()
    inject_lora(joined.network, spec, seed=0)
    with pytest.raises(SyncError, match=r"'blocks.0.proj"):
        joined.sync.push(0)


def test_an_adapter_that_is_switched_off_later_is_caught_by_the_canary() -> None:
    joined = pushed()
    joined.network.blocks[0].proj.enable_adapters(False)  # type: ignore[index, union-attr]
    with pytest.raises(SyncError, match="every tensor arrived, but the forward of engine rank 0"):
        joined.sync.push(2)
    refuses(joined)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_another_base_checkpoint_is_caught_by_the_canary(dtype: str) -> None:
    joined = ends(engine_pipeline=lambda: toy_pipeline(init_seed=1), engine={"dtype": dtype})
    with pytest.raises(SyncError, match="another base checkpoint"):
        joined.sync.push(0)


def test_a_base_that_differs_in_one_bit_is_caught_where_equal_bits_can_be_expected() -> None:
    joined = ends()
    with torch.no_grad():
        weight = joined.network.get_parameter("output_layer.weight")
        weight.view(torch.int32)[0, 0] ^= 1 << 18
    with pytest.raises(SyncError, match="require equal bits"):
        joined.sync.push(0)


@pytest.mark.parametrize(
    ("transport", "same_process", "outcome"),
    [
        ("auto", True, "in_process"),
        ("auto", False, "broadcast"),
        ("ray", False, "ray"),
        ("cuda_ipc", True, r"transport=cuda_ipc does not reach.*in the trainer's own process: use in_process"),
        ("in_process", False, r"in_process does not reach.*a process of its own: use broadcast"),
    ],
)
def test_the_transport_follows_from_who_lives_where(transport: str, same_process: bool, outcome: str) -> None:
    if " " in outcome:
        with pytest.raises(ConfigError, match=outcome):
            choose_transport(transport, same_process)  # type: ignore[arg-type]
    else:
        assert choose_transport(transport, same_process) == outcome  # type: ignore[arg-type]


def test_weights_cross_between_gpus_and_cpus_without_a_process_group() -> None:
    assert choose_transport("auto", same_process=False, mixes_cpu_and_gpu=True) == "ray"
    with pytest.raises(ConfigError, match="Use ray, or auto"):
        choose_transport("broadcast", same_process=False, mixes_cpu_and_gpu=True)


def test_merging_adapters_that_are_not_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"merge_adapters merges adapters .*, but no adapters are trained"):
        ends(lora=None, merge_adapters=True).sync.push(0)


def test_two_networks_with_the_same_dtypes_at_different_parameters_are_not_expected_to_have_equal_bits() -> None:
    networks = [toy_pipeline().bundle.trainable() for _ in range(2)]
    networks[0].get_submodule("input_layer").to(torch.bfloat16)
    networks[1].get_submodule("output_layer").to(torch.bfloat16)
    one, other, again = (Numerics.of(network, torch.float32, CPU) for network in (*networks, networks[0]))
    assert one == again and one != other
