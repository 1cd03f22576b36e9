"""Files that lie elsewhere (http, https, s3, gs): read whole, bounded in size and time, and kept for a while.

An address comes from the user's own data file, so any may be named, those of this machine and its network included.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Any

from unirl.config.dependencies import need
from unirl.config.errors import DataError, UnreadableFileError

REMOTE_SCHEMES = ("http", "https", "s3", "gs")
MIB = 2**20
PIECE = MIB // 4
"""Bytes of a store that are read at once."""
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""Scheme to the package with which fsspec reads it."""
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which another try may pass."""


@dataclass(frozen=True)
class Bounds:
    """How much is read, how long is waited, how much is kept."""

    max_bytes: int = 64 * MIB
    """Of one file; reading stops there."""
    timeout_s: float = 30.0
    """For one try, and for any silence within it."""
    tries: int = 3
    pause_s: float = 1.0
    """Before the second try; doubles after each."""
    kept_bytes: int = 512 * MIB
    """Of all files in the memory of this process; those that were asked for least recently go first."""


class _Again(Exception):
    """A try failed in a way that another may not."""


class _Kept:
    """The bytes of the files that were read last, by address. Threads may share it."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, uri: str) -> bytes | None:
        with self._lock:
            if uri in self._files:
                self._files.move_to_end(uri)
            return self._files.get(uri)

    def put(self, uri: str, content: bytes, capacity: int) -> None:
        with self._lock:
            self._size += len(content) - len(self._files.pop(uri, b""))
            self._files[uri] = content
            while self._size > capacity:
                self._size -= len(self._files.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._files.clear()
            self._size = 0


BOUNDS = Bounds()
KEPT = _Kept()


def is_remote(uri: str) -> bool:
    """Whether `uri` is an address rather than a path of this machine."""
    return scheme_of(uri) in REMOTE_SCHEMES


def scheme_of(uri: str) -> str:
    """What stands before the colon, in small letters."""
    return uri.split(":", 1)[0].lower()


def fetch(uri: str, bounds: Bounds = BOUNDS) -> bytes:
    """The content of the file at an address; from memory where it was read before.

    Raises:
        DataError: 4003, naming the address, the rule and the way out.
        DependencyError: 3001 where a package is missing.
    """
    found = KEPT.get(uri)
    if found is None:
        found = _tried(uri, bounds)
        KEPT.put(uri, found, bounds.kept_bytes)
    return found


def _tried(uri: str, bounds: Bounds) -> bytes:
    read = _over_http if scheme_of(uri) in ("http", "https") else _from_store
    for number in range(bounds.tries):
        if number:
            time.sleep(bounds.pause_s * 2 ** (number - 1))
        try:
            return read(uri, bounds)
        except _Again as error:
            last = error
    raise refusal(
        uri,
        f"{last} ({bounds.tries} tries). Is its server up, and may this machine read it? Else fetch the file and "
        "give its path",
    )


def refusal(uri: str, why: str) -> DataError:
    """The error for a file that cannot be had."""
    return UnreadableFileError(f"image {uri} cannot be fetched: {why}")


def _over_http(uri: str, bounds: Bounds) -> bytes:
    import httpx2

    deadline = time.monotonic() + bounds.timeout_s
    asked = {"Accept": "image/*", "Accept-Encoding": "identity"}
    try:
        with httpx2.stream("GET", uri, headers=asked, timeout=bounds.timeout_s, follow_redirects=True) as answer:
            _check_answer(uri, answer.status_code, answer.headers.get("content-type", ""))
            _check_size(uri, _whole(answer.headers.get("content-length")), bounds)
            return _collected(uri, answer.iter_bytes(), deadline, bounds)
    except httpx2.TimeoutException as error:
        raise _Again(_silence(bounds)) from error
    except (httpx2.UnsupportedProtocol, httpx2.TooManyRedirects, httpx2.DecodingError, httpx2.InvalidURL) as error:
        raise refusal(uri, f"{error}. Correct the uri") from error
    except httpx2.TransportError as error:
        raise _Again(str(error) or type(error).__name__) from error


def _check_answer(uri: str, status: int, content_type: str) -> None:
    if status in BUSY:
        raise _Again(f"the server answers {status}")
    if status in (401, 403):
        raise refusal(uri, f"the server answers {status}: it wants a login. Fetch the file, or sign the uri")
    if status != 200:
        raise refusal(uri, f"the server answers {status}. Correct the uri, or remove the entry")
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("text/") or kind in ("application/json", "application/xml"):
        raise refusal(uri, f"the server answers with {kind}, which is no image. Give the uri of the image itself")


def _whole(number: str | None) -> int | None:
    return int(number) if number is not None and number.isdecimal() else None


def _check_size(uri: str, size: int | None, bounds: Bounds) -> None:
    if size is not None and size > bounds.max_bytes:
        raise refusal(uri, f"it has {size / MIB:.1f} MiB; {_cap(bounds)}")


def _cap(bounds: Bounds) -> str:
    return f"at most {bounds.max_bytes / MIB:g} MiB are read. Scale it down, or fetch the file and give its path"


def _silence(bounds: Bounds) -> str:
    return f"no answer, or not all of it, within {bounds.timeout_s:g} s"


def _collected(uri: str, pieces: Iterator[bytes], deadline: float, bounds: Bounds) -> bytes:
    """All pieces; stops at the cap and at the deadline, whatever follows."""
    content = bytearray()
    for piece in pieces:
        content += piece
        if len(content) > bounds.max_bytes:
            raise refusal(uri, f"it goes on after {bounds.max_bytes / MIB:g} MiB; {_cap(bounds)}")
        if time.monotonic() > deadline:
            raise _Again(_silence(bounds))
    return bytes(content)


def _from_store(uri: str, bounds: Bounds) -> bytes:
    scheme = scheme_of(uri)
    package = PACKAGES[scheme]
    need(package, by=f"an image at {scheme}:// ({uri})", install=f"pip install {package}")
    deadline = time.monotonic() + bounds.timeout_s
    try:
        with _opened(uri, scheme, bounds) as file:
            _check_size(uri, file.size, bounds)  # type: ignore[attr-defined]
            return _collected(uri, iter(lambda: file.read(PIECE), b""), deadline, bounds)
    except FileNotFoundError as error:
        raise refusal(uri, "there is no such object. Correct the uri, or remove the entry") from error
    except PermissionError as error:
        raise refusal(uri, f"it may not be read ({error}). Check the credentials of {package}") from error
    except TimeoutError as error:
        raise _Again(_silence(bounds)) from error
    except OSError as error:
        raise _Again(str(error) or type(error).__name__) from error
    except _client_errors(scheme) as error:
        raise _Again(f"{type(error).__name__}: {error}") from error


def _opened(uri: str, scheme: str, bounds: Bounds) -> AbstractContextManager[IO[bytes]]:
    """The object as a file that is read from its beginning to its end."""
    import fsspec

    client = {"connect_timeout": bounds.timeout_s, "read_timeout": bounds.timeout_s}
    options: dict[str, Any] = {"config_kwargs": client} if scheme == "s3" else {"timeout": bounds.timeout_s}
    opened: AbstractContextManager[IO[bytes]] = fsspec.filesystem(scheme, **options).open(uri, "rb", block_size=PIECE)
    return opened


def _client_errors(scheme: str) -> tuple[type[Exception], ...]:
    """What the libraries below fsspec raise that is no OSError: missing credentials, lost connections."""
    if scheme == "s3":
        from botocore.exceptions import BotoCoreError

        return (BotoCoreError,)
    from aiohttp import ClientError
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    return (ClientError, HttpError, GoogleAuthError)
