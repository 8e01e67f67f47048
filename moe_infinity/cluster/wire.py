"""Messages between the host that runs a model and those that compute some of its experts.

    8 bytes   length of the head, length of the body
    head      JSON: some fields; of every tensor its name, dtype and shape
    body      the tensors, one after the other

Nothing that is received is executed. Both ends prove that they know the same key, by the challenge
of `multiprocessing`. Nothing is encrypted, so the network has to be a private one. No wait is
unbounded.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_infinity.errors import HostLost
from moe_infinity.experts import DTYPE_BYTES
from moe_infinity.system.machine import socket_timeout

LENGTHS = struct.Struct("!II")
MOST_BYTES = 1 << 30  # of a head or a body
AT_ONCE_BYTES = 64 << 10  # a shorter message is sent in one piece
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
    other end is gone, or takes or gives nothing for as long as `limit` says.
    """

    def __init__(self, connected: socket.socket, key: bytes, *, is_caller: bool) -> None:
        """Raises HostLost if the other end does not know the key."""
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", SILENT_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES),
        ):  # fmt: skip
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connected
        self.limit(GREETING_S, GREETING_S)
        try:
            _greet(connected, key, is_caller=is_caller)
        except (AuthenticationError, AssertionError) as error:
            self.close()
            raise HostLost("the other end does not know the key") from error
        except (OSError, EOFError) as error:
            self.close()
            raise HostLost(f"no greeting: {error or 'it hung up'}") from error

    @classmethod
    def call(cls, address: tuple[str, int], key: bytes) -> Wire:
        """Connect to a host. Raises HostLost."""
        try:
            connected = socket.create_connection(address, timeout=GREETING_S)
        except OSError as error:
            raise HostLost(f"{address[0]}:{address[1]}: {error}") from error
        return cls(connected, key, is_caller=True)

    def limit(self, receive_s: float, send_s: float) -> None:
        """No single read or write may take longer from now on. 0: it may."""
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
        if max(len(head), num_bytes) > MOST_BYTES:
            raise HostLost(f"a message of {num_bytes} bytes is too long")
        pieces = [memoryview(LENGTHS.pack(len(head), num_bytes) + head), *pieces]
        if num_bytes <= AT_ONCE_BYTES:
            pieces = [memoryview(b"".join(pieces))]
        try:
            for piece in pieces:
                self._socket.sendall(piece)
        except OSError as error:
            raise HostLost(f"nothing can be sent: {error}") from error
        except BaseException:  # Ctrl-C: the other end has a part of a message
            self.close()
            raise

    def receive(self) -> WireMessage:
        """Raises HostLost, also for what is no message."""
        lengths = LENGTHS.unpack(self._read(LENGTHS.size))
        if max(lengths) > MOST_BYTES:
            raise HostLost(f"a message of {max(lengths)} bytes is too long")
        head = self._read(lengths[0])
        body = self._read(lengths[1])
        try:
            fields, about = json.loads(head)
            return WireMessage(dict(fields), dict(_tensors(about, body)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise HostLost(f"sent what is no message: {error}") from error

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        left = memoryview(data)
        is_begun = num_bytes != LENGTHS.size
        try:
            while left:
                num_read = self._socket.recv_into(left)
                if not num_read:
                    raise HostLost("it hung up")
                left = left[num_read:]
                is_begun = True
        except BlockingIOError as error:
            raise HostLost("it is silent") from error
        except OSError as error:
            raise HostLost(f"nothing can be received: {error}") from error
        except BaseException:  # Ctrl-C: what is left of this message would be taken for the next
            if is_begun:
                self.close()
            raise
        return data

    def close(self) -> None:
        """Again is harmless. A thread that waits in `receive` gets HostLost."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _greet(connected: socket.socket, key: bytes, *, is_caller: bool) -> None:
    connection = Connection(connected.dup().detach())  # a handle of its own
    with connection:
        turns = (answer_challenge, deliver_challenge)
        for turn in turns if is_caller else turns[::-1]:
            turn(connection, key)


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
