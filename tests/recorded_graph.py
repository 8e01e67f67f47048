"""The twin of a CUDA graph that a CPU can have: kernels are noted with the memory they work on, and
a replay runs them again, without Python. What CUDA refuses while it captures is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_infinity.kernels.slot_kernels import SlotRows

aten: Any = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.lift_fresh.default}  # for, or from, the host


class Recorder(TorchDispatchMode):
    """Kernels run once when they are recorded; `undo` takes back what they wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITS:
            raise RuntimeError(f"{func}: not permitted when stream is capturing")
        for declared, value in zip(func._schema.arguments, args, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                self._before.append((value, value.clone()))
        out = func(*args, **kwargs)
        known = {memory_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        fresh = [memory_of(t) not in known for t in tree_leaves(out)]
        if any(fresh) or func._schema.is_mutable:  # else a view, which launches nothing
            self.calls.append(partial(run_again, func, args, kwargs, tree_leaves(out), fresh))
        return out

    def undo(self) -> None:
        for value, before in reversed(self._before):
            value.copy_(before)


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def run_again(func: Any, args: Any, kwargs: Any, outs: list[Tensor], fresh: list[bool]) -> None:
    found = tree_leaves(func(*args, **kwargs))
    for out, new, is_fresh in zip(outs, found, fresh, strict=True):
        if is_fresh:
            out.copy_(new)


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """From now on captures are recordings; gives them as they come."""
    found: list[Recorder] = []
    recording: list[Recorder] = []
    compute = SlotRows.compute

    def capture(device: torch.device, run: Callable[[], Any]) -> Callable[[], Any]:
        recorder = Recorder()
        recording.append(recorder)
        try:
            with recorder:
                out = run()
        finally:
            recording.pop()
            recorder.undo()
        found.append(recorder)

        def replay() -> Any:
            for call in recorder.calls:
                call()
            return out

        return replay

    def kernels_of_a_row(self: SlotRows, row: int, x_TD: Tensor, *args: Any) -> Tensor:
        """One call: their twins look into memory with Python."""
        if not recording:
            return compute(self, row, x_TD, *args)
        out_TD = torch.empty_like(x_TD)
        recording[-1].calls.append(lambda: out_TD.copy_(compute(self, row, x_TD, *args)))
        return out_TD

    monkeypatch.setattr("moe_infinity.kernels.graphed_step.capture", capture)
    monkeypatch.setattr(SlotRows, "compute", kernels_of_a_row)
    return found
