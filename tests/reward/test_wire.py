"""What goes over the wire comes back the same, and nothing malformed gets through."""

import contextlib
import json
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.reward.client.wire import (
    JSON,
    MSGPACK,
    ItemError,
    MediaPayload,
    ScoreItem,
    ScoreRequest,
    ScoreResponse,
    TextAnswer,
    Turn,
    decode,
    encode,
)

BOTH = pytest.mark.parametrize("content_type", [MSGPACK, JSON])
PICTURE = MediaPayload(format="raw", data=bytes(range(12)), shape=(2, 2, 3))


def a_request(**changes) -> ScoreRequest:
    fields = {"history": [Turn(text="a cat", image=PICTURE)], "required_rewards": ["clip"], "metadata": {"n": [1, 0.5]}}
    return ScoreRequest(requests=[ScoreItem(**fields | changes)])


def as_json(**changes) -> bytes:
    item = {"history": [{"text": "a cat"}], "required_rewards": ["clip"], **changes}
    return json.dumps({"requests": [item]}).encode()


class EarlierResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `POST /score` of a release that knows no answers."""

    results: list[dict[str, dict[str, float]]]
    errors: list[dict[str, str]]


@BOTH
def test_releases_with_and_without_answers_understand_each_other(content_type):
    scored = {"results": [{"sums": {"total": 1.0}}] * 2, "errors": [{}, {}]}
    told = ScoreResponse(**scored, answers=[{"sums": TextAnswer(right=True, text="7")}, {}])
    assert decode(ScoreResponse, encode(told, content_type), content_type) == told
    assert decode(EarlierResponse, encode(told, content_type), content_type) == EarlierResponse(**scored)
    earlier = encode(EarlierResponse(**scored), content_type)
    assert decode(ScoreResponse, earlier, content_type) == ScoreResponse(**scored)
    assert encode(ScoreResponse(**scored), content_type) == earlier
    with pytest.raises(ValueError, match="2 results and 1 answers"):
        ScoreResponse(**scored, answers=[{}])


@BOTH
def test_a_request_comes_back_the_same(content_type):
    request = a_request(request_id="7")
    assert decode(ScoreRequest, encode(request, content_type), content_type) == request


@BOTH
@given(score=st.floats(allow_nan=False, allow_infinity=False))
def test_a_score_keeps_every_bit(content_type, score):
    response = ScoreResponse(results=[{"clip": {"total": score}}], errors=[{}])
    assert decode(ScoreResponse, encode(response, content_type), content_type) == response


def test_the_plain_form_of_the_contract_is_read():
    body = as_json(history=[{"text": "a cat", "image_b64": "AAAA"}, {"text": "a dog", "video_path": "x.mp4"}])
    item = decode(ScoreRequest, body, JSON).requests[0]
    assert (item.history[0].image_b64, item.answer.video_path, item.prompt, item.text) == (
        "AAAA",
        "x.mp4",
        "a dog",
        None,
    )


def test_a_text_is_scored_with_the_turn_before_it_as_its_prompt():
    item = ScoreItem(history=[Turn(text="2 + 2?"), Turn(text="4")], required_rewards=["math"])
    assert (item.prompt, item.text) == ("2 + 2?", "4")
    assert ScoreItem(history=[Turn(text="4")], required_rewards=["math"]).prompt is None


DEEP: list = []
for _ in range(20):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (as_json(history=[]), "length >= 1"),
        (as_json(history=[{"text": "a", "size": 3}]), "unknown field `size`"),
        (
            as_json(history=[{"image_b64": "A", "video_b64": "A"}]),
            "one image or video, got image_b64 and video_b64",
        ),
        (as_json(history=[{"image": {"format": "raw", "data": "AAAA", "shape": [1, 2, 3]}}]), "means 6 bytes, got 3"),
        (as_json(history=[{"image": {"format": "raw", "data": "AAAA"}}]), "need their shape"),
        (as_json(history=[{"image": {"format": "png", "data": "AAAA", "shape": [1, 1, 3]}}]), "only for raw"),
        (as_json(history=[{"image": {"format": "bmp", "data": "AAAA"}}]), "Invalid enum value 'bmp'"),
        (
            as_json(history=[{"image": {"format": "mp4", "data": "AAAA"}}]),
            "an image must have one of the formats raw, png, webp, jpeg",
        ),
        (as_json(history=[{"image": {"format": "png", "data": "?"}}]), "Invalid base64"),
        (as_json(required_rewards=["a", "a"]), "twice"),
        (as_json(metadata={"a": DEEP}), "nested more than 16 levels deep"),
        (as_json(metadata={"a": 2**70}), "beyond 64 bits"),
        (as_json(request_id=""), "length >= 1"),
        (b'{"requests": [], "version": 1}', "length >= 1"),
        (as_json()[:-1] + b', "version": 2}', "Invalid enum value 2"),
    ],
)
def test_a_malformed_body_is_refused_with_the_place(body, said):
    with pytest.raises(msgspec.ValidationError, match=r"- at `\$") as raised:
        decode(ScoreRequest, body, JSON)
    assert said in str(raised.value)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"requests": NaN}'])
@BOTH
def test_a_body_that_is_not_a_message_is_refused(content_type, body):
    with pytest.raises(msgspec.DecodeError):
        decode(ScoreRequest, body, content_type)


def test_metadata_that_json_lacks_is_refused():
    body = msgspec.msgpack.encode(
        {"requests": [{"history": [{}], "required_rewards": ["a"], "metadata": {"a": b"bytes"}}]}
    )
    with pytest.raises(msgspec.ValidationError, match="metadata\\['a'\\] is a bytes"):
        decode(ScoreRequest, body)


@given(data=st.data())
def test_no_damage_to_a_body_raises_anything_else(data):
    body = bytearray(encode(a_request()))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(msgspec.DecodeError):
        decode(ScoreRequest, bytes(body))


def test_results_and_errors_must_have_equal_numbers():
    with pytest.raises(msgspec.ValidationError, match="numbers must be equal"):
        decode(ScoreResponse, b'{"results": [{}], "errors": []}', JSON)


def test_an_error_says_its_kind():
    error = ItemError("timeout", "no answer: in 3 s")
    assert ItemError.read(str(error)) == error
    assert ItemError.read("CUDA error: out of memory") == ItemError("failed", "CUDA error: out of memory")


def test_the_wire_loads_neither_torch_nor_numpy():
    script = "import sys, unirl.reward.client.wire; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
