"""Rows stay where they were made, and a call on any worker reads the rows that its columns name, however they lie."""

import threading
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.config.errors import StallError, WorkerError
from unirl.distributed.tensor.collective import CollectiveTransport, plan_moves, workers_of
from unirl.distributed.tensor.traffic import Traffic, num_bytes
from unirl.distributed.tensor.transport import ColumnStore, InProcessTransport
from unirl.testing.toy import toy_stage, toy_track
from unirl.types.batch import Batch, row
from unirl.types.column import Column, Piece
from unirl.types.primitives import Images, Texts
from unirl.types.results import Metric, TrainStepResult
from unirl.types.rollout_resp import RolloutResp

CPU = torch.device("cpu")


@dataclass(kw_only=True, eq=False)
class Sample(Batch):
    """Every kind of heavy value."""

    tensor: torch.Tensor = row(heavy=True)
    names: list[str] = row(heavy=True)
    mapping: dict[str, torch.Tensor] = row(heavy=True)
    light: torch.Tensor = row()


def sample(start: int, stop: int) -> Sample:
    numbers = torch.arange(start, stop)
    return Sample(
        tensor=numbers.float()[:, None].repeat(1, 3),
        names=[f"row {i}" for i in range(start, stop)],
        mapping={"a": numbers, "b": numbers.to(torch.bfloat16)},
        light=numbers.clone(),
    )


def assert_rows(found: Sample, rows: list[int]) -> None:
    assert found.light.tolist() == rows and found.names == [f"row {i}" for i in rows]
    assert found.tensor.tolist() == [[float(i)] * 3 for i in rows]
    assert found.mapping["a"].tolist() == rows and found.mapping["b"].dtype == torch.bfloat16


def workers(count: int, transport: InProcessTransport) -> list[ColumnStore]:
    stores = [ColumnStore(f"w{i}", transport) for i in range(count)]
    for store in stores:
        transport.add(store)
    return stores


def made_by(stores: list[ColumnStore], sizes: list[int]) -> Sample:
    """A result as the driver has it: the first worker made so many rows, the next one the rows after these."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = zip(stores, sizes, ends, strict=True)
    return Sample.concat([store.stash(sample(end - size, end)) for store, size, end in parts])


class Counting(InProcessTransport):
    """Counts what is asked of other workers."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[dict[str, int]] = []

    def fetch(self, wanted):
        self.requests.append({owner: len(pieces) for owner, pieces in wanted.items()})
        return super().fetch(wanted)


LAYOUTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(LAYOUTS, st.data())
def test_any_rows_of_any_owners_can_be_read_anywhere(sizes, data) -> None:
    stores = workers(5, InProcessTransport())
    result = made_by(stores[: len(sizes)], sizes)
    rows = data.draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=12))
    for reader in stores:
        assert_rows(reader.fetch(result.select(rows)), rows)


def test_the_driver_holds_columns_and_the_callee_tensors() -> None:
    (store,) = workers(1, InProcessTransport())
    result = made_by([store], [4])
    assert {type(result.tensor), type(result.names), type(result.mapping["a"])} == {Column}
    assert_rows(store.fetch((result.select([3, 1]),))[0], [3, 1])


def test_a_call_asks_each_owner_once() -> None:
    transport = Counting()
    stores = workers(3, transport)
    result = made_by(stores, [2, 2, 2])
    stores[0].fetch(((result, result.select([5, 0])), {"again": result}))
    # tensor, names, and two entries of the mapping, each by all rows and by one row.
    assert transport.requests == [{"w1": 4, "w2": 8}]


def test_own_rows_are_not_asked_for_and_not_copied() -> None:
    transport = Counting()
    (store,) = workers(1, transport)
    result = store.stash(Images(pixels=torch.zeros(4, 3, 2, 2)))
    (stored,) = store.values.values()
    assert store.fetch(result).pixels.data_ptr() == stored.data_ptr()
    assert transport.requests == []


def test_a_stored_slice_does_not_keep_the_rest_alive() -> None:
    store = ColumnStore("w")
    store.stash(Images(pixels=torch.zeros(64, 3, 2, 2)[:2]))
    (stored,) = store.values.values()
    assert stored.untyped_storage().nbytes() == 2 * 12 * 4


def test_shipped_rows_do_not_bring_the_rest_along() -> None:
    store = ColumnStore("w")
    store.stash(Images(pixels=torch.zeros(64, 3, 2, 2)))
    (parcel,) = store.read([Piece("w", "0/0", (3, 4))])
    assert parcel.value.untyped_storage().nbytes() == 2 * 12 * 4 and not parcel.on_accelerator


def test_released_rows_say_so() -> None:
    store = ColumnStore("w")
    old = store.stash(sample(0, 2))
    store.begin(1)
    new = store.stash(sample(0, 2))
    store.release(0)
    assert_rows(store.fetch(new), [0, 1])
    with pytest.raises(LookupError, match=r"rows 0/0 of w were released with step 0"):
        store.fetch(old)


def test_rows_of_an_earlier_worker_of_the_same_name_are_not_taken_for_ones_own() -> None:
    with pytest.raises(LookupError, match=r"w has never stored rows 0/7"):
        ColumnStore("w").rows(Piece("w", "0/7", (0,)))


def test_an_unknown_owner_is_named() -> None:
    (store,) = workers(1, InProcessTransport())
    with pytest.raises(LookupError, match=r"no worker is named 'gone'; there are \['w0'\]"):
        store.fetch(Images(pixels=Column((Piece("gone", "0/0", (0,)),))))  # type: ignore[arg-type]


def test_light_fields_and_metrics_reach_the_driver_as_they_are() -> None:
    store = ColumnStore("w")
    wide = torch.arange(100.0)
    result = store.stash((TrainStepResult(({"loss": Metric.mean(wide[1])},)), Texts(texts=["a"]), wide[:2], 3))
    assert result[0].metrics["loss"].value == 1.0 and result[1].texts == ["a"] and result[3] == 3
    assert result[2].untyped_storage().nbytes() == 8


# Over a process group: each thread is one rank.


def exchanged(stores: list[ColumnStore], calls: list, deadline_s: float = 10.0) -> list:
    """What each of the last workers reads, all of them over gloo."""
    hub, found, readers = dist.HashStore(), {}, stores[-len(calls) :]
    moves = plan_moves(calls, [store.owner for store in readers])
    ranks = {store.owner: rank for rank, store in enumerate(stores)}

    def work(store: ColumnStore) -> None:
        group = dist.ProcessGroupGloo(hub, ranks[store.owner], len(stores), timedelta(seconds=deadline_s))
        store.transport = CollectiveTransport(group, ranks, CPU, deadline_s)
        if store.owner in workers_of(moves):
            store.transport.exchange(store, moves)
        if store in readers:
            found[store.owner] = store.fetch(calls[readers.index(store)])

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[store.owner] for store in readers]


@settings(max_examples=15, deadline=None)
@given(LAYOUTS, st.integers(1, 3), st.booleans(), st.data())
def test_rows_move_between_any_two_layouts_over_gloo(sizes, num_readers, own_too, data) -> None:
    """Readers that own rows as well exchange them with each other: both ends send and receive."""
    num_workers = max(len(sizes), num_readers) if own_too else len(sizes) + num_readers
    stores = [ColumnStore(f"w{i}") for i in range(num_workers)]
    result = made_by(stores[: len(sizes)], sizes)
    rows = [
        data.draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=8), label=f"rows of reader {i}")
        for i in range(num_readers)
    ]
    for found, expected in zip(exchanged(stores, [result.select(share) for share in rows]), rows, strict=True):
        assert_rows(found, expected)


def test_no_move_is_planned_for_rows_that_lie_where_they_are_read() -> None:
    stores = [ColumnStore(f"w{i}") for i in range(2)]
    result = made_by(stores, [2, 2])
    assert plan_moves([result.select([0, 1]), result.select([2, 3])], ["w0", "w1"]) == []
    (move,) = plan_moves([result.select([0, 1]), result.select([1, 3])], ["w0", "w1"])
    assert (move.owner, move.reader, workers_of([move])) == ("w0", "w1", ["w0", "w1"])


def test_rows_that_were_not_moved_are_refused() -> None:
    transport = CollectiveTransport(None, {}, CPU, 1.0)  # type: ignore[arg-type]
    with pytest.raises(LookupError, match=r"rows 0/0 of w1 were not moved before the call"):
        transport.fetch({"w1": [Piece("w1", "0/0", (0,))]})


def test_a_peer_that_takes_no_part_is_named_at_the_deadline() -> None:
    hub, groups = dist.HashStore(), {}

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(hub, rank, 2, timedelta(seconds=5))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = ColumnStore("w0")
    transport = CollectiveTransport(groups[0], {"w0": 0, "w1": 1}, CPU, 0.2)
    moves = plan_moves([Images(pixels=Column((Piece("w1", "0/0", (0,)),)))], ["w0"])  # type: ignore[arg-type]
    with pytest.raises(StallError, match=r"worker 'w1' did not take part in a move of rows within 0.2 s"):
        transport.exchange(reader, moves)


# Through Ray's object store, in processes.


class Worker:
    """What a worker process does with its columns."""

    def __init__(self, owner: str) -> None:
        from unirl.distributed.tensor.ray_transport import RayTransport

        self.transport = RayTransport(deadline_s=20.0)
        self.store = ColumnStore(owner, self.transport)

    def connect(self, peers: dict) -> None:
        self.transport.connect(peers)

    def make(self, start: int, stop: int) -> Sample:
        return self.store.stash(sample(start, stop))

    def see(self, result: Sample) -> Sample:
        return self.store.fetch(result)

    def release(self, step: int) -> None:
        self.store.release(step)

    def read(self, pieces):
        return self.store.read(pieces)

    def swap(self, result: Sample) -> Sample:
        """Reads while the other worker does the same, each busy with its own call."""
        return self.store.fetch(result)


@pytest.fixture(scope="module")
def ray():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def actors(ray):
    kind = ray.remote(num_cpus=0, concurrency_groups={"io": 1})(Worker)
    kind = ray.remote(num_cpus=0, concurrency_groups={"io": 1})(io_reads(ray))
    peers = {f"w{i}": kind.remote(f"w{i}") for i in range(2)}
    ray.get([actor.connect.remote(peers) for actor in peers.values()])
    yield list(peers.values())
    for actor in peers.values():
        ray.kill(actor)


def io_reads(ray) -> type:
    class Serving(Worker):
        read = ray.method(concurrency_group="io")(Worker.read)

    return Serving


@pytest.mark.slow
def test_rows_go_from_worker_to_worker_through_the_object_store(ray, actors) -> None:
    parts = ray.get([actors[0].make.remote(0, 3), actors[1].make.remote(3, 6)])
    result = Sample.concat(parts)
    assert num_bytes(result) < 8000
    # Both read from each other at once, each in the middle of its own call.
    found = ray.get([actor.swap.remote(result.select([5, 0, 3])) for actor in actors], timeout=30)
    for rows in found:
        assert_rows(rows, [5, 0, 3])
    ray.get(actors[1].release.remote(0))
    with pytest.raises(LookupError, match="rows 0/0 of w1 were released with step 0"):
        ray.get(actors[0].see.remote(result))


@pytest.mark.slow
def test_a_dead_owner_is_named(ray, actors) -> None:
    result = ray.get(actors[1].make.remote(0, 3))
    ray.kill(actors[1])
    with pytest.raises(WorkerError, match="worker 'w1' died before it sent its rows"):
        ray.get(actors[0].see.remote(result))


# What the driver itself carries.


def test_the_driver_counts_a_view_with_all_that_it_drags_along() -> None:
    whole = torch.zeros(1000, 100)
    assert num_bytes(whole[:1]) > 400_000 > 10_000 > num_bytes(whole[:1].clone()) > 400


def test_no_heavy_field_passes_the_driver() -> None:
    track = toy_track(toy_stage(), prompts=4)
    heavy = num_bytes(RolloutResp({"image": track}))
    store, traffic = ColumnStore("w"), Traffic()
    light = store.stash(RolloutResp({"image": track}))
    traffic.received(light)
    traffic.sent(light)
    traffic.sent(light)
    segment = light.tracks["image"].segment
    held = track.segment.latents.nbytes + track.conditions["text"].embeds.nbytes
    assert type(segment.latents) is Column
    assert traffic.to_driver < heavy - held and traffic.to_workers == 2 * traffic.to_driver
