"""HTTP connections to servers: single attempts, and the kinds of their failures.

This module loads neither torch nor transformers.
"""

from __future__ import annotations

import ssl
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from unirl.config.errors import ConfigError

if TYPE_CHECKING:
    import httpx2

CONNECT_S: Final = 10.0
PROBE_TIMEOUT_S: Final = 2.0
"""Timeout of a request that a running server answers at once."""
MAX_PAUSE_S: Final = 10.0
"""Longest pause between two attempts, in seconds."""
MAX_BODY_BYTES: Final = 64 * 2**20
"""Largest response body that is read, in bytes."""


PIECE_BYTES: Final = 2**18
Content = bytes | Sequence[bytes | memoryview]
"""The body of a request: all bytes, or parts of it. A memoryview has single bytes."""


class RequestFailed(Exception):
    """An attempt failed, and another attempt may succeed."""


class ServerUnreachable(RequestFailed):
    """No server listens at the address."""


class ServerBusy(Exception):
    """The server asks to try again later (429 or 503)."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Reply:
    """A response of a server."""

    status: int
    body: bytes
    content_type: str
    retry_after: str

    def raise_if_retryable(self, message: str, pause_s: float) -> None:
        """Raises RequestFailed or ServerBusy for a status after which another attempt may succeed.

        Args:
            pause_s: the pause in seconds when a busy server names none.
        """
        if self.status in (429, 503):
            raise ServerBusy(message, float(self.retry_after) if self.retry_after.isdecimal() else pause_s)
        if self.status >= 500 or self.status == 408:
            raise RequestFailed(message)


class HttpClient:
    """A pool of HTTP connections to one server. Threads may share it. Garbage collection closes it."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None,
        timeout_s: float,
        connections: int,
        ca_file: str | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """
        Args:
            ca_file: a PEM file with the certificates that are trusted instead of those of the system.

        Raises:
            ConfigError: `ca_file` cannot be read or has no certificate.
        """
        import httpx2

        self._http = httpx2.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=connections),
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            # Loading the root certificates takes time, and plain HTTP does not need them.
            verify=trusted(ca_file) if base_url.startswith("https") else False,
        )
        self.close = weakref.finalize(self, self._http.close)

    def request(
        self,
        method: str,
        path: str,
        *,
        content: Content | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Returns the response to one attempt. Raises RequestFailed when there is none, or it is too large.

        Args:
            content: the body. The parts of a sequence are sent one after another, without joining them in memory.
        """
        import httpx2

        parts: Any = content
        if content is not None and not isinstance(content, bytes):
            headers = {**(headers or {}), "Content-Length": str(sum(map(len, content)))}
            parts = pieces(content)
        timeout = httpx2.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        body = bytearray()
        try:
            with self._http.stream(method, path, content=parts, headers=headers, timeout=timeout) as response:
                for piece in response.iter_bytes():
                    body += piece
                    if len(body) > MAX_BODY_BYTES:
                        raise RequestFailed(f"the response body has more than {MAX_BODY_BYTES} bytes")
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise ServerUnreachable(f"{type(error).__name__}: {error}") from error
        except httpx2.TransportError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        except httpx2.DecodingError as error:
            raise RequestFailed(f"the body cannot be decompressed: {error}") from error
        content_type = response.headers.get("content-type", "").partition(";")[0]
        return Reply(response.status_code, bytes(body), content_type, response.headers.get("retry-after", ""))


def trusted(ca_file: str | None) -> ssl.SSLContext | bool:
    """Returns the certificates that are trusted: those in a PEM file, or True for those of the system."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"ca_file={ca_file!r} has no certificate that can be read: {error}") from error


def pieces(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The bytes of all parts in pieces that fit in the cache of a processor, since the client copies each of them."""
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            yield memoryview(part)[start : start + PIECE_BYTES]


def read_token(token_file: str | None) -> str | None:
    """Returns the token in a file. Raises ConfigError when it cannot be read."""
    if token_file is None:
        return None
    try:
        return Path(token_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file={token_file!r} cannot be read: {error}") from error
