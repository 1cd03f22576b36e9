"""Rows stay where they were made, and a call on any worker reads the rows that its columns name, however they lie."""

import threading
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.config.device_sets import DeviceSet
from unirl.config.errors import StallError, WorkerError
from unirl.distributed import current
from unirl.distributed.group.base import num_bytes
from unirl.distributed.group.dispatch import Dispatch, broadcast, collect, remote_methods, scatter, split_call
from unirl.distributed.group.handle import Remote, submit
from unirl.distributed.tensor.row_store import InProcessTransport, RowPayload, RowStore, pack, unpack
from unirl.distributed.tensor.transports import (
    CollectiveTransport,
    Move,
    ObjectStoreCarrier,
    RayTransport,
    describe,
    plan_moves,
    workers_of,
)
from unirl.reward.service import RewardService
from unirl.testing.toy import toy_stage, toy_track
from unirl.train.stack import TrainStack
from unirl.types.batch import Batch, row, tensors_of
from unirl.types.primitives import Images, Texts
from unirl.types.results import Metric, TrainStepResult
from unirl.types.rollout_resp import RolloutResp
from unirl.types.rows import RemoteRows, StoredRows

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


def workers(count: int, transport: InProcessTransport) -> list[RowStore]:
    stores = [RowStore(f"w{i}", transport) for i in range(count)]
    for store in stores:
        transport.stores[store.owner] = store
    return stores


def made_by(stores: list[RowStore], sizes: list[int]) -> Sample:
    """A result as the driver has it: the first worker made so many rows, the next one the rows after these."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = zip(stores, sizes, ends, strict=True)
    return Sample.concat([store.stash(sample(end - size, end)) for store, size, end in parts])


class Camera:
    """A role that makes rows and reads rows."""

    @scatter(Sample.concat, order=Sample.select)
    def make(self, asked: Texts) -> Sample:
        parts = [sample(int(text), int(text) + 1) for text in asked.texts]
        return Sample.concat(parts)

    @scatter(Sample.concat, order=Sample.select)
    def copy(self, rows: Sample) -> Sample:
        assert torch.is_tensor(rows.tensor)
        return rows.replace(light=rows.tensor[:, 0].long())

    @scatter(Images.concat, order=Images.select)
    def shoot(self, asked: Texts) -> Images:
        return Images(pixels=PICTURE.expand(len(asked), 3, 32, 32).clone())

    @scatter(Images.concat, order=Images.select)
    def develop(self, images: Images) -> Images:
        return Images(pixels=images.pixels + 1)


PICTURE = torch.zeros(3, 32, 32)


def asked(rows: list[int]) -> Texts:
    return Texts(texts=list(map(str, rows)))


class Counting(InProcessTransport):
    """Counts what is asked of other workers."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[dict[str, int]] = []

    def fetch(self, pieces):
        self.requests.append(Counter(piece.owner for piece in pieces))
        return super().fetch(pieces)


LAYOUTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(LAYOUTS, st.data())
def test_any_rows_of_any_owners_can_be_read_anywhere(sizes, data) -> None:
    stores = workers(5, InProcessTransport())
    result = made_by(stores[: len(sizes)], sizes)
    rows = data.draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=12))
    for reader in stores:
        assert_rows(reader.fetch(result.select(rows)), rows)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_what_a_rank_samples_it_trains_on_without_a_move(rows_each, num_updates, num_ranks) -> None:
    stores = workers(num_ranks, InProcessTransport())
    rows = list(range(rows_each * num_updates * num_ranks))
    rollout = split_call("rollout.generate", Camera.make.dispatch, ((asked(rows),), {}), num_ranks, num_updates)
    made = [store.stash(Camera().make(*args)) for store, (args, _) in zip(stores, rollout.calls, strict=True)]
    result = rollout.merge(made)
    assert result.light.tolist() == rows
    training = split_call("stack.train", Dispatch("scatter", sum), ((result,), {}), num_ranks, num_updates)
    assert plan_moves(training.calls, [store.owner for store in stores]) == []
    assert all(len(args[0].tensor.stored) == 1 for args, _ in training.calls)


def test_the_driver_holds_columns_and_the_callee_tensors() -> None:
    (store,) = workers(1, InProcessTransport())
    result = made_by([store], [4])
    assert {type(result.tensor), type(result.names), type(result.mapping["a"])} == {RemoteRows}
    assert_rows(store.fetch((result.select([3, 1]),))[0], [3, 1])


def test_a_call_asks_each_owner_once() -> None:
    transport = Counting()
    stores = workers(3, transport)
    result = made_by(stores, [2, 2, 2])
    stores[0].fetch(((result, result.select([5, 0])), {"again": result}))
    # tensor, names, and two entries of the mapping, each by all rows and by one row.
    assert transport.requests == [{"w1": 4, "w2": 8}]


class Weighing(InProcessTransport):
    """Counts the bytes that are read from other workers."""

    num_bytes = 0

    def fetch(self, pieces):
        payloads = super().fetch(pieces)
        self.num_bytes += sum(tensor.nbytes for payload in payloads for tensor in tensors_of(payload.value))
        return payloads


def test_scoring_reads_pixels_alone_and_training_reads_all_but_the_pixels() -> None:
    transport = Weighing()
    engine, elsewhere = workers(2, transport)
    pixels = Images(pixels=torch.zeros(8, 3, 16, 16, dtype=torch.uint8))
    track = toy_track(toy_stage()).replace(decoded=pixels, rewards=None, component_rewards=None)
    heavy = sum(t.nbytes for value in (track.conditions, track.segment) for t in tensors_of(value))
    resp = engine.stash(RolloutResp({"image": track}))
    marks = remote_methods(RewardService)["score_and_attach"], remote_methods(TrainStack)["train_track"]

    read = elsewhere.fetch(((resp,), {}), marks[0].unread)[0][0].tracks["image"]
    assert transport.num_bytes == pixels.pixels.nbytes and torch.equal(read.decoded.pixels, pixels.pixels)
    assert elsewhere.stash(RolloutResp({"image": read})).tracks["image"].segment.latents == (
        resp.tracks["image"].segment.latents
    ), "the latents are stored a second time, beside the scorer"

    transport.num_bytes = 0
    trained = elsewhere.fetch(((resp.tracks["image"],), {}), marks[1].unread)[0][0]
    assert torch.equal(trained.segment.latents, track.segment.latents)
    assert 0 < transport.num_bytes <= heavy and isinstance(trained.select([3, 1]).decoded.pixels, RemoteRows)

    calls = [((resp,), {}), ((resp,), {})]
    plans = [plan_moves(calls, ["w0", "w1"], unread) for unread in ((), marks[0].unread)]
    assert [sum(len(move.pieces) for move in moves) for moves in plans][1] == 1 < len(plans[0][0].pieces)


def test_own_rows_are_not_asked_for_and_not_copied() -> None:
    transport = Counting()
    (store,) = workers(1, transport)
    result = store.stash(Images(pixels=torch.zeros(4, 3, 2, 2)))
    (stored,) = store.values.values()
    assert store.fetch(result).pixels.data_ptr() == stored.data_ptr()
    assert transport.requests == []


def test_a_stored_slice_does_not_keep_the_rest_alive() -> None:
    store = RowStore("w")
    store.stash(Images(pixels=torch.zeros(64, 3, 2, 2)[:2]))
    (stored,) = store.values.values()
    assert stored.untyped_storage().nbytes() == 2 * 12 * 4


def test_shipped_rows_do_not_bring_the_rest_along() -> None:
    store = RowStore("w")
    store.stash(Images(pixels=torch.zeros(64, 3, 2, 2)))
    (payload,) = store.read([StoredRows("w", "0/0", (3, 4))])
    assert num_bytes(payload) < 2 * 12 * 4 + 1000 and not payload.on_accelerator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_packed_tensor_comes_out_as_it_was(dtype, shape) -> None:
    tensor = torch.full(shape, 1.0).to(dtype)
    result = unpack(pack({"a": tensor, "b": ["x"]}))
    assert result["b"] == ["x"] and result["a"].dtype == dtype and result["a"].shape == tensor.shape
    assert torch.equal(result["a"].float(), tensor.float())


def test_a_packed_transposed_tensor_comes_out_as_it_was() -> None:
    wide = torch.arange(12).view(3, 4).t().to(torch.bfloat16)
    assert torch.equal(unpack(pack(wide)), wide)


def test_released_rows_say_so() -> None:
    store = RowStore("w")
    old = store.stash(sample(0, 2))
    store.step = 1
    new = store.stash(sample(0, 2))
    store.release(0)
    assert_rows(store.fetch(new), [0, 1])
    with pytest.raises(LookupError, match=r"rows 0/0 of w were released with step 0"):
        store.fetch(old)


def test_rows_of_an_earlier_worker_of_the_same_name_are_not_taken_for_ones_own() -> None:
    with pytest.raises(LookupError, match=r"w has never stored rows 0/7"):
        RowStore("w").rows(StoredRows("w", "0/7", (0,)))


def test_an_unknown_owner_is_named() -> None:
    (store,) = workers(1, InProcessTransport())
    with pytest.raises(LookupError, match=r"there is no worker 'gone'; the workers are \['w0'\]"):
        store.fetch(Images(pixels=RemoteRows((StoredRows("gone", "0/0", (0,)),))))  # type: ignore[arg-type]


class Arriving:
    """Rows that were packed elsewhere."""

    def __init__(self, on_accelerator: bool) -> None:
        self.payload = RowPayload(torch.zeros(1, 3, 2, 2), on_accelerator)

    def fetch(self, pieces):
        return [self.payload for _ in pieces]


@pytest.mark.parametrize(("on_accelerator", "device"), [(True, "meta"), (False, "cpu")])
def test_rows_arrive_on_the_kind_of_device_where_their_owner_has_them(on_accelerator, device) -> None:
    store = RowStore("w", Arriving(on_accelerator), torch.device("meta"))
    own = store.stash(Images(pixels=torch.ones(2, 3, 2, 2, device=device)))
    foreign = Images(pixels=RemoteRows((StoredRows("other", "0/0", (0,)),)))  # type: ignore[arg-type]
    result = store.fetch(Images.concat([own, foreign])).pixels
    assert result.device.type == device and result.shape == (3, 3, 2, 2)


def test_light_fields_and_metrics_reach_the_driver_as_they_are() -> None:
    store = RowStore("w")
    wide = torch.arange(100.0)
    result = store.stash((TrainStepResult(({"loss": Metric.mean(wide[1])},)), Texts(texts=["a"]), wide[:2], 3))
    assert result[0].metrics["loss"].value == 1.0 and result[1].texts == ["a"] and result[3] == 3
    assert result[2].untyped_storage().nbytes() == 8


# Over a process group: each thread is one rank.


def exchanged(stores: list[RowStore], calls: list, deadline_s: float = 10.0) -> list:
    """What each of the last workers reads, all of them over gloo."""
    hub, result, readers = dist.HashStore(), {}, stores[-len(calls) :]
    moves = plan_moves(calls, [store.owner for store in readers])
    ranks = {store.owner: rank for rank, store in enumerate(stores)}

    def work(store: RowStore) -> None:
        group = dist.ProcessGroupGloo(hub, ranks[store.owner], len(stores), timedelta(seconds=deadline_s))
        store.transport = CollectiveTransport(group, ranks, CPU, deadline_s)
        if store.owner in workers_of(moves):
            store.transport.exchange(store, moves)
        if store in readers:
            result[store.owner] = store.fetch(calls[readers.index(store)])

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result[store.owner] for store in readers]


@settings(max_examples=15, deadline=None)
@given(LAYOUTS, st.integers(1, 3), st.booleans(), st.data())
def test_rows_move_between_any_two_layouts_over_gloo(sizes, num_readers, own_too, data) -> None:
    """Readers that own rows as well exchange them with each other: both ends send and receive."""
    num_workers = max(len(sizes), num_readers) if own_too else len(sizes) + num_readers
    stores = [RowStore(f"w{i}") for i in range(num_workers)]
    result = made_by(stores[: len(sizes)], sizes)
    rows = [
        data.draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=8), label=f"rows of reader {i}")
        for i in range(num_readers)
    ]
    for actual, expected in zip(exchanged(stores, [result.select(share) for share in rows]), rows, strict=True):
        assert_rows(actual, expected)


def test_a_type_that_a_process_group_cannot_carry_is_refused_by_the_sender() -> None:
    assert describe({"a": torch.ones(2), "b": ["x", 1, None]})["a"].device.type == "meta"
    with pytest.raises(TypeError, match=r"field of type \w*Path cannot be sent .* Set row_transport=object_store"):
        describe([Path("a")])


def test_no_move_is_planned_for_rows_that_lie_where_they_are_read() -> None:
    stores = [RowStore(f"w{i}") for i in range(2)]
    result = made_by(stores, [2, 2])
    assert plan_moves([result.select([0, 1]), result.select([2, 3])], ["w0", "w1"]) == []
    (move,) = plan_moves([result.select([0, 1]), result.select([1, 3])], ["w0", "w1"])
    assert (move.owner, move.reader, workers_of([move])) == ("w0", "w1", ["w0", "w1"])


def test_rows_that_were_not_moved_are_refused() -> None:
    transport = CollectiveTransport(None, {}, CPU, 1.0)  # type: ignore[arg-type]
    with pytest.raises(LookupError, match=r"rows 0/0 of w1 were not sent before the call"):
        transport.fetch([StoredRows("w1", "0/0", (0,))])


def test_a_peer_that_takes_no_part_is_named_at_the_deadline() -> None:
    hub, groups = dist.HashStore(), {}

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(hub, rank, 2, timedelta(seconds=5))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = RowStore("w0")
    transport = CollectiveTransport(groups[0], {"w0": 0, "w1": 1}, CPU, 0.2)
    moves = plan_moves([Images(pixels=RemoteRows((StoredRows("w1", "0/0", (0,)),)))], ["w0"])  # type: ignore[arg-type]
    with pytest.raises(StallError, match=r"worker 'w1' did not exchange rows within 0.2 s"):
        transport.exchange(reader, moves)


# Through Ray's object store, in processes.


@pytest.mark.slow
def test_groups_of_any_sizes_read_each_others_rows_at_once(ray_pool) -> None:
    pools = [ray_pool.group(DeviceSet("device", places)) for places in ((0, 1, 2), (3,))]
    many, one = [group.place(Remote("camera", lambda siblings: Camera())) for group in pools]
    first, second = many.make(asked(list(range(7)))), one.make(asked(list(range(7))))
    copies = [submit(many.copy, second.select([6, 0, 3, 1])), submit(one.copy, first.select([5, 1, 6]))]
    assert copies[0].result(30.0).light.tolist() == [6, 0, 3, 1]
    assert copies[1].result(30.0).light.tolist() == [5, 1, 6]
    assert_rows(sample(0, 7), many.copy(many.copy(first)).light.tolist())


@pytest.mark.slow
def test_heavy_rows_never_pass_the_driver(ray_pool) -> None:
    group = ray_pool.group(DeviceSet("device", (0, 1)))
    camera = group.place(Remote("camera", lambda siblings: Camera()))
    before = ray_pool.traffic
    images = camera.shoot(asked(list(range(64))))
    camera.develop(images.select(list(reversed(range(64)))))
    assert ray_pool.traffic - before < 64 * PICTURE.nbytes / 50


@dataclass(frozen=True)
class Exchange:
    """Moves and what is read after them, closed to the store of the worker that carries it."""

    moves: list[Move]
    calls: list[tuple[Sample, list[int]]]


class Mover:
    """A role with a store of its own, whose ranks exchange rows over their process group."""

    def __init__(self) -> None:
        rank = current()
        assert rank.group is not None
        self.rank = rank.rank
        transport = CollectiveTransport(rank.group, {"r0": 0, "r1": 1}, CPU, 20.0)
        self.store, self.transport = RowStore(f"r{rank.rank}", transport), transport

    @collect
    def make(self) -> Sample:
        return self.store.stash(sample(self.rank * 4, self.rank * 4 + 4))

    @broadcast
    def exchange(self, plan: Exchange) -> None:
        self.transport.exchange(self.store, plan.moves)
        result, rows = plan.calls[self.rank]
        assert_rows(self.store.fetch(result), rows)


@pytest.mark.slow
def test_rows_move_over_the_process_group_of_two_processes(ray_pool) -> None:
    mover = ray_pool.group(DeviceSet("device", (0, 1))).place(Remote("mover", lambda siblings: Mover()))
    result = Sample.concat(mover.make())
    calls = [(result.select(rows), rows) for rows in ([7, 0, 5], [3, 6, 2])]
    mover.exchange(Exchange(plan_moves(calls, ["r0", "r1"]), calls))


@pytest.mark.slow
def test_an_owner_that_is_late_dead_or_unknown_is_named(ray_session) -> None:
    import ray

    class Late:
        def read(self, pieces):
            threading.Event().wait(60)

    wanted = [StoredRows("late-worker", "0/0", (0,))]
    actor = ray.remote(num_cpus=0)(Late).options(name="late-worker").remote()
    ray.get(actor.__ray_ready__.remote())
    transport = RayTransport(0.2, ObjectStoreCarrier())
    with pytest.raises(StallError, match=r"worker 'late-worker' did not send its rows within 0.2 s"):
        transport.fetch(wanted)
    ray.kill(actor)
    transport.deadline_s = 20.0
    with pytest.raises(WorkerError, match=r"worker 'late-worker' died before it sent its rows"):
        transport.fetch(wanted)
    with pytest.raises(WorkerError, match=r"worker 'nobody', which owns rows of this step, is gone"):
        transport.fetch([StoredRows("nobody", "0/0", (0,))])


# What the driver itself carries.


def test_the_driver_counts_a_view_with_all_that_it_drags_along() -> None:
    whole = torch.zeros(1000, 100)
    assert num_bytes(whole[:1]) > 400_000 > 10_000 > num_bytes(whole[:1].clone()) > 400


def test_no_heavy_field_passes_the_driver() -> None:
    track = toy_track(toy_stage(), prompts=4)
    heavy = num_bytes(RolloutResp({"image": track}))
    light = RowStore("w").stash(RolloutResp({"image": track}))
    segment = light.tracks["image"].segment
    held = track.segment.latents.nbytes + track.conditions["text"].embeds.nbytes
    assert type(segment.latents) is RemoteRows
    assert num_bytes(light) < heavy - held
