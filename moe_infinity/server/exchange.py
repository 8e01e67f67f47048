"""One HTTP request that generates: its sequences in the engine, its answer and its client.

engine's thread --queue--> event loop --> one body, or chunks of a stream
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from moe_infinity.server.answers import Answer
from moe_infinity.server.engine import Engine
from moe_infinity.server.pauses import LIFE_PERIOD_S, with_pauses
from moe_infinity.server.preparation import GONE, gone
from moe_infinity.server.refusals import Refused
from moe_infinity.server.routes import Guard
from moe_infinity.server.sequences import Output, QueueFull, Request, Running

logger = logging.getLogger(__name__)
PROGRESS_PERIOD_S = 0.25  # between two looks at how far a prompt is


class Exchange:
    """One request from submission to the last byte of its answer.

    The sequences are cancelled when the answer ends, however it ends.
    """

    def __init__(self, engine: Engine, guard: Guard, answer: Answer, request: HttpRequest) -> None:
        self._engine = engine
        self._guard = guard
        self._answer = answer
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self._began = time.monotonic()
        self._said: dict[int, int] = {}  # tokens of each prompt that were read
        self._running: list[Running] = []
        self._later: deque[Running] = deque()  # of these, those that wait here
        self._at_once = 0  # how many may be in the engine

    def running(self, requests: Sequence[Request]) -> list[Running]:
        """Return sequences that are to be submitted, from any thread."""
        return [
            self._engine.running(each, partial(self._deliver, choice))
            for choice, each in enumerate(requests)
        ]

    def submit(self, running: list[Running], at_once: int | None = None) -> None:
        """Queue the sequences, or so many of them, and the others as these end. Raises what
        `Engine.submit` raises.
        """
        first = running[:at_once]
        self._engine.submit(first)
        self._running = running
        self._at_once = len(first)
        self._later.extend(running[len(first) :])

    async def _submit_later(self, num_open: int) -> None:
        """Queue those that wait here, as far as there is room. Raises QueueFull if others have
        taken it until the deadline.
        """
        while self._later and (num_queued := num_open - len(self._later)) < self._at_once:
            try:
                self._engine.submit([self._later[0]], is_begun=True)
            except QueueFull:
                if num_queued > 0:  # the next end of one of them tries again
                    return
                if time.monotonic() > self._later[0].deadline:
                    raise
                await asyncio.sleep(PROGRESS_PERIOD_S)
            else:
                self._later.popleft()

    def _deliver(self, choice: int, output: Output) -> None:
        """Put an output into the queue, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (choice, output))

    @property
    def media_type(self) -> str:
        """The media type of the stream."""
        return self._answer.media_type

    def cancel(self) -> None:
        self._engine.cancel(self._running)

    async def body(self) -> Response:
        """The whole answer in one body.

        Raises the error of a choice that failed, and Refused with status 499 if the client leaves.
        """
        work = asyncio.create_task(self._exhaust())
        watch = asyncio.create_task(gone(self._request))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Refused(GONE, "the client has gone", code="cancelled")
            work.result()
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
            self.cancel()
        return await run_in_threadpool(lambda: JSONResponse(self._answer.body()))

    async def chunks(self, *, at_once: bool = True) -> AsyncGenerator[str, None]:
        """Events of a stream, the last of which may be an error.

        The first events come at once, and signs of life while there is nothing to say. Without
        `at_once` none comes before the first token: until then whoever forwards the stream may ask
        another replica.
        """
        first = self._answer.first_chunks()
        is_silent = not at_once
        if at_once:
            for chunk in (*first, *self._progress()):
                yield chunk
            first = []
        period_s = PROGRESS_PERIOD_S if self._answer.shows_progress else LIFE_PERIOD_S
        said_s = time.monotonic()
        try:
            async with aclosing(with_pauses(self._outputs(), period_s)) as outputs:
                async for each in outputs:
                    chunks = [*first, *self._progress()]
                    if each is not None:
                        chunks.append(self._answer.chunk(*each))
                        first = []
                        is_silent = False
                    elif is_silent:
                        continue
                    if not any(chunks) and time.monotonic() - said_s >= LIFE_PERIOD_S:
                        chunks = [self._answer.life_chunk()]  # also while a call is written
                    for chunk in filter(None, chunks):
                        said_s = time.monotonic()
                        yield chunk
        except Exception as error:
            refused = self._guard.note(self._request, error)
            for chunk in (*first, self._answer.error_chunk(refused)):
                yield chunk
            return
        for chunk in (*first, *self._answer.last_chunks()):
            yield chunk

    def _progress(self) -> Iterator[str]:
        """Events for the prompts of which more is read than was said."""
        if not self._answer.shows_progress:
            return
        for index, sequence in enumerate(self._running):
            progress = sequence.progress(self._began)
            if progress.num_read != self._said.get(index):
                self._said[index] = progress.num_read
                yield self._answer.progress_chunk(index, progress)

    async def _exhaust(self) -> None:
        async for _ in self._outputs():
            pass

    async def _outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        """(choice, output) as they come, until every choice has ended.

        Each is added to the answer before it is yielded. At the end the metrics get the times in
        seconds, and the log gets times and token counts. Raises the error of a choice that failed.
        """
        is_first = True
        num_open = len(self._running)
        outcome = "ended early"
        try:
            while num_open:
                choice, output = await self._queue.get()
                if output.error is not None:
                    raise output.error
                if is_first:
                    is_first = False
                    self._guard.metrics.ttft_s.observe(time.monotonic() - self._began)
                num_open -= output.is_last
                self._answer.add(choice, output)
                if output.is_last:
                    await self._submit_later(num_open)
                yield choice, output
            outcome = "done"
        finally:
            seconds = time.monotonic() - self._began
            self._guard.metrics.request_s.observe(seconds)
            usage = self._answer.usage()
            sizes = usage["prompt_tokens"], usage["completion_tokens"]
            logger.info("%s: %d + %d tokens in %.2f s", outcome, *sizes, seconds)


class ExchangeStream(StreamingResponse):
    """An answer that sends each chunk at once, and at its end cancels what is left.

    A generator's own `finally` is not enough: the stream may end before the generator has begun.
    """

    def __init__(self, exchange: Exchange, *, at_once: bool) -> None:
        self._exchange = exchange
        self._chunks = exchange.chunks(at_once=at_once)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._chunks, media_type=exchange.media_type, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.cancel()
            await self._chunks.aclose()
