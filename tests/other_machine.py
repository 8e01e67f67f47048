"""A machine whose matrix library rounds the other way, for `make test-rounding`.

Which kernel computes a product, and so its last bit, depends on the processor, on the library and
on the sizes. Here one in four results of every product and of attention, in float32, bfloat16 and
float16, has its last bit flipped: which ones, its own bits and the sizes say. So what promises the
same bits (the same products of the same numbers, one by one or several at once) keeps them, on any
thread, and any two arithmetics are further apart than on one machine.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

# As wide as the numbers, and the exponent of what is not finite.
BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
PRODUCTS = [
    *(f"{name}{kind}" for name in ("mm", "bmm") for kind in ("", ".out")),
    *(f"{name}{kind}" for name in ("addmm", "addmv", "baddbmm") for kind in ("", ".out", "_")),
    "_scaled_dot_product_flash_attention_for_cpu",
]

_LIBRARY = torch.library.Library("aten", "IMPL")


def round_the_other_way(machine: str) -> None:
    """From now on, in this process, on a CPU; as the machine of that name would."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once", UserWarning)  # kernels of torch
        for product in PRODUCTS:
            _LIBRARY.impl(product, _rounded(product, machine), "CPU", with_keyset=True)


def _rounded(product: str, machine: str) -> Any:
    kernel = torch.library.get_kernel(f"aten::{product}", "CPU")
    kind = (
        product.removesuffix(".out").removesuffix("_").replace("bmm", "mm").replace("badd", "add")
    )

    def rounded(keys: Any, *args: Any, **kwargs: Any) -> Any:
        found = kernel.call_boxed(keys, *args, **kwargs)
        out = found[0] if isinstance(found, tuple) else found
        sizes = tuple(tuple(arg.shape[-2:]) for arg in args if isinstance(arg, Tensor))
        flip_last_bits(out, _seed(f"{machine} {kind}", sizes))
        return found

    return rounded


@cache
def _seed(name: str, sizes: tuple[tuple[int, ...], ...]) -> int:
    return crc32(f"{name} {sizes}".encode()) >> 8


def flip_last_bits(numbers: Tensor, seed: int) -> None:
    """Of one in four, in place; zero and what is not finite stay."""
    if numbers.dtype in BITS:
        integer, exponent = BITS[numbers.dtype]
        bits = numbers.view(integer)
        chosen = (bits.int() * -1640531527 + seed) >> 24 & 3 == 0
        bits ^= (chosen & (numbers != 0) & (bits & exponent != exponent)).to(integer)
