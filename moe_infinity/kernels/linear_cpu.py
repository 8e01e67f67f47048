"""The product of a few rows with a dense weight, for decode steps: what experts_cpu.py does for
experts, with a weight that stays where it is. Rounded once, to the dtype of the input.

Legend: T tokens, R rows (outputs), C columns (inputs) of a weight.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from moe_infinity.kernels.experts_cpu import PLAIN, Side, StoredPart, StoredWeight, steps_of
from moe_infinity.kernels.experts_work import LINE, OF_EXPERTS, Call, Job, Weights
from moe_infinity.kernels.row_steps import arrange
from moe_infinity.kernels.threads import num_threads

MIN_SHARED_BYTES = 2 << 20  # smaller ones are read before a second thread has woken up
KINDS = {dtype: kind for kind, dtype in PLAIN.items()}
STATE = OF_EXPERTS + LINE  # int64s


def fused_linear(weight_RC: Tensor) -> FusedLinear | None:
    """None: not a weight that kernels read."""
    kind = KINDS.get(weight_RC.dtype)
    if kind is None or weight_RC.dim() != 2 or not weight_RC.is_contiguous():
        return None
    if weight_RC.device.type != "cpu":
        return None
    shape = weight_RC.shape[0], weight_RC.shape[1]
    weight = StoredWeight(kind, shape, {"": StoredPart(0, weight_RC.dtype, shape)})
    steps = steps_of([weight])
    return None if steps is None else FusedLinear(weight_RC, Side.of([weight], steps, shape[0]))


class FusedLinear:
    """Multiplies with `weight_RC`, which it keeps. Any number of threads may call."""

    def __init__(self, weight_RC: Tensor, side: Side) -> None:
        self.weight_RC = weight_RC.detach()  # of a Parameter, what it holds now
        self._places = side.places
        self._side = side  # keeps what `_weights` points to
        self._weights = Weights(
            up_blocks=side.blocks.ctypes.data,
            num_up=len(side.blocks),
            down_blocks=0,
            num_down=0,
            up_bytes=4 * side.num_rows,
            out_bytes=0,
            activation=0,
            is_gated=0,
        )
        self._is_shared = weight_RC.numel() * weight_RC.itemsize >= MIN_SHARED_BYTES

    def __call__(self, x_TC: Tensor, bias_R: Tensor | None = None) -> Tensor:
        """[T, C] -> [T, R]."""
        x = x_TC.to(torch.float32).contiguous()
        arranged = torch.empty(len(x) * self._places.row_bytes, dtype=torch.uint8)
        arrange(x.data_ptr(), 4 * x.shape[1], arranged.data_ptr(), len(x), self._places)
        out_TR = torch.empty(len(x), len(self.weight_RC))
        ints = array("q", bytes(8 * STATE))
        ints.extend((0, len(x), self.weight_RC.data_ptr()))
        at = ints.buffer_info()[0]
        job = Job(
            state=at,
            starts=at + 8 * STATE,
            stops=at + 8 * (STATE + 1),
            slots=at + 8 * (STATE + 2),
            num_experts=1,
            x=arranged.data_ptr(),
            x_is_shared=0,
            up=out_TR.data_ptr(),
            hidden=0,
            out=0,
        )
        call = Call(self._weights, self._places, job, (ints, arranged, out_TR))
        call.run(num_threads() if self._is_shared else 1)
        if bias_R is not None:
            out_TR += bias_R
        return out_TR.to(x_TC.dtype)
