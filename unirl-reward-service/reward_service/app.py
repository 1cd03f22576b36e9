"""The HTTP routes of the service: authentication, limits, typed refusals and the OpenAPI document."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reward_service.config import ServiceConfig
from reward_service.intake import Intake, MemoryBudget
from reward_service.media import MediaDecoder
from reward_service.metrics import Metrics
from reward_service.rewards import RewardQueue
from reward_service.scoring import RequestRefused, Scoring
from unirl.reward.client.wire import JSON, MSGPACK, Health, Refusal, ScoreRequest, ScoreResponse, encode


class Service:
    """The parts of the service that exist as long as it runs."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.decoder = MediaDecoder(config.server.limits, self.metrics)
        self.rewards = {reward.name: RewardQueue(reward, config, self.metrics) for reward in config.rewards}
        self.scoring = Scoring(self.rewards, self.decoder, config.server, self.metrics)
        self.budget = MemoryBudget(config.server.limits, self.metrics.pending)
        self.intake = Intake(config.server.limits)

    async def start(self) -> None:
        """Waits until every worker has loaded its scorer. Raises UniRLError."""
        await asyncio.gather(self.decoder.start(), *(reward.start() for reward in self.rewards.values()))

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(self.decoder.close(), *(reward.close() for reward in self.rewards.values()))

    def health(self) -> Health:
        rewards = {name: reward.readiness for name, reward in self.rewards.items()}
        return Health(status="ok" if all(map(all, rewards.values())) else "degraded", rewards=rewards)


def make_app(service: Service, token: str | None) -> FastAPI:
    """Returns the application. The caller starts and closes the service."""
    app = FastAPI(title="UniRL reward service", version="1", docs_url=None, redoc_url=None)
    app.add_exception_handler(HTTPException, _http_error)

    @app.post("/score", openapi_extra=SCORE_DOC)
    async def score(request: Request) -> Response:
        """Scores of every item by every reward that it requires."""
        try:
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

    @app.get("/metrics", openapi_extra=METRICS_DOC)
    async def metrics() -> Response:
        """Counters and histograms in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    app.openapi = lambda: describe(app, list(service.rewards))  # type: ignore[method-assign]
    app.add_middleware(Gate, token=token, metrics=service.metrics)
    return app


class Gate:
    """Refuses requests without the token, and counts the responses."""

    def __init__(self, app: ASGIApp, token: str | None, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._metrics.requests.labels(getattr(route, "path", "other"), message["status"]).inc()
            await send(message)

        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if self._expected is None or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, counted)
        else:
            answer = refusal(401, "unauthorized", "send the service's token: Authorization: Bearer <token>")
            answer.headers["WWW-Authenticate"] = "Bearer"
            await answer(scope, receive, counted)


async def _score(request: Request, service: Service) -> Response:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in (JSON, MSGPACK):
        raise RequestRefused(415, "unsupported_type", f"content-type {content_type!r}: send {MSGPACK} or {JSON}")
    with service.budget.share(request.client.host if request.client else "") as share:
        samples = await service.intake.receive(request, content_type, share)
        response = await service.scoring.answer(samples, share)
    return Response(encode(response, content_type), media_type=content_type)


MAX_DETAIL = 1000
"""Largest number of characters of a refusal, which may repeat what the client has sent."""


def refusal(status: int, kind: str, detail: str, retry_after_s: int | None = None) -> Response:
    """Returns a typed response that is not a success."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return Response(encode(Refusal(kind=kind, detail=detail[:MAX_DETAIL]), JSON), status, headers, JSON)


async def _http_error(request: Request, error: Exception) -> Response:
    """Returns the response to an unknown route or method, which the framework refuses."""
    assert isinstance(error, HTTPException)
    answer = refusal(error.status_code, "no_such_route", f"{request.method} {request.url.path}: {error.detail}")
    answer.headers.update(error.headers or {})
    return answer


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


Json = dict[str, Any]

_refs, _schemas = msgspec.json.schema_components(
    [ScoreRequest, ScoreResponse, Health, Refusal], ref_template="#/components/schemas/{name}"
)
_request, _response, _health, _refusal = _refs

REFUSALS = {
    "400": "Not JSON or msgpack, an unknown reward, or an image or video that cannot be read.",
    "401": "The token is missing or wrong.",
    "408": "The body did not arrive in time.",
    "409": "A request_id that was used for another item.",
    "413": "A body, a list, an image or a video beyond the limits.",
    "415": "A content type or encoding that is not supported.",
    "422": "The body does not match the schema; the detail names the place.",
    "429": "The queue is full; Retry-After says when to try again.",
    "503": "Too many requests are in progress; Retry-After says when to try again.",
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}


def _refused(status: str) -> Json:
    response: Json = {"description": REFUSALS[status], "content": {JSON: {"schema": _refusal}}}
    return response | ({"headers": RETRY_AFTER} if status in ("429", "503") else {})


def _answer(description: str, content: Json, refusals: list[str]) -> Json:
    return {"responses": {"200": {"description": description, "content": content}} | {s: _refused(s) for s in refusals}}


def _either(schema: Json) -> Json:
    return {JSON: {"schema": schema}, MSGPACK: {"schema": schema}}


SCORE_DOC = {"requestBody": {"required": True, "content": _either(_request)}} | _answer(
    "In the order of the requests; in the content type of the request.", _either(_response), list(REFUSALS)
)
HEALTH_DOC = _answer("Readiness of every replica.", {JSON: {"schema": _health}}, ["401"])
REWARDS_DOC = _answer("Names.", {JSON: {"schema": {"type": "array", "items": {"type": "string"}}}}, ["401"])
METRICS_DOC = _answer("Prometheus' text format.", {"text/plain": {"schema": {"type": "string"}}}, ["401"])


def describe(app: FastAPI, rewards: Sequence[str]) -> Json:
    """Returns the OpenAPI document, which is made once and names the rewards of this service."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = deepcopy(_schemas)
        schemas["ScoreItem"]["properties"]["required_rewards"]["items"] = {"enum": list(rewards)}
        document.setdefault("components", {})["schemas"] = schemas
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}, {}]
        app.openapi_schema = document
    return app.openapi_schema
