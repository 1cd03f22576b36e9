"""The HTTP interface of the server: its paths, and how tensors and errors travel.

Bodies of requests are JSON, except that of a bucket of weights: eight bytes with the length of a JSON header, the
header, and the bytes of the tensors. A sample is answered with a safetensors file whose metadata has what is no tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from torch import Tensor

from unirl.distributed.weight_sync.buckets import ALIGNMENT
from unirl.distributed.weight_sync.fingerprint import Fingerprint
from unirl.rollout.engine.vllm_omni.program.listener import Handler, WireReply, json_reply

LENGTH_BYTES = 8
BINARY = "application/octet-stream"
Body = dict[str, Any]


class SamplingBackend(Protocol):
    """What the server does with requests. Methods raise an exception for a request that they cannot fulfil."""

    def info(self) -> Body:
        """`engine`, `version`, `pipeline`, `model`, `dtype`, `can_sleep`."""

    def sample(self, order: Body) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and texts of a trajectory.

        latents [K, *latent], logp [S], timesteps [T], guidance_scales [T], sigmas [T + 1], all fp32 except latents.
        """

    def begin(self, name: str, adapter: Mapping[str, Any] | None) -> None: ...

    def open_buffer(self, handle: Mapping[str, Any]) -> None: ...

    def bucket(self, bucket: Mapping[str, Any], body: memoryview) -> None: ...

    def end(self) -> Mapping[str, Fingerprint]: ...

    def held(self) -> Mapping[str, Fingerprint]: ...

    def weights(self) -> str | None: ...

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...


def bucket_head(header: Mapping[str, Any]) -> bytes:
    """The beginning of the body of a request with a bucket of weights. The bytes of the tensors follow it.

    Blanks fill it to a multiple of ALIGNMENT, so that tensors can be viewed where they are.
    """
    text = json.dumps(header).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def bucket_parts(body: memoryview) -> tuple[Body, memoryview]:
    """The header and the data of a bucket. Raises ValueError for another body."""
    end = LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "little")
    return json.loads(bytes(body[LENGTH_BYTES:end])), body[end:]


def wire_fingerprints(held: Mapping[str, Fingerprint]) -> Body:
    """Fingerprints as JSON. Digests are texts, because they have 64 bits."""
    return {name: {**asdict(each), "digest": str(each.digest)} for name, each in held.items()}


def read_fingerprints(body: Body) -> dict[str, Fingerprint]:
    """Fingerprints from JSON. Raises KeyError, TypeError or ValueError for another body."""
    return {name: Fingerprint(tuple(e["shape"]), e["dtype"], int(e["digest"])) for name, e in body.items()}


class Wire:
    """The paths of the server."""

    def __init__(self, backend: SamplingBackend) -> None:
        self.backend = backend

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Method and path to the function that answers."""
        backend = self.backend
        posts: Mapping[str, Handler] = {
            "/sample": self.sample,
            "/weights/begin": change(lambda body: backend.begin(**parsed(body))),
            "/weights/open": change(lambda body: backend.open_buffer(parsed(body))),
            "/weights/bucket": change(lambda body: backend.bucket(*bucket_parts(body))),
            "/weights/end": lambda body: json_reply(wire_fingerprints(backend.end())),
            "/weights/held": lambda body: json_reply(wire_fingerprints(backend.held())),
            "/sleep": change(lambda body: backend.sleep()),
            "/wake_up": change(lambda body: backend.wake_up()),
        }
        gets: Mapping[str, Handler] = {
            "/health": lambda body: json_reply({"status": "ok"}),
            "/info": lambda body: json_reply(backend.info()),
            "/weights": lambda body: json_reply({"weights": backend.weights()}),
        }
        named = {("POST", path): handler for path, handler in posts.items()}
        named |= {("GET", path): handler for path, handler in gets.items()}
        return {key: answering(handler) for key, handler in named.items()}

    def sample(self, body: memoryview) -> WireReply:
        """The answer to a request for one trajectory."""
        from safetensors.torch import save

        tensors, facts = self.backend.sample(parsed(body))
        return WireReply(200, save({name: each.contiguous() for name, each in tensors.items()}, facts), BINARY)


def parsed(body: memoryview) -> Body:
    """The JSON object in a body. Raises ValueError if there is none."""
    value = json.loads(bytes(body) or b"{}")
    if not isinstance(value, dict):
        raise ValueError("the body is no JSON object")
    return value


def change(action: Callable[[memoryview], None]) -> Handler:
    """The handler of a request without a result."""

    def answer(body: memoryview) -> WireReply:
        action(body)
        return json_reply({"success": True})

    return answer


def answering(handler: Handler) -> Handler:
    """The handler, whose exceptions become responses: 400 for a request that it cannot read, else 500."""

    def answer(body: memoryview) -> WireReply:
        try:
            return handler(body)
        except (KeyError, TypeError, ValueError) as error:
            return json_reply({"error": f"{type(error).__name__}: {error}"}, 400)
        except Exception as error:  # a server tells its client, and goes on
            return json_reply({"error": f"{type(error).__name__}: {error}"}, 500)

    return answer
