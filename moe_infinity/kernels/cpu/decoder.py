"""The weights around the experts of a decoder layer, and where they lie, for decoder_call.py.

Legend: B sequences, D model width, H heads, G heads of keys and values, N tokens of the cache with
the new one, d width of a head, v of its values, E experts.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_infinity.kernels.cpu.arrangement import Arrangement, arrangement_for
from moe_infinity.kernels.cpu.attention import MAX_WIDTH
from moe_infinity.kernels.cpu.decoder_call import layer_function
from moe_infinity.kernels.cpu.layer_call import (
    HALVES,
    NEIGHBOURS,
    NO_NORM,
    NORM_OF_ALL,
    NORM_OF_HEADS,
    LayerCall,
    LayerNumbers,
)
from moe_infinity.kernels.cpu.linear import product_of
from moe_infinity.kernels.cpu.product import Product
from moe_infinity.kernels.cpu.put_row import PACKINGS, row_arguments, row_loop
from moe_infinity.kernels.cpu.routed import OF_ALL, OF_CHOSEN
from moe_infinity.kernels.cpu.rows import row_function
from moe_infinity.kernels.cpu.steps import InnerLoop, arguments_for, loop_for
from moe_infinity.kernels.cpu.vectors import LANES
from moe_infinity.kernels.cpu.work import BIASES
from moe_infinity.layout import KINDS, PackedWeight
from moe_infinity.system.machine import yield_address

Weight = Tensor | PackedWeight

__all__ = [
    "HALVES",
    "NEIGHBOURS",
    "OF_ALL",
    "OF_CHOSEN",
    "Attention",
    "Gate",
    "DecoderKernel",
    "Router",
]


class Gate(NamedTuple):
    """The rule by which a router chooses; see routed.py."""

    top_k: int
    softmax_over: int  # OF_ALL or OF_CHOSEN
    dtype: torch.dtype  # that weights are rounded to


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts for the norm of the residual."""

    weight: Tensor  # [E, D]
    bias: Tensor | None  # [E], added to logits
    gate: Gate


@dataclass(frozen=True, slots=True)
class Attention:
    """The weights of one layer, and how it attends."""

    products: tuple[Weight, Weight, Weight]  # [H * d, D], [G * d, D], [G * v, D]
    biases: tuple[Tensor, Tensor, Tensor] | None
    out: Weight  # [D, H * v]
    out_bias: Tensor | None
    norm: Tensor  # [D], as it is multiplied with
    norm_eps: float
    residual_norm: Tensor  # [D]
    residual_norm_eps: float
    query_norm: Tensor | None  # [d] of each head, or [H * d] of all
    key_norm: Tensor | None
    query_norm_eps: float
    key_norm_eps: float
    sinks: Tensor | None  # [H]
    router: Router | None  # None: the caller chooses
    scale: float
    num_heads: int
    num_groups: int
    rotated: int  # columns of a head
    pairs: int  # HALVES or NEIGHBOURS

    @property
    def head_width(self) -> int:
        return len(self.products[0]) // self.num_heads

    @property
    def value_width(self) -> int:
        return len(self.products[2]) // self.num_groups

    @property
    def norms(self) -> int:
        """The kind of norm of queries and keys."""
        if self.query_norm is None:
            return NO_NORM
        return NORM_OF_HEADS if len(self.query_norm) == self.head_width else NORM_OF_ALL


class DecoderKernel:
    """One layer as machine code sees it: addresses, and the memory that they point to, which it
    keeps. decoder_steps.py calls it.
    """

    def __init__(self, layer: Attention, dtype: torch.dtype, kv_dtype: str = "auto") -> None:
        """`dtype` is that of x, and of the cache unless `kv_dtype` packs it. Raises ValueError for
        what kernels do not know.
        """
        self.layer = layer
        self.dtype = dtype
        self.packing = "" if kv_dtype == "auto" else kv_dtype
        self._products = _Products.of(layer, dtype, self.packing)
        self._vectors: list[Tensor] = []  # kept, as the call has their addresses
        self._arrangements: list[array[int]] = []
        width = layer.head_width
        keys = self._products.keys
        self.key_arguments = arguments_for(keys, (1, width), (1, width), 1)
        if self.packing:
            self.key_arguments = row_arguments(keys, width)
        self.fixed = self._call_of_layer()
        vectors = layer.value_width // LANES
        self.function: int = layer_function(keys.kind, vectors).address

    @property
    def cache_kind(self) -> str:
        """The kind of numbers in the cache."""
        return self._products.keys.kind

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """The bytes that one sequence takes in the memory of LayerCall from `hidden` to `out`, in
        its order.
        """
        return self._products.row_bytes

    def _call_of_layer(self) -> LayerCall:
        """The fields of a LayerCall that stay the same from call to call."""
        layer = self.layer
        products = self._products
        numbers = LayerNumbers(
            norm_eps=layer.norm_eps,
            query_norm_eps=layer.query_norm_eps,
            key_norm_eps=layer.key_norm_eps,
            residual_norm_eps=layer.residual_norm_eps,
            score_scale=layer.scale,
        )
        bias = None if layer.biases is None else torch.cat(layer.biases)
        return LayerCall(**dict.fromkeys(LayerCall._fields, 0))._replace(
            yield_=yield_address(),
            dtype=index_of(self.dtype),
            packing=PACKINGS.index(self.packing),
            width=len(layer.out),
            num_groups=layer.num_groups,
            per_group=layer.num_heads // layer.num_groups,
            head_width=layer.head_width,
            value_width=layer.value_width,
            rotated=layer.rotated,
            pairs=layer.pairs,
            norms=layer.norms,
            numbers=self._kept(torch.tensor(numbers, dtype=torch.float32, device="cpu")),
            norm=self._kept(layer.norm),
            query_norm=self._kept(layer.query_norm),
            key_norm=self._kept(layer.key_norm),
            residual_norm=self._kept(layer.residual_norm),
            blocks=products.first.blocks.ctypes.data,
            num_blocks=len(products.first.blocks),
            bias=self._kept(bias),
            sinks=self._kept(layer.sinks),
            out_blocks=products.last.blocks.ctypes.data,
            num_out_blocks=len(products.last.blocks),
            out_bias=self._kept(layer.out_bias),
            x_arrangement=self._arranged(products.first.arrangement),
            query_arrangement=self._arranged(products.query_arrangement),
            out_arrangement=self._arranged(products.last.arrangement),
            score=row_function(products.keys).address,
            **self._of_router(),
        )

    def _of_router(self) -> dict[str, int]:
        router = self.layer.router
        product = self._products.router
        if router is None or product is None:
            return {}
        return {
            "router_blocks": product.blocks.ctypes.data,
            "num_router_blocks": len(product.blocks),
            "num_experts": product.num_rows,
            "router_bias": self._kept(router.bias),
            "router_arrangement": self._arranged(product.arrangement),
            "top_k": router.gate.top_k,
            "softmax_over": router.gate.softmax_over,
            "weights_dtype": index_of(router.gate.dtype),
        }

    def _kept(self, vector: Tensor | None) -> int:
        """The address of a copy in float32; 0 for None."""
        if vector is None:
            return 0
        self._vectors.append(vector.detach().to(torch.float32).contiguous().clone())
        return self._vectors[-1].data_ptr()

    def _arranged(self, arrangement: Arrangement) -> int:
        self._arrangements.append(array("q", arrangement))
        return self._arrangements[-1].buffer_info()[0]


def index_of(dtype: torch.dtype) -> int:
    """The index of the dtype in BIASES. Raises ValueError if it is not one of them."""
    return BIASES.index(str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class _Products:
    """The weights of one layer, ready for machine code."""

    first: Product  # queries, keys, values
    last: Product
    router: Product | None
    keys: InnerLoop  # of keys as rows of a weight
    query_arrangement: Arrangement
    row_bytes: tuple[int, ...]  # of one sequence: LayerCall's memory, in its order, but scores

    @classmethod
    def of(cls, layer: Attention, dtype: torch.dtype, packing: str) -> _Products:
        """Raises ValueError for what kernels do not know."""
        kind = KINDS.get(dtype)
        first = product_of(layer.products)
        last = product_of([layer.out])
        router = None if layer.router is None else product_of([layer.router.weight])
        width = layer.head_width
        keys = None if kind is None else loop_for(kind, width, group=width, scale=None)
        if packing:
            keys = row_loop(packing, width)
        is_unread = layer.router is not None and router is None
        if first is None or last is None or keys is None or is_unread:
            raise ValueError("weights that kernels do not read")
        uneven = len(layer.products[0]) % layer.num_heads or layer.num_heads % layer.num_groups
        if uneven or layer.value_width % LANES or layer.value_width > MAX_WIDTH:
            raise ValueError("heads that kernels do not know")
        if layer.norms == NORM_OF_ALL and layer.biases is not None:
            raise ValueError("biases in front of norms that kernels do not know")
        query_arrangement = arrangement_for(keys, width)
        products = [product for product in (first, last, router) if product is not None]
        row_bytes = (
            4 * len(layer.out),
            max(product.arrangement.row_bytes for product in products),
            4 * first.num_rows,
            layer.num_heads * query_arrangement.row_bytes,
            4 * layer.num_heads * layer.value_width,
            4 * len(layer.out),
        )
        return cls(first, last, router, keys, query_arrangement, row_bytes)
