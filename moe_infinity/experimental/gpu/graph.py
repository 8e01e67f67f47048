"""Captures what a decode step launches into a CUDA graph.

Private names of torch used here: two of `torch._C` (`_leave_pool`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from moe_infinity.memory.cuda import CAPTURING


def has_graphs(device: torch.device) -> bool:
    """Whether what is launched on this device can be captured."""
    return device.type == "cuda"


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which one model is captured; None without a GPU.

    Each model has its own of torch's 32 streams. When a graph is freed, torch 2.13 frees cuBLAS
    memory of all graphs that were captured on its stream (torch's issue 193402).
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def capture(stream: torch.cuda.Stream | None, run: Callable[[], Any]) -> Callable[[], Any]:
    """Capture the kernels that `run` launches. Returns a function that launches them again, with
    the same memory for inputs and outputs, and returns what `run` returned. For devices that
    `has_graphs` allows.
    """
    assert stream is not None
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    with CAPTURING:
        # A model that is collected waits for its device, in any thread, and that would end the
        # capture: so nothing is collected meanwhile.
        restore_gc = gc.enable if gc.isenabled() else gc.disable
        try:
            gc.disable()
            with (
                torch.cuda.device(stream.device),
                # A capture that fails leaves its own stream current.
                torch.cuda.stream(torch.cuda.current_stream(stream.device)),
                # "thread_local": read threads may page-lock memory during the capture.
                torch.cuda.graph(graph, pool, stream, "thread_local"),
            ):
                out = run()
        except BaseException:
            _leave_pool(stream.device, pool)
            raise
        finally:
            restore_gc()

    def replay() -> Any:
        graph.replay()
        return out

    return replay


def _leave_pool(device: torch.device, pool: Any) -> None:
    """End a capture that CUDA has ended for torch too.

    torch 2.11 goes on as if the capture were under way. Then no other capture can begin, no memory
    be freed (which every new model does), and no random number be drawn.
    """
    with suppress(RuntimeError, AttributeError):  # torch has ended it, or a later torch has renamed
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


def copy_of(out: Any, replaced: Any = None, by: Any = None) -> Any:
    """A copy of a model's output that the next replay does not overwrite, and which has `by` in
    place of `replaced`.
    """
    if isinstance(out, Tensor):
        return out.clone()
    if isinstance(out, ModelOutput):
        return type(out)(**{name: copy_of(v, replaced, by) for name, v in out.items()})
    if isinstance(out, tuple):
        return tuple(copy_of(value, replaced, by) for value in out)
    return by if replaced is not None and out is replaced else out
