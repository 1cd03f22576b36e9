"""No request costs other clients their turn: memory, the event loop, connections, queues and decoders are bounded."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import signal
import sys
import time
from contextlib import suppress

import httpx2
import msgspec
import numpy as np
import pytest
from reward_service.app import Service, make_app
from reward_service.child import Child
from reward_service.config import MIB, LimitsConfig, config_of
from reward_service.fairness import FairQueue, FairSlots
from reward_service.faults import image_file
from reward_service.intake import MemoryBudget
from reward_service.media import BadMedia, DecoderLost, MediaDecoder
from reward_service.metrics import Metrics
from reward_service.rewards import Job
from reward_service.scoring import RequestRefused

from unirl.reward.client.wire import (
    JSON,
    MAX_METADATA_BYTES,
    MAX_VALUES,
    MSGPACK,
    Turn,
    check_plain,
)

from .conftest import a_picture
from .test_decoder import array_of, in_decoder

LONGEST_S = 0.5
"""Longest time that a request may keep others from being answered."""


def a_service(**limits) -> Service:
    tree = {
        "server": {"limits": limits, "queue_timeout_s": 0.05, "host_names": ["test"]},
        "rewards": [{"name": "clip", "scorer": "brightness"}],
    }
    return Service(config_of(tree))


def as_client(service: Service, address: str = "127.0.0.1") -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=make_app(service, None), client=(address, 1))
    return httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=60.0)


async def longest_pause(work) -> float:
    """The longest time in seconds for which the event loop did nothing else than `work`."""
    longest = 0.0
    task = asyncio.ensure_future(work)
    while not task.done():
        begun = time.monotonic()
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - begun)
    task.result()
    return longest


def nested(depth: int, value: object, key: str) -> object:
    for _ in range(depth):
        value = {key: value}
    return value


def sent(metadata: object) -> bytes:
    item = {"history": [{"text": "a"}], "required_rewards": ["clip"], "metadata": metadata}
    return json.dumps({"requests": [item]}).encode()


WIDE = {"x" * 10_000_000: [0] * 9000}
"""10 MB. If the place of each value were written out on the way, that would be 90 GB of text."""


def test_the_check_of_metadata_takes_linear_time():
    begun = time.monotonic()
    check_plain(WIDE, "metadata")
    assert time.monotonic() - begun < LONGEST_S


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"a": [0] * (MAX_VALUES + 1)}, f"more than {MAX_VALUES} values"),
        ({"a": "x" * MAX_METADATA_BYTES}, f"at most {MAX_METADATA_BYTES} are read"),
        (nested(17, 1, "k"), "nested more than 16 levels deep"),
        ({"a": [[2**70]]}, r"metadata['a'][0][0] is an integer beyond 64 bits"),
    ],
)
def test_metadata_beyond_the_caps_are_refused_with_their_place(metadata, said):
    async def run():
        async with as_client(a_service()) as client:
            return await client.post("/score", content=sent(metadata), headers={"content-type": JSON})

    response = asyncio.run(run())
    assert response.status_code == 422
    assert said in response.json()["detail"] and "$.requests[0].metadata" in response.json()["detail"]


def test_a_refusal_does_not_repeat_megabytes():
    body = json.dumps({"requests": [{"history": [{"x" * 10**6: 1}], "required_rewards": ["clip"]}]}).encode()

    async def run():
        async with as_client(a_service()) as client:
            return await client.post("/score", content=body, headers={"content-type": JSON})

    assert len(asyncio.run(run()).content) < 2000


ITEM = '{"history": [%s], "required_rewards": ["clip"], "metadata": {"a": [%s]}}'


def items_of(*items: str) -> bytes:
    return '{{"requests": [{}]}}'.format(",".join(items)).encode()


def nils(count: int) -> bytes:
    """A packed item whose metadata are a list of `count` nulls."""
    body = msgspec.msgpack.encode({"history": [{}], "required_rewards": ["clip"], "metadata": {"a": []}})
    return b"\x81\xa8requests\x91" + body[:-1] + b"\xdd" + count.to_bytes(4, "big") + b"\xc0" * count


HEAVY = {
    "wide metadata": (JSON, items_of(ITEM % ("{}", "[]," * 3_000_000 + "1"))),
    "many turns": (JSON, items_of(ITEM % ("{}," * 500_000 + "{}", "1"))),
    "many items": (JSON, items_of(*[ITEM % ("{}", "1")] * 50_000)),
    "long key": (JSON, sent(WIDE)),
    "packed nils": (MSGPACK, nils(2**24)),
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_body_does_not_hold_the_event_loop(name):
    content_type, body = HEAVY[name]

    async def run():
        async with as_client(a_service()) as client:
            return await longest_pause(client.post("/score", content=body, headers={"content-type": content_type}))

    assert asyncio.run(run()) < LONGEST_S


def test_gzip_bodies_are_charged_by_their_unpacked_size_and_leave_room_for_others():
    """Thirty bodies of 50 MiB, each in 49 KB: the service holds at most what `pending_mb` says."""
    service = a_service(pending_mb=128, body_mb=32)
    bomb = gzip.compress(b" " * (30 * MIB))
    headers = {"content-type": JSON, "content-encoding": "gzip"}
    highest = 0

    async def run():
        nonlocal highest
        async with as_client(service, "10.0.0.1") as attacker, as_client(service, "10.0.0.2") as other:
            attacks = [asyncio.ensure_future(attacker.post("/score", content=bomb, headers=headers)) for _ in range(8)]
            waits = []
            while not all(task.done() for task in attacks):
                begun = time.monotonic()
                answer = await other.post("/score", content=sent({}), headers={"content-type": JSON})
                waits.append(time.monotonic() - begun)
                assert answer.status_code == 200, answer.text
                highest = max(highest, service.budget.used)
            return waits, [task.result().status_code for task in attacks]

    waits, statuses = asyncio.run(run())
    assert set(statuses) <= {400, 413, 503} and 503 in statuses
    assert 0 < highest <= 128 * MIB
    assert sorted(waits)[len(waits) // 2] < LONGEST_S and service.budget.used == 0


def test_slow_uploads_hold_no_memory_and_end():
    """Connections that send one byte at a time charge what they have sent, and are ended by their rate."""
    service = a_service(header_s=0.3, body_rate_kb=1.0)

    async def slowly():
        while True:
            yield b" "
            await asyncio.sleep(0.05)

    async def run():
        async with as_client(service, "10.0.0.1") as slow, as_client(service, "10.0.0.2") as other:
            uploads = [
                asyncio.ensure_future(slow.post("/score", content=slowly(), headers={"content-type": JSON}))
                for _ in range(50)
            ]
            await asyncio.sleep(0.15)
            assert 0 < service.budget.used < 10_000
            answers = [await other.post("/score", content=sent({}), headers={"content-type": JSON}) for _ in range(3)]
            return [answer.status_code for answer in answers], [
                each.status_code for each in await asyncio.gather(*uploads)
            ]

    answers, uploads = asyncio.run(asyncio.wait_for(run(), 60))
    assert answers == [200] * 3 and uploads == [408] * 50


def test_large_requests_of_one_client_leave_memory_for_others_and_for_small_ones():
    budget = MemoryBudget(LimitsConfig(pending_mb=160, body_mb=10, client_share=0.5), Metrics().pending)
    with (
        budget.share("a") as first,
        budget.share("a") as second,
        budget.share("b") as other,
        budget.share("a") as small,
    ):
        first.take(60 * MIB)
        with pytest.raises(RequestRefused, match="in progress"):
            second.take(30 * MIB)
        other.take(70 * MIB)
        with pytest.raises(RequestRefused, match="in progress"):
            second.take(15 * MIB)
        small.take(MIB)
        with pytest.raises(RequestRefused, match="more than 80 MiB"):
            other.take(20 * MIB)
    assert budget.used == 0


def test_clients_are_served_in_turn():
    queue = FairQueue[int]()
    for number in range(4):
        queue.push("many", number)
    queue.push("one", 10)
    queue.push("two", 20)
    assert (len(queue), queue.count("many"), queue.first()) == (6, 4, 0)
    assert [queue.pop() for _ in range(6)] == [0, 10, 20, 1, 2, 3]
    queue.push("a", 1)
    queue.push("b", 2)
    queue.push_first("b", 3)
    assert queue.remove(lambda entry: entry == 1) == [1]
    assert [queue.pop() for _ in range(len(queue))] == [3, 2]


def test_slots_go_to_the_waiting_clients_in_turn_and_survive_cancelled_requests():
    order = []

    async def use(slots: FairSlots, client: str):
        async with slots.slot(client):
            order.append(client)
            await asyncio.sleep(0)

    async def run():
        slots = FairSlots(1)
        async with slots.slot("holder"):
            waiting = [asyncio.ensure_future(use(slots, client)) for client in ("a", "a", "a", "b", "c")]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*waiting[1:])
        await asyncio.wait_for(use(slots, "later"), 5)

    asyncio.run(run())
    assert order == ["b", "c", "a", "a", "later"]


def test_one_client_cannot_fill_a_queue():
    reward = a_service().rewards["clip"]

    async def run():
        loop = asyncio.get_running_loop()
        reward.submit([Job(None, loop.create_future(), "greedy") for _ in range(512)])

    asyncio.run(run())
    assert not reward.has_room(1, "greedy") and reward.has_room(512, "another")


def png() -> Turn:
    return Turn(image_b64=base64.b64encode(image_file(a_picture(), "png")).decode())


def test_a_decoder_that_was_killed_while_idle_costs_no_image():
    async def work(decoder: MediaDecoder):
        images = []
        for _ in range(3):
            await decoder.start()
            for pid in decoder.pids:
                with suppress(ProcessLookupError):  # the one of the round before, which nothing has used since
                    os.kill(pid, signal.SIGKILL)
            images.append((await decoder.raw(png()))[0])
        return images

    images = in_decoder(LimitsConfig(num_decoders=2), work)
    assert all(np.array_equal(array_of(image), a_picture()) for image in images)


def ending_by(number: signal.Signals, monkeypatch) -> None:
    """Every decoder ends by a signal when it is asked."""
    program = f"""
import os, socket, sys
socket.socket(fileno=int(sys.argv[-1])).recv(1)
os.kill(os.getpid(), {int(number)})
"""

    async def start(decoder: MediaDecoder) -> Child:
        child = await Child.start([sys.executable, "-c", program])
        decoder._children.add(child)
        return child

    monkeypatch.setattr(MediaDecoder, "_start", start)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGKILL, DecoderLost),
        (signal.SIGTERM, DecoderLost),
        (signal.SIGSEGV, BadMedia),
        (signal.SIGPROF, BadMedia),
    ],
)
def test_a_lost_decoder_is_not_the_fault_of_the_image_unless_its_own_code_failed_twice(monkeypatch, number, kind):
    ending_by(number, monkeypatch)

    async def work(decoder: MediaDecoder):
        with pytest.raises(kind):
            await decoder.raw(png())
        return decoder._metrics.text().decode()

    metrics = in_decoder(LimitsConfig(num_decoders=1), work)
    ended = 1 if number == signal.SIGPROF else 2
    assert f'unirl_reward_restarts_total{{cause="died",reward="decoder"}} {ended}.0' in metrics


def test_an_item_with_a_bad_image_costs_the_others_nothing():
    """Nobody scores here, so that the good item gets a timeout."""
    good = base64.b64encode(image_file(a_picture(), "png")).decode()
    items = [
        {"history": [{"text": "a", "image_b64": image}], "required_rewards": ["clip"]} for image in ("AAAA", good, "%")
    ]
    service = a_service()
    service.rewards["clip"].reads = ["images"]

    async def run():
        try:
            async with as_client(service) as client:
                content = json.dumps({"requests": items}).encode()
                return await client.post("/score", content=content, headers={"content-type": JSON})
        finally:
            await service.close()

    response = asyncio.run(run())
    assert response.status_code == 200
    kinds = [error["clip"].partition(":")[0] for error in response.json()["errors"]]
    assert kinds == ["invalid", "timeout", "invalid"]


def test_a_lost_decoder_is_unavailable_to_the_client(monkeypatch):
    ending_by(signal.SIGKILL, monkeypatch)
    service = a_service()

    async def run():
        try:
            async with as_client(service) as client:
                item = {"history": [msgspec.to_builtins(png())], "required_rewards": ["clip"]}
                content = json.dumps({"requests": [item]}).encode()
                return await client.post("/score", content=content, headers={"content-type": JSON})
        finally:
            await service.close()

    assert asyncio.run(run()).json()["errors"][0]["clip"].startswith("unavailable: a decoder was killed by SIGKILL")
