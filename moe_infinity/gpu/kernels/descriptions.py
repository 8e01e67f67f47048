"""The numbers that kernels get beside tensors: where keys and values lie, how queries and keys are
made, how a router chooses. But for the fields of CachedLayer, which come in a tensor, all of it is
known when a kernel is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# The three forms of RMSNorm. The normed row is rounded before it is multiplied by the weight, and
# after; or after alone; and that after multiplying by 1 + weight.
FORMS = ("rounded twice", "rounded once", "plus one")


class CachedLayer(NamedTuple):
    """The contents of one layer's cache in one step: int64 numbers that kernels read from a tensor,
    as buffers grow and move. A sequence's tokens lie one after the other: rows of d numbers for
    keys, of v for values. Strides are in numbers of that dtype, addresses multiples of 16.

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


# Attention

SPLIT_HEADS = 512  # splits of all heads of the cache together, of one sequence
MIN_SPLITS = 8
MAX_SPLITS = 64
TILE = 16  # heads of a program, and the least size of a product of matrices
CHUNK = 64  # tokens
CHUNK_BYTES = 40 << 10  # at most: two are in the shared memory of every GPU since 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The constants that a kernel of attention is compiled for, see attention.py."""

    groups: int  # G
    per_group: int  # H / G
    is_latent: bool
    key_row: int  # numbers of a token among the keys of the cache: d or r
    value_row: int  # and among the values: v or p
    columns: int  # of the first piece of a key: a power of two
    more_width: int  # of the second piece, or 0,
    more_columns: int  # and that rounded up to a power of two
    value_columns: int  # of what is summed, rounded up to a power of two
    chunk: int  # C
    splits: int  # S
    has_softcap: bool

    @property
    def blocks(self) -> int:
        """Tiles of the heads of queries in a group."""
        return -(-self.per_group // TILE)

    @property
    def value_width(self) -> int:
        """Columns of what is summed."""
        return self.key_row if self.is_latent else self.value_row


def _rounded_up(width: int) -> int:
    return max(1 << (width - 1).bit_length(), TILE)


def _chunk(token_bytes: int) -> int:
    chunk = CHUNK
    while chunk > TILE and chunk * token_bytes > CHUNK_BYTES:
        chunk //= 2
    return chunk


def shape_of(query_BHd: Tensor, value_BGv: Tensor, has_softcap: bool) -> AttentionShape:
    """Describe attention to keys and values."""
    _, num_heads, width = query_BHd.shape
    num_groups, value_width = value_BGv.shape[1:]
    columns = max(1 << width.bit_length() - 1, TILE)
    more_width = max(width - columns, 0)
    more_columns = _rounded_up(more_width) if more_width else 0
    value_columns = _rounded_up(value_width)
    token_columns = columns + more_columns + value_columns
    splits = min(max(MIN_SPLITS, SPLIT_HEADS // num_groups), MAX_SPLITS)
    return AttentionShape(
        groups=num_groups,
        per_group=num_heads // num_groups,
        is_latent=False,
        key_row=width,
        value_row=value_width,
        columns=columns,
        more_width=more_width,
        more_columns=more_columns,
        value_columns=value_columns,
        chunk=_chunk(token_columns * query_BHd.element_size()),
        splits=1 << splits.bit_length() - 1,
        has_softcap=has_softcap,
    )


def shape_of_latents(num_heads: int, latent_Br: Tensor, key_Bp: Tensor) -> AttentionShape:
    """Describe attention to latents and rotated keys."""
    rank = latent_Br.shape[1]
    rotated = key_Bp.shape[1]
    token_columns = _rounded_up(rank) + _rounded_up(rotated)
    return AttentionShape(
        groups=1,
        per_group=num_heads,
        is_latent=True,
        key_row=rank,
        value_row=rotated,
        columns=_rounded_up(rank),
        more_width=rotated,
        more_columns=_rounded_up(rotated),
        value_columns=_rounded_up(rank),
        chunk=_chunk(token_columns * latent_Br.element_size()),
        splits=MAX_SPLITS,
        has_softcap=False,
    )


# Queries and keys

# Which two columns of a head are rotated together, and where the results are put.
HALVES = "halves"  # columns i and i + rotated / 2
NEIGHBOURS = "neighbours"  # columns 2i and 2i + 1
APART = "neighbours, put in halves"
PAIRS = (HALVES, NEIGHBOURS, APART)


class Heads(NamedTuple):
    """How queries and keys are made of products: norms of heads and rotary positions."""

    num_heads: int  # of queries
    num_groups: int  # heads of keys
    query_width: int
    key_width: int
    rotated: int  # the last columns of a query and of a key from first_rotated on; others stay
    first_rotated: int  # column of a query
    first_rotated_key: int  # column of a key
    pairs: str
    norm_form: str | None = None  # one of FORMS, of those that have a weight
    query_eps: float = 0.0
    key_eps: float = 0.0
    norms_all: bool = False  # all heads of a token together, not each on its own
    normed_key: int = 0  # so many columns of a key have a norm, the first ones; 0: all


# Routers

SCORES = ("softmax", "sigmoid", "logits")  # of the logits; softmax: over all experts
# The scores of the chosen as they are, divided by their sum, or their softmax.
WEIGHTS = ("as they are", "divided by their sum", "softmax")
GROUP_SCORES = ("best", "sum of two best")
# What is added to a sum before weights are divided by it. Source: DeepseekV3TopkRouter. Classes
# that add nothing divide sums of at least 1 / (number of experts), which it does not change.
TINY = 1e-20


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The choice of a router after its product, whatever its class is called: the `top_k`
    largest of scores + correction: of all experts, or of the groups of neighbouring experts whose
    group score is largest. Weights are made of the scores of the chosen, without the correction.
    """

    top_k: int
    scores: str = "softmax"
    weights: str = "as they are"
    dtype: torch.dtype = torch.float32  # that weights are rounded to
    factor: float = 1.0  # that weights are multiplied by
    num_groups: int = 1  # 1: there are none
    kept_groups: int = 1
    group_score: str = "best"  # of its scores with the correction

    def __post_init__(self) -> None:
        assert self.scores in SCORES, self.scores
        assert self.weights in WEIGHTS, self.weights
        assert self.group_score in GROUP_SCORES, self.group_score
        assert 1 <= self.kept_groups <= self.num_groups, (self.kept_groups, self.num_groups)

    def fits(self, num_experts: int) -> bool:
        """Return True if it can choose among so many."""
        members = num_experts // self.num_groups
        least = 2 if self.num_groups > 1 and self.group_score == GROUP_SCORES[1] else 1
        return (
            num_experts % self.num_groups == 0
            and members >= least
            and 1 <= self.top_k <= self.kept_groups * members
        )
