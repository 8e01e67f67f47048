"""The port at which expert hosts call their head."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread

from moe_infinity.cluster.wire import Wire
from moe_infinity.errors import HostLost
from moe_infinity.system.threads import Seldom, keep_running

MOST_STRANGERS = 64  # that may greet at once; each has a thread and a descriptor
GLANCE_S = 0.5

logger = logging.getLogger(__name__)


class Port:
    """Hands on those who know a key, each in a thread of its own. Of too many who have not yet
    shown that they do, the one that has taken longest is cut off.
    """

    def __init__(self, listen_on: str, key: bytes, answer: Callable[[Wire], None]) -> None:
        self._key = key
        self._answer = answer
        self._strangers: deque[socket.socket] = deque()  # the first came first
        self._changing = Lock()  # of these
        self._may_complain = Seldom()
        self._is_closed = Event()
        self._listener = socket.create_server((listen_on, 0), backlog=MOST_STRANGERS)
        self._listener.settimeout(GLANCE_S)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        turns = (self._accept, "the port of expert hosts")
        Thread(target=keep_running, args=turns, name="moe-infinity-hosts", daemon=True).start()

    def close(self) -> None:
        """Take no more calls."""
        self._is_closed.set()
        self._listener.close()

    def _accept(self) -> bool:
        try:
            connected, _ = self._listener.accept()
        except OSError as error:
            if self._is_closed.is_set():
                return False
            if isinstance(error, TimeoutError):
                return True
            raise
        with self._changing:
            self._strangers.append(connected)
            if len(self._strangers) > MOST_STRANGERS:
                with suppress(OSError):  # it has just hung up; its thread closes it
                    self._strangers.popleft().shutdown(socket.SHUT_RDWR)
        try:
            Thread(target=self._greet, args=(connected,), daemon=True).start()
        except RuntimeError:  # the system has no more threads
            self._forget(connected)
            connected.close()
            raise
        return True

    def _greet(self, connected: socket.socket) -> None:
        try:
            wire = Wire(connected, self._key, is_caller=False)
        except HostLost as error:
            if self._may_complain():
                logger.warning("a caller at the port of expert hosts was refused: %s", error)
            return
        finally:
            self._forget(connected)
        self._answer(wire)

    def _forget(self, connected: socket.socket) -> None:
        with self._changing, suppress(ValueError):  # it was cut off
            self._strangers.remove(connected)
