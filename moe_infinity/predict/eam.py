"""The Expert Activation Matrix: the number of tokens of one request that each expert served.

Prefill and decode are counted apart (arXiv 2401.14361v3 §4.3): a prompt touches nearly every expert
and would drown the sparse pattern that decoding repeats. It has a row for
each MoE layer. For n tokens and top-k routing every row sums to n * k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_infinity.experts import Ints, Phase


@dataclass(frozen=True, slots=True)
class RequestEam:
    """The two matrices of one request, each [MoE layers, experts]."""

    prefill: Ints
    decode: Ints

    def of(self, phase: Phase) -> Ints:
        return self.prefill if phase is Phase.PREFILL else self.decode


class BatchEam:
    """The matrices of all sequences of a batch, kept together so that one step adds to all of them
    at once.
    """

    def __init__(self, num_sequences: int, num_layers: int, num_experts: int) -> None:
        shape = (num_sequences, num_layers, num_experts)
        self._counts = {phase: np.zeros(shape, dtype=np.int64) for phase in Phase}
        self.num_sequences = num_sequences

    def begin(self, begins_B: NDArray[np.bool_]) -> None:
        """New requests take the place of these sequences. The old matrices are left as they are."""
        for phase, counts in self._counts.items():
            self._counts[phase] = np.where(begins_B[:, None, None], 0, counts)

    def add(
        self, phase: Phase, moe_layer_idx: int, sequence_of_token_T: Ints, experts_TK: Ints
    ) -> None:
        """Count T tokens of one layer: token t belongs to a sequence of the batch and was routed to
        experts_TK[t].
        """
        cells = (sequence_of_token_T[:, None], moe_layer_idx, experts_TK)
        np.add.at(self._counts[phase], cells, 1)  # type: ignore[arg-type]  # its stubs forbid tuples

    def requests(self) -> list[RequestEam]:
        """One pair of matrices per sequence. Views: they go on counting while the batch runs."""
        prefill = self._counts[Phase.PREFILL]
        decode = self._counts[Phase.DECODE]
        return [RequestEam(p, d) for p, d in zip(prefill, decode, strict=True)]
