"""Where a layer's keys and values are in a step."""

from __future__ import annotations

from typing import NamedTuple


class CachedLayer(NamedTuple):
    """What one layer has in the cache in one step: int64 numbers, which kernels read from a tensor,
    as buffers grow and move. A sequence's tokens lie one after the other: rows of d numbers for
    keys, of v for values. Strides are in numbers of that dtype.

    Legend: B sequences, G heads of the cache, N tokens.
    """

    keys: int  # address of [B, G, N, d], from the first token that the layer may look at
    values: int  # address of [B, G, N, v]
    key_seq: int  # from one sequence to the next
    key_head: int  # from one head to the next
    value_seq: int
    value_head: int
    num_tokens: int  # N, with the new one, which is the last and not written yet
    mask: int  # address of uint8 [B, N]: 0 for a token that is not looked at; 0: there is none
    mask_seq: int  # bytes from one sequence to the next
