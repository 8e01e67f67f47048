"""What surrounds the experts of a decoder layer, in one call of decoder_call.py: the weights of a
layer, where they lie, and the memory for what is between.

Legend: B sequences, D model width, H heads, G heads of keys and values, N tokens of the cache with
the new one, d width of a head, v of its values, E experts.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_infinity.checkpoint.layout import KINDS
from moe_infinity.kernels import host_float32
from moe_infinity.kernels.cpu import team
from moe_infinity.kernels.cpu.attention import MAX_WIDTH
from moe_infinity.kernels.cpu.decoder_call import (
    HALVES,
    NEIGHBOURS,
    NO_NORM,
    NORM_OF_ALL,
    NORM_OF_HEADS,
    STATE,
    LayerCall,
    layer_function,
)
from moe_infinity.kernels.cpu.experts import Product
from moe_infinity.kernels.cpu.linear import product_of
from moe_infinity.kernels.cpu.rows import row_function
from moe_infinity.kernels.cpu.steps import (
    Arrangement,
    InnerLoop,
    arguments_for,
    arrangement_for,
    loop_for,
)
from moe_infinity.kernels.cpu.team import LINE, yield_address
from moe_infinity.kernels.cpu.threads import num_threads
from moe_infinity.kernels.cpu.vectors import LANES
from moe_infinity.kernels.cpu.work import BIASES

__all__ = ["HALVES", "NEIGHBOURS", "Attention", "DecoderAttention"]


@dataclass(frozen=True, slots=True)
class Attention:
    """The weights of one layer, and how it attends."""

    products: tuple[Tensor, Tensor, Tensor]  # [H * d, D], [G * d, D], [G * v, D]
    biases: tuple[Tensor, Tensor, Tensor] | None
    out: Tensor  # [D, H * v]
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
    router: Tensor | None  # [E, D]; None: the caller multiplies
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
        """Of queries and keys."""
        if self.query_norm is None:
            return NO_NORM
        return NORM_OF_HEADS if len(self.query_norm) == self.head_width else NORM_OF_ALL


class DecoderAttention:
    """Computes what surrounds the experts of one layer. Used by one thread at a time."""

    def __init__(self, layer: Attention, dtype: torch.dtype) -> None:
        """`dtype` is that of x and of the cache. Raises ValueError for what kernels do not know."""
        self._layer = layer
        self._dtype = dtype
        self._products = _Products.of(layer, dtype)
        self._vectors: list[Tensor] = []  # kept, as the call has their addresses
        self._arrangements: list[array[int]] = []
        self._arguments = arguments_for(
            self._products.keys, (1, layer.head_width), (1, layer.head_width), 1
        )
        self._told = array("q", self._arguments)
        self._state = array("q", bytes(8 * (STATE + LINE)))
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._fixed = self._call_of_layer()
        vectors = layer.value_width // LANES
        self._function = layer_function(self._products.keys.kind, vectors).address

    def _call_of_layer(self) -> LayerCall:
        """What stays the same from call to call."""
        layer = self._layer
        products = self._products
        eps = layer.norm_eps, layer.query_norm_eps, layer.key_norm_eps, layer.residual_norm_eps
        numbers = torch.tensor([*eps, layer.scale], dtype=torch.float32, device="cpu")
        bias = None if layer.biases is None else torch.cat(layer.biases)
        router = products.router
        return LayerCall(**dict.fromkeys(LayerCall._fields, 0))._replace(
            yield_=yield_address(),
            dtype=BIASES.index(str(self._dtype).removeprefix("torch.")),
            width=len(layer.out),
            num_groups=layer.num_groups,
            per_group=layer.num_heads // layer.num_groups,
            head_width=layer.head_width,
            value_width=layer.value_width,
            rotated=layer.rotated,
            pairs=layer.pairs,
            norms=layer.norms,
            numbers=self._kept(numbers),
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
            router_blocks=0 if router is None else router.blocks.ctypes.data,
            num_router_blocks=0 if router is None else len(router.blocks),
            num_experts=0 if router is None else router.num_rows,
            x_places=self._arranged(products.first.places),
            query_places=self._arranged(products.query_places),
            out_places=self._arranged(products.last.places),
            router_places=0 if router is None else self._arranged(router.places),
            score=row_function(products.keys).address,
            told=self._told.buffer_info()[0],
        )

    def _kept(self, vector: Tensor | None) -> int:
        """The address of a copy in float32; 0 for None."""
        if vector is None:
            return 0
        self._vectors.append(vector.detach().to(torch.float32).contiguous().clone())
        return self._vectors[-1].data_ptr()

    def _arranged(self, places: Arrangement) -> int:
        self._arrangements.append(array("q", places))
        return self._arrangements[-1].buffer_info()[0]

    def __call__(
        self,
        x_BD: Tensor,
        angles: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        mask_BN: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, D] -> the residual and its norm, [B, D] each, and the router's logits, float32
        [B, E], of which there are none without a router. `angles` are the cosine and sine of each
        pair of columns, float32 [B or 1, pairs]. The new token's keys and values go to the last
        place of `keys` [B, G, N, d] and `values` [B, G, N, v]. The mask is float32.
        """
        num_seqs = len(x_BD)
        num_tokens = keys.shape[2]
        residual_BD = torch.empty_like(x_BD)
        normed_BD = torch.empty_like(x_BD)
        logits_BE = host_float32(num_seqs, self._fixed.num_experts)
        size = keys.itemsize
        key_seq, key_head, key_row, _ = keys.stride()
        value_seq, value_head, value_row, _ = values.stride()
        cos, sin = angles
        call = self._with_memory(num_seqs, num_tokens)._replace(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            x=x_BD.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            angle_bytes=4 * cos.shape[1] if len(cos) > 1 else 0,
            key=keys.data_ptr(),
            key_seq=size * key_seq,
            key_head=size * key_head,
            key_row=size * key_row,
            value=values.data_ptr(),
            value_seq=size * value_seq,
            value_head=size * value_head,
            value_row=size * value_row,
            mask=0 if mask_BN is None else mask_BN.data_ptr(),
            mask_bytes=4 * num_tokens,
            residual=residual_BD.data_ptr(),
            normed=normed_BD.data_ptr(),
            logits=logits_BE.data_ptr(),
        )
        told = self._arguments._replace(row_bytes=size * key_row, out_bytes=call.score_bytes)
        self._told[:] = array("q", told)
        memory = array("q", call)
        team.run(self._function, memory.buffer_info()[0], num_threads())
        return residual_BD, normed_BD, logits_BE

    def _with_memory(self, num_seqs: int, num_tokens: int) -> LayerCall:
        """A call with cleared counters and places for what is between."""
        layer = self._layer
        score_bytes = 4 * max(-(-(num_tokens + 1) // LANES) * LANES, layer.head_width)
        sizes = *self._products.row_bytes, score_bytes * layer.num_heads
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-num_seqs * size // 64) * 64)
        if len(self._scratch) < places[-1] + 64:
            self._scratch = torch.empty(2 * places[-1] + 64, dtype=torch.uint8, device="cpu")
        state = self._state
        at = state.buffer_info()[0]
        state[:] = array("q", bytes(8 * len(state)))
        start = self._scratch.data_ptr()
        start += -start % 64
        hidden, arranged, heads, queries, attended, out, scores = (
            start + place for place in places[:-1]
        )
        return self._fixed._replace(
            state=at + -at % 64,
            hidden=hidden,
            arranged=arranged,
            heads=heads,
            queries=queries,
            attended=attended,
            out=out,
            scores=scores,
            score_bytes=score_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Products:
    """The weights of one layer, ready for machine code."""

    first: Product  # queries, keys, values
    last: Product
    router: Product | None
    keys: InnerLoop  # of keys as rows of a weight
    query_places: Arrangement
    row_bytes: tuple[int, ...]  # of one sequence: LayerCall's memory, in its order, but scores

    @classmethod
    def of(cls, layer: Attention, dtype: torch.dtype) -> _Products:
        """Raises ValueError for what kernels do not know."""
        kind = KINDS.get(dtype)
        first = product_of(layer.products)
        last = product_of([layer.out])
        router = None if layer.router is None else product_of([layer.router])
        width = layer.head_width
        keys = None if kind is None else loop_for(kind, width, group=width, scale=None)
        if first is None or last is None or keys is None:
            raise ValueError("weights that kernels do not read")
        uneven = len(layer.products[0]) % layer.num_heads or layer.num_heads % layer.num_groups
        if uneven or layer.value_width % LANES or layer.value_width > MAX_WIDTH:
            raise ValueError("heads that kernels do not know")
        if layer.norms == NORM_OF_ALL and layer.biases is not None:
            raise ValueError("biases in front of norms that kernels do not know")
        query_places = arrangement_for(keys, width)
        products = [product for product in (first, last, router) if product is not None]
        row_bytes = (
            4 * len(layer.out),
            max(product.places.row_bytes for product in products),
            4 * first.num_rows,
            layer.num_heads * query_places.row_bytes,
            4 * layer.num_heads * layer.value_width,
            4 * len(layer.out),
        )
        return cls(first, last, router, keys, query_places, row_bytes)
