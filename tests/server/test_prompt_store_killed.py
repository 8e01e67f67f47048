"""A server that is killed while it writes prompts leaves files that the next one can rely on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.driving import TOLERANCE
from tests.server.test_process import DEMO, NEW, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROMPT = [(7 * at * at + at) % 3000 + 100 for at in range(450)]


def asked(url: str) -> tuple[str, int]:
    """An answer, and how many tokens of its prompt were known."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
    for likeliest in answer["choices"][0]["logprobs"]["top_logprobs"]:
        second, first = sorted(likeliest.values())[-2:]
        assert first - second > 2 * TOLERANCE, "take another prompt"
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


def test_a_kill_in_the_middle_of_writing_costs_no_more_than_what_was_not_written(tmp_path):
    serve = [*NEW, DEMO, "--dtype", "float32", "--max-batch", "2", "--prompt-store"]
    with started(*serve, "off") as (url, _):
        expected, known = asked(url)
    assert known == 0
    num_known = []
    for num_files in (1, 5, 12):
        store = tmp_path / str(num_files)
        with started(*serve, store) as (url, process):
            asked(url)
            wait_for(store, num_files)
            process.kill()
        with started(*serve, store) as (url, _):
            text, known = asked(url)
            assert text == expected
            num_known.append(known)
            stats = httpx.get(f"{url}/stats", timeout=60).json()["engine"]["prompt_store"]
            assert stats["tokens"] == known
    assert all(known >= 16 for known in num_known)


def wait_for(folder: Path, num_files: int) -> None:
    end = time.monotonic() + 60
    while len(list(folder.rglob("*.block"))) < num_files:
        assert time.monotonic() < end
