"""Experts of other hosts: the bits of one process, whatever happens to the hosts."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity.cluster import head
from moe_infinity.cluster import model as cluster_model
from moe_infinity.cluster.local import LocalProcesses
from moe_infinity.cluster.model import ClusterMoE
from moe_infinity.cluster.wire import LENGTHS, Wire
from moe_infinity.errors import ConfigError, HostLost
from tests.closeness import logits_of_steps
from tests.cluster.thread_hosts import ThreadHosts
from tests.gguf_files import build

IDS = torch.arange(3, 51).view(4, 12)
NAMES = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v2", "llama4_text"]


@pytest.fixture
def placement(monkeypatch: pytest.MonkeyPatch) -> ThreadHosts:
    placement = ThreadHosts()
    monkeypatch.setattr(cluster_model, "LocalProcesses", lambda: placement)
    monkeypatch.setattr(head, "FIRST_PAUSE_S", 0.05)
    return placement


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3_moe", tmp_path_factory.mktemp("model"))


def logits(folder: Path, ids: Tensor = IDS, **options: Any) -> Tensor:
    with ClusterMoE(folder, device="cpu", **options) as moe, torch.no_grad():
        return logits_of_steps(moe.model, ids, num_prompt=5)


def logits_of_one_and_four(folder: Path, **options: Any) -> list[Tensor]:
    with ClusterMoE(folder, device="cpu", **options) as moe, torch.no_grad():
        return [logits_of_steps(moe.model, ids, num_prompt=5) for ids in (IDS[:1], IDS)]


def hosts_of(moe: ClusterMoE) -> dict[int, Any]:
    assert moe.hosts is not None
    return moe.hosts.running


def processes_of(moe: ClusterMoE) -> dict[int, subprocess.Popen[bytes]]:
    assert moe.hosts is not None
    placement = moe.hosts.placement
    assert isinstance(placement, LocalProcesses)
    return dict(placement.processes)


def asked_of(moe: ClusterMoE) -> dict[int, int]:
    """Rows that each host has computed since now, as it goes on counting."""
    counted: dict[int, int] = {}
    for share_idx, host in hosts_of(moe).items():
        counted[share_idx] = 0

        def counting(share: Any, share_idx: int = share_idx, ask: Any = host.ask) -> None:
            counted[share_idx] += len(share.input_P)
            ask(share)

        host.ask = counting
    return counted


# equal


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_exact", [False, True])
def test_hosts_change_no_bit(name, is_exact, placement, tmp_path):
    folder = build(name, tmp_path / name)
    alone = logits_of_one_and_four(folder, exact=is_exact)
    for num_hosts, budget in ((1, "100%"), (2, "50%")):
        options = {"exact": is_exact, "expert_hosts": num_hosts, "host_memory": budget}
        found = logits_of_one_and_four(folder, **options)
        assert all(map(torch.equal, found, alone))


def test_every_host_computes_its_share(checkpoint, placement):
    with ClusterMoE(checkpoint, device="cpu", expert_hosts=2) as moe, torch.no_grad():
        logits_of_steps(moe.model, IDS[:, :2])
        counted = asked_of(moe)
        before = moe.report().prefill.lookups
        moe.model(IDS)
        assert min(counted.values()) > 0
        own = moe.report().prefill.lookups - before
        assert 0 < own <= moe.engine.bookkeeping.local_LE.sum()
        assert moe.engine.tiers[-1].slots.num_slots <= -(-16 // 3)


def test_packed_experts_and_text(checkpoint, placement):
    options = {"device": "cpu", "expert_dtype": "int8"}
    with ClusterMoE(checkpoint, **options) as moe:
        alone = moe.generate(IDS, max_new_tokens=6)
    with ClusterMoE(checkpoint, expert_hosts=1, **options) as moe:
        assert torch.equal(moe.generate(IDS, max_new_tokens=6), alone)


# lost


def trouble(kind: str) -> Callable[[ThreadHosts], None]:
    def make(placement: ThreadHosts) -> None:
        setattr(placement.wires[1], kind, True)

    return make


@pytest.mark.parametrize("kind", ["hangs_up", "is_silent"])
def test_a_host_that_is_lost_changes_no_bit_and_comes_back(kind, checkpoint, placement, caplog):
    alone = logits(checkpoint)
    options: dict[str, Any] = {"expert_hosts": 2, "expert_host_timeout": 0.3}
    with ClusterMoE(checkpoint, device="cpu", **options) as moe, torch.no_grad():
        assert torch.equal(logits_of_steps(moe.model, IDS, num_prompt=5), alone)
        setattr(placement.wires[1], kind, True)
        with caplog.at_level(logging.WARNING):
            assert torch.equal(logits_of_steps(moe.model, IDS, num_prompt=5), alone)
        assert "expert host 1 is given up" in caplog.text
        give_up_at = time.monotonic() + 30
        while set(hosts_of(moe)) != {1, 2}:
            assert time.monotonic() < give_up_at
            assert torch.equal(logits_of_steps(moe.model, IDS, num_prompt=5), alone)
        counted = asked_of(moe)
        assert torch.equal(logits_of_steps(moe.model, IDS, num_prompt=5), alone)
        assert counted[1] > 0
    assert placement.num_started == 3


def test_without_any_host_the_head_goes_on(checkpoint, placement):
    alone = logits(checkpoint)
    with ClusterMoE(checkpoint, device="cpu", expert_hosts=2) as moe, torch.no_grad():
        placement.may_start.clear()
        for wire in placement.wires.values():
            wire.close()
        for _ in range(2):
            assert torch.equal(logits_of_steps(moe.model, IDS, num_prompt=5), alone)
        assert not hosts_of(moe)
        moe.check_invariants()


def test_no_host_is_started_again_after_the_others_have_ended(checkpoint, placement, monkeypatch):
    """It would be left behind."""
    is_starting, may_start, has_closed = Event(), Event(), Event()
    start, close = placement.start, placement.close

    def start_slowly(*args: Any) -> None:
        is_starting.set()
        assert may_start.wait(20)
        assert not has_closed.is_set()
        start(*args)

    def close_all() -> None:
        has_closed.set()
        close()

    moe = ClusterMoE(checkpoint, device="cpu", expert_hosts=1)
    with torch.no_grad():
        moe.model(IDS)
        monkeypatch.setattr(placement, "start", start_slowly)
        monkeypatch.setattr(placement, "close", close_all)
        placement.wires[1].close()
        moe.model(IDS)
    assert is_starting.wait(20)
    closing = Thread(target=moe.close)
    closing.start()
    assert not has_closed.wait(0.2)
    may_start.set()
    closing.join(20)
    assert has_closed.is_set()


def test_a_step_that_is_cut_short_leaves_no_answer_for_the_next_one(
    checkpoint, placement, monkeypatch
):
    alone = logits(checkpoint)
    with ClusterMoE(checkpoint, device="cpu", expert_hosts=1) as moe, torch.no_grad():
        logits_of_steps(moe.model, IDS[:, :2])
        layer = moe.engine.path.run_layer

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(moe.engine.path, "run_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            moe.model(IDS)
        monkeypatch.setattr(moe.engine.path, "run_layer", layer)
        assert torch.equal(logits_of_steps(moe.model, IDS, num_prompt=5), alone)
        assert set(hosts_of(moe)) == {1}


@pytest.mark.parametrize("num_bytes", [0, 1, 100])
def test_ctrl_c_while_an_answer_comes_leaves_no_wrong_one(
    num_bytes, checkpoint, placement, monkeypatch
):
    alone = logits(checkpoint)
    with ClusterMoE(checkpoint, device="cpu", expert_hosts=1) as moe, torch.no_grad():
        logits_of_steps(moe.model, IDS[:, :2])
        wire = hosts_of(moe)[1].wire
        read = wire._socket.recv_into
        left = num_bytes

        def interrupted(buffer: memoryview) -> int:
            nonlocal left
            if left == 0:
                left = -1
                raise KeyboardInterrupt
            num_read = read(buffer[: left if left > 0 else len(buffer)])
            left -= num_read if left > 0 else 0
            return num_read

        socket_of = SimpleNamespace(
            recv_into=interrupted, send=wire._socket.send,
            shutdown=wire._socket.shutdown, close=wire._socket.close,
        )  # fmt: skip
        monkeypatch.setattr(wire, "_socket", socket_of)
        with pytest.raises(KeyboardInterrupt):
            moe.model(IDS)
        assert left == -1
        assert torch.equal(logits_of_steps(moe.model, IDS, num_prompt=5), alone)


# refused


def test_a_host_that_cannot_open_the_checkpoint_is_an_error(checkpoint, placement, monkeypatch):
    monkeypatch.setattr(cluster_model, "digest_of", lambda plan, reader: "another")
    with pytest.raises(ConfigError, match="it has another checkpoint"):
        ClusterMoE(checkpoint, device="cpu", expert_hosts=1)


@pytest.mark.parametrize("wrong", [-1, 65, 1.5, True])
def test_numbers_of_hosts_are_checked(wrong, checkpoint):
    with pytest.raises(ConfigError, match="expert_hosts must be a whole number"):
        ClusterMoE(checkpoint, expert_hosts=wrong)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_caller_without_the_key_is_refused(listener):
    refused = []

    def accept() -> None:
        try:
            Wire(listener.accept()[0], b"right", is_caller=False)
        except HostLost as error:
            refused.append(str(error))

    thread = Thread(target=accept)
    thread.start()
    with pytest.raises(HostLost, match="key"):
        Wire.call(listener.getsockname()[:2], b"wrong")
    thread.join(20)
    assert refused == ["the other end does not know the key"]


@pytest.mark.parametrize(
    "data",
    [
        LENGTHS.pack(4, 0) + b"null",
        LENGTHS.pack(2, 0) + b"[]",
        LENGTHS.pack(0, 0),
        LENGTHS.pack(1 << 31, 0),
        LENGTHS.pack(37, 4) + b'[{}, [["x", "float32", [1000000000]]]]' + bytes(4),
        LENGTHS.pack(38, 4) + b'[{}, [["x", "float32", [-1, -1, 1]]]]   ' + bytes(4),
        LENGTHS.pack(33, 4) + b'[{}, [["x", "__name__", [1]]]]   ' + bytes(4),
        b"\xff" * 64,
        b"short",
    ],
)
def test_what_is_no_message_is_an_error(data, listener):
    def send() -> None:
        with socket.create_connection(listener.getsockname()[:2]) as connected:
            wire = Wire(connected, b"key", is_caller=True)
            assert wire is not None
            connected.sendall(data)

    thread = Thread(target=send)
    thread.start()
    wire = Wire(listener.accept()[0], b"key", is_caller=False)
    with pytest.raises(HostLost, match=r"no message|too long|hung up|reset"):
        wire.receive()
    wire.close()
    thread.join(20)


# processes


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_processes_that_are_killed_change_no_token_and_none_is_left(checkpoint):
    with ClusterMoE(checkpoint, device="cpu") as moe:
        alone = moe.generate(IDS, max_new_tokens=12)
    with ClusterMoE(checkpoint, device="cpu", expert_hosts=2) as moe:
        processes = processes_of(moe)
        assert torch.equal(moe.generate(IDS, max_new_tokens=12), alone)
        os.kill(processes[1].pid, signal.SIGKILL)
        os.kill(processes[2].pid, signal.SIGSTOP)
        started = time.monotonic()
        assert torch.equal(moe.generate(IDS, max_new_tokens=12), alone)
        assert time.monotonic() - started < 20
        processes |= processes_of(moe)
    for process in processes.values():
        assert process.poll() is not None


@pytest.mark.timeout(60)
def test_a_host_that_ends_at_once_is_an_error(checkpoint, monkeypatch):
    monkeypatch.setattr(LocalProcesses, "command", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(ConfigError, match="number 1 ended before it was ready"):
        ClusterMoE(checkpoint, device="cpu", expert_hosts=1)
