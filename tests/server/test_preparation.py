"""Requests are prepared beside the event loop, with a share for each client and limits of time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from moe_infinity.server import limits, preparation, templates
from moe_infinity.server.preparation import NUM_THREADS, SHARE, Preparation
from moe_infinity.server.refusals import Refused
from moe_infinity.server.rendering import Renderers, TemplateRaised, TemplateTooSlow
from tests.server.serving import serving

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 2,
    "temperature": 0,
}
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'x' * 4000000000 }}"
MUCH = "{% for a in range(99999) %}{{ 'x' * 4000 }}{% endfor %}"
LONG = "{% for a in range(9000) %}{{ 'x' * 4000 }}{% endfor %}"


def request_of(client: str, *, leaves: asyncio.Event | None = None, is_large: bool = False) -> Any:
    async def receive() -> dict[str, str]:
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    state = SimpleNamespace(client=client, is_large=is_large)
    return SimpleNamespace(state=state, receive=receive)


def run(main: Callable[[Preparation], Coroutine[Any, Any, None]]) -> None:
    async def with_one() -> None:
        made = Preparation()
        try:
            await asyncio.wait_for(main(made), 60)
        finally:
            made.close()

    asyncio.run(with_one())


def test_a_client_has_its_share_of_the_threads_and_others_have_theirs():
    """However much one client asks, another's work begins at once; later its own goes on."""
    release = threading.Event()
    running: list[str] = []

    def work(client: str) -> str:
        running.append(client)
        assert release.wait(30)
        return client

    async def main(prepared: Preparation) -> None:
        greedy = [
            asyncio.create_task(prepared.run(request_of("a"), lambda: work("a"))) for _ in range(10)
        ]
        await asyncio.sleep(0.1)
        assert running == ["a"] * SHARE
        other = asyncio.create_task(prepared.run(request_of("b"), lambda: work("b")))
        await asyncio.sleep(0.1)
        assert running == [*["a"] * SHARE, "b"]
        release.set()
        assert await other == "b"
        assert await asyncio.gather(*greedy) == ["a"] * 10

    run(main)


def test_clients_that_wait_take_turns():
    order: list[str] = []
    releases = [threading.Event() for _ in range(NUM_THREADS)]

    async def main(prepared: Preparation) -> None:
        first = [
            asyncio.create_task(prepared.run(request_of(str(each)), partial(release.wait, 30)))
            for each, release in enumerate(releases)
        ]
        await asyncio.sleep(0.1)
        rest = [
            asyncio.create_task(prepared.run(request_of(name), partial(order.append, name)))
            for name in "aaabbc"
        ]
        await asyncio.sleep(0.1)
        releases[0].set()  # its thread does all of the rest, one after the other
        await asyncio.gather(*rest)
        for release in releases:
            release.set()
        await asyncio.gather(*first)

    run(main)
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert sorted(order[3:5]) == ["a", "b"]
    assert order[5:] == ["a"]


def test_work_of_a_client_that_has_gone_is_never_begun():
    release = threading.Event()
    begun: list[int] = []

    async def main(prepared: Preparation) -> None:
        busy = [
            asyncio.create_task(prepared.run(request_of("a"), lambda: release.wait(30)))
            for _ in range(SHARE)
        ]
        await asyncio.sleep(0.1)
        leaves = asyncio.Event()
        late = asyncio.create_task(
            prepared.run(request_of("a", leaves=leaves), lambda: begun.append(1))
        )
        await asyncio.sleep(0.1)
        leaves.set()
        with pytest.raises(Refused) as caught:
            await late
        assert caught.value.status_code == 499
        release.set()
        await asyncio.gather(*busy)

    run(main)
    assert not begun


def test_work_has_a_limit_of_time_and_a_thread_that_goes_on_counts(monkeypatch):
    limit = replace(limits.PREPARING_S, most=0.2)  # type: ignore[arg-type]
    monkeypatch.setattr(preparation, "PREPARING_S", limit)
    release = threading.Event()

    async def main(prepared: Preparation) -> None:
        for _ in range(SHARE + 1):
            with pytest.raises(Refused, match="more than"):
                await prepared.run(request_of("a"), lambda: release.wait(30))
        assert await prepared.run(request_of("b"), lambda: 1) == 1
        release.set()
        await asyncio.sleep(0.2)
        assert await prepared.run(request_of("a"), lambda: 2) == 2

    run(main)


def test_large_bodies_are_prepared_one_after_another():
    """Small ones of the same client and of others go on."""
    release = threading.Event()
    running: list[str] = []

    def work(name: str) -> None:
        running.append(name)
        assert release.wait(30)

    async def main(prepared: Preparation) -> None:
        large = [
            asyncio.create_task(
                prepared.run(request_of(name, is_large=True), partial(work, f"large {name}"))
            )
            for name in ("a", "b", "c")
        ]
        await asyncio.sleep(0.1)
        assert running == ["large a"]
        small = [
            asyncio.create_task(prepared.run(request_of(name), partial(work, f"small {name}")))
            for name in ("a", "d")
        ]
        await asyncio.sleep(0.1)
        assert running == ["large a", "small a", "small d"]
        release.set()
        await asyncio.gather(*large, *small)
        assert running[-2:] == ["large b", "large c"]

    run(main)


def test_the_memory_of_large_bodies_is_given_back_once_for_several(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(preparation, "RETURN_AFTER_S", 0.05)
    monkeypatch.setattr(preparation, "return_free_memory", lambda: calls.append(1))

    async def main(prepared: Preparation) -> None:
        for _ in range(5):
            prepared.return_memory_soon()
        await asyncio.sleep(0.3)
        assert len(calls) == 1
        prepared.return_memory_soon()
        await asyncio.sleep(0.3)
        assert len(calls) == 2

    run(main)


def test_an_error_is_that_of_the_work():
    def fail() -> None:
        raise KeyError("what")

    async def main(prepared: Preparation) -> None:
        with pytest.raises(KeyError, match="what"):
            await prepared.run(request_of("a"), fail)
        assert await prepared.run(request_of("a"), lambda: 1) == 1

    run(main)


# templates


def arguments(template: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"conversations": [messages], "chat_template": template, "bos_token": "<s>"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained("models/demo")


@pytest.fixture(scope="module")
def renderer():
    made = Renderers(1)
    yield made
    made.close()


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def test_a_template_is_rendered_as_transformers_does(renderer):
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    assert renderer.render(arguments(template), soon()) == "<s>[user] Hi"


def test_a_template_may_raise_and_the_next_is_rendered(renderer):
    with pytest.raises(TemplateRaised, match="no such role"):
        renderer.render(arguments("{{ raise_exception('no such role') }}"), soon())
    assert renderer.render(arguments("a"), soon()) == "a"


def test_a_template_that_loops_is_ended(renderer):
    renderer.start()
    began = time.monotonic()
    with pytest.raises(TemplateTooSlow):
        renderer.render(arguments(LOOP), soon(1))
    assert time.monotonic() - began < 5
    assert renderer.render(arguments("a"), soon()) == "a"


@pytest.mark.parametrize("template", [HUGE, MUCH, LONG], ids=["huge", "much", "long"])
def test_a_template_that_makes_too_much_is_refused(renderer, template):
    with pytest.raises(TemplateRaised, match="memory|longer|process ended|ends its process"):
        renderer.render(arguments(template), soon())
    assert renderer.render(arguments("a"), soon()) == "a"


def test_the_process_is_told_no_secret(monkeypatch):
    monkeypatch.setenv("MOE_INFINITY_API_KEY", "s3cret")
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    renderers = Renderers(1)
    try:
        renderers.start()
        process = renderers._all[0]._process
        assert process is not None
        environ = Path(f"/proc/{process.pid}/environ")
        if environ.exists():
            assert b"s3cret" not in environ.read_bytes()
            assert b"PYTHONPATH" in environ.read_bytes()
    finally:
        renderers.close()


def test_where_no_process_can_be_started_templates_are_rendered_here(
    tokenizer, monkeypatch, caplog
):
    renderers = Renderers(1)

    def fail() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(renderers, "start", fail)
    monkeypatch.setattr(templates, "shared_renderers", lambda: renderers)
    text = templates.Rendering(tokenizer).text(CHAT["messages"], add_generation_prompt=True)
    assert "Hello" in text
    assert "without limits" in caplog.text


def test_another_conversation_is_rendered_beside_one_that_loops():
    renderers = Renderers(2)
    try:
        renderers.start()
        with ThreadPoolExecutor() as threads:
            loop = threads.submit(renderers.render, arguments(LOOP), soon(20))
            time.sleep(0.2)
            assert renderers.render(arguments("a"), soon(15)) == "a"
            assert not loop.done()
            renderers.close()
            with pytest.raises(TemplateTooSlow):
                loop.result(30)
    finally:
        renderers.close()


def test_two_threads_may_end_a_process_at_once(renderer):
    renderer.start()
    first = renderer._all[0]
    process = first._process

    class EndedMeanwhile:
        def kill(self) -> None:
            process.kill()
            first.close()

        def wait(self) -> None:
            process.wait()

    first._process = EndedMeanwhile()
    first.close()
    assert renderer.render(arguments("a"), soon()) == "a"


def test_a_process_that_was_killed_is_started_anew(renderer):
    renderer.start()
    renderer._all[0]._process.kill()
    with pytest.raises(TemplateTooSlow):
        renderer.render(arguments("a"), soon())
    assert renderer.render(arguments("a"), soon()) == "a"


def test_a_looping_template_keeps_no_completion_waiting(moe, monkeypatch):
    monkeypatch.setattr(
        "moe_infinity.server.templates.RENDERING_S", replace(limits.RENDERING_S, most=2)
    )
    monkeypatch.setattr(moe.tokenizer, "chat_template", LOOP, raising=False)
    with serving(moe) as server, ThreadPoolExecutor() as threads:
        url = f"{server.url}/v1"
        chat = threads.submit(httpx.post, f"{url}/chat/completions", json=CHAT, timeout=60)
        body = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{url}/completions", json=body, timeout=10).status_code == 200
        answer = chat.result(60)
    assert answer.status_code == 400
    assert "the chat template" in answer.json()["error"]["message"]
