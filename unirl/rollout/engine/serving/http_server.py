"""A server that is reached by HTTP: started on the loopback interface, or joined at its address."""

from __future__ import annotations

import shutil
import threading
import weakref
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec
import torch

from unirl.config.errors import EngineError, IncompatibleError, InvalidValueError, WeightsLostError
from unirl.config.http import PROBE_TIMEOUT_S, Content, HttpClient, Reply, RequestFailed, ServerBusy
from unirl.models.base import Pipeline
from unirl.rollout.engine.serving.process import LOOPBACK, ServerProcess, free_port
from unirl.rollout.engine.serving.server import Server
from unirl.rollout.engine.serving.settings import ServerSettings

BodyT = TypeVar("BodyT")


class HttpServer(Server):
    """A process with a program that a subclass names, or a server that runs at `settings.url`."""

    health: ClassVar[str]
    """The path that answers 200 when the server is ready."""
    own_arguments: ClassVar[Collection[str]] = ()
    """Arguments of `rollout.engine_args` that the engine sets itself, with underscores."""

    def __init__(self, pipeline: Pipeline, folder: Path, log: Path, settings: ServerSettings) -> None:
        """
        Args:
            folder: gets the files that the server reads, such as those of a tiny model. It is removed at the end.
            log: the output of a server that this process starts is appended to this file.
        """
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.pipeline = pipeline
        self.folder = folder
        self.log = log
        self.settings = settings
        self.process: ServerProcess | None = None
        self._http: HttpClient | None = None
        self._recovering = threading.Lock()
        self.weights_name = ""
        """The name of the weights of the last transfer that began."""
        self.has_lost_weights = False
        """True from a restart, until weights are sent, if `restore` could not bring back the former ones."""

    @property
    def dtype(self) -> str:
        """The compute dtype of the network, such as float32."""
        return str(self.pipeline.bundle.dtype).removeprefix("torch.")

    @abstractmethod
    def words(self, python: str, port: int) -> list[str]:
        """The command line of the server."""

    def env(self) -> Mapping[str, str]:
        """Environment variables of the server, in addition to those of this process."""
        return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads()), **self.settings.env}

    @abstractmethod
    def check_ready(self) -> None:
        """Check a server that answers. Raises IncompatibleError if it runs with other settings than the recipe's."""

    def mismatch(self, what: str, way_out: str) -> IncompatibleError:
        """The error for a server that runs with other settings than the recipe's."""
        url = self.settings.url
        where = ", started by this run," if url is None else f" at rollout.url={url}"
        return IncompatibleError(f"{self.name}{where} {what}. {way_out}")

    @abstractmethod
    def restore(self) -> bool:
        """Give a restarted server the weights that it had. Returns False if they must be sent again."""

    @property
    def http(self) -> HttpClient:
        """The connections to the server."""
        assert self._http is not None, "start comes first"
        return self._http

    def start(self) -> None:
        if self._http is not None:
            return
        settings, url = self.settings, self.settings.url
        if url is None:
            port = free_port()
            url = f"http://{LOOPBACK}:{port}"
            name = f"fake {self.name}" if settings.is_fake else self.name
            self.process = ServerProcess(name, self.words(settings.python(), port), self.log, self.env())
            self.process.start()
        self._http = HttpClient(url, token=None, timeout_s=settings.timeout_s, connections=self.concurrency + 1)
        self._wait_ready()
        self.check_ready()

    def _wait_ready(self) -> None:
        if self.process is not None:
            self.process.wait_ready(self._is_ready, self.settings.start_timeout_s)
        elif not self._is_ready():
            raise EngineError(
                f"no {self.name} answers at rollout.url={self.settings.url}: start it, or correct the address"
            )

    def _is_ready(self) -> bool:
        try:
            return self.http.request("GET", self.health, timeout_s=PROBE_TIMEOUT_S).status == 200
        except RequestFailed:
            return False

    def recover(self) -> None:
        with self._recovering:
            if self.process is None:
                self._wait_ready()
                return
            if not self.process.is_alive:
                self._restart(self.process)
            if self.has_lost_weights:
                raise WeightsLostError(
                    f"{self.name} ended and was restarted with the weights of the base checkpoint: those of the last "
                    f"transfer must be sent again. {self.process.tail()}"
                )

    def _restart(self, process: ServerProcess) -> None:
        if process.num_starts > self.settings.max_restarts:
            raise EngineError(
                f"{self.name} ended {process.ending}, and was restarted rollout.max_restarts="
                f"{self.settings.max_restarts} times before. {process.tail()}"
            )
        process.start()
        self._wait_ready()
        self.has_lost_weights = not self.restore()

    def post(self, path: str, body: Mapping[str, object], timeout_s: float | None = None) -> Reply:
        """One attempt. Raises RequestFailed or ServerBusy if another one may succeed, else EngineError."""
        return self.post_bytes(path, [msgspec.json.encode(body)], "application/json", timeout_s)

    def post_bytes(self, path: str, content: Content, content_type: str, timeout_s: float | None = None) -> Reply:
        """As `post`, for a body of any type."""
        headers = {"Content-Type": content_type}
        reply = self.http.request("POST", path, content=content, headers=headers, timeout_s=timeout_s)
        if reply.status != 200:
            reply.raise_if_retryable(f"{reply.status} {shown(reply)}", pause_s=1.0)
            raise EngineError(f"{self.name} refuses {path}: {reply.status} {shown(reply)}")
        return reply

    def post_once(self, path: str, body: Mapping[str, object]) -> Reply:
        """The reply to a request that may not be repeated. Raises EngineError if there is none."""
        try:
            return self.post(path, body)
        except (RequestFailed, ServerBusy) as error:
            raise EngineError(f"{self.name} gave no answer to {path}, which cannot be repeated: {error}") from error

    def insist_on(self, path: str, body: Mapping[str, object]) -> Reply:
        """The reply to a request that may be repeated, after retries. Raises as `insist` and `post` do."""
        return self.insist(f"to {path}", lambda: self.post(path, body))

    def get(self, path: str, kind: type[BodyT]) -> BodyT:
        """The body of the reply to a GET request, after retries. Raises as `insist` and `read` do."""
        return self.read(self.insist(f"to {path}", lambda: self.http.request("GET", path)), kind)

    def read(self, reply: Reply, kind: type[BodyT]) -> BodyT:
        """The JSON body of a reply. Raises EngineError if it is no `kind`."""
        try:
            return msgspec.json.decode(reply.body, type=kind)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name}: an answer cannot be read: {error}: {shown(reply)}") from error

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
        self._remove()


def shown(reply: Reply) -> str:
    """The beginning of a reply, for an error message."""
    return reply.body[:300].decode(errors="replace")


def check_arguments(arguments: Iterable[str], own: Collection[str]) -> None:
    """Raises InvalidValueError for an argument of `rollout.engine_args` that the engine sets itself.

    Args:
        own: those that it sets itself, with underscores.
    """
    for name in arguments:
        if name.removeprefix("--").replace("-", "_") in own:
            raise InvalidValueError(
                f"rollout.engine_args sets {name}, which the engine sets itself: leave it out, and use the "
                "settings of rollout, bundle and backend.lora_cfg"
            )


def option_words(arguments: Mapping[str, object]) -> list[str]:
    """The words of `rollout.engine_args`. True is a flag, a list has several values; null and false are left out."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-").removeprefix("--")
        if value is None or value is False:
            continue
        words.append(f"--{option}")
        words += [] if value is True else [str(each) for each in (value if isinstance(value, list) else [value])]
    return words
