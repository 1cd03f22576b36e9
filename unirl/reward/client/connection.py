"""The HTTP connection to a reward service: single attempts and the meaning of their failures.

This module loads neither torch nor transformers.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar

import msgspec

from unirl.config.errors import ConfigError, RewardError, RewardUnreachableError
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

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

CONNECT_S: Final = 10.0
PROBE_TIMEOUT_S: Final = 2.0
"""Timeout of a request that a running server answers at once."""
MAX_PAUSE_S: Final = 10.0
MAX_BODY_BYTES: Final = 64 * 2**20
"""Largest response body that is read, in bytes."""


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
    encoding: Literal["msgpack", "json"] = "msgpack"
    """Encoding of bodies. `json` is for services that do not understand msgpack."""
    compression: Literal["none", "gzip"] = "none"
    """Compression of request bodies. It helps with texts or on a slow network."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, got {self.base_url!r}")
        for name in ("batch_size", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("timeout", "retry_delay", "outage_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0 seconds, got {getattr(self, name)}")
        if self.max_retries < 0:
            raise ValueError(f"max_retries must be >= 0, got {self.max_retries}")


class RequestFailed(Exception):
    """An attempt failed, and another attempt may succeed."""


class ServerBusy(Exception):
    """The server asks to try again later (429 or 503)."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class TooLarge(RewardError):
    """The service refuses a request because of its size. A request with fewer items may succeed."""


class Connection:
    """A pool of HTTP connections to one service. Threads may share it."""

    def __init__(self, config: ConnectionConfig) -> None:
        self.config = config
        self._content_type = JSON if config.encoding == "json" else MSGPACK
        self._http: httpx2.Client | None = None
        self._closing: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    @property
    def http(self) -> httpx2.Client:
        """The HTTP client, created on first use. It follows no redirects and reads no settings from the environment."""
        with self._lock:
            if self._http is None:
                import httpx2

                self._http = httpx2.Client(
                    base_url=self.config.base_url,
                    headers=self._headers(),
                    timeout=httpx2.Timeout(self.config.timeout, connect=CONNECT_S, pool=None),
                    limits=httpx2.Limits(max_connections=self.config.concurrency + 1),
                    trust_env=False,
                    follow_redirects=False,
                    # Loading the root certificates takes time, and plain HTTP does not need them.
                    verify=self.config.base_url.startswith("https"),
                )
                self._closing = weakref.finalize(self, self._http.close)
            return self._http

    def _headers(self) -> dict[str, str]:
        if self.config.token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {Path(self.config.token_file).read_text(encoding='ascii').strip()}"}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token_file={self.config.token_file!r} cannot be read: {error}") from error

    def close(self) -> None:
        """Closes the pool. The next request opens another one. Garbage collection also closes the pool."""
        with self._lock:
            self._http = None
            self._closing()

    def health(self, patience_s: float = 0.0) -> Health:
        """Returns the rewards of the service and which replicas are ready. Waits up to `patience_s` for its start.

        Raises:
            RewardError: 6001 the service did not answer.
        """
        start, attempts = time.monotonic(), 0
        while True:
            attempts += 1
            try:
                return self.ask_health(timeout=max(PROBE_TIMEOUT_S, min(patience_s, CONNECT_S)))
            except (RequestFailed, ServerBusy) as error:
                seconds = time.monotonic() - start
                if seconds >= patience_s:
                    raise self.unreachable(attempts, seconds, error) from error
            time.sleep(min(self.config.retry_delay * attempts, MAX_PAUSE_S, max(0.05, patience_s)))

    def ask_health(self, timeout: float = CONNECT_S) -> Health:
        """Returns the same as `health` in one attempt. Raises RequestFailed or ServerBusy."""
        return self._read(Health, *self._request("GET", "/health", timeout=timeout))

    def post(self, items: list[ScoreItem]) -> ScoreResponse:
        """Sends one batch of items once and returns their scores.

        Raises:
            RequestFailed: the attempt failed, and another one may succeed.
            ServerBusy: the service asks to try again later.
            RewardError: 6002 the service refuses the request.
        """
        body = encode(ScoreRequest(requests=items), self._content_type)
        headers = {"Content-Type": self._content_type, "Accept": self._content_type}
        if self.config.compression == "gzip":
            body, headers["Content-Encoding"] = gzip.compress(body, compresslevel=1), "gzip"
        response = self._read(ScoreResponse, *self._request("POST", "/score", content=body, headers=headers))
        if len(response.results) != len(items):
            raise RequestFailed(f"{len(response.results)} results for {len(items)} items")
        return response

    def _request(self, method: str, path: str, **options: Any) -> tuple[bytes, str]:
        """Returns the body of a successful response and its content type."""
        import httpx2

        try:
            with self.http.stream(method, path, **options) as response:
                body = read_bounded(response.iter_bytes())
        except httpx2.TransportError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        except httpx2.DecodingError as error:
            raise RequestFailed(f"the body cannot be decompressed: {error}") from error
        content_type = response.headers.get("content-type", "").partition(";")[0]
        if response.status_code != 200:
            self._raise_for_status(response.status_code, body, response.headers.get("retry-after", ""))
        return body, content_type

    def _raise_for_status(self, status: int, body: bytes, retry_after: str) -> NoReturn:
        """Raises the error for a response that is not a success."""
        try:
            refusal = decode(Refusal, body, JSON)
            message = f"{status} {refusal.kind}: {refusal.detail}"
        except msgspec.DecodeError:
            message = f"{status}: {body[:200].decode(errors='replace')}"
        if status in (429, 503):
            raise ServerBusy(message, float(retry_after) if retry_after.isdecimal() else 1.0)
        if status >= 500 or status == 408:
            raise RequestFailed(message)
        raise (TooLarge if status == 413 else RewardError)(
            f"the reward service at {self.config.base_url} refuses: {message}. Correct the request, the token or "
            f"the service, and try: unirl reward ping {self.config.base_url}"
        )

    def _read(self, kind: type[T], body: bytes, content_type: str) -> T:
        try:
            if content_type == JSON and self._content_type == JSON:
                # The standard library reads NaN, which other services may send, so that an error can name the sample.
                return msgspec.convert(json.loads(body), type=kind)
            return decode(kind, body, content_type)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
            raise RequestFailed(f"the response is not a {kind.__name__}: {error}") from error

    def unreachable(self, attempts: int, seconds: float, last: object) -> RewardError:
        """Returns the error (6001) for a service that does not answer."""
        return RewardUnreachableError(
            f"the reward service at {self.config.base_url} cannot be reached: {attempts} attempts in {seconds:.0f} s, "
            f"the last one: {last}. Start the service or correct base_url, and try: "
            f"unirl reward ping {self.config.base_url}"
        )


def read_bounded(pieces: Iterator[bytes]) -> bytes:
    """Joins the pieces of a body. Raises RequestFailed when they are more than MAX_BODY_BYTES bytes."""
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise RequestFailed(f"the response body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)
