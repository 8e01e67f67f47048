"""TorchCudaDevice calls torch in the right order. A stand-in for torch.cuda notes the calls;
tests/gpu/test_gpu.py runs the same on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from moe_infinity.memory.cuda import TorchCudaDevice
from tests.cuda_notes import note_cuda

CPU = torch.device("cpu")


@pytest.fixture
def notes(monkeypatch):
    return note_cuda(monkeypatch)


def test_a_copy_is_between_two_events_after_the_mark(notes):
    cuda_device = TorchCudaDevice(CPU)
    source, destination = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    copy = cuda_device.copy(source, destination, cuda_device.mark())
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
    cuda_device = TorchCudaDevice(CPU)
    copy = cuda_device.copy(torch.zeros(1), torch.zeros(1), None)
    notes.asked.clear()
    cuda_device.let_kernels_wait(copy)
    assert notes.asked == [
        "kernels records event 3",
        "kernels waits for event 2",
        "kernels records event 4",
    ]
    notes.is_over = False
    assert cuda_device.take_stall_s() == 0
    notes.is_over = True
    assert cuda_device.take_stall_s() == 2e-3
    assert cuda_device.take_stall_s() == 0


def test_pages_are_registered_and_given_back(notes):
    cuda_device, memory = TorchCudaDevice(CPU), torch.zeros(100, dtype=torch.uint8)
    assert cuda_device.page_lock(memory)
    assert notes.registered == {memory.data_ptr(): 100}
    assert notes.flags == 1, "cudaHostRegisterPortable: for all devices"
    cuda_device.page_unlock(memory)
    assert not notes.registered


def test_pages_the_machine_will_not_lock_are_said_to_be_so(notes, caplog):
    notes.result = "out of memory"
    assert not TorchCudaDevice(CPU).page_lock(torch.zeros(100, dtype=torch.uint8))
    assert "100 bytes cannot be page-locked: out of memory" in caplog.text
