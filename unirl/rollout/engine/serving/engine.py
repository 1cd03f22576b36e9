"""Samples with a server: sends weights to it, asks for all rows at the same time, and checks which weights it used.

buckets --WeightForwarder--> Server.send_weights --> fingerprints --> canary
requests --threads--> answers, in their order
"""

from __future__ import annotations

import secrets
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import torch

from unirl.config.errors import EngineError, IncompatibleError, SyncError, WeightsLostError
from unirl.distributed.group.rank import current
from unirl.distributed.weight_sync.base import Arrival, Numerics, ParamMapping, WeightLayout
from unirl.distributed.weight_sync.buckets import Bucket
from unirl.distributed.weight_sync.endpoints import WeightForwarder
from unirl.models.base import Pipeline
from unirl.models.loading.lora import adapter_names, inject_lora
from unirl.rollout.engine.base import DedicatedEngine, EngineUse
from unirl.rollout.engine.serving.http_server import HttpServer, check_arguments
from unirl.rollout.engine.serving.in_flight import Gate, InterruptedByTransfer
from unirl.rollout.engine.serving.server import Server
from unirl.rollout.engine.serving.settings import ServerSettings, check_transport, check_values
from unirl.sde.noise import NoiseSource, key_seed
from unirl.types.facts import ModelFacts
from unirl.types.progress import progress
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import Sampling

SEEDS = 2**31
"""Servers take seeds of 31 bits."""
RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


@dataclass(eq=False, repr=False)
class ServingEngine(DedicatedEngine, ServerSettings):
    """Samples with a server. The pipeline encodes and decodes; its network has no storage.

    A kind of sample has one subclass: tokens, or latents. It implements `respond`, `canary_inputs` and `canary`. An
    engine is a dataclass that inherits from one of them and from the settings of its server, and names its server.
    """

    server_class: ClassVar[type[HttpServer]]
    files: ClassVar[str]
    """The beginning of the names of its log and of its folder in the run directory."""

    pipeline: Pipeline
    run_dir: Path | None = None
    """The run directory, which gets the log of the server. None: a temporary folder."""

    def __post_init__(self) -> None:
        self.check_start(vars(self))
        root = Path(tempfile.mkdtemp(prefix="unirl-")) if self.run_dir is None else self.run_dir
        name = f"{self.files}-{current().rank}"
        self.server: Server = self.server_class(
            self.pipeline, root / "engine" / name, root / "logs" / f"{name}.log", self
        )
        self.gate = Gate()
        self.versions: dict[str, int] = {}
        """Name of the weights of each finished transfer to the number of optimizer updates behind them, in order."""
        self.forwarder: WeightForwarder | None = None
        self.owner = secrets.token_hex(4)
        """Part of the names of weights. It tells this engine from another one that uses the same server."""
        self.num_transfers = 0
        self.weights_name = ""
        """The name under which the server has the weights of the last transfer."""
        self.version = 0
        """The number of optimizer updates behind them."""

    def facts(self) -> ModelFacts:
        return self.pipeline.facts

    def spell(self, rows: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        return [self.pipeline.bundle.spell(row) for row in rows]

    @classmethod
    def check_settings(cls, sampling: Sampling, settings: Mapping[str, object]) -> None:
        """Raises a ConfigError for sampling settings or a value of the block `rollout` that cannot work, by its key."""
        check_values(settings)
        check_in_flight(settings.get("in_flight", "drain"), cls.server_class)
        arguments = settings.get("engine_args")
        check_arguments(arguments if isinstance(arguments, Mapping) else (), cls.server_class.own_arguments)

    @classmethod
    def check_use(cls, settings: Mapping[str, object], use: EngineUse) -> None:
        """Raises a ConfigError, naming the key, for a recipe whose weights or devices its servers cannot serve."""
        check_transport(settings)
        if settings["url"] is not None and use.num_devices > 1:
            raise IncompatibleError(
                f"rollout.url={settings['url']} is one server, and {use.num_devices} devices are to sample: each "
                "would send weights to it. Leave rollout.url out, or sample on one device: "
                "placement='{train: 0, rollout: 1}'"
            )

    # Weights

    def prepare(self, layout: WeightLayout) -> ParamMapping:
        self.held = None
        network = self.pipeline.bundle.trainable()
        if layout.adapter is not None and not adapter_names(network):
            inject_lora(network, layout.adapter, seed=0)
        self.server.prepare(layout)
        self.server.start()
        self.forwarder = WeightForwarder(network, layout)
        computing = Numerics.of(network, self.pipeline.stage.autocast_dtype, self.pipeline.bundle.device)
        numerics = Numerics(f"{self.server.name}", 0, computing.compute, computing.storage)
        return ParamMapping(self.forwarder.dtypes(), numerics)

    def take(self, bucket: Bucket) -> None:
        tensors = self._bound().checked(bucket)
        if bucket.number == 0:
            self._clear_the_way()
            self.num_transfers += 1
            self.version = bucket.version
            self.weights_name = f"{self.num_transfers:06d}-{bucket.weights}-{bucket.version}-{self.owner}"
            with self._delivering():
                self.server.begin_weights(self.weights_name)
        with self._delivering():
            self.server.send_weights(tensors)

    def arrival(self) -> Arrival:
        """Let the server sample from the weights of the transfer, and report what it has now."""
        with self._delivering():
            held = self.server.end_weights()
        self.versions[self.weights_name] = self.version
        if self.in_flight != "drain":
            self.server.proceed()
        self.gate.open()
        return self._bound().arrival_of(held)

    @contextmanager
    def _delivering(self) -> Iterator[None]:
        """Context of requests of a transfer. Raises SyncError with the name of the weights if the server fails."""
        try:
            yield
        except EngineError as error:
            raise SyncError(f"the weights {self.weights_name!r} did not arrive: {error}") from error

    def _clear_the_way(self) -> None:
        """Before a transfer: let requests wait, and do with the running ones what `rollout.in_flight` says."""
        self.gate.close()
        if self.in_flight == "drain":
            self.gate.wait_idle()
        else:
            self.server.interrupt(self.in_flight)

    def _bound(self) -> WeightForwarder:
        if self.forwarder is None:
            raise SyncError("weights arrived before prepare(layout) was called")
        return self.forwarder

    def move(self, asleep: bool) -> None:
        if self.forwarder is None:
            return  # the server has not started
        try:
            (self.server.sleep if asleep else self.server.wake_up)()
        except WeightsLostError:
            self.held = None  # the next `EngineSync.push` sends them again

    # Samples

    def sample(self, req: RolloutReq) -> RolloutResp:
        try:
            return self.respond(req)
        except WeightsLostError:
            self.held = None
            raise

    @abstractmethod
    def respond(self, req: RolloutReq) -> RolloutResp:
        """Sample from the present weights. Raises WeightsLostError if the server no longer has them."""

    def answers(self, requests: Sequence[RequestT], ask: Callable[[RequestT], AnswerT]) -> list[AnswerT]:
        """The answers of `ask` to all requests, in their order. `server.concurrency` of them are asked at a time."""
        answers: dict[int, AnswerT] = {}
        with ThreadPoolExecutor(self.server.concurrency, thread_name_prefix="server") as threads:
            started = {threads.submit(copy_context().run, ask, request): row for row, request in enumerate(requests)}
            try:
                for future in as_completed(started):
                    answers[started[future]] = future.result()
                    progress("sample", len(requests), len(answers))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return [answers[row] for row in range(len(requests))]

    def ask(self, id: str, attempt: Callable[[], AnswerT]) -> tuple[AnswerT, list[str]]:
        """The answer to one request, after retries. It waits while weights are sent.

        Returns:
            The answer, and the names of the weights that may have given it: the last ones when it was asked for, and
            those that were sent meanwhile.
        """

        def once() -> tuple[AnswerT, str]:
            with self.gate.passing():
                before = self.weights_name
                return attempt(), before

        while True:
            with suppress(InterruptedByTransfer):
                answer, before = self.server.insist(f"for {id}", once)
                names = list(self.versions)
                return answer, names[names.index(before) :]

    def check_weights(self, id: str, weights: str, names: Sequence[str]) -> None:
        """Raises SyncError unless `weights`, from which the server sampled a row, are among `names`."""
        if weights not in names:
            self.server.recover()  # raises if the server was restarted, which explains it
            raise SyncError(
                f"{self.server.name} sampled {id} from the weights {weights!r}, and the last verified "
                f"ones are {names[-1]!r}: another program may have loaded weights into the same server"
            )

    def with_versions(self, resp: RolloutResp, weights: Sequence[str]) -> RolloutResp:
        """The response of one track, whose rows were sampled from the weights of these names."""
        [(name, track)] = resp.tracks.items()
        versions = torch.tensor([self.versions[each] for each in weights], dtype=torch.int64)
        return RolloutResp({name: track.replace(weight_version=versions)})


def check_in_flight(in_flight: object, server: type[Server]) -> None:
    """Raises IncompatibleError for a value of `rollout.in_flight` that a server cannot carry out."""
    if in_flight not in server.in_flight_modes:
        raise IncompatibleError(
            f"rollout.in_flight={in_flight}: {server.name} cannot {in_flight} the requests that it answers. Use "
            f"{' or '.join(server.in_flight_modes)}"
        )


def seeds_of(req: RolloutReq, sampling: Sampling, what: str) -> list[int]:
    """A seed for each row of a request, as a function of its key: seed, step and sample id.

    Args:
        what: the name of the draw, such as `tok`.
    """
    noise = NoiseSource(sampling.seed, req.purpose, req.step)
    return [key_seed(sampling.seed, noise.key(id, what)) % SEEDS for id in req.sample_ids]
