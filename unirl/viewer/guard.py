"""Who may ask the viewer, and what every answer says about itself."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
"""The policy of the page: nothing but its own files, no inline script or style, and no text that becomes markup."""
DATA_POLICY = "default-src 'none'; sandbox; frame-ancestors 'none'"
"""The policy of answers that are no page. Opened as a page, they can do nothing."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
METHODS = ("GET", "HEAD")
COOKIE = "unirl-view"
BEARER = "Bearer "


class Guard:
    """Lets requests pass that come from a page of this viewer or from its address with the token."""

    def __init__(self, app: App, token: str, hosts: Sequence[str] = ()) -> None:
        """Guards an app.

        Args:
            token: what a request must have: as cookie, as `Authorization: Bearer`, or in the address of the page.
            hosts: names of this machine that an address may have, beside `localhost` and numeric addresses.
        """
        self._app = app
        self._token = token
        self._hosts = {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["method"] not in METHODS:
            await _answer(send, 405, "this viewer only reads: use GET or HEAD", [("allow", ", ".join(METHODS))])
        elif not self._is_own_host(headers.get("host", "")):
            await _answer(send, 421, "the viewer has no such name. Name it with --allow-host, or use its address")
        elif headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["path"] != "/":
            await _answer(send, 403, "another site may not ask this viewer")
        elif scope["path"] == "/" and token and self._is_token(token):
            cookie = f"{self._cookie(headers)}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            await _answer(send, 303, "", [("location", "/"), ("set-cookie", cookie)])
        elif not self._is_known(headers):
            await _answer(send, 401, "open the address that `unirl view` printed: it has a token")
        else:
            await self._app(scope, receive, _with_headers(send))

    def _is_own_host(self, host: str) -> bool:
        """Returns True for a numeric address or a known name.

        Another site can let its own name point at this machine (DNS rebinding). Its requests then have that name here.
        """
        name, _, rest = host.rpartition("]") if host.startswith("[") else ("", "", host)
        name = name.removeprefix("[") or rest.partition(":")[0]
        if name.lower() in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_known(self, headers: MutableMapping[str, str]) -> bool:
        given = headers.get("authorization", "")
        if given.startswith(BEARER):
            return self._is_token(given.removeprefix(BEARER))
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie(headers))
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    @staticmethod
    def _cookie(headers: MutableMapping[str, str]) -> str:
        """The name of the cookie. Browsers send one to all ports of a machine, so it has the port in it."""
        return f"{COOKIE}-{headers.get('host', '').rpartition(':')[2]}" if "host" in headers else COOKIE


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = next((value for name, value in message["headers"] if name == b"content-type"), b"")
            policy = PAGE_POLICY if kind.startswith(b"text/html") else DATA_POLICY
            message["headers"] = [*message["headers"], *_encoded({**HEADERS, "content-security-policy": policy})]
        await send(message)

    return sent


async def _answer(send: Send, status: int, text: str, headers: Sequence[tuple[str, str]] = ()) -> None:
    """An answer that the app behind the guard has nothing to do with."""
    body = text.encode()
    own = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), "cache-control": "no-store"}
    fixed = {**own, **HEADERS, "content-security-policy": DATA_POLICY}
    await send(
        {"type": "http.response.start", "status": status, "headers": [*_encoded(fixed), *_encoded(dict(headers))]}
    )
    await send({"type": "http.response.body", "body": body})


def _encoded(headers: MutableMapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
