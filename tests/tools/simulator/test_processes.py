"""Work in several processes: the same results in the same order, and nothing hangs or is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe, resource_tracker
from pathlib import Path
from typing import Any

import pytest

from moe_infinity.errors import ConfigError, MoEInfinityError
from moe_infinity.predict.tracefile import save_trace
from moe_infinity.tools.simulator import processes
from moe_infinity.tools.simulator.laboratory import Experiment, run_experiment
from moe_infinity.tools.simulator.processes import OnWork, run_all, serve
from tests.tools.simulator.traces import one_after_the_other

pytestmark = pytest.mark.timeout(100)


def square(item: int, on_work: OnWork) -> int:
    on_work(item)
    return item * item


def slower_for_the_first(item: int, on_work: OnWork) -> int:
    time.sleep(0.3 * (item == 0))
    return item


def refusing(item: int, on_work: OnWork) -> int:
    if item == 1:
        raise ConfigError("1 is refused")
    return item


def dying(item: int, on_work: OnWork) -> int:
    if item == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return item


def endless(item: int, on_work: OnWork) -> None:
    while True:
        on_work(1)


def no_process_is_left() -> bool:
    return not multiprocessing.active_children()


@pytest.mark.parametrize("jobs", [1, 3])
def test_results_and_work_are_the_same_with_any_number_of_jobs(jobs):
    work: list[int] = []
    assert run_all(square, range(5), jobs=jobs, on_work=work.append) == [0, 1, 4, 9, 16]
    assert sum(work) == 0 + 1 + 2 + 3 + 4
    assert no_process_is_left()


def test_results_come_in_the_order_of_the_items():
    found = run_all(slower_for_the_first, range(4), jobs=2, on_work=lambda work: None)
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_ours_is_raised_as_it_was(jobs):
    with pytest.raises(ConfigError, match="1 is refused"):
        run_all(refusing, range(4), jobs=jobs, on_work=lambda work: None)
    assert no_process_is_left()


def test_a_process_that_dies_is_an_error_that_says_how():
    with pytest.raises(MoEInfinityError, match="ended by signal 9") as error:
        run_all(dying, range(4), jobs=2, on_work=lambda work: None)
    assert "hint: if memory ran out, fewer --jobs" in str(error.value)
    assert no_process_is_left()


def test_what_interrupts_this_process_ends_the_others():
    def interrupt(work: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(endless, range(2), jobs=2, on_work=interrupt)
    assert no_process_is_left()


def test_a_process_that_cannot_take_what_it_is_sent_has_died():
    ours, theirs = Pipe()
    theirs.close()
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    worker = processes._Worker(process, ours)
    with pytest.raises(MoEInfinityError, match="with exit code 0"):
        worker.send(b"anything")


def test_a_process_serves_until_its_pipe_is_closed(monkeypatch):
    monkeypatch.setattr(processes, "TELL_EVERY_S", 0)
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    ours.send(refusing)
    ours.send(1)
    work, is_done, result = ours.recv()
    assert (work, is_done, str(result)) == (0, True, "1 is refused")
    ours.close()
    thread.join(20)
    assert not thread.is_alive()


def test_a_process_that_nobody_hears_ends_in_the_middle_of_its_work(monkeypatch):
    monkeypatch.setattr(processes, "TELL_EVERY_S", 0)
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    ours.send(endless)
    ours.send(0)
    assert ours.recv() == (1, False, None)
    ours.close()
    thread.join(20)
    assert not thread.is_alive()


def test_processes_start_where_there_are_no_signal_masks(monkeypatch):
    resource_tracker.ensure_running()  # Python's own process, whose start on Linux wants them
    monkeypatch.delattr(signal, "pthread_sigmask", raising=False)
    assert run_all(square, range(2), jobs=2, on_work=lambda work: None) == [0, 1]


# Simulations


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.npz"
    save_trace(path, one_after_the_other([(3, 9), (2, 8), (1, 9)]), num_experts=6)
    return path


def test_rows_are_the_same_with_any_number_of_jobs(trace):
    """One and two jobs replay the capacities of a policy together, seven apart."""
    experiment = Experiment.from_text(
        policies="activation-aware", capacities="50%,5", bandwidth="100B/s",
        expert_bytes="50", layer_us=1000.0, prefetch=True,
    )  # fmt: skip
    found = []
    for jobs in (1, 2, 7):
        seen: list[tuple[int, int]] = []
        rows = run_experiment(
            [trace], experiment, jobs=jobs, on_steps=lambda *at, seen=seen: seen.append(at)
        )
        found.append(json.dumps(rows))
        assert seen[0][0] == 0
        assert seen[-1][0] == seen[-1][1]
    assert found[0] == found[1] == found[2]


def test_the_command_takes_a_number_of_jobs(command, trace):
    args = ["simulate", trace, "--policy", "lru", "--capacity", "50%", "--json", "--jobs"]
    one, two = (command(*args, jobs) for jobs in (1, 2))
    assert (one.code, one.out) == (two.code, two.out)
    assert command(*args, 0).code == 2


def test_ctrl_c_while_processes_start_is_answered_when_they_have(monkeypatch):
    """Another thread may get the signal: Python interrupts the main thread for it."""
    ensure_running = resource_tracker.ensure_running

    def pressed() -> None:
        signal.raise_signal(signal.SIGINT)
        ensure_running()

    monkeypatch.setattr(resource_tracker, "ensure_running", pressed)
    with pytest.raises(KeyboardInterrupt):
        run_all(endless, range(2), jobs=2, on_work=lambda work: None)
    assert no_process_is_left()


def test_processes_can_be_started_from_any_thread():
    found: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: found.append(run_all(square, range(2), jobs=2, on_work=lambda work: None))
    )
    thread.start()
    thread.join(60)
    assert found == [[0, 1]]


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def interrupt(it: subprocess.Popen[Any], seconds: float) -> tuple[list[str], float]:
    """Ctrl-C as a terminal sends it, to all processes, so long after there are two."""
    give_up_at = time.monotonic() + 60
    while len(pids := children_of(it.pid)) < 2:
        assert it.poll() is None
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    time.sleep(seconds)
    os.killpg(it.pid, signal.SIGINT)
    return pids, time.monotonic()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "seconds",
    [0.0, pytest.param(0.1, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.slow)],
)
def test_ctrl_c_ends_all_processes_soon_and_without_a_word(tmp_path, seconds):
    """While they start, import and replay."""
    path = tmp_path / "long.npz"
    save_trace(path, one_after_the_other([(3, 4000)]), num_experts=6)
    command = [sys.executable, "-m", "moe_infinity", "simulate", str(path), "--jobs", "2"]
    command += ["--capacity", ",".join(map(str, range(6, 18)))]
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as it:
        pids, pressed_at = interrupt(it, seconds)
        out, err = it.communicate(timeout=60)
    assert (it.returncode, out, err) == (130, b"", b"")
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() - pressed_at < 30  # on a busy machine; below a second as a rule
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_processes_end_with_a_command_that_is_killed(tmp_path):
    path = tmp_path / "long.npz"
    save_trace(path, one_after_the_other([(3, 4000)]), num_experts=6)
    command = [sys.executable, "-m", "moe_infinity", "simulate", str(path), "--jobs", "2"]
    give_up_at = time.monotonic() + 60
    with subprocess.Popen([*command, "--capacity", "50%"], start_new_session=True) as it:
        while len(pids := children_of(it.pid)) < 2:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        time.sleep(1)
        it.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < give_up_at
        time.sleep(0.1)
