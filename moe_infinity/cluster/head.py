"""The other hosts that compute experts of a model, as its head sees them.

    MoE layer   the router chose ──> rows for each host that has an expert of these ──> its outputs
                                └──> the head computes its own share meanwhile

One message goes to each host that a layer needs, one comes back: activations, never weights. A host
that is silent for too long is given up. The head then computes its share, from its own disk, until
the host is back.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from math import isfinite
from threading import Event, Lock, Thread
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.cluster import steps
from moe_infinity.cluster.port import GLANCE_S, Port
from moe_infinity.cluster.share import Share, put_share, share_of
from moe_infinity.cluster.steps import HEAD, LayerRouting, RowsRequest
from moe_infinity.cluster.wire import MOST_SHOWN, Wire, WireMessage
from moe_infinity.engine.fused import FusedWork
from moe_infinity.engine.torch_backend import TorchWork
from moe_infinity.errors import ConfigError, HostLost
from moe_infinity.experts import Routing, Step
from moe_infinity.printable import printable
from moe_infinity.system.threads import keep_running

OPEN_S = 300.0  # for all hosts to open the checkpoint
SIGNS_S = 10.0  # between two signs of life while one does
FIRST_PAUSE_S = 1.0  # before a host that was lost is started again; twice as long each time
LONGEST_PAUSE_S = 60.0
MOST_EVENTS = 4096  # that wait for a host which no layer needs
ANSWER_S = 120.0  # for rows, as for an expert to arrive from a disk
MOST_HEAD_BYTES = 64 << 10  # of what a host sends
PINGS = 8

logger = logging.getLogger(__name__)


class Placement(Protocol):
    """Where hosts are, and how they are started. No method raises."""

    is_one_machine: bool  # they share memory and cores with the head
    listen_on: str  # address of the head that they can reach

    def start(self, share_idx: int, address: tuple[str, int], key: bytes) -> None:
        """Start the host of a share, in place of the one before. It is to call that address."""

    def has_ended(self, share_idx: int) -> bool:
        """Return True if the host of a share has ended by itself."""

    def close(self) -> None:
        """End all of them."""


class Host:
    """One host while it takes part."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._events: deque[steps.Event] = deque(maxlen=MOST_EVENTS)
        self._num_asked = 0
        self._outputs: Tensor | None = None  # as what was asked for last will be
        self._most_bytes = 0  # of the tensors that any answer under way may have
        self.exchange_s = float("inf")  # the shortest, of a message without rows

    def note(self, event: steps.Event) -> None:
        """For the next message."""
        self._events.append(event)

    def ask(self, share: Share) -> None:
        """For rows of the layer that was noted last. Raises HostLost."""
        events = list(self._events)
        self._events.clear()
        self._num_asked += 1
        self._outputs = outputs = share.outputs()
        self._most_bytes = max(self._most_bytes, outputs.nbytes)
        self.wire.send(RowsRequest(self._num_asked, events, share).message())

    def answer(self) -> Tensor:
        """Return what the host made of the rows that were asked for last, after answers to a step
        that was cut short. Raises HostLost for anything else.
        """
        give_up_at = time.monotonic() + ANSWER_S
        while (message := self._receive(give_up_at)).fields.get("number") != self._num_asked:
            pass
        self._most_bytes = 0
        if "error" in message.fields:
            raise HostLost(printable(message.fields["error"], MOST_SHOWN))
        out = message.tensors.get("out")
        like = self._outputs
        assert like is not None, "ask() comes first"
        if out is None or (out.shape, out.dtype) != (like.shape, like.dtype):
            sent = "no rows" if out is None else f"{list(out.shape)} of {out.dtype}"
            raise HostLost(f"it sent {sent}, not {list(like.shape)} of {like.dtype}")
        if not isfinite(out.sum(dtype=torch.float32)):  # in a tenth of the time of Tensor.isfinite
            raise HostLost("it sent numbers that are not finite")
        return out

    def share_idx(self, num_hosts: int) -> int:
        """The share that the host says it has. Raises HostLost if there is none such."""
        told = self._receive(time.monotonic() + SIGNS_S).fields.get("share_idx")
        if type(told) is not int or not 1 <= told <= num_hosts:
            raise HostLost(f"there is no share {printable(told, MOST_SHOWN)}")
        return told

    def check_digest(self, digest: str) -> None:
        """Wait until the host has opened the checkpoint. Raises HostLost if it is another."""
        told = self._receive(time.monotonic() + OPEN_S).fields
        if told.get("digest") != digest:
            raise HostLost(printable(told.get("error") or "it has another checkpoint", MOST_SHOWN))

    def measure(self) -> None:
        """How long an exchange takes. Raises HostLost."""
        for _ in range(PINGS):
            started = time.perf_counter()
            self.wire.send(WireMessage({"ping": True}, {}))
            self._receive(time.monotonic() + SIGNS_S)
            self.exchange_s = min(self.exchange_s, time.perf_counter() - started)

    def _receive(self, give_up_at: float) -> WireMessage:
        """The next message that is no sign of life."""
        while True:
            message = self.wire.receive(MOST_HEAD_BYTES, self._most_bytes)
            if time.monotonic() > give_up_at:
                raise HostLost("it takes too long")
            if not message.fields.get("works"):
                return message


class Asked:
    """The questions of one MoE layer of a step to hosts."""

    def __init__(
        self,
        local: list[int],
        work: FusedWork | TorchWork,
        lose: Callable[[int, HostLost], None],
    ) -> None:
        self.local = local  # experts that the head computes
        self._work = work
        self._lose = lose
        self._shares: list[tuple[int, Host, Share]] = []

    def ask(self, share_idx: int, host: Host, expert_idxs: list[int]) -> None:
        """The experts of a host that cannot be asked are the head's."""
        share = share_of(self._work, expert_idxs)
        try:
            host.ask(share)
            self._shares.append((share_idx, host, share))
        except HostLost as error:
            self._lose(share_idx, error)
            self.local = sorted([*self.local, *expert_idxs])

    def collect(self) -> list[int]:
        """Hand the answers on; returns the experts of hosts that gave none."""
        lost: list[int] = []
        for share_idx, host, share in self._shares:
            try:
                put_share(self._work, share, host.answer())
            except HostLost as error:
                self._lose(share_idx, error)
                lost += share.expert_idxs
        return sorted(lost)


class ExpertHosts:
    """All hosts of one model. They call back, each for its share, when they have been started."""

    def __init__(
        self,
        placement: Placement,
        setup: dict[str, Any],
        digest: str,
        *,
        owners_LE: NDArray[np.int64],  # of every expert, whose it is
        local_LE: NDArray[np.bool_],  # those that the head computes now; changed in place
        timeout_s: float,
    ) -> None:
        self.num_hosts = int(owners_LE.max())
        self.placement = placement
        self._setup = setup
        self._digest = digest
        self._owners_LE = owners_LE
        self.local_LE = local_LE
        self._timeout_s = timeout_s
        self._key = secrets.token_bytes(32)
        self.running: dict[int, Host] = {}  # those that take part, by share
        self._ready: dict[int, Host] = {}  # those that may from the next step on
        self._pause_s = dict.fromkeys(range(1, self.num_hosts + 1), FIRST_PAUSE_S)
        self._lost = {share_idx: Event() for share_idx in self._pause_s}  # set until it is back
        self._changing = Lock()  # of the three above and the one below
        self._errors: dict[int, str] = {}  # why a host cannot be used, by share
        self._starting = Lock()  # held while a host is started again: none is after `close`
        self._is_closed = Event()
        self._port = Port(placement.listen_on, self._key, self._admit)
        self.address = self._port.address
        for share_idx in self._lost:
            turns = (partial(self._restart, share_idx), f"the restart of expert host {share_idx}")
            Thread(target=keep_running, args=turns, daemon=True).start()
            placement.start(share_idx, self.address, self._key)

    # Steps

    def begin_step(self, step: Step) -> None:
        """A forward pass begins; hosts that are back take part from now on."""
        with self._changing:
            self.running |= self._ready
            for share_idx in self._ready:
                self.local_LE &= self._owners_LE != share_idx
            self._ready.clear()
        for host in self.running.values():
            host.note(step)

    def ask(self, moe_layer_idx: int, routing: Routing, work: FusedWork | TorchWork) -> Asked:
        """For what the experts of others make of this layer's rows."""
        assert routing.top_k_index_TK is not None, routing
        event = LayerRouting(moe_layer_idx, routing.top_k_index_TK)
        for host in self.running.values():
            host.note(event)
        experts_of: dict[int, list[int]] = {}
        for expert_idx in routing.activated:
            share_idx = int(self._owners_LE[moe_layer_idx, expert_idx])
            where = share_idx if share_idx in self.running else HEAD
            experts_of.setdefault(where, []).append(expert_idx)
        asked = Asked(experts_of.pop(HEAD, []), work, self._lose)
        for share_idx, expert_idxs in experts_of.items():
            asked.ask(share_idx, self.running[share_idx], expert_idxs)
        return asked

    def _lose(self, share_idx: int, error: HostLost) -> None:
        """Do without this host, and start it again."""
        logger.warning(
            "expert host %d is given up, its share is computed here: %s", share_idx, error
        )
        self.local_LE |= self._owners_LE == share_idx
        with self._changing:
            self.running.pop(share_idx).wire.close()
            self._lost[share_idx].set()

    def _restart(self, share_idx: int) -> bool:
        """Wait until a host is lost, start it again, and see whether it is back. Returns False at
        the end of all.
        """
        self._lost[share_idx].wait()
        if self._is_closed.wait(self._pause_s[share_idx]):
            return False
        self._pause_s[share_idx] = min(2 * self._pause_s[share_idx], LONGEST_PAUSE_S)
        with self._changing:
            self._errors.pop(share_idx, None)
        with self._starting:
            if self._is_closed.is_set():
                return False
            self.placement.start(share_idx, self.address, self._key)
        give_up_at = time.monotonic() + OPEN_S
        while time.monotonic() < give_up_at and not self._is_closed.wait(GLANCE_S):
            with self._changing:
                if share_idx in self._ready or share_idx in self.running:
                    self._lost[share_idx].clear()
                    break
                if share_idx in self._errors:
                    break
            if self.placement.has_ended(share_idx):
                break
        return True

    # Hosts that call

    def wait(self) -> float:
        """Until all have opened the checkpoint; returns the seconds that an exchange with the
        slowest takes. Raises ConfigError.
        """
        give_up_at = time.monotonic() + OPEN_S
        while True:
            with self._changing:
                ready = dict(self._ready)
                error = next(iter(self._errors.values()), None)
            for share_idx in range(1, self.num_hosts + 1):
                if share_idx not in ready and self.placement.has_ended(share_idx):
                    error = error or f"number {share_idx} ended before it was ready"
            if error is None and time.monotonic() > give_up_at:
                error = f"only {len(ready)} of {self.num_hosts} are ready after {OPEN_S:.0f} s"
            if error is not None:
                raise ConfigError(f"expert hosts: {error}")
            if len(ready) == self.num_hosts:
                return max(host.exchange_s for host in ready.values())
            time.sleep(0.01)

    def _admit(self, wire: Wire) -> None:
        """Let somebody who knows the key take part from the next step on, if it has the same
        checkpoint and a share that no other has.
        """
        share_idx = HEAD
        try:
            wire.limit(SIGNS_S, SIGNS_S)
            host = Host(wire)
            share_idx = host.share_idx(self.num_hosts)
            wire.send(WireMessage(self._setup, {}))
            host.check_digest(self._digest)
            host.measure()
            wire.limit(self._timeout_s, self._timeout_s)
        except HostLost as error:
            self._refuse(wire, share_idx, str(error))
            with self._changing:
                self._errors[share_idx] = f"one cannot be used: {error}"
            return
        with self._changing:
            is_free = not (share_idx in self.running or share_idx in self._ready)
            if is_free and not self._is_closed.is_set():
                self._ready[share_idx] = host
                return
        self._refuse(wire, share_idx, "all end" if is_free else "another has its share")

    def _refuse(self, wire: Wire, share_idx: int, why: str) -> None:
        wire.close()
        logger.warning("expert host %d cannot be used: %s", share_idx, why)

    def close(self) -> None:
        """End all hosts."""
        self._port.close()
        with self._changing:
            self._is_closed.set()
            hosts = [*self.running.values(), *self._ready.values()]
        for lost in self._lost.values():
            lost.set()  # ends the thread that waits for it
        for host in hosts:
            host.wire.close()
        with self._starting:
            self.placement.close()
