"""Expert hosts as threads of the test: real connections, and not the seconds a process takes."""

from __future__ import annotations

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
        self.num_started = 0
        self.may_start = Event()
        self.may_start.set()
        self.threads: list[Thread] = []

    def start(self, share_idx: int, address: tuple[str, int], key: bytes) -> None:
        self.num_started += 1
        thread = Thread(target=self._run, args=(share_idx, address, key), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _run(self, share_idx: int, address: tuple[str, int], key: bytes) -> None:
        self.may_start.wait(60)
        try:
            wire = TroubledWire.call(address, key)
            assert isinstance(wire, TroubledWire)
            self.wires[share_idx] = wire
            serve(wire, share_idx)
        except HostLost:
            pass

    def has_ended(self, share_idx: int) -> bool:
        return False

    def close(self) -> None:
        self.may_start.set()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


class TroubledWire(Wire):
    """Hangs up, or falls silent, instead of its next answers with rows."""

    hangs_up = False
    is_silent = False

    def send(self, message: WireMessage) -> None:
        if self.hangs_up and "out" in message.tensors:
            self.close()
            raise HostLost("hung up")
        if self.is_silent and not message.fields.get("share_idx"):
            return
        super().send(message)
