"""Runs the server: starts engine and HTTP server, drains and stops them.

After SIGTERM or Ctrl-C the server refuses new requests and finishes those it has. A second signal
stops these too.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from socket import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from moe_infinity.errors import ConfigError
from moe_infinity.model import MoE
from moe_infinity.server import limits
from moe_infinity.server.app import create_app
from moe_infinity.server.config import LOOPBACK, ServeConfig
from moe_infinity.server.connections import BACKLOG, Connections, most_connections
from moe_infinity.server.engine import Engine
from moe_infinity.server.few_lines import log_few_lines
from moe_infinity.server.prefix_options import store_of

# The engine's thread runs Python between torch's calls. With Python's 5 ms the event loop waited
# several times per request and answered /health late.
SWITCH_INTERVAL_S = 0.001
GLANCE_S = 0.1  # between looks at whether there was a second signal
QUEUE = 1_024  # connections that wait to be accepted
logger = logging.getLogger(__name__)
uvicorn_logger = logging.getLogger("uvicorn.error")


class Server(uvicorn.Server):
    """uvicorn's server with our signals: the first drains, the second stops.

    No signal ends the process before the model is closed.
    """

    def __init__(self, config: uvicorn.Config, *, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen with a queue that is longer than what is accepted at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUE)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Wait for what is under way, until a second signal."""
        stopping = asyncio.ensure_future(super().shutdown(sockets))
        while not stopping.done():
            if self.force_exit:
                for connection in list(self.server_state.connections):
                    connection.transport.abort()
                for task in list(self.server_state.tasks):
                    task.cancel()
            await asyncio.wait([stopping], timeout=GLANCE_S)
        await stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._on_exit()


def address_of(host: str, port: int) -> str:
    """HOST:PORT as in a URL, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def bound_sockets(config: ServeConfig) -> Iterator[list[socket]]:
    """Sockets bound to host and port, closed at the end. Raises ConfigError.

    They are bound before the model is loaded, so that a taken port is an error at once. They refuse
    connections until the server listens.
    """
    with ExitStack() as stack:
        with _explaining(config):
            sockets = asyncio.run(_bind(config.host, config.port))
        for listener in sockets:
            stack.enter_context(listener)
        yield sockets


async def _bind(host: str, port: int) -> list[socket]:
    """A bound socket for every address of `host`, as uvicorn binds them."""
    loop = asyncio.get_running_loop()
    async with await loop.create_server(asyncio.Protocol, host, port, start_serving=False) as bound:
        return [listener.dup() for listener in bound.sockets]  # the originals close with the loop


@contextmanager
def _explaining(config: ServeConfig) -> Iterator[None]:
    """Raise errors of sockets as ConfigError that names the address."""
    try:
        yield
    except (OSError, UnicodeError) as error:  # UnicodeError: an impossible host name
        address = address_of(config.host, config.port)
        is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
        hint = "\nhint: --port names another one" if is_taken else ""
        raise ConfigError(f"cannot listen on {address}: {error}{hint}") from error


def http_settings(app: FastAPI, config: ServeConfig) -> uvicorn.Config:
    """How HTTP is spoken."""
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        loop="asyncio",
        http=Connections(most_connections()),  # type: ignore[arg-type]
        ws="none",
        log_level="info",
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        timeout_keep_alive=limits.IDLE_S.most,
        proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,  # else a client says who it is
        h11_max_incomplete_event_size=limits.HEADER_BYTES.most,
    )


def serve_model(moe: MoE, config: ServeConfig, sockets: list[socket]) -> None:
    """Serve on bound sockets until a signal stops the server.

    Raises MoEInfinityError for a model that cannot be served, and ConfigError if another process
    listens on the address.
    """
    engine = Engine(moe, config, store_of(moe, config))
    app = create_app(moe, engine, config)
    if config.host not in LOOPBACK and not config.keys():
        logger.warning("anyone who reaches %s can use this model: no API key", config.host)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    log_few_lines()
    settings = http_settings(app, config)
    server = Server(settings, on_exit=engine.drain)
    with _explaining(config):
        for listener in sockets:
            listener.listen(BACKLOG)
    # uvicorn logs only addresses that it bound itself.
    address = address_of(config.host, sockets[0].getsockname()[1])
    uvicorn_logger.info("Uvicorn running on http://%s (Press CTRL+C to quit)", address)
    gc.collect()
    gc.freeze()  # what is loaded stays: looking through it again holds up everything for a moment
    engine.start()
    try:
        server.run(sockets)
    finally:
        engine.close()
        app.state.guard.preparation.close()
