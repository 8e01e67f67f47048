"""Messages between the host that runs a model and those that compute some of its experts.

    8 bytes   length of the head, length of the body
    head      JSON: some fields; of every tensor its name, dtype and shape
    body      the tensors, one after the other

Nothing that is received is executed. Both ends prove that they know the same key, by the challenge
of `multiprocessing`. Nothing is encrypted, so the network has to be a private one. A message that
has begun has to come at LEAST_BYTES_PER_S, so that no single byte prolongs a wait.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_infinity.errors import HostLost
from moe_infinity.experts import DTYPE_BYTES
from moe_infinity.printable import printable
from moe_infinity.system.machine import socket_timeout

LENGTHS = struct.Struct("!II")
LENGTH = struct.Struct("!i")  # of a part of the greeting
MOST_HEAD_BYTES = 8 << 20  # far above what thousands of events take
MOST_BODY_BYTES = 1 << 30
LEAST_BYTES_PER_S = 1 << 20  # a hundredth of what a slow network has
AT_ONCE_BYTES = 64 << 10  # a shorter message is sent in one piece
MOST_SHOWN = 200  # letters of what another host says
ALIGNMENT = 16  # of a tensor in the body
GREETING_S = 10.0  # for the other end to prove what it knows
SILENT_S = 10  # after so long the system asks whether the other end is there
PROBE_S = 5  # between two such questions
PROBES = 3


class WireMessage(NamedTuple):
    """A message from one end to the other."""

    fields: dict[str, Any]  # what JSON can say
    tensors: Mapping[str, Tensor]  # on the CPU


class Wire:
    """One end of a connection. One thread may send while another receives. Raises HostLost when the
    other end is gone, takes or gives nothing for as long as `limit` says, or takes or gives a
    message too slowly.
    """

    def __init__(self, connected: socket.socket, key: bytes, *, is_caller: bool) -> None:
        """Raises HostLost if the other end does not know the key."""
        self._socket = connected
        try:
            self._prepare()
            self._greet(key, is_caller=is_caller)
        except (AuthenticationError, AssertionError) as error:
            self.close()
            raise HostLost("the other end does not know the key") from error
        except (OSError, ValueError) as error:
            self.close()
            raise HostLost(f"no greeting: {error}") from error

    def _prepare(self) -> None:
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", SILENT_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES),
        ):  # fmt: skip
            if hasattr(socket, name):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.limit(GREETING_S, GREETING_S)

    def _greet(self, key: bytes, *, is_caller: bool) -> None:
        greeting: Any = _Greeting(self, time.monotonic() + GREETING_S)
        turns = (answer_challenge, deliver_challenge)
        for turn in turns if is_caller else turns[::-1]:
            turn(greeting, key)

    @classmethod
    def call(cls, address: tuple[str, int], key: bytes) -> Wire:
        """Connect to a host. Raises HostLost."""
        try:
            connected = socket.create_connection(address, timeout=GREETING_S)
        except OSError as error:
            raise HostLost(f"{address[0]}:{address[1]}: {error}") from error
        return cls(connected, key, is_caller=True)

    def limit(self, receive_s: float, send_s: float) -> None:
        """No single read or write may take longer from now on. 0: it may wait for a message, or
        for room to send one, for as long as it takes.
        """
        self._receive_s = receive_s
        self._send_s = send_s
        limits = ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s))
        for name, seconds in limits:
            self._socket.setsockopt(socket.SOL_SOCKET, name, socket_timeout(seconds))

    def send(self, message: WireMessage) -> None:
        """Raises HostLost."""
        about = []
        pieces: list[memoryview] = []
        num_bytes = 0
        for name, tensor in message.tensors.items():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            about.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
            gap = -num_bytes % ALIGNMENT
            pieces += [memoryview(bytes(gap)), flat.numpy().data]
            num_bytes += gap + len(flat)
        head = json.dumps([message.fields, about]).encode()
        if len(head) > MOST_HEAD_BYTES or num_bytes > MOST_BODY_BYTES:
            raise HostLost(f"a message of {num_bytes} bytes is too long")
        pieces = [memoryview(LENGTHS.pack(len(head), num_bytes) + head), *pieces]
        if num_bytes <= AT_ONCE_BYTES:
            pieces = [memoryview(b"".join(pieces))]
        give_up_at = time.monotonic() + _allowed_s(self._send_s, len(head) + num_bytes)
        try:
            for piece in pieces:
                self.write(piece, give_up_at)
        except OSError as error:
            raise HostLost(f"nothing can be sent: {error}") from error
        except BaseException:  # Ctrl-C: the other end has a part of a message
            self.close()
            raise

    def receive(
        self, most_head: int = MOST_HEAD_BYTES, most_body: int = MOST_BODY_BYTES
    ) -> WireMessage:
        """Raises HostLost, also for what is no message, or has more bytes than these."""
        lengths, began = self.read(LENGTHS.size)
        num_head, num_body = LENGTHS.unpack(lengths)
        if num_head > most_head or num_body > most_body:
            raise HostLost(f"a message of {num_head} + {num_body} bytes is too long")
        give_up_at = began + _allowed_s(self._receive_s, num_head + num_body)
        head, _ = self.read(num_head, give_up_at)
        body, _ = self.read(num_body, give_up_at)
        try:
            fields, about = json.loads(head)
            return WireMessage(dict(fields), dict(_tensors(about, body)))
        except Exception as error:  # of JSON or torch: any kind
            raise HostLost(f"sent what is no message: {printable(error, MOST_SHOWN)}") from error

    def read(self, num_bytes: int, give_up_at: float | None = None) -> tuple[bytearray, float]:
        """So many bytes, and when the first one came. Without `give_up_at` they begin a message.
        Raises HostLost.
        """
        data = bytearray(num_bytes)
        left = memoryview(data)
        began = time.monotonic()
        try:
            while left:
                num_read = self._socket.recv_into(left)
                if not num_read:
                    raise HostLost("it hung up")
                if give_up_at is None:
                    began = time.monotonic()
                    give_up_at = began + _allowed_s(self._receive_s, num_bytes)
                left = left[num_read:]
                if left and time.monotonic() > give_up_at:
                    raise HostLost("it sends too slowly")
        except BlockingIOError as error:
            raise HostLost("it is silent") from error
        except OSError as error:
            raise HostLost(f"nothing can be received: {error}") from error
        except BaseException:  # Ctrl-C: what is left of this message would be taken for the next
            if give_up_at is not None:
                self.close()
            raise
        return data, began

    def write(self, piece: memoryview, give_up_at: float) -> None:
        while piece:
            piece = piece[self._socket.send(piece) :]
            if piece and time.monotonic() > give_up_at:
                raise HostLost("it takes too slowly")

    def close(self) -> None:
        """Again is harmless. A thread that waits in `receive` gets HostLost."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class _Greeting:
    """A connection as `multiprocessing` needs it to greet. The whole of it has to end in time."""

    def __init__(self, wire: Wire, give_up_at: float) -> None:
        self._wire = wire
        self._give_up_at = give_up_at

    def send_bytes(self, data: bytes) -> None:
        self._wire.write(memoryview(LENGTH.pack(len(data)) + data), self._give_up_at)

    def recv_bytes(self, most_bytes: int) -> bytes:
        (num_bytes,) = LENGTH.unpack(self._wire.read(LENGTH.size, self._give_up_at)[0])
        if not 0 <= num_bytes <= most_bytes:
            raise ValueError("that is not one")
        return bytes(self._wire.read(num_bytes, self._give_up_at)[0])


def _allowed_s(pause_s: float, num_bytes: int) -> float:
    """The seconds that a message may take which has begun, if single pauses may take so many."""
    return (pause_s or GREETING_S) + num_bytes / LEAST_BYTES_PER_S


def _tensors(about: Any, body: bytearray) -> list[tuple[str, Tensor]]:
    """Raises ValueError for tensors that are not in the body."""
    found = []
    at = 0
    for name, dtype, shape in about:
        num_bytes = prod(shape) * DTYPE_BYTES[dtype]
        at += -at % ALIGNMENT
        if min(shape, default=1) < 0 or at + num_bytes > len(body):
            raise ValueError(f"{name}: {dtype} {shape} in a body of {len(body)} bytes")
        kind: torch.dtype = getattr(torch, dtype)
        flat = torch.empty(0, dtype=kind, device="cpu")
        if num_bytes:
            flat = torch.frombuffer(body, dtype=kind, count=prod(shape), offset=at)
        found.append((name, flat.view(shape)))
        at += num_bytes
    return found
