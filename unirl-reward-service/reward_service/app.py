"""The HTTP routes of the service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from reward_service.config import ServiceConfig
from reward_service.gate import Gate, refusal
from reward_service.intake import Intake, MemoryBudget
from reward_service.media import MediaDecoder
from reward_service.metrics import Metrics
from reward_service.openapi import (
    HEALTH_DOC,
    LIVE_DOC,
    METRICS_DOC,
    READY_DOC,
    REWARDS_DOC,
    SCORE_DOC,
    describe,
)
from reward_service.rewards import RewardQueue
from reward_service.scoring import RequestRefused, Scoring
from unirl.reward.client.wire import JSON, MSGPACK, Health, Probe, encode


class Service:
    """The parts of the service that exist as long as it runs."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.phase: Literal["loading", "serving", "draining"] = "serving"
        self.num_requests = 0
        """Number of score requests in progress."""
        self.metrics = Metrics()
        self.decoder = MediaDecoder(config.server.limits, self.metrics)
        self.rewards = {reward.name: RewardQueue(reward, config, self.metrics) for reward in config.rewards}
        self.scoring = Scoring(self.rewards, self.decoder, config.server, self.metrics)
        self.budget = MemoryBudget(config.server.limits, self.metrics.pending)
        self.intake = Intake(config.server.limits)

    async def start(self) -> None:
        """Waits until every worker has loaded its scorer. Raises UniRLError."""
        self.phase = "loading"
        await asyncio.gather(self.decoder.start(), *(reward.start() for reward in self.rewards.values()))
        self.phase = "serving"

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(self.decoder.close(), *(reward.close() for reward in self.rewards.values()))

    def health(self) -> Health:
        rewards = {name: reward.readiness for name, reward in self.rewards.items()}
        return Health(status="ok" if all(map(all, rewards.values())) else "degraded", rewards=rewards)

    def not_ready(self) -> str | None:
        """The reason why requests should go to another service at present; None if there is none."""
        if self.phase != "serving":
            return f"the service is {self.phase}"
        waiting = [name for name, reward in self.rewards.items() if not reward.num_ready]
        return f"no worker of {waiting[0]!r} is ready" if waiting else None

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request while it is in progress. Raises RequestRefused (503) unless the service accepts requests."""
        if self.phase != "serving":
            raise RequestRefused(503, self.phase, f"the service is {self.phase}", 1)
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def drain(self) -> None:
        """Refuses new requests, and waits until those in progress have ended, at most `drain_s` seconds."""
        self.phase = "draining"
        end = asyncio.get_running_loop().time() + self.config.server.drain_s
        while self.num_requests and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)


def make_app(service: Service, token: str | None) -> FastAPI:
    """Returns the application. The caller starts and closes the service."""
    app = FastAPI(title="UniRL reward service", version="1", docs_url=None, redoc_url=None)
    app.add_exception_handler(HTTPException, _http_error)

    @app.post("/score", openapi_extra=SCORE_DOC)
    async def score(request: Request) -> Response:
        """Scores of every item by every reward that it requires."""
        try:
            with service.request():
                return await _score(request, service)
        except RequestRefused as refused:
            return refusal(refused.status, refused.kind, refused.detail, refused.retry_after_s)

    @app.get("/rewards", openapi_extra=REWARDS_DOC)
    async def rewards() -> Response:
        """The names of the rewards."""
        return _json(list(service.rewards))

    @app.get("/health", openapi_extra=HEALTH_DOC)
    async def health() -> Response:
        """The readiness of each replica of each reward."""
        return _json(service.health())

    @app.get("/live", openapi_extra=LIVE_DOC)
    async def live() -> Response:
        """Answers as long as the process works. A supervisor restarts a service that does not answer."""
        return _json(Probe(status="live"))

    @app.get("/ready", openapi_extra=READY_DOC)
    async def ready() -> Response:
        """Answers 200 if every reward has a worker and new requests are accepted. A balancer asks it."""
        why = service.not_ready()
        return _json(Probe(status="ready")) if why is None else refusal(503, "not_ready", why, 1)

    @app.get("/metrics", openapi_extra=METRICS_DOC)
    async def metrics() -> Response:
        """Counters and histograms in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    app.openapi = lambda: describe(app, list(service.rewards), service.config.server.limits)  # type: ignore[method-assign]
    app.add_middleware(Gate, server=service.config.server, token=token, metrics=service.metrics)
    return app


async def _score(request: Request, service: Service) -> Response:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in (JSON, MSGPACK):
        raise RequestRefused(415, "unsupported_type", f"content-type {content_type!r}: send {MSGPACK} or {JSON}")
    with service.budget.share(request.client.host if request.client else "") as share:
        samples = await service.intake.receive(request, content_type, share)
        response = await service.scoring.answer(samples, share)
    return Response(encode(response, content_type), media_type=content_type)


async def _http_error(request: Request, error: Exception) -> Response:
    """Returns the response to an unknown route or method, which the framework refuses."""
    assert isinstance(error, HTTPException)
    answer = refusal(error.status_code, "no_such_route", f"{request.method} {request.url.path}: {error.detail}")
    answer.headers.update(error.headers or {})
    return answer


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
