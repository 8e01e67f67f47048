"""Requests made up from /openapi.json, right and wrong ones: each has an answer it documents, and
none is an error of ours.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moe_infinity import MoE
from tests.server.conftest import TEMPLATE
from tests.server.serving import Serving, serving

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_CASES = 300
OPERATIONS = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
]


@pytest.fixture(scope="module")
def fuzzed(moe: MoE):
    """Short contexts: a request that is taken is soon done."""
    moe.tokenizer.chat_template = TEMPLATE
    with serving(moe, max_context=48, max_queue=200) as server:
        yield server


def fuzz(server: Serving, path: str, method: str, mode: Any, num_cases: int) -> dict[int, int]:
    """How many answers of each status."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    checks = [schemathesis.checks.not_a_server_error]
    from schemathesis.specs.openapi import checks as openapi_checks

    checks += [
        openapi_checks.status_code_conformance,
        openapi_checks.content_type_conformance,
        openapi_checks.response_schema_conformance,
    ]
    statuses: dict[int, int] = {}

    @given(st.data())
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(data):
        case = data.draw(schema[path][method].as_strategy(generation_mode=mode))
        answer = case.call(timeout=60)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        case.validate_response(answer, checks=checks)

    run()
    return statuses


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_brings_an_error_of_ours(fuzzed, path, method, mode):
    modes = schemathesis.GenerationMode
    statuses = fuzz(fuzzed, path, method, getattr(modes, mode), NUM_CASES)
    print(path, mode, statuses)
    fuzzed.wait_until_idle()
    assert fuzzed.engine.state()["kv_bytes"] == 0
    assert fuzzed.engine.is_ready
