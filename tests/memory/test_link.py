"""CudaLink asks torch for the right things in the right order. torch.cuda is played by notes; what
a GPU makes of it, tests/test_gpu.py says."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_infinity.memory.link import CudaLink

CPU = torch.device("cpu")


class Notes:
    """What was asked, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.registered: dict[int, int] = {}
        self.flags = 0
        self.is_over = True
        self.result = "success"

    def event(self, **options: Any) -> Event:
        return Event(self)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        self.asked.append(f"on {stream.name}")
        return nullcontext()

    def register(self, address: int, num_bytes: int, flags: int) -> str:
        self.registered[address], self.flags = num_bytes, flags
        return self.result


class Event:
    num_made = 0

    def __init__(self, notes: Notes) -> None:
        Event.num_made += 1
        self.name = f"event {Event.num_made}"
        self._notes = notes

    def record(self, stream: Stream) -> None:
        self._notes.asked.append(f"{stream.name} records {self.name}")

    def query(self) -> bool:
        return self._notes.is_over

    def synchronize(self) -> None:
        self._notes.asked.append(f"the CPU waits for {self.name}")

    def elapsed_time(self, other: Event) -> float:
        return 2.0  # ms


class Stream:
    def __init__(self, notes: Notes, name: str) -> None:
        self.name = name
        self._notes = notes

    def wait_event(self, event: Event) -> None:
        self._notes.asked.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        event = Event(self._notes)
        event.record(self)
        return event


@pytest.fixture
def notes(monkeypatch):
    notes = Notes()
    Event.num_made = 0
    cudart = SimpleNamespace(
        cudaError=SimpleNamespace(success="success"),
        cudaHostRegister=notes.register,
        cudaHostUnregister=notes.registered.pop,
    )
    for name, stand_in in {
        "empty_cache": lambda: None,
        "Stream": lambda device: Stream(notes, "copies"),
        "current_stream": lambda device: Stream(notes, "kernels"),
        "Event": notes.event,
        "stream": notes.on,
        "device": lambda device: nullcontext(),
        "cudart": lambda: cudart,
    }.items():
        assert hasattr(torch.cuda, name), name
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return notes


def test_a_copy_is_between_two_events_after_the_mark(notes):
    link = CudaLink(CPU)
    source, destination = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    copy = link.copy(source, destination, link.mark())
    assert torch.equal(source, destination)
    assert notes.asked == [
        "kernels records event 1",
        "on copies",
        "copies waits for event 1",
        "copies records event 2",
        "copies records event 3",
    ]
    assert copy.took_s == 2e-3
    copy.synchronize()
    assert notes.asked[-1] == "the CPU waits for event 3"


def test_kernels_wait_between_two_events_that_tell_for_how_long(notes):
    link = CudaLink(CPU)
    copy = link.copy(torch.zeros(1), torch.zeros(1), None)
    notes.asked.clear()
    link.let_kernels_wait(copy)
    assert notes.asked == [
        "kernels records event 3",
        "kernels waits for event 2",
        "kernels records event 4",
    ]
    notes.is_over = False
    assert link.take_stall_s() == 0
    notes.is_over = True
    assert link.take_stall_s() == 2e-3
    assert link.take_stall_s() == 0


def test_pages_are_registered_and_given_back(notes):
    link, memory = CudaLink(CPU), torch.zeros(100, dtype=torch.uint8)
    assert link.page_lock(memory)
    assert notes.registered == {memory.data_ptr(): 100}
    assert notes.flags == 1, "cudaHostRegisterPortable: for all devices"
    link.page_unlock(memory)
    assert not notes.registered


def test_pages_the_machine_will_not_lock_are_said_to_be_so(notes, caplog):
    notes.result = "out of memory"
    assert not CudaLink(CPU).page_lock(torch.zeros(100, dtype=torch.uint8))
    assert "100 bytes cannot be page-locked: out of memory" in caplog.text
