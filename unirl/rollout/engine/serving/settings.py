"""The settings that the block `rollout` has for every engine with a server: how it is started or joined."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from unirl.config.errors import InvalidValueError
from unirl.rollout.engine.environments import ENVIRONMENTS
from unirl.rollout.engine.serving.in_flight import InFlight

ServerTransport = Literal["http", "ipc"]
"""The ways of weights from an engine to its server: in requests, or through memory that both share."""
OWN_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names by which a server on this machine is reached."""
FAKE = "fake"
"""The program of UniRL that speaks the protocol of a server."""
TOY: Mapping[str, object] = {"program": FAKE, "url": None, "python_executable": None, "engine_args": {}}
"""The settings of a server with an environment of its own at scale=toy."""
SMALLEST: Mapping[str, int] = {
    "concurrency": 1,
    "max_num_seqs": 1,
    "tp_size": 1,
    "context_length": 1,
    "max_restarts": 0,
}
"""The smallest value of each setting that is a count."""


@dataclass(kw_only=True)
class ServerSettings:
    """Settings of a server that runs with the packages of UniRL."""

    url: str | None = None
    """The address of a server that runs, such as http://127.0.0.1:30000. Absent: the engine starts one, and stops it at
    the end."""
    python_executable: str | None = None
    """The Python that runs the server. Absent: the one that runs UniRL."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the server."""
    start_timeout_s: float = 900.0
    """Seconds that the server has to start."""
    timeout_s: float = 1800.0
    """Seconds that it has for one answer."""
    in_flight: InFlight = "drain"
    """What happens to the requests that the server answers when new weights are sent: drain (the transfer waits for
    their answers), abort (they are asked again after it) or pause (they go on with the new weights). The loop sends
    weights between rollouts, when there are none."""
    max_restarts: int = 3
    """How often a server that ended is started again. It gets its weights again."""

    @property
    def is_fake(self) -> bool:
        """True for a program of UniRL that takes the place of the server."""
        return False

    def python(self) -> str:
        """The Python that starts the server. Raises DependencyError if there is none."""
        return self.python_executable or sys.executable

    @classmethod
    def check_start(cls, settings: Mapping[str, object]) -> None:
        """Raises DependencyError if a server is to be started and its packages are not on this machine.

        Args:
            settings: the block `rollout`, with its defaults.
        """


@dataclass(kw_only=True)
class InstalledServerSettings(ServerSettings):
    """Settings of a server whose packages are in an environment of their own. A subclass has the setting `program`."""

    environment: ClassVar[str]
    """The name of the environment, as `unirl engines install` has it."""

    program: str
    python_executable: str | None = None
    """The Python of the environment with the server. Absent: that of `unirl engines install`, or, if it has the
    package, the one that runs UniRL."""
    concurrency: int = 4
    """Number of requests that the server gets at the same time."""

    @property
    def is_fake(self) -> bool:
        return self.program == FAKE

    def python(self) -> str:
        return sys.executable if self.is_fake else ENVIRONMENTS[self.environment].python_for(self.python_executable)

    @classmethod
    def check_start(cls, settings: Mapping[str, object]) -> None:
        if settings["url"] is None and settings["program"] != FAKE:
            python = settings["python_executable"]
            ENVIRONMENTS[cls.environment].python_for(None if python is None else str(python))


def check_values(settings: Mapping[str, object]) -> None:
    """Raises InvalidValueError, naming the key, for a value of the block `rollout` outside of its range."""
    for key, value in settings.items():
        if isinstance(value, int) and key in SMALLEST and value < SMALLEST[key]:
            raise InvalidValueError(f"rollout.{key} must be >= {SMALLEST[key]}, got {value}")
        if isinstance(value, (int, float)) and key in ("start_timeout_s", "timeout_s") and not value > 0:
            raise InvalidValueError(f"rollout.{key} must be > 0 seconds, got {value}")
        if isinstance(value, float) and key == "mem_fraction_static" and not 0 < value < 1:
            raise InvalidValueError(f"rollout.{key} is a share of the device memory in (0, 1), got {value}")
        if isinstance(value, str) and key == "url" and not is_address(value):
            raise InvalidValueError(
                f"rollout.url={value} is no address of a server. Write it as http://HOST:PORT, such as "
                "http://127.0.0.1:30000, or leave it out, and the engine starts a server"
            )


def check_transport(settings: Mapping[str, object]) -> None:
    """Raises InvalidValueError for a server that may not share the memory that `rollout.transport=ipc` needs."""
    url = settings["url"]
    if settings.get("transport") == "ipc" and url is not None and urlsplit(str(url)).hostname not in OWN_HOSTS:
        raise InvalidValueError(
            f"rollout.transport=ipc: the server at rollout.url={url} must share the memory of this machine. If it runs "
            "here, write http://127.0.0.1:PORT as its address; otherwise set rollout.transport=http"
        )


def is_address(url: str) -> bool:
    """True for http://HOST or https://HOST, with or without a port."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError for a port that is no number below 65536
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
