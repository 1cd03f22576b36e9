"""What the service's YAML file may say, and the file as a checked object."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from unirl.config.build import build, check_node
from unirl.config.errors import ConfigError, ExposedServerError, UsageError

MIB = 2**20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """What one request may cost, and all of them together."""

    body_mb: float = 64.0
    """MiB of one body, compressed or not."""
    pending_mb: float = 512.0
    """MiB of all bodies being worked on and of what their files unpack to; one more is answered 503."""
    connections: int = 1024
    """Open connections; one more is answered 503."""
    items: int = 256
    """Items of one request."""
    turns: int = 8
    """Turns of one item."""
    side: int = 4096
    """Pixels along a side."""
    pixels: int = 4096 * 4096
    """Pixels of a picture."""
    frames: int = 256
    """Frames of a video."""
    video_pixels: int = 4 * 4096 * 4096
    """Pixels of all frames of a video."""
    file_mb: float = 48.0
    """MiB of one encoded medium."""
    video_s: float = 60.0
    """Seconds that a video may last."""
    header_s: float = 5.0
    """Seconds that a client may take to send its headers."""
    body_s: float = 30.0
    """Seconds that a client may take to send its body."""
    decode_s: float = 1.5
    """Seconds of CPU time to decode one picture; its decoder is ended then. A video has ten times as many."""
    decoder_mb: float = 1024.0
    """MiB of address space of a decoder; the pixels of a video need most of it."""
    num_decoders: int = 2
    remembered: int = 50_000
    """Scores that are remembered by request id."""
    media_roots: tuple[str, ...] = ()
    """Directories below which `video_path` may lie; none: no path is read."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "media_roots" and value <= 0:
                raise ValueError(f"LimitsConfig.{name} must be > 0, got {value}")
        if self.body_mb > self.pending_mb:
            raise ValueError(
                f"LimitsConfig.body_mb={self.body_mb:g} is more than pending_mb={self.pending_mb:g}: raise it"
            )
        for root in self.media_roots:
            if not Path(root).is_dir():
                raise ValueError(f"LimitsConfig.media_roots names {root!r}, which is no directory")

    @property
    def body_bytes(self) -> int:
        return int(self.body_mb * MIB)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the service listens, who may ask, and how long an answer may take."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one, which is printed."""
    score_timeout_s: float = 120.0
    """Seconds that a worker may take for a batch; it is killed then, and replaced."""
    load_timeout_s: float = 1800.0
    """Seconds that a worker may take to load its scorer, downloads included."""
    queue_timeout_s: float = 300.0
    """Seconds that an item may wait for a worker, one that is being replaced included."""
    token_file: str | None = None
    """A file with the token that every request must carry (`Authorization: Bearer ...`). Needed beyond loopback."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    def __post_init__(self) -> None:
        for name in ("score_timeout_s", "load_timeout_s", "queue_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"ServerConfig.{name} must be > 0, got {getattr(self, name)}")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"ServerConfig.port must lie in 0..65535, got {self.port}")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """One reward: a scorer in processes of its own."""

    name: str
    """What clients call it."""
    scorer: str
    """A scorer of `unirl.reward.local` (`unirl reward ls`), or the dotted class of one in `plugins`."""
    params: dict[str, Any] = field(default_factory=dict)
    """The fields of the scorer's spec; keyword arguments of one without a spec."""
    python: str | None = None
    """The interpreter of the scorer's environment; None: the one that runs the service."""
    num_replicas: int = 1
    device: str = "auto"
    """`cpu`, `auto`, `cuda`, or GPUs by number as in `cuda:0,1`: replica i takes the i-th, and again from the first."""
    num_threads: int | None = None
    """CPU threads of a replica; None: its libraries decide."""
    batch_size: int = 32
    """Items that are scored at once, of any clients."""
    max_queue: int = 1024
    """Items that may wait; a request with more is answered 429."""

    def __post_init__(self) -> None:
        for name in ("num_replicas", "batch_size", "max_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"RewardConfig.{name} must be >= 1, got {getattr(self, name)}")
        if not NAME.fullmatch(self.name):
            raise ValueError(f"RewardConfig.name must be letters, digits, `_`, `.` and `-`, got {self.name!r}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+(,\d+)*)?", self.device):
            raise ValueError(f"RewardConfig.device must be auto, cpu, cuda or cuda:0,1,..., got {self.device!r}")

    def environment(self, replica: int) -> dict[str, str]:
        """Which devices a replica sees, and how many threads it takes."""
        visible = {"cpu": {"CUDA_VISIBLE_DEVICES": ""}}.get(self.device, {})
        gpus = self.device.partition(":")[2].split(",")
        if gpus != [""]:
            visible = {"CUDA_VISIBLE_DEVICES": gpus[replica % len(gpus)]}
        return visible | ({"OMP_NUM_THREADS": str(self.num_threads)} if self.num_threads else {})


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """The whole file."""

    rewards: tuple[RewardConfig, ...]
    server: ServerConfig = field(default_factory=ServerConfig)
    plugins: tuple[str, ...] = ()
    """Packages besides unirl whose scorers may be named."""
    toy: bool = False
    """Take the scorers' own small values where `params` says nothing: no downloads, seconds on a CPU."""

    def __post_init__(self) -> None:
        names = [reward.name for reward in self.rewards]
        if not names:
            raise ValueError("ServiceConfig.rewards is empty: name at least one, as {name: clip, scorer: clip}")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"ServiceConfig.rewards has two called {name!r}: clients could not tell them apart")
        for reward in self.rewards:
            if reward.max_queue < self.server.limits.items:
                raise ValueError(
                    f"ServiceConfig.rewards: {reward.name} has max_queue={reward.max_queue}, so a request of "
                    f"server.limits.items={self.server.limits.items} would never fit: raise one or lower the other"
                )


def read_config(path: Path | str, **typed: Any) -> ServiceConfig:
    """The service of a YAML file; `typed` are keys of its server that the command line sets.

    Raises:
        ConfigError: it cannot be read, or says something unknown or out of range.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give the service's YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(tree, dict) or not isinstance(tree.setdefault("server", {}), dict):
        raise ConfigError(f"{path} must hold the blocks `server` and `rewards`")
    return config_of({**tree, "server": {**tree["server"], **typed}})


def config_of(tree: Mapping[str, Any]) -> ServiceConfig:
    """The service of YAML data. Raises ConfigError."""
    config: ServiceConfig = build(check_node(tree, ServiceConfig))
    return config


def read_token(server: ServerConfig) -> str | None:
    """The token that requests must carry; None when whoever reaches the service may use it.

    Raises:
        UsageError: 2040 when the service would listen beyond this machine without a token, or the file has none.
    """
    if server.token_file is None:
        if not is_loopback(server.host):
            raise ExposedServerError(
                f"server.host={server.host} is reachable from other machines, and anyone there could score and fill "
                "memory. Set server.token_file to a file with a long random token, or server.host to 127.0.0.1"
            )
        return None
    try:
        token = Path(server.token_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"server.token_file={server.token_file} cannot be read: {error}") from error
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise ExposedServerError(
            f"server.token_file={server.token_file} holds no token: at least 16 letters and digits on one line"
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
