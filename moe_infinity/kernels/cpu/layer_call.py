"""The numbers that machine code gets for one call of a decoder layer (decoder_call.py).

Legend: B sequences, D model width, E experts, K of them for each token, H heads, G heads of keys
and values, N tokens of the cache with the new one, d width of a head, v of its values.
"""

from __future__ import annotations

from typing import NamedTuple

NO_NORM, NORM_OF_HEADS, NORM_OF_ALL = range(3)  # of queries and keys
HALVES, NEIGHBOURS = range(2)  # the two columns of a head that are rotated together


class LayerNumbers(NamedTuple):
    """The numbers of a layer, which lie one after the other in memory."""

    norm_eps: float
    query_norm_eps: float
    key_norm_eps: float
    residual_norm_eps: float
    score_scale: float


NORM_EPS, QUERY_EPS, KEY_EPS, RESIDUAL_EPS, SCORE_SCALE = range(len(LayerNumbers._fields))


class LayerCall(NamedTuple):
    """One call of a layer: integers, for numba. Without a unit, an address; vectors are float32."""

    state: int
    yield_: int
    # of the layer
    dtype: int  # of x, and of a cache that is not packed: the index of its name in BIASES
    packing: int  # of the cache: the index of its kind in PACKINGS
    width: int  # D
    num_groups: int  # G
    per_group: int  # H / G
    head_width: int  # d
    value_width: int  # v
    rotated: int  # columns of a head
    pairs: int  # HALVES or NEIGHBOURS
    norms: int  # of queries and keys
    numbers: int  # of a LayerNumbers, in float32
    norm: int  # [D]
    query_norm: int  # [d] or [H * d]
    key_norm: int
    residual_norm: int  # [D]
    blocks: int  # RowBlocks of the first product
    num_blocks: int
    bias: int  # [H * d + G * d + G * v]; 0: none
    sinks: int  # [H]: scores of nothing; 0: none
    out_blocks: int
    num_out_blocks: int
    out_bias: int  # [D]; 0: none
    router_blocks: int
    num_router_blocks: int
    num_experts: int
    router_bias: int  # [E]; 0: none
    top_k: int
    softmax_over: int  # OF_ALL or OF_CHOSEN
    weights_dtype: int  # the index of its name in BIASES
    x_arrangement: (
        int  # of Arrangements: of x, of a query, of what goes into the products after them
    )
    query_arrangement: int
    out_arrangement: int
    router_arrangement: int
    score: int  # function that multiplies keys with queries
    key_arguments: int  # KernelArguments of keys
    # of the call
    num_seqs: int  # B
    num_tokens: int  # N
    x: int  # [B, D]
    cos: int  # [B, pairs of columns], and how many bytes from one sequence to the next
    sin: int
    angle_bytes: int
    key: int  # bytes from one sequence, head and token to the next
    key_seq: int
    key_head: int
    key_row: int
    value: int
    value_seq: int
    value_head: int
    value_row: int
    mask: int  # [B, N], added to scores; 0: none
    mask_bytes: int
    # memory for what is between
    hidden: int  # [B, D]
    arranged: int  # the widest of what the products get
    heads: int  # [B, H * d + G * d + G * v]
    queries: int  # [B, H, ...]
    attended: int  # [B, H * v]
    out: int  # [B, D]
    scores: int  # [B, H, score_bytes]
    score_bytes: int
    # results
    residual: int  # [B, D]
    normed: int  # [B, D]
    logits: int  # float32 [B, E]
    top_k_index: int  # int64 [B, K]
    top_k_weights: int  # [B, K]
