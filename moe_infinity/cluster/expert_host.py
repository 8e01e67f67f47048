"""A host that computes some of the experts of a model for another one, its head.

It has an engine like any other, with its own disk, memory, policy and predictions, and no dense
weights. It lives as long as the connection to its head.

    python -m moe_infinity.cluster.expert_host     share, address and key come by stdin, as JSON
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event, Lock, Thread
from typing import Any

import torch

from moe_infinity.checkpoint.reader import Reader
from moe_infinity.cluster.share import work_of_share
from moe_infinity.cluster.steps import LayerRouting, RowsRequest, digest_of, owners
from moe_infinity.cluster.wire import Wire, WireMessage
from moe_infinity.config import OffloadConfig
from moe_infinity.engine.build import build_experts
from moe_infinity.engine.device import in_slots
from moe_infinity.errors import HostLost, MoEInfinityError
from moe_infinity.experts import Routing
from moe_infinity.loading.model import plan_from_headers
from moe_infinity.local import local_folder
from moe_infinity.system.machine import keep_to_cores
from moe_infinity.system.threads import keep_running

READ_S = 600.0  # for the head, which computes its own share first, to read an answer
SIGN_S = 0.5  # between two signs of life while a request takes long

logger = logging.getLogger(__name__)


class ExpertHost:
    """The experts of one share of a model. Raises what opening a model raises."""

    def __init__(
        self, checkpoint: str, config: OffloadConfig, share_idx: int, num_shares: int
    ) -> None:
        plan = plan_from_headers(
            local_folder(checkpoint),
            dtype=config.dtype,
            config_from=config.config_from,
            trust_remote_code=config.trust_remote_code,
        )
        plan = in_slots(plan, config)
        reader = Reader(num_threads=config.num_read_threads)
        self.digest = digest_of(plan, reader)
        self.engine = build_experts(
            plan, reader, config, local_LE=owners(plan.layers, num_shares) == share_idx
        )
        if config.preload != "off":
            self.engine.start_preloading()

    def answer(self, request: RowsRequest) -> torch.Tensor:
        """[P, D]: what the experts make of the rows. Raises as the engine does."""
        *before, asked = request.events
        assert isinstance(asked, LayerRouting), asked
        for event in before:
            if isinstance(event, LayerRouting):
                routing = Routing.of_experts(event.top_k_index_TK, None)
                self.engine.note_routing(event.moe_layer_idx, routing)
            else:
                self.engine.begin_step(event)
        routing = Routing.of_experts(asked.top_k_index_TK, None)
        with torch.no_grad(), self.engine.unchanged_files():
            layer_idx = asked.moe_layer_idx
            share = request.shared_rows
            work = work_of_share(self.engine.path.computers[layer_idx], share)
            self.engine.run_layer(layer_idx, routing, share.expert_idxs, work)
            return work.outputs()

    def close(self) -> None:
        self.engine.close()


def serve(wire: Wire, share_idx: int) -> None:
    """Answer a head until it is gone: raises HostLost then. The connection is closed."""
    with closing(wire), closing(SignsOfLife(wire)) as signs:
        signs.send(WireMessage({"share_idx": share_idx}, {}))
        setup = wire.receive().fields
        try:
            with signs.given():
                host = _open(setup, share_idx)
        except (MoEInfinityError, OSError, RuntimeError) as error:
            signs.send(WireMessage({"error": f"{type(error).__name__}: {error}"}, {}))
            return
        try:
            signs.send(WireMessage({"digest": host.digest}, {}))
            wire.limit(0, READ_S)  # a head may have nothing to ask for
            while True:
                signs.send(_answer(host, wire.receive(), signs))
        finally:
            host.close()


def _open(setup: dict[str, Any], share_idx: int) -> ExpertHost:
    if setup["num_threads"] is not None:
        torch.set_num_threads(setup["num_threads"])
    config = OffloadConfig.from_options(None, setup["options"])
    return ExpertHost(setup["checkpoint"], config, share_idx, setup["num_shares"])


def _answer(host: ExpertHost, message: WireMessage, signs: SignsOfLife) -> WireMessage:
    if "ping" in message.fields:
        return WireMessage({}, {})
    request = RowsRequest.of(message)
    try:
        with signs.given():
            return WireMessage({"number": request.number}, {"out": host.answer(request)})
    except (MoEInfinityError, OSError, RuntimeError) as error:  # a full disk, no memory
        logger.exception("rows were not computed")
        about = f"{type(error).__name__}: {error}"
        return WireMessage({"number": request.number, "error": about}, {})


class SignsOfLife:
    """Tells the head, while something takes long, that it goes on."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._sending = Lock()
        self._is_working = Event()
        self._is_closed = Event()
        turns = (self._give, "signs of life")
        Thread(target=keep_running, args=turns, name="moe-infinity-signs", daemon=True).start()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside, every half a second."""
        self._is_working.set()
        try:
            yield
        finally:
            self._is_working.clear()

    def send(self, message: WireMessage) -> None:
        with self._sending:
            self._wire.send(message)

    def close(self) -> None:
        """End the thread that gives them."""
        self._is_closed.set()
        self._is_working.set()

    def _give(self) -> bool:
        self._is_working.wait()
        if self._is_closed.wait(SIGN_S):
            return False
        if self._is_working.is_set():
            try:
                self.send(WireMessage({"works": True}, {}))
            except HostLost:
                return False  # who receives finds out as well
        return True


def main() -> None:
    told = json.loads(sys.stdin.readline())
    share_idx = told["share_idx"]
    logging.basicConfig(format=f"expert host {share_idx}: %(message)s")
    if told["cores"]:
        keep_to_cores(told["cores"])  # before slots are allocated: first touch
    try:
        serve(Wire.call((told["host"], told["port"]), bytes.fromhex(told["key"])), share_idx)
    except HostLost as error:
        logger.info("the head is gone: %s", error)
    except KeyboardInterrupt:
        pass  # of the whole group: the head ends, too


if __name__ == "__main__":
    main()
