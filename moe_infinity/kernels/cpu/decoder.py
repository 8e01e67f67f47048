"""The weights around the experts of a decoder layer, and where they lie, for decoder_call.py.

Legend: B sequences, D model width, H heads, G heads of keys and values, N tokens of the cache with
the new one, d width of a head, v of its values, V heads of values in linear attention, E experts, F
width of a shared expert.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_infinity.kernels.cpu.arrangement import arrangement_for
from moe_infinity.kernels.cpu.attention import MAX_WIDTH
from moe_infinity.kernels.cpu.decoder_call import layer_function
from moe_infinity.kernels.cpu.delta_rule import (
    DeltaCall,
    DeltaShape,
    delta_function,
    scratch_bytes,
)
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
from moe_infinity.kernels.cpu.put_row import PACKINGS, row_arguments, row_loop
from moe_infinity.kernels.cpu.routed import OF_ALL, OF_CHOSEN
from moe_infinity.kernels.cpu.rows import row_function
from moe_infinity.kernels.cpu.shared_expert import SharedExpert, input_function
from moe_infinity.kernels.cpu.steps import KernelArguments, arguments_for, loop_for
from moe_infinity.kernels.cpu.vectors import LANES
from moe_infinity.kernels.cpu.work import BIASES
from moe_infinity.kernels.kv_rows import SCALE_BYTES
from moe_infinity.kernels.reference import FUNCTIONS
from moe_infinity.layout import KINDS, PackedWeight
from moe_infinity.system.machine import yield_address

Weight = Tensor | PackedWeight
NO_KEYS = KernelArguments(**dict.fromkeys(KernelArguments._fields, 0))

__all__ = [
    "HALVES",
    "NEIGHBOURS",
    "OF_ALL",
    "OF_CHOSEN",
    "Attention",
    "Gate",
    "DecoderKernel",
    "DecoderParts",
    "LinearAttention",
    "Router",
]


class Gate(NamedTuple):
    """The rule by which a router chooses; see routed.py."""

    top_k: int
    softmax_over: int  # OF_ALL or OF_CHOSEN
    dtype: torch.dtype  # that weights are rounded to

    def __call__(self, logits_TE: Tensor) -> Tensor:
        """[T, K]: the weights of the chosen experts; the reference of what routed.py computes."""
        largest = logits_TE.topk(self.top_k)
        if self.softmax_over == OF_ALL:
            return logits_TE.softmax(-1).gather(1, largest.indices)
        return largest.values.softmax(-1)


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts for the norm of the residual."""

    weight: Tensor  # [E, D]
    bias: Tensor | None  # [E], added to logits
    gate: Gate
    shared: SharedExpert | None = None

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that multiply the norm: in a product, logits come first."""
        return self.weight, *(() if self.shared is None else self.shared.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """The weights that every layer has around its experts."""

    products: tuple[Weight, ...]  # of [rows, D], whose rows make the heads
    out: Weight  # [D, H * v]
    out_bias: Tensor | None
    norm: Tensor  # [D], as it is multiplied with
    norm_eps: float
    residual_norm: Tensor  # [D]
    residual_norm_eps: float
    router: Router | None  # None: the caller chooses


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(DecoderParts):
    """The weights of one layer, and how it attends. Its products are queries [H * d, D], or [H * 2
    d, D] with a gate behind each, keys [G * d, D] and values [G * v, D].
    """

    biases: tuple[Tensor, ...] | None  # of products
    query_norm: Tensor | None  # [d] of each head, or [H * d] of all
    key_norm: Tensor | None
    query_norm_eps: float
    key_norm_eps: float
    sinks: Tensor | None  # [H]
    scale: float
    num_heads: int
    num_groups: int
    head_width: int  # d
    rotated: int  # columns of a head
    pairs: int  # HALVES or NEIGHBOURS

    @property
    def value_width(self) -> int:
        return len(self.products[2]) // self.num_groups

    @property
    def query_step(self) -> int:
        """From one query to the next, in columns."""
        return len(self.products[0]) // self.num_heads

    @property
    def norms(self) -> int:
        """The kind of norm of queries and keys."""
        if self.query_norm is None:
            return NO_NORM
        return NORM_OF_HEADS if len(self.query_norm) == self.head_width else NORM_OF_ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention(DecoderParts):
    """The weights of one layer with the gated delta rule; delta_rule.py says what they do."""

    shape: DeltaShape
    convolution: Tensor  # [channels, 1, K], read where it is
    convolution_bias: Tensor | None  # [channels]
    decay: Tensor  # [V], the logarithm of A
    dt: Tensor  # [V]
    out_norm: Tensor  # [v]
    out_norm_eps: float
    places: Sequence[int]  # of each head of values in the columns of `out`


class DecoderKernel:
    """One layer as machine code sees it: addresses, and the memory that they point to, which it
    keeps. decoder_steps.py calls it.
    """

    def __init__(self, layer: DecoderParts, dtype: torch.dtype, kv_dtype: str = "auto") -> None:
        """`dtype` is that of x, and of the cache unless `kv_dtype` packs it. Raises ValueError for
        what kernels do not know.
        """
        self.layer = layer
        self.dtype = dtype
        self.packing = "" if kv_dtype == "auto" else kv_dtype
        self._vectors: list[Tensor] = []  # kept, as the call has their addresses
        self._integers: list[array[int]] = []
        first = product_of(layer.products)
        last = product_of([layer.out])
        router = None if layer.router is None else product_of(layer.router.weights)
        expert = None if layer.router is None else layer.router.shared
        shared = None if expert is None else product_of([expert.down])
        is_read = (layer.router is None or router) and (expert is None or shared)
        if first is None or last is None or not is_read:
            raise ValueError("weights that kernels do not read")
        self._first = first
        self._last = last
        self._router = router  # with what a shared expert makes of the same input
        self._shared = shared  # its last product
        self.key_arguments = NO_KEYS
        self.cache_kind = ""
        self.cache_rows = (0, 0, 0)  # heads, and the numbers of a key and a value of one
        if isinstance(layer, LinearAttention):
            own = self._of_linear_attention(layer)
        else:
            assert isinstance(layer, Attention)
            own = self._of_attention(layer)
        self.fixed = self._call_of_layer()._replace(**own)

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """The bytes that one sequence takes in the memory of LayerCall from `hidden` to `out`, in
        its order.
        """
        products = [p for p in (self._first, self._last, self._router, self._shared) if p]
        return (
            4 * self.fixed.width,
            max(product.arrangement.row_bytes for product in products),
            4 * self._first.num_rows,
            self._query_bytes,
            4 * self._last.num_columns,
            4 * self.fixed.width,
        )

    def _call_of_layer(self) -> LayerCall:
        """The fields of a LayerCall that stay the same from call to call, but for its heads."""
        layer = self.layer
        return LayerCall(**dict.fromkeys(LayerCall._fields, 0))._replace(
            yield_=yield_address(),
            dtype=index_of(self.dtype),
            width=len(layer.out),
            norm=self._kept(layer.norm),
            residual_norm=self._kept(layer.residual_norm),
            blocks=self._first.blocks.ctypes.data,
            num_blocks=len(self._first.blocks),
            num_columns=self._first.num_rows,
            out_blocks=self._last.blocks.ctypes.data,
            num_out_blocks=len(self._last.blocks),
            out_bias=self._kept(layer.out_bias),
            x_arrangement=self._integers_at(self._first.arrangement),
            out_arrangement=self._integers_at(self._last.arrangement),
            **self._of_router(),
        )

    def _of_attention(self, layer: Attention) -> dict[str, int]:
        """The fields of its heads. Also finds the function, and how keys are read."""
        kind = KINDS.get(self.dtype)
        width = layer.head_width
        keys = None if kind is None else loop_for(kind, width, group=width, scale=None)
        if self.packing:
            keys = row_loop(self.packing, width)
        has_gates = layer.query_step > width
        uneven = layer.num_heads % layer.num_groups or layer.query_step not in (width, 2 * width)
        if uneven or layer.value_width % LANES or layer.value_width > MAX_WIDTH:
            raise ValueError("heads that kernels do not know")
        if has_gates and layer.value_width != width:
            raise ValueError("gates that kernels do not know")
        if layer.norms == NORM_OF_ALL and (layer.biases is not None or has_gates):
            raise ValueError("biases or gates in front of norms that kernels do not know")
        if keys is None:
            raise ValueError("keys that kernels do not read")
        self.cache_kind = keys.kind
        more = SCALE_BYTES if self.packing else 0
        self.cache_rows = layer.num_groups, width + more, layer.value_width + more
        self.key_arguments = arguments_for(keys, (1, width), (1, width), 1)
        if self.packing:
            self.key_arguments = row_arguments(keys, width)
        arrangement = arrangement_for(keys, width)
        self._query_bytes = layer.num_heads * arrangement.row_bytes
        self.function: int = layer_function(keys.kind, layer.value_width // LANES).address
        numbers = LayerNumbers(
            norm_eps=layer.norm_eps,
            query_norm_eps=layer.query_norm_eps,
            key_norm_eps=layer.key_norm_eps,
            residual_norm_eps=layer.residual_norm_eps,
            score_scale=layer.scale,
        )
        return {
            "packing": PACKINGS.index(self.packing),
            "num_groups": layer.num_groups,
            "per_group": layer.num_heads // layer.num_groups,
            "head_width": width,
            "query_step": layer.query_step,
            "value_width": layer.value_width,
            "rotated": layer.rotated,
            "pairs": layer.pairs,
            "norms": layer.norms,
            "numbers": self._kept(torch.tensor(numbers, dtype=torch.float32, device="cpu")),
            "query_norm": self._kept(layer.query_norm),
            "key_norm": self._kept(layer.key_norm),
            "bias": self._kept(None if layer.biases is None else torch.cat(layer.biases)),
            "sinks": self._kept(layer.sinks),
            "query_arrangement": self._integers_at(arrangement),
            "score": row_function(keys).address,
        }

    def _of_linear_attention(self, layer: LinearAttention) -> dict[str, int]:
        """The fields of its heads. Also finds the function."""
        shape = layer.shape
        self._query_bytes = shape.num_key_heads * scratch_bytes.py_func(shape)
        self.function = delta_function().address
        numbers = LayerNumbers(
            norm_eps=layer.norm_eps,
            residual_norm_eps=layer.residual_norm_eps,
            out_norm_eps=layer.out_norm_eps,
        )
        delta = DeltaCall(
            weight=layer.convolution.data_ptr(),
            weight_dtype=index_of(layer.convolution.dtype),
            bias=self._kept(layer.convolution_bias),
            decay=self._kept(layer.decay),
            dt=self._kept(layer.dt),
            norm=self._kept(layer.out_norm),
            places=self._integers_at(layer.places),
        )
        return {
            "num_groups": shape.num_key_heads,
            "per_group": shape.per_key_head,
            "head_width": shape.key_width,
            "value_width": shape.value_width,
            "numbers": self._kept(torch.tensor(numbers, dtype=torch.float32, device="cpu")),
            "delta": self._integers_at((*delta, *shape)),
        }

    def _of_router(self) -> dict[str, int]:
        router = self.layer.router
        product = self._router
        if router is None or product is None:
            return {}
        return self._of_shared_expert(router.shared) | {
            "router_blocks": product.blocks.ctypes.data,
            "num_router_blocks": len(product.blocks),
            "num_experts": len(router.weight),
            "num_logits": product.num_rows,
            "router_bias": self._kept(router.bias),
            "router_arrangement": self._integers_at(product.arrangement),
            "top_k": router.gate.top_k,
            "softmax_over": router.gate.softmax_over,
            "weights_dtype": index_of(router.gate.dtype),
        }

    def _of_shared_expert(self, shared: SharedExpert | None) -> dict[str, int]:
        product = self._shared
        if shared is None or product is None:
            return {}
        activation = shared.activation
        numbers = activation.alpha, activation.shift, activation.limit
        return {
            "shared_width": product.num_columns,
            "shared_is_scaled": int(shared.scale is not None),
            "shared_input": input_function().address,
            "shared_activation": FUNCTIONS.index(activation.function),
            "shared_numbers": self._kept(torch.tensor(numbers, dtype=torch.float32, device="cpu")),
            "shared_blocks": product.blocks.ctypes.data,
            "num_shared_blocks": len(product.blocks),
            "shared_arrangement": self._integers_at(product.arrangement),
            "shared_bytes": product.arrangement.row_bytes,
        }

    def _kept(self, vector: Tensor | None) -> int:
        """The address of a copy in float32; 0 for None."""
        if vector is None:
            return 0
        self._vectors.append(vector.detach().to(torch.float32).contiguous().clone())
        return self._vectors[-1].data_ptr()

    def _integers_at(self, numbers: Sequence[int]) -> int:
        """The address of a copy."""
        self._integers.append(array("q", numbers))
        return self._integers[-1].buffer_info()[0]


def index_of(dtype: torch.dtype) -> int:
    """The index of the dtype in BIASES. Raises ValueError if it is not one of them."""
    return BIASES.index(str(dtype).removeprefix("torch."))
