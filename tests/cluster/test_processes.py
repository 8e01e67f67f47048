"""Hosts as processes, killed and cut off at random moments, also in a network of their own."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.cluster import head
from moe_infinity.cluster import model as cluster_model
from moe_infinity.cluster.local import LocalProcesses
from moe_infinity.cluster.model import ClusterMoE
from moe_infinity.system.machine import numa_nodes
from tests.gguf_files import build

IDS = torch.arange(3, 27).view(2, 12)
NUM_TOKENS = 60
NUM_MOMENTS = 10
BACK_S = 120.0
PAUSE_S = 0.5  # between answers: a host that starts needs a core, too
HEAD, HOST = "10.213.77.1", "10.213.77.2"
NAMESPACE, OUTER, INNER = "moe-infinity", "moe-infinity0", "moe-infinity1"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3_moe", tmp_path_factory.mktemp("model"), num_hidden_layers=4)


def tokens(moe: MoE) -> torch.Tensor:
    found: torch.Tensor = moe.generate(IDS, max_new_tokens=NUM_TOKENS)
    return found


def survives(
    caplog: pytest.LogCaptureFixture,
    checkpoint: Path,
    trouble: Callable[[ClusterMoE], None],
    repair: Callable[[], None] | None = None,
) -> None:
    """Trouble at random moments of answers changes no token, and the host comes back."""
    caplog.set_level(logging.WARNING)
    with MoE(checkpoint, device="cpu") as moe:
        alone = tokens(moe)
    moments = random.Random(0)
    options = {"expert_host_timeout": 0.5}
    with ClusterMoE(checkpoint, options, device="cpu", expert_hosts=1) as moe:
        hosts = moe.hosts
        assert hosts is not None
        tokens(moe)
        started = time.monotonic()
        assert torch.equal(tokens(moe), alone)
        took_s = time.monotonic() - started
        for _ in range(NUM_MOMENTS):
            timer = Timer(moments.uniform(0, took_s), trouble, [moe])
            timer.start()
            assert torch.equal(tokens(moe), alone)
            timer.join()
            if repair is not None:
                repair()
            give_up_at = time.monotonic() + BACK_S
            running = hosts.running.get(1)
            while running is None or running is not hosts.running.get(1):
                running = hosts.running.get(1)
                assert time.monotonic() < give_up_at
                time.sleep(PAUSE_S)
                assert torch.equal(tokens(moe), alone)
        assert isinstance(hosts.placement, LocalProcesses)
        (process,) = hosts.placement.processes.values()
    assert process.poll() is not None
    assert caplog.text.count("expert host 1 is given up") >= NUM_MOMENTS // 2


def process_of(moe: ClusterMoE) -> subprocess.Popen[bytes]:
    assert moe.hosts is not None
    placement = moe.hosts.placement
    assert isinstance(placement, LocalProcesses)
    return placement.processes[1]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(head, "LONGEST_PAUSE_S", 0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_that_is_killed_at_any_moment_changes_no_token(checkpoint, caplog):
    survives(caplog, checkpoint, lambda moe: os.kill(process_of(moe).pid, signal.SIGKILL))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_hosts_end_with_a_head_that_is_killed(checkpoint):
    program = (
        "import sys; from moe_infinity.cluster.model import ClusterMoE\n"
        f"moe = ClusterMoE({str(checkpoint)!r}, device='cpu', expert_hosts=2)\n"
        "print(*(p.pid for p in moe.hosts.placement.processes.values()), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        pids = list(map(int, it.stdout.readline().split()))
        assert len(pids) == 2
        it.kill()
    give_up_at = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < give_up_at
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Zombies are not: whoever inherits them has not asked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host's processes run in a network of their own, behind a cable."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs the right to make networks")
    try:
        ip("netns", "add", NAMESPACE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network can be made here: {error.stderr.decode()}")
    try:
        ip("link", "add", OUTER, "type", "veth", "peer", "name", INNER, "netns", NAMESPACE)
        ip("addr", "add", f"{HEAD}/24", "dev", OUTER)
        ip("link", "set", OUTER, "up")
        inside = ("-n", NAMESPACE)
        ip(*inside, "addr", "add", f"{HOST}/24", "dev", INNER)
        ip(*inside, "link", "set", INNER, "up")
        ip(*inside, "link", "set", "lo", "up")

        class Behind(LocalProcesses):
            listen_on = HEAD
            command = ("ip", "netns", "exec", NAMESPACE, *LocalProcesses.command)

        monkeypatch.setattr(cluster_model, "LocalProcesses", Behind)
        yield
    finally:
        ip("netns", "del", NAMESPACE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("network")
def test_a_cable_that_is_cut_at_any_moment_changes_no_token(checkpoint, caplog):
    survives(
        caplog,
        checkpoint,
        lambda moe: ip("link", "set", OUTER, "down"),
        lambda: ip("link", "set", OUTER, "up"),
    )


def test_nodes_have_all_cores_or_are_not_known():
    nodes = numa_nodes()
    cores = [core for node in nodes for core in node]
    assert cores == [] or sorted(cores) == sorted(set(cores))
