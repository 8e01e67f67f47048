"""Linear layers: what experts.py does for experts, with weights that never move.

Legend: T tokens, R rows (outputs), C columns (inputs) of a weight.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_infinity.experts import ParamSpec
from moe_infinity.kernels import host_float32, many_rows
from moe_infinity.kernels.cpu.arrangement import arrange_by
from moe_infinity.kernels.cpu.product import Product
from moe_infinity.kernels.cpu.team import num_threads
from moe_infinity.kernels.cpu.widened import WidenedLinear, Widening
from moe_infinity.kernels.cpu.work import ExpertMlp, run_job
from moe_infinity.kernels.many_rows import RowPath, row_path
from moe_infinity.layout import PackedWeight, WeightLayout

# What takes less is done before a second thread has woken up.
MIN_SHARED_BYTES = 2 << 20  # of weights to read
MIN_SHARED_PRODUCTS = 4 << 20


def product_of(weights: Sequence[Tensor | PackedWeight]) -> Product | None:
    """The product with weights [R, C] of equal C, read where they are. None: kernels do not read
    them.
    """
    layouts = _layouts_of(weights)
    return None if layouts is None else Product.of(layouts)


def _layouts_of(weights: Sequence[Tensor | PackedWeight]) -> list[WeightLayout] | None:
    layouts = []  # offsets are addresses
    for weight in weights:
        if isinstance(weight, PackedWeight):
            layouts.append(weight.layout.moved(weight.memory.data_ptr()))
            continue
        if weight.dim() != 2 or not weight.is_contiguous() or not weight.is_cpu:
            return None
        dtype = str(weight.dtype).removeprefix("torch.")
        spec = ParamSpec("", tuple(weight.shape), dtype, weight.data_ptr())
        layouts.append(WeightLayout.plain(spec))
    return layouts


def fused_linear(weights: Sequence[Tensor | PackedWeight]) -> FusedLinear | None:
    """A linear layer for weights that multiply the same input. None: kernels do not read them."""
    layouts = _layouts_of(weights)
    few = None if layouts is None else Product.of(layouts)
    if layouts is None or few is None:
        return None
    kept = [w.detach() if isinstance(w, Tensor) else w for w in weights]
    wide = Widening.of(layouts) if many_rows.has_products_of_matrices() else None
    return FusedLinear(
        kept,
        few,
        in_panels=Product.of(layouts, path=RowPath.PANELS),
        in_half_panels=Product.of(layouts, path=RowPath.HALF_PANELS),
        widened=None if wide is None else WidenedLinear(wide),
    )


class _Described(NamedTuple):
    """A product, and an ExpertMlp in memory whose first product it is and which has no second."""

    product: Product
    mlp: array[int]

    @classmethod
    def of(cls, product: Product) -> _Described:
        mlp = ExpertMlp(
            up_blocks=product.blocks.ctypes.data,
            num_up=len(product.blocks),
            up_bytes=4 * product.num_rows,
        )
        return cls(product, array("q", mlp))


class FusedLinear:
    """Multiplies with `weights`, which it keeps. Any number of threads may call."""

    def __init__(
        self,
        weights: list[Tensor | PackedWeight],
        few: Product,
        *,
        in_panels: Product | None = None,
        in_half_panels: Product | None = None,
        widened: WidenedLinear | None = None,
    ) -> None:
        self.weights = weights
        self._few = _Described.of(few)
        self._in_panels = _Described.of(in_panels or few)
        self._in_half_panels = _Described.of(in_half_panels or in_panels or few)
        self._widened = widened
        self._heights = list(map(len, weights))
        self._num_bytes = sum(weight.nbytes for weight in weights)

    def __call__(self, x_TC: Tensor, biases: Sequence[Tensor | None] = ()) -> Tensor:
        """[T, C] -> [T, R of all weights], in float32 or, if torch multiplies, in bfloat16. Each
        weight may have a bias.
        """
        path = row_path(len(x_TC), x_TC.dtype)
        if path is RowPath.WIDENED and self._widened is not None:
            return self._widened(x_TC, self._joined(biases))
        described = self._few
        if path is not RowPath.FEW:
            is_half = path is RowPath.HALF_PANELS
            described = self._in_half_panels if is_half else self._in_panels
        product, mlp = described
        x = x_TC.to(torch.float32).contiguous()
        arranged = host_float32(len(x), product.arrangement.row_bytes // 4)
        arranged_by = product.arranged_by.buffer_info()[0]
        arrange_by(x.data_ptr(), 4 * x.shape[1], arranged.data_ptr(), len(x), arranged_by)
        out_TR = host_float32(len(x), product.num_rows)
        run_job(  # one "expert" has all rows; the arguments have the addresses of its weights
            mlp,
            product.arranged_by,  # not used: there is no second product
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
        if any(bias is not None for bias in biases):
            for out, bias in zip(out_TR.split(self._heights, 1), biases, strict=False):
                if bias is not None:
                    out += bias
        return out_TR

    def _joined(self, biases: Sequence[Tensor | None]) -> Tensor | None:
        """The biases of all weights as one, or None if there is none."""
        if all(bias is None for bias in biases):
            return None
        dtype = next(bias.dtype for bias in biases if bias is not None)
        return torch.cat(
            [
                torch.zeros(height, dtype=dtype, device="cpu") if bias is None else bias
                for height, bias in zip(self._heights, biases, strict=True)
            ]
        )

    def _is_worth_sharing(self, num_tokens: int) -> bool:
        product = self._few.product
        num_products = num_tokens * product.num_rows * product.num_columns
        return self._num_bytes >= MIN_SHARED_BYTES or num_products >= MIN_SHARED_PRODUCTS
