"""A server on a real socket, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai

from moe_infinity import MoE
from moe_infinity.server.app import create_app
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.engine import Engine
from moe_infinity.server.prefix_options import store_of
from moe_infinity.server.serve import Server, http_settings


@dataclass(frozen=True, slots=True)
class Serving:
    url: str
    engine: Engine
    moe: MoE
    server: Server
    clients: ExitStack  # closed before the server: their sockets are not left to the collector

    def client(self, **options: Any) -> openai.OpenAI:
        settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 30} | options
        return self.clients.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", **settings))

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 30} | options
        return self.clients.enter_context(anthropic.Anthropic(base_url=self.url, **settings))

    def wait_until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.engine.state()
            time.sleep(0.005)

    @property
    def num_sequences(self) -> int:
        state = self.engine.state()
        return sum(state[name] for name in ("waiting", "prefilling", "decoding"))

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: self.num_sequences == 0)


@contextmanager
def serving(moe: MoE, **options: Any) -> Iterator[Serving]:
    """A server with these fields of ServeConfig."""
    defaults: dict[str, Any] = {"served_name": "tiny", "max_new_tokens": 64, "port": 0}
    config = ServeConfig(**(defaults | options))
    has_store = config.prompt_store is not None  # by default it is the user's
    engine = Engine(moe, config, store_of(moe, config) if has_store else None)
    app = create_app(moe, engine, config)
    settings = http_settings(app, config)
    server = Server(settings, on_exit=engine.drain)
    thread = threading.Thread(target=server.run)
    engine.start()
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        with ExitStack() as clients:
            yield Serving(f"http://127.0.0.1:{port}", engine, moe, server, clients)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        engine.close()
        app.state.guard.preparation.close()
