"""The product of a few rows with dense weights, for decode steps: what experts_cpu.py does for
experts, with weights that stay where they are. Rounded once, to the dtype of the input.

Legend: T tokens, R rows (outputs), C columns (inputs) of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_infinity.checkpoint.layout import KINDS, StoredPart, StoredWeight
from moe_infinity.kernels import host_float32
from moe_infinity.kernels.cpu.experts import Side, steps_of
from moe_infinity.kernels.cpu.steps import arrange
from moe_infinity.kernels.cpu.threads import num_threads
from moe_infinity.kernels.cpu.work import Call, Weights, job_for

MIN_SHARED_BYTES = 2 << 20  # smaller ones are read before a second thread has woken up


def fused_linear(weights: Sequence[Tensor]) -> FusedLinear | None:
    """For weights [R, C] of equal C that are given one input. None: kernels do not read them."""
    stored = []
    for weight in weights:
        kind = KINDS.get(weight.dtype)
        if kind is None or weight.dim() != 2 or not weight.is_contiguous() or not weight.is_cpu:
            return None
        shape = weight.shape[0], weight.shape[1]
        part = StoredPart(weight.data_ptr(), weight.dtype, shape)
        stored.append(StoredWeight(kind, shape, {"": part}))
    steps = steps_of(stored)
    if steps is None or len({weight.shape[1] for weight in weights}) > 1:
        return None
    side = Side.of(stored, steps, sum(weight.shape[0] for weight in weights))
    return FusedLinear([weight.detach() for weight in weights], side)


class FusedLinear:
    """Multiplies with `weights`, which it keeps. Any number of threads may call."""

    def __init__(self, weights: list[Tensor], side: Side) -> None:
        self.weights = weights
        self._places = side.places
        self._side = side  # keeps what `_told` points to
        self._told = Weights(
            up_blocks=side.blocks.ctypes.data,
            num_up=len(side.blocks),
            up_bytes=4 * side.num_rows,
        )
        num_bytes = sum(weight.numel() * weight.itemsize for weight in weights)
        self._is_shared = num_bytes >= MIN_SHARED_BYTES

    def __call__(self, x_TC: Tensor) -> Tensor:
        """[T, C] -> [T, R of all weights] in float32."""
        x = x_TC.to(torch.float32).contiguous()
        arranged = torch.empty(len(x) * self._places.row_bytes, dtype=torch.uint8, device="cpu")
        arrange(x.data_ptr(), 4 * x.shape[1], arranged.data_ptr(), len(x), self._places)
        out_TR = host_float32(len(x), self._side.num_rows)
        job, ints = job_for(  # one "expert" has all rows; addresses of weights are absolute
            [0],
            [len(x)],
            [0],
            x=arranged.data_ptr(),
            x_is_shared=0,
            up=out_TR.data_ptr(),
            hidden=0,
            out=0,
        )
        call = Call(self._told, self._places, job, (ints, arranged, out_TR))
        call.run(num_threads() if self._is_shared else 1)
        return out_TR
