"""Expert hosts as threads of the test: real connections, and not the seconds a process takes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from threading import Event, Thread

from moe_infinity.cluster.expert_host import serve
from moe_infinity.cluster.wire import Wire, WireMessage
from moe_infinity.errors import HostLost


class ThreadHosts:
    """A placement. `wires` are the ends of hosts, by share."""

    is_one_machine = True
    listen_on = "127.0.0.1"

    def __init__(self) -> None:
        self.wires: dict[int, TroubledWire] = {}
        self.told: dict[int, tuple[tuple[str, int], bytes]] = {}  # address and key, by share
        self.num_started = 0
        self.may_start = Event()
        self.may_start.set()
        self.threads: list[Thread] = []

    def start(self, share_idx: int, address: tuple[str, int], key: bytes) -> None:
        self.num_started += 1
        self.told[share_idx] = address, key
        thread = Thread(target=self._run, args=(share_idx,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _run(self, share_idx: int) -> None:
        self.may_start.wait(60)
        try:
            wire = self.call(share_idx)
            self.wires[share_idx] = wire
            serve(wire, share_idx)
        except HostLost:
            pass

    def call(self, share_idx: int) -> TroubledWire:
        """Greet the head once more, as the host of this share would."""
        wire = TroubledWire.call(*self.told[share_idx])
        assert isinstance(wire, TroubledWire)
        return wire

    def has_ended(self, share_idx: int) -> bool:
        return False

    def close(self) -> None:
        self.may_start.set()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


class TroubledWire(Wire):
    """Hangs up, falls silent, or does what `disturb` does instead of its next answers."""

    hangs_up = False
    is_silent = False

    def __init__(self, connected: socket.socket, key: bytes, *, is_caller: bool) -> None:
        self.disturb: Callable[[WireMessage], None] | None = None
        super().__init__(connected, key, is_caller=is_caller)

    def send(self, message: WireMessage) -> None:
        if self.disturb is not None and "out" in message.tensors:
            self.disturb(message)
            return
        if self.hangs_up and "out" in message.tensors:
            self.close()
            raise HostLost("hung up")
        if self.is_silent and not message.fields.get("share_idx"):
            return
        super().send(message)
