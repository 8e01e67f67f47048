"""The Expert Activation Matrix: the number of tokens of one request that each expert served.

Prefill and decode are counted apart (arXiv 2401.14361v3 §4.3): a prompt activates nearly every
expert, while decoding repeats a few. A matrix has a row for each MoE layer. For n tokens and top-k
routing every row sums to n * k.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_infinity.experts import Ints, Phase


@dataclass(frozen=True, slots=True)
class RequestEam:
    """The two matrices of one request, each [MoE layers, experts]."""

    prefill: Ints
    decode: Ints

    def of(self, phase: Phase) -> Ints:
        return self.prefill if phase is Phase.PREFILL else self.decode
