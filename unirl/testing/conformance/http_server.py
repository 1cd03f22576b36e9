"""An HTTP server of JSON messages, on that of the program for vLLM-Omni."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from unirl.rollout.engine.vllm_omni.program.listener import JSON, Handler, WireReply, WireServer, wire_server


@dataclass(frozen=True)
class JsonReply:
    """A response. Bytes are sent as they are."""

    status: int = 200
    body: object = b""
    cut: float | None = None
    """The share of the body that is sent before the connection closes. None: all of it. 0: no response at all."""

    def on_the_wire(self) -> WireReply:
        """The response with its bytes."""
        if isinstance(self.body, bytes):
            return WireReply(self.status, self.body, None, self.cut)
        return WireReply(self.status, msgspec.json.encode(self.body), JSON, self.cut)


JsonHandler = Callable[[object], JsonReply]
Routes = Mapping[tuple[str, str], JsonHandler]
"""Method and path to the function that answers."""
BRING_WEIGHTS = (
    ("POST", "/update_weights_from_tensor"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/load_lora_adapter_from_tensors"),
    ("POST", "/collective_rpc"),
    ("POST", "/weights/bucket"),
)
"""Method and path of the requests that bring weights, of all servers."""
NOT_FOUND = JsonReply(404, {"detail": "Not Found"})


def json_server(port: int, routes: Routes, fault: str | None) -> WireServer:
    """A server of the loopback interface that answers with `routes`. Port 0 takes a free one."""
    named = {key: decoding(handler) for key, handler in routes.items()}
    return wire_server(port, without_weights(named, fault), NOT_FOUND.on_the_wire())


def without_weights(routes: Mapping[tuple[str, str], Handler], fault: str | None) -> Mapping[tuple[str, str], Handler]:
    """The routes, of which those that bring weights close the connection if the fault says so."""
    closed = dict.fromkeys(BRING_WEIGHTS, lambda body: WireReply(500, b"", cut=0))
    return {**routes, **{key: closed[key] for key in routes if key in closed}} if fault == "no-weights" else routes


def decoding(handler: JsonHandler) -> Callable[[memoryview], WireReply]:
    """The handler of a body of bytes. One that is no JSON is answered with 400."""

    def answer(content: memoryview) -> WireReply:
        try:
            body = msgspec.json.decode(content) if content else {}
        except msgspec.DecodeError as error:
            return JsonReply(400, {"object": "error", "message": str(error)}).on_the_wire()
        return handler(body).on_the_wire()

    return answer
