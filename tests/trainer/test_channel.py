"""The bounded queue between the thread that samples and the loop."""

from __future__ import annotations

import threading

import pytest

from unirl.config.errors import InvalidValueError
from unirl.trainer.channel import Channel, ChannelClosed

SOON = 0.2
"""Seconds in which a thread that may go on would."""


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_entries_leave_in_the_order_in_which_they_came() -> None:
    channel = Channel("samples")
    for number in range(5):
        channel.put(number, version=10 - number)
    assert (len(channel), channel.weight, channel.oldest()) == (5, 5.0, 6)
    assert [channel.take() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert channel.oldest() is None


def test_a_full_channel_holds_its_producer_back_until_there_is_room() -> None:
    channel = Channel("samples", capacity=3)
    channel.put("a", weight=2)
    producer = in_thread(lambda: channel.put("b", weight=2))
    producer.join(SOON)
    assert producer.is_alive()
    assert channel.take() == "a"
    producer.join(5)
    assert not producer.is_alive()
    assert channel.take() == "b"


def test_an_entry_heavier_than_the_channel_enters_it_alone() -> None:
    channel = Channel("samples", capacity=3)
    channel.put("heavy", weight=10)
    producer = in_thread(lambda: channel.put("light", weight=1))
    producer.join(SOON)
    assert producer.is_alive()
    assert [channel.take(), channel.take()] == ["heavy", "light"]


def test_a_batch_has_at_least_the_weight_that_is_asked_for() -> None:
    channel = Channel("samples")
    for tokens in (100, 10, 10, 300, 5):
        channel.put(tokens, weight=tokens)
    assert channel.take_batch(105) == [100, 10]
    assert channel.take_batch(300) == [10, 300]
    channel.close()
    assert channel.take_batch(1000) == [5]  # nothing more comes


def test_a_closed_channel_gives_what_it_has_and_takes_nothing() -> None:
    channel = Channel("samples")
    channel.put(1)
    channel.close()
    with pytest.raises(ChannelClosed, match="channel samples is closed and takes no further entry"):
        channel.put(2)
    assert channel.take() == 1
    with pytest.raises(ChannelClosed, match="channel samples is closed and empty"):
        channel.take()


def test_closing_wakes_who_waits_for_an_entry_and_who_waits_for_room() -> None:
    errors = []

    def waiting(call) -> None:
        try:
            call()
        except ChannelClosed as error:
            errors.append(str(error))

    empty, full = Channel("empty"), Channel("full", capacity=1)
    full.put(0)
    threads = [in_thread(lambda: waiting(empty.take)), in_thread(lambda: waiting(lambda: full.put(1)))]
    for thread in threads:
        thread.join(SOON)
    empty.close()
    full.close(discard=True)
    for thread in threads:
        thread.join(5)
    assert sorted(errors) == [
        "channel empty is closed and empty",
        "channel full is closed and takes no further entry",
    ]
    assert len(full) == 0


def test_the_error_of_a_producer_reaches_the_consumer_after_the_entries_before_it() -> None:
    channel = Channel("samples")
    channel.put(1)
    channel.put(2)
    channel.fail(OverflowError("out of sorts"))
    channel.wait_for(2)
    with pytest.raises(OverflowError, match="out of sorts"):
        channel.wait_for(3)
    assert channel.take() == 1
    with pytest.raises(OverflowError, match="out of sorts"):
        channel.take_batch(5)
    with pytest.raises(ChannelClosed):
        channel.put(3)


@pytest.mark.parametrize("capacity", [0, -1, float("nan")])
def test_a_capacity_that_is_not_positive_is_refused(capacity) -> None:
    with pytest.raises(InvalidValueError, match="capacity of channel samples must be > 0"):
        Channel("samples", capacity)


def test_many_producers_and_consumers_lose_and_repeat_nothing() -> None:
    channel, taken = Channel("samples", capacity=4), []

    def produce(first: int) -> None:
        for number in range(first, first + 200):
            channel.put(number)

    def consume() -> None:
        try:
            while True:
                taken.append(channel.take())
        except ChannelClosed:
            pass

    producers = [in_thread(lambda first=first: produce(first)) for first in (0, 200, 400)]
    consumers = [in_thread(consume) for _ in range(3)]
    for thread in producers:
        thread.join(20)
    channel.close()
    for thread in consumers:
        thread.join(20)
    assert sorted(taken) == list(range(600))
