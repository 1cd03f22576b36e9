"""Generated bodies: whatever a client sends is parsed or refused by type, in bounded time, and equal in both encodings.

`scripts/fuzz.py` runs the same properties for longer.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from reward_service.intake import Parsed, parse
from reward_service.scoring import RequestRefused

from tests.fuzzing import short
from unirl.reward.client.wire import (
    IMAGE_FORMATS,
    JSON,
    MAX_DEPTH,
    MAX_INT,
    MSGPACK,
    VIDEO_FORMATS,
    ScoreRequest,
    check_plain,
    encode,
)

LONGEST_S = 2.0
"""Longest time to parse a generated body. On a quiet machine it is milliseconds."""
REFUSALS = {400: "malformed", 422: "schema"}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_INT, MAX_INT - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
plain = st.dictionaries(
    st.text(),
    st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20),
    max_size=4,
)
odd = st.recursive(
    scalars | st.binary() | st.floats() | st.integers(-(2**70), 2**70),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=30,
)
"""Values that msgpack may hold and metadata may not."""


def files(formats: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    encoded = [format for format in formats if format != "raw"]
    return st.fixed_dictionaries({"format": st.sampled_from(encoded), "data": st.binary(max_size=64)})


turns = st.fixed_dictionaries({"text": st.text(max_size=50)}) | st.one_of(
    st.fixed_dictionaries({"image": files(IMAGE_FORMATS)}),
    st.fixed_dictionaries({"video": files(VIDEO_FORMATS)}),
    st.fixed_dictionaries({"image_b64": st.text(max_size=50)}),
    st.fixed_dictionaries({"video_path": st.text(min_size=1, max_size=50)}),
)
items = st.fixed_dictionaries(
    {
        "history": st.lists(turns, min_size=1, max_size=4),
        "required_rewards": st.lists(st.text(min_size=1, max_size=10), min_size=1, max_size=3, unique=True),
    },
    optional={"metadata": plain, "request_id": st.text(min_size=1, max_size=20)},
)
requests = st.fixed_dictionaries({"requests": st.lists(items, min_size=1, max_size=3)})


def received(body: bytes, content_type: str) -> Parsed | None:
    """The parsed body; None if it was refused by type. Any other error, or a long time, fails the test."""
    begun = time.monotonic()
    try:
        return parse(body, content_type)
    except RequestRefused as refused:
        assert REFUSALS[refused.status] == refused.kind
        return None
    finally:
        assert time.monotonic() - begun < LONGEST_S


@short
@given(content=requests)
def test_a_valid_request_is_parsed_alike_in_both_encodings(content):
    request = msgspec.convert(content, ScoreRequest)
    packed, text = (received(encode(request, kind), kind) for kind in (MSGPACK, JSON))
    assert packed is not None and text is not None
    for one, other, item in zip(packed.samples, text.samples, request.requests, strict=True):
        assert msgspec.msgpack.decode(one.item.metadata) == item.metadata
        assert one.digest == other.digest
        assert (one.item.history, one.item.required_rewards) == (item.history, item.required_rewards)


@short
@given(body=st.binary(max_size=300), content_type=st.sampled_from([MSGPACK, JSON]))
def test_bytes_without_a_form_are_refused(body, content_type):
    received(body, content_type)


@short
@given(content=requests, data=st.data(), content_type=st.sampled_from([MSGPACK, JSON]))
def test_a_damaged_request_is_parsed_or_refused(content, data, content_type):
    body = bytearray(encode(msgspec.convert(content, ScoreRequest), content_type))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, max(0, len(body) - 1)))
        body[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    received(bytes(body), content_type)


@short
@given(value=odd)
def test_packed_metadata_of_any_kind_are_plain_or_refused(value):
    item = {"history": [{}], "required_rewards": ["a"], "metadata": {"a": value}}
    try:
        body = msgspec.msgpack.encode({"requests": [item]})
    except (OverflowError, TypeError):
        return  # msgpack cannot hold it
    parsed = received(body, MSGPACK)
    if parsed is not None:
        check_plain(msgspec.msgpack.decode(parsed.samples[0].item.metadata), "metadata")


@short
@given(depth=st.integers(1, 3 * MAX_DEPTH), key=st.text(max_size=300), width=st.integers(1, 2000))
def test_deep_and_wide_metadata_take_bounded_time(depth, key, width):
    value: object = [0] * width
    for _ in range(depth):
        value = {key: value}
    body = msgspec.json.encode({"requests": [{"history": [{}], "required_rewards": ["a"], "metadata": {"a": value}}]})
    assert (received(body, JSON) is not None) == (depth + 2 <= MAX_DEPTH)
