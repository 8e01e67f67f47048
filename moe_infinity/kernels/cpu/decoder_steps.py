"""Steps of one token of each sequence through decoder layers: one layer without its experts, or any
number of layers with theirs in one call, without Python between them.

    attend   decoder_call.py                                   the caller computes the experts
    run      for each layer: decoder_call.py                   all experts have to be in memory
                             routed.py, work.py, routed.py

Both give the same bits.

Legend: B sequences, D model width, G heads of keys and values, N tokens of the cache with the new
one, E experts, K of them for each token, P = B * K pairs, L layers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.experts import Ints
from moe_infinity.kernels import host_float32
from moe_infinity.kernels.cpu import team
from moe_infinity.kernels.cpu.decoder import DecoderKernel
from moe_infinity.kernels.cpu.decoder_call import STATE
from moe_infinity.kernels.cpu.experts import SPARE_BYTES
from moe_infinity.kernels.cpu.layer_call import LayerCall
from moe_infinity.kernels.cpu.routed import (
    COUNTERS,
    RoutedCall,
    Turn,
    Turns,
    begin_routed,
    end_routed,
    in_turn,
)
from moe_infinity.kernels.cpu.steps import KernelArguments
from moe_infinity.kernels.cpu.team import LINE, num_threads
from moe_infinity.kernels.cpu.vectors import LANES
from moe_infinity.kernels.cpu.work import BIASES, JOB_AT, OF_EXPERTS, KernelJob, experts
from moe_infinity.kernels.residents import Residents
from moe_infinity.system.machine import yield_address

TURNS = 4  # of a layer with experts: attention, begin, experts, end
MORE_TOKENS = 1024  # that scores get room for at once


class Cached(NamedTuple):
    """The cache of one layer; its last row is the new token's, and free."""

    keys: Tensor  # [B, G, N, d], or rows of kernels/kv_rows.py
    values: Tensor  # [B, G, N, v]

    @property
    def num_tokens(self) -> int:
        """N"""
        return self.keys.shape[2]

    @property
    def row_bytes(self) -> int:
        """From one key of a head to the next."""
        return self.keys.itemsize * self.keys.stride(2)

    def fields(self) -> tuple[int, ...]:
        """The fields of a LayerCall from `num_tokens` on that are of the cache."""
        keys, values = self
        size = keys.itemsize
        keys_by = [size * step for step in keys.stride()[:3]]
        values_by = [size * step for step in values.stride()[:3]]
        of_keys = keys.data_ptr(), *keys_by
        return self.num_tokens, *of_keys, values.data_ptr(), *values_by, *NO_STATES


class States(NamedTuple):
    """The states of linear attention, which has no keys: as they are, and memory for the next."""

    window: Tensor  # [B, channels, at least K - 1], of x's dtype: inputs of the convolution
    recurrent: Tensor  # float32 [B, V, d, v]
    next_window: Tensor  # all without gaps
    next_recurrent: Tensor

    @property
    def num_tokens(self) -> int:
        """Without scores there is no need for more."""
        return 1

    @property
    def row_bytes(self) -> int:
        """There are no keys."""
        return 0

    def fields(self) -> tuple[int, ...]:
        """The fields of a LayerCall from `num_tokens` on that are of the cache."""
        return *NO_CACHE, *map(Tensor.data_ptr, self), self.window.shape[2]


class Attended(NamedTuple):
    """The inputs of a layer's experts, and the experts that its router chose."""

    residual: Tensor  # [B, D]
    normed: Tensor  # [B, D]
    logits: Tensor  # float32 [B, E]
    top_k_index_BK: Tensor  # int64: the largest logit first
    top_k_weights_BK: Tensor
    shared_BD: Tensor  # float32: what a shared expert adds


NO_CACHE = (0,) * 9  # from num_tokens to value_row
NO_STATES = (0,) * 5


def _slice_of(fields: Sequence[str], first: str, last: str) -> slice:
    return slice(fields.index(first), fields.index(last) + 1)


# Fields of a LayerCall that are written together.
IN_CALL = _slice_of(LayerCall._fields, "num_seqs", "window_width")
IN_MEMORY = _slice_of(LayerCall._fields, "hidden", "score_bytes")
IN_RESULT = _slice_of(LayerCall._fields, "residual", "shared")
# And of the others.
ROW_BYTES, OUT_BYTES = (KernelArguments._fields.index(name) for name in ("row_bytes", "out_bytes"))
ROUTED_CALL = _slice_of(RoutedCall._fields, "num_seqs", "result")


class DecoderSteps:
    """The decoder layers of one model. Used by one thread at a time."""

    def __init__(self, kernels: Sequence[DecoderKernel]) -> None:
        """`kernels` are in the order of the model, all of one dtype."""
        self._kernels = kernels
        num_layers = len(kernels)
        self._calls = np.array([kernel.fixed for kernel in kernels], np.int64)
        self._key_arguments = np.array([kernel.key_arguments for kernel in kernels], np.int64)
        self._routed = np.zeros((num_layers, len(RoutedCall._fields)), np.int64)
        self._jobs = np.zeros((num_layers, JOB_AT + len(KernelJob._fields)), np.int64)
        self._residents: list[Residents | None] = [None] * num_layers
        self._counters = _lines(num_layers * (STATE + 2 * COUNTERS))
        self._turns = np.zeros((num_layers, TURNS, len(Turn._fields)), np.int64)
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._most_seqs = 0  # that there is memory for
        self._most_tokens = 0
        # Addresses of what only the call itself reads: residual, norm, logits, weights, and what a
        # shared expert adds.
        self._between: Sequence[int] = ()
        for i in range(num_layers):
            state = self._counters[i * (STATE + 2 * COUNTERS) :].ctypes.data
            own = self._calls[i]
            own[LayerCall._fields.index("key_arguments")] = self._key_arguments[i].ctypes.data
            own[LayerCall._fields.index("state")] = state
            routed = self._routed[i].ctypes.data
            begun = state + 8 * STATE
            self._turns[i] = (
                Turn(kernels[i].function, own.ctypes.data, 1, 0),
                Turn(begin_routed.address, routed, 0, begun),
                Turn(experts.address, self._jobs[i].ctypes.data, 1, 0),
                Turn(end_routed.address, routed, 0, begun + 8 * COUNTERS),
            )

    def attend(
        self,
        layer: int,
        x_BD: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        cached: Cached | States,
        mask_BN: Tensor | None,
    ) -> Attended:
        """Run one layer without its experts. Without a router the last four results have no
        columns, without a shared expert the last. `angles` are the cosine and sine of each pair of
        columns, float32 [B or 1, pairs]; linear attention reads none. The mask is float32.
        """
        num_seqs = len(x_BD)
        fixed = self._kernels[layer].fixed
        weights_dtype = getattr(torch, BIASES[fixed.weights_dtype])
        logits = host_float32(num_seqs * fixed.num_logits + LANES)  # read beyond their end
        attended = Attended(
            torch.empty_like(x_BD),
            torch.empty_like(x_BD),
            logits.as_strided((num_seqs, fixed.num_experts), (fixed.num_logits, 1)),
            torch.empty(num_seqs, fixed.top_k, dtype=torch.int64, device="cpu"),
            torch.empty(num_seqs, fixed.top_k, dtype=weights_dtype, device="cpu"),
            host_float32(num_seqs, fixed.width if fixed.shared_width else 0),
        )
        self._write_calls(layer, [x_BD], angles, [cached], mask_BN)
        own = self._calls[layer]
        own[IN_RESULT] = [tensor.data_ptr() for tensor in attended]
        self._counters.fill(0)
        team.run(self._kernels[layer].function, own.ctypes.data, num_threads())
        return attended._replace(logits=attended.logits.contiguous())

    def run(
        self,
        first: int,
        x_BD: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        cached: Sequence[Cached | States],
        mask_BN: Tensor | None,
        residents: Sequence[Residents],
    ) -> tuple[Sequence[Tensor], Sequence[Ints]]:
        """Run the layers from number `first` on, one for each of `cached` and `residents`. Returns
        the output of each layer, [B, D], and the experts that each activated, [B, K]. Angles and
        mask are the same for all.
        """
        num_seqs = len(x_BD)
        stop = first + len(cached)
        for layer, own in enumerate(residents, first):
            if self._residents[layer] is not own:
                self._connect(layer, own)
        outs = torch.empty(len(cached), *x_BD.shape, dtype=x_BD.dtype, device="cpu").unbind()
        top_k_index = [
            np.empty((num_seqs, kernel.fixed.top_k), np.int64)
            for kernel in self._kernels[first:stop]
        ]
        self._write_calls(first, [x_BD, *outs[:-1]], angles, cached, mask_BN)
        residual, normed, logits, weights, shared = self._between
        self._calls[first:stop, IN_RESULT] = [
            (residual, normed, logits, index_BK.ctypes.data, weights, shared)
            for index_BK in top_k_index
        ]
        self._routed[first:stop, ROUTED_CALL] = [
            (num_seqs, normed, residual, shared, index_BK.ctypes.data, weights, out.data_ptr())
            for index_BK, out in zip(top_k_index, outs, strict=True)
        ]
        self._counters.fill(0)
        count = len(cached) * TURNS
        turns = array("q", Turns(self._turns[first].ctypes.data, count, yield_address()))
        team.run(in_turn.address, turns.buffer_info()[0], num_threads())
        return outs, top_k_index

    def _write_calls(
        self,
        first: int,
        xs: Sequence[Tensor],
        angles: tuple[Tensor, Tensor] | None,
        cached: Sequence[Cached | States],
        mask_BN: Tensor | None,
    ) -> None:
        """Write the fields that change from step to step, but for results."""
        num_seqs = len(xs[0])
        self._make_room(num_seqs, max(one.num_tokens for one in cached))
        turned = 0, 0, 0
        if angles is not None:
            cos, sin = angles
            turned = cos.data_ptr(), sin.data_ptr(), 4 * cos.shape[1] if len(cos) > 1 else 0
        mask = (0, 0) if mask_BN is None else (mask_BN.data_ptr(), 4 * mask_BN.shape[1])
        stop = first + len(cached)
        self._calls[first:stop, IN_CALL] = [
            (num_seqs, x.data_ptr(), *turned, *mask, *own.fields())
            for x, own in zip(xs, cached, strict=True)
        ]
        self._key_arguments[first:stop, ROW_BYTES] = [own.row_bytes for own in cached]

    def _connect(self, layer: int, residents: Residents) -> None:
        """Connect a layer with its experts."""
        own = residents.experts
        fixed = self._kernels[layer].fixed
        self._residents[layer] = residents
        self._jobs[layer, :JOB_AT] = (
            own.mlp.buffer_info()[0],
            own.hidden_arrangement.buffer_info()[0],
        )
        self._routed[layer] = RoutedCall(**dict.fromkeys(RoutedCall._fields, 0))._replace(
            job=self._jobs[layer].ctypes.data,
            tables_of_all=residents.tables_E.ctypes.data,
            num_experts=fixed.num_experts,
            has_shared=int(fixed.shared_width > 0),
            top_k=fixed.top_k,
            width=fixed.width,
            dtype=fixed.dtype,
            weights_dtype=fixed.weights_dtype,
            arrangement=own.up.arranged_by.buffer_info()[0],
        )
        self._most_seqs = 0  # it may need more memory than others

    def _make_room(self, num_seqs: int, num_tokens: int) -> None:
        """Make room for intermediate results, which all layers share."""
        if num_seqs <= self._most_seqs and num_tokens <= self._most_tokens:
            return
        self._most_seqs = max(self._most_seqs, num_seqs)
        if num_tokens > self._most_tokens:
            self._most_tokens = num_tokens + MORE_TOKENS
        fixed = [kernel.fixed for kernel in self._kernels]
        num_heads = max(one.num_groups * one.per_group for one in fixed)
        vectors = -(-(self._most_tokens + 1) // LANES)
        score_bytes = 4 * max(vectors * LANES, *(one.head_width for one in fixed))
        sizes = [max(own) for own in zip(*(k.row_bytes for k in self._kernels), strict=True)]
        width = 4 * max(one.width for one in fixed)
        num_experts = max(one.num_experts for one in fixed)
        top_k = max(one.top_k for one in fixed)
        logits = 4 * max(one.num_logits for one in fixed)  # read beyond their end, where others are
        of_sequence = *sizes, num_heads * score_bytes, width, width, logits, 4 * top_k, width
        of_experts = self._memory_of_experts(width, num_experts, top_k)
        addresses = self._allocated(
            [*(size * self._most_seqs for size in of_sequence), *of_experts.values()]
        )
        self._calls[:, IN_MEMORY] = [*addresses[:7], score_bytes]
        self._key_arguments[:, OUT_BYTES] = score_bytes
        self._between = addresses[7:12]
        for name, address in zip(of_experts, addresses[12:], strict=True):
            step = 0
            if name == "state":  # a late thread looks at a layer's while others are in the next
                step = _state_bytes(self._most_seqs * top_k)
            by_layer = address + step * np.arange(len(self._kernels))
            if name in RoutedCall._fields:
                self._routed[:, RoutedCall._fields.index(name)] = by_layer
            if name in KernelJob._fields:
                self._jobs[:, JOB_AT + KernelJob._fields.index(name)] = by_layer
        self._jobs[:, JOB_AT + KernelJob._fields.index("yield_")] = yield_address()

    def _memory_of_experts(self, width: int, num_experts: int, top_k: int) -> dict[str, int]:
        """The memory that experts need, in bytes, by the names of fields of RoutedCall and of
        KernelJob.
        """
        known = [own.experts for own in self._residents if own is not None]
        if not known:
            return {}
        num_pairs = self._most_seqs * top_k
        x_bytes = max(own.up.arrangement.row_bytes for own in known)
        return {
            "counts": 8 * num_experts,
            "row_of": 8 * num_pairs,
            "starts": 8 * num_pairs,
            "stops": 8 * num_pairs,
            "tables": 8 * num_pairs,
            "state": len(self._kernels) * _state_bytes(num_pairs),
            "weights": 4 * num_pairs,
            "inputs": width * self._most_seqs,
            "arranged": x_bytes * self._most_seqs,
            "gathered": x_bytes * num_pairs,
            "up": max(own.up_bytes for own in known) * num_pairs + SPARE_BYTES,
            "hidden": max(own.down.arrangement.row_bytes for own in known) * num_pairs
            + SPARE_BYTES,
            "out": width * num_pairs,
        }

    def _allocated(self, sizes: Sequence[int]) -> list[int]:
        """Addresses of memory of these sizes, in bytes; each begins a cache line."""
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // 64) * 64)
        self._memory = torch.empty(offsets[-1] + 64, dtype=torch.uint8, device="cpu")
        start = self._memory.data_ptr()
        start += -start % 64
        return [start + offset for offset in offsets[:-1]]


def _state_bytes(num_pairs: int) -> int:
    """The bytes of KernelJob.state, if each pair has an expert of its own."""
    return 8 * (OF_EXPERTS + LINE * num_pairs)


def _lines(count: int) -> NDArray[np.int64]:
    """`count` zeros, from the start of a cache line on."""
    memory = np.zeros(count + LINE, np.int64)
    first = -(memory.ctypes.data // 8) % LINE
    return memory[first : first + count]
