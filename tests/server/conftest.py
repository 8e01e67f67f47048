"""A model the server's tests share, in float32: what neighbours do to it is then far from a tie."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_infinity import MoE
from tests.server.driving import words
from tests.server.serving import Serving, serving

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture(autouse=True)
def no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test uses TLS, and every client would read them all: 17 ms."""
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *args, **kwargs: None)


@pytest.fixture(scope="module")
def moe(tiny_checkpoint: Path) -> Iterator[MoE]:
    with MoE(tiny_checkpoint, host_memory="50%", dtype="float32") as moe:
        yield moe


@pytest.fixture(scope="module")
def demo() -> Iterator[MoE]:
    with MoE(DEMO, host_memory="100%", dtype="float32") as moe:
        yield moe


TEMPLATE = (
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
    "{% for m in messages %}{{ m['content'] }} {% endfor %}w77"
)


@pytest.fixture(scope="module")
def server(moe: MoE) -> Iterator[Serving]:
    moe.tokenizer.chat_template = TEMPLATE
    with serving(moe, max_batch=4, max_queue=20) as server:
        yield server


@pytest.fixture
def ended(server: Serving, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> str:
    """The model ends its answer by itself; this is the answer."""
    num_tokens = next(n for n in range(3, 12) if expected[n] not in expected[:n])
    monkeypatch.setattr(server.moe.model.generation_config, "eos_token_id", expected[num_tokens])
    return words(expected[:num_tokens])
