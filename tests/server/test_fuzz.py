"""Requests made up from /openapi.json, right and wrong ones: each has an answer it documents, and
none is an error of ours.
"""

from __future__ import annotations

from collections import Counter

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

from moe_infinity import MoE
from tests.server.serving import serving

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
openapi_checks = pytest.importorskip("schemathesis.specs.openapi.checks")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_CASES = 300
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize",
)  # fmt: skip
CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def fuzzed(moe: MoE):
    """Short contexts: a request that is taken is soon done."""
    with serving(moe, max_context=48, max_queue=200) as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_brings_an_error_of_ours(fuzzed, path, mode):
    operation = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")[path]["POST"]
    made_up = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])
    statuses: Counter[int] = Counter()

    @given(st.data())
    @settings(
        max_examples=NUM_CASES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(data):
        try:
            case = data.draw(made_up)
        except schemathesis.errors.InvalidSchema:  # it cannot negate every list of a union
            reject()
        answer = case.call(timeout=60)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    ask()
    assert statuses[400 if mode == "NEGATIVE" else 200] > 0, statuses
    fuzzed.wait_until_idle()
    assert fuzzed.engine.state()["kv_bytes"] == 0
    assert fuzzed.engine.is_ready


def test_every_documented_route_is_there(fuzzed):
    document = httpx.get(f"{fuzzed.url}/openapi.json", timeout=60).json()
    for path in document["paths"]:
        assert httpx.get(fuzzed.url + path.format(name="tiny"), timeout=60).status_code in (
            200,
            405,
        )
