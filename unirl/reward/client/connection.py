"""The connection to a reward service: single attempts and the meaning of their failures.

This module loads neither torch nor transformers.
"""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeVar
from uuid import uuid4

import msgspec

from unirl.config.errors import InvalidValueError, RewardError, RewardUnreachableError
from unirl.config.http import (
    CONNECT_S,
    MAX_PAUSE_S,
    PROBE_TIMEOUT_S,
    HttpClient,
    Reply,
    RequestFailed,
    ServerBusy,
    read_token,
)
from unirl.reward.client.wire import (
    JSON,
    MSGPACK,
    Health,
    Refusal,
    ScoreItem,
    ScoreRequest,
    ScoreResponse,
    decode,
    encode,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ConnectionConfig:
    """The address of a reward service, its batches, timeouts and retries."""

    base_url: str
    """`http://host:port`."""
    batch_size: int = 8
    """Items per POST. It is halved whenever the service answers that a request is too large."""
    concurrency: int = 4
    """Number of POSTs at the same time."""
    timeout: float = 300.0
    """Timeout of one POST, in seconds."""
    max_retries: int = 30
    """How often an item is sent again before it counts as failed."""
    retry_delay: float = 0.2
    """Seconds before the attempt that follows a failure. The delay doubles with each failure in a row, up to 10 s, and
    is randomised."""
    outage_s: float = 600.0
    """Seconds without any score after which the service counts as unreachable (RewardError 6001)."""
    token_file: str | None = None
    """A file that holds the service's token."""
    ca_file: str | None = None
    """A PEM file with the certificates that are trusted for https. None: those of the system."""
    encoding: Literal["msgpack", "json"] = "msgpack"
    """Encoding of bodies. `json` is for services that do not understand msgpack."""
    compression: Literal["none", "gzip"] = "none"
    """Compression of request bodies. It helps with texts or on a slow network."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise InvalidValueError(
                "base_url must start with http:// or https://, like http://127.0.0.1:8000 for a reward service on this "
                f"machine, got {self.base_url!r}"
            )
        for name in ("batch_size", "concurrency"):
            if getattr(self, name) < 1:
                raise InvalidValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("timeout", "retry_delay", "outage_s"):
            if getattr(self, name) <= 0:
                raise InvalidValueError(f"{name} must be > 0 seconds, got {getattr(self, name)}")
        if self.max_retries < 0:
            raise InvalidValueError(f"max_retries must be >= 0, got {self.max_retries}")


class TooLarge(RewardError):
    """The service refuses a request because of its size. A request with fewer items may succeed."""


class Connection(HttpClient):
    """The connection to a reward service."""

    def __init__(self, config: ConnectionConfig) -> None:
        self.config = config
        self._content_type = JSON if config.encoding == "json" else MSGPACK
        super().__init__(
            config.base_url,
            token=read_token(config.token_file),
            timeout_s=config.timeout,
            connections=config.concurrency + 1,
            ca_file=config.ca_file,
        )

    def health(self, patience_s: float = 0.0) -> Health:
        """Returns the rewards and ready replicas of a service. Raises RewardError (6001) after `patience_s` seconds."""
        start, attempts = time.monotonic(), 0
        while True:
            attempts += 1
            try:
                return self.ask_health(timeout_s=max(PROBE_TIMEOUT_S, min(patience_s, CONNECT_S)))
            except (RequestFailed, ServerBusy) as error:
                seconds = time.monotonic() - start
                if seconds >= patience_s:
                    raise self.unreachable(attempts, seconds, error) from error
            time.sleep(min(self.config.retry_delay * attempts, MAX_PAUSE_S, max(0.05, patience_s)))

    def ask_health(self, timeout_s: float = CONNECT_S) -> Health:
        """Returns the same as `health` in one attempt. Raises RequestFailed or ServerBusy."""
        return self._read(Health, self.request("GET", "/health", timeout_s=timeout_s))

    def post(self, items: list[ScoreItem]) -> ScoreResponse:
        """Sends one batch of items once and returns their scores.

        Raises:
            RequestFailed: the attempt failed, and another one may succeed.
            ServerBusy: the service asks to try again later.
            RewardError: 6002 the service refuses the request.
        """
        body = encode(ScoreRequest(requests=items), self._content_type)
        request_id = uuid4().hex
        headers = {"Content-Type": self._content_type, "Accept": self._content_type, "X-Request-Id": request_id}
        if self.config.compression == "gzip":
            body, headers["Content-Encoding"] = gzip.compress(body, compresslevel=1), "gzip"
        reply = self.request("POST", "/score", content=body, headers=headers)
        response = self._read(ScoreResponse, reply, f" (request {request_id})")
        if len(response.results) != len(items):
            raise RequestFailed(f"{len(response.results)} results for {len(items)} items")
        return response

    def _read(self, kind: type[T], reply: Reply, request: str = "") -> T:
        """Returns the message in a response. Raises the error for a response that is not a success.

        Args:
            request: the id of the request in the service's log, for the message of a refusal.
        """
        if reply.status != 200:
            self._refuse(reply, request)
        try:
            if reply.content_type == JSON and self._content_type == JSON:
                # The standard library reads NaN, which other services may send, so that an error can name the sample.
                return msgspec.convert(json.loads(reply.body), type=kind)
            return decode(kind, reply.body, reply.content_type)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
            raise RequestFailed(f"the response is not a {kind.__name__}: {error}") from error

    def _refuse(self, reply: Reply, request: str) -> NoReturn:
        try:
            refusal = decode(Refusal, reply.body, JSON)
            message = f"{reply.status} {refusal.kind}: {refusal.detail}"
        except msgspec.DecodeError:
            message = f"{reply.status}: {reply.body[:200].decode(errors='replace')}"
        reply.raise_if_retryable(message, pause_s=1.0)
        raise (TooLarge if reply.status == 413 else RewardError)(
            f"the reward service at {self.config.base_url} refuses: {message}{request}. Correct the request, the token "
            f"or the service, and try: unirl reward ping {self.config.base_url}"
        )

    def unreachable(self, attempts: int, seconds: float, last: object) -> RewardError:
        """Returns the error (6001) for a service that does not answer."""
        return RewardUnreachableError(
            f"the reward service at {self.config.base_url} cannot be reached: {attempts} attempts in {seconds:.0f} s, "
            f"the last one: {last}. Start the service or correct base_url, and try: "
            f"unirl reward ping {self.config.base_url}"
        )
