"""Preparation of requests before the model computes: JSON, fields, templates, tokens, grammars.

It is done in threads of its own, so that neither the event loop nor the engine waits for it.
Clients take turns, and none has more than its share of the threads. What takes much memory is done
one after another.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from moe_infinity.server.limits import PREPARING_S
from moe_infinity.server.refusals import Refused
from moe_infinity.system.memory import return_free_memory

NUM_THREADS = 4
SHARE = 2  # threads of one client at a time
RETURN_AFTER_S = 0.5
GONE = 499  # the status of a request whose client has left: nobody is refused

Made = TypeVar("Made")


class QueuedWork:
    """Work that waits for a thread."""

    def __init__(self, client: str, is_large: bool) -> None:
        self.client = client
        self.is_large = is_large
        self.has_come: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Preparation:
    """Threads, and whose turn it is. All methods are for the event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="moe-infinity-prepare")
        self._running: Counter[str] = Counter()  # threads by client
        self._has_large = False  # one of them reads a large body
        self._returns_memory = False
        self._waiting: dict[str, deque[QueuedWork]] = {}  # whose turn it is comes first

    async def run(self, request: HttpRequest, work: Callable[[], Made]) -> Made:
        """Return what `work` returns, or raise what it raises.

        Raises Refused: with status 499 if the client goes, and 503 if it takes too long. A thread
        that has begun goes on to its end, which counts against the client's share.
        """
        turn = QueuedWork(request.state.client, request.state.is_large)
        prepared = asyncio.create_task(self._prepared(turn, work))
        left = asyncio.create_task(gone(request))
        try:
            await asyncio.wait(
                {prepared, left}, timeout=PREPARING_S.most, return_when=asyncio.FIRST_COMPLETED
            )
            if prepared.done():
                return prepared.result()
            if left.done():
                raise Refused(GONE, "the client has gone", code="cancelled")
            message = f"preparing the request takes more than {PREPARING_S.most:g} s"
            raise Refused(PREPARING_S.status, message, type="server_error", code="too_slow")
        finally:
            for task in (prepared, left):
                task.cancel()
            await asyncio.gather(prepared, left, return_exceptions=True)

    async def _prepared(self, turn: QueuedWork, work: Callable[[], Made]) -> Made:
        await self._wait_for(turn)
        loop = asyncio.get_running_loop()
        try:
            future = self._threads.submit(work)
        except RuntimeError:
            self._end(turn)
            raise

        def ended(_: Future[Made]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end, turn)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    async def _wait_for(self, turn: QueuedWork) -> None:
        """Wait for a thread, which `_end` gives back."""
        self._waiting.setdefault(turn.client, deque()).append(turn)
        self._give_turns()
        try:
            await turn.has_come
        except asyncio.CancelledError:
            if turn.has_come.done() and not turn.has_come.cancelled():
                self._end(turn)
            raise

    def _has_room(self, turn: QueuedWork) -> bool:
        has_share = self._running[turn.client] < SHARE
        return has_share and not (turn.is_large and self._has_large)

    def _end(self, turn: QueuedWork) -> None:
        self._running[turn.client] -= 1
        self._running += Counter()  # without those that have none
        self._has_large = self._has_large and not turn.is_large
        self._give_turns()

    def _give_turns(self) -> None:
        """Give threads that are free to clients that wait, one after another."""
        for client in list(self._waiting):
            if self._running.total() >= NUM_THREADS:
                return
            turns = self._waiting.pop(client)
            while turns and turns[0].has_come.done():  # cancelled
                turns.popleft()
            if turns and self._has_room(turns[0]):
                turn = turns.popleft()
                self._running[client] += 1
                self._has_large = self._has_large or turn.is_large
                turn.has_come.set_result(None)
            if turns:
                self._waiting[client] = turns  # behind the others

    def return_memory_soon(self) -> None:
        """Give the memory of a large body back to the system, once nothing refers to it any more.
        The C library would keep most of it.
        """
        if self._returns_memory:
            return
        self._returns_memory = True
        asyncio.get_running_loop().call_later(RETURN_AFTER_S, self._return_memory)

    def _return_memory(self) -> None:
        self._returns_memory = False
        with suppress(RuntimeError):  # the server ends
            self._threads.submit(return_free_memory)

    def close(self) -> None:
        """Take no more work. Threads that run go on to their end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


async def gone(request: HttpRequest) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
