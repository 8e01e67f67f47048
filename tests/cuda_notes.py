"""torch.cuda, played by notes of what was asked of it, in order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch


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


def note_cuda(monkeypatch: pytest.MonkeyPatch) -> Notes:
    """In the place of what a torch without CUDA has."""
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
