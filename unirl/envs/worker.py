"""The process that holds some slots of an environment: `python -m unirl.envs.worker FILE_DESCRIPTOR`.

It answers one message at a time and ends when its pipe closes.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

from unirl.envs.messages import (
    MOST_BYTES,
    Opening,
    Ready,
    RenderRequest,
    Request,
    ResetRequest,
    SlotsReply,
    StepRequest,
)
from unirl.envs.slots import DrawingError, Slots, reason_of
from unirl.envs.spaces import Arrays

ENCODER = msgspec.msgpack.Encoder()


def main(descriptor: int) -> None:
    with Connection(descriptor) as pipe, suppress(EOFError, ConnectionError):
        opening = msgspec.msgpack.decode(pipe.recv_bytes(MOST_BYTES), type=Opening)
        sys.path[:] = opening.python_path
        try:
            slots = Slots(opening.source, opening.source.make())
        except Exception as error:  # an environment is foreign code, which may raise anything
            pipe.send_bytes(ENCODER.encode(Ready(reason_of(error))))
            return
        pipe.send_bytes(ENCODER.encode(Ready()))
        requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
        while True:
            request = requests.decode(pipe.recv_bytes(MOST_BYTES))
            pipe.send_bytes(ENCODER.encode(answer(slots, request)))


def answer(slots: Slots, request: Request) -> SlotsReply:
    """The reply to a request."""
    if isinstance(request, StepRequest):
        result = slots.step(request.slots, slots.codec.from_bytes(request.actions))
        return SlotsReply(
            as_bytes(result.observations),
            result.rewards.tobytes(),
            result.ends.tobytes(),
            result.success.tobytes(),
            result.faults,
        )
    if isinstance(request, ResetRequest):
        observations, failures = slots.reset(request.slots, request.seeds, request.options)
        return SlotsReply(as_bytes(observations), faults=failures)
    assert isinstance(request, RenderRequest)
    try:
        images = slots.render(request.slots)
    except DrawingError as error:
        return SlotsReply(faults=dict.fromkeys(range(len(request.slots)), str(error)))
    return SlotsReply(images=images.tobytes(), image_shape=images.shape)


def as_bytes(arrays: Arrays) -> dict[str, bytes]:
    return {key: values.tobytes() for key, values in arrays.items()}


if __name__ == "__main__":
    main(int(sys.argv[1]))
