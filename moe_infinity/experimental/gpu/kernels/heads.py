"""How queries and keys are made of products, described for kernels: norms of heads and rotary
positions.
"""

from __future__ import annotations

from typing import NamedTuple

# Which two columns of a head are rotated together, and where the results are put.
HALVES = "halves"  # columns i and i + rotated / 2
NEIGHBOURS = "neighbours"  # columns 2i and 2i + 1
APART = "neighbours, put in halves"
PAIRS = (HALVES, NEIGHBOURS, APART)


class Heads(NamedTuple):
    """All numbers are known when a kernel is compiled."""

    num_heads: int  # of queries
    num_groups: int  # heads of keys
    query_width: int
    key_width: int
    rotated: int  # the last columns of a query and of a key from first_rotated on; others stay
    first_rotated: int  # column of a query
    first_rotated_key: int  # column of a key
    pairs: str
    norm_form: str | None = None  # one of norms_reference.py's FORMS, of those that have a weight
    query_eps: float = 0.0
    key_eps: float = 0.0
    norms_all: bool = False  # all heads of a token together, not each on its own
    normed_key: int = 0  # so many columns of a key have a norm, the first ones; 0: all
