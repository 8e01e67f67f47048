"""guidellm, a benchmark of servers."""

from __future__ import annotations

import json

import pytest

from tests.clients.environments import ROOT

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(600),
    pytest.mark.environment("guidellm"),
]


def test_guidellm_measures_requests_and_none_fails(client, proxy, record_property):
    record_property("client", "guidellm")
    record_property("kind", "stream")
    command = [
        *("guidellm", "run", "--disable-console-interactive", "--profile", "kind=synchronous"),
        *("--backend", f"kind=openai_http,target={proxy.url},model=demo"),
        *("--tokenizer", f"kind=huggingface_auto,model={ROOT / 'models' / 'demo-long'}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8"),
        *("--constraint", "kind=max_requests,count=3"),
        *("--output", "kind=json,path=report.json"),
    ]
    outcome = client.run(command, limit_s=300, variables={"HF_HUB_OFFLINE": "1"})
    assert proxy.refused == []
    assert outcome.code == 0, outcome
    assert len(proxy.generated) >= 3
    assert all(exchange.ended_well for exchange in proxy.generated)
    report = json.loads((client.work / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] >= 3, totals
