"""Connections have limits of number and time.

uvicorn waits without end for the first request of a connection, and for a client that reads nothing
of its answer; where no file can be opened, asyncio's loop tries on and on to accept.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moe_infinity.server import limits
from moe_infinity.system.process_limits import openable_files

RESERVED = 32  # descriptors for files of the model, expert hosts and the log
FEWEST = 4
BACKLOG = 32  # connections that are accepted at once
ROUNDS = 4  # of the loop, until the first of them has been closed
CHUNK_END = b"\r\n"
logger = logging.getLogger(__name__)


class Connections:
    """All connections of a server. Calling it makes one, as uvicorn wants it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the one that is idle longest is first

    def __call__(self, **settings: Any) -> Connection:
        return Connection(self, **settings)

    def opened(self, connection: Connection) -> None:
        """Count a connection, and close one that is idle if there are too many."""
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self._most:
            logger.warning("there are %d connections: idle ones are closed", len(self._open))
            oldest = next(iter(self._idle))
            self.closed(oldest)
            oldest.end()

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def note(self, connection: Connection) -> None:
        """Take note of whether a request is under way."""
        if not connection.is_idle:
            self._idle.pop(connection, None)
        elif connection in self._open and connection not in self._idle:
            self._idle[connection] = None


class Connection(H11Protocol):
    """One connection, whose client has a limited time for each thing that it has to do."""

    def __init__(self, connections: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = None  # of what the client has to send next
        self._unread: asyncio.TimerHandle | None = None  # of what it has to read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_client(limits.HEADER_S.most)
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        self._connections.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_crumbs(data):
            self.end()
            return
        if self.transport.get_write_buffer_size() == 0:
            self._stop_watching()
        super().data_received(data)
        if not self.is_idle:
            self._stop_waiting()
        elif self._timer is None:  # the beginning of a request behind an answer
            self._wait_for_client(limits.HEADER_S.most)
        self._connections.note(self)

    def on_response_complete(self) -> None:
        self._stop_waiting()
        super().on_response_complete()
        self._connections.note(self)
        self._watch_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        if self.is_idle:
            self._watch_reader()

    @property
    def is_idle(self) -> bool:
        """True between requests, and before the first is whole."""
        return self.cycle is None or self.cycle.response_complete

    def end(self) -> None:
        """Close the connection at once, also one that is to be closed once all of it was read."""
        self._stop_waiting()
        self._stop_watching()
        self.transport.abort()

    def _watch_reader(self) -> None:
        """Give the client its time to read what lies ready for it. Nothing tells when it has read
        the last of an answer, so that is looked at then.
        """
        if self._unread is None and self.transport.get_write_buffer_size() > 0:
            self._unread = self.loop.call_later(limits.UNREAD_S.most, self._end_if_unread)

    def _end_if_unread(self) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size() > 0:
            self.end()

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _wait_for_client(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self.end)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_in_crumbs(self, data: bytes) -> bool:
        """True for a body in chunks of a few bytes, each of which costs as much as a large one."""
        if len(data) < limits.KIB:
            return False
        if self.conn.their_state is h11.SEND_BODY:
            is_chunked = (b"transfer-encoding", b"chunked") in self.headers
        else:
            head, _, data = data.partition(2 * CHUNK_END)
            is_chunked = b"chunked" in head.lower()
        return is_chunked and data.count(CHUNK_END) * limits.CHUNK_BYTES.most > 2 * len(data)


def most_connections() -> int:
    """How many there may be: the limit, or what the process may open beside what it has open."""
    most = limits.CONNECTIONS.most
    with suppress(OSError):  # no /proc
        if (files := openable_files()) is not None:
            most = min(most, files - RESERVED - ROUNDS * BACKLOG)
    return max(most, FEWEST)
