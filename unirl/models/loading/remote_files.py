"""Downloads files by http, https, s3 and gs, within bounds of size and time, and caches them in memory.

URLs come from the user's own data file, so those of this machine and its network are allowed. Servers are trusted less:
a redirect to another host must lead to a public address. Link-local addresses, where clouds give credentials to their
machines, are never asked.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from unirl.config.dependencies import need
from unirl.config.errors import DataError, UnreadableFileError
from unirl.models.cache import BoundedCache

REMOTE_SCHEMES = ("http", "https", "s3", "gs")
MIB = 2**20
BLOCK_BYTES = MIB // 4
"""Bytes that are read at once from an object store."""
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""The package with which fsspec reads a scheme."""
MAX_REDIRECTS = 5
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which a retry may succeed."""


@dataclass(frozen=True)
class FetchLimits:
    """Limits of size, time and cache."""

    max_bytes: int = 64 * MIB
    """Largest size of a file. Reading stops there."""
    timeout_s: float = 30.0
    """Limit of one try, and of any wait for data within it."""
    tries: int = 3
    pause_s: float = 1.0
    """Pause before the second try. It doubles after each further one."""
    cache_bytes: int = 512 * MIB
    """Size of the cache of this process. The least recently used files are evicted."""


class _RetryableError(Exception):
    """A try failed, and another one may succeed."""


LIMITS = FetchLimits()
CACHE: BoundedCache[str, bytes] = BoundedCache(len)


def is_remote(uri: str) -> bool:
    """True if `uri` is a URL rather than a local path."""
    return scheme_of(uri) in REMOTE_SCHEMES


def scheme_of(uri: str) -> str:
    """The part before the colon, in lower case."""
    return uri.split(":", 1)[0].lower()


def fetch(uri: str, limits: FetchLimits = LIMITS) -> bytes:
    """The content of the file at a URL, from the cache if it was read before.

    Raises:
        UnreadableFileError: the file cannot be fetched within the limits.
        DependencyError: the package that reads the scheme is missing.
    """
    content = CACHE.get(uri)
    if content is not None:
        return content
    read = _over_http if scheme_of(uri) in ("http", "https") else _from_store
    for number in range(limits.tries):
        if number:
            time.sleep(limits.pause_s * 2 ** (number - 1))
        try:
            content = read(uri, limits)
            CACHE.put(uri, content, limits.cache_bytes)
            return content
        except _RetryableError as error:
            last = error
    raise refusal(
        uri,
        f"{last} ({limits.tries} tries). Is its server up, and may this machine read it? Else fetch the file and "
        "give its path",
    )


def refusal(uri: str, why: str) -> DataError:
    """The error for a file that cannot be fetched."""
    return UnreadableFileError(f"image {uri} cannot be fetched: {why}")


def _over_http(uri: str, limits: FetchLimits) -> bytes:
    import httpx2

    deadline = time.monotonic() + limits.timeout_s
    headers = {"Accept": "image/*", "Accept-Encoding": "identity"}
    url = uri
    try:
        with httpx2.Client(headers=headers, timeout=limits.timeout_s) as client:
            for _ in range(MAX_REDIRECTS + 1):
                _check_host(uri, url)
                with client.stream("GET", url) as answer:
                    if answer.next_request is not None:
                        url = str(answer.next_request.url)
                        continue
                    _check_answer(uri, answer.status_code, answer.headers.get("content-type", ""))
                    length = answer.headers.get("content-length", "")
                    _check_size(uri, int(length) if length.isdecimal() else None, limits)
                    return _collected(uri, answer.iter_bytes(), deadline, limits)
        raise refusal(uri, f"it leads to more than {MAX_REDIRECTS} redirects. Correct the uri")
    except httpx2.TimeoutException as error:
        raise _RetryableError(_silence(limits)) from error
    except (httpx2.UnsupportedProtocol, httpx2.DecodingError, httpx2.InvalidURL) as error:
        raise refusal(uri, f"{error}. Correct the uri") from error
    except httpx2.TransportError as error:
        raise _RetryableError(str(error) or type(error).__name__) from error


def _check_host(uri: str, url: str) -> None:
    """Raises UnreadableFileError for a URL that may not be asked: `uri`, or the `url` to which its server redirects."""
    first, host = urlsplit(uri).hostname, urlsplit(url).hostname or ""
    addresses = _addresses_of(host)
    if any(address.is_link_local for address in addresses):
        raise refusal(uri, f"{host} has a link-local address, which is never asked. Fetch the file and give its path")
    if host != first and not all(address.is_global for address in addresses):
        raise refusal(
            uri,
            f"it redirects to {host}, which is an address of this machine or its network. Fetch the file and give "
            "its path, or write the address to which it redirects",
        )


def _addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of a host; none if its name is not known here. The connection reports that, or a proxy knows it."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    found = [ipaddress.ip_address(info[4][0]) for info in infos]
    return [
        address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address for address in found
    ]


def _check_answer(uri: str, status: int, content_type: str) -> None:
    if status in BUSY:
        raise _RetryableError(f"the server answers {status}")
    if status in (401, 403):
        raise refusal(uri, f"the server answers {status}: it wants a login. Fetch the file, or sign the uri")
    if status != 200:
        raise refusal(uri, f"the server answers {status}. Correct the uri, or remove the entry")
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("text/") or kind in ("application/json", "application/xml"):
        raise refusal(uri, f"the server answers with {kind}, which is no image. Give the uri of the image itself")


def _check_size(uri: str, size: int | None, limits: FetchLimits) -> None:
    if size is not None and size > limits.max_bytes:
        raise refusal(uri, f"it has {size / MIB:.1f} MiB; {_cap(limits)}")


def _cap(limits: FetchLimits) -> str:
    return f"at most {limits.max_bytes / MIB:g} MiB are read. Scale it down, or fetch the file and give its path"


def _silence(limits: FetchLimits) -> str:
    return f"no answer, or not all of it, within {limits.timeout_s:g} s"


def _collected(uri: str, pieces: Iterator[bytes], deadline: float, limits: FetchLimits) -> bytes:
    """The joined pieces. Stops at the size limit and at the deadline."""
    content = bytearray()
    for piece in pieces:
        content += piece
        if len(content) > limits.max_bytes:
            raise refusal(uri, f"it goes on after {limits.max_bytes / MIB:g} MiB; {_cap(limits)}")
        if time.monotonic() > deadline:
            raise _RetryableError(_silence(limits))
    return bytes(content)


def _from_store(uri: str, limits: FetchLimits) -> bytes:
    scheme = scheme_of(uri)
    package = PACKAGES[scheme]
    need(package, by=f"an image at {scheme}:// ({uri})", install=f"pip install {package}")
    import fsspec

    client = {"connect_timeout": limits.timeout_s, "read_timeout": limits.timeout_s}
    options: dict[str, Any] = {"config_kwargs": client} if scheme == "s3" else {"timeout": limits.timeout_s}
    deadline = time.monotonic() + limits.timeout_s
    try:
        with fsspec.filesystem(scheme, **options).open(uri, "rb", block_size=BLOCK_BYTES) as file:
            _check_size(uri, file.size, limits)
            return _collected(uri, iter(lambda: file.read(BLOCK_BYTES), b""), deadline, limits)
    except FileNotFoundError as error:
        raise refusal(uri, "there is no such object. Correct the uri, or remove the entry") from error
    except PermissionError as error:
        raise refusal(uri, f"it may not be read ({error}). Check the credentials of {package}") from error
    except TimeoutError as error:
        raise _RetryableError(_silence(limits)) from error
    except OSError as error:
        raise _RetryableError(str(error) or type(error).__name__) from error
    except _client_errors(scheme) as error:
        raise _RetryableError(f"{type(error).__name__}: {error}") from error


def _client_errors(scheme: str) -> tuple[type[Exception], ...]:
    """Exceptions of the libraries below fsspec that are no OSError: missing credentials, lost connections."""
    if scheme == "s3":
        from botocore.exceptions import BotoCoreError

        return (BotoCoreError,)
    from aiohttp import ClientError
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    return (ClientError, HttpError, GoogleAuthError)
