"""The numbers that machine code gets for one call of a decoder layer (decoder_call.py).

Legend: B sequences, D model width, E experts, K of them for each token, F width of a shared expert,
H heads, G heads of keys and values, N tokens of the cache with the new one, d width of a head, v of
its values.
"""

from __future__ import annotations

from typing import NamedTuple

NO_NORM, NORM_OF_HEADS, NORM_OF_ALL = range(3)  # of queries and keys
HALVES, NEIGHBOURS = range(2)  # the two columns of a head that are rotated together


class LayerNumbers(NamedTuple):
    """The numbers of a layer, which lie one after the other in memory."""

    norm_eps: float
    residual_norm_eps: float
    query_norm_eps: float = 0.0
    key_norm_eps: float = 0.0
    score_scale: float = 0.0
    out_norm_eps: float = 0.0  # of linear attention


NORM_EPS, RESIDUAL_EPS, QUERY_EPS, KEY_EPS, SCORE_SCALE, OUT_EPS = range(len(LayerNumbers._fields))


class LayerCall(NamedTuple):
    """One call of a layer: integers, for numba. Without a unit, an address; vectors are float32.

    Linear attention has heads of keys and values, too; delta_rule.py says what else it has.
    """

    state: int
    yield_: int
    # of the layer
    dtype: int  # of x, and of a cache that is not packed: the index of its name in BIASES
    packing: int  # of the cache: the index of its kind in PACKINGS
    width: int  # D
    num_groups: int  # G
    per_group: int  # H / G
    head_width: int  # d
    query_step: int  # from one query to the next: d, or 2 d with its gate between them
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
    num_columns: int  # of its result
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
    num_logits: int  # columns of the router's product: E, then 2 F and 1 of a shared expert
    shared_width: int  # F; 0: there is no shared expert
    shared_is_scaled: int
    shared_input: int  # function that makes what goes into its down
    shared_activation: int  # the index of its function in FUNCTIONS
    shared_numbers: int  # of its activation: alpha, shift and limit
    shared_blocks: int  # RowBlocks of its down
    num_shared_blocks: int
    shared_arrangement: int  # Arrangement of what goes into it, and the bytes of a sequence
    shared_bytes: int
    x_arrangement: (
        int  # of Arrangements: of x, of a query, of what goes into the products after them
    )
    query_arrangement: int
    out_arrangement: int
    router_arrangement: int
    score: int  # function that multiplies keys with queries
    key_arguments: int  # KernelArguments of keys
    delta: int  # DeltaCall of linear attention; 0: none
    # of the call
    num_seqs: int  # B
    x: int  # [B, D]
    cos: int  # [B, pairs of columns], and how many bytes from one sequence to the next
    sin: int
    angle_bytes: int
    mask: int  # [B, N], added to scores; 0: none
    mask_bytes: int
    # of its cache; linear attention has states instead
    num_tokens: int  # N
    key: int  # bytes from one sequence, head and token to the next
    key_seq: int
    key_head: int
    key_row: int
    value: int
    value_seq: int
    value_head: int
    value_row: int
    window: int  # the last inputs of the convolution, [B, channels, window_width]
    recurrent: int  # the state of the rule, [B, heads of values, d, v]
    next_window: int  # the same with the new token
    next_recurrent: int
    window_width: int
    # memory for what is between
    hidden: int  # [B, D]
    arranged: int  # the widest of what the products get
    heads: int  # [B, num_columns]
    queries: int  # [B, H, ...]
    attended: int  # [B, H * v]
    out: int  # [B, D]
    scores: int  # [B, H, score_bytes]
    score_bytes: int
    # results
    residual: int  # [B, D]
    normed: int  # [B, D]
    logits: int  # float32 [B, num_logits]
    top_k_index: int  # int64 [B, K]
    top_k_weights: int  # [B, K]
    shared: int  # float32 [B, D]: what a shared expert adds
