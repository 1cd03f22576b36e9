"""Whether the Ray that RAY_ADDRESS names is there."""

from __future__ import annotations

import socket

from unirl.config.errors import AddressError

CONNECT_S = 2.0
WAYS = "Start Ray there (ray start --head), correct RAY_ADDRESS, or unset it: then the run starts a Ray of its own"


def check_ray_address(address: str, timeout_s: float = CONNECT_S) -> None:
    """Refuse an address of a Ray head at which nothing listens. Absent, `auto` and `local` name no machine.

    Raises:
        DependencyError: 3003.
    """
    if address in ("", "auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65535:
        raise AddressError(
            f"RAY_ADDRESS={address} is not HOST:PORT of a head node, as `ray start --head` prints it. {WAYS}. "
            "Ray Client (ray://...) is not supported: start the run on a node of the cluster"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be one
        raise AddressError(f"RAY_ADDRESS={address}: nothing answers there ({error}). {WAYS}") from error
