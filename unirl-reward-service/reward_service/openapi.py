"""The OpenAPI document: every route, limit and refusal of the service."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import combinations
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from reward_service.config import LimitsConfig
from unirl.reward.client.wire import (
    IMAGE_FORMATS,
    JSON,
    MAX_DEPTH,
    MAX_INT,
    MAX_METADATA_BYTES,
    MAX_VALUES,
    MEDIA_FIELDS,
    MSGPACK,
    VIDEO_FORMATS,
    Health,
    Probe,
    Refusal,
    ScoreRequest,
    ScoreResponse,
)

Json = dict[str, Any]

_refs, _schemas = msgspec.json.schema_components(
    [ScoreRequest, ScoreResponse, Health, Probe, Refusal], ref_template="#/components/schemas/{name}"
)
_request, _response, _health, _probe, _refusal = _refs

REFUSALS = {
    "400": "Not JSON or msgpack, or an unknown reward.",
    "401": "The token is missing or wrong.",
    "408": "The body did not arrive in time.",
    "409": "A request_id that was used for another item.",
    "413": "A body or a list beyond the limits.",
    "415": "A content type or encoding that is not supported.",
    "421": "The header Host is none of the names of this service.",
    "422": "The body does not match the schema; the detail names the place.",
    "429": "The queue is full; Retry-After says when to try again.",
    "503": "Too many requests are in progress, or the service is loading or stopping; Retry-After says when to try "
    "again.",
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}


REQUEST_ID = {"X-Request-Id": {"description": "The id in the service's log.", "schema": {"type": "string"}}}


def _refused(status: str) -> Json:
    headers = REQUEST_ID | (RETRY_AFTER if status in ("429", "503") else {})
    return {"description": REFUSALS[status], "content": {JSON: {"schema": _refusal}}, "headers": headers}


def _answer(description: str, content: Json, refusals: list[str]) -> Json:
    success = {"description": description, "content": content, "headers": REQUEST_ID}
    return {"responses": {"200": success} | {status: _refused(status) for status in refusals}}


def _either(schema: Json) -> Json:
    return {JSON: {"schema": schema}, MSGPACK: {"schema": schema}}


SCORE_DOC = {"requestBody": {"required": True, "content": _either(_request)}} | _answer(
    "In the order of the requests; in the content type of the request.", _either(_response), list(REFUSALS)
)
HEALTH_DOC = _answer("Readiness of every replica.", {JSON: {"schema": _health}}, ["401", "421"])
REWARDS_DOC = _answer("Names.", {JSON: {"schema": {"type": "array", "items": {"type": "string"}}}}, ["401", "421"])
METRICS_DOC = _answer("Prometheus' text format.", {"text/plain": {"schema": {"type": "string"}}}, ["401", "421"])


BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"


def _media(formats: Sequence[str]) -> Json:
    """Returns the schema of an image or a video in JSON. A schema cannot say how long raw data of a shape must be."""
    return {
        "type": ["object", "null"],
        "description": "A file. Bodies in msgpack may also have uint8 RGB in C order: format raw, with its shape.",
        "properties": {
            "format": {"enum": [format for format in formats if format != "raw"]},
            "data": {"type": "string", "pattern": BASE64, "contentEncoding": "base64"},
        },
        "required": ["format", "data"],
        "additionalProperties": False,
    }


PLAIN = {
    "anyOf": [
        {"type": ["null", "boolean", "string"]},
        {"type": "number", "minimum": -MAX_INT, "maximum": MAX_INT - 1},
        {"type": "array", "items": {"$ref": "#/components/schemas/Plain"}},
        {"type": "object", "additionalProperties": {"$ref": "#/components/schemas/Plain"}},
    ]
}
"""A value in metadata."""


def _both(names: Sequence[str]) -> Json:
    """Returns the schema of an object in which all these fields are set."""
    return {"required": list(names), "properties": {name: {"not": {"type": "null"}} for name in names}}


LIVE_DOC = _answer("The process works.", {JSON: {"schema": _probe}}, []) | {"security": []}
READY_DOC = _answer("Every reward has a worker.", {JSON: {"schema": _probe}}, ["503"]) | {"security": []}


def describe(app: FastAPI, rewards: Sequence[str], limits: LimitsConfig) -> Json:
    """Returns the OpenAPI document, which is made once and has the rewards and limits of this service."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = deepcopy(_schemas)
        item, turn = schemas["ScoreItem"]["properties"], schemas["Turn"]
        item["required_rewards"] |= {"items": {"enum": list(rewards)}, "uniqueItems": True}
        item["history"]["maxItems"] = min(limits.turns, item["history"]["maxItems"])
        schemas["ScoreRequest"]["properties"]["requests"]["maxItems"] = limits.items
        item["metadata"] = {
            "type": ["object", "null"],
            "additionalProperties": {"$ref": "#/components/schemas/Plain"},
            "description": f"At most {MAX_METADATA_BYTES} bytes, {MAX_VALUES} values and {MAX_DEPTH} levels.",
        }
        schemas["Plain"] = PLAIN
        turn |= {"properties": turn["properties"] | {"image": _media(IMAGE_FORMATS), "video": _media(VIDEO_FORMATS)}}
        turn["not"] = {"anyOf": [_both(pair) for pair in combinations(MEDIA_FIELDS, 2)]}
        document.setdefault("components", {})["schemas"] = schemas
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}, {}]
        app.openapi_schema = document
    return app.openapi_schema
