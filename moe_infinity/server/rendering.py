"""Renders chat templates in a process of its own, with limits of time and memory.

A template is a program that comes with a checkpoint: it may loop, or make gigabytes of text. The
process runs this file. It answers messages over a socket, one after another, and is ended when one
takes too long. It keeps nothing from one to the next.

    message   8 bytes of its length, little-endian, then JSON in UTF-8
    asked     the arguments of transformers' `render_jinja_template`
    answered  {"text": ...}, or {"error": ...} with the template's words
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

from moe_infinity.server.limits import MIB, RENDERED, RENDERING_S
from moe_infinity.system.process_limits import limit_memory, limit_time

MEMORY = 256 * MIB  # of address space, beyond what the process begins with
NUM_PROCESSES = 2
SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
START_S = 60.0  # imports, on a busy machine
TOO_SLOW = f"the chat template takes more than {RENDERING_S.most} s, or ends its process"
ROOT = Path(__file__).parents[2]  # of the package


class TemplateRaised(Exception):
    """A chat template does not take a conversation."""


class TemplateTooSlow(TemplateRaised):
    """A chat template needs more time than it may have."""


class Renderer:
    """One process. It is started when it is first needed, and anew after it was ended. Not safe to
    use from several threads at once.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it runs, and wait until it takes templates. Raises
        TemplateTooSlow, and OSError where no process can be started.
        """
        if self._socket is None:
            self._start()

    def render(self, arguments: dict[str, Any], deadline: float) -> str:
        """Return the text for the arguments of `render_jinja_template`, as JSON can say them.

        Raises TemplateRaised with the template's words, and TemplateTooSlow at `deadline`, of
        `time.monotonic`.
        """
        assert self._socket is not None
        message = json.dumps(arguments, default=str).encode()
        try:
            send(self._socket, message, deadline)
            answer = json.loads(receive(self._socket, deadline))
        except OSError as error:  # also at the deadline
            self.close()
            raise TemplateTooSlow(TOO_SLOW) from error
        if "error" in answer:
            raise TemplateRaised(answer["error"])
        return str(answer["text"])

    def close(self) -> None:
        """End the process. Another thread may do so at the same time."""
        ours = self._socket
        self._socket = None
        if ours is not None:
            ours.close()
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        # A template is not trusted: the process gets no secret that it could tell.
        told = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**told, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the server
            )
        self._socket = ours
        try:
            receive(ours, time.monotonic() + START_S)
        except OSError as error:
            self.close()
            raise TemplateTooSlow("the process for chat templates does not start") from error


class Renderers:
    """A few processes, of which the second is started when the first is busy.

    Safe to use from several threads.
    """

    def __init__(self, num: int = NUM_PROCESSES) -> None:
        self._all = [Renderer() for _ in range(num)]
        self._idle: LifoQueue[Renderer] = LifoQueue()  # so that the same one is taken, if it can be
        for renderer in reversed(self._all):
            self._idle.put(renderer)

    def start(self) -> None:
        """Wait until a process takes templates. Raises TemplateTooSlow, and OSError where no
        process can be started.
        """
        with self._one(time.monotonic() + START_S):
            pass

    def render(self, arguments: dict[str, Any], deadline: float) -> str:
        """Return and raise as `Renderer.render`. The time to start a process does not count."""
        begun = time.monotonic()
        with self._one(deadline) as (renderer, num_seconds):
            if begun >= deadline:
                raise TemplateTooSlow(TOO_SLOW)
            return renderer.render(arguments, deadline + num_seconds)

    @contextlib.contextmanager
    def _one(self, deadline: float) -> Iterator[tuple[Renderer, float]]:
        """A process that runs, and the seconds in which it was started."""
        try:
            renderer = self._idle.get(timeout=max(deadline - time.monotonic(), 0.001))
        except Empty:
            message = "the chat template is busy with other conversations"
            raise TemplateTooSlow(message) from None
        try:
            begun = time.monotonic()
            renderer.start()
            yield renderer, time.monotonic() - begun
        finally:
            self._idle.put(renderer)

    def close(self) -> None:
        """End the processes."""
        for renderer in self._all:
            renderer.close()


@cache
def shared_renderers() -> Renderers:
    """Return those of this process: any number of tokenizers may share them."""
    renderers = Renderers()
    atexit.register(renderers.close)
    return renderers


def send(to: socket.socket, message: bytes, deadline: float | None) -> None:
    """Raises OSError, at the deadline too."""
    to.settimeout(left(deadline))
    to.sendall(len(message).to_bytes(8, "little") + message)


def receive(from_: socket.socket, deadline: float | None) -> bytes:
    """Raises OSError, at the deadline too, and where the other side has ended."""
    num_bytes = int.from_bytes(_exactly(from_, 8, deadline), "little")
    return _exactly(from_, num_bytes, deadline)


def _exactly(from_: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        from_.settimeout(left(deadline))
        part = from_.recv(min(num_bytes - len(received), MIB))
        if not part:
            raise ConnectionResetError("the other side has ended")
        received += part
    return bytes(received)


def left(deadline: float | None) -> float | None:
    """Return seconds until a deadline. Raises TimeoutError at its end."""
    if deadline is None:
        return None
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the time is over")
    return seconds


# In the process


def main() -> None:
    """Answer until the server has ended."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with contextlib.suppress(OSError), socket.socket(fileno=0) as server:
        _limit(limit_memory, MEMORY)
        send(server, b"", None)
        while True:
            arguments = json.loads(receive(server, None))
            _limit(limit_time, 2 * RENDERING_S.most)  # a loop may outlive the server
            answer: dict[str, str] = {}
            try:
                text = render_jinja_template(**arguments)[0][0]
                if len(text) > RENDERED.most:
                    answer["error"] = f"its text is longer than {RENDERED.most} characters"
                else:
                    answer["text"] = text
            except MemoryError:
                answer["error"] = "it needs too much memory"
            except Exception as error:  # a template may raise anything
                answer["error"] = str(error)
            send(server, json.dumps(answer).encode(), None)


def _limit(set_limit: Callable[[int], None], more: int) -> None:
    """Set a limit, where the system lets us."""
    with contextlib.suppress(OSError, ValueError):
        set_limit(more)


if __name__ == "__main__":
    main()
