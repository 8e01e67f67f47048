"""Hosts that know the key and do what they like: the tokens stay those of one process, in bounded
time and memory, and the log says which host is given up and why.
"""

from __future__ import annotations

import json
import logging
import socket
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from moe_infinity.cluster import head, port, wire
from moe_infinity.cluster import model as cluster_model
from moe_infinity.cluster.model import ClusterMoE
from moe_infinity.cluster.wire import LENGTHS, WireMessage
from moe_infinity.errors import ConfigError, HostLost
from tests.closeness import logits_of_steps
from tests.cluster.thread_hosts import ThreadHosts, TroubledWire
from tests.gguf_files import build

IDS = torch.arange(3, 51).view(4, 12)
TIMEOUT_S = 1.0
LONG_S = 20.0  # far above what giving up a host may take
Disturb = Callable[[TroubledWire, WireMessage], None]


@pytest.fixture
def placement(monkeypatch: pytest.MonkeyPatch) -> ThreadHosts:
    placement = ThreadHosts()
    monkeypatch.setattr(cluster_model, "LocalProcesses", lambda: placement)
    monkeypatch.setattr(head, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(head, "ANSWER_S", 2.0)
    return placement


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> torch.Tensor:
    with ClusterMoE(checkpoint, device="cpu") as moe, torch.no_grad():
        return logits_of_steps(moe.model, IDS, num_prompt=5)


def answering(change: Callable[[torch.Tensor], Any]) -> Disturb:
    """Other rows than were computed."""

    def disturb(wire: TroubledWire, message: WireMessage) -> None:
        said = message._replace(tensors={"out": change(message.tensors["out"])})
        super(TroubledWire, wire).send(said)

    return disturb


def saying(**fields: Any) -> Disturb:
    """Fields and no rows."""

    def disturb(wire: TroubledWire, message: WireMessage) -> None:
        super(TroubledWire, wire).send(WireMessage(message.fields | fields, {}))

    return disturb


def frame(head: bytes, body: bytes = b"") -> bytes:
    return LENGTHS.pack(len(head), len(body)) + head + body


def sending(data: bytes) -> Disturb:
    """Bytes that need not be a message."""

    def disturb(wire: TroubledWire, message: WireMessage) -> None:
        wire._socket.sendall(data)

    return disturb


def with_an_infinity(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out.view(-1)[-1] = float("-inf")
    return out


def in_a_large_message(wire: TroubledWire, message: WireMessage) -> None:
    more = {"out": message.tensors["out"], "more": torch.zeros(100_000)}
    super(TroubledWire, wire).send(message._replace(tensors=more))


def a_byte_at_a_time(wire: TroubledWire, message: WireMessage) -> None:
    about = ["out", "float32", list(message.tensors["out"].shape)]
    data = frame(
        json.dumps([message.fields, [about]]).encode(), bytes(message.tensors["out"].nbytes)
    )
    with suppress(OSError):  # the head hangs up
        for at in range(len(data)):
            wire._socket.sendall(data[at : at + 1])
            time.sleep(TIMEOUT_S / 6)


def a_part_and_no_more(wire: TroubledWire, message: WireMessage) -> None:
    wire._socket.sendall(frame(b"[{}, []]" + bytes(100))[:20])
    wire.close()


def signs_of_life_and_nothing_else(wire: TroubledWire, message: WireMessage) -> None:
    with suppress(HostLost):
        while True:
            super(TroubledWire, wire).send(WireMessage({"works": True}, {}))
            time.sleep(0.01)


def answers_of_other_steps(wire: TroubledWire, message: WireMessage) -> None:
    with suppress(HostLost):
        while True:
            super(TroubledWire, wire).send(message._replace(fields={"number": 0}))


OUT = '[{}, [["out", "float32", %s]]]'
GIVEN_UP = {
    "a row too many": (answering(lambda out: torch.cat([out, out[:1]])), "too long"),
    "a row too few": (answering(lambda out: out[1:]), "it sent"),
    "no row": (answering(lambda out: out[:0]), "it sent"),
    "a column too few": (answering(lambda out: out[:, 1:].contiguous()), "it sent"),
    "transposed": (answering(lambda out: out.T.contiguous()), "it sent"),
    "flat": (answering(lambda out: out.flatten()), "it sent"),
    "half": (answering(lambda out: out.half()), "of torch.float16, not"),
    "double": (answering(lambda out: out.double()), "too long"),
    "whole numbers": (answering(lambda out: out.int()), "of torch.int32, not"),
    "nan": (answering(lambda out: out * float("nan")), "not finite"),
    "infinity": (answering(with_an_infinity), "not finite"),
    "large": (in_a_large_message, "too long"),
    "nothing": (saying(), "it sent no rows"),
    "an error": (saying(error="the \x1b[31mdisk"), r"the \x1b[31mdisk"),
    "an error of another kind": (saying(error={"a": [1]}), "{'a': [1]}"),
    "a long error": (saying(error="x" * 100_000), "too long"),
    "garbage": (sending(b"\xff" * 64), "too long"),
    "no JSON": (sending(frame(b"\xff\x00{")), "no message"),
    "deep JSON": (sending(frame(b"[" * 60_000)), "no message"),
    "a huge whole number": (sending(frame(b"[{}, [" + b"9" * 60_000 + b"]]")), "no message"),
    "a shape that overflows": (sending(frame((OUT % [0, 2**62, 2**62]).encode())), "silent"),
    "a shape of text": (sending(frame((OUT % '["a"]').encode())), "no message"),
    "a shape of infinity": (sending(frame((OUT % "[1e999]").encode())), "no message"),
    "slow": (a_byte_at_a_time, "too slowly"),
    "silence": (sending(b""), "silent"),
    "half a message and silence": (sending(frame(bytes(100))[:20]), "silent"),
    "half a message": (a_part_and_no_more, "hung up"),
    "only signs of life": (signs_of_life_and_nothing_else, "too long"),
    "old answers only": (answers_of_other_steps, "too long"),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", GIVEN_UP)
def test_a_host_that_answers_anything_else_is_given_up_and_no_bit_changes(
    kind, checkpoint, alone, placement, caplog
):
    disturb, why = GIVEN_UP[kind]
    options: dict[str, Any] = {"expert_hosts": 1, "expert_host_timeout": TIMEOUT_S}
    with ClusterMoE(checkpoint, device="cpu", **options) as moe, torch.no_grad():
        logits_of_steps(moe.model, IDS[:, :2])
        placement.may_start.clear()
        placement.wires[1].disturb = partial(disturb, placement.wires[1])
        started = time.monotonic()
        with caplog.at_level(logging.WARNING):
            assert torch.equal(logits_of_steps(moe.model, IDS, num_prompt=5), alone)
        assert time.monotonic() - started < LONG_S
        moe.check_invariants()
        placement.wires[1].close()
    (line,) = [r.getMessage() for r in caplog.records if "is given up" in r.getMessage()]
    assert why in line
    assert len(line) < 500
    assert line.isprintable()


@pytest.mark.parametrize("exact", [False, True])
def test_an_old_answer_that_comes_again_is_not_taken_for_a_new_one(exact, checkpoint, placement):
    with ClusterMoE(checkpoint, device="cpu", exact=exact) as moe, torch.no_grad():
        alone = logits_of_steps(moe.model, IDS, num_prompt=5)
    before: list[WireMessage] = []

    def replay(message: WireMessage) -> None:
        for old in before[-3:]:
            if old.tensors["out"].nbytes <= message.tensors["out"].nbytes:  # else it is refused
                super(TroubledWire, placement.wires[1]).send(old)
        super(TroubledWire, placement.wires[1]).send(message)
        before.append(message)

    options: dict[str, Any] = {"expert_hosts": 1, "exact": exact}
    with ClusterMoE(checkpoint, device="cpu", **options) as moe, torch.no_grad():
        logits_of_steps(moe.model, IDS[:, :2])
        placement.wires[1].disturb = replay
        for ids in (IDS, IDS):
            assert torch.equal(logits_of_steps(moe.model, ids, num_prompt=5), alone)
    assert len(before) > 3


def test_a_message_that_is_announced_and_does_not_come_takes_no_memory(checkpoint, placement):
    options: dict[str, Any] = {"expert_hosts": 1, "expert_host_timeout": TIMEOUT_S}
    with ClusterMoE(checkpoint, device="cpu", **options) as moe, torch.no_grad():
        logits_of_steps(moe.model, IDS[:, :2])
        data = LENGTHS.pack(8, wire.MOST_BODY_BYTES) + b"[{}, []]"
        placement.may_start.clear()
        placement.wires[1].disturb = partial(sending(data), placement.wires[1])
        tracemalloc.start()
        try:
            moe.model(IDS)
            assert tracemalloc.get_traced_memory()[1] < 10 << 20
        finally:
            tracemalloc.stop()
        placement.wires[1].close()


# those who call


def called(placement: ThreadHosts, *fields: dict[str, Any]) -> TroubledWire:
    """Somebody who knows the key calls, and says this."""
    wire = placement.call(1)
    for each in fields:
        wire.send(WireMessage(each, {}))
    return wire


@pytest.mark.sample(3)
@pytest.mark.parametrize("share", [0, 2, -1, True, 1.0, "1", None, float("inf"), [1], 10**30])
def test_a_share_that_there_is_not_is_refused(share, checkpoint, alone, placement, caplog):
    with ClusterMoE(checkpoint, device="cpu", expert_hosts=1) as moe, torch.no_grad():
        wire = called(placement, {"share_idx": share})
        with pytest.raises(HostLost, match=r"hung up|reset"):
            wire.receive()
        assert torch.equal(logits_of_steps(moe.model, IDS, num_prompt=5), alone)
        assert moe.hosts is not None
        assert set(moe.hosts.running) == {1}
    assert f"there is no share {share}" in caplog.text
    wire.close()


def test_a_share_that_another_host_has_is_refused(checkpoint, alone, placement, caplog):
    with ClusterMoE(checkpoint, device="cpu", expert_hosts=1) as moe, torch.no_grad():
        assert torch.equal(logits_of_steps(moe.model, IDS, num_prompt=5), alone)
        assert moe.hosts is not None
        first = moe.hosts.running[1]
        wire = called(placement, {"share_idx": 1}, {"digest": moe.hosts._digest})
        wire.receive()  # the setup
        with suppress(HostLost):
            for _ in range(head.PINGS):
                wire.receive()
                wire.send(WireMessage({}, {}))
            wire.receive()
        assert torch.equal(logits_of_steps(moe.model, IDS, num_prompt=5), alone)
        assert moe.hosts.running == {1: first}
    assert "another has its share" in caplog.text
    assert "is given up" not in caplog.text
    wire.close()


@pytest.mark.parametrize(
    "told",
    [{"digest": "\x1b[2Jother"}, {"error": "\x1b[2Jno"}, {"digest": None}, {"error": ["no"]}, {}],
)
def test_a_host_with_another_checkpoint_is_an_error_without_control_characters(
    told, checkpoint, placement, monkeypatch
):
    def start(share_idx: int, address: tuple[str, int], key: bytes) -> None:
        placement.told[share_idx] = address, key
        callers.append(called(placement, {"share_idx": 1}, told))

    callers: list[TroubledWire] = []
    monkeypatch.setattr(placement, "start", start)
    with pytest.raises(ConfigError, match="one cannot be used") as raised:
        ClusterMoE(checkpoint, device="cpu", expert_hosts=1)
    assert str(raised.value).isprintable()
    for caller in callers:
        caller.close()


# those who do not know the key


@pytest.fixture
def hosts(checkpoint, placement):
    with ClusterMoE(checkpoint, device="cpu", expert_hosts=1) as moe:
        assert moe.hosts is not None
        yield moe.hosts


def silence(hosts: head.ExpertHosts) -> socket.socket:
    return socket.create_connection(hosts.address, timeout=LONG_S)


def is_hung_up(caller: socket.socket) -> bool:
    """Return True once the other end has hung up."""
    try:
        while caller.recv(1000):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_greeting_that_is_heard_on_one_connection_opens_no_other(hosts, placement):
    """Whoever listens on the network repeats it."""
    with socket.create_server(("127.0.0.1", 0)) as between:
        placement.told[1] = between.getsockname()[:2], placement.told[1][1]
        spoken = b""
        outer = silence(hosts)

        def pass_on() -> None:
            nonlocal spoken
            inner, _ = between.accept()
            with inner, outer:
                inner.sendall(outer.recv(1000))
                spoken = inner.recv(1000)
                outer.sendall(spoken)
                inner.sendall(outer.recv(1000))
                spoken += inner.recv(1000)

        thread = Thread(target=pass_on)
        thread.start()
        with suppress(HostLost):
            placement.call(1).close()
        thread.join(LONG_S)
    assert len(spoken) > 40
    again = silence(hosts)
    again.sendall(spoken)
    assert is_hung_up(again)
    again.close()


def test_a_greeting_of_single_bytes_ends_in_time(hosts, monkeypatch):
    monkeypatch.setattr(wire, "GREETING_S", 0.5)
    caller = silence(hosts)
    started = time.monotonic()
    with suppress(ConnectionError):
        for byte in b"\x00\x00\x00\xc8" + bytes(200):
            caller.sendall(bytes([byte]))
            time.sleep(0.1)
    assert 0.4 < time.monotonic() - started < 5
    caller.close()


def test_silent_callers_hold_a_bounded_number_of_threads_and_keep_no_host_out(
    hosts, placement, monkeypatch
):
    monkeypatch.setattr(port, "MOST_STRANGERS", 4)
    monkeypatch.setattr(wire, "GREETING_S", 300.0)  # time ends none of them
    callers = [silence(hosts) for _ in range(12)]
    for caller in callers[:8]:
        assert is_hung_up(caller)
    placement.call(1).close()
    for caller in callers:
        caller.close()


def test_strangers_fill_no_log(hosts, caplog):
    for _ in range(50):
        silence(hosts).close()
    time.sleep(0.1)
    placement_lines = [r for r in caplog.records if "was refused" in r.getMessage()]
    assert len(placement_lines) <= 3
