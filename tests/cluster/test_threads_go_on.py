"""The threads around expert hosts go on after an error, and end when they are closed."""

from __future__ import annotations

import errno
import time
from threading import Event, Thread
from threading import enumerate as running_threads
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_infinity.cluster import expert_host, head, port
from moe_infinity.cluster import model as cluster_model
from moe_infinity.cluster.expert_host import SignsOfLife
from moe_infinity.cluster.model import ClusterMoE
from moe_infinity.cluster.port import Port
from moe_infinity.cluster.wire import Wire, WireMessage
from moe_infinity.errors import HostLost
from tests.cluster.thread_hosts import ThreadHosts
from tests.gguf_files import build

KEY = b"key"


def is_soon(event: Event) -> bool:
    return event.wait(20)


@pytest.fixture
def answered():
    return Event()


@pytest.fixture
def open_port(answered, monkeypatch):
    monkeypatch.setattr(port, "GLANCE_S", 0.05)

    def answer(wire: Wire) -> None:
        wire.close()
        answered.set()

    opened = Port("127.0.0.1", KEY, answer)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ConnectionAbortedError(errno.ECONNABORTED, "Software caused connection abort"),
        MemoryError("no room"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_host_can_call_after_an_error_of_accept(error, open_port, answered, caplog):
    listener = open_port._listener
    has_failed = Event()

    def accept() -> Any:
        has_failed.set()
        raise error

    open_port._listener = SimpleNamespace(accept=accept, close=listener.close)
    assert is_soon(has_failed)
    open_port._listener = listener
    Wire.call(open_port.address, KEY).close()
    assert is_soon(answered)
    assert caplog.text.count("the port of expert hosts goes on after") == 1


def test_a_host_can_call_after_there_was_no_thread_for_a_caller(
    open_port, answered, monkeypatch, caplog
):
    with monkeypatch.context() as patch:

        def start(thread: Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(Thread, "start", start)
        with pytest.raises(HostLost):
            Wire.call(open_port.address, KEY)
    Wire.call(open_port.address, KEY).close()
    assert is_soon(answered)
    assert "goes on after RuntimeError: can't start new thread" in caplog.text


def test_a_port_that_is_closed_has_no_thread_and_no_line(open_port, caplog):
    own = [thread for thread in running_threads() if thread.name == "moe-infinity-hosts"][-1]
    open_port.close()
    own.join(20)
    assert not own.is_alive()
    assert not caplog.records


def test_a_host_comes_back_though_it_could_not_be_started_at_first(tmp_path, monkeypatch, caplog):
    placement = ThreadHosts()
    monkeypatch.setattr(cluster_model, "LocalProcesses", lambda: placement)
    monkeypatch.setattr(head, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(head, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(head, "GLANCE_S", 0.05)
    start = placement.start
    failures = [RuntimeError("Ray is away"), OSError("too many processes")]

    def start_at_last(*args: Any) -> None:
        if failures:
            raise failures.pop()
        start(*args)

    with (
        ClusterMoE(build("qwen3_moe", tmp_path / "m"), device="cpu", expert_hosts=1) as moe,
        torch.no_grad(),
    ):
        ids = torch.tensor([[5, 6, 7, 8]])
        moe.model(ids)
        assert moe.hosts is not None
        monkeypatch.setattr(placement, "start", start_at_last)
        placement.wires[1].close()
        moe.model(ids)
        assert not moe.hosts.running
        give_up_at = time.monotonic() + 30
        while not moe.hosts.running:
            assert time.monotonic() < give_up_at
            moe.model(ids)
            time.sleep(0.02)
    assert not failures
    assert "the restart of expert host 1 goes on after" in caplog.text


def test_signs_of_life_go_on_after_an_error_and_end_with_the_connection(monkeypatch, caplog):
    monkeypatch.setattr(expert_host, "SIGN_S", 0.01)
    results: list[Exception | None] = [None, MemoryError("no room"), None, HostLost("gone")]
    is_over = Event()

    def send(message: WireMessage) -> None:
        result = results.pop(0)
        if not results:
            is_over.set()
        if result is not None:
            raise result

    wire: Any = SimpleNamespace(send=send)
    signs = SignsOfLife(wire)
    with signs.given():
        assert is_soon(is_over)
        time.sleep(0.1)  # it would send more
    signs.close()
    assert caplog.text.count("signs of life goes on after MemoryError: no room") == 1
