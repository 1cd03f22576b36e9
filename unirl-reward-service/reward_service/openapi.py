"""The service's description of itself: every route, body and refusal, from the very types that read the wire."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from unirl.reward.client.wire import JSON, MSGPACK, Health, Refusal, ScoreRequest, ScoreResponse

Json = dict[str, Any]

_refs, _schemas = msgspec.json.schema_components(
    [ScoreRequest, ScoreResponse, Health, Refusal], ref_template="#/components/schemas/{name}"
)
_request, _response, _health, _refusal = _refs

REFUSALS = {
    "400": "Not JSON or msgpack, an unknown reward, or a medium that cannot be read.",
    "401": "The token is missing or wrong.",
    "408": "The body did not come in time.",
    "409": "A request_id that was used for another item.",
    "413": "A body, a list or a medium beyond the limits.",
    "415": "A content type or encoding that is not read.",
    "422": "Another form than the schema; the detail says where.",
    "429": "The queue is full; Retry-After says when to come back.",
    "503": "Too much is being worked on; Retry-After says when to come back.",
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}


def _refused(status: str) -> Json:
    found: Json = {"description": REFUSALS[status], "content": {JSON: {"schema": _refusal}}}
    return found | ({"headers": RETRY_AFTER} if status in ("429", "503") else {})


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
    """The OpenAPI document, made once; it names the rewards that this service has."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = deepcopy(_schemas)
        schemas["Item"]["properties"]["required_rewards"]["items"] = {"enum": list(rewards)}
        document.setdefault("components", {})["schemas"] = schemas
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}, {}]
        app.openapi_schema = document
    return app.openapi_schema
