"""A model the server's tests share, in float32: what neighbours do to it is then far from a tie."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_infinity import MoE
from moe_infinity.server.few_lines import LOGGERS, FewLines
from tests.server.driving import LONG, OTHER, SHORT, Client, make_engine, run_all, words
from tests.server.serving import Serving, serving

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"

TEMPLATE = (
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
    "{% for m in messages %}{{ m['content'] }} {% endfor %}w77"
)


@pytest.fixture(autouse=True)
def no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test uses TLS, and every client would read them all: 17 ms."""
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *args, **kwargs: None)


@pytest.fixture(autouse=True)
def every_line_is_logged() -> None:
    """`serve`, called by an earlier test, left a filter that drops some of many like lines."""
    for name in LOGGERS:
        filters = logging.getLogger(name).filters
        filters[:] = [each for each in filters if not isinstance(each, FewLines)]


@pytest.fixture(scope="module")
def moe(tiny_checkpoint: Path) -> Iterator[MoE]:
    with MoE(tiny_checkpoint, host_memory="50%", dtype="float32") as moe:
        moe.tokenizer.chat_template = TEMPLATE
        yield moe


@pytest.fixture(scope="module")
def demo() -> Iterator[MoE]:
    with MoE(DEMO, host_memory="100%", dtype="float32") as moe:
        yield moe


@pytest.fixture(scope="module")
def server(moe: MoE) -> Iterator[Serving]:
    with serving(moe, max_batch=4, max_queue=20) as server:
        yield server


@pytest.fixture
def ended(server: Serving, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> str:
    """The model ends its answer by itself; this is the answer."""
    num_tokens = next(n for n in range(3, 12) if expected[n] not in expected[:n])
    monkeypatch.setattr(server.moe.model.generation_config, "eos_token_id", expected[num_tokens])
    return words(expected[:num_tokens])


# The page in a browser, see page_driving.py


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.server.page_driving import CHROMIUM, sync_api

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with MoE(DEMO, host_memory="50%", dtype="float32") as moe, serving(moe) as served:
        yield served


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Pages that must not complain on their console, but of an answer the test expects."""
    contexts = []
    complaints = []

    def open_page(url: str, *, may_say: str = "nothing", **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()

        def note(message: Any) -> None:
            if message.type in ("error", "warning") and may_say not in message.text:
                complaints.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def alone(moe) -> dict[str, Client]:
    engine = make_engine(moe, max_batch=1)
    clients = {"long": Client(engine, LONG), "short": Client(engine, SHORT)}
    clients["other"] = Client(engine, OTHER)
    run_all(engine, *clients.values())
    return clients


@pytest.fixture
def few_slots(tiny_checkpoint) -> Iterator[MoE]:
    with MoE(tiny_checkpoint, host_memory="75%", dtype="float32", preload="wait") as moe:
        moe.preload()
        yield moe
