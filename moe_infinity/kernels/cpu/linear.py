"""Linear layers for few tokens: what experts.py does for experts, with weights that never move.
Results are float32.

Legend: T tokens, R rows (outputs), C columns (inputs) of a weight.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_infinity.experts import ParamSpec
from moe_infinity.kernels import host_float32
from moe_infinity.kernels.cpu.arrangement import arrange
from moe_infinity.kernels.cpu.experts import Product
from moe_infinity.kernels.cpu.team import num_threads
from moe_infinity.kernels.cpu.work import ExpertMlp, run_job
from moe_infinity.layout import PackedWeight, WeightLayout

# What takes less is done before a second thread has woken up.
MIN_SHARED_BYTES = 2 << 20  # of weights to read
MIN_SHARED_PRODUCTS = 4 << 20


def product_of(weights: Sequence[Tensor | PackedWeight]) -> Product | None:
    """The product with weights [R, C] of equal C, read where they are. None: kernels do not read
    them.
    """
    layouts = []  # from a slot that begins at 0
    for weight in weights:
        if isinstance(weight, PackedWeight):
            layouts.append(weight.layout.moved(weight.memory.data_ptr()))
            continue
        if weight.dim() != 2 or not weight.is_contiguous() or not weight.is_cpu:
            return None
        dtype = str(weight.dtype).removeprefix("torch.")
        spec = ParamSpec("", tuple(weight.shape), dtype, weight.data_ptr())
        layouts.append(WeightLayout.plain(spec))
    return Product.of(layouts)


def fused_linear(weights: Sequence[Tensor | PackedWeight]) -> FusedLinear | None:
    """A linear layer for weights that multiply the same input. None: kernels do not read them."""
    product = product_of(weights)
    if product is None:
        return None
    return FusedLinear([w.detach() if isinstance(w, Tensor) else w for w in weights], product)


class FusedLinear:
    """Multiplies with `weights`, which it keeps. Any number of threads may call."""

    def __init__(self, weights: list[Tensor | PackedWeight], product: Product) -> None:
        self.weights = weights
        self._arrangement = product.arrangement
        self._product = product  # keeps what `_mlp` points to
        mlp = ExpertMlp(
            up_blocks=product.blocks.ctypes.data,
            num_up=len(product.blocks),
            up_bytes=4 * product.num_rows,
        )
        self._mlp = array("q", mlp)
        self._unused = array("q", product.arrangement)  # there is no second product
        self._num_bytes = sum(weight.nbytes for weight in weights)

    def __call__(self, x_TC: Tensor) -> Tensor:
        """[T, C] -> [T, R of all weights] in float32."""
        x = x_TC.to(torch.float32).contiguous()
        arranged = torch.empty(
            len(x) * self._arrangement.row_bytes, dtype=torch.uint8, device="cpu"
        )
        arrange(x.data_ptr(), 4 * x.shape[1], arranged.data_ptr(), len(x), self._arrangement)
        out_TR = host_float32(len(x), self._product.num_rows)
        run_job(  # one "expert" has all rows; addresses of weights are absolute
            self._mlp,
            self._unused,
            [0],
            [len(x)],
            [0],
            num_threads=num_threads() if self._is_worth_sharing(len(x)) else 1,
            x=arranged.data_ptr(),
            x_is_shared=0,
            up=out_TR.data_ptr(),
            hidden=0,
            out=0,
        )
        return out_TR

    def _is_worth_sharing(self, num_tokens: int) -> bool:
        num_products = num_tokens * self._product.num_rows * self._product.num_columns
        return self._num_bytes >= MIN_SHARED_BYTES or num_products >= MIN_SHARED_PRODUCTS
