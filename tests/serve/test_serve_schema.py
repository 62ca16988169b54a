"""Whatever its own OpenAPI document allows, and what it forbids: no answer is a failure of the server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from servers import Serving

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance, content_type_conformance]
SETTINGS = settings(
    max_examples=20, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck), database=None,
)  # fmt: skip


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_its_own_document(server: Serving, mode: str) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    asked = set()
    for operation in operations:
        if mode == "NEGATIVE" and not operation.body:
            continue  # nothing could be wrong

        @SETTINGS
        @given(case=operation.as_strategy(generation_mode=getattr(schemathesis.GenerationMode, mode)))
        def check(case: Any) -> None:
            asked.add(case.path)
            case.call_and_validate(checks=CHECKS)

        check()
    assert {"/v1/embeddings", "/predict", "/v2/rerank", "/tokenize"} <= asked
