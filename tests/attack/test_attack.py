"""A server under attack: a client beside it gets its answers, right and soon.

`make attack` runs this. ATTACK_SECONDS is the time of each kind, MIXED_SECONDS that of all of them
together. Results are a line of JSON each in runs/attack.jsonl. Needs the right to make a memory
group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attack.driving import (
    GOOD,
    Seen,
    Server,
    attacked_server,
    attackers,
    watching,
)
from tests.attack.kinds import KINDS

pytestmark = [pytest.mark.attack, pytest.mark.timeout(3_600)]
SECONDS = float(os.environ.get("ATTACK_SECONDS", "60"))
MIXED_SECONDS = float(os.environ.get("MIXED_SECONDS", "600"))
NUM_ATTACKERS = 4
WORST_S = 2.0
WORST_HEALTH_S = 0.5
MORE_MEMORY = 256 << 20  # a body of 4 MiB, or a schema of 512 KiB while it is compiled, and caches
MORE_LOG = 20_000  # bytes
RESULTS = Path("runs/attack.jsonl")


def report(name: str, **values: Any) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as results:
        results.write(json.dumps({"attack": name, **values}) + "\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with attacked_server(tmp_path_factory.mktemp("attack")) as server:
        yield server


def result_of(seen: Seen, server: Server, log_bytes: int) -> dict[str, Any]:
    return {
        "asked": len(seen.seconds),
        "worst_s": round(seen.worst_s, 2),
        "worst_health_s": round(max(seen.health_s), 2),
        "memory_mb": round((max(seen.resident) - seen.resident[0]) / 1e6),
        "log_bytes": server.log.stat().st_size - log_bytes,
        "failures": len(seen.failures),
        "texts": len(seen.texts),
        "has_ended": server.has_ended,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_beside_an_attack_is_served(server, kind):
    log_bytes = server.log.stat().st_size
    with watching(server) as seen, attackers(server, kind, SECONDS, NUM_ATTACKERS) as tried:
        pass
    result = result_of(seen, server, log_bytes)
    report(kind, tried=tried[kind], **result)
    assert tried[kind] > 0
    assert not server.has_ended
    assert not seen.failures
    assert len(seen.texts) == 1
    assert seen.worst_s < WORST_S
    assert max(seen.health_s) < WORST_HEALTH_S
    assert result["memory_mb"] < MORE_MEMORY / 1e6
    assert result["log_bytes"] < MORE_LOG


def test_good_clients_beside_mixed_abuse_wait_at_most_twice_as_long(server):
    """Four with keys, without and then with eight that do everything at once."""
    results = []
    for num in (0, 8):
        seconds = MIXED_SECONDS if num else min(MIXED_SECONDS, 60)
        with (
            watching(server, GOOD[0]) as first,
            watching(server, GOOD[1]) as second,
            watching(server, GOOD[2]) as third,
            watching(server, GOOD[3]) as fourth,
            attackers(server, "all", seconds if num else 0, num) as tried,
        ):
            if not num:
                import time

                time.sleep(seconds)
        good = (first, second, third, fourth)
        together = Seen(seconds=[each for seen in good for each in seen.seconds])
        failures = [each for seen in good for each in seen.failures]
        texts = {each for seen in good for each in seen.texts}
        results.append(together.p95_s())
        report(
            "mixed" if num else "nobody",
            tried=sum(tried.values()),
            asked=len(together.seconds),
            p95_s=round(together.p95_s(), 3),
            worst_s=round(together.worst_s, 2),
            worst_health_s=round(max(max(each.health_s) for each in good), 2),
            memory_mb=round((max(first.resident) - first.resident[0]) / 1e6),
            failures=failures[:3],
            texts=len(texts),
            has_ended=server.has_ended,
        )
        assert not server.has_ended
        assert not failures
        assert len(texts) == 1
    assert results[1] <= 2 * results[0]
