"""Checks that optional libraries are installed and that Ray answers, before a run uses them."""

from __future__ import annotations

import socket
from importlib.metadata import version
from importlib.util import find_spec

from unirl.config.errors import AddressError, DependencyError

CONNECT_S = 2.0
WAYS = "Start Ray there (ray start --head), correct RAY_ADDRESS, or unset it: then the run starts a Ray of its own"


def need(*modules: str, by: str, extra: str = "", install: str = "") -> None:
    """Raises DependencyError (3001) if one of `modules` is not installed. Imports nothing.

    Args:
        by: the class or setting that needs them, for the message.
        extra: the extra of this package that installs them.
        install: the command that installs them, if no extra does.
    """
    missing = [name for name in modules if not is_installed(name)]
    if missing:
        way_out = install or f"pip install 'unirl[{extra}]'"
        raise DependencyError(f"{by} needs {', '.join(missing)}, not installed here: {way_out}")


def need_version(distribution: str, least: tuple[int, int], by: str) -> None:
    """Raises DependencyError (3001) if an installed library is older than `least`, its major and minor version.

    Args:
        by: the class or setting that needs it, for the message.
    """
    found = version(distribution)
    if tuple(int(part) for part in found.split(".")[:2]) < least:
        wanted = f"{distribution}>={least[0]}.{least[1]}"
        raise DependencyError(f"{by} needs {wanted}, and {found} is installed: pip install '{wanted}'")


def is_installed(module: str) -> bool:
    """True if Python can import `module` and there is code in it: a folder of runs named wandb is no library."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def check_ray_address(address: str, timeout_s: float = CONNECT_S) -> None:
    """Refuses the address of a Ray head at which nothing listens. "", `auto` and `local` name no machine.

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
