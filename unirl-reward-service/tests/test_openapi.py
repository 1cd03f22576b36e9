"""The service keeps what its own OpenAPI document says, whatever is sent: no answer of 500 or above."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
]
"""`scripts/check_reward_openapi.py` runs all others too, with invalid requests."""


@pytest.mark.slow
def test_no_request_breaks_the_service_and_every_answer_is_as_described(service):
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json", timeout=60)
    seen = []
    for operation in schema.get_all_operations():
        case = operation.ok().as_strategy()
        seen.append(operation.ok().label)
        check(case, 40 if "/score" in operation.ok().label else 5)
    assert seen == ["POST /score", "GET /rewards", "GET /health", "GET /live", "GET /ready", "GET /metrics"]


def check(case_of, examples: int) -> None:
    from hypothesis import given

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=case_of)
    def run(case):
        case.call_and_validate(checks=CHECKS, timeout=60)

    run()
