"""The settings of the service, read from a YAML file and checked."""

from __future__ import annotations

import ipaddress
import re
import ssl
import stat
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
    """The limits of one request and of all requests together."""

    body_mb: float = 64.0
    """Largest body, compressed or not, in MiB."""
    pending_mb: float = 384.0
    """Largest size in MiB of all unpacked bodies in progress and their decoded files. Beyond it, requests are answered
    503."""
    connections: int = 1024
    """Largest number of open connections. Beyond it, requests are answered 503."""
    client_share: float = 0.5
    """Largest share of `pending_mb` that large requests of one client (an address) may hold, and of `connections` and
    of each reward's `max_queue`."""
    items: int = 256
    """Largest number of items in a request."""
    turns: int = 8
    """Largest number of turns in an item."""
    side: int = 4096
    """Largest side of an image or frame, in pixels."""
    pixels: int = 4096 * 4096
    """Largest number of pixels in an image or frame."""
    frames: int = 256
    """Largest number of frames in a video."""
    video_pixels: int = 4 * 4096 * 4096
    """Largest number of pixels in all frames of a video."""
    file_mb: float = 48.0
    """Largest encoded image or video, in MiB."""
    video_s: float = 60.0
    """Longest video, in seconds."""
    header_s: float = 5.0
    """Timeout in seconds for a client to send its headers."""
    body_s: float = 30.0
    """Timeout in seconds for a client to send its body, and to read its response."""
    body_rate_kb: float = 16.0
    """Smallest average rate of a body in KiB/s, after its first `header_s` seconds."""
    decode_s: float = 1.5
    """CPU time in seconds to decode an image, after which its decoder is ended. A video has ten times as much."""
    decoder_mb: float = 1024.0
    """Address space of a decoder, in MiB. The pixels of a video need most of it."""
    num_decoders: int = 2
    remembered: int = 50_000
    """Number of scores that are kept by request id."""
    media_roots: tuple[str, ...] = ()
    """Directories below which `video_path` may lie. Empty: no path is read."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "media_roots" and value <= 0:
                raise ValueError(f"LimitsConfig.{name} must be > 0, got {value}")
        if self.client_share > 1:
            raise ValueError(f"LimitsConfig.client_share must lie in (0, 1], got {self.client_share}")
        if 2 * self.body_mb > self.client_share * self.pending_mb:
            raise ValueError(
                f"LimitsConfig.body_mb={self.body_mb:g}, of which the bytes and what is parsed from them are held, "
                f"does not fit twice into client_share={self.client_share:g} of pending_mb={self.pending_mb:g}: raise "
                "pending_mb"
            )
        for root in self.media_roots:
            if not Path(root).is_dir():
                raise ValueError(f"LimitsConfig.media_roots names {root!r}, which is not a directory")

    @property
    def body_bytes(self) -> int:
        return int(self.body_mb * MIB)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The address of the service, its timeouts and its token."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 selects a free port, which is printed."""
    score_timeout_s: float = 120.0
    """Timeout in seconds of a worker for a batch, after which it is killed and replaced."""
    load_timeout_s: float = 1800.0
    """Timeout in seconds of a worker to load its scorer, including downloads."""
    queue_timeout_s: float = 300.0
    """Timeout in seconds of an item that waits for a worker, including a worker that is being replaced."""
    token_file: str | None = None
    """A file with the token that every request must contain (`Authorization: Bearer ...`). Required beyond loopback."""
    host_names: tuple[str, ...] = ()
    """Names and addresses by which clients may call the service (the header Host). Empty: on loopback, those of this
    machine, so that no web page reaches the service by a name of its own; otherwise all."""
    drain_s: float = 10.0
    """Seconds that requests in progress may take after SIGTERM or SIGINT. New ones are answered 503 from then on."""
    tls_cert: str | None = None
    """A PEM file with the certificate chain. With it and `tls_key`, the service speaks HTTPS only."""
    tls_key: str | None = None
    """A PEM file with the private key of the certificate."""
    log_requests: bool = False
    """Log every request with its id. Refused requests are always logged."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    def __post_init__(self) -> None:
        for name in ("score_timeout_s", "load_timeout_s", "queue_timeout_s", "drain_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"ServerConfig.{name} must be > 0, got {getattr(self, name)}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("ServerConfig.tls_cert and tls_key need each other: name both files, or none")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"ServerConfig.port must lie in 0..65535, got {self.port}")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """One reward: a scorer in its own processes."""

    name: str
    """The name that clients use."""
    scorer: str
    """A scorer of `unirl.reward.local` (`unirl reward ls`), or the dotted name of a class in one of the `plugins`."""
    params: dict[str, Any] = field(default_factory=dict)
    """Fields of the scorer's spec, or keyword arguments of a scorer without a spec."""
    python: str | None = None
    """The interpreter of the scorer's environment. None: the interpreter of the service."""
    num_replicas: int = 1
    device: str = "auto"
    """`cpu`, `auto`, `cuda`, or GPUs by number such as `cuda:0,1`, which are assigned to the replicas in turn."""
    num_threads: int | None = None
    """Number of CPU threads of a replica. None: its libraries decide."""
    batch_size: int = 32
    """Largest number of items, of any clients, that are scored together."""
    max_queue: int = 1024
    """Largest number of waiting items. Beyond it, requests are answered 429."""

    recycle_mb: float | None = None
    """A worker that holds more memory than this after a batch, in MiB, is replaced. None: workers are kept."""

    def __post_init__(self) -> None:
        if self.recycle_mb is not None and self.recycle_mb <= 0:
            raise ValueError(f"RewardConfig.recycle_mb must be > 0 MiB, got {self.recycle_mb}")
        for name in ("num_replicas", "batch_size", "max_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"RewardConfig.{name} must be >= 1, got {getattr(self, name)}")
        if not NAME.fullmatch(self.name):
            raise ValueError(f"RewardConfig.name must be letters, digits, `_`, `.` and `-`, got {self.name!r}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+(,\d+)*)?", self.device):
            raise ValueError(f"RewardConfig.device must be auto, cpu, cuda or cuda:0,1,..., got {self.device!r}")

    def environment(self, replica: int) -> dict[str, str]:
        """Returns the environment variables that set the devices and threads of a replica."""
        visible = {"cpu": {"CUDA_VISIBLE_DEVICES": ""}}.get(self.device, {})
        gpus = self.device.partition(":")[2].split(",")
        if gpus != [""]:
            visible = {"CUDA_VISIBLE_DEVICES": gpus[replica % len(gpus)]}
        return visible | ({"OMP_NUM_THREADS": str(self.num_threads)} if self.num_threads else {})


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """The settings of the service."""

    rewards: tuple[RewardConfig, ...]
    server: ServerConfig = field(default_factory=ServerConfig)
    plugins: tuple[str, ...] = ()
    """Packages other than unirl whose scorers may be named."""
    toy: bool = False
    """Use the scorers' toy values for settings that `params` does not name: no downloads, seconds on a CPU."""

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
    """Returns the settings in a YAML file; `typed` are keys of its server that the command line sets.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or out of range.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give the service's YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict) or not isinstance(tree.setdefault("server", {}), dict):
        raise ConfigError(f"{path} must hold the blocks `server` and `rewards`")
    return config_of({**tree, "server": {**tree["server"], **typed}})


def config_of(tree: Mapping[str, Any]) -> ServiceConfig:
    """Returns the settings in YAML data. Raises ConfigError."""
    config: ServiceConfig = build(check_node(tree, ServiceConfig))
    return config


def read_token(server: ServerConfig) -> str | None:
    """Returns the token that requests must contain; None on loopback without a token file.

    Raises:
        UsageError: 2040 the service would listen beyond this machine without a token, or the file has no token.
    """
    if server.token_file is None:
        if not is_loopback(server.host):
            raise ExposedServerError(
                f"server.host={server.host} is reachable from other machines, where anyone could use the service. "
                "Set server.token_file to a file with a long random token, or server.host to 127.0.0.1"
            )
        return None
    try:
        mode = Path(server.token_file).stat().st_mode
        token = Path(server.token_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"server.token_file={server.token_file} cannot be read: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ExposedServerError(
            f"server.token_file={server.token_file} has mode {stat.S_IMODE(mode):o}, so other users of this machine "
            f"may read it: run chmod 600 {server.token_file}"
        )
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise ExposedServerError(
            f"server.token_file={server.token_file} has no token: write at least 16 letters and digits on one line"
        )
    return token


def check_tls(server: ServerConfig) -> None:
    """Raises UsageError when the certificate or its key cannot be read, or do not belong together."""
    if server.tls_cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(server.tls_cert, server.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(
            f"server.tls_cert={server.tls_cert} and tls_key={server.tls_key} are no certificate with its key: {error}. "
            "Write both as PEM files"
        ) from error


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
